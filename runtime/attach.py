"""Attach a plan to a DDP model, in one call."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from gradlab.ddp.wrapping import require_ddp
from gradlab.errors import GradlabError
from gradlab.plan import Plan
from gradlab.runtime.exchange import Exchange
from gradlab.runtime.hook import compression_hook
from gradlab.runtime.pilot.switch import switch_of
from gradlab.runtime.state import CompressionState


def compress(
    ddp_model: nn.Module,
    plan: Plan | str | os.PathLike[str],
    *,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    scaler: Any = None,
    **options: Any,
) -> Exchange:
    """Compress a DDP model's gradients from now on: make a `CompressionState` and register the hook.

        with gradlab.compress(ddp_model, "plan.safetensors", optimizer=optimizer) as state:
            for inputs, targets in batches:
                optimizer.zero_grad()
                criterion(ddp_model(inputs), targets).backward()
                optimizer.step()

    All ranks call it together, and gradients are compressed from the call on. Alone, `state = gradlab.compress(...)`
    lasts until `state.close()` or the end of the process, which is enough for a script that trains and exits. `with`
    closes the state after the loop, and tells the other ranks the reason if this one fails: take it where the process
    goes on, as in a notebook or before another run.

    After the state is closed the DDP model refuses further synchronised backward passes: DDP cannot give a hook back,
    so training on without compression takes a new DDP model.

    >>> from gradlab import compress
    >>> ddp_model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 32))
    >>> with compress(ddp_model, Plan.uniform(ddp_model, "topk", density=0.01)) as state:
    ...     ddp_model(torch.ones(8, 64)).square().sum().backward()
    >>> state.iteration
    1

    Args:
        ddp_model: the DistributedDataParallel model, or what torch.compile made of it.
        plan: plan of the model's trainable parameters, or the path of an artifact.
        optimizer: one or several, all that train the model; see `Exchange`.
        scaler: the torch.amp.GradScaler, if one is in use.
        options: the others of `CompressionState`; with `between`, for a model under FSDP2, those of `compress_fsdp`.

    Returns:
        The state, registered: a `CompressionState`, under FSDP2 an `FSDPCompression`. Close it when training ends.

    Raises:
        GradlabError: for a model that is not in DDP (by the name of what it is in, with what to do instead), or has a
            communication hook already; for a plan that is none, or for another model. See `CompressionState`.
    """
    options = {"optimizer": optimizer, "scaler": scaler, **options}
    if "between" in options:
        from gradlab.runtime.fsdp.state import compress_fsdp

        return compress_fsdp(ddp_model, plan, **options)
    return attach(ddp_model, plan, **options)


def attach(ddp_model: nn.Module, plan: Plan | str | os.PathLike[str], **options: Any) -> CompressionState:
    """Do as `compress` does for a model in DDP."""
    model = require_ddp(ddp_model, "compress")
    switch = switch_of(model)
    if switch is not None and switch.state is not None:
        raise GradlabError("the DDP model is compressed already: attach once")
    state = CompressionState.of(plan, model, "compress", **options)
    if switch is None:
        model.register_comm_hook(state, compression_hook)
    else:
        switch.state = state
    return state
