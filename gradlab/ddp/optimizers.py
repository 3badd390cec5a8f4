"""What gradlab reads from an optimizer: its learning rates, and whether it applies momentum or weight decay.

A recording keeps the optimizer's class and settings, so that a fit can refuse what training would refuse.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gradlab.errors import GradlabError
from gradlab.jsonable import Jsonable

# What a parameter group holds beside the settings of the method: the rate changes, the others change no result.
_NO_SETTINGS = {"params", "param_names", "lr", "initial_lr", "foreach", "fused", "capturable", "differentiable"}


@dataclass(frozen=True)
class OptimizerSettings(Jsonable):
    """An optimizer without its parameters: what a recording says of it.

    Attributes:
        name: of its class, such as "AdamW".
        groups: settings of the parameter groups, such as betas and weight_decay, as plain JSON. Groups with the same
            settings are one.
    """

    name: str
    groups: tuple[Mapping[str, Any], ...]

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> OptimizerSettings | None:
        """Read what a recording says of its optimizer.

        Args:
            metadata: of the trace.

        Returns:
            The optimizer; None if the recording does not say, or says it in words of the user's.
        """
        value = metadata.get("optimizer")
        if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
            return None
        groups = value.get("groups")
        if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
            return None
        return cls(value["name"], tuple(groups))

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
        """Whether it is of Adam's kind: its momentum is no setting that a plan's could replace."""
        return any("betas" in group for group in self.groups)

    def __str__(self) -> str:
        settings = [text for text in (self.momentum, self.weight_decay) if text]
        return f"{self.name} ({', '.join(settings)})" if settings else self.name


def all_optimizers(given: object) -> tuple[torch.optim.Optimizer, ...]:
    """Collect the optimizers of a run.

    Args:
        given: one optimizer, several (a list, a tuple, any iterable, the values of a dict), or None. A framework's
            wrapper around one is taken off.

    Returns:
        Each optimizer once, in the order given; empty for None.

    Raises:
        GradlabError: naming what came instead of an optimizer.
    """
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
    """Refuse what is no optimizer, and what is no loss scaler. None is neither, and accepted.

    Raises:
        GradlabError: naming the argument, what came and what was expected.
    """
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise GradlabError(f"optimizer is {type(optimizer).__name__}, expected a torch optimizer")
    if scaler is not None and not (hasattr(scaler, "get_scale") and hasattr(scaler, "is_enabled")):
        raise GradlabError(f"scaler is {type(scaler).__name__}, expected a GradScaler")


def describe_optimizer(optimizer: torch.optim.Optimizer | None) -> OptimizerSettings | None:
    """Describe an optimizer as a recording keeps it.

    Args:
        optimizer: any, or None. A framework's wrapper around one is taken off.

    Returns:
        Its class and settings; None without an optimizer.
    """
    if optimizer is None:
        return None
    optimizer = bare_optimizer(optimizer)
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        settings = {name: _plain(value) for name, value in group.items() if name not in _NO_SETTINGS}
        settings = {name: value for name, value in settings.items() if value is not None}
        if settings not in groups:
            groups.append(settings)
    return OptimizerSettings(type(optimizer).__name__, tuple(groups))


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
    """Return the optimizer that a framework has wrapped, as Accelerate and Lightning do.

    Args:
        optimizer: wrapped or not, or None.

    Returns:
        The innermost one, or None.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def learning_rates(optimizer: torch.optim.Optimizer | None, names: Mapping[torch.Tensor, str]) -> dict[str, float]:
    """Read the optimizer's current learning rates.

    Args:
        optimizer: the run's, or None.
        names: layer names by parameter.

    Returns:
        Rates by layer name; empty without an optimizer.
    """
    groups = optimizer.param_groups if optimizer is not None else []
    return {names[p]: float(group["lr"]) for group in groups for p in group["params"] if p in names}


def own_momentum(optimizer: torch.optim.Optimizer) -> str | None:
    """Find the setting by which an optimizer keeps momentum.

    Args:
        optimizer: any of torch's.

    Returns:
        The setting with its value, such as "momentum = 0.9" or "betas = (0.9, 0.999)"; None: it keeps none.
    """
    return _momentum(optimizer.param_groups)


def _momentum(groups: Iterable[Mapping[str, Any]]) -> str | None:
    for group in groups:
        if group.get("momentum"):
            return f"momentum = {group['momentum']}"
        if group.get("betas") and group["betas"][0]:
            return f"betas = {tuple(group['betas'])}"
    return None


def own_weight_decay(optimizer: torch.optim.Optimizer) -> str | None:
    """Find the setting by which an optimizer applies weight decay.

    Args:
        optimizer: any of torch's.

    Returns:
        The setting with its value, such as "weight_decay = 0.0001"; None: it applies none.
    """
    return _weight_decay(optimizer.param_groups)


def _weight_decay(groups: Iterable[Mapping[str, Any]]) -> str | None:
    rates = (group.get("weight_decay") for group in groups)
    return next((f"weight_decay = {rate}" for rate in rates if rate), None)


def is_plain_sgd(optimizer: torch.optim.Optimizer | None) -> bool:
    """Say whether an optimizer is torch.optim.SGD without momentum, whose step is -eta times the gradient and no more.

    Args:
        optimizer: any, or None.

    Returns:
        False also for None.
    """
    return (
        optimizer is not None
        and isinstance(bare_optimizer(optimizer), torch.optim.SGD)
        and own_momentum(optimizer) is None
    )
