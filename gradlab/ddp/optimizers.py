"""What gradlab asks of an optimizer: its rates, and whether it applies momentum or weight decay of its own."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def learning_rates(optimizer: torch.optim.Optimizer | None, names: Mapping[torch.Tensor, str]) -> dict[str, float]:
    """The optimizer's learning rates now, by layer name; empty without an optimizer."""
    groups = optimizer.param_groups if optimizer is not None else []
    return {names[p]: float(group["lr"]) for group in groups for p in group["params"] if p in names}


def own_momentum(optimizer: torch.optim.Optimizer) -> str | None:
    """The setting by which an optimizer keeps momentum, such as "momentum = 0.9" or "betas = (0.9, 0.999)"; or None."""
    for group in optimizer.param_groups:
        if group.get("momentum"):
            return f"momentum = {group['momentum']}"
        if group.get("betas") and group["betas"][0]:
            return f"betas = {tuple(group['betas'])}"
    return None


def own_weight_decay(optimizer: torch.optim.Optimizer) -> str | None:
    """The setting by which an optimizer applies weight decay, such as "weight_decay = 0.0001"; or None."""
    rates = (group.get("weight_decay") for group in optimizer.param_groups)
    return next((f"weight_decay = {rate}" for rate in rates if rate), None)


def is_plain_sgd(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether it is torch.optim.SGD without momentum: a step is then -eta times the gradient, and no more."""
    return isinstance(optimizer, torch.optim.SGD) and own_momentum(optimizer) is None
