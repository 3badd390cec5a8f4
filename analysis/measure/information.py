"""How much information one gradient holds on another: entropy and mutual information from samples, in bits.

Four estimators of the information between paired scalars, because each is wrong in its own way:

- "histogram": plug-in on bins of equal width, as in eq. (1) of LGC (Abrahamyan et al., section III). Its value grows
  with the number of bins whatever the data are (Miller 1955), by about (cells - rows - columns + 1) / (2 n ln 2), and
  reaches log2 n for any pair once every value has a bin of its own. `plug_in` gives it for any number of bins with that
  bias beside it; here it is refused where joint cells outnumber the samples.
- "quantiles": on quantiles, entropies corrected: of the cells by Grassberger (2003, arXiv:physics/0307138, eq. 35), of
  the quantiles by Miller. Sees any dependence; bins blur strong ones. Quantiles are equally far apart in the arcsine of
  the square root of their mass, so that they are finer in both tails: what two gradients share is often where both are
  large, and quantiles of equal mass have one bin for all of that. A value that many samples share, such as the zero of
  an embedding's unused rows, has a level of its own beside the quantiles of the others: variables that are partly
  discrete have such atoms (Gao et al., NeurIPS 2017, arXiv:1709.06212), and a bin that holds an atom and its
  neighbours hides which is which.
- "ksg": nearest neighbours (Kraskov, Stögbauer, Grassberger, PRE 69, 066138, 2004, algorithm 1), on normal scores; of
  pairs that more than k samples share, the plug-in at the pair, as in Gao et al.
- "copula": Gaussian copula, -log2(1 - rho^2) / 2 of the normal scores, less its bias (Ince et al., Human Brain Mapping
  38, 2017). Accurate and fast; a lower bound, blind to dependence that is not monotone.

Samples of one pair of gradients share the scales of their parameters, which alone makes them dependent. What two ranks
share in an iteration is therefore the excess over pairs that are iterations apart (`excess_information`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.spatial import cKDTree
from scipy.special import digamma, ndtri, stdtrit
from scipy.stats import rankdata

from gradlab.analysis.intervals import mean_interval
from gradlab.errors import GradlabError
from gradlab.jsonable import Jsonable

METHODS = ("histogram", "quantiles", "ksg", "copula")
# LGC's "uniform quantizer with 2^32-level (32 bit) accuracy".
PAPER_BINS = 2**32

_LN2 = math.log(2)
_FEWEST = 16  # samples of a pair
_PER_CELL = 10  # samples for a joint cell, where the number of bins is ours to choose
_MOST_BINS = 256
_NEIGHBORS = 3  # KSG's k, their recommendation for estimates
_MORE_NEIGHBORS = (2, 4, 8)  # times k
_FEWEST_PER_BLOCK, _MOST_BLOCKS = 64, 16
# Times fewer quantiles. What is lost depends on where they fall, too, so that a single such number may lose nothing.
_COARSER = (1.15, 1.3, 1.5, 1.75, 2, 2.5, 3)
_NEIGHBORS_PER_BLOCK = 128  # samples, from which on KSG's spread in a block tells that of the whole
_MOST_CORRELATED = 1 - 1e-12  # equal gradients share no more than some 20 bits, so that sums stay finite


@dataclass(frozen=True)
class PlugIn(Jsonable):
    """A pair's plug-in quantities on a grid of bins, in bits.

    entropy_x, entropy_y: marginal; conditional: H(y | x); information: I(x; y); bias: the excess of `information` by
    Miller's first-order term, which holds only while it is small.
    """

    entropy_x: float
    entropy_y: float
    conditional: float
    information: float
    bias: float


@dataclass(frozen=True)
class InformationEstimate(Jsonable):
    """Mutual information in bits, not clipped at 0, with an interval of confidence `level` for a value from 0 on."""

    bits: float
    low: float
    high: float
    level: float
    method: str
    samples: int


def mutual_information(
    x: np.ndarray, y: np.ndarray, method: str = "histogram", *, bins: int | None = None, neighbors: int = _NEIGHBORS
) -> float:
    """I(x; y) in bits from paired samples x, y (n,); corrected estimators may fall below 0 where there is none.

    method: one of `METHODS`, see the module. bins: per variable, of the two histograms; None: as many as leave about 10
    samples per joint cell. neighbors: KSG's k.

    Raises:
        GradlabError: for an unknown method, fewer than 16 pairs, values that are not finite, lengths that differ, or
            bins whose joint cells outnumber the pairs.
    """
    x, y = _pair(x, y)
    return _estimator(method, len(x), bins, neighbors)(x, y)


def estimate_information(
    x: np.ndarray,
    y: np.ndarray,
    method: str = "copula",
    *,
    bins: int | None = None,
    neighbors: int = _NEIGHBORS,
    level: float = 0.95,
    blocks: int | None = None,
) -> InformationEstimate:
    """`mutual_information` with an interval, from how the estimate differs between blocks of successive samples.

    The variance of an estimate falls as 1 / n (Holmes & Nemenman, PRE 100, 022404, 2019), so the variance for the whole
    sample is that between blocks over their number. Blocks are contiguous because neighbouring samples may depend on
    each other. The bias is allowed for by what a coarser look changes: fewer quantiles, more neighbours.
    The copula's interval is one for rho (Fisher's z), and of the information that rho stands for, a lower bound.

    method: one of `METHODS` but "histogram", whose bias is many times its spread. level: confidence. blocks: None for
    16, or as many as hold 64 samples each, for "ksg" 128.

    Raises:
        GradlabError: as `mutual_information`; for "histogram", a level outside (0, 1), fewer than 2 blocks, or less
            than 64 samples in each.
    """
    x, y = _pair(x, y)
    if method == "histogram":
        raise GradlabError(
            'an interval of "histogram": its bias is many times its spread, and plug_in gives that bias; expected one '
            f"of {', '.join(METHODS[1:])}"
        )
    if not 0 < level < 1:
        raise GradlabError(f"level = {level:g}, expected between 0 and 1")
    blocks = _affordable_blocks(method, len(x)) if blocks is None else blocks
    if blocks < 2 or len(x) < blocks * _FEWEST_PER_BLOCK:
        raise GradlabError(
            f"an interval from {blocks} blocks of {len(x)} samples: expected 2 blocks or more, of at least "
            f"{_FEWEST_PER_BLOCK} samples"
        )
    bits = _estimator(method, len(x), bins, neighbors)(x, y)
    parts = list(zip(np.array_split(x, blocks), np.array_split(y, blocks), strict=True))
    quantile = float(stdtrit(blocks - 1, 0.5 + level / 2))
    if method == "copula":
        low, high = _copula_interval(x, y, parts, quantile)
    else:
        # A block carries fewer bins than the whole; how much an estimate varies hardly depends on them.
        smallest = len(x) // blocks
        count = bins or _affordable_bins(len(x))
        in_block = _estimator(method, smallest, min(count, math.isqrt(smallest)), neighbors)
        half = quantile * float(np.std([in_block(*part) for part in parts], ddof=1)) / math.sqrt(blocks)
        if method == "quantiles":
            lost = [bits - _on_quantiles(x, y, count, coarser) for coarser in _COARSER]
        else:
            lost = [_edge_bias(bits, x, y, neighbors, times) for times in _MORE_NEIGHBORS]
            half = math.hypot(half, lost[0])
        low, high = bits - half, bits + half + max(0.0, *lost)
    return InformationEstimate(bits, max(0.0, low), max(0.0, high), level, method, len(x))


def _affordable_blocks(method: str, samples: int) -> int:
    per_block = _NEIGHBORS_PER_BLOCK if method == "ksg" and samples >= 2 * _NEIGHBORS_PER_BLOCK else _FEWEST_PER_BLOCK
    return min(_MOST_BLOCKS, samples // per_block)


def plug_in(x: np.ndarray, y: np.ndarray, bins: int = PAPER_BINS) -> PlugIn:
    """LGC's eq. (1): entropies and information of samples x, y (n,) on `bins` of equal width over each one's range.

    Any number of bins is accepted, so that the bias can be seen. Fewer bins than 2^32 are more informative.

    Raises:
        GradlabError: for lengths that differ, fewer than 16 pairs, values that are not finite, or no bin.
    """
    x, y = _pair(x, y)
    if bins < 1:
        raise GradlabError(f"bins = {bins}, expected at least 1")
    return _plug_in(_levels(x, bins), _levels(y, bins))


def entropy(x: np.ndarray, bins: int) -> float:
    """Plug-in marginal entropy in bits of samples (n,) on `bins` of equal width over their range (LGC, section III)."""
    return plug_in(x, x, bins).entropy_x


def conditional_entropy(y: np.ndarray, x: np.ndarray, bins: int) -> float:
    """Plug-in H(y | x) in bits of paired samples (n,): the entropy of y once x is known (LGC, section III)."""
    return plug_in(x, y, bins).conditional


def gaussian_information(correlation: float | np.ndarray) -> float | np.ndarray:
    """-log2(1 - rho^2) / 2: the information of a bivariate normal pair, in bits; infinity at |rho| = 1."""
    with np.errstate(divide="ignore"):
        bits = -0.5 * np.log2(1 - np.square(correlation))
    return float(bits) if np.ndim(bits) == 0 else bits


# --- nulls ----------------------------------------------------------------------------------------------------------


def shuffled_information(
    x: np.ndarray,
    y: np.ndarray,
    method: str,
    generator: np.random.Generator,
    *,
    repeats: int = 1,
    bins: int | None = None,
) -> float:
    """Mean of the estimate over randomly permuted pairs: 0 for an estimator without bias.

    Raises:
        GradlabError: as `mutual_information`.
    """
    return float(np.mean([mutual_information(x, generator.permutation(y), method, bins=bins) for _ in range(repeats)]))


@dataclass(frozen=True)
class Excess(Jsonable):
    """Information of pairs of one iteration beyond that of pairs that are iterations apart, in bits.

    paired, shifted: means over iterations; bits: paired - shifted; the others: of the difference, as in `SeriesMean`.
    """

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
    """Mean of paired - shifted over iterations (T,), with the interval of `mean_interval`.

    paired[t]: information between two ranks in iteration t. shifted[t]: of one rank's iteration t with the other's
    t + delta.

    Raises:
        GradlabError: for series that differ in length or hold fewer than 4 iterations.
    """
    paired, shifted = (np.asarray(values, np.float64).ravel() for values in (paired, shifted))
    count = len(paired)
    if len(shifted) != count or count < 4:
        raise GradlabError(f"excess information: {count} and {len(shifted)} iterations, expected as many, 4 or more")
    found = mean_interval(paired - shifted, level)
    return Excess(
        float(paired.mean()),
        float(shifted.mean()),
        float((paired - shifted).mean()),
        found.low,
        found.high,
        level,
        found.iterations,
        found.autocorrelation,
        found.drift,
        found.refused,
    )


# --- estimators -----------------------------------------------------------------------------------------------------


def _pair(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    x, y = (np.asarray(values, np.float64).ravel() for values in (x, y))
    if len(x) != len(y):
        raise GradlabError(f"mutual information: {len(x)} values of one and {len(y)} of the other, expected pairs")
    if len(x) < _FEWEST:
        raise GradlabError(f"mutual information: {len(x)} pairs, expected at least {_FEWEST}")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise GradlabError("mutual information: values must be finite")
    return x, y


def _estimator(
    method: str, samples: int, bins: int | None, neighbors: int
) -> Callable[[np.ndarray, np.ndarray], float]:
    if method not in METHODS:
        raise GradlabError(f"method {method!r}, expected one of {', '.join(METHODS)}")
    if method == "copula":
        return _copula
    if method == "ksg":
        if not 1 <= neighbors < samples:
            raise GradlabError(f"neighbors = {neighbors}, expected 1 to {samples - 1}")
        return partial(_nearest_neighbors, neighbors=neighbors)
    count = _affordable_bins(samples) if bins is None else bins
    if count < 2:
        raise GradlabError(f"bins = {count}, expected at least 2")
    if count * count > samples:
        raise GradlabError(
            f"bins = {count}: {count * count} joint cells for {samples} pairs, whose information would be the "
            f"estimator's own; expected at most {math.isqrt(samples)} bins "
            "(gradlab.analysis.measure.information.plug_in computes it all the same, with its bias)"
        )
    return partial(_on_quantiles if method == "quantiles" else _histogram, bins=count)


def _affordable_bins(samples: int) -> int:
    return int(np.clip(round(math.sqrt(samples / _PER_CELL)), 2, _MOST_BINS))


def _histogram(x: np.ndarray, y: np.ndarray, bins: int) -> float:
    return _plug_in(_levels(x, bins), _levels(y, bins)).information


def _on_quantiles(x: np.ndarray, y: np.ndarray, bins: int, coarser: float = 1) -> float:
    """Bits, on so many quantiles of what is not tied, or on fewer by a factor of `coarser`."""
    tied = [_is_atom(values, bins) for values in (x, y)]
    # Of the joint cells only those of two quantiles are many: as many as the pairs that are tied in neither can fill.
    untied = float(np.mean(~tied[0] & ~tied[1]))
    quantiles = max(1, round(bins * math.sqrt(untied) / coarser))
    rows, columns, cells = _counts(*(_tied_levels(v, t, quantiles) for v, t in zip((x, y), tied, strict=True)))
    if len(rows) == 1 or len(columns) == 1:
        return 0.0
    margins = _entropy(rows) + _entropy(columns) + (len(rows) + len(columns) - 2) / (2 * len(x) * _LN2)
    return margins - _corrected_entropy(cells)


def _levels(values: np.ndarray, bins: int) -> np.ndarray:
    """The bin of equal width, over the values' own range, that each falls into: int64 (n,)."""
    low, high = float(values.min()), float(values.max())
    # Halves, because the width of the whole range may overflow.
    width = high / 2 - low / 2
    if not width > 0:
        return np.zeros(len(values), np.int64)
    places = (values / 2 - low / 2) / width * bins
    return np.minimum(places.astype(np.int64), bins - 1)


