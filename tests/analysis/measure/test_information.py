"""Estimators of information against known values, an oracle of the library, and what no estimate may claim."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import strategies as st
from sklearn.feature_selection import mutual_info_regression

from gradlab.analysis.intervals import mean_interval
from gradlab.analysis.measure.information import (
    METHODS,
    PAPER_BINS,
    Variable,
    _corrected_entropy,
    conditional_entropy,
    entropy,
    estimate_information,
    excess_information,
    gaussian_information,
    mutual_information,
    neighbor_information,
    plug_in,
    shuffled_information,
)
from gradlab.errors import GradlabError
from support.laws import law

CORRECTED = ("quantiles", "ksg", "copula")
seeds = st.integers(0, 2**20)


def normal_pairs(rho: float, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    x, e = np.random.default_rng(seed).standard_normal((2, count))
    return x, rho * x + math.sqrt(1 - rho**2) * e


@pytest.mark.parametrize("method", CORRECTED)
@pytest.mark.parametrize("rho", [0.0, 0.3, 0.6, 0.9])
def test_bivariate_normal_pairs_have_the_information_they_have(method: str, rho: float) -> None:
    estimate = np.mean([mutual_information(*normal_pairs(rho, 10_000, seed), method) for seed in range(4)])
    # Bins blur what lies within them: on quantiles strong dependence is taken for less.
    assert estimate == pytest.approx(float(gaussian_information(rho)), abs=0.04 if method == "quantiles" else 0.02)


def test_dependence_that_is_not_monotone_is_seen_by_all_but_the_copula() -> None:
    """I(x; x^2 + e) = 0.620 bits, by quadrature (benchmarks/information.py)."""
    x, e = np.random.default_rng(3).standard_normal((2, 20_000))
    estimates = {method: mutual_information(x, x**2 + e, method) for method in CORRECTED}
    assert estimates["ksg"] == pytest.approx(0.620, abs=0.03)
    assert estimates["quantiles"] == pytest.approx(0.620, abs=0.08)
    assert abs(estimates["copula"]) < 0.01


@law(seeds, st.integers(40, 300), st.sampled_from(METHODS), st.booleans(), examples=60)
def test_variables_that_pairs_share_give_what_arrays_do(seed: int, count: int, method: str, tied: bool) -> None:
    arrays = np.random.default_rng(seed).standard_normal((3, count))
    arrays = np.round(arrays) if tied else arrays
    shared = [Variable.of(values) for values in arrays]
    for a, b in itertools.permutations(range(3), 2):
        assert mutual_information(shared[a], shared[b], method) == mutual_information(arrays[a], arrays[b], method)
    assert [list(one.values) for one in shared] == [list(values) for values in arrays]
    order = np.random.default_rng(seed).permutation(count)
    again = shared[0].permuted(np.random.default_rng(seed))
    assert list(again.values) == list(arrays[0][order])


def test_the_error_of_nearest_neighbours_is_how_far_they_vary() -> None:
    """To a third: terms of neighbours depend on each other."""
    estimates = [neighbor_information(*normal_pairs(0.5, 1000, seed)) for seed in range(60)]
    varied = float(np.std([one.bits for one in estimates], ddof=1))
    assert np.mean([one.error for one in estimates]) == pytest.approx(varied, rel=1 / 3)


@pytest.mark.parametrize("method", ["quantiles", "ksg", "copula"])
def test_an_interval_holds_the_known_value_at_its_rate(method: str) -> None:
    """95 % of 60: at least 51 with probability 0.998."""
    true = float(gaussian_information(0.6))
    estimates = [estimate_information(*normal_pairs(0.6, 2000, seed), method) for seed in range(60)]
    assert sum(one.low <= true <= one.high for one in estimates) >= 51
    narrow = estimate_information(*normal_pairs(0.6, 2000, 0), method, level=0.5)
    assert narrow.high - narrow.low < estimates[0].high - estimates[0].low


def test_the_copula_of_independent_pairs_holds_nothing_as_often_as_it_says() -> None:
    estimates = [estimate_information(*normal_pairs(0.0, 2000, seed), "copula") for seed in range(60)]
    assert 51 <= sum(one.low == 0.0 for one in estimates) <= 60
    assert np.mean([one.bits for one in estimates]) == pytest.approx(0.0, abs=3e-4)


@law(seeds, st.sampled_from([0.0, 0.5, 0.95]), st.integers(200, 600), examples=30)
def test_nearest_neighbours_are_those_of_scikit_learn(seed: int, rho: float, count: int) -> None:
    """On scores that are normal already the library's answer is the same, but where it clips at 0."""
    x, y = normal_pairs(rho, count, seed)
    x, y = (np.sort(np.random.default_rng(0).standard_normal(count))[np.argsort(np.argsort(v))] for v in (x, y))
    theirs = mutual_info_regression(x[:, None], y, n_neighbors=3, random_state=0)[0] / math.log(2)
    assert max(0.0, mutual_information(x, y, "ksg")) == pytest.approx(theirs, abs=0.08)


