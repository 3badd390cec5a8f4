"""Reference estimators of mutual information: nearest neighbours, right for ties and any dependence, and intervals.

Gao, Kannan, Oh, Viswanath, "Estimating mutual information for discrete-continuous mixtures", NeurIPS 2017
(arXiv:1709.06212), Algorithm 1 with digamma in place of the logarithm, as in their published code. The term of sample i
is, in nats,

    psi(k) + psi(n) - psi(n_x) - psi(n_y)

The neighbourhood of i reaches to its k-th neighbour, in the larger of the distances in x and in y. n_x and n_y samples,
with i, lie nearer than that in x and in y. For continuous values this is algorithm 1 of Kraskov, Stoegbauer and
Grassberger (PRE 69, 066138, 2004). If more than k samples share a pair, the neighbourhood is that pair, and k, n_x
and n_y are the numbers of samples that are tied with i: the plug-in at the pair.

Distances are of normal scores, so that monotone transforms change nothing. Tied samples have one place, the middle of
their scores. A neighbourhood that ends among tied samples takes them in random order. The paper's counts take all of
them for n_x and only k for the pair, which makes information of ties on one side. The random order does not: for
independent values psi of the counts is right on average, whatever is tied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.spatial import cKDTree
from scipy.special import digamma, ndtri, stdtrit

from gradlab.analysis.measure.information import (
    MOST_CORRELATED,
    as_pair,
    gaussian_information,
    mutual_information,
    score_correlation,
)
from gradlab.analysis.measure.variable import Variable, normal_grid
from gradlab.errors import GradlabError

_FEWEST_PER_BLOCK, _MOST_BLOCKS = 64, 16
_NEIGHBORS_PER_BLOCK = 128  # samples, from which on the spread of neighbours in a block tells that of the whole
NEIGHBORS = 3  # k, the recommendation of Kraskov et al. for estimates

_LN2 = math.log(2)
_SCATTER = 1e-7  # of their scores' range, over which tied samples are placed: less than between any others
_MORE = (2, 4, 8)  # times k
_UNRESOLVED = 0.05  # share of neighbourhoods that are the same samples in x and in y, beyond which nothing bounds I


def neighbor_terms(x: Variable, y: Variable, neighbors: int) -> tuple[np.ndarray, float]:
    """Compute the terms (n,) whose mean is I(x; y), in bits, and the share of neighbourhoods equal in x and y."""
    count = len(x)
    if x.constant or y.constant:
        return np.zeros(count), 0.0
    tied = _samples_of_pairs(x, y)
    at_pair, around = tied > neighbors, np.flatnonzero(tied <= neighbors)
    near = np.stack([variable.counts[variable.place] for variable in (x, y)])
    if len(around):
        near[:, around] = _neighborhoods(x, y, around, neighbors)
    terms = digamma(np.where(at_pair, tied, neighbors)) + digamma(count) - digamma(near).sum(axis=0)
    alike = (near[:, around] <= neighbors + 1).all(axis=0)
    return terms / _LN2, float(alike.sum()) / count


def neighbor_interval(x: Variable, y: Variable, neighbors: int, half: float) -> tuple[float, float]:
    """Compute the ends of an interval, in bits: `half` for the spread, and what more neighbours change.
    The bias at the density's edges grows as neighbourhoods do: in the plane, as the root of the number of neighbours.
    """
    terms, alike = neighbor_terms(x, y, neighbors)
    bits, lost = float(terms.mean()), []
    for times in _MORE:
        more = min(times * neighbors, len(x) - 1)
        fewer_bits = float(neighbor_terms(x, y, more)[0].mean())
        lost.append((bits - fewer_bits) / max(math.sqrt(more / neighbors) - 1, 1e-9))
    half = math.hypot(half, lost[0])
    return bits - half, math.inf if alike > _UNRESOLVED else bits + half + max(0.0, *lost)


def _samples_of_pairs(x: Variable, y: Variable) -> np.ndarray:
    """How many samples share each sample's pair, with itself: (n,)."""
    if x.distinct or y.distinct:
        return np.ones(len(x), np.int64)
    _, place, counts = np.unique(x.place * len(y.kinds) + y.place, return_inverse=True, return_counts=True)
    return np.asarray(counts[place])


def _neighborhoods(x: Variable, y: Variable, around: np.ndarray, neighbors: int) -> np.ndarray:
    """How many samples are nearer than the k-th neighbour in x and in y, with each of the samples `around`: (2, m)."""
    middles = np.stack([_centres(variable)[variable.place] for variable in (x, y)], axis=1)
    tree = cKDTree(_scattered(middles, np.stack([x.scores(0), y.scores(1)], axis=1)))
    distance = tree.query(middles[around], k=[neighbors + 1], p=np.inf)[0][:, 0]
    return np.stack([_within(variable, around, distance) for variable in (x, y)])


