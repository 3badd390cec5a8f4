"""The hook itself, in a file that evaluates annotations: DDP compares them with the classes, not with their names."""

import importlib
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradlab.ddp.copies import Detached
from gradlab.ddp.model import is_sharded, require_ddp
from gradlab.ddp.switch import register
from gradlab.errors import GradlabError
from gradlab.plan import Plan
from gradlab.runtime.state import CompressionState


def compression_hook(state: CompressionState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket by a plan: the hook for `DistributedDataParallel.register_comm_hook`.

    Args:
        state: state that the hook was registered with.
        bucket: DDP's.

    Returns:
        A future of the bucket's buffer, averaged.

    Raises:
        GradlabError: if it was registered with anything but a CompressionState, a copy of one among it.
    """
    if not isinstance(state, (CompressionState, Detached)):
        raise GradlabError(f"compression_hook needs a CompressionState, it was registered with {type(state).__name__}")
    return state.submit(bucket)


def compress(
    model: Any,
    plan: Plan | str | os.PathLike[str],
    *,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    scaler: Any = None,
    **options: Any,
) -> Any:
    """Compress what a model's ranks exchange from now on, in the way that belongs to what is given.

    Below is a model in DDP: a `CompressionState` is made and its hook registered. A model under FSDP2 gets what
    `compress_fsdp` makes, and a bare model takes `every` for local steps (`OuterStep`). The Trainer of transformers or
    Lightning gets the callback that compresses, with `every` the one that takes local steps.

        with gradlab.compress(ddp_model, "plan.safetensors", optimizer=optimizer) as state:
            for inputs, targets in batches:
                optimizer.zero_grad()
                criterion(ddp_model(inputs), targets).backward()
                optimizer.step()

    All ranks call it together, and gradients are compressed from the call on. Without `with` the state lasts until
    `state.close()` or the end of the process. `with` closes it after the loop, and tells the other ranks the reason if
    this one fails: take it where the process goes on, as in a notebook or before another run.

    After the state is closed the DDP model refuses further synchronised backward passes: DDP cannot give a hook back,
    so training on without compression takes a new DDP model.

    >>> from gradlab import compress
    >>> ddp_model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 32))
    >>> with compress(ddp_model, Plan.uniform(ddp_model, "topk", density=0.01)) as state:
    ...     ddp_model(torch.ones(8, 64)).square().sum().backward()
    >>> state.iteration
    1

    Args:
        model: the DistributedDataParallel model, or what torch.compile made of it; or one of the others above.
        plan: plan of the model's trainable parameters, or the path of an artifact.
        optimizer: one or several, all that train the model; see `Exchange`.
        scaler: the torch.amp.GradScaler, if one is in use.
        options: the others of `CompressionState`, `compress_fsdp`, `OuterStep` or the callback.

    Returns:
        The state, registered: a `CompressionState`, an `FSDPCompression` or an `OuterStep`. Close it when training
        ends. For a Trainer its callback, which closes its state itself.

    Raises:
        GradlabError: for a model that is not in DDP (by the name of what it is in, with what to do instead), or has a
            communication hook already; for a plan that is none, or for another model. See `CompressionState`.
    """
    given = {"optimizer": optimizer, "scaler": scaler}
    options |= {name: value for name, value in given.items() if value is not None}
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(model).__mro__}
    if ("transformers", "Trainer") in kinds:
        return _with_callback("transformers", plan, options, model.add_callback, trainer=model)
    if kinds & {("lightning", "Trainer"), ("pytorch_lightning", "Trainer")}:
        return _with_callback("lightning", plan, options, model.callbacks.append)
    return _attached(model, plan, options)


def _attached(model: nn.Module, plan: Plan | str | os.PathLike[str], options: dict[str, Any]) -> Any:
    if "every" in options:
        from gradlab.runtime.outer.step import OuterStep

        return OuterStep(plan, model, **options)  # type: ignore[arg-type]  # a path is taken as text is
    if "between" in options or is_sharded(model):
        from gradlab.runtime.fsdp.state import compress_fsdp

        return compress_fsdp(model, plan, **options)
    return attach(model, plan, **options)


def _with_callback(
    framework: str,
    plan: Plan | str | os.PathLike[str],
    options: dict[str, Any],
    add: Callable[[Any], object],
    **own: Any,
) -> Any:
    """Give a Trainer the framework's callback, that of local steps if there are any, and return it."""
    module = importlib.import_module(f"gradlab.runtime.{framework}")
    callback = (module.LocalStepsCallback if "every" in options else module.CompressionCallback)(plan, **own, **options)
    add(callback)
    return callback


def attach(ddp_model: nn.Module, plan: Plan | str | os.PathLike[str], **options: Any) -> CompressionState:
    """Do as `compress` does for a model in DDP."""
    model = require_ddp(ddp_model, "compress")
    state = CompressionState(plan, model, **options)
    register(model, state, compression_hook)
    return state
