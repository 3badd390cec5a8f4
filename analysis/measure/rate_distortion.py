"""The least bits at an error: Gaussian rate-distortion functions, by reverse water-filling.

Cover & Thomas, "Elements of information theory", 2nd ed., section 10.3.3, Theorem 10.3.3. For independent Gaussian
components with variances v_i, D(theta) = sum min(theta, v_i) takes R(theta) = sum max(0, log2(v_i / theta) / 2) bits.
Of all sources with these variances the Gaussian one takes the most bits at a given error, if the bits are used as well
as can be: a code that makes use of heavier tails, or of dependence between components, may get below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gradlab.analysis.gradients import step_gradients
from gradlab.errors import GradlabError

if TYPE_CHECKING:
    from gradlab.trace import Trace


def distortion_at(variances: np.ndarray, bits: float) -> float:
    """Least expected squared error of a vector coded in `bits` bits, summed over components. variances: (n,).

    Raises:
        GradlabError: for a negative or non-finite variance, or fewer than 0 bits.
    """
    positive = _positive(variances)
    if not bits >= 0:
        raise GradlabError(f"rate-distortion: {bits} bits, expected 0 or more")
    if not len(positive):
        return 0.0
    # With the m largest above the water, R = (sum of their log2 v - m log2 theta) / 2.
    logs = np.log2(positive)
    counts = np.arange(1, len(positive) + 1)
    levels = (np.cumsum(logs) - 2 * bits) / counts  # log2 theta if these m are
    # The true m is the largest whose water stands no higher than its smallest variance.
    above = np.flatnonzero(levels <= logs)
    m = int(above[-1]) + 1
    return float(m * 2.0 ** levels[m - 1] + positive[m:].sum())


def rate_at(variances: np.ndarray, distortion: float) -> float:
    """Least bits for a vector at an expected squared error of `distortion`, summed over components.

    Raises:
        GradlabError: for a negative or non-finite variance, or no positive distortion.
    """
    positive = _positive(variances)
    if not distortion > 0:
        raise GradlabError(f"rate-distortion: distortion {distortion}, expected above 0")
    if distortion >= positive.sum():
        return 0.0
    # With the m largest above the water at theta: m theta + the rest's sum = D.
    rest = positive.sum() - np.cumsum(positive)
    counts = np.arange(1, len(positive) + 1)
    levels = (distortion - rest) / counts
    m = int(np.flatnonzero((levels > 0) & (levels <= positive))[-1]) + 1
    return float(0.5 * np.log2(positive[:m] / levels[m - 1]).sum())


def _positive(variances: np.ndarray) -> np.ndarray:
    values = np.asarray(variances, np.float64).ravel()
    if not np.isfinite(values).all() or (values < 0).any():
        raise GradlabError("rate-distortion: variances must be finite numbers from 0 on")
    return np.sort(values[values > 0])[::-1]


def mean_squares(trace: Trace, layer: str) -> np.ndarray:
    """Mean square of each of a layer's coordinates over all ranks and the steps that are finite, (numel,)."""
    total, count = np.zeros(next(x.numel for x in trace.layers if x.name == layer)), 0
    for step in trace.iterate(0, len(trace.steps), [layer]):
        for rank in step_gradients(step):
            values = np.asarray(rank[layer], np.float64).ravel()
            if np.isfinite(values).all():
                total += values**2
                count += 1
    return total / max(1, count)
