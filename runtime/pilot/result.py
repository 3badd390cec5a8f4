"""The result of a pilot: how much worse each plan trained than plain DDP, on the same batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradlab.formatting import format_bytes
from gradlab.runtime.pilot.growth import GROWTH, End
from gradlab.saving import Saving

_BLOCKS = 6
_LEAST_DELAY = 0.1  # steps, that a line speaks of
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
        steps: number of steps under the plan.
        validation: excess of its validation loss; None: not measured.
        delay_steps: steps that it lies behind dense. Infinite: more than half of the steps. None: the dense loss did
            not fall by more than chance.
        chance: the largest excess that the interval of 16 bits reaches in the same pilot.
    """

    name: str
    excess: float
    low: float
    high: float
    growth: float
    saving: Saving
    steps: int
    validation: float | None = None
    delay_steps: float | None = None
    chance: float = 0.0

    @property
    def end(self) -> End:
        """The excess that is expected at the end of training, see `gradlab.runtime.pilot.growth`."""
        return GROWTH.end(self.excess, self.low, self.high, self.chance)

    def holds(self, max_loss: float) -> bool:
        """Say whether what is expected at the end, and the validation excess, are within a limit. NaN is not."""
        return self.end.high <= max_loss and (self.validation is None or self.validation <= max_loss)

    def line(self) -> str:
        """Write the outcome as one line."""
        sends = f"{self.name}: {self.saving.text('fewer bytes')}"
        if math.isnan(self.excess):
            return f"{sends}; a loss was not finite"
        return (
            f"{sends}; loss {self.excess:+.2%} ({self.low:+.2%} to {self.high:+.2%}) after {self.steps} steps, "
            f"changing by {self.growth:+.2%}{self._delay()}"
            + ("" if self.validation is None else f"; validation {self.validation:+.2%}")
            + f"; expected at the end {self.end.middle:+.2%} ({self.end.low:+.2%} to {self.end.high:+.2%})"
        )

    def _delay(self) -> str:
        if self.delay_steps is None or self.delay_steps < _LEAST_DELAY:
            return ""
        earlier = f"{self.delay_steps:.2g}" if math.isfinite(self.delay_steps) else f"over {self.steps // 2}"
        return f", as dense {earlier} steps earlier"

    def to_json(self) -> dict[str, Any]:
        """Write the outcome as plain JSON; null for what is not finite."""
        names = ("excess", "low", "high", "growth", "validation", "delay_steps")
        numbers = {name: getattr(self, name) for name in names}
        numbers |= {f"end_{name}": getattr(self.end, name) for name in ("low", "middle", "high")}
        finite = {name: v if v is not None and math.isfinite(v) else None for name, v in numbers.items()}
        return {"name": self.name, "steps": self.steps, **finite, **self.saving.to_json()}


@dataclass(frozen=True)
class PilotResult:
    """All that a pilot found.

    Attributes:
        outcomes: the one that sends the fewest bytes first.
        max_loss: excess up to which a plan holds.
        not_tried: plans that came after the budget.
        not_needed: plans that were not tried as enough of those that send less hold.
        seconds: duration of the pilot.
        snapshot_bytes: memory on this rank for the snapshot: parameters, gradients, buffers and optimizer state.
        batch_bytes: memory on this rank for the kept batches.
        unlike: largest relative difference of a round's first loss from dense's. Nothing is exchanged before it, so
            that it is 0 unless something else than a plan changes the loss.
    """

    outcomes: tuple[Outcome, ...]
    max_loss: float
    not_tried: tuple[str, ...] = ()
    not_needed: tuple[str, ...] = ()
    seconds: float = 0.0
    snapshot_bytes: int = 0
    batch_bytes: int = 0
    unlike: float = 0.0

    @property
    def best(self) -> Outcome | None:
        """The plan that sends the fewest bytes of those that hold; None: no one does."""
        return next((one for one in self.outcomes if one.holds(self.max_loss)), None)

    def to_json(self) -> dict[str, Any]:
        """Write the result as plain JSON; of `seconds` and bytes those of this rank."""
        best = self.best
        plain = ("max_loss", "seconds", "snapshot_bytes", "batch_bytes")
        return {
            **{name: getattr(self, name) for name in plain},
            "unlike": self.unlike if math.isfinite(self.unlike) else None,
            "best": None if best is None else best.name,
            "not_tried": list(self.not_tried),
            "not_needed": list(self.not_needed),
            "outcomes": [one.to_json() for one in self.outcomes],
        }

    def __str__(self) -> str:
        best = self.best
        verdict = "no plan is" if best is None else f"{best.name} sends the fewest bytes of those that are"
        lines = [
            f"within {self.max_loss:.2%} of the dense loss at the end: {verdict}",
            *(one.line() for one in self.outcomes),
        ]
        if self.not_needed:
            lines.append(f"not needed, as enough of those that send less hold: {', '.join(self.not_needed)}")
        if self.not_tried:
            lines.append(f"not tried, for want of time: {', '.join(self.not_tried)}")
        if self.unlike:
            lines.append(unlike_line(self.unlike))
        if self.seconds:
            held = (
                f"{format_bytes(self.snapshot_bytes)} for the snapshot and {format_bytes(self.batch_bytes)} for batches"
            )
            lines.append(f"took {self.seconds:.0f} s, and held {held}")
        return "\n  ".join(lines)


