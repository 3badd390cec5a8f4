"""What gradlab reads from an optimizer: its learning rates, and whether it applies momentum or weight decay."""

from __future__ import annotations

from collections.abc import Mapping

import torch


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
    for group in optimizer.param_groups:
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
    rates = (group.get("weight_decay") for group in optimizer.param_groups)
    return next((f"weight_decay = {rate}" for rate in rates if rate), None)


def is_plain_sgd(optimizer: torch.optim.Optimizer | None) -> bool:
    """Say whether an optimizer is torch.optim.SGD without momentum, whose step is -eta times the gradient and no more.

    Args:
        optimizer: any, or None.

    Returns:
        False also for None.
    """
    return isinstance(optimizer, torch.optim.SGD) and own_momentum(optimizer) is None
