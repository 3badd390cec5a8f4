"""Judge how late a group with error feedback sends: a residual that is bounded may still be too large.

A residual that holds t gradients of one rank at compressed step t has sent nothing. Independent gradients add up to
sqrt(t) norms, which is below t / 10 from t = 100 on. So what is above t / 10 is a part that gradients have in common,
and that waits for a tenth of the run. Residuals delay updates, and with them the learning rate up to which training is
stable falls (Stich and Karimireddy, "The error-feedback framework", JMLR 2020): beyond it gradients grow.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from gradlab.executor.rules import Feedback, Finding, LargestGradients, finding

SHARE = 0.1  # of the compressed steps' gradients, that may wait
FIRST = 200  # compressed step that is judged by it
APART = 10  # steps at least between gradients that are compared, so that a few steps' noise does not count
WINDOW, SPAN = 5, 20  # such gradients: of a median, and at most from the oldest to the newest
GROWN, WAITING = 2.5, 10.0  # times that gradients grow, and gradient norms that wait meanwhile, momentum's included


class LateWatch:
    """The residual and gradient norms of one group, in the last measured steps.

    Args:
        group: its name.
        feedback: how it keeps its residual.
        whose: the residual, in what is told.
    """

    def __init__(self, group: str, feedback: Feedback, whose: str = "residual") -> None:
        self.group, self.feedback, self._whose = group, feedback, whose
        self._largest = LargestGradients(feedback)
        self._gradients: deque[float] = deque(maxlen=SPAN)
        self._last: int | None = None  # step of the newest of these

    def add(self, step: int, steps: int, residual: float, gradient: float, rate: float | None = None) -> Finding | None:
        """Judge a measured step.

        Args:
            step: the iteration.
            steps: compressed steps so far, this one included.
            residual: norm.
            gradient: norm, in the residual's unit.
            rate: the learning rate, if it is known. The residuals of a rate of zero are not judged.

        Returns:
            What was found, if anything.
        """
        waiting = self._largest.held_by(residual, gradient, rate)
        if waiting is None or not 0 < gradient < math.inf:
            return None
        if self._last is None or step - self._last >= APART:
            self._gradients.append(gradient)
            self._last = step
        seen = f"the {self._whose} holds {waiting:.3g} times the largest gradient's norm"
        where = {"group": self.group, "step": step}
        most = SHARE * steps * self.feedback.gain
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
