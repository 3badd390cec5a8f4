"""What recording lines do in a run that `gradlab pilot` has started: train on the trial's plan, and record nothing."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from gradlab.capture.writing.async_writer import NoWriter
from gradlab.errors import GradlabError


def train_in_trial(
    model: nn.Module, path: str | os.PathLike[str], within: Any, between: Any, optimizer: Any, scaler: Any
) -> NoWriter:
    """Let the trial's plan average a model's gradients.

    Args:
        model: in DDP.
        path: of the trace that would have been recorded.
        within, between, optimizer, scaler: as `TraceRecorder` takes them.

    Returns:
        A writer that writes nothing.

    Raises:
        GradlabError: for a model under FSDP2, and whatever `gradlab.compress` refuses.
    """
    from gradlab import compress

    if between is not None:
        raise GradlabError(
            "gradlab pilot: TraceRecorder cannot try plans under FSDP2; give the script the line "
            "gradlab.runtime.compress_fsdp(model, plan, between=...) in its place"
        )
    compress(model, path, optimizer=optimizer, scaler=scaler, **({} if within is None else {"within": within}))
    return NoWriter(str(path))
