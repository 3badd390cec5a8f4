"""An excess of loss as a delay: how many steps earlier plain training was as far."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


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