def unlike_line(share: float) -> str:
    """Say that a first loss was another one than dense's."""
    return (
        f"the first loss differs by {100 * share:.2g} %, before anything was exchanged: something that this pilot does "
        "not put back changes the model or its loss; name it in extra=, or take smaller differences for noise"
    )


def outcome_of(
    name: str, losses: Sequence[float], dense: Sequence[float], saving: Saving, chance: float = 0.0
) -> Outcome:
    """Compare a plan's losses (rank means by step) with dense ones, as shares of the absolute mean dense loss."""
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
    return Outcome(
        name, excess, excess - wide, excess + wide, growth, saving, steps, None, delay_of(losses, dense), chance
    )


def delay_of(losses: Sequence[float], dense: Sequence[float]) -> float | None:
    """Say how many steps a training lies behind the dense one, whose losses are of the same steps.

    The mean loss of the second half is compared with means of as many dense steps that end 0, 1, 2... steps earlier,
    with straight lines between. A training whose losses are those of dense n steps earlier lies n steps behind.

    >>> dense = [10 - 0.1 * step for step in range(40)]
    >>> round(delay_of([10.25 - 0.1 * step for step in range(40)], dense), 6)
    2.5

    It is infinite further than the dense losses reach back, which is half of the steps. It is None where the dense loss
    does not fall by more than chance, 2 standard errors.
    """
    ours, theirs = np.asarray(losses, dtype=np.float64), np.asarray(dense, dtype=np.float64)
    width = len(theirs) - len(theirs) // 2
    back = np.convolve(theirs, np.full(width, 1 / width), "valid")[::-1]  # of windows that end 0, 1, 2... steps earlier
    # Differences of neighbours show the noise of one step, whatever the trend (J. von Neumann, 1941).
    error = math.sqrt(float(np.mean(np.diff(theirs) ** 2)) / width) if len(theirs) > 1 else math.inf
    if not back[-1] - back[0] > 2 * error:
        return None
    level = float(ours[-width:].mean())
    if level <= back[0]:
        return 0.0
    reached = np.flatnonzero(back >= level)
    if not reached.size:
        return math.inf
    at = int(reached[0])
    return float(at - 1 + (level - back[at - 1]) / (back[at] - back[at - 1]))


LEAST_STEPS = 8  # that say something of a plan
_EARLY = 3  # the first look comes after a third of the steps


def looks(steps: int, longest: int) -> tuple[int, ...]:
    """List after how many of a pilot's steps a plan is looked at; `longest` is for plans that hold until then.

    >>> looks(60, 120), looks(12, 12)
    ((20, 60, 120), (12,))
    """
    early = steps // _EARLY
    return tuple(sorted({one for one in (early, steps, longest) if LEAST_STEPS <= one <= longest} | {longest}))


def in_order(savings: Mapping[str, Saving]) -> list[str]:
    """Sort plans by the bytes that they send, fewest first; equal ones stay in their order."""
    return sorted(savings, key=lambda name: -(savings[name].ratio or 0.0))


def may_hold(outcome: Outcome, max_loss: float) -> bool:
    """Say whether a plan is worth more steps: its end may be within the limit. One that is not finite is not."""
    return outcome.end.low <= max_loss


def is_decided(outcomes: Iterable[Outcome], longest: int, max_loss: float, keep: int) -> bool:
    """Say whether plans that send more need not be tried: `keep` plans have held to the end."""
    return sum(one.steps >= longest and one.holds(max_loss) for one in outcomes) >= keep
