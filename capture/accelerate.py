"""Accelerate: record the gradients of a prepared model."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from gradlab.capture.recorder import TraceRecorder
from gradlab.capture.start import attached_by
from gradlab.ddp.model import ddp_of_accelerate
from gradlab.lazy import needing

with needing(__name__, "Accelerate"):
    from accelerate import Accelerator


def record(
    accelerator: Accelerator,
    model: nn.Module,
    path: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    **options: Any,
) -> TraceRecorder:
    """Record the gradients of a prepared model from now on.

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        with record(accelerator, model, "trace", optimizer) as recorder:
            ...

    Args:
        accelerator: the one that prepared the model.
        model: result of `accelerator.prepare`, compiled or not.
        path: folder of the trace, new or empty.
        optimizer: one or several, as `accelerator.prepare` returned them.
        options: those of TraceRecorder. The loss scaler is the accelerator's.

    Returns:
        The recorder. Close it when training ends.

    Raises:
        GradlabError: if the model was not wrapped in DistributedDataParallel. See also TraceRecorder.
    """
    options = {"optimizer": optimizer, "scaler": accelerator.scaler, **attached_by("accelerate", options)}
    return TraceRecorder(ddp_of_accelerate(accelerator, model, "record"), path, **options)
