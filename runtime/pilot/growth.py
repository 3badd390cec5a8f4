"""From a pilot to the end of training: by what factor an excess of loss grows or shrinks.

The excess of a plan's loss over dense's at the end is taken for g times that of its pilot, with g between two factors
that held nine of ten ends of tasks that the factors did not see. `benchmarks/training/pilot_law.py` fits them on whole
trainings of small tasks, and prints on which. A test compares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


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
