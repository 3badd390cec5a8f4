"""Facts of a run's optimizers: which layers each trains, at what rate, and with what settings.

A run has one optimizer or several, and groups may be added to them later. A recording keeps classes and settings, so
that a fit can refuse what training would refuse.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gradlab.ddp.averaged import listed
from gradlab.errors import GradlabError
from gradlab.jsonable import Jsonable

# What a parameter group holds beside the settings of the method: the rate changes, the others change no result.
_NO_SETTINGS = {"params", "param_names", "lr", "initial_lr", "foreach", "fused", "capturable", "differentiable"}


@dataclass(frozen=True)
class OptimizerSettings(Jsonable):
    """An optimizer without its parameters, as a recording has it.

    name: name of its class, such as "AdamW".
    groups: settings of the parameter groups as plain JSON. Groups with the same settings are one.
    layers: names of those that it trains, as far as these are told apart; else empty.
    parts: several optimizers or settings, each with its layers. Then `name` and `groups` join theirs.
    """

    name: str
    groups: tuple[Mapping[str, Any], ...]
    layers: tuple[str, ...] = ()
    parts: tuple[OptimizerSettings, ...] = ()

    @classmethod
    def joined(cls, parts: Sequence[OptimizerSettings], apart: bool = True) -> OptimizerSettings:
        """Join optimizers into one description; `apart`: with which of them trains which layers."""
        names = dict.fromkeys(part.name for part in parts)
        groups: list[Mapping[str, Any]] = []
        groups += [group for part in parts for group in part.groups if group not in groups]
        return cls(" and ".join(names), tuple(groups), parts=tuple(parts) if apart else ())

    def of_layers(self, layers: Collection[str]) -> tuple[OptimizerSettings, ...]:
        """Return the parts that train any of these layers; without parts, itself."""
        return tuple(one for one in self.parts if not set(layers).isdisjoint(one.layers)) if self.parts else (self,)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON: `layers` and `parts` only where there are any."""
        return {key: value for key, value in super().to_json().items() if value or key in ("name", "groups")}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> OptimizerSettings | None:
        """Return the optimizer of a trace's metadata; None if there is none, or the user described it in words."""
        return cls._read(metadata.get("optimizer"))

    @classmethod
    def _read(cls, value: object) -> OptimizerSettings | None:
        if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
            return None
        groups, layers, parts = (value.get(key, []) for key in ("groups", "layers", "parts"))
        if not all(isinstance(one, list) for one in (value.get("groups"), layers, parts)):
            return None
        if not all(isinstance(group, Mapping) for group in groups) or not all(isinstance(one, str) for one in layers):
            return None
        read = [cls._read(part) if isinstance(part, Mapping) and "parts" not in part else None for part in parts]
        if None in read:
            return None
        return cls(value["name"], tuple(groups), tuple(layers), tuple(part for part in read if part))

    @property
    def momentum(self) -> str | None:
        """The setting by which it keeps momentum, with its value; None: it keeps none."""
        return _momentum(self.groups)

    @property
    def weight_decay(self) -> str | None:
        """The setting by which it applies weight decay, with its value; None: it applies none."""
        return _weight_decay(self.groups)

    @property
    def adaptive(self) -> bool:
        """Whether it is of Adam's or Muon's kind: steps are no multiple of its momentum, which a plan's cannot replace,
        and weight decay never passes through it."""
        return "Muon" in self.name or any("betas" in group for group in self.groups)

    def __str__(self) -> str:
        if len({part.name for part in self.parts}) > 1:
            return ", ".join(f"{part} of {len(part.layers)} layers" for part in self._by_name())
        settings = [text for text in (self.momentum, self.weight_decay) if text]
        return f"{self.name} ({', '.join(settings)})" if settings else self.name

    def _by_name(self) -> list[OptimizerSettings]:
        """The parts, those of one class as one."""
        kinds = {part.name: [one for one in self.parts if one.name == part.name] for part in self.parts}
        return [
            replace(self.joined(alike, apart=False), layers=tuple(name for one in alike for name in one.layers))
            for alike in kinds.values()
        ]


def all_optimizers(given: object) -> tuple[torch.optim.Optimizer, ...]:
    """Return each optimizer of a run once, in the order given: one, an iterable, the values of a dict, or None for
    none. A framework's wrapper around one is taken off."""
    if given is None:
        return ()
    if hasattr(given, "param_groups"):
        return (bare_optimizer(given),)
    expected = "expected a torch optimizer, or a list of them"
    if isinstance(given, (str, bytes, torch.nn.Module)) or not isinstance(given, Iterable):
        raise GradlabError(f"optimizer is {type(given).__name__}, {expected}")
    several = list(given.values() if isinstance(given, Mapping) else given)
    for number, one in enumerate(several):
        if not hasattr(one, "param_groups"):
            raise GradlabError(f"optimizer[{number}] is {type(one).__name__}, {expected}")
    return tuple({id(one): one for one in map(bare_optimizer, several)}.values())


