"""The losses of a pilot's rounds, and what they say of each plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gradlab.runtime.pilot.given import DENSE
from gradlab.runtime.pilot.growth import chance_of
from gradlab.runtime.pilot.result import Outcome, in_order, outcome_of
from gradlab.saving import Saving


class Scores:
    """Mean losses of all ranks by round and step, which are the same on all of them.

    unlike: largest relative difference between a plan's first loss and dense training's, see `PilotResult`.
    """

    def __init__(self, control: str) -> None:
        self._control = control
        self.savings: Mapping[str, Saving] = {}
        self.unlike = 0.0
        self.losses: dict[str, list[float]] = {}
        self._validation: dict[str, float] = {}

    def note(self, name: str, losses: Sequence[Sequence[float]]) -> None:
        """Note a round's losses so far, of each rank, by step."""
        self.losses[name] = [math.fsum(step) / len(losses) for step in zip(*losses, strict=True)]
        first, dense = self.losses[name][0], self.losses[DENSE][0]
        if first != dense and math.isfinite(dense):
            apart = abs(first - dense) / (abs(dense) or 1.0)
            self.unlike = max(self.unlike, apart if math.isfinite(apart) else math.inf)

    def validate(self, name: str, losses: Sequence[float]) -> None:
        """Note the validation loss of each rank after a round."""
        self._validation[name] = math.fsum(losses) / len(losses)

    def outcome(self, name: str) -> Outcome:
        """Compare a plan with the dense round as far as it came."""
        losses = self.losses[name]
        chance = 0.0 if name == self._control else self._chance
        found = outcome_of(name, losses, self.losses[DENSE][: len(losses)], self.savings[name], chance)
        if name not in self._validation:
            return found
        dense = self._validation[DENSE]
        return replace(found, validation=(self._validation[name] - dense) / (abs(dense) or 1.0))

    @property
    def _chance(self) -> float:
        """Return how far the control is from dense, which shows what chance does."""
        if self._control not in self.losses:
            return 0.0
        control = self.outcome(self._control)
        return chance_of(control.low, control.high)

    def tried(self, control: bool = True) -> tuple[Outcome, ...]:
        """Return the outcomes of all plans so far, without dense, the fewest bytes first; `control`: with 16 bits."""
        names = [name for name in in_order(self.savings) if name in self.losses]
        names = [name for name in names if control or name != self._control]
        return tuple(self.outcome(name) for name in names)
