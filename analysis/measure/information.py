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

Everything that an estimator needs of one variable alone follows from its order. A `Variable` holds that order, so that
many pairs of few variables sort each of them once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
from scipy.spatial import cKDTree
from scipy.special import digamma, ndtri, stdtrit

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
_DENSE_CELLS = 8  # joint cells per sample up to which all are counted, beyond it those that hold any
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


@dataclass(frozen=True, eq=False)
class Variable:
    """Samples of one variable, sorted once: all that estimators take from one variable is computed once and kept.

    kinds: (k,), the different values, rising; place: (n,), the kind of each sample; counts: (k,), samples of each kind.
    """

    kinds: np.ndarray
    place: np.ndarray
    counts: np.ndarray
    _kept: dict[tuple[str, float], _Levels] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, values: np.ndarray | Variable) -> Variable:
        """Sort values (n,); a variable is returned as it is.

        Raises:
            GradlabError: for values that are not finite.
        """
        if isinstance(values, Variable):
            return values
        values = np.asarray(values, np.float64).ravel()
        if not np.isfinite(values).all():
            raise GradlabError("mutual information: values must be finite")
        return cls(*np.unique(values, return_inverse=True, return_counts=True))

    def __len__(self) -> int:
        return len(self.place)

    @property
    def values(self) -> np.ndarray:
        """The samples, (n,)."""
        return self.kinds[self.place]

    @property
    def constant(self) -> bool:
        """Whether all samples are equal."""
        return len(self.kinds) == 1

    @property
    def distinct(self) -> bool:
        """Whether no two samples are equal."""
        return len(self.kinds) == len(self.place)

    def permuted(self, generator: np.random.Generator) -> Variable:
        """The same samples in a random order."""
        return Variable(self.kinds, generator.permutation(self.place), self.counts)

    @cached_property
    def scores(self) -> np.ndarray:
        """Normal scores (n,): the normal quantiles of ranks, ties at their mean rank."""
        return np.asarray(self._kind_scores[self.place])

    @cached_property
    def ordered_scores(self) -> np.ndarray:
        """Normal scores, rising: (n,)."""
        return np.repeat(self._kind_scores, self.counts)

    @cached_property
    def score_energy(self) -> float:
        """Squared norm of the scores."""
        return float(self.scores @ self.scores)

    @cached_property
    def _kind_scores(self) -> np.ndarray:
        ends = np.cumsum(self.counts)
        return np.asarray(ndtri((2 * ends - self.counts + 1) / 2 / (len(self) + 1)))

    def atoms(self, bins: int) -> np.ndarray:
        """Whether each kind occurs at least as often as a quantile has samples: bool (k,)."""
        return np.asarray(self.counts * bins >= len(self)) & (self.counts > 1)

    def equal_bins(self, bins: int) -> _Levels:
        """Levels of equal width, over the samples' own range."""
        return self._once("equal", bins, lambda: _levels(self.kinds, bins))

    def quantiles(self, bins: int, count: int) -> _Levels:
        """Levels: one for each atom of `bins`, and `count` quantiles of the others, finer in the tails.

        Equal values share a level, so that ties make fewer quantiles, not made-up ones. Values on two sides of an atom
        share none: few as they may be, which side they are on is known.
        """
        return self._once(f"quantiles {bins}", count, lambda: self._tied_levels(self.atoms(bins), count))

    def _tied_levels(self, atoms: np.ndarray, count: int) -> np.ndarray:
        """The level of each kind, int64 (k,): atoms have the first ones."""
        levels = np.empty(len(self.kinds), np.int64)
        levels[atoms] = np.arange(atoms.sum())
        others = self.kinds[~atoms]
        if len(others):
            masses = np.sin(np.pi / 2 * np.arange(1, count) / count) ** 2
            edges = np.unique(np.quantile(np.repeat(others, self.counts[~atoms]), masses))
            places = np.searchsorted(self.kinds[atoms], others) * count + np.searchsorted(edges, others, side="right")
            levels[~atoms] = atoms.sum() + places
        return levels

    def _once(self, what: str, count: float, of_kinds: Callable[[], np.ndarray]) -> _Levels:
        if (what, count) not in self._kept:
            _, number = np.unique(of_kinds(), return_inverse=True)
            counts = np.bincount(number, weights=self.counts).astype(np.int64)
            self._kept[what, count] = _Levels(number[self.place], counts)
        return self._kept[what, count]


@dataclass(frozen=True)
class _Levels:
    """Samples on a grid: the number of each one's level, (n,), and the samples in each, (levels,), none of them 0."""

    number: np.ndarray
    counts: np.ndarray


