"""Estimators of information against known values, an oracle of the library, and what no estimate may claim."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import strategies as st
from scipy.special import digamma
from scipy.stats import norm
from sklearn.feature_selection import mutual_info_regression

from gradlab.analysis.intervals import mean_interval
from gradlab.analysis.measure.information import (
    METHODS,
    PAPER_BINS,
    Variable,
    estimate_information,
    excess_information,
    gaussian_information,
    mutual_information,
    neighbor_information,
    plug_in,
)
from gradlab.errors import GradlabError
from support.laws import law

CORRECTED = ("mixed", "copula")
seeds = st.integers(0, 2**20)


def normal_pairs(rho: float, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    x, e = np.random.default_rng(seed).standard_normal((2, count))
    return x, rho * x + math.sqrt(1 - rho**2) * e


def by_all_distances(pair: list[Variable], k: int, edge: float = -1e-14) -> float:
    """Bits by neighbourhoods as they are defined: ties at distance 0, others counted up to `edge` past the k-th."""
    apart, count = [], len(pair[0])
    for role, variable in enumerate(pair):
        middle = variable.centres[variable.place]
        placed = middle + 1e-7 * (variable.scores(role) - middle)
        tied = variable.place[:, None] == variable.place
        apart.append(np.where(tied, 0, np.abs(placed - middle[:, None])))
    both = np.maximum(*apart)
    total = 0.0
    for i in range(count):
        reach = np.sort(both[i])[k]
        near = [np.sum((d[i] < reach + edge) | (d[i] == 0)) for d in apart]
        total += digamma(k if reach else np.sum(both[i] == 0)) + digamma(count) - digamma(near).sum()
    return total / count / math.log(2)


@pytest.mark.parametrize("method", CORRECTED)
@pytest.mark.parametrize("rho", [0.0, 0.3, 0.6, 0.9])
def test_bivariate_normal_pairs_have_the_information_they_have(method: str, rho: float) -> None:
    estimate = np.mean([mutual_information(*normal_pairs(rho, 10_000, seed), method) for seed in range(4)])
    assert estimate == pytest.approx(float(gaussian_information(rho)), abs=0.02)


def test_dependence_that_is_not_monotone_is_seen_by_all_but_the_copula() -> None:
    """I(x; x^2 + e) = 0.620 bits, by quadrature."""
    x, e = np.random.default_rng(3).standard_normal((2, 20_000))
    assert mutual_information(x, x**2 + e, "mixed") == pytest.approx(0.620, abs=0.03)
    assert abs(mutual_information(x, x**2 + e, "copula")) < 0.01


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


@pytest.mark.parametrize("method", CORRECTED)
def test_an_interval_holds_the_known_value_at_its_rate(method: str) -> None:
    """95 % of 30: at least 25 with probability 0.997."""
    true = float(gaussian_information(0.6))
    estimates = [estimate_information(*normal_pairs(0.6, 500, seed), method) for seed in range(30)]
    assert sum(one.low <= true <= one.high for one in estimates) >= 25
    narrow = estimate_information(*normal_pairs(0.6, 500, 0), method, level=0.5)
    assert narrow.high - narrow.low < estimates[0].high - estimates[0].low


def test_the_copula_of_independent_pairs_holds_nothing_as_often_as_it_says() -> None:
    estimates = [estimate_information(*normal_pairs(0.0, 2000, seed), "copula") for seed in range(60)]
    assert 51 <= sum(one.low == 0.0 for one in estimates) <= 60
    assert np.mean([one.bits for one in estimates]) == pytest.approx(0.0, abs=3e-4)


@law(seeds, st.sampled_from([0.0, 0.5, 0.95]), st.integers(200, 600), examples=30)
def test_nearest_neighbours_are_those_of_scikit_learn(seed: int, rho: float, count: int) -> None:
    """Scores stand on one grid, and the library's noise draws which of several equal distances count: none, or all."""
    pair = [Variable.of(values) for values in normal_pairs(rho, count, seed)]
    x, y = (variable.scores(0) for variable in pair)
    theirs = mutual_info_regression(x[:, None], y, n_neighbors=3, random_state=0)[0] / math.log(2)
    most, least = (max(0.0, by_all_distances(pair, 3, edge)) for edge in (-1e-8, 1e-8))
    for estimate in (theirs, max(0.0, mutual_information(*pair, "mixed"))):
        assert least - 1e-9 <= estimate <= most + 1e-9


@law(seeds, st.integers(40, 400), st.sampled_from(METHODS), examples=60)
def test_symmetric_and_blind_to_scale(seed: int, count: int, method: str) -> None:
    x, y = normal_pairs(0.4, count, seed)
    estimate = mutual_information(x, y, method)
    assert mutual_information(y, x, method) == pytest.approx(estimate, abs=1e-9)
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


