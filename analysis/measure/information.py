"""How much information one gradient holds on another: entropy and mutual information from samples, in bits.

Two estimators of the information between paired scalars:

- "histogram": plug-in on bins of equal width, as in eq. (1) of LGC (Abrahamyan et al., section III). Its value grows
  with the number of bins whatever the data are (Miller 1955), by about (cells - rows - columns + 1) / (2 n ln 2), and
  reaches log2 n for any pair once every value has a bin of its own. `plug_in` gives it for any number of bins with that
  bias beside it; here it is refused where joint cells outnumber the samples.
- "copula": Gaussian copula, -log2(1 - rho^2) / 2 of the normal scores, less its bias (Ince et al., Human Brain Mapping
  38, 2017). Fast, and blind to dependence that is not monotone: a lower bound, exact for a bivariate normal pair and
  its monotone transforms. Normal scores of correlation rho share no less than a normal pair does. Tied samples have
  scores in random order, so that this holds for discrete values too; the bound is loose there. Nearest neighbours
  see any dependence: `benchmarks/papers/neighbors.py`.

Samples of one pair of gradients share the scales of their parameters, which alone makes them dependent. The share of
two ranks in an iteration is therefore the excess over pairs that are iterations apart (`excess_information`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.special import digamma

from gradlab.analysis.intervals import mean_interval
from gradlab.analysis.measure.variable import Levels, Variable, normal_grid
from gradlab.errors import GradlabError
from gradlab.jsonable import Jsonable

METHODS = ("histogram", "copula")
# LGC's "uniform quantizer with 2^32-level (32 bit) accuracy".
PAPER_BINS = 2**32

_LN2 = math.log(2)
_FEWEST = 16  # samples of a pair
_PER_CELL = 10  # samples for a joint cell, where the number of bins is ours to choose
_MOST_BINS = 256
_DENSE_CELLS = 8  # joint cells per sample up to which all are counted, beyond it those that hold any
_FEWEST_PER_BLOCK, _MOST_BLOCKS = 64, 16
MOST_CORRELATED = 1 - 1e-12  # of normal scores: 20 bits, so that sums stay finite


@dataclass(frozen=True)
class PlugIn(Jsonable):
    """A pair's plug-in quantities on a grid of bins, in bits: entropies, H(y | x), I(x; y), and its bias (Miller)."""

    entropy_x: float
    entropy_y: float
    conditional: float
    information: float
    bias: float


def mutual_information(
    x: np.ndarray | Variable,
    y: np.ndarray | Variable,
    method: str = "histogram",
    *,
    bins: int | None = None,
) -> float:
    """Estimate I(x; y) in bits from paired samples (n,); a corrected estimate may be below 0."""
    first, second = as_pair(x, y)
    return _estimator(method, len(first), bins)(first, second)


def plug_in(x: np.ndarray | Variable, y: np.ndarray | Variable, bins: int = PAPER_BINS) -> PlugIn:
    """Compute LGC's eq. (1) in bits for samples x, y (n,) on `bins` of equal width over each one's range."""
    x, y = as_pair(x, y)
    if bins < 1:
        raise GradlabError(f"bins = {bins}, expected at least 1")
    return _plug_in(x.equal_bins(bins), y.equal_bins(bins))


def gaussian_information(correlation: float | np.ndarray) -> float | np.ndarray:
    """-log2(1 - rho^2) / 2: the information of a bivariate normal pair, in bits; infinity at |rho| = 1."""
    with np.errstate(divide="ignore"):
        bits = -0.5 * np.log2(1 - np.square(correlation))
    return float(bits) if np.ndim(bits) == 0 else bits


# --- nulls ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Excess(Jsonable):
    """Information of pairs of one iteration beyond that of pairs iterations apart, in bits, as a `SeriesMean`."""

    paired: float
    shifted: float
    bits: float
    low: float | None
    high: float | None
    level: float
    iterations: int
    autocorrelation: float | None
    drift: tuple[float, float] | None
    refused: str


