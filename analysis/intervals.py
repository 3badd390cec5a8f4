"""Intervals for means over iterations, whose neighbours are alike, and for rank correlations.

A mean of T iterations varies by the series' long-run variance over T, not by its sample variance. Equal-weighted
cosines estimate it (Phillips, Econometric Theory 21, 2005; Lazarus, Lewis, Stock & Watson, "HAR inference:
recommendations for practice", Journal of Business & Economic Statistics 36, 2018): the first B cosine sums over the
series are independent and each vary by the long-run variance, so that the mean over their spread has Student's t
distribution with B degrees of freedom. They take the place of a bootstrap's blocks: B cosines tell as many
independent values as B blocks, but are wrong by (B / T)^2 where blocks are by B / T.

B follows from the autocorrelation of neighbours: from the largest rho that the measured one, less its bias, allows at
97.7 % confidence, because a short series often looks less alike than it is. With kappa = 2 rho / (1 - rho)^2, B cosines
find the variance too small by a share of about pi^2 kappa B^2 / (6 T^2). B is the largest for which that is at most
5 %, but no more than 0.4 T^(2/3) (their recommendation), and 4 at least. The share of the long-run variance
that B cosines recover from a first-order series with that rho follows from its spectral density. The estimate is
divided by this share. Below a fifth the series is too short, and no interval is given. A slow part below noise without
memory leaves rho small: that interval is too narrow. `benchmarks/papers/estimators.py` shows how often intervals hold.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri, stdtrit

from gradlab.errors import GradlabError
from gradlab.jsonable import Jsonable

_MOST_BIAS = 0.05  # of the long-run variance, where more cosines than the fewest are taken
_LEAST_FOUND = 0.2  # of the long-run variance; below it the interval would follow from rho and not from the series
_DEVIATIONS = 2.0  # of the measured autocorrelation, up to the largest that it allows
_FEWEST_TERMS = 4  # cosines: Student's t with fewer degrees of freedom says next to nothing
_FEWEST_ITERATIONS = 12  # fewer have not 4 cosines at any autocorrelation that could be measured
_DRIFT_LEVEL = 0.99
FEWEST_RANKED = 5


@dataclass(frozen=True)
class SeriesMean(Jsonable):
    """The mean of a series over iterations, with an interval that knows how alike neighbours are.

    low, high: ends of the interval of confidence `level`. None: `refused` says why.
    iterations: T, those that are finite.
    autocorrelation: correlation of neighbours, less its bias. None: fewer than 12 iterations.
    drift: start and end of the fitted line, if the series drifts at 99 % confidence. None: it does not. A trend cannot
        be told from a wandering that is slower than the series is long.
    refused: reason for no interval, with the need, else empty.
    """

    mean: float | None
    low: float | None
    high: float | None
    level: float
    iterations: int
    autocorrelation: float | None = None
    drift: tuple[float, float] | None = None
    refused: str = ""


def mean_interval(series: np.ndarray, level: float = 0.95) -> SeriesMean:
    """Estimate the mean of a series (T,) by equal-weighted cosines, with an interval or the reason for none.

    Values that are not finite are left out. Fewer than 12 have a mean and no interval.
    """
    if not 0 < level < 1:
        raise GradlabError(f"level = {level:g}, expected between 0 and 1")
    values = np.asarray(series, np.float64).ravel()
    values = values[np.isfinite(values)]
    count = len(values)
    mean = float(values.mean()) if count else None
    if mean is None or count < _FEWEST_ITERATIONS:
        refused = f"{count} iterations, expected at least {_FEWEST_ITERATIONS}"
        return SeriesMean(mean, None, None, level, count, refused=refused)
    rho, drift = autocorrelation(values), _drift(values)
    largest = largest_autocorrelation(rho, count)
    terms = cosine_terms(count, largest)
    if (found := found_share(count, largest, terms)) < _LEAST_FOUND:
        refused = (
            f"neighbours' autocorrelation is {rho:.2f} over {count} iterations, expected at least "
            f"{iterations_needed(rho)} iterations or less autocorrelation"
        )
        return SeriesMean(mean, None, None, level, count, rho, drift, refused)
    variance = float(np.square(_cosines(values, terms)).mean()) / found
    half = float(stdtrit(terms, 0.5 + level / 2)) * math.sqrt(variance / count)
    return SeriesMean(mean, mean - half, mean + half, level, count, rho, drift)


def autocorrelation(values: np.ndarray) -> float:
    """Return the correlation of neighbours in a series (T,), less its bias (Marriott & Pope, Biometrika 41, 1954)."""
    apart, count = values - values.mean(), len(values)
    energy = float(apart @ apart)
    if not energy > 0:
        return 0.0
    measured = float(apart[1:] @ apart[:-1]) / energy
    return float(np.clip((count * measured + 1) / (count - 4), -1.0, 1.0))


def largest_autocorrelation(rho: float, count: int) -> float:
    """Return the largest autocorrelation that a measured one allows at 97.7 %; it varies by (1 - rho^2) / T (Bartlett
    1946).
    A negative one counts as none, which makes the interval too wide and never too narrow.
    """
    rho = max(rho, 0.0)
    return min(1.0, rho + _DEVIATIONS * math.sqrt(max(0.0, 1 - rho * rho) / count))


def cosine_terms(count: int, rho: float) -> int:
    """Return B, the number of cosines that an autocorrelation allows in a series of `count` iterations, at least 4."""
    most = max(_FEWEST_TERMS, round(0.4 * count ** (2 / 3)))
    return max(_FEWEST_TERMS, int(min(most, _term_share(rho) * count)))


def found_share(count: int, rho: float, terms: int) -> float:
    """Return the share of a first-order series' long-run variance that B cosines find: the mean over the cosines of
    (1 - rho)^2 / (1 - 2 rho cos(pi j / T) + rho^2), 0 to 1.
    """
    waves = 1 - np.cos(np.pi * np.arange(1, terms + 1) / count)
    return float(np.mean((1 - rho) ** 2 / ((1 - rho) ** 2 + 2 * rho * waves)))


def iterations_needed(rho: float) -> str:
    """Say how many iterations an interval takes at a measured autocorrelation."""
    if rho >= 1:
        return "infinitely many"

    def enough(count: int) -> bool:
        largest = largest_autocorrelation(rho, count)
        return found_share(count, largest, cosine_terms(count, largest)) >= _LEAST_FOUND

    most = _FEWEST_ITERATIONS
    while not enough(most):
        most *= 2
    return str(bisect_left(range(most), True, lo=max(_FEWEST_ITERATIONS, most // 2), key=enough))


def _term_share(rho: float) -> float:
    """B / T at which the long-run variance is found 5 % too small."""
    if rho <= 0:
        return math.inf
    if rho >= 1:
        return 0.0
    return math.sqrt(6 * _MOST_BIAS / (math.pi**2 * 2 * rho)) * (1 - rho)


def _cosines(values: np.ndarray, terms: int) -> np.ndarray:
    """Orthonormal cosine sums of a series (T,), the first `terms` after the constant: (terms,)."""
    count = len(values)
    phases = np.pi * np.arange(1, terms + 1)[:, None] * (np.arange(count) + 0.5) / count
    return np.asarray(math.sqrt(2 / count) * np.cos(phases) @ (values - values.mean()))


def _drift(values: np.ndarray) -> tuple[float, float] | None:
    """Start and end of the least-squares line where the series drifts.

    A line has 98.6 % of its energy in the first cosine, which in a series without one is no larger than the others:
    their ratio has Student's t distribution. The rest beside the line says how many of the others may be compared.
    """
    count = len(values)
    time = np.arange(count) - (count - 1) / 2
    slope = float(time @ values) / float(time @ time)
    terms = cosine_terms(count, autocorrelation(values - slope * time))
    first, *others = _cosines(values, terms + 1)
    if not abs(first) > stdtrit(terms, 0.5 + _DRIFT_LEVEL / 2) * math.sqrt(float(np.square(others).mean())):
        return None
    middle = float(values.mean())
    return middle + slope * float(time[0]), middle + slope * float(time[-1])


@dataclass(frozen=True)
class RankCorrelation(Jsonable):
    """Spearman's rho over `count` items, with the interval of confidence `level` by Bonett and Wright.

    low, high: None for fewer than 5 items, or where all values of a row are equal.
    """

    rho: float
    low: float | None
    high: float | None
    level: float
    count: int

    @property
    def interval(self) -> tuple[float, float] | None:
        """Its ends, where there is one."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    def __str__(self) -> str:
        if self.interval is None:
            return f"{self.rho:+.2f} (no interval: {self.count} items, expected at least {FEWEST_RANKED} that differ)"
        low, high = self.interval
        return f"{self.rho:+.2f} ({100 * self.level:g} % interval {low:+.2f} to {high:+.2f})"


