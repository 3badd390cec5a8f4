"""Checks of emulated ranks (nodes) before anything is written."""

from __future__ import annotations

import os
import resource
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradlab.capture.settings import StepSettings, check_metadata, optimizer_metadata, run_metadata, warn_of_missing
from gradlab.ddp.optimizers import HeldLayers
from gradlab.errors import GradlabError
from gradlab.trace.schema import block_steps

_FILES_PER_NODE, _OTHER_FILES = 2, 64  # a segment and a lock; other files that the process may have open


def check_model(model: nn.Module) -> None:
    """Raise GradlabError for a model whose ranks cannot be emulated."""
    if not isinstance(model, nn.Module):
        raise GradlabError(f"emulating nodes needs a torch.nn.Module, got a {type(model).__name__}")
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            raise GradlabError("the model is in DistributedDataParallel; give its bare module: nodes are emulated here")
        if isinstance(module, nn.SyncBatchNorm):
            raise GradlabError("SyncBatchNorm needs all ranks' batches at once; emulated nodes have BatchNorm only")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise GradlabError(f"{name} has no shape yet (a lazy module); make one forward pass first")


def check_numbers(world_size: int, seed: int) -> None:
    """Refuse a number of nodes or a seed that is out of range. Node r draws from seed + r."""
    if type(world_size) is not int or world_size < 1:
        raise GradlabError(f"world_size is {world_size!r}, expected a whole number of at least 1")
    if type(seed) is not int or not 0 <= seed < 2**63 - world_size:
        raise GradlabError(f"seed is {seed!r}, expected a whole number from 0 to 2^63 - 1 - world_size")


def require_room(world_size: int, row_bytes: int, most_steps: int | None) -> None:
    """Raise GradlabError if a run would be killed before its first block is full: too little memory, or open files.

    row_bytes: bytes of one step's gradients of one node, as stored.
    """
    steps = block_steps(row_bytes, most_steps)
    needed = world_size * steps * row_bytes
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise GradlabError(
            f"{world_size} nodes keep {steps} steps of {row_bytes / 1e6:.1f} MB each in memory, "
            f"{needed / 1e9:.1f} GB; this machine has {memory / 1e9:.1f} GB: record fewer layers, or in bfloat16, or "
            "within a budget"
        )
    files, limit = _FILES_PER_NODE * world_size + _OTHER_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY and files > limit:
        raise GradlabError(
            f"{world_size} nodes keep about {files} files open, and this process may open {limit}; "
            f"raise the limit: ulimit -n {files}"
        )


def emulated_metadata(
    model: nn.Module,
    settings: StepSettings,
    metadata: dict[str, Any] | None,
    held: HeldLayers,
) -> dict[str, Any]:
    """Collect the manifest's metadata of the run, in plain JSON; the user's override the others."""
    given = {} if metadata is None else metadata
    check_metadata(given)
    warn_of_missing(held)
    return run_metadata(model, settings) | {"find_unused_parameters": True} | optimizer_metadata(held) | given