def check_optimizer_and_scaler(optimizer: object, scaler: object) -> None:
    """Refuse what is no optimizer, and what is no loss scaler; None is accepted for either."""
    all_optimizers(optimizer)
    if scaler is not None and not (hasattr(scaler, "get_scale") and hasattr(scaler, "is_enabled")):
        raise GradlabError(f"scaler is {type(scaler).__name__}, expected a GradScaler")


def _setting(name: str, value: Any) -> Any:
    """A parameter group's setting as plain JSON; None for the rate, and for what is no number, word or list."""
    return None if name in _NO_SETTINGS else _plain(value)


def _plain(value: Any) -> Any:
    """A setting as plain JSON; None for what is no number, word, or list of numbers."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, (tuple, list)):
        items = [_plain(item) for item in value]
        return None if None in items else items
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, (bool, int, str)) else None


def bare_optimizer(optimizer: Any) -> Any:
    """Return the innermost optimizer in what a framework has wrapped, as Accelerate and Lightning do, or None."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def _kind_of(optimizer: torch.optim.Optimizer) -> type:
    """The class whose step an optimizer takes: the one inside of a ZeroRedundancyOptimizer."""
    inside = getattr(optimizer, "optim", None)
    return type(inside) if isinstance(inside, torch.optim.Optimizer) else type(optimizer)


def _momentum(groups: Iterable[Mapping[str, Any]]) -> str | None:
    for group in groups:
        if group.get("momentum"):
            return f"momentum = {group['momentum']}"
        if group.get("betas") and group["betas"][0]:
            return f"betas = {tuple(group['betas'])}"
    return None


def _weight_decay(groups: Iterable[Mapping[str, Any]]) -> str | None:
    rates = (group.get("weight_decay") for group in groups)
    return next((f"weight_decay = {rate}" for rate in rates if rate), None)