def rank_correlation(first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray) -> RankCorrelation:
    """Correlate the order of two rows (n,): Spearman's rho with a 95 % interval. rho is 1 if both rows are constant, 0
    if one is. Fisher's z has the standard error sqrt((1 + rho^2 / 2) / (n - 3)) (Bonett & Wright, Psychometrika 65,
    2000, eq. 3). At full agreement z is taken half a step below, where a step is 12 / (n^3 - n).
    """
    from scipy.stats import rankdata  # which takes long to import, and few need

    rows = [np.asarray(values, np.float64).ravel() for values in (first, second)]
    count, level = len(rows[0]), 0.95
    if len(rows[1]) != count or not count or any(np.isnan(row).any() for row in rows):
        raise GradlabError(
            f"rank correlation: {count} and {len(rows[1])} values, expected as many of both, none of them NaN"
        )
    a, b = (rankdata(row) - (count + 1) / 2 for row in rows)
    scale = math.sqrt(float(a @ a) * float(b @ b))
    if not scale > 0:
        return RankCorrelation(float(not a.any() and not b.any()), None, None, level, count)
    rho = float(np.clip(a @ b / scale, -1.0, 1.0))
    if count < FEWEST_RANKED:
        return RankCorrelation(rho, None, None, level, count)
    most = 1 - 6 / (count**3 - count)
    within = float(np.clip(rho, -most, most))
    half = float(ndtri(0.5 + level / 2)) * math.sqrt((1 + within**2 / 2) / (count - 3))
    low, high = math.tanh(math.atanh(within) - half), math.tanh(math.atanh(within) + half)
    # An end beyond the cut is that of the correlation's own range.
    return RankCorrelation(rho, -1.0 if rho < -most else low, 1.0 if rho > most else high, level, count)
