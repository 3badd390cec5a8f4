"""The layers that ranks average: those that needed a gradient when DDP was made, whatever the model trains today.

A layer that is unfrozen, added or replaced later gets no all-reduce: each rank trains it on its own gradient, and ranks
drift apart in silence, with or without a hook. So do layers of another dtype or device, as autograd drops DDP's hook.
Under FSDP2 the same holds for layers that are added after fully_shard.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradlab.ddp.model import divides_by_inputs, synchronised_layers
from gradlab.errors import GradlabError
from gradlab.layout import Layer, named_layers, names_of_parameters

Kind = tuple[torch.dtype, torch.device]
_EVERY = 16  # steps from one look at all parameters to the next, after as many steps with one each


class AveragedLayers:
    """The layers of a model that ranks average, and the trainable ones that they do not. It does not keep the model
    alive.

    sharded: under FSDP2, lists the parameters that its units have, those that it gathers among them.
    """

    def __init__(self, model: nn.Module, sharded: Callable[[], list[torch.Tensor]] | None = None) -> None:
        self._model, self._sharded = weakref.ref(model), sharded
        self._looks = 0
        self._trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        held = _of_reducer(model) if isinstance(model, DistributedDataParallel) else {}
        self._reducer = list(held)
        self._known = {id(one): kind for one, kind in (held or _kinds(_passing_for_it(model))).items()}

    def require(self, pairs: Iterable[tuple[Layer, torch.Tensor]]) -> None:
        """Refuse layers that DDP does not average."""
        if missing := [layer.name for layer, parameter in pairs if not self._has(parameter)]:
            raise GradlabError(not_averaged(missing))

    def refuse_frozen(self) -> None:
        """Refuse a model in which DDP waits for gradients of layers that were frozen after DDP was made."""
        model = self._model()
        assert isinstance(model, DistributedDataParallel)
        if model.find_unused_parameters or model.static_graph:
            return
        names = names_of_parameters(model)
        frozen = [p for p in self._reducer if not p.requires_grad or id(p) not in names]
        if frozen:
            named = listed([names.get(id(p), f"a removed layer {list(p.shape)}") for p in frozen])
            raise GradlabError(
                f"DDP waits for gradients of {named}: frozen or removed after the DDP model was made; freeze layers "
                "first, then make the DDP model (or make it with find_unused_parameters=True)"
            )

    def refuse_thawed(self, parameters: Iterable[torch.Tensor]) -> None:
        """Refuse gradients of layers that no plan knows. Those of a layer that is frozen still are zeros."""
        model = self._model()
        names = {} if model is None else names_of_parameters(model)
        for parameter in parameters:
            if parameter.requires_grad and id(parameter) in names:
                raise GradlabError(
                    f"{names[id(parameter)]} was frozen when compression was attached, and has a gradient now; "
                    "unfreeze layers first, then make the plan and attach"
                )
            if parameter.requires_grad:
                raise GradlabError(
                    f"a bucket holds a layer {list(parameter.shape)} that this state's model does not have; register "
                    "a state with the model that it was made for"
                )

    def refuse_uneven_division(self) -> None:
        """Refuse averages over the ranks that have input left, as compressed gradients are averaged over all."""
        model = self._model()
        if isinstance(model, DistributedDataParallel) and divides_by_inputs(model):
            raise GradlabError(
                "join(divide_by_initial_world_size=False) averages over the ranks that have input left, and compressed "
                "gradients are averaged over all ranks; leave it at True, the default"
            )

    def missing(self) -> list[str]:
        """List the layers that are trained now, and that ranks do not average."""
        model = self._model()
        if self._sharded is not None:
            self._known = {id(one): kind for one, kind in _kinds(self._sharded()).items()}
        if model is None or all(self._has(p) or not p.requires_grad for p in model.parameters()):
            return []
        pairs = synchronised_layers(model) if isinstance(model, DistributedDataParallel) else named_layers(model)
        return [layer.name for layer, parameter in pairs if not self._has(parameter)]

    def thawed(self) -> list[Layer]:
        """List the layers that are trained now, that ranks average, and that were frozen when this object was made."""
        model = self._model()
        if model is None or all(id(p) in self._trained or not p.requires_grad for p in model.parameters()):
            return []
        return [layer for layer, p in named_layers(model) if id(p) not in self._trained and self._has(p)]

    def _has(self, parameter: torch.Tensor) -> bool:
        return self._known.get(id(parameter)) == (parameter.dtype, parameter.device)

    def look(self) -> list[str]:
        """Do as `missing` in each of the first 16 steps, and then in every 16th, as it looks at all parameters."""
        self._looks += 1
        return self.missing() if self.looks else []

    @property
    def looks(self) -> bool:
        """Whether this step is one in which all parameters are looked at."""
        return self._looks <= _EVERY or self._looks % _EVERY == 0


def not_averaged(missing: Sequence[str], made: str = "the DDP model was made", make: str = "make the DDP model") -> str:
    """Return which layers ranks do not average, why, and what to do."""
    return (
        f"{listed(missing)}: unfrozen, added or replaced after {made}, or of another dtype or device since, so that "
        f"ranks do not average it and drift apart; do that first, then {make}"
    )


def _kinds(parameters: Iterable[torch.Tensor]) -> dict[torch.Tensor, Kind]:
    return {parameter: (parameter.dtype, parameter.device) for parameter in parameters}


def listed(names: Sequence[str]) -> str:
    """Name three layers, and count the rest."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more layers" if len(names) > 3 else "")


def _of_reducer(model: DistributedDataParallel) -> dict[torch.Tensor, Kind]:
    """Return the parameters of a reducer, as they were when DDP was made, from the buckets that `join` shows to ranks
    without input; none where it does not show them, as for sparse ones."""
    try:
        buckets = model.reducer._get_zeros_like_grad_buckets()
    except (AttributeError, RuntimeError):
        return {}
    return {
        one: (_dtype(one, bucket.buffer()), bucket.buffer().device) for bucket in buckets for one in bucket.parameters()
    }


def _dtype(parameter: torch.Tensor, buffer: torch.Tensor) -> torch.dtype:
    """Return a parameter's dtype when its bucket was made, which may hold complex numbers as pairs of real ones."""
    of_pairs = parameter.is_complex() and parameter.dtype.to_real() == buffer.dtype
    return parameter.dtype if of_pairs else buffer.dtype


def _passing_for_it(model: nn.Module) -> list[torch.Tensor]:
    """Return a stand-in for a reducer's parameters: those in the model when DDP was made that are trained now."""
    before = getattr(model, "_module_parameters", None) or model.parameters()
    return [parameter for parameter in before if parameter.requires_grad]
