"""The slope of an error over a recording, with an interval that holds for dependent steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import stats

from gradlab.analysis.intervals import FEWEST, trend
from support.laws import law


@law(st.floats(-0.1, 0.1), st.floats(-3, 3), st.integers(FEWEST, 60), st.integers(1, 5))
def test_a_line_has_its_own_slope_and_nothing_around_it(slope: float, level: float, count: int, every: int) -> None:
    steps = [7 + every * i for i in range(count)]
    found = trend(steps, [level + slope * step for step in steps])
    assert (found.low, found.high) == pytest.approx((slope, slope), abs=1e-9)


@law(st.integers(0, 2**16), st.integers(FEWEST, 80))
def test_the_slope_is_that_of_least_squares(seed: int, count: int) -> None:
    values = np.random.default_rng(seed).standard_normal(count)
    found = trend(range(count), values)
    known = stats.linregress(np.arange(count), values)
    assert found.slope == pytest.approx(known.slope)
    # Never narrower than for independent steps.
    assert found.high - found.low >= 2 * stats.t.ppf(0.975, count - 2) * known.stderr * (1 - 1e-9)


def test_too_few_steps_have_no_trend() -> None:
    assert trend(range(FEWEST - 1), [0.0] * (FEWEST - 1)) is None


@pytest.mark.parametrize(("correlation", "least"), [(0.0, 0.93), (0.4, 0.92), (0.7, 0.88)])
def test_intervals_hold_the_slope_of_dependent_steps(correlation: float, least: float) -> None:
    """95 % are aimed at; at a strong dependence 60 steps are few."""
    rng, held = np.random.default_rng(0), 0
    steps, runs = 60, 400
    for _ in range(runs):
        noise = rng.standard_normal(steps + 50)
        for t in range(1, len(noise)):
            noise[t] += correlation * noise[t - 1]
        found = trend(range(steps), 0.02 * np.arange(steps) + noise[50:])
        held += found.low <= 0.02 <= found.high
    assert held >= least * runs


def test_a_rise_is_seen() -> None:
    noise = np.random.default_rng(1).standard_normal(60)
    found = trend(range(60), 0.3 + 0.01 * np.arange(60) + 0.02 * noise)
    assert found.rises
    assert not found.falls
    back = trend(range(60), 0.9 - 0.01 * np.arange(60) + 0.02 * noise)
    assert back.falls
    assert not back.rises
