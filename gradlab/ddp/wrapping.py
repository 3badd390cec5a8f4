"""Find the DistributedDataParallel model in what a user hands over, or say by its name why there is none.

Hooks of communication exist in torch's DistributedDataParallel (DDP) as gradlab needs them: they see every gradient
whole, before it is averaged. Other ways to train on several devices are told apart by the names of their classes, so
that none of them has to be imported, or installed.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradlab.errors import GradlabError

_COMPILED = "_orig_mod"  # where torch.compile keeps the module that it wraps

_SHARDED = (
    "it shards parameters, so that no hook sees a whole gradient; if each rank can hold the model, wrap it in "
    "DistributedDataParallel instead (ZeroRedundancyOptimizer shards the optimizer's state there)"
)
# What a class is, and what to do instead: by the class's name, and how its module's name begins.
_OTHERS = (
    ("FullyShardedDataParallel", "torch.distributed", "FSDP (FullyShardedDataParallel)", _SHARDED),
    (
        "FSDPModule",
        "torch.distributed",
        "FSDP2 (fully_shard)",
        "it shards parameters, so that no hook sees a whole gradient; gradlab.runtime.compress_fsdp compresses between "
        "nodes there, and TraceRecorder(model, path, between=) records what travels between them",
    ),
    (
        "DeepSpeedEngine",
        "deepspeed",
        "DeepSpeed (DeepSpeedEngine)",
        "it averages gradients itself; wrap the bare model in DistributedDataParallel instead of deepspeed.initialize "
        "(ZeroRedundancyOptimizer shards the optimizer's state as ZeRO's stage 1 does)",
    ),
    (
        "DataParallel",
        "torch.nn",
        "DataParallel",
        "it is one process, in which ranks exchange nothing; start one process per device with torchrun, and wrap "
        "the bare model in DistributedDataParallel",
    ),
)
_PLAIN = (
    "wrap it first: torch.nn.parallel.DistributedDataParallel(model), in processes that torchrun started and after "
    "torch.distributed.init_process_group"
)


def require_ddp(model: object, caller: str = "", instead: str = _PLAIN) -> DistributedDataParallel:
    """Return the DDP model in what a user handed over, without torch.compile's wrapper; modules inside it may be
    compiled. The error names the object, and `instead` says what to do with a model that nothing has wrapped."""
    inner, front = without_compile(model), caller and f"{caller}: "
    if other := _other_wrapper(inner):
        name, advice = other
        raise GradlabError(f"{front}the model is in {name}, not in DDP: {advice}")
    if isinstance(inner, DistributedDataParallel):
        return inner
    if not isinstance(inner, nn.Module):
        raise GradlabError(f"{front}got a {_title(inner)}, expected a DistributedDataParallel model")
    wrapped = next((name for name, part in inner.named_modules() if isinstance(part, DistributedDataParallel)), None)
    if wrapped is not None:
        instead = f"give the DistributedDataParallel model in it, which is {wrapped!r}"
    raise GradlabError(f"{front}got a {_title(inner)}, not in DDP; {instead}")


def without_compile(model: object) -> object:
    """Return the module inside torch.compile's wrapper, whose parts may be compiled; any other object as it is."""
    while isinstance(model, nn.Module) and isinstance(inside := model._modules.get(_COMPILED), nn.Module):
        model = inside
    return model


def bare_module(model: nn.Module) -> nn.Module:
    """Return the user's own module, without the wrappers of DDP and torch.compile around it; its parts may be
    compiled."""
    while True:
        inner = without_compile(model)
        assert isinstance(inner, nn.Module)
        if not isinstance(inner, DistributedDataParallel):
            return inner
        model = inner.module


def _other_wrapper(model: object) -> tuple[str, str] | None:
    """Return the other way of parallel training that a model, or a part of it, is in; and what to do instead."""
    for part in model.modules() if isinstance(model, nn.Module) else (model,):
        for kind in type(part).__mro__:
            for name, module, title, instead in _OTHERS:
                if kind.__name__ == name and kind.__module__.startswith(module):
                    return title, instead
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    if any(kind.__name__ == "DTensor" for parameter in parameters for kind in type(parameter.data).__mro__):
        return "tensor parallelism (its parameters are DTensors)", _SHARDED
    return None


def _title(value: object) -> str:
    """The name of a value's class; with its module where the class is another DistributedDataParallel."""
    kind = type(value)
    same = kind.__name__ == DistributedDataParallel.__name__
    return f"{kind.__module__}.{kind.__name__}" if same else kind.__name__