def _is_atom(values: np.ndarray, bins: int) -> np.ndarray:
    """Whether each value occurs at least as often as a quantile has samples: bool (n,)."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray(counts[place] * bins >= len(values)) & (counts[place] > 1)


def _tied_levels(values: np.ndarray, tied: np.ndarray, quantiles: int) -> np.ndarray:
    """The level of each value: one for every atom, and `quantiles` for the others, finer in the tails, int64 (n,).

    Equal values share a level, so that ties make fewer quantiles, not made-up ones. Values on two sides of an atom
    share none: few as they may be, which side they are on is known.
    """
    levels = np.empty(len(values), np.int64)
    atoms, levels[tied] = np.unique(values[tied], return_inverse=True)
    others = values[~tied]
    if len(others):
        masses = np.sin(np.pi / 2 * np.arange(1, quantiles) / quantiles) ** 2
        edges = np.unique(np.quantile(others, masses))
        places = np.searchsorted(atoms, others) * quantiles + np.searchsorted(edges, others, side="right")
        levels[~tied] = len(atoms) + places
    return levels


def _plug_in(rows: np.ndarray, columns: np.ndarray) -> PlugIn:
    row, column, cells = _counts(rows, columns)
    entropy_x, entropy_y, both = (_entropy(counts) for counts in (row, column, cells))
    bias = (len(cells) - len(row) - len(column) + 1) / (2 * len(rows) * _LN2)
    return PlugIn(entropy_x, entropy_y, max(0.0, both - entropy_x), entropy_x + entropy_y - both, bias)


def _counts(rows: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """How many samples are in each row, column and joint cell that holds any."""
    _, row, in_row = np.unique(rows, return_inverse=True, return_counts=True)
    _, column, in_column = np.unique(columns, return_inverse=True, return_counts=True)
    return in_row, in_column, np.unique(row * len(in_column) + column, return_counts=True)[1]


def _entropy(counts: np.ndarray) -> float:
    total = counts.sum()
    return float(np.log2(total) - (counts * np.log2(counts)).sum() / total)


def _corrected_entropy(counts: np.ndarray) -> float:
    """Grassberger's: log n_i becomes psi(n_i) + (-1)^n_i (psi((n_i + 1) / 2) - psi(n_i / 2)) / 2."""
    total, sizes = counts.sum(), counts.astype(float)
    parity = np.where(counts % 2 == 0, 0.5, -0.5)
    logs = digamma(sizes) + parity * (digamma((sizes + 1) / 2) - digamma(sizes / 2))
    return float(np.log2(total) - (sizes * logs).sum() / total / _LN2)


