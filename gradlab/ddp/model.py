"""Facts of a DistributedDataParallel model: the layers it synchronises, and whether it has a hook."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradlab.errors import GradlabError
from gradlab.layout import Layer, named_layers


def synchronised_layers(model: DistributedDataParallel) -> list[tuple[Layer, nn.Parameter]]:
    """List the trainable layers that DDP averages, with their parameters, in registration order. DDP may be set to skip
    some."""
    ignored, modules = model.parameters_to_ignore, model.module.named_modules()
    # DDP writes "<module>.<parameter>" even where the module is the model itself and has no name.
    named = ((f"{name}.{own}", p) for name, part in modules for own, p in part.named_parameters(recurse=False))
    kept = {id(parameter) for name, parameter in named if name not in ignored}
    return [pair for pair in named_layers(model.module) if id(pair[1]) in kept]


def sparse_layers(model: DistributedDataParallel) -> list[str]:
    """Return names of the trainable layers whose gradients DDP expects to be sparse: embeddings with sparse=True."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    weights = {id(m.weight) for m in model.module.modules() if isinstance(m, kinds) and m.sparse}
    return [layer.name for layer, parameter in synchronised_layers(model) if id(parameter) in weights]


def refuse_complex(pairs: Iterable[tuple[Layer, torch.Tensor]]) -> None:
    """Refuse layers of complex numbers: codecs, and traces, take real ones alone."""
    if names := [layer.name for layer, parameter in pairs if parameter.is_complex()]:
        raise GradlabError(
            f"{', '.join(names[:3])}: complex parameters, and gradients of real ones alone can be recorded or "
            "compressed; leave these layers dense (roles=, minimum_numel=) or unrecorded (layers=)"
        )


def divides_by_inputs(model: DistributedDataParallel) -> bool:
    """Return whether DDP divides by the ranks that have input left: `join(divide_by_initial_world_size=False)`."""
    return model._join_config.enable and not model._divide_by_initial_world_size


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


def is_sharded(model: object) -> bool:
    """Return whether `fully_shard` was called on a module, or on a part of it, and DDP is not around it."""
    parts = model.modules() if isinstance(model, nn.Module) and not isinstance(model, DistributedDataParallel) else ()
    return any(kind.__name__ == "FSDPModule" for part in parts for kind in type(part).__mro__)


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


_LAUNCH = "launch two or more processes: torchrun --nproc-per-node 2 SCRIPT, or accelerate launch --num_processes 2"


def ddp_of_accelerate(accelerator: Any, model: object, caller: str) -> DistributedDataParallel:
    """Find the DDP model that `accelerator.prepare` made, also inside of a compiled one."""
    front = f"{caller}, {accelerator.num_processes} process(es)"
    return require_ddp(model, front, "prepare it first, and launch two or more processes")


def ddp_of_trainer(trainer: Any, caller: str) -> DistributedDataParallel:
    """Find the DDP model of a Hugging Face Trainer that has begun to train, also inside of a compiled one."""
    front = f"{caller}, {trainer.accelerator.num_processes} process(es)"
    return require_ddp(trainer.model_wrapped, front, _LAUNCH)


def ddp_of_lightning(trainer: Any, caller: str) -> DistributedDataParallel:
    """Find the DDP model of a Lightning Trainer whose strategy is set up, with no communication hook of its own."""
    strategy = trainer.strategy
    front = f"{caller}, strategy {type(strategy).__name__}"
    model = require_ddp(strategy.model, front, "use Trainer(strategy='ddp')")
    if getattr(strategy, "_ddp_comm_hook", None) is not None:  # on a CPU Lightning does not register it
        raise GradlabError(f"{caller}: DDPStrategy has a ddp_comm_hook, and DDP takes one only; leave it out")
    return model


def wrap_again(trainer: Any) -> None:
    """Have a Hugging Face Trainer wrap its model anew in its next `train`: DDP never gives a communication hook
    back."""
    if isinstance(without_compile(trainer.model_wrapped), DistributedDataParallel):
        trainer.model_wrapped = trainer.model
