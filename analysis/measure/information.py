"""How much information one gradient holds on another: entropy and mutual information from samples, in bits.

Three estimators of the information between paired scalars:

- "histogram": plug-in on bins of equal width, as in eq. (1) of LGC (Abrahamyan et al., section III). Its value grows
  with the number of bins whatever the data are (Miller 1955), by about (cells - rows - columns + 1) / (2 n ln 2), and
  reaches log2 n for any pair once every value has a bin of its own. `plug_in` gives it for any number of bins with that
  bias beside it; here it is refused where joint cells outnumber the samples.
- "mixed": nearest neighbours, for continuous values, discrete ones and mixtures of both (Gao, Kannan, Oh, Viswanath,
  NeurIPS 2017, arXiv:1709.06212), on normal scores. Sees any dependence. See `gradlab.analysis.measure.neighbors`.
- "copula": Gaussian copula, -log2(1 - rho^2) / 2 of the normal scores, less its bias (Ince et al., Human Brain Mapping
  38, 2017). Fast, and blind to dependence that is not monotone: a lower bound, exact for a bivariate normal pair and
  its monotone transforms. Normal scores of correlation rho share no less than a normal pair does. Tied samples have
  scores in random order, so that this holds for discrete values too; the bound is loose there.

Samples of one pair of gradients share the scales of their parameters, which alone makes them dependent. The share of
two ranks in an iteration is therefore the excess over pairs that are iterations apart (`excess_information`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.special import digamma, ndtri, stdtrit

from gradlab.analysis.intervals import mean_interval
from gradlab.analysis.measure.neighbors import neighbor_interval, neighbor_terms
from gradlab.analysis.measure.variable import Levels, Variable, normal_grid
from gradlab.errors import GradlabError
from gradlab.jsonable import Jsonable

METHODS = ("histogram", "mixed", "copula")
# LGC's "uniform quantizer with 2^32-level (32 bit) accuracy".
PAPER_BINS = 2**32

_LN2 = math.log(2)
_FEWEST = 16  # samples of a pair
_PER_CELL = 10  # samples for a joint cell, where the number of bins is ours to choose
_MOST_BINS = 256
_DENSE_CELLS = 8  # joint cells per sample up to which all are counted, beyond it those that hold any
_NEIGHBORS = 3  # k, the recommendation of Kraskov et al. for estimates
_FEWEST_PER_BLOCK, _MOST_BLOCKS = 64, 16
_NEIGHBORS_PER_BLOCK = 128  # samples, from which on the spread of neighbours in a block tells that of the whole
_MOST_CORRELATED = 1 - 1e-12  # of normal scores: 20 bits, so that sums stay finite


@dataclass(frozen=True)
class PlugIn(Jsonable):
    """A pair's plug-in quantities on a grid of bins, in bits: entropies, H(y | x), I(x; y), and its bias (Miller)."""

    entropy_x: float
    entropy_y: float
    conditional: float
    information: float
    bias: float


@dataclass(frozen=True)
class InformationEstimate(Jsonable):
    """Mutual information in bits, 0 or more, with an interval of confidence `level` that holds it.

    high: infinity if neighbours, or a copula, cannot tell the pair from one variable that is a function of the other.
    """

    bits: float
    low: float
    high: float
    level: float
    method: str
    samples: int


def mutual_information(
    x: np.ndarray | Variable,
    y: np.ndarray | Variable,
    method: str = "histogram",
    *,
    bins: int | None = None,
    neighbors: int = _NEIGHBORS,
) -> float:
    """Estimate I(x; y) in bits from paired samples (n,); a corrected estimate may be below 0."""
    first, second = _pair(x, y)
    return _estimator(method, len(first), bins, neighbors)(first, second)


