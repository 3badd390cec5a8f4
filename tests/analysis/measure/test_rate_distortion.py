"""Reverse water-filling against the textbook's cases and a numerical minimum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import optimize

from gradlab.analysis.measure.rate_distortion import distortion_at, rate_at
from gradlab.errors import GradlabError
from support.laws import law

variances = st.lists(st.floats(0, 100) | st.just(0.0), min_size=1, max_size=30).map(np.array)


def test_equal_variances_lose_six_decibels_per_bit() -> None:
    """D = v 2^(-2R): the Gaussian bound at 2 bits is 0.0625."""
    for bits in (0, 1, 2, 5):
        assert distortion_at(np.full(10, 3.0), 10 * bits) == pytest.approx(30.0 * 4.0**-bits)


@law(variances, st.floats(0, 200))
def test_rate_and_distortion_are_inverse(v: np.ndarray, bits: float) -> None:
    d = distortion_at(v, bits)
    assert 0 <= d <= v.sum() * (1 + 1e-12)
    if d > 1e-9 * v.max() and v.max() > 1e-100:
        assert rate_at(v, d) == pytest.approx(bits, abs=1e-6 * (1 + bits))


@law(variances, st.floats(0.01, 60))
def test_it_is_the_water_level_of_the_theorem(v: np.ndarray, bits: float) -> None:
    """theta by bisection of sum max(0, log2(v / theta) / 2) = R; D = sum min(theta, v)."""
    v = v[v > 1e-12]
    if not len(v):
        return
    rate = lambda log: np.maximum(0, (np.log2(v) - log) / 2).sum() - bits  # noqa: E731
    theta = 2.0 ** optimize.brentq(rate, np.log2(v.min()) - 2 * bits - 5, np.log2(v.max()) + 1, xtol=1e-13)
    assert distortion_at(v, bits) == pytest.approx(np.minimum(theta, v).sum(), rel=1e-9)


def test_no_variance_takes_no_bits_and_nonsense_is_refused() -> None:
    assert distortion_at(np.zeros(3), 5) == 0.0
    assert rate_at(np.ones(3), 3.0) == rate_at(np.ones(3), 7.0) == 0.0
    for refused in (
        lambda: distortion_at(np.array([1.0, -1.0]), 2),
        lambda: distortion_at(np.array([np.nan]), 2),
        lambda: distortion_at(np.ones(2), -1),
        lambda: rate_at(np.ones(2), 0.0),
    ):
        with pytest.raises(GradlabError, match="rate-distortion"):
            refused()