def _normal_scores(values: np.ndarray) -> np.ndarray:
    return np.asarray(ndtri(rankdata(values) / (len(values) + 1)))


def _score_correlation(x: np.ndarray, y: np.ndarray) -> float:
    u, v = _normal_scores(x), _normal_scores(y)
    scale = math.sqrt(float(u @ u) * float(v @ v))
    return float(u @ v) / scale if scale > 0 else 0.0


def _copula(x: np.ndarray, y: np.ndarray) -> float:
    count = len(x)
    rho = float(np.clip(_score_correlation(x, y), -_MOST_CORRELATED, _MOST_CORRELATED))
    # Two entropies of one dimension less one of two: of Ince et al.'s terms these remain.
    bias = (digamma((count - 1) / 2) - digamma((count - 2) / 2)) / 2 / _LN2
    return float(gaussian_information(rho) - bias)


def _copula_interval(
    x: np.ndarray, y: np.ndarray, parts: list[tuple[np.ndarray, np.ndarray]], quantile: float
) -> tuple[float, float]:
    limit = 1 - 1e-15
    z = [math.atanh(float(np.clip(_score_correlation(*part), -limit, limit))) for part in parts]
    centre = math.atanh(float(np.clip(_score_correlation(x, y), -limit, limit)))
    half = quantile * float(np.std(z, ddof=1)) / math.sqrt(len(z))
    ends = [abs(math.tanh(centre - half)), abs(math.tanh(centre + half))]
    nearest = 0.0 if abs(centre) <= half else min(ends)
    return float(gaussian_information(nearest)), float(gaussian_information(max(ends)))


