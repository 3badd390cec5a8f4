"""Mutual information by nearest neighbours, of continuous values, discrete ones, and mixtures of both.

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

import numpy as np
from scipy.spatial import cKDTree
from scipy.special import digamma

from gradlab.analysis.measure.variable import Variable, normal_grid

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
    middles = np.stack([variable.centres[variable.place] for variable in (x, y)], axis=1)
    tree = cKDTree(_scattered(middles, np.stack([x.scores(0), y.scores(1)], axis=1)))
    distance = tree.query(middles[around], k=[neighbors + 1], p=np.inf)[0][:, 0]
    return np.stack([_within(variable, around, distance) for variable in (x, y)])


def _scattered(middles: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Places of samples: tied ones beside each other, in the order of their scores."""
    return middles + _SCATTER * (scores - middles)


def _within(variable: Variable, around: np.ndarray, distance: np.ndarray) -> np.ndarray:
    """How many samples lie nearer than `distance` on one axis, with all that are tied with the sample itself."""
    kinds = variable.place[around]
    rising = _scattered(np.repeat(variable.centres, variable.counts), normal_grid(len(variable)))
    middle = variable.centres[kinds]
    inside = distance - 4 * np.spacing(np.abs(middle) + distance)  # the sum may be rounded up to what lies at distance
    low = np.searchsorted(rising, middle - inside, side="right")
    high = np.searchsorted(rising, middle + inside, side="left")
    ends = variable.ends[kinds]
    return np.asarray(np.maximum(high, ends) - np.minimum(low, ends - variable.counts[kinds]))