@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_the_papers_bins_find_log_n_bits_in_any_pair(rho: float) -> None:
    x, y = normal_pairs(rho, 1000, 1)
    estimate = plug_in(x, y, PAPER_BINS)
    assert estimate.information == pytest.approx(math.log2(1000), abs=0.01)
    assert estimate.conditional == pytest.approx(0.0, abs=0.01)


def test_millers_term_is_the_bias_of_independent_pairs() -> None:
    estimates = [plug_in(*normal_pairs(0.0, 2000, seed), 8) for seed in range(40)]
    information, bias = (np.mean([getattr(one, name) for one in estimates]) for name in ("information", "bias"))
    assert bias == pytest.approx(information, rel=0.3)
    assert bias > 0.003


def test_bins_that_outnumber_the_data_are_refused() -> None:
    x, y = normal_pairs(0.0, 2304, 0)
    with pytest.raises(GradlabError, match=r"bins = 1024: 1048576 joint cells for 2304 pairs.*at most 48 bins"):
        mutual_information(x, y, bins=1024)
    with pytest.raises(GradlabError, match="bins = 4294967296"):
        mutual_information(x, y, bins=PAPER_BINS)
    mutual_information(x, y, bins=48)


def test_shuffled_pairs_share_nothing_by_a_corrected_estimator() -> None:
    x, y = normal_pairs(0.9, 4000, 0)
    for method in CORRECTED:
        shuffled = Variable.of(y).permuted(np.random.default_rng(0))
        assert mutual_information(x, shuffled, method) == pytest.approx(0.0, abs=0.05)


@pytest.mark.parametrize(
    ("x", "y", "options", "message"),
    [
        (np.zeros(20), np.zeros(21), {}, "20 values of one and 21 of the other"),
        (np.zeros(3), np.zeros(3), {}, "3 pairs, expected at least 16"),
        (np.full(20, np.nan), np.zeros(20), {}, "must be finite"),
        (np.arange(20), np.arange(20), {"method": "guess"}, "method 'guess', expected one of histogram"),
        (np.arange(20), np.arange(20), {"bins": 1}, "bins = 1, expected at least 2"),
        (np.arange(20), np.arange(20), {"method": "mixed", "neighbors": 20}, "neighbors = 20, expected 1 to 19"),
    ],
)
def test_what_cannot_be_estimated_is_refused(x, y, options, message) -> None:
    with pytest.raises(GradlabError, match=message):
        mutual_information(x, y, **options)


def test_intervals_say_what_they_need() -> None:
    x, y = normal_pairs(0.0, 200, 0)
    with pytest.raises(GradlabError, match=r'interval of "histogram".*plug_in gives that.*one of mixed, copula'):
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


# --- closed forms ----------------------------------------------------------------------------------------------------

Pairs = tuple[np.ndarray, np.ndarray]


def binary_entropy(share: float) -> float:
    return -share * math.log2(share) - (1 - share) * math.log2(1 - share)


def rounded_entropy(levels: int) -> float:
    """Of round(z levels) for a normal z."""
    chances = np.diff(norm.cdf((np.arange(-8 * levels, 8 * levels + 2) - 0.5) / levels))
    return float(-(chances[chances > 0] * np.log2(chances[chances > 0])).sum())


def normal(generator: np.random.Generator, count: int, rho: float) -> Pairs:
    x, e = generator.standard_normal((2, count))
    return x, rho * x + math.sqrt(1 - rho**2) * e


def zeros(generator: np.random.Generator, count: int, shared: bool) -> Pairs:
    """90 % zeros, of both at the same places or of each at places of its own."""
    off = generator.random((2, count)) < 0.9
    x, y = normal(generator, count, 0.6)
    return np.where(off[0], 0, x), np.where(off[0 if shared else 1], 0, y)


def wide_step(generator: np.random.Generator, count: int) -> Pairs:
    x = generator.integers(0, 5, count)
    return x, x + 2 * generator.random(count)


def with_itself(values: np.ndarray, coarse: float = 0) -> Pairs:
    return np.round(values * coarse) if coarse else values, values


def largest_meet(generator: np.random.Generator, count: int) -> Pairs:
    large, sizes = generator.random(count) < 0.05, generator.random((2, count))
    x, y = generator.choice([-1.0, 1.0], (2, count)) / np.where(large, 0.05 * sizes, 0.05 + 0.95 * sizes)
    return x, y


def noisy_sign(generator: np.random.Generator, count: int) -> Pairs:
    """A sign that half of the values lose: I = P(kept) * 1 bit."""
    x = generator.standard_normal(count)
    return x, np.sign(x) * (generator.random(count) < 0.5)


