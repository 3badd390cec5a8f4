"""The demands of a plan's momentum and weight decay on the optimizer: one rule for fits and for training.

A plan may apply momentum before compression, or weight decay before momentum. The optimizer must then not do the same
once more. SGD's settings can be set to 0. Adam's momentum belongs to its second moments and Muon's is orthonormalized:
a plan's cannot replace it. AdamW's and Muon's weight decay never passes through compression, and may stay where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradlab import wrappers
from gradlab.codec.settings import build_settings
from gradlab.codec.wrapper import Wrapper
from gradlab.ddp.optimizers import OptimizerSettings

if TYPE_CHECKING:
    from gradlab.plan.plan import Plan


@dataclass(frozen=True)
class Conflict:
    """Work that a plan and an optimizer would both do: what it is, and the remedy, one clause.

    by_setting: whether the optimizer's setting can be set to 0, with the plan doing its work.
    """

    message: str
    remedy: str
    by_setting: bool

    def __str__(self) -> str:
        return f"{self.message}: it would be applied twice; {self.remedy}"


def conflict_of(plan: Plan, optimizer: OptimizerSettings) -> Conflict | None:
    """Return what a plan and an optimizer would both apply to some layer, momentum before weight decay; None: they go
    together. With several optimizers, the one that trains a layer counts for it."""
    replacing = wrapper_that(plan, "replaces_optimizer")
    for one in optimizer.of_layers(layers_under(plan, lambda wrapper, _: wrapper.effects.replaces_optimizer)):
        if replacing and one.name != "SGD":
            message = f"the plan makes gradients the updates of an optimizer ({replacing}), for {one.name}"
            remedy = "train with torch.optim.SGD without momentum, at that optimizer's learning rate"
            return Conflict(message, remedy, False)
    for one in optimizer.of_layers(layers_under(plan, _fades)):
        if residual_fades(plan) and (setting := one.momentum) and not setting.startswith("betas"):
            message = f"the plan's residual is a momentum (error_feedback, carried) and the optimizer has {setting}"
            return Conflict(message, "set the optimizer's to 0", True)
    for one in optimizer.of_layers(layers_under(plan, lambda wrapper, _: wrapper.effects.applies_momentum)):
        if conflict := conflict_between(applied_by(plan)[0], False, one):
            return conflict
    for one in optimizer.of_layers(layers_under(plan, lambda wrapper, _: wrapper.effects.applies_weight_decay)):
        if conflict := conflict_between(None, applied_by(plan)[1], one):
            return conflict
    return None


def _fades(wrapper: type[Wrapper], settings: Mapping[str, Any]) -> bool:
    return wrapper.name == "error_feedback" and settings.get("carried", 1.0) < 1


def applied_by(plan: Plan) -> tuple[str | None, bool]:
    """Return the wrapper by which a plan applies momentum, or None, and whether it applies weight decay."""
    return wrapper_that(plan, "applies_momentum"), wrapper_that(plan, "applies_weight_decay") is not None


def wrapper_that(plan: Plan, effect: str) -> str | None:
    """Return the first wrapper's name with an effect that concerns the optimizer, a field of `Effects`; None: there is
    none."""
    names = (wrap.name for group in plan.groups for wrap in group.wrappers)
    return next((name for name in names if getattr(wrappers.get(name).effects, effect)), None)


def residual_fades(plan: Plan) -> bool:
    """Return whether a residual fades, so that it is a momentum (`error_feedback` with `carried` below 1)."""
    return bool(layers_under(plan, _fades))


def follower_of(plan: Plan) -> str | None:
    """Return the name of a wrapper whose `step_size_ratio` is true; None: there is none. A setting of None counts as
    false."""
    wraps = (wrap for group in plan.groups for wrap in group.wrappers)
    return next((wrap.name for wrap in wraps if wrap.settings.get("step_size_ratio")), None)


def layers_under(plan: Plan, wanted: Callable[[type[Wrapper], Mapping[str, Any]], bool]) -> tuple[str, ...]:
    """Return the names of layers that have a certain wrapper, in the plan's order of groups."""
    return tuple(
        name
        for group in plan.groups
        if any(wanted(wrappers.get(wrap.name), wrap.settings) for wrap in group.wrappers)
        for name in group.layers
    )


def compressed_layers(plan: Plan) -> tuple[str, ...]:
    """Return the names of layers that are not sent plainly, in the plan's order of groups."""
    return tuple(name for group in plan.compressed_groups for name in group.layers)


def layers_with_feedback(plan: Plan) -> tuple[str, ...]:
    """Return the names of layers whose compression errors are sent later, by ranks or by servers."""

    def keeps(wrapper: type[Wrapper], settings: Mapping[str, Any]) -> bool:
        return wrapper.name == "error_feedback" or getattr(build_settings(wrapper, settings), "error_feedback", False)

    return layers_under(plan, keeps)


def layers_that_may_follow(plan: Plan) -> tuple[str, ...]:
    """Return the names of layers whose residuals follow the learning rate under SGD (`step_size_ratio` of None)."""

    def may(wrapper: type[Wrapper], settings: Mapping[str, Any]) -> bool:
        made = build_settings(wrapper, settings)
        keeps = wrapper.effects.keeps_residual or getattr(made, "error_feedback", False)
        return bool(keeps) and getattr(made, "step_size_ratio", False) is None

    return layers_under(plan, may)


def needs_of(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Return what a plan has to know of optimizers, in words, with the layers for which it has to."""
    needs = {
        "follows the learning rate (step_size_ratio)": layers_under(
            plan, lambda _, settings: bool(settings.get("step_size_ratio"))
        ),
        f"makes gradients the updates of an optimizer ({wrapper_that(plan, 'replaces_optimizer')})": layers_under(
            plan, lambda wrapper, _: wrapper.effects.replaces_optimizer
        ),
        f"applies momentum ({applied_by(plan)[0]})": layers_under(plan, lambda one, _: one.effects.applies_momentum),
        "keeps a momentum as its residual (error_feedback, carried)": layers_under(plan, _fades),
        "applies weight decay": layers_under(plan, lambda wrapper, _: wrapper.effects.applies_weight_decay),
    }
    return {need: layers for need, layers in needs.items() if layers}


def conflict_between(momentum: str | None, weight_decay: bool, optimizer: OptimizerSettings) -> Conflict | None:
    """Return what a plan to be made and an optimizer would both apply; None: they go together."""
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
