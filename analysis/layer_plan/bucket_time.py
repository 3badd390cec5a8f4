"""Time in place of size: what a byte costs in each of DDP's buckets, and plans that count it so.

Alimohammadi et al., "L-GreCo", MLSys 2024, sections 4 and 5.5: the time from the first bucket's synchronisation to
the last one's end is regressed on the buckets' sizes, and its coefficients T(b) weigh the layers' sizes. Appendix A:
weights that rise with the bucket's number, because the first buckets travel while backward runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gradlab.analysis.forecast.step_time import assign_buckets
from gradlab.errors import GradlabError
from gradlab.layout import Layer

_TIE = 1e-3


@dataclass(frozen=True)
class BucketTimes:
    """The regression seconds = intercept + sum_b coefficients[b] * bytes[b].

    coefficients: (buckets,), T(b) in seconds per byte.
    intercept: seconds that no byte causes.
    score: R^2, the share of variance explained.
    """

    coefficients: np.ndarray
    intercept: float
    score: float


def fit_bucket_times(sizes: np.ndarray, seconds: np.ndarray, *, positive: bool = True) -> BucketTimes:
    """Fit T(b) by least squares to sizes (samples, buckets) in bytes and seconds (samples,)."""
    from sklearn.linear_model import LinearRegression

    sizes, seconds = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    if sizes.ndim != 2 or seconds.shape != sizes.shape[:1] or not sizes.shape[1]:
        raise GradlabError(
            f"bucket times: sizes {sizes.shape} and seconds {seconds.shape}, expected (n, buckets), (n,)"
        )
    if len(sizes) <= sizes.shape[1]:
        raise GradlabError(f"bucket times: {len(sizes)} samples of {sizes.shape[1]} buckets, expected more than these")
    if not (np.isfinite(sizes).all() and np.isfinite(seconds).all()):
        raise GradlabError("bucket times: sizes or seconds that are not finite")
    scale = sizes.max() or 1.0  # bytes are large numbers and seconds small ones
    model = LinearRegression(positive=positive).fit(sizes / scale, seconds)
    return BucketTimes(model.coef_ / scale, float(model.intercept_), float(model.score(sizes / scale, seconds)))


def bucket_of_layers(layers: Sequence[Layer], bucket_cap_mb: float | None = None) -> dict[str, int]:
    """Number each layer's bucket, from 0, in the order of communication, as DDP assigns layers."""
    buckets = assign_buckets(layers, bucket_cap_mb)
    return {layer.name: number for number, bucket in enumerate(buckets) for layer in bucket}


def linear_priority(layers: Sequence[Layer], bucket_cap_mb: float | None = None) -> dict[str, float]:
    """Weigh each layer by its bucket's number, from 1, so that the last buckets are compressed most (appendix A)."""
    return {name: number + 1.0 for name, number in bucket_of_layers(layers, bucket_cap_mb).items()}


def above_nothing(coefficients: np.ndarray) -> np.ndarray:
    """Replace negative coefficients by 0, and add a thousandth of the largest to each."""
    largest = coefficients.max(initial=0.0)
    if largest <= 0:
        raise GradlabError("bucket times: no bucket's bytes take any time: there is nothing to weigh layers by")
    return np.maximum(coefficients, 0.0) + _TIE * largest


def weighted(names: Sequence[str], costs: Sequence[np.ndarray], weights: Mapping[str, float]) -> list[np.ndarray]:
    """Multiply layers' costs, (candidates,) each, by their weights."""
    return [row * weights[name] for name, row in zip(names, costs, strict=True)]
