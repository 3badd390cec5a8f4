"""Intervals of means over iterations and of rank correlations: how often they hold, and when they are refused."""

from __future__ import annotations

import itertools
import math
from itertools import starmap

import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import stats
from scipy.signal import lfilter

from gradlab.analysis.intervals import (
    autocorrelation,
    cosine_terms,
    found_share,
    iterations_needed,
    largest_autocorrelation,
    mean_interval,
    rank_correlation,
)
from gradlab.errors import GradlabError
from support.laws import law, thorough

seeds = st.integers(0, 2**20)


def first_order(rho: float, count: int, seed: int) -> np.ndarray:
    """A stationary series of variance 1 / (1 - rho^2) and mean 0, (T,)."""
    noise = np.random.default_rng([seed, count]).standard_normal(count + 400)
    return np.asarray(lfilter([1.0], [1.0, -rho], noise))[400:]


@pytest.mark.parametrize(
    ("rho", "count"),
    [
        (0.0, 24),
        (0.5, 40),
        (0.8, 100),
        (0.95, 400),
        *starmap(thorough, [(0.0, 100), (0.5, 100), (0.5, 400), (0.8, 400)]),
    ],
)
def test_an_interval_holds_the_mean_at_its_rate_however_alike_neighbours_are(rho: float, count: int) -> None:
    """95 % of 300, and what 300 leave to chance; given to at least three quarters of the series."""
    found = [mean_interval(first_order(rho, count, seed)) for seed in range(300)]
    given = [one for one in found if one.low is not None]
    assert len(given) >= 225
    assert 0.92 <= sum(one.low <= 0 <= one.high for one in given) / len(given) <= 0.99


@pytest.mark.parametrize(
    ("rho", "count"), [(0.8, 24), (0.95, 100), *starmap(thorough, [(0.95, 24), (0.99, 24), (0.99, 400)])]
)
def test_a_series_too_short_for_its_autocorrelation_is_refused_an_interval(rho: float, count: int) -> None:
    """To all but a fifth; and no more than 5 % of all series, and what chance adds, get one that is wrong."""
    found = [mean_interval(first_order(rho, count, seed)) for seed in range(300)]
    given = [one for one in found if one.low is not None]
    assert len(given) <= 60
    assert sum(not one.low <= 0 <= one.high for one in given) <= 22
    refused = next(one for one in found if one.low is None)
    assert refused.high is None
    assert f"autocorrelation is {refused.autocorrelation:.2f} over {count} iterations, expected at least " in (
        refused.refused
    )


def test_a_moving_average_of_four_is_held_at_its_rate() -> None:
    """No first-order series: neighbours are alike as 0.75, and those four apart not at all."""
    found = []
    for seed in range(200):
        noise = np.random.default_rng(seed).standard_normal(403)
        found.append(mean_interval(0.3 + np.convolve(noise, np.full(4, 0.5), "valid")))
    given = [one for one in found if one.low is not None]
    assert len(given) >= 180
    assert sum(one.low <= 0.3 <= one.high for one in given) / len(given) >= 0.9


@law(st.floats(0.01, 0.99), st.integers(12, 5000), examples=100)
def test_cosines_find_all_but_a_twentieth_of_a_known_long_run_variance(rho: float, count: int) -> None:
    """By the spectral density of a first-order series at the cosines' own frequencies; the next one is too many."""
    terms = cosine_terms(count, rho)

    def found(several: int) -> float:
        angles = math.pi * np.arange(1, several + 1) / count
        return float(np.mean((1 - rho) ** 2 / (1 - 2 * rho * np.cos(angles) + rho**2)))

    assert found_share(count, rho, terms) == pytest.approx(found(terms))
    if terms > 4:
        assert found(terms) >= 1 - 0.05 * (1 + 1 / terms) ** 2 * (1 + 1 / (2 * terms))


@law(st.floats(-0.5, 0.99), examples=50)
def test_what_is_said_to_be_needed_is_enough_and_less_is_not(rho: float) -> None:
    def found(count: int) -> float:
        largest = largest_autocorrelation(rho, count)
        return found_share(count, largest, cosine_terms(count, largest))

    needed = int(iterations_needed(rho))
    assert needed >= 12
    assert found(needed) >= 0.2
    assert needed == 12 or found(needed - 1) < 0.2


def test_the_largest_autocorrelation_that_a_measured_one_allows_is_seldom_too_small() -> None:
    for rho, count in ((0.0, 24), (0.5, 24), (0.8, 100), (0.95, 400)):
        above = [
            largest_autocorrelation(autocorrelation(first_order(rho, count, seed)), count) >= rho for seed in range(300)
        ]
        assert sum(above) >= 276


@law(seeds, st.floats(-1e3, 1e3), st.floats(1e-6, 1e6), st.sampled_from([0.5, 0.9, 0.99]), examples=50)
def test_an_interval_moves_and_grows_with_the_series(seed: int, shift: float, scale: float, level: float) -> None:
    series = np.random.default_rng(seed).standard_normal(40)
    one, other = mean_interval(series, level), mean_interval(scale * (series + shift), level)
    assert one.refused.startswith("neighbours") == other.refused.startswith("neighbours")
    if one.low is not None:
        assert other.low == pytest.approx(scale * (one.low + shift), abs=1e-6 * scale * (1 + abs(shift)))
        assert other.high == pytest.approx(scale * (one.high + shift), abs=1e-6 * scale * (1 + abs(shift)))
        assert mean_interval(series, level / 2).high <= one.high


