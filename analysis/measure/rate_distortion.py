"""The least bits at an error: Gaussian rate-distortion functions, by reverse water-filling.

Cover & Thomas, "Elements of information theory", 2nd ed., section 10.3.3, Theorem 10.3.3. For independent Gaussian
components with variances v_i, D(theta) = sum min(theta, v_i) takes R(theta) = sum max(0, log2(v_i / theta) / 2) bits.
Among sources with these variances the Gaussian one needs the most bits. A code that exploits heavy tails or correlation
can do better than this curve.

This is one rank's gradient, coded by itself. Training needs the mean over ranks alone, of which every rank's code tells
something where gradients have a signal in common: `rate_of_mean` says how many bits that could save.
"""

from __future__ import annotations

import numpy as np

from gradlab.errors import GradlabError


def rate_at(variances: np.ndarray, distortion: float) -> float:
    """Compute the least bits for a vector at an expected squared error of `distortion`, summed over components."""
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


def rate_of_mean(relative_error: float, correlation: float, ranks: int) -> float:
    """Compute bits per value and rank that suffice for the mean over N ranks at relative squared error D, in (0, 1].

    Berger and Tung's scheme (Wagner, Tavildar & Viswanath, IEEE Trans. Inf. Theory 54, 2008, section II): each rank
    adds noise of variance q to values of variance v. With a = 1 + (N - 1) rho, D = q / (a v + q), and all ranks take
    log2(1 + a v / q) / 2 + (N - 1) log2(1 + (1 - rho) v / q) / 2 bits, log2(1 / D) / 2 each without correlation.
    """
    if not (0 < relative_error <= 1 and 0 <= correlation <= 1 and ranks >= 1):
        raise GradlabError(
            f"rate of the mean: relative error {relative_error}, correlation {correlation}, {ranks} ranks, expected "
            "above 0 to 1, 0 to 1, and 1 or more"
        )
    together = 1 + (ranks - 1) * correlation
    ratio = (1 / relative_error - 1) / together  # v / q
    own = (ranks - 1) * np.log2(1 + (1 - correlation) * ratio)
    return float((np.log2(1 / relative_error) + own) / (2 * ranks))


def _positive(variances: np.ndarray) -> np.ndarray:
    values = np.asarray(variances, np.float64).ravel()
    if not np.isfinite(values).all() or (values < 0).any():
        raise GradlabError("rate-distortion: variances must be finite numbers from 0 on")
    return np.sort(values[values > 0])[::-1]
