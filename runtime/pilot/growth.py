"""From a pilot to the end of training: by what factor an excess of loss grows or shrinks.

The excess of a plan's loss over dense's at the end is taken for g times that of its pilot, with g between two factors
that held nine of ten ends of tasks that the factors did not see. `benchmarks/training/pilot_law.py` fits them on whole
trainings of small tasks, and prints on which. A test compares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_OUTSIDE = 0.03  # share of the ends that a law is fitted on, above and below its intervals


@dataclass(frozen=True)
class End:
    """An expected excess of loss at the end of training, with the interval that held in nine of ten trainings."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True)
class Growth:
    """Factors from a pilot's excess to that of the end.

    low, middle, high: nine of ten are from low to high.
    chance: factor on what 16 bits differ from dense by in the pilot. Ends of any plan differ by that besides.
    """

    low: float
    middle: float
    high: float
    chance: float

    def end(self, excess: float, low: float, high: float, chance: float = 0.0) -> End:
        """Forecast an end from a pilot's excess, its interval and `chance_of`; NaN where the excess is.

        >>> GROWTH.end(0.02, 0.01, 0.03).middle == GROWTH.middle * 0.02
        True
        """
        least = min(self.low * low, self.high * low) - self.chance * chance
        most = max(self.low * high, self.high * high) + self.chance * chance
        return End(least, min(max(self.middle * excess, least), most), most)


#: Of all tasks, as `benchmarks/training/pilot_law.py` prints it.
GROWTH = Growth(0.302, 1.085, 3.6, 4.11)


def chance_of(low: float, high: float) -> float:
    """Return how far chance alone takes a loss: the largest excess that the interval of a pilot's 16 bits reaches."""
    return max(abs(low), abs(high)) if math.isfinite(low) and math.isfinite(high) else 0.0


def fitted(
    pilots: Sequence[tuple[float, float, float, float]], ends: Sequence[float], chance: float = GROWTH.chance
) -> Growth:
    """Fit the factors, so that of these ends 94 % are in their intervals, which held nine tenths of other tasks.

    pilots: excess, its interval and the pilot's chance of each, as `Growth.end` takes them.
    ends: excess at the end, infinite where training diverged.
    """
    excess, low, high, apart = np.asarray(pilots, dtype=np.float64).T
    end, besides = np.asarray(ends, dtype=np.float64), chance * apart
    grown = np.where(end <= besides, 0.0, (end - besides) / np.maximum(high, 1e-12))
    told, known = low > 0, excess > besides
    shrunk = np.maximum(0.0, end[told] + besides[told]) / low[told]
    middle = float(np.median(end[known] / excess[known]))
    return Growth(_quantile(shrunk, _OUTSIDE), middle, _quantile(grown, 1 - _OUTSIDE), chance)


def _quantile(values: np.ndarray, share: float) -> float:
    """Return the value that a further one is below with this probability, if it is like these (split conformal)."""
    ordered = np.sort(values)
    at = math.ceil((len(ordered) + 1) * share) - 1 if share > 0.5 else math.floor((len(ordered) + 1) * share) - 1
    return float(ordered[min(max(at, 0), len(ordered) - 1)])