def mutual_information(
    x: np.ndarray | Variable,
    y: np.ndarray | Variable,
    method: str = "histogram",
    *,
    bins: int | None = None,
    neighbors: int = _NEIGHBORS,
) -> float:
    """I(x; y) in bits from paired samples x, y (n,); corrected estimators may fall below 0 where there is none.

    x, y: arrays, or variables that many pairs share. method: one of `METHODS`, see the module. bins: per variable, of
    the two histograms; None: as many as leave about 10 samples per joint cell. neighbors: KSG's k.

    Raises:
        GradlabError: for an unknown method, fewer than 16 pairs, values that are not finite, lengths that differ, or
            bins whose joint cells outnumber the pairs.
    """
    first, second = _pair(x, y)
    return _estimator(method, len(first), bins, neighbors)(first, second)


def estimate_information(
    x: np.ndarray | Variable,
    y: np.ndarray | Variable,
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
    bits = _estimator(method, len(first), bins, neighbors)(first, second)
    parts = list(zip(_blocks_of(first, blocks), _blocks_of(second, blocks), strict=True))
    quantile = float(stdtrit(blocks - 1, 0.5 + level / 2))
    if method == "copula":
        low, high = _copula_interval(first, second, parts, quantile)
    else:
        # A block carries fewer bins than the whole; how much an estimate varies hardly depends on them.
        smallest = len(first) // blocks
        count = bins or _affordable_bins(len(first))
        in_block = _estimator(method, smallest, min(count, math.isqrt(smallest)), neighbors)
        half = quantile * float(np.std([in_block(*part) for part in parts], ddof=1)) / math.sqrt(blocks)
        if method == "quantiles":
            lost = [bits - _on_quantiles(first, second, count, coarser) for coarser in _COARSER]
        else:
            lost = [_edge_bias(bits, first, second, neighbors, times) for times in _MORE_NEIGHBORS]
            half = math.hypot(half, lost[0])
        low, high = bits - half, bits + half + max(0.0, *lost)
    return InformationEstimate(bits, max(0.0, low), max(0.0, high), level, method, len(first))


def _blocks_of(variable: Variable, blocks: int) -> list[Variable]:
    """Contiguous blocks of the samples."""
    return [Variable.of(part) for part in np.array_split(variable.values, blocks)]


def _affordable_blocks(method: str, samples: int) -> int:
    per_block = _NEIGHBORS_PER_BLOCK if method == "ksg" and samples >= 2 * _NEIGHBORS_PER_BLOCK else _FEWEST_PER_BLOCK
    return min(_MOST_BLOCKS, samples // per_block)


def plug_in(x: np.ndarray | Variable, y: np.ndarray | Variable, bins: int = PAPER_BINS) -> PlugIn:
    """LGC's eq. (1): entropies and information of samples x, y (n,) on `bins` of equal width over each one's range.

    Any number of bins is accepted, so that the bias can be seen. Fewer bins than 2^32 are more informative.

    Raises:
        GradlabError: for lengths that differ, fewer than 16 pairs, values that are not finite, or no bin.
    """
    x, y = _pair(x, y)
    if bins < 1:
        raise GradlabError(f"bins = {bins}, expected at least 1")
    return _plug_in(x.equal_bins(bins), y.equal_bins(bins))


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


@dataclass(frozen=True)
class NeighborEstimate:
    """Information by nearest neighbours, in bits, with the standard error that the spread of its terms says."""

    bits: float
    error: float


def neighbor_information(
    x: np.ndarray | Variable, y: np.ndarray | Variable, neighbors: int = _NEIGHBORS
) -> NeighborEstimate:
    """`mutual_information` by "ksg", with the error that follows from its terms, of which the estimate is a mean.

    A term belongs to a sample and its neighbourhood. Terms of neighbours depend on each other, but little: the error
    says how far an estimate varies with the samples that are drawn, and is no interval.

    Raises:
        GradlabError: as `mutual_information`.
    """
    first, second = _pair(x, y)
    _estimator("ksg", len(first), None, neighbors)
    return _neighbor_terms(first, second, neighbors)


# --- nulls ----------------------------------------------------------------------------------------------------------


def shuffled_information(
    x: np.ndarray | Variable,
    y: np.ndarray | Variable,
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
    first, second = _pair(x, y)
    return float(
        np.mean([mutual_information(first, second.permuted(generator), method, bins=bins) for _ in range(repeats)])
    )


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


def _histogram(x: Variable, y: Variable, bins: int) -> float:
    return _plug_in(x.equal_bins(bins), y.equal_bins(bins)).information


def _on_quantiles(x: Variable, y: Variable, bins: int, coarser: float = 1) -> float:
    """Bits, on so many quantiles of what is not tied, or on fewer by a factor of `coarser`."""
    tied = [variable.atoms(bins) for variable in (x, y)]
    # Of the joint cells only those of two quantiles are many: as many as the pairs that are tied in neither can fill.
    untied = float(np.mean(~tied[0][x.place] & ~tied[1][y.place])) if any(map(np.any, tied)) else 1.0
    count = max(1, round(bins * math.sqrt(untied) / coarser))
    rows, columns = x.quantiles(bins, count), y.quantiles(bins, count)
    if len(rows.counts) == 1 or len(columns.counts) == 1:
        return 0.0
    corners = (len(rows.counts) + len(columns.counts) - 2) / (2 * len(x) * _LN2)
    return _entropy(rows.counts) + _entropy(columns.counts) + corners - _corrected_entropy(_joint(rows, columns))


def _levels(values: np.ndarray, bins: int) -> np.ndarray:
    """The bin of equal width, over their own range, that each of rising values falls into: int64 (k,)."""
    low, high = float(values[0]), float(values[-1])
    # Halves, because the width of the whole range may overflow.
    width = high / 2 - low / 2
    if not width > 0:
        return np.zeros(len(values), np.int64)
    places = (values / 2 - low / 2) / width * bins
    return np.minimum(places.astype(np.int64), bins - 1)


def _plug_in(rows: _Levels, columns: _Levels) -> PlugIn:
    cells = _joint(rows, columns)
    entropy_x, entropy_y, both = (_entropy(counts) for counts in (rows.counts, columns.counts, cells))
    bias = (len(cells) - len(rows.counts) - len(columns.counts) + 1) / (2 * len(rows.number) * _LN2)
    return PlugIn(entropy_x, entropy_y, max(0.0, both - entropy_x), entropy_x + entropy_y - both, bias)


def _joint(rows: _Levels, columns: _Levels) -> np.ndarray:
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


def _corrected_entropy(counts: np.ndarray) -> float:
    """Grassberger's: log n_i becomes psi(n_i) + (-1)^n_i (psi((n_i + 1) / 2) - psi(n_i / 2)) / 2."""
    total, sizes = counts.sum(), counts.astype(float)
    parity = np.where(counts % 2 == 0, 0.5, -0.5)
    logs = digamma(sizes) + parity * (digamma((sizes + 1) / 2) - digamma(sizes / 2))
    return float(np.log2(total) - (sizes * logs).sum() / total / _LN2)


def _score_correlation(x: Variable, y: Variable) -> float:
    scale = math.sqrt(x.score_energy * y.score_energy)
    return float(x.scores @ y.scores) / scale if scale > 0 else 0.0


def _copula(x: Variable, y: Variable) -> float:
    count = len(x)
    rho = float(np.clip(_score_correlation(x, y), -_MOST_CORRELATED, _MOST_CORRELATED))
    # Two entropies of one dimension less one of two: of Ince et al.'s terms these remain.
    bias = (digamma((count - 1) / 2) - digamma((count - 2) / 2)) / 2 / _LN2
    return float(gaussian_information(rho) - bias)


def _copula_interval(
    x: Variable, y: Variable, parts: list[tuple[Variable, Variable]], quantile: float
) -> tuple[float, float]:
    limit = 1 - 1e-15
    z = [math.atanh(float(np.clip(_score_correlation(*part), -limit, limit))) for part in parts]
    centre = math.atanh(float(np.clip(_score_correlation(x, y), -limit, limit)))
    half = quantile * float(np.std(z, ddof=1)) / math.sqrt(len(z))
    ends = [abs(math.tanh(centre - half)), abs(math.tanh(centre + half))]
    nearest = 0.0 if abs(centre) <= half else min(ends)
    return float(gaussian_information(nearest)), float(gaussian_information(max(ends)))


def _nearest_neighbors(x: Variable, y: Variable, neighbors: int) -> float:
    return _neighbor_terms(x, y, neighbors).bits


def _neighbor_terms(x: Variable, y: Variable, neighbors: int) -> NeighborEstimate:
    if x.constant or y.constant:
        return NeighborEstimate(0.0, 0.0)
    u, v, count = x.scores, y.scores, len(x)
    points = np.stack([u, v], axis=1)
    if x.distinct or y.distinct:
        pairs, shared, same = points, np.ones(count, np.int64), np.ones(count, np.int64)
    else:
        pairs, place, shared = np.unique(points, axis=0, return_inverse=True, return_counts=True)
        same = shared[place.ravel()]
    alone, ordered = same <= neighbors, (x.ordered_scores, y.ordered_scores)
    terms = np.empty(count)
    if alone.any():
        # More than k + 1 samples of one pair make no distance shorter.
        tree = cKDTree(np.repeat(pairs, np.minimum(shared, neighbors + 1), axis=0))
        distance = tree.query(points[alone], k=[neighbors + 1], p=np.inf)[0][:, 0]
        near = [digamma(_within(o, w[alone], distance)) for o, w in zip(ordered, (u, v), strict=True)]
        terms[alone] = digamma(neighbors) - near[0] - near[1]
    if not alone.all():
        tied = [_equal(o, w[~alone]) for o, w in zip(ordered, (u, v), strict=True)]
        terms[~alone] = digamma(same[~alone]) - digamma(tied[0]) - digamma(tied[1])
    error = float(terms.std()) / math.sqrt(count)
    return NeighborEstimate(float((digamma(count) + terms.mean()) / _LN2), error / _LN2)


def _edge_bias(bits: float, x: Variable, y: Variable, neighbors: int, times: int) -> float:
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
