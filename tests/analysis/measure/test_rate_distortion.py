"""Reverse water-filling against the textbook's cases and a numerical minimum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import optimize

from gradlab.analysis.measure.rate_distortion import rate_at, rate_of_mean
from gradlab.errors import GradlabError
from support.laws import law

variances = st.lists(st.floats(0, 100) | st.just(0.0), min_size=1, max_size=30).map(np.array)


def test_equal_variances_lose_six_decibels_per_bit() -> None:
    """D = v 2^(-2R): the Gaussian bound at 2 bits is 0.0625."""
    for bits in (1, 2, 5):
        assert rate_at(np.full(10, 3.0), 30.0 * 4.0**-bits) == pytest.approx(10 * bits)


@law(variances, st.floats(1e-3, 0.999))
def test_it_is_the_water_level_of_the_theorem(v: np.ndarray, share: float) -> None:
    """theta by bisection of sum min(theta, v) = D; R = sum max(0, log2(v / theta) / 2)."""
    v = v[v > 1e-12]
    if not len(v):
        return
    distortion = share * v.sum()
    theta = optimize.brentq(lambda level: np.minimum(level, v).sum() - distortion, 0, v.max(), xtol=1e-300, rtol=1e-14)
    assert rate_at(v, distortion) == pytest.approx(np.maximum(0, np.log2(v / theta) / 2).sum(), rel=1e-6, abs=1e-9)


def test_no_variance_takes_no_bits_and_nonsense_is_refused() -> None:
    assert rate_at(np.zeros(3), 1.0) == 0.0
    assert rate_at(np.ones(3), 3.0) == rate_at(np.ones(3), 7.0) == 0.0
    for refused in (
        lambda: rate_at(np.array([1.0, -1.0]), 2),
        lambda: rate_at(np.array([np.nan]), 2),
        lambda: rate_at(np.ones(2), 0.0),
    ):
        with pytest.raises(GradlabError, match="rate-distortion"):
            refused()


@law(st.floats(0.01, 100), st.floats(0, 0.99), st.integers(1, 8), examples=60)
def test_codes_for_the_mean_are_those_of_noisy_values_and_their_determinant(q: float, rho: float, ranks: int) -> None:
    """Oracle: the covariance of N values and of the same with noise q; D from the best linear estimate of the mean."""
    values = (1 - rho) * np.eye(ranks) + rho
    noisy, weights = values + q * np.eye(ranks), np.full(ranks, 1 / ranks)
    energy = weights @ values @ weights
    error = energy - weights @ values @ np.linalg.solve(noisy, values @ weights)
    bits = (np.linalg.slogdet(noisy)[1] - ranks * np.log(q)) / np.log(2) / (2 * ranks)
    assert rate_of_mean(error / energy, rho, ranks) == pytest.approx(bits, rel=1e-6)
    assert rate_of_mean(0.3, rho, ranks) <= rate_at(np.ones(1), 0.3) + 1e-12


def test_independent_ranks_learn_nothing_from_each_other_and_equal_ones_share_the_bits() -> None:
    for error in (0.01, 0.5, 1.0):
        assert rate_of_mean(error, 0.0, 7) == pytest.approx(-np.log2(error) / 2)
        assert rate_of_mean(error, 1.0, 7) == pytest.approx(-np.log2(error) / 14)
    for refused in ((0.0, 0.5, 2), (1.1, 0.5, 2), (0.5, -0.1, 2), (0.5, 1.1, 2), (0.5, 0.5, 0)):
        with pytest.raises(GradlabError, match="rate of the mean"):
            rate_of_mean(*refused)