def estimate_information(
    x: np.ndarray | Variable,
    y: np.ndarray | Variable,
    method: str = "copula",
    *,
    neighbors: int = _NEIGHBORS,
    level: float = 0.95,
    blocks: int | None = None,
) -> InformationEstimate:
    """Estimate `mutual_information` with an interval, from how it differs between blocks of successive samples.
    The variance falls as 1 / n (Holmes & Nemenman, PRE 100, 022404, 2019). "copula" takes Fisher's z of rho.
    """
    first, second = _pair(x, y)
    if method == "histogram":
        raise GradlabError(
            'an interval of "histogram": its bias is many times its spread, and plug_in gives that bias; expected one '
            f"of {', '.join(METHODS[1:])}"
        )
    if not 0 < level < 1:
        raise GradlabError(f"level = {level:g}, expected between 0 and 1")
    blocks = _affordable_blocks(method, len(first)) if blocks is None else blocks
    if blocks < 2 or len(first) < blocks * _FEWEST_PER_BLOCK:
        raise GradlabError(
            f"an interval from {blocks} blocks of {len(first)} samples: expected 2 blocks or more, of at least "
            f"{_FEWEST_PER_BLOCK} samples"
        )
    bits = _estimator(method, len(first), None, neighbors)(first, second)
    if first.constant or second.constant:
        low = high = 0.0
    elif method == "copula":
        low, high = _copula_interval(first, second, blocks, level)
    else:
        in_block = _estimator(method, len(first) // blocks, None, neighbors)
        varies = _varies(in_block, first.values, second.values, blocks, level)
        low, high = neighbor_interval(first, second, neighbors, varies)
    bits = max(0.0, bits)
    return InformationEstimate(bits, max(0.0, min(low, bits)), max(high, bits), level, method, len(first))


def _varies(
    estimate: Callable[[Variable, Variable], float], x: np.ndarray, y: np.ndarray, blocks: int, level: float
) -> float:
    """How far the estimate of samples (n,) varies at confidence `level`, by its values in contiguous blocks."""
    parts = zip(np.array_split(x, blocks), np.array_split(y, blocks), strict=True)
    deviation = float(np.std([estimate(Variable.of(a), Variable.of(b)) for a, b in parts], ddof=1))
    return float(stdtrit(blocks - 1, 0.5 + level / 2)) * deviation / math.sqrt(blocks)


def _affordable_blocks(method: str, samples: int) -> int:
    per_block = _NEIGHBORS_PER_BLOCK if method == "mixed" and samples >= 2 * _NEIGHBORS_PER_BLOCK else _FEWEST_PER_BLOCK
    return min(_MOST_BLOCKS, samples // per_block)


def plug_in(x: np.ndarray | Variable, y: np.ndarray | Variable, bins: int = PAPER_BINS) -> PlugIn:
    """Compute LGC's eq. (1) in bits for samples x, y (n,) on `bins` of equal width over each one's range."""
    x, y = _pair(x, y)
    if bins < 1:
        raise GradlabError(f"bins = {bins}, expected at least 1")
    return _plug_in(x.equal_bins(bins), y.equal_bins(bins))


def gaussian_information(correlation: float | np.ndarray) -> float | np.ndarray:
    """-log2(1 - rho^2) / 2: the information of a bivariate normal pair, in bits; infinity at |rho| = 1."""
    with np.errstate(divide="ignore"):
        bits = -0.5 * np.log2(1 - np.square(correlation))
    return float(bits) if np.ndim(bits) == 0 else bits


@dataclass(frozen=True)
class NeighborEstimate:
    """Information by nearest neighbours, in bits, with the standard error that the spread of its terms says."""

    bits: float
    error: float


def neighbor_information(
    x: np.ndarray | Variable, y: np.ndarray | Variable, neighbors: int = _NEIGHBORS
) -> NeighborEstimate:
    """Estimate `mutual_information` by "mixed", with the standard error of its nearly independent terms."""
    first, second = _pair(x, y)
    _estimator("mixed", len(first), None, neighbors)
    terms, _ = neighbor_terms(first, second, neighbors)
    return NeighborEstimate(float(terms.mean()), float(terms.std()) / math.sqrt(len(terms)))


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


def _pair(x: np.ndarray | Variable, y: np.ndarray | Variable) -> tuple[Variable, Variable]:
    sizes = [len(values) if isinstance(values, Variable) else np.size(values) for values in (x, y)]
    if sizes[0] != sizes[1]:
        raise GradlabError(f"mutual information: {sizes[0]} values of one and {sizes[1]} of the other, expected pairs")
    if sizes[0] < _FEWEST:
        raise GradlabError(f"mutual information: {sizes[0]} pairs, expected at least {_FEWEST}")
    return Variable.of(x), Variable.of(y)


def _estimator(method: str, samples: int, bins: int | None, neighbors: int) -> Callable[[Variable, Variable], float]:
    if method not in METHODS:
        raise GradlabError(f"method {method!r}, expected one of {', '.join(METHODS)}")
    if method == "copula":
        return _copula
    if method == "mixed":
        if not 1 <= neighbors < samples:
            raise GradlabError(f"neighbors = {neighbors}, expected 1 to {samples - 1}")
        return partial(_nearest_neighbors, neighbors=neighbors)
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


def _score_correlation(x: Variable, y: Variable) -> float:
    grid = normal_grid(len(x))
    rho = float(x.scores(0) @ y.scores(1) / (grid @ grid))
    return float(np.clip(rho, -_MOST_CORRELATED, _MOST_CORRELATED))


def _fisher(x: Variable, y: Variable) -> float:
    return math.atanh(_score_correlation(x, y))


def _copula(x: Variable, y: Variable) -> float:
    if x.constant or y.constant:
        return 0.0
    count = len(x)
    # Two entropies of one dimension less one of two: of Ince et al.'s terms these remain.
    bias = (digamma((count - 1) / 2) - digamma((count - 2) / 2)) / 2 / _LN2
    return float(gaussian_information(_score_correlation(x, y)) - bias)


def _copula_interval(x: Variable, y: Variable, blocks: int, level: float) -> tuple[float, float]:
    # Scores, because values may all be tied in a block. Few blocks may vary less by chance than independent normal
    # pairs do, of which Fisher's z has a known deviation.
    least = float(ndtri(0.5 + level / 2)) / math.sqrt(len(x) - 3)
    half = max(least, _varies(_fisher, x.scores(0), y.scores(1), blocks, level))
    centre = abs(_fisher(x, y))
    low, high = (float(gaussian_information(math.tanh(end))) for end in (max(0.0, centre - half), centre + half))
    return low, math.inf if math.tanh(centre) >= _MOST_CORRELATED else high


def _nearest_neighbors(x: Variable, y: Variable, neighbors: int) -> float:
    return float(neighbor_terms(x, y, neighbors)[0].mean())