def excess_information(paired: np.ndarray, shifted: np.ndarray, *, level: float = 0.95) -> Excess:
    """Average paired - shifted over iterations (T,), in bits, with the interval of `mean_interval`."""
    paired, shifted = (np.asarray(values, np.float64).ravel() for values in (paired, shifted))
    count = len(paired)
    if len(shifted) != count or count < 4:
        raise GradlabError(f"excess information: {count} and {len(shifted)} iterations, expected as many, 4 or more")
    found = mean_interval(paired - shifted, level)
    rest = {name: value for name, value in vars(found).items() if name != "mean"}
    return Excess(float(paired.mean()), float(shifted.mean()), float((paired - shifted).mean()), **rest)


# --- estimators -----------------------------------------------------------------------------------------------------


def as_pair(x: np.ndarray | Variable, y: np.ndarray | Variable) -> tuple[Variable, Variable]:
    """Sort paired samples, as many of both."""
    sizes = [len(values) if isinstance(values, Variable) else np.size(values) for values in (x, y)]
    if sizes[0] != sizes[1]:
        raise GradlabError(f"mutual information: {sizes[0]} values of one and {sizes[1]} of the other, expected pairs")
    if sizes[0] < _FEWEST:
        raise GradlabError(f"mutual information: {sizes[0]} pairs, expected at least {_FEWEST}")
    return Variable.of(x), Variable.of(y)


def _estimator(method: str, samples: int, bins: int | None) -> Callable[[Variable, Variable], float]:
    if method not in METHODS:
        raise GradlabError(f"method {method!r}, expected one of {', '.join(METHODS)}")
    if method == "copula":
        return _copula
    count = int(np.clip(round(math.sqrt(samples / _PER_CELL)), 2, _MOST_BINS)) if bins is None else bins
    if count < 2:
        raise GradlabError(f"bins = {count}, expected at least 2")
    if count * count > samples:
        raise GradlabError(
            f"bins = {count}: {count * count} joint cells for {samples} pairs, whose information would be the "
            f"estimator's own; expected at most {math.isqrt(samples)} bins "
            "(gradlab.analysis.measure.information.plug_in computes it all the same, with its bias)"
        )
    return partial(_histogram, bins=count)


def _histogram(x: Variable, y: Variable, bins: int) -> float:
    return _plug_in(x.equal_bins(bins), y.equal_bins(bins)).information


def _plug_in(rows: Levels, columns: Levels) -> PlugIn:
    cells = _joint(rows, columns)
    entropy_x, entropy_y, both = (_entropy(counts) for counts in (rows.counts, columns.counts, cells))
    bias = (len(cells) - len(rows.counts) - len(columns.counts) + 1) / (2 * len(rows.number) * _LN2)
    return PlugIn(entropy_x, entropy_y, max(0.0, both - entropy_x), entropy_x + entropy_y - both, bias)


def _joint(rows: Levels, columns: Levels) -> np.ndarray:
    """How many samples are in each joint cell that holds any."""
    count, cells = len(rows.number), len(rows.counts) * len(columns.counts)
    if count in (len(rows.counts), len(columns.counts)):  # every sample has a level of its own
        return np.ones(count, np.int64)
    cell = rows.number * len(columns.counts) + columns.number
    if cells <= _DENSE_CELLS * count:
        counts = np.bincount(cell, minlength=cells)
        return counts[counts > 0]
    return np.unique(cell, return_counts=True)[1]


def _entropy(counts: np.ndarray) -> float:
    total = counts.sum()
    return float(np.log2(total) - (counts * np.log2(counts)).sum() / total)


def score_correlation(x: Variable, y: Variable) -> float:
    """Correlate normal scores."""
    grid = normal_grid(len(x))
    rho = float(x.scores(0) @ y.scores(1) / (grid @ grid))
    return float(np.clip(rho, -MOST_CORRELATED, MOST_CORRELATED))


def _copula(x: Variable, y: Variable) -> float:
    if x.constant or y.constant:
        return 0.0
    count = len(x)
    # Two entropies of one dimension less one of two: of Ince et al.'s terms these remain.
    bias = (digamma((count - 1) / 2) - digamma((count - 2) / 2)) / 2 / _LN2
    return float(gaussian_information(score_correlation(x, y)) - bias)