def _scattered(middles: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Places of samples: tied ones beside each other, in the order of their scores."""
    return middles + _SCATTER * (scores - middles)


def _within(variable: Variable, around: np.ndarray, distance: np.ndarray) -> np.ndarray:
    """How many samples lie nearer than `distance` on one axis, with all that are tied with the sample itself."""
    kinds = variable.place[around]
    rising = _scattered(np.repeat(_centres(variable), variable.counts), normal_grid(len(variable)))
    middle = _centres(variable)[kinds]
    inside = distance - 4 * np.spacing(np.abs(middle) + distance)  # the sum may be rounded up to what lies at distance
    low = np.searchsorted(rising, middle - inside, side="right")
    high = np.searchsorted(rising, middle + inside, side="left")
    ends = np.cumsum(variable.counts)[kinds]
    return np.asarray(np.maximum(high, ends) - np.minimum(low, ends - variable.counts[kinds]))


def _centres(variable: Variable) -> np.ndarray:
    """The middle of each kind's normal scores, (k,): samples that are tied have one place."""
    grid, ends = normal_grid(len(variable)), np.cumsum(variable.counts)
    return (grid[ends - variable.counts] + grid[ends - 1]) / 2


def neighbor_information(x: np.ndarray | Variable, y: np.ndarray | Variable, neighbors: int = NEIGHBORS) -> float:
    """Estimate I(x; y) in bits by nearest neighbours; it may be below 0."""
    first, second = as_pair(x, y)
    if not 1 <= neighbors < len(first):
        raise GradlabError(f"neighbors = {neighbors}, expected 1 to {len(first) - 1}")
    return float(neighbor_terms(first, second, neighbors)[0].mean())


def estimated(x: np.ndarray | Variable, y: np.ndarray | Variable, method: str) -> float:
    """`mutual_information`, or by "mixed", nearest neighbours."""
    return neighbor_information(x, y) if method == "mixed" else mutual_information(x, y, method)


@dataclass(frozen=True)
class InformationEstimate:
    """Mutual information in bits, 0 or more, with an interval of confidence `level` that holds it.

    high: infinity if neighbours, or a copula, cannot tell the pair from one variable that is a function of the other.
    """

    bits: float
    low: float
    high: float
    level: float
    method: str
    samples: int


def estimate_information(
    x: np.ndarray | Variable, y: np.ndarray | Variable, method: str = "copula", *, level: float = 0.95
) -> InformationEstimate:
    """Estimate I(x; y) with an interval, from how it differs between blocks of successive samples.
    The variance falls as 1 / n (Holmes & Nemenman, PRE 100, 022404, 2019). "copula" takes Fisher's z of rho.
    """
    first, second = as_pair(x, y)
    per_block = (
        _NEIGHBORS_PER_BLOCK if method == "mixed" and len(first) >= 2 * _NEIGHBORS_PER_BLOCK else _FEWEST_PER_BLOCK
    )
    blocks = min(_MOST_BLOCKS, len(first) // per_block)
    if blocks < 2:
        raise GradlabError(f"an interval from {len(first)} samples: expected 2 blocks of {_FEWEST_PER_BLOCK}")
    bits = estimated(first, second, method)
    if first.constant or second.constant:
        low = high = 0.0
    elif method == "copula":
        low, high = _copula_interval(first, second, blocks, level)
    else:
        varies = _varies(partial(estimated, method=method), first.values, second.values, blocks, level)
        low, high = neighbor_interval(first, second, NEIGHBORS, varies)
    bits = max(0.0, bits)
    return InformationEstimate(bits, max(0.0, min(low, bits)), max(high, bits), level, method, len(first))


def _varies(
    estimate: Callable[[Variable, Variable], float], x: np.ndarray, y: np.ndarray, blocks: int, level: float
) -> float:
    """How far the estimate of samples (n,) varies at confidence `level`, by its values in contiguous blocks."""
    parts = zip(np.array_split(x, blocks), np.array_split(y, blocks), strict=True)
    deviation = float(np.std([estimate(Variable.of(a), Variable.of(b)) for a, b in parts], ddof=1))
    return float(stdtrit(blocks - 1, 0.5 + level / 2)) * deviation / math.sqrt(blocks)


def _fisher(x: Variable, y: Variable) -> float:
    return math.atanh(score_correlation(x, y))


def _copula_interval(x: Variable, y: Variable, blocks: int, level: float) -> tuple[float, float]:
    # Scores, because values may all be tied in a block. Few blocks may vary less by chance than independent normal
    # pairs do, of which Fisher's z has a known deviation.
    least = float(ndtri(0.5 + level / 2)) / math.sqrt(len(x) - 3)
    half = max(least, _varies(_fisher, x.scores(0), y.scores(1), blocks, level))
    centre = abs(_fisher(x, y))
    low, high = (float(gaussian_information(math.tanh(end))) for end in (max(0.0, centre - half), centre + half))
    return low, math.inf if math.tanh(centre) >= MOST_CORRELATED else high
