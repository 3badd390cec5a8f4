"""When and from what a plan is chosen anew while training; `gradlab.plan.replanning` does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gradlab.errors import GradlabError

if TYPE_CHECKING:
    from gradlab.plan.plan import Plan

METRICS = ("squared", "plain")


@dataclass(frozen=True)
class Refresh:
    """When and from what a plan is chosen anew.

    every: iterations from one choice to the next, the first of them the schedule's first compressed one; delay: further
    iterations after which the choice is taken over, for the tables to be made in; settings: by group of one layer, what
    its codec may be set to; reference: by group, which of these the budget's error is taken from; alpha: times that
    error; metric: "squared" or "plain" errors are added up.
    """

    every: int
    settings: Mapping[str, Sequence[Mapping[str, Any]]]
    reference: Mapping[str, int]
    delay: int = 1
    alpha: float = 1.0
    metric: str = "squared"

    def __post_init__(self) -> None:
        def check(sound: bool, name: str, expected: str) -> None:
            if not sound:
                raise GradlabError(f"refresh: {name} = {str(getattr(self, name))[:80]}, expected {expected}")

        check(type(self.every) is int and self.every >= 1, "every", "iterations, at least 1")
        check(type(self.delay) is int and 0 <= self.delay < self.every, "delay", f"0 to {self.every} - 1 iterations")
        check(isinstance(self.alpha, (int, float)) and 0 < self.alpha < float("inf"), "alpha", "a number above 0")
        check(self.metric in METRICS, "metric", f"one of {', '.join(METRICS)}")
        check(set(self.settings) == set(self.reference), "reference", "one place for each group with settings")
        for name, some in self.settings.items():
            place = self.reference[name]
            check(type(place) is int and 0 <= place < len(some), "reference", f"a place among the settings of {name}")

    def check(self, plan: Plan) -> None:
        """Refuse settings that are not the plan's.

        Raises:
            GradlabError: for a group that the plan lacks, has more than one layer, or a wrapper that keeps what belongs
                to one setting; learned tensors; settings that its codec does not have.
        """
        groups = {group.name: group for group in plan.compressed_groups}
        for name, some in self.settings.items():
            group = groups.get(name)
            if group is None or len(group.layers) != 1:
                raise GradlabError(f"refresh: {name} is not a compressed group of one layer in this plan")
            if group.codec == "identity" or plan.learned.get(name):
                raise GradlabError(f"refresh: group {name}: {group.codec} has nothing that could be chosen anew")
            if "two_way" in (wrap.name for wrap in group.wrappers):
                raise GradlabError(f"refresh: group {name}: two_way keeps what belongs to one setting")
            for settings in some:
                plan.build(replace(group, settings=settings))

    def chosen_after(self, iteration: int, first: int) -> bool:
        """Whether a choice is made once an iteration is over. first: the first that is compressed."""
        return iteration >= first and (iteration - first + 1) % self.every == 0

    def adopted_before(self, iteration: int, first: int) -> bool:
        """Whether a choice is taken over before an iteration begins."""
        return self.chosen_after(iteration - 1 - self.delay, first)

    def to_json(self) -> dict[str, Any]:
        return {
            "every": self.every,
            "delay": self.delay,
            "alpha": self.alpha,
            "metric": self.metric,
            "settings": {name: [dict(settings) for settings in some] for name, some in self.settings.items()},
            "reference": dict(self.reference),
        }

    @classmethod
    def from_json(cls, value: Any) -> Refresh:
        """Raises GradlabError for anything but what `to_json` writes."""
        keys = {"every", "delay", "alpha", "metric", "settings", "reference"}
        sound = isinstance(value, dict) and set(value) == keys
        sound = sound and all(isinstance(value[key], dict) for key in ("settings", "reference"))
        if not sound or not all(isinstance(some, list) for some in value["settings"].values()):
            raise GradlabError(f"not a refresh of a plan: {str(value)[:200]}")
        return cls(**value)
