"""Recording lines in a run that `gradlab pilot` has started: train on the trial's plan, and record nothing."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from gradlab.capture.writing.async_writer import NoWriter


def train_in_trial(
    model: nn.Module, path: str | os.PathLike[str], within: Any, between: Any, optimizer: Any, scaler: Any
) -> NoWriter:
    """Let the trial's plan average a model's gradients (with `between`, FSDP2's shards); the writer writes nothing."""
    from gradlab import compress

    nodes = {name: value for name, value in {"within": within, "between": between}.items() if value is not None}
    compress(model, path, optimizer=optimizer, scaler=scaler, **nodes)
    return NoWriter(str(path))
