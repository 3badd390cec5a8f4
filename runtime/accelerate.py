"""Accelerate: compress the gradients of a prepared model.

Accelerate's own DDP settings know PyTorch's built-in hooks only, so the hook is registered on what `prepare` returns.
Objects registered for checkpointing are saved by the main process alone, but every rank has residuals of its own: each
writes a file into the folder that `accelerator.save_state` makes, and reads it in `accelerator.load_state`. So nothing
crosses the network, and a checkpoint stays one folder.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradlab.codec.wrapper import POLICIES
from gradlab.ddp.agreement import Ranks
from gradlab.ddp.wrapping import bare_module, require_ddp
from gradlab.errors import GradlabError
from gradlab.files import write_whole
from gradlab.plan import Plan
from gradlab.runtime import attach
from gradlab.runtime.state import CompressionState

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
except ModuleNotFoundError as error:
    if error.name != "accelerate":
        raise
    needed = "gradlab.runtime.accelerate needs Accelerate: pip install 'gradlab[accelerate]'"
    raise ModuleNotFoundError(needed, name=error.name) from None


def compress(
    accelerator: Accelerator,
    plan: Plan | str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    residuals: str | None = None,
    **options: Any,
) -> CompressionState:
    """Compress the gradients of a prepared model from now on.

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        with compress(accelerator, "plan.safetensors", model, optimizer):
            ...

    `accelerator.save_state` and `load_state` then include every rank's state. To start compressing from a checkpoint
    of a run without compression, load it before this call.

    Args:
        accelerator: the one that prepared the model.
        plan: for the model's trainable parameters, or the path of an artifact.
        model: as `accelerator.prepare` returned it.
        optimizer: as `accelerator.prepare` returned it.
        residuals: what becomes of the residuals in a checkpoint of another world size: "split", "sum" or "drop", see
            `CompressionState.load_state_dicts`. Every rank then reads the files of all. None refuses such a
            checkpoint.
        options: those of CompressionState. The loss scaler is the accelerator's.

    Returns:
        The state, registered with the model. Close it when training ends.

    Raises:
        GradlabError: if the model was not wrapped in DistributedDataParallel, or has a communication hook already. See
            also CompressionState.
    """
    ddp_model = require_ddp(
        model,
        f"compress, {accelerator.num_processes} process(es)",
        "prepare it first, and launch two or more processes",
    )
    if residuals not in (None, *POLICIES):
        raise GradlabError(f"residuals = {residuals!r}, expected None or one of {', '.join(POLICIES)}")
    if isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    options = {"optimizer": optimizer, **options}
    if accelerator.scaler is not None:
        options["scaler"] = accelerator.scaler
    state = attach.compress(ddp_model, plan, **options)
    checkpoint = _Checkpoint(state, ddp_model, residuals)
    accelerator.register_save_state_pre_hook(checkpoint.save)
    accelerator.register_load_state_pre_hook(checkpoint.load)
    return state


class _Checkpoint:
    """This rank's file in the accelerator's checkpoint folder. Accelerate calls `save` and `load` on all ranks."""

    def __init__(self, state: CompressionState, model: DistributedDataParallel, residuals: str | None) -> None:
        self._state, self._model, self._residuals = state, model, residuals
        self._ranks = Ranks(model.process_group, next(model.parameters()).device)

    def save(self, models: Sequence[nn.Module], weights: Sequence[Any], folder: str) -> None:
        file = io.BytesIO()
        torch.save(self._state.state_dict(), file)
        write_whole(self._path(models, folder, self._ranks.rank), file.getbuffer())

    def load(self, models: Sequence[nn.Module], folder: str) -> None:
        """Raises GradlabError, on all ranks, if one has no sound file of this plan and rank, or files differ in age."""
        self._ranks.raise_together(self._attempt(models, folder))
        iterations = self._ranks.gather(self._state.iteration)
        if len(set(iterations)) > 1:
            raise GradlabError(f"{folder}: written over, but not by all ranks: it holds states of steps {iterations}")

    def _attempt(self, models: Sequence[nn.Module], folder: str) -> str | None:
        """Load; return the problem, if there is one, for the other ranks."""
        try:
            self._restore(models, folder)
        except FileNotFoundError as error:
            return (
                f"{error.filename}: missing; to start from a checkpoint without compression, load it before compress()"
            )
        except GradlabError as error:
            return f"{folder}: {error}"
        except Exception as error:
            return f"{folder}: a file is damaged, or not this program's: {type(error).__name__}"
        return None

    def _restore(self, models: Sequence[nn.Module], folder: str) -> None:
        def read(rank: int) -> Any:
            return torch.load(self._path(models, folder, rank), map_location="cpu", weights_only=True)

        old_size = self._ranks.size if self._residuals is None else int(read(0)["world_size"])
        if self._residuals is None or old_size == self._ranks.size:
            self._state.load_state_dict(read(self._ranks.rank))
        else:
            self._state.load_state_dicts([read(rank) for rank in range(old_size)], self._residuals)

    def _path(self, models: Sequence[nn.Module], folder: str, rank: int) -> Path:
        # On a CPU Accelerate lists the model as it was before it was wrapped; a compiled one may be in another wrapper.
        own = bare_module(self._model)
        index = next(i for i, model in enumerate(models) if bare_module(model) is own)
        return Path(folder) / f"gradlab_{index}_rank_{rank}.pt"
