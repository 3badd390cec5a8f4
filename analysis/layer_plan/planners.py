"""Other ways to choose settings by layer, on the same tables: what L-GreCo is compared with (section 5.3).

Errors and sizes are tables as `gradlab.knapsack.allocate` takes them, rows of settings from the most compressed to the
least where an order matters: sizes rise, errors fall.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement

import numpy as np

from gradlab.errors import GradlabError
from gradlab.knapsack import Allocation
from gradlab.plan.accordion import DECAY, ETA, is_critical

Rows = Sequence[np.ndarray]
Choice = Sequence[int] | np.ndarray

CGX_CLUSTERS = 6  # L-GreCo's choice for the comparison, section 5.3


def total(rows: Rows, choice: Choice) -> float:
    """Sum over layers the value of each one's chosen setting."""
    return float(np.array([row[index] for row, index in zip(rows, choice, strict=True)]).sum())


def uniform(errors: Rows, sizes: Rows, budget: float) -> Allocation:
    """Find the smallest plan with one setting for all layers, the same index in every row.

    Raises:
        GradlabError: for rows of different lengths, or a budget that none meets.
    """
    settings = _settings(errors)
    plans = [np.full(len(errors), index) for index in range(settings)]
    return _smallest(plans, errors, sizes, budget, "setting for all layers")


def cgx_kmeans(
    errors: Rows,
    sizes: Rows,
    budget: float,
    *,
    clusters: int = CGX_CLUSTERS,
    reference: int | None = None,
    seed: int = 0,
) -> Allocation:
    """Choose a setting per cluster of layers: CGX (Markov, Ramezanikebrya, Alistarh, "CGX", Middleware 2022).

    K-means clusters layers by size and error, in logarithms of unit variance. Clusters are put in order of error per
    size. Settings are given to them evenly between two ends, the smallest to the cluster of least error per size. CGX
    has no budget, its ends are given by hand. Here all pairs of ends are tried, and the smallest plan that keeps the
    budget is taken.

    Args:
        errors, sizes: per layer (settings,).
        budget: of the sum of errors.
        clusters: how many, at most.
        reference: index of the setting whose error and size are clustered; by default the middle.
        seed: of k-means.

    Raises:
        GradlabError: as `uniform`.
    """
    from sklearn.cluster import KMeans

    settings = _settings(errors)
    at = settings // 2 if reference is None else reference
    error, size = (np.array([row[at] for row in rows], dtype=float) for rows in (errors, sizes))
    points = np.stack([_standard(size), _standard(error)], axis=1)
    count = min(clusters, len(np.unique(points, axis=0)))
    labels = KMeans(count, n_init=10, random_state=seed).fit(points).labels_
    ratio = [error[labels == label].sum() / max(size[labels == label].sum(), 1e-300) for label in range(count)]
    place = np.argsort(np.argsort(ratio, kind="stable"), kind="stable")[labels]  # of the layer's cluster, 0 ...
    plans = []
    for low, high in combinations_with_replacement(range(settings), 2):
        levels = np.round(np.linspace(low, high, count)).astype(int)
        plans.append(levels[place])
    return _smallest(plans, errors, sizes, budget, "pair of ends")


def accordion(
    norms: np.ndarray, learning_rates: np.ndarray, *, eta: float = ETA, least_decay: float = DECAY
) -> np.ndarray:
    """Find critical regimes window by window, as `gradlab.plan.accordion.is_critical` says.

    Args:
        norms: (windows, layers), not squared.
        learning_rates: (windows,), NaN where unknown.
        eta, least_decay: see `is_critical`.

    Returns:
        (windows, layers), bool; all layers are critical in the first window.
    """
    unknown = np.full_like(norms[:1], np.nan)
    before = np.concatenate([unknown, norms[:-1]])
    rates = np.concatenate([[np.nan], learning_rates])[:, None]
    return is_critical(before, norms, rates[:-1], rates[1:], eta=eta, least_decay=least_decay)


def global_threshold(counts: Rows, errors: Rows, sizes: Rows, budget: float) -> Allocation:
    """Find the smallest plan with one threshold lambda on magnitudes for the whole model, on tables of top-k densities.

    Every value of magnitude lambda or more is sent. Global top-k (Shi et al., "Understanding top-k sparsification in
    distributed deep learning", 2019) finds the lambda that sends k values; Rethink-GS (Sahu et al., NeurIPS 2021) is
    given one. From one density to the next a layer gains (difference of errors) / (difference of counts), the mean
    square of the values between. Gains above lambda^2 are taken, and all lambda are tried.

    Args:
        counts: values sent, per layer (settings,), rising.
        errors: squared, per layer (settings,).
        sizes: per layer (settings,).
        budget: of the sum of errors.

    Raises:
        GradlabError: as `uniform`.
    """
    # One of several settings that send as many values is enough, so that counts differ from one to the next.
    places = [np.flatnonzero(np.diff(row, prepend=-1) > 0) for row in counts]
    steps = [
        (float(gain), layer)
        for layer, (error, count, kept) in enumerate(zip(errors, counts, places, strict=True))
        for gain in _falling(-np.diff(error[kept]) / np.diff(count[kept]))
    ]
    taken = [0] * len(errors)
    plans = [np.array([kept[0] for kept in places])]
    for _, layer in sorted(steps, key=lambda step: -step[0]):
        taken[layer] += 1
        plans.append(np.array([kept[number] for kept, number in zip(places, taken, strict=True)]))
    return _smallest(plans, errors, sizes, budget, "threshold")


def _falling(gains: np.ndarray) -> np.ndarray:
    """Make gains fall: values sorted by magnitude gain less and less, and rounding can hide it."""
    return np.minimum.accumulate(gains)


def _settings(errors: Rows) -> int:
    lengths = {len(row) for row in errors}
    if len(lengths) != 1:
        raise GradlabError(f"settings: {sorted(lengths)} in different layers, expected the same in all")
    return lengths.pop()


def _standard(values: np.ndarray) -> np.ndarray:
    logarithms = np.log(np.maximum(values, values[values > 0].min(initial=1.0)))
    spread = logarithms.std()
    return (logarithms - logarithms.mean()) / (spread if spread > 0 else 1.0)


def _smallest(plans: Sequence[np.ndarray], errors: Rows, sizes: Rows, budget: float, what: str) -> Allocation:
    within = [(total(sizes, plan), plan) for plan in plans if total(errors, plan) <= budget]
    if not within:
        least = min(total(errors, plan) for plan in plans)
        raise GradlabError(f"no {what} keeps an error of {budget:.6g}; the least is {least:.6g}")
    size, plan = min(within, key=lambda pair: pair[0])
    return Allocation(plan, size, 0.0)
