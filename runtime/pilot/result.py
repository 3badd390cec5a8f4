"""What a pilot found: how much worse each plan trained than plain DDP, on the same batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradlab.saving import Saving

_BLOCKS = 6
_T_95 = 2.571  # Student's t at 95 %, two-sided, of `_BLOCKS` blocks


@dataclass(frozen=True)
class Outcome:
    """How one plan did.

    Attributes:
        name: the plan's.
        excess: its mean loss over the second half of the steps, over dense's, less 1. NaN: a loss was not finite.
        low, high: 95 % interval of `excess`, from paired differences of consecutive steps in blocks.
        growth: excess in the last quarter of the steps less that in the one before.
        saving: bytes that a rank sends, against 32 and 16 bits.
        steps: that it was tried.
        validation: excess of its validation loss; None: not measured.
    """

    name: str
    excess: float
    low: float
    high: float
    growth: float
    saving: Saving
    steps: int
    validation: float | None = None

    def holds(self, max_loss: float) -> bool:
        """Say whether the whole interval, and the validation excess, are within a limit. NaN is not."""
        return self.high <= max_loss and (self.validation is None or self.validation <= max_loss)

    def line(self) -> str:
        """Write the outcome as one line."""
        sends = f"{self.name}: {self.saving.text('fewer bytes')}"
        if math.isnan(self.excess):
            return f"{sends}; a loss was not finite"
        return (
            f"{sends}; loss {self.excess:+.2%} ({self.low:+.2%} to {self.high:+.2%}) after {self.steps} steps, "
            f"changing by {self.growth:+.2%}"
            + ("" if self.validation is None else f"; validation {self.validation:+.2%}")
        )

    def to_json(self) -> dict[str, Any]:
        """Write the outcome as plain JSON; null for what is not finite."""
        numbers = {name: getattr(self, name) for name in ("excess", "low", "high", "growth", "validation")}
        finite = {name: v if v is not None and math.isfinite(v) else None for name, v in numbers.items()}
        return {"name": self.name, "steps": self.steps, **finite, **self.saving.to_json()}


@dataclass(frozen=True)
class PilotResult:
    """All that a pilot found.

    Attributes:
        outcomes: the one that sends the fewest bytes first.
        max_loss: excess up to which a plan holds.
        not_tried: plans that came after the budget.
    """

    outcomes: tuple[Outcome, ...]
    max_loss: float
    not_tried: tuple[str, ...] = ()

    @property
    def best(self) -> Outcome | None:
        """The plan that sends the fewest bytes of those whose whole interval is within `max_loss`; None: no one is."""
        return next((one for one in self.outcomes if one.holds(self.max_loss)), None)

    def to_json(self) -> dict[str, Any]:
        """Write the result as plain JSON."""
        best = self.best
        return {
            "max_loss": self.max_loss,
            "best": None if best is None else best.name,
            "not_tried": list(self.not_tried),
            "outcomes": [one.to_json() for one in self.outcomes],
        }

    def __str__(self) -> str:
        best = self.best
        verdict = "no plan is" if best is None else f"{best.name} sends the fewest bytes of those that are"
        lines = [f"  {one.line()}" for one in self.outcomes]
        late = [f"  not tried, for want of time: {', '.join(self.not_tried)}"] if self.not_tried else []
        return "\n".join([f"within {self.max_loss:.2%} of plain DDP's loss: {verdict}", *lines, *late])


def outcome_of(name: str, losses: Sequence[float], dense: Sequence[float], saving: Saving) -> Outcome:
    """Compare a plan's losses with dense ones of the same steps.

    Args:
        name: the plan's.
        losses: mean over ranks, by step.
        dense: the same under plain DDP.
        saving: of the plan.

    Returns:
        The outcome. Shares are of the absolute mean dense loss.
    """
    ours, theirs = (np.asarray(values, dtype=np.float64) for values in (losses, dense))
    steps = len(ours)
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        return Outcome(name, math.nan, math.nan, math.nan, math.nan, saving, steps)
    half, quarter = steps // 2, max(1, steps // 4)
    level = abs(theirs[half:].mean()) or 1.0
    apart = (ours - theirs) / level
    blocks = np.array([block.mean() for block in np.array_split(apart[half:], min(_BLOCKS, steps - half))])
    excess = float(apart[half:].mean())
    wide = _T_95 * float(blocks.std(ddof=1)) / math.sqrt(len(blocks)) if len(blocks) > 1 else math.inf
    growth = float(apart[steps - quarter :].mean() - apart[max(0, steps - 2 * quarter) : steps - quarter].mean())
    return Outcome(name, excess, excess - wide, excess + wide, growth, saving, steps)
