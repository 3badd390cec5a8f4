"""Whether a figure rises or falls over a recording: a least-squares slope, with an interval for dependent steps.

Errors of neighbouring steps resemble each other, so that n steps say less than n independent ones would. The slope's
variance is that of independent residuals times (1 + r) / (1 - r), with r the residuals' correlation from step to step
(Bayley and Hammersley 1946, for an autoregressive process of first order), and the interval has as many fewer degrees
of freedom. r is estimated with the correction for its bias in short series (Kendall 1954).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from gradlab.jsonable import Jsonable

FEWEST = 12  # values; the interval of fewer says nothing
_MOST_CORRELATION = 0.95
_LEVEL = 0.95


@dataclass(frozen=True)
class Trend(Jsonable):
    """The least-squares slope of a figure, per iteration, with its 95 % interval; steps: number of values."""

    slope: float
    low: float
    high: float
    steps: int

    @property
    def rises(self) -> bool:
        """Whether the whole interval lies above zero."""
        return self.low > 0

    @property
    def falls(self) -> bool:
        """Whether the whole interval lies below zero."""
        return self.high < 0


def trend(iterations: Sequence[int], values: Sequence[float]) -> Trend | None:
    """Fit a line to values (n,) over rising iterations (n,): its slope with an interval; None for fewer than 12."""
    count = len(values)
    if count < FEWEST:
        return None
    x, y = np.asarray(iterations, dtype=float), np.asarray(values, dtype=float)
    x = x - x.mean()
    spread = float(x @ x)
    slope = float(x @ y) / spread
    residuals = y - y.mean() - slope * x
    left = float(residuals @ residuals)
    if left <= (1e-12 * max(1e-300, float(np.abs(y).max()))) ** 2 * count:  # a line, but for rounding
        return Trend(slope, slope, slope, count)
    correlation = float(residuals[1:] @ residuals[:-1]) / left
    corrected = float(np.clip((count * correlation + 1) / (count - 4), 0.0, _MOST_CORRELATION))
    inflation = (1 + corrected) / (1 - corrected)
    freedom = max(1.0, count / inflation - 2)
    error = math.sqrt(left / (count - 2) / spread * inflation)
    half = float(stats.t.ppf((1 + _LEVEL) / 2, freedom)) * error
    return Trend(slope, slope - half, slope + half, count)