def test_of_noise_the_interval_is_students_by_its_cosines() -> None:
    """Against the cosine transform of scipy, orthonormal."""
    from scipy.fft import dct

    series = np.random.default_rng(4).standard_normal(100)
    largest = largest_autocorrelation(autocorrelation(series), 100)
    terms = cosine_terms(100, largest)
    variance = np.mean(dct(series, norm="ortho")[1 : terms + 1] ** 2) / found_share(100, largest, terms)
    spread = np.sqrt(variance / 100)
    low, high = stats.t.interval(0.95, terms, loc=series.mean(), scale=spread)
    found = mean_interval(series)
    assert (found.low, found.high) == pytest.approx((low, high))


def test_a_trend_is_said_with_its_ends_and_noise_has_none() -> None:
    time = np.linspace(-0.5, 0.5, 100)
    found = [mean_interval(2 + 3 * time + first_order(0.0, 100, seed)) for seed in range(100)]
    assert sum(one.drift is not None for one in found) >= 95
    ends = np.mean([one.drift for one in found if one.drift is not None], axis=0)
    assert ends == pytest.approx([0.5, 3.5], abs=0.1)
    still = [mean_interval(first_order(0.5, 100, seed)) for seed in range(300)]
    assert sum(one.drift is not None for one in still) <= 12  # 1 % of them, and what the bias adds
    steep = mean_interval(10 * time + 0.1 * first_order(0.0, 100, 0))
    assert steep.low is None
    assert steep.drift == pytest.approx((-5, 5), abs=0.2)


def test_series_without_values_or_variation() -> None:
    assert mean_interval(np.full(5, np.nan)).mean is None
    short = mean_interval(np.array([1.0, np.nan, *range(2, 12)]))
    assert (short.iterations, short.low, short.refused) == (11, None, "11 iterations, expected at least 12")
    constant = mean_interval(np.full(30, 2.0))
    assert (constant.low, constant.mean, constant.high, constant.drift) == (2.0, 2.0, 2.0, None)
    with pytest.raises(GradlabError, match="level = 1, expected between 0 and 1"):
        mean_interval(np.zeros(30), level=1.0)


# --- rank correlations ------------------------------------------------------------------------------------------------


@law(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=3, max_size=12))
def test_rank_correlation_is_scipys_and_lies_in_its_interval(pairs: list[tuple[int, int]]) -> None:
    a, b = np.array(pairs, float).T
    found = rank_correlation(a, b)
    if len(set(a)) > 1 and len(set(b)) > 1:
        assert found.rho == pytest.approx(stats.spearmanr(a, b).statistic)
        assert (found.interval is not None) == (len(pairs) >= 5)
    if found.interval is not None:
        assert -1 <= found.interval[0] <= found.rho <= found.interval[1] <= 1
        turned = rank_correlation(a, -b)
        assert turned.interval == pytest.approx((-found.interval[1], -found.interval[0]))
    assert rank_correlation(a, a).rho == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("count", "known"),
    [
        (7, 0.9),
        (13, 0.5),
        (33, 0.0),
        *starmap(thorough, [(7, 0.0), (7, 0.5), (13, 0.0), (13, 0.9), (33, 0.5), (33, 0.9)]),
    ],
)
def test_the_interval_of_a_rank_correlation_holds_it_at_its_rate(count: int, known: float) -> None:
    """Of bivariate normal items, whose rho of ranks is (6 / pi) asin(r / 2); 95 % of 300, and more for very few."""
    r = 2 * math.sin(math.pi * known / 6)
    held = 0
    for seed in range(300):
        x, e = np.random.default_rng([seed, count]).standard_normal((2, count))
        low, high = rank_correlation(x, r * x + math.sqrt(1 - r * r) * e).interval
        held += low <= known <= high
    assert 0.91 <= held / 300 <= 0.995


def test_one_order_of_five_does_not_prove_a_correlation_of_one() -> None:
    found = rank_correlation(range(5), range(5))
    assert found.rho == 1.0
    assert 0.1 < found.low < 0.3
    assert str(found) == f"+1.00 (95 % interval {found.low:+.2f} to +1.00)"
    # One pair that changes places is less sure of it still.
    assert rank_correlation(range(5), [1, 0, 2, 3, 4]).low < found.low


def test_rank_correlations_that_cannot_be_told() -> None:
    for rows in itertools.product([range(3), [1.0] * 6], repeat=2):
        if len(rows[0]) == len(rows[1]):
            assert "no interval" in str(rank_correlation(*rows))
    assert rank_correlation([1, 2, 3, 4, 5], [1, 2, 3, 4, math.inf]).rho == 1.0
    for rows in (([1, 2], [1]), ([], []), ([1, math.nan], [1, 2])):
        with pytest.raises(GradlabError, match="expected as many of both, none of them NaN"):
            rank_correlation(*rows)
