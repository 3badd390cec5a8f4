"""Accelerate: compress the gradients of a prepared model.

Accelerate's own DDP settings know PyTorch's built-in hooks only, so the hook is registered on what `prepare` returns.
Objects registered for checkpointing are saved by the main process alone, but every rank has residuals of its own: each
writes a file into the folder that `accelerator.save_state` makes, and reads it in `accelerator.load_state`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradlab.ddp.model import bare_module, ddp_of_accelerate
from gradlab.lazy import needing
from gradlab.plan import Plan
from gradlab.runtime.attach import attach
from gradlab.runtime.saved import RankFiles, check_policy
from gradlab.runtime.state import CompressionState

with needing(__name__, "Accelerate"):
    from accelerate import Accelerator


def compress(
    accelerator: Accelerator,
    model: nn.Module,
    plan: Plan | str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    residuals: str | None = None,
    **options: Any,
) -> CompressionState:
    """Compress the gradients of a prepared model from now on.

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        with compress(accelerator, model, "plan.safetensors", optimizer):
            ...

    `accelerator.save_state` and `load_state` then include every rank's state. To start compressing from a checkpoint
    of a run without compression, load it before this call.

    Args:
        accelerator: the one that prepared the model.
        model: result of `accelerator.prepare`, compiled or not.
        plan: plan of the model's trainable parameters, or the path of an artifact.
        optimizer: one or several, as `accelerator.prepare` returned them.
        residuals: use of the residuals in a checkpoint of another world size: "split", "sum" or "drop", see
            `CompressionState.load_state_dicts`. Every rank then reads the files of all. None refuses such a
            checkpoint.
        options: those of CompressionState. The loss scaler is the accelerator's.

    Returns:
        The state, registered with the model. Close it when training ends.

    Raises:
        GradlabError: if the model was not wrapped in DistributedDataParallel, or has a communication hook already. See
            also CompressionState.
    """
    ddp_model = ddp_of_accelerate(accelerator, model, "compress")
    check_policy(residuals)
    options = {"optimizer": optimizer, "scaler": accelerator.scaler, **options}
    state = attach(ddp_model, plan, **options)
    checkpoint = _Checkpoint(RankFiles(state, ddp_model, residuals), ddp_model)
    accelerator.register_save_state_pre_hook(checkpoint.save)
    accelerator.register_load_state_pre_hook(checkpoint.load)
    return state


class _Checkpoint:
    """The ranks' files in the accelerator's checkpoint folder. Accelerate calls `save` and `load` on all ranks."""

    def __init__(self, files: RankFiles, model: DistributedDataParallel) -> None:
        self._files, self._model = files, model

    def save(self, models: Sequence[nn.Module], weights: Sequence[Any], folder: str) -> None:
        if (stem := self._stem(models)) is not None:
            self._files.save(Path(folder), stem)

    def load(self, models: Sequence[nn.Module], folder: str) -> None:
        missing = "to start from a checkpoint without compression, load it before compress()"
        if (stem := self._stem(models)) is not None:
            self._files.load(Path(folder), stem, missing)

    def _stem(self, models: Sequence[nn.Module]) -> str | None:
        """The files' name; None where the accelerator has let go of the model, as after `free_memory`."""
        # On a CPU Accelerate lists the model as it was before it was wrapped.
        own = bare_module(self._model)
        return next((f"gradlab_{i}" for i, model in enumerate(models) if bare_module(model) is own), None)