@law(seeds, st.integers(40, 400), st.sampled_from(METHODS), examples=60)
def test_symmetric_and_blind_to_scale(seed: int, count: int, method: str) -> None:
    x, y = normal_pairs(0.4, count, seed)
    estimate = mutual_information(x, y, method)
    # Scores stand on one grid: which of two equal distances counts is drawn.
    exact = 0.15 if method == "ksg" else 1e-9
    assert mutual_information(y, x, method) == pytest.approx(estimate, abs=exact)
    assert mutual_information(1e-30 * x, 1e20 * y, method) == pytest.approx(estimate, abs=1e-6)


@law(seeds, st.integers(30, 300), st.integers(1, 40), examples=60)
def test_plug_in_quantities_add_up(seed: int, count: int, bins: int) -> None:
    """I = H(y) - H(y | x), 0 <= I <= min(H), as with numpy's own histogram."""
    x, y = normal_pairs(0.5, count, seed)
    estimate = plug_in(x, y, bins)
    assert estimate.information == pytest.approx(estimate.entropy_y - estimate.conditional, abs=1e-9)
    assert -1e-9 <= estimate.information <= min(estimate.entropy_x, estimate.entropy_y) + 1e-9
    counts, _, _ = np.histogram2d(x, y, bins=bins)
    joint = counts[counts > 0] / count
    both = float(-(joint * np.log2(joint)).sum())
    assert estimate.entropy_x + estimate.entropy_y - estimate.information == pytest.approx(both, abs=1e-6)
    assert entropy(x, bins) == pytest.approx(estimate.entropy_x)
    assert conditional_entropy(y, x, bins) == pytest.approx(estimate.conditional)


@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_the_papers_bins_find_log_n_bits_in_any_pair(rho: float) -> None:
    x, y = normal_pairs(rho, 1000, 1)
    estimate = plug_in(x, y, PAPER_BINS)
    assert estimate.information == pytest.approx(math.log2(1000), abs=0.01)
    assert estimate.conditional == pytest.approx(0.0, abs=0.01)


def test_few_samples_have_the_entropy_of_their_cells() -> None:
    """To 0.05 bits on average, by Grassberger's correction, where cells hold one or two each."""
    counts = np.random.default_rng(0).multinomial(12, np.full(8, 1 / 8), size=2000)
    assert np.mean([_corrected_entropy(row[row > 0]) for row in counts]) == pytest.approx(3.0, abs=0.05)


def test_millers_term_is_the_bias_of_independent_pairs() -> None:
    estimates = [plug_in(*normal_pairs(0.0, 2000, seed), 8) for seed in range(40)]
    information, bias = (np.mean([getattr(one, name) for one in estimates]) for name in ("information", "bias"))
    assert bias == pytest.approx(information, rel=0.3)
    assert bias > 0.003


@pytest.mark.parametrize("method", ["histogram", "quantiles"])
def test_bins_that_outnumber_the_data_are_refused(method: str) -> None:
    x, y = normal_pairs(0.0, 2304, 0)
    with pytest.raises(GradlabError, match=r"bins = 1024: 1048576 joint cells for 2304 pairs.*at most 48 bins"):
        mutual_information(x, y, method, bins=1024)
    with pytest.raises(GradlabError, match="bins = 4294967296"):
        mutual_information(x, y, method, bins=PAPER_BINS)
    mutual_information(x, y, method, bins=48)


def test_shuffled_pairs_share_nothing_by_a_corrected_estimator() -> None:
    x, y = normal_pairs(0.9, 4000, 0)
    for method in CORRECTED:
        assert shuffled_information(x, y, method, np.random.default_rng(0), repeats=3) == pytest.approx(0.0, abs=0.03)


@pytest.mark.parametrize("method", METHODS)
def test_ties_and_constants_do_not_make_information(method: str) -> None:
    """Half of the values are zero, as behind a dead unit; or all are."""
    x, y = np.random.default_rng(0).standard_normal((2, 4000))
    off = np.random.default_rng(1).random((2, 4000)) < 0.5
    estimate = mutual_information(np.where(off[0], 0, x), np.where(off[1], 0, y), method)
    assert abs(estimate) < 0.06
    assert mutual_information(np.zeros(4000), y, method) == pytest.approx(0.0, abs=1e-3)
    both = mutual_information(np.where(off[0], 0, x), np.where(off[0], 0, y), method)
    assert both > 0.3 or method == "copula"  # where the zeros lie is one bit; the copula takes it for no correlation


