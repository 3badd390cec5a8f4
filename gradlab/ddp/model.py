"""Facts of a DistributedDataParallel model: the layers it synchronises, and whether it has a hook."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradlab.errors import GradlabError
from gradlab.layout import Layer, named_layers

SWITCHED = "switched_hook"  # the hook that a pilot leaves, which takes another state


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


def attached_hook(model: DistributedDataParallel) -> str | None:
    """Return the name of the communication hook that a model has, or None. DDP takes one, and never gives it back."""
    # DDP's logger knows of built-in ones too; a copy keeps the original's list of hooks, and its reducer has none.
    return model._get_ddp_logging_data().get("comm_hook") or None
