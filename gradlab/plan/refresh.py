"""When a plan is chosen anew while training, and from which settings. `gradlab.plan.replanning` makes the choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gradlab.codec.compressor import Compressor
from gradlab.codec.wrapper import innermost
from gradlab.errors import GradlabError

if TYPE_CHECKING:
    from gradlab.plan.plan import Plan

# The measures that a plan by layer sums over layers. L-GreCo (MLSys 2024, section 3) sums L2 norms of compression
# errors, in its paper and in its code. Squares of layers add up to the square of the whole gradient's error, which the
# theory bounds; norms do not.
METRICS = ("l2", "squared-l2")
ROOT = 0  # the rank that accumulates, measures and chooses


def require_metric(name: Any) -> str:
    """Return the name of a metric; refuse what is none of `METRICS`."""
    if name not in METRICS:
        raise GradlabError(f"metric {str(name)[:80]!r}, expected one of {', '.join(METRICS)}")
    return str(name)


@dataclass(frozen=True)
class Refresh:
    """When a plan is chosen anew while training, and from which settings.

    every: iterations from one choice to the next; the first window begins with the schedule's first compressed one.
    settings: settings that a group's codec may get, by the name of a group of one layer.
    reference: index of the setting whose error goes into the budget, by group name.
    delay: further iterations until a choice is adopted, in which a thread makes the tables.
    alpha: factor on the budget.
    metric: sum over layers: "l2", norms of errors as in the paper, or "squared-l2", their squares.
    accordion: choice of the setting whose error goes into the budget; None: the reference's does.
    """

    every: int
    settings: Mapping[str, Sequence[Mapping[str, Any]]]
    reference: Mapping[str, int]
    delay: int = 1
    alpha: float = 1.0
    metric: str = "l2"
    accordion: Accordion | None = None

    def __post_init__(self) -> None:
        def check(sound: bool, name: str, expected: str) -> None:
            if not sound:
                raise GradlabError(f"refresh: {name} = {str(getattr(self, name))[:80]}, expected {expected}")

        check(type(self.every) is int and self.every >= 1, "every", "iterations, at least 1")
        check(type(self.delay) is int and 0 <= self.delay < self.every, "delay", f"0 to {self.every} - 1 iterations")
        check(isinstance(self.alpha, (int, float)) and 0 < self.alpha < float("inf"), "alpha", "a number above 0")
        check(self.metric in METRICS, "metric", f"one of {', '.join(METRICS)}")
        self._check_indices("reference", self.reference)
        if self.accordion is not None:
            for which in ("least", "most"):
                self._check_indices(f"accordion's {which}", getattr(self.accordion, which))

    def _check_indices(self, what: str, indices: Mapping[str, int]) -> None:
        """Refuse what does not name one of the settings of every group."""
        if set(indices) != set(self.settings):
            raise GradlabError(
                f"refresh: {what} = {str(indices)[:80]}, expected one index for each group with settings"
            )
        for name, choices in self.settings.items():
            if type(indices[name]) is not int or not 0 <= indices[name] < len(choices):
                raise GradlabError(
                    f"refresh: {what} = {str(indices)[:80]}, expected an index among the settings of {name}"
                )

    def check(self, plan: Plan) -> None:
        """Refuse settings that are not the plan's: of groups that it lacks, that have several layers, learned tensors
        or a wrapper that keeps what belongs to one setting, or settings that the codec does not have."""
        groups = {group.name: group for group in plan.compressed_groups}
        for name, choices in self.settings.items():
            group = groups.get(name)
            if group is None or len(group.layers) != 1:
                raise GradlabError(f"refresh: {name} is not a compressed group of one layer in this plan")
            if group.codec == "identity" or plan.learned.get(name):
                raise GradlabError(f"refresh: group {name}: {group.codec} has nothing that could be chosen anew")
            codecs = [innermost(plan.build(replace(group, settings=one))) for one in choices]
            blocks = {codec.blocks.size for codec in codecs if isinstance(codec, Compressor)}
            if len(blocks) > 1 and "two_way" in (wrap.name for wrap in group.wrappers):
                raise GradlabError(
                    f"refresh: group {name}: servers of two_way would have other shards under each setting"
                )

    def chosen_after(self, iteration: int, first: int) -> bool:
        """Return whether a choice is made after an iteration: at the end of each window from the first compressed one
        on."""
        return iteration >= first and (iteration - first + 1) % self.every == 0

    def adopted_before(self, iteration: int, first: int) -> bool:
        """Return whether a choice is adopted before an iteration begins: `delay` iterations after a choice."""
        return self.chosen_after(iteration - 1 - self.delay, first)

    def to_json(self) -> dict[str, Any]:
        return {
            "every": self.every,
            "delay": self.delay,
            "alpha": self.alpha,
            "metric": self.metric,
            "settings": {name: [dict(settings) for settings in choices] for name, choices in self.settings.items()},
            "reference": dict(self.reference),
            **({} if self.accordion is None else {"accordion": self.accordion.to_json()}),
        }

    @classmethod
    def from_json(cls, value: Any) -> Refresh:
        """Raises GradlabError for anything but what `to_json` writes."""
        keys = {"every", "delay", "alpha", "metric", "settings", "reference"}
        sound = isinstance(value, dict) and set(value) - {"accordion"} == keys
        sound = sound and all(isinstance(value[key], dict) for key in ("settings", "reference"))
        if not sound or not all(isinstance(choices, list) for choices in value["settings"].values()):
            raise GradlabError(f"not a refresh of a plan: {str(value)[:200]}")
        accordion = Accordion.from_json(value["accordion"]) if "accordion" in value else None
        return cls(**{**value, "accordion": accordion})


ETA = 0.5  # as Accordion's authors suggest, and L-GreCo takes (section 5.3)
# Share that a learning rate falls by. Published is any fall: under a schedule that falls all the time every window is
# critical then.
DECAY = 0.3


def is_critical(
    before: np.ndarray,
    now: np.ndarray,
    rate_before: np.ndarray,
    rate: np.ndarray,
    *,
    eta: float = ETA,
    least_decay: float = DECAY,
) -> np.ndarray:
    """Return which layers, (layers,), are in a critical regime: their norms change by `eta` or more, or rates fall by
    `least_decay`. A norm that is not known (NaN) makes one critical; from zero every change is fast."""
    unknown = np.isnan(before) | np.isnan(now)
    with np.errstate(divide="ignore", invalid="ignore"):
        change = np.abs(now - before) / before
    fast = np.where(before > 0, change >= eta, now > 0)
    return np.asarray(unknown | fast | (rate < (1 - least_decay) * rate_before))


@dataclass(frozen=True)
class Accordion:
    """Two settings for each group that a plan is chosen anew for, one for critical regimes (Alimohammadi et al.,
    "L-GreCo", MLSys 2024, section 5.3: Accordion's choice is the default whose error is the budget of the search).

    least: index of the least compressed setting by group name, for critical regimes.
    most: index of the most compressed setting by group name, for all others.
    eta: the least relative change of a norm in a critical regime.
    least_decay: the share that a learning rate has to fall by for one.
    """

    least: Mapping[str, int]
    most: Mapping[str, int]
    eta: float = ETA
    least_decay: float = DECAY

    def __post_init__(self) -> None:
        for name, high in (("eta", float("inf")), ("least_decay", 1.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < high:
                raise GradlabError(f"accordion: {name} = {str(value)[:80]}, expected a number from 0, below {high:g}")

    def to_json(self) -> dict[str, Any]:
        return {
            "least": dict(self.least),
            "most": dict(self.most),
            "eta": self.eta,
            "least_decay": self.least_decay,
        }

    @classmethod
    def from_json(cls, value: Any) -> Accordion:
        """Raises GradlabError for anything but what `to_json` writes."""
        sound = isinstance(value, dict) and set(value) == {"least", "most", "eta", "least_decay"}
        if not sound or not all(isinstance(value[key], dict) for key in ("least", "most")):
            raise GradlabError(f"not the Accordion of a refresh: {str(value)[:200]}")
        return cls(**value)
