"""Judge how late a group with error feedback sends: a residual that is bounded may still be too large.

A residual that holds t gradients of one rank at compressed step t has sent nothing. Independent gradients add up to
sqrt(t) norms, which is below t / 10 from t = 100 on. So what is above t / 10 is a part that gradients have in common,
and that waits for a tenth of the run. Residuals delay updates, and with them the learning rate up to which training is
stable falls (Stich and Karimireddy, "The error-feedback framework", JMLR 2020): beyond it gradients grow.

Two-way compression keeps what it has not sent at two places, one behind the other: at the ranks and at the servers.
What waits at both is late together, so it is added up. Each may be within bounds where the sum is not.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

from gradlab.executor.rules import Feedback, Finding, LargestGradients, finding

SHARE = 0.1  # of the compressed steps' gradients, that may wait
FIRST = 200  # compressed step that is judged by it
APART = 10  # steps at least between gradients that are compared, so that a few steps' noise does not count
WINDOW, SPAN = 5, 20  # such gradients: of a median, and at most from the oldest to the newest
GROWN, WAITING = 2.0, 10.0  # times that gradients grow, and gradient norms that wait meanwhile, momentum's included


class LateWatch:
    """The residual and gradient norms of one group in the last measured steps; `feedback` is by the name of each place
    that keeps a residual, the ranks first."""

    def __init__(self, group: str, feedback: Mapping[str, Feedback]) -> None:
        self.group, self._places = group, tuple(feedback)
        self._gain = max(kept.gain for kept in feedback.values())
        self._largest = [LargestGradients(kept) for kept in feedback.values()]
        self._gradients: deque[float] = deque(maxlen=SPAN)
        self._last: int | None = None  # step of the newest of these

    def add(
        self, step: int, steps: int, norms: Sequence[tuple[float, float]], rate: float | None = None
    ) -> Finding | None:
        """Judge a measured step from (residual, gradient) norms by place, in one unit. A gradient of the ranks that is
        zero or not finite is not judged, nor are residuals of a rate of zero."""
        held = [largest.held_by(*of_place, rate) for largest, of_place in zip(self._largest, norms, strict=True)]
        gradient = norms[0][1]
        if held[0] is None or not 0 < gradient < math.inf:
            return None
        if self._last is None or step - self._last >= APART:
            self._gradients.append(gradient)
            self._last = step
        known = {place: waits for place, waits in zip(self._places, held, strict=True) if waits is not None}
        waiting = sum(known.values())
        parts = " and ".join(f"the {place} holds {waits:.3g}" for place, waits in known.items())
        seen = f"{parts} times the largest gradient's norm"
        where = {"group": self.group, "step": step}
        most = SHARE * steps * self._gain
        if steps >= FIRST and waiting > most:
            return finding("sent_late", f"{seen} after {steps} steps", waiting, most, **where)
        grown = self._growth()
        if grown > GROWN and waiting > WAITING:
            return finding("sent_late", f"{seen}, and gradients have grown {grown:.3g} times", grown, GROWN, **where)
        return None

    def _growth(self) -> float:
        """How many times gradients have grown over the last `SPAN` that were noted; 1 before there are two windows."""
        if len(self._gradients) < 2 * WINDOW:
            return 1.0
        norms = list(self._gradients)
        before, now = median(norms[:WINDOW]), median(norms[-WINDOW:])
        return now / before