INFORMATION: dict[str, tuple[Callable[[np.random.Generator, int], Pairs], float]] = {
    "normal": (lambda g, n: normal(g, n, 0.6), float(gaussian_information(0.6))),
    "monotone transforms": (
        lambda g, n: (lambda p: (p[0] ** 3, np.exp(5 * p[1])))(normal(g, n, 0.9)),
        float(gaussian_information(0.9)),
    ),
    "levels, y = x + U(0, 2)": (wide_step, math.log2(5) - 0.8),
    "100 levels, independent": (lambda g, n: (np.round(16 * g.standard_normal(n)), g.standard_normal(n)), 0.0),
    "levels of both, independent": (lambda g, n: tuple(np.round(8 * g.standard_normal((2, n)))), 0.0),
    "signs, independent": (lambda g, n: tuple(g.choice([-1.0, 1.0], (2, n))), 0.0),
    "zeros, one or two others": (lambda g, n: ((g.random(n) < 1 / n) * 1.0, g.standard_normal(n)), 0.0),
    "quantized copy": (lambda g, n: with_itself(g.standard_normal(n), 4), rounded_entropy(4)),
    "sign": (lambda g, n: (lambda x: (np.sign(x), x))(g.standard_normal(n)), 1.0),
    "noisy sign": (noisy_sign, 0.5),
    "zeros, shared": (
        lambda g, n: zeros(g, n, True),
        binary_entropy(0.9) + 0.1 * float(gaussian_information(0.6)),
    ),
    "zeros, own": (lambda g, n: zeros(g, n, False), 0.01 * float(gaussian_information(0.6))),
    "equal, 50 levels": (lambda g, n: with_itself(g.integers(0, 50, n)), math.log2(50)),
    "largest values meet": (largest_meet, binary_entropy(0.05)),
}


@pytest.mark.parametrize("case", INFORMATION)
def test_neighbours_know_continuous_values_levels_and_mixtures(case: str) -> None:
    """The mean to a few hundredths; with few samples of a level, or large values, the interval holds it in 9 of 10."""
    draw, known = INFORMATION[case]
    exact = [mutual_information(*draw(np.random.default_rng(seed), 4096), "mixed") for seed in range(3)]
    assert np.mean(exact) == pytest.approx(known, abs=0.05)
    pairs = [tuple(map(Variable.of, draw(np.random.default_rng(seed), 500))) for seed in range(10)]
    found = [estimate_information(*pair, "mixed") for pair in pairs]
    assert sum(one.low <= known + 1e-9 and known - 1e-9 <= one.high for one in found) >= 9
    bounds = [estimate_information(*pair, "copula") for pair in pairs]
    assert sum(one.low <= known + 1e-9 for one in bounds) >= 8


@law(seeds, st.integers(1, 9), st.integers(1, 9), examples=20)
def test_the_copula_is_a_lower_bound_of_what_levels_share(seed: int, kinds: int, flips: int) -> None:
    """Equal signs have scores of correlation 1 where ties are at their mean rank: infinity, for 1 bit."""
    generator = np.random.default_rng(seed)
    x = generator.integers(0, kinds, 4000)
    y = np.where(generator.integers(0, 10, 4000) < flips, generator.integers(0, kinds, 4000), x)
    assert mutual_information(x, y, "copula") <= plug_in(x, y, 64).information + 0.02


def few_kinds(generator: np.random.Generator, count: int, kinds: int) -> np.ndarray:
    """Values (n,) of so many kinds; 0: continuous ones."""
    return generator.integers(0, kinds, count) if kinds else generator.standard_normal(count)


@law(seeds, st.integers(128, 600), st.integers(0, 4), st.integers(0, 4), st.sampled_from(CORRECTED), examples=40)
def test_an_estimate_lies_in_its_interval(seed: int, count: int, of_x: int, of_y: int, method: str) -> None:
    """Whatever is tied or constant, and for a variable with itself: infinite information where it is continuous."""
    generator = np.random.default_rng(seed)
    x, y = few_kinds(generator, count, of_x), few_kinds(generator, count, of_y)
    for other in (x, y):
        found = estimate_information(x, other, method)
        assert 0 <= found.low <= found.bits <= found.high
        if 1 in (of_x, of_y if other is y else 1 * of_x):
            assert (found.low, found.bits, found.high) == (0, 0, 0)
    if not of_x:
        found = estimate_information(x, x, method)
        assert found.high == math.inf
        assert found.bits > math.log2(count / 4)


@law(seeds, st.integers(20, 80), st.integers(0, 9), st.integers(0, 9), st.integers(1, 5), examples=40)
def test_neighbourhoods_are_those_of_all_distances(seed: int, count: int, of_x: int, of_y: int, k: int) -> None:
    """Of normal scores, ties in their middle and apart from others in random order; a tie is at distance 0."""
    generator = np.random.default_rng(seed)
    pair = [Variable.of(few_kinds(generator, count, kinds)) for kinds in (of_x, of_y)]
    if any(variable.constant for variable in pair):
        return
    assert mutual_information(*pair, "mixed", neighbors=k) == pytest.approx(by_all_distances(pair, k), abs=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_a_constant_holds_nothing_on_anything(method: str) -> None:
    assert mutual_information(np.zeros(400), normal_pairs(0.0, 400, 0)[0], method) == pytest.approx(0, abs=1e-9)