def _nearest_neighbors(x: np.ndarray, y: np.ndarray, neighbors: int) -> float:
    if x.min() == x.max() or y.min() == y.max():
        return 0.0
    u, v = _normal_scores(x), _normal_scores(y)
    pairs, place, shared = np.unique(np.stack([u, v], axis=1), axis=0, return_inverse=True, return_counts=True)
    same = shared[place.ravel()]
    alone, ordered = same <= neighbors, (np.sort(u), np.sort(v))
    terms = np.empty(len(u))
    if alone.any():
        # More than k + 1 samples of one pair make no distance shorter.
        tree = cKDTree(np.repeat(pairs, np.minimum(shared, neighbors + 1), axis=0))
        distance = tree.query(np.stack([u, v], axis=1)[alone], k=neighbors + 1, p=np.inf)[0][:, -1]
        near = [digamma(_within(o, w[alone], distance)) for o, w in zip(ordered, (u, v), strict=True)]
        terms[alone] = digamma(neighbors) - near[0] - near[1]
    if not alone.all():
        tied = [_equal(o, w[~alone]) for o, w in zip(ordered, (u, v), strict=True)]
        terms[~alone] = digamma(same[~alone]) - digamma(tied[0]) - digamma(tied[1])
    return float((digamma(len(u)) + terms.mean()) / _LN2)


def _edge_bias(bits: float, x: np.ndarray, y: np.ndarray, neighbors: int, times: int) -> float:
    """What is missing in `bits` because neighbourhoods reach across edges of the density, from more neighbours.

    It grows as far as they reach, in the plane as the root of the number of neighbours.
    """
    more = min(times * neighbors, len(x) - 1)
    return (bits - _nearest_neighbors(x, y, more)) / max(math.sqrt(more / neighbors) - 1, 1e-9)


def _within(ordered: np.ndarray, values: np.ndarray, distance: np.ndarray) -> np.ndarray:
    """How many samples lie nearer than `distance` on one axis, each with itself."""
    low = np.searchsorted(ordered, values - distance, side="right")
    high = np.searchsorted(ordered, values + distance, side="left")
    return np.maximum(1, high - low)


def _equal(ordered: np.ndarray, values: np.ndarray) -> np.ndarray:
    """How many samples have each value on one axis."""
    return np.searchsorted(ordered, values, side="right") - np.searchsorted(ordered, values, side="left")