class HeldLayers:
    """The layers of a model, by the optimizers that train them. Without names all groups count.

    optimizers: optimizers of the run, each once.
    missing: the layers that none of them holds, in the model's order.

    Raises:
        GradlabError: if two optimizers hold the same layer.
    """

    def __init__(self, given: object, names: Mapping[torch.Tensor, str] | None = None) -> None:
        self.optimizers = all_optimizers(given)
        self.missing: tuple[str, ...] = ()
        self._names = names or {}
        self._order = {name: at for at, name in enumerate(self._names.values())}
        self._sizes: list[int] | None = None
        self._places: list[tuple[torch.optim.Optimizer, int, tuple[str, ...]]] = []
        self.look()

    @property
    def total(self) -> int:
        """The number of layers."""
        return len(self._names)

    @property
    def holding(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers that hold some layer; all of them if none does."""
        return tuple({id(one): one for one, _, _ in self._places}.values()) or self.optimizers

    @property
    def partial(self) -> bool:
        """Whether some layers are held, and others are not."""
        return bool(self._places and self.missing)

    def look(self) -> bool:
        """Look at the parameter groups again, if their number or sizes have changed; return whether they have."""
        sizes = [len(group["params"]) for one in self.optimizers for group in one.param_groups]
        if sizes == self._sizes:
            return False
        self._sizes, self._places, held = sizes, [], dict[str, torch.optim.Optimizer]()
        for one in self.optimizers:
            for at, group in enumerate(one.param_groups):
                if layers := [self._names[p] for p in group["params"] if p in self._names]:
                    layers.sort(key=self._order.__getitem__)
                    if twice := [name for name in layers if name in held]:
                        kinds = f"{_kind_of(held[twice[0]]).__name__} and {_kind_of(one).__name__}"
                        raise GradlabError(f"{kinds} both hold {listed(twice)}: give each parameter to one optimizer")
                    self._places.append((one, at, tuple(layers)))
                    held |= dict.fromkeys(layers, one)
        self.missing = tuple(name for name in self._names.values() if name not in held)
        return True

    def rates(self) -> dict[str, float]:
        """Return the learning rates by layer name, 0 for a layer that no optimizer holds, as it does not move. Nothing
        is known where no layer is held."""
        rates = dict.fromkeys(self.missing, 0.0) if self._places else {}
        for one, at, layers in self._places:  # by place: `load_state_dict` makes new groups
            rates.update(dict.fromkeys(layers, float(one.param_groups[at]["lr"])))
        return rates

    def first_rate(self) -> float:
        """Return the learning rate of the model's first layer that is held, else of the first group."""
        self.look()
        place = min(self._places, key=lambda place: self._order[place[2][0]], default=None)
        optimizer, at, _ = place or (self.optimizers[0], 0, ())
        return float(optimizer.param_groups[at]["lr"])

    def settings(self) -> OptimizerSettings | None:
        """Describe the optimizers that hold layers, or all of them if none does; None without an optimizer."""
        parts: list[OptimizerSettings] = []
        for one, group, layers in self._groups():
            name = _kind_of(one).__name__
            settings = {key: _setting(key, value) for key, value in group.items()}
            groups = ({key: value for key, value in settings.items() if value is not None},)
            same = next((part for part in parts if (part.name, part.groups) == (name, groups)), None)
            if same is None:
                parts.append(OptimizerSettings(name, groups, layers))
            else:
                parts[parts.index(same)] = OptimizerSettings(name, groups, same.layers + layers)
        if not parts:  # optimizers without groups
            names = list(dict.fromkeys(_kind_of(one).__name__ for one in self.optimizers))
            return OptimizerSettings(" and ".join(names), ()) if names else None
        return OptimizerSettings.joined(parts, apart=bool(self._places) and bool(self.missing or len(parts) > 1))

    def plain_sgd(self, layers: Collection[str] = ()) -> bool:
        """Return whether torch.optim.SGD without momentum trains the layers, or all groups where none of these is held:
        the step is -eta times the gradient. False where no layer is held."""
        groups = list(self._groups())
        concerned = [one for one in groups if not set(layers).isdisjoint(one[2])] or groups
        known = bool(self._places) or not self._names
        return (
            known
            and bool(concerned)
            and all(issubclass(_kind_of(one), torch.optim.SGD) for one, _, _ in concerned)
            and not any(group.get("momentum") for _, group, _ in concerned)
        )

    def taken_by(self, optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
        """Return the missing layers that an optimizer holds, which none of the given ones does."""
        if any(optimizer is one for one in self.optimizers):
            return ()
        missing = set(self.missing)
        taken = [p for group in optimizer.param_groups for p in group["params"] if self._names.get(p) in missing]
        ours = (
            {id(p) for one in self.optimizers for group in one.param_groups for p in group["params"]} if taken else ()
        )
        return tuple(self._names[p] for p in taken if id(p) not in ours)

    def refuse_other(self, optimizer: torch.optim.Optimizer, *arguments: object) -> None:
        """Refuse a step, by an optimizer that was not given, of a layer that none of the given ones holds."""
        if self.missing and (taken := self.taken_by(optimizer)):
            raise GradlabError(
                f"{type(optimizer).__name__} was not given to gradlab and trains {', '.join(taken[:3])}: give all "
                "optimizers that train the model: optimizer=[a, b]"
            )

    def also_held_by(self) -> tuple[str, ...]:
        """Return class names of live optimizers of this process that were not given and hold a missing layer. They are
        looked for among all live objects, which takes a moment."""
        wanted = {id(parameter) for parameter, name in self._names.items() if name in set(self.missing)}
        gc.collect()
        found = []
        for one in gc.get_objects():
            if issubclass(type(one), torch.optim.Optimizer):
                groups: list[dict[str, Any]] = getattr(one, "param_groups", [])
                if any(id(p) in wanted for group in groups for p in group["params"]):
                    found.append(type(one).__name__)
        return tuple(sorted(set(found)))

    def named_missing(self, among: Collection[str] | None = None) -> str:
        """Name a few of the missing layers, and count the rest."""
        return listed([name for name in self.missing if among is None or name in among])

    def _groups(self) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any], tuple[str, ...]]]:
        """Groups that hold layers with these; if none does, all groups."""
        if self._places:
            yield from ((one, one.param_groups[at], layers) for one, at, layers in self._places)
        else:
            yield from ((one, group, ()) for one in self.optimizers for group in one.param_groups)


def describe_optimizer(given: object) -> OptimizerSettings | None:
    """Describe optimizers without looking at what they hold; see `HeldLayers.settings` and `all_optimizers`."""
    return HeldLayers(given).settings()


def saved_states(optimizers: Sequence[torch.optim.Optimizer]) -> Any:
    """Return the state dict of one optimizer, or the list of those of several."""
    states = [one.state_dict() for one in optimizers]
    return states[0] if len(states) == 1 else states


def load_states(optimizers: Sequence[torch.optim.Optimizer], saved: Any) -> None:
    """Load the result of `saved_states` into as many optimizers."""
    states = saved if isinstance(saved, (list, tuple)) else [saved]
    if len(states) != len(optimizers):
        raise GradlabError(f"checkpoint: of {len(states)} optimizers, this run has {len(optimizers)}")
    for one, state in zip(optimizers, states, strict=True):
        one.load_state_dict(state)
