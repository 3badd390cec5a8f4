"""What a plan's own momentum and weight decay ask of the optimizer: one rule for fits and for training.

A plan may apply momentum before compression, or weight decay before momentum. The optimizer must then not do the same
once more. SGD's settings can be set to 0. Adam's momentum belongs to its second moments, so a plan's cannot replace it,
and AdamW's weight decay is decoupled from gradients: it never passes through compression, and may stay where it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradlab.ddp.optimizers import OptimizerSettings

if TYPE_CHECKING:
    from gradlab.plan.plan import Plan


@dataclass(frozen=True)
class Conflict:
    """A plan and an optimizer that would both do the same.

    Attributes:
        message: what both do, with the setting.
        remedy: what to do about it, one clause.
        by_setting: whether the optimizer's setting can be set to 0, with the plan doing its work.
    """

    message: str
    remedy: str
    by_setting: bool

    def __str__(self) -> str:
        return f"{self.message}: it would be applied twice; {self.remedy}"


def conflict_of(plan: Plan, optimizer: OptimizerSettings) -> Conflict | None:
    """Find what a plan and an optimizer would both apply.

    Args:
        plan: any.
        optimizer: that it is to train with.

    Returns:
        The first conflict, momentum before weight decay; None: they go together.
    """
    if plan.replaces_optimizer and optimizer.name != "SGD":
        message = (
            f"the plan makes gradients the updates of an optimizer ({plan.replaces_optimizer}), for {optimizer.name}"
        )
        return Conflict(
            message, "train with torch.optim.SGD without momentum, at that optimizer's learning rate", False
        )
    if plan.residual_is_momentum and (setting := optimizer.momentum) and not optimizer.adaptive:
        message = f"the plan's residual is a momentum (error_feedback, carried) and the optimizer has {setting}"
        return Conflict(message, "set the optimizer's to 0", True)
    return conflict_between(plan.applies_momentum, plan.applies_weight_decay, optimizer)


def conflict_between(momentum: str | None, weight_decay: bool, optimizer: OptimizerSettings) -> Conflict | None:
    """Find what a plan to be made and an optimizer would both apply.

    Args:
        momentum: the plan's wrapper that applies momentum, or None.
        weight_decay: whether the plan applies weight decay.
        optimizer: that it is to train with.

    Returns:
        The first conflict; None: they go together.
    """
    zero = "set the optimizer's to 0"
    if momentum and (setting := optimizer.momentum):
        message = f"the plan applies momentum ({momentum}) and the optimizer has {setting}"
        without = f"train with a plan without momentum: {optimizer.name} keeps its own, which no plan's can replace"
        return Conflict(message, without if optimizer.adaptive else zero, not optimizer.adaptive)
    if weight_decay and (setting := optimizer.weight_decay):
        message = f"the plan applies weight decay and the optimizer has {setting}"
        leave = f"leave it to {optimizer.name}, whose decay does not pass through gradients"
        return Conflict(message, leave if optimizer.adaptive else zero, not optimizer.adaptive)
    return None