@pytest.mark.parametrize(
    ("x", "y", "options", "message"),
    [
        (np.zeros(20), np.zeros(21), {}, "20 values of one and 21 of the other"),
        (np.zeros(3), np.zeros(3), {}, "3 pairs, expected at least 16"),
        (np.full(20, np.nan), np.zeros(20), {}, "must be finite"),
        (np.arange(20), np.arange(20), {"method": "guess"}, "method 'guess', expected one of histogram"),
        (np.arange(20), np.arange(20), {"bins": 1}, "bins = 1, expected at least 2"),
        (np.arange(20), np.arange(20), {"method": "ksg", "neighbors": 20}, "neighbors = 20, expected 1 to 19"),
    ],
)
def test_what_cannot_be_estimated_is_refused(x, y, options, message) -> None:
    with pytest.raises(GradlabError, match=message):
        mutual_information(x, y, **options)


def test_intervals_say_what_they_need() -> None:
    x, y = normal_pairs(0.0, 200, 0)
    with pytest.raises(GradlabError, match=r'interval of "histogram".*plug_in gives that.*one of quantiles'):
        estimate_information(x, y, "histogram")
    for options, text in (({"level": 1.0}, "level = 1"), ({"blocks": 1}, "from 1 blocks"), ({"blocks": 9}, "at least")):
        with pytest.raises(GradlabError, match=text):
            estimate_information(x, y, **options)
    with pytest.raises(GradlabError, match="expected as many"):
        excess_information(np.zeros(5), np.zeros(4))
    with pytest.raises(GradlabError, match="3 and 3 iterations, expected as many, 4 or more"):
        excess_information(np.zeros(3), np.zeros(3))


def test_an_excess_has_the_interval_of_the_difference() -> None:
    paired, shifted = np.random.default_rng(0).normal([[0.4], [0.1]], size=(2, 60))
    excess, difference = excess_information(paired, shifted, level=0.9), mean_interval(paired - shifted, 0.9)
    assert (excess.low, excess.high, excess.level) == (difference.low, difference.high, 0.9)
    assert excess.bits == pytest.approx(excess.paired - excess.shifted)
    short = excess_information(paired[:6], shifted[:6])
    assert (short.low, short.high, short.refused) == (None, None, "6 iterations, expected at least 12")


def binary_entropy(share: float) -> float:
    return -share * math.log2(share) - (1 - share) * math.log2(1 - share)


@pytest.mark.parametrize("method", ["quantiles", "ksg"])
@pytest.mark.parametrize(("rho", "samples"), [(0.0, 1000), (0.6, 2000), (0.6, 10_000)])
def test_zeros_that_two_ranks_share_are_a_level_of_their_own(method: str, rho: float, samples: int) -> None:
    """90 % zeros at the same places: I = H(0.9) + 0.1 I(values), by the chain rule; 95 % of 40: at least 34."""
    true = binary_entropy(0.9) + 0.1 * float(gaussian_information(rho))
    estimates = []
    for seed in range(40):
        zero = np.random.default_rng([seed, 1]).random(samples) < 0.9
        x, y = (np.where(zero, 0.0, values) for values in normal_pairs(rho, samples, seed))
        estimates.append(estimate_information(x, y, method))
    assert np.mean([one.bits for one in estimates]) == pytest.approx(true, abs=0.02)
    assert sum(one.low <= true <= one.high for one in estimates) >= 34


@pytest.mark.parametrize(("method", "within"), [("quantiles", 0.15), ("ksg", 0.08)])
def test_what_only_the_largest_values_share_is_in_the_interval(method: str, within: float) -> None:
    """5 % of the pairs are large in both, and nothing else is common: I = H(0.05); 95 % of 40: at least 34."""
    true, held, estimates = binary_entropy(0.05), 0, []
    for seed in range(40):
        generator = np.random.default_rng([seed, 2])
        large, sizes = generator.random(2000) < 0.05, generator.random((2, 2000))
        chance = np.where(large, 0.05 * sizes, 0.05 + 0.95 * sizes)
        found = estimate_information(*(generator.choice([-1.0, 1.0], (2, 2000)) / chance), method)
        estimates.append(found.bits)
        held += found.low <= true <= found.high
    assert np.mean(estimates) == pytest.approx(true, abs=within)
    assert held >= 34


@pytest.mark.parametrize("method", ["quantiles", "ksg"])
@law(seeds, st.integers(2, 5), st.sampled_from([0.0, 0.3, 0.9]), examples=30)
def test_of_a_few_values_the_information_is_that_of_their_table(
    method: str, seed: int, kinds: int, agreement: float
) -> None:
    """Discrete values have no bins: with 20,000 samples the plug-in on their own table is the oracle."""
    generator = np.random.default_rng(seed)
    x = generator.integers(kinds, size=20_000)
    y = np.where(generator.random(20_000) < agreement, x, generator.integers(kinds, size=20_000))
    joint = np.histogram2d(x, y, bins=kinds)[0] / 20_000
    apart = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
    oracle = float((joint[joint > 0] * np.log2(joint[joint > 0] / apart[joint > 0])).sum())
    scaled = generator.permutation(kinds)[x] * 1e-3, y - 1.5
    assert mutual_information(*scaled, method) == pytest.approx(oracle, abs=2e-3)
