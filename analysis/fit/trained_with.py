"""The optimizer that a plan will be trained with: named or recorded, and whether the plan goes with it."""

from __future__ import annotations

import re

import torch

from gradlab.ddp.optimizers import OptimizerSettings, describe_optimizer
from gradlab.errors import GradlabError
from gradlab.plan.optimizer_rules import conflict_between
from gradlab.setting_texts import parse_settings, split_settings
from gradlab.trace import Trace


def optimizer_of_training(trace: Trace, text: str | None) -> OptimizerSettings | None:
    """Read NAME[:KEY=VALUE,...] of torch.optim, of several with + between; without a text take what was recorded."""
    if text is None:
        return OptimizerSettings.from_metadata(trace.metadata)
    return describe_optimizer([_built(one) for one in re.split(r"\+(?=[A-Za-z])", text)])


def _built(text: str) -> torch.optim.Optimizer:
    name, _, rest = text.partition(":")
    made = {kind.lower(): kind for kind in torch.optim.__all__ if kind not in ("Optimizer", "lr_scheduler")}
    if name.lower() not in made:
        raise GradlabError(f"trained_with={name}: no optimizer of torch.optim, expected one such as AdamW or SGD")
    settings = parse_settings(split_settings(rest), f"trained_with={name}:")
    settings = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    try:
        kind: type[torch.optim.Optimizer] = getattr(torch.optim, made[name.lower()])
        return kind([torch.zeros(1, 1, requires_grad=True)], **{"lr": 1e-3, **settings})
    except (TypeError, ValueError) as error:
        raise GradlabError(f"trained_with={text}: {str(error).splitlines()[0]}") from None


def require_trainable(
    optimizer: OptimizerSettings | None, momentum: str | None, weight_decay: bool = False, remedy: str = ""
) -> str | None:
    """Refuse a plan that training would refuse, before the work.

    Args:
        optimizer: optimizer of the training; None if it is not known.
        momentum: the plan's wrapper that applies momentum, or None.
        weight_decay: whether the plan applies weight decay.
        remedy: options that make another plan.

    Returns:
        A sentence on what has to be set in the optimizer; None if nothing has.

    Raises:
        GradlabError: if both apply momentum or weight decay, and the optimizer's cannot be set to 0.
    """
    conflict = None if optimizer is None else conflict_between(momentum, weight_decay, optimizer)
    if conflict is None:
        return None
    if conflict.by_setting:
        return f"to train with it, {conflict.remedy}: {conflict.message}"
    options = f"{remedy}, or -s trained_with=SGD if training will use that"
    raise GradlabError(f"{conflict}; {options.removeprefix(', ')}")
