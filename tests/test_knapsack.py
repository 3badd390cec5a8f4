"""Plans per layer: the smallest there is, proved so, against enumeration, a general solver and Algorithm 1."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import block_diag, csr_matrix

from gradlab.errors import GradlabError
from gradlab.knapsack import Allocation, allocate
from support.benchmark_modules import benchmark_modules
from support.laws import law

Tables = tuple[list[list[float]], list[list[float]]]

seeds = st.integers(0, 2**32 - 1)


def enumerate_plans(errors: Sequence[Sequence[float]], sizes: Sequence[Sequence[float]], budget: float) -> float:
    """The smallest size by looking at every plan; infinity if none is within the budget."""
    best = math.inf
    for plan in itertools.product(*(range(len(row)) for row in errors)):
        if np.array([row[c] for row, c in zip(errors, plan, strict=True)]).sum() <= budget:
            best = min(best, float(np.array([row[c] for row, c in zip(sizes, plan, strict=True)]).sum()))
    return best


def solver_optimum(errors: np.ndarray, sizes: np.ndarray, budget: float) -> tuple[float, np.ndarray]:
    """scipy's mixed-integer solver: the least size, and the settings (layers,)."""
    layers, settings = errors.shape
    there = np.isfinite(errors) & np.isfinite(sizes)
    cost, error = np.where(there, sizes, 0.0).ravel(), np.where(there, errors, 0.0).ravel()
    one_each = block_diag([np.ones((1, settings))] * layers, format="csr")
    solution = milp(
        cost,
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(csr_matrix(error[None]), -np.inf, budget)],
        integrality=np.ones(errors.size),
        bounds=Bounds(0, there.ravel().astype(float)),
        options={"mip_rel_gap": 0.0},
    )
    assert solution.status == 0, solution.message
    choice = solution.x.reshape(errors.shape).argmax(1)
    return float(sizes[np.arange(layers), choice].sum()), choice


def totals(
    errors: Sequence[Sequence[float]], sizes: Sequence[Sequence[float]], best: Allocation
) -> tuple[float, float]:
    return tuple(  # type: ignore[return-value]
        float(np.array([row[c] for row, c in zip(table, best.choice, strict=True)]).sum()) for table in (errors, sizes)
    )


def random_tables(rng: np.random.Generator, layers: int, settings: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Tables as compressors give them, or as nobody wants them: whole errors, so that no solver's tolerance decides."""
    if kind == "noise":
        errors, sizes = rng.integers(0, 1000, (layers, settings)), rng.integers(1, 1000, (layers, settings))
    elif kind == "ties":
        errors, sizes = rng.integers(0, 4, (layers, settings)), rng.integers(1, 5, (layers, settings))
    elif kind == "one rate":  # size and error trade one to one, nearly: the hard case
        sizes = np.sort(rng.integers(1, 300, (layers, settings)), axis=1)
        errors = 300 - sizes + rng.integers(0, 4, (layers, settings))
    else:  # "layers": identical ones among others, sizes and errors over three decades
        numel = rng.choice([64 * 27, 64 * 64 * 9, 128 * 128 * 9, 512 * 10], layers)
        density = np.geomspace(1e-3, 1e-1, settings)
        sizes = 8 * np.ceil(numel[:, None] * density)
        decay = rng.uniform(0.2, 0.6, layers)[:, None]
        errors = np.round(1000 * rng.lognormal(0, 1, layers)[:, None] * numel[:, None] / 1728 * (1 - density**decay))
    errors, sizes = errors.astype(float), sizes.astype(float)
    if kind != "layers":
        missing = rng.random((layers, settings)) < 0.2
        missing[np.arange(layers), rng.integers(0, settings, layers)] = False
        errors[missing] = np.inf
    return errors, sizes


def budgets(rng: np.random.Generator, errors: np.ndarray) -> float:
    least = errors.min(1).sum()
    most = np.where(np.isfinite(errors), errors, 0).max(1).sum()
    return float(np.floor(least + rng.random() ** 2 * (most - least)))


@pytest.mark.parametrize("kind", ["noise", "ties", "one rate", "layers"])
def test_the_size_is_the_solvers(kind: str) -> None:
    """Six tables of each kind: the optimum, within the budget, proved."""
    rng = np.random.default_rng(sum(map(ord, kind)))
    for _ in range(6):
        errors, sizes = random_tables(rng, int(rng.integers(1, 30)), int(rng.integers(1, 13)), kind)
        budget = budgets(rng, errors)
        allocation = allocate(errors, sizes, budget)
        error, size = totals(errors, sizes, allocation)
        optimum, _ = solver_optimum(errors, sizes, budget)
        assert size == allocation.size == allocation.bound == optimum
        assert error <= budget


@st.composite
def small_tables(draw: st.DrawFn) -> Tables:
    """Ragged, with zeros, equal values, infinities, and whole or broken numbers."""
    whole = draw(st.booleans())
    number = st.integers(0, 9).map(float) if whole else st.floats(0, 10, allow_subnormal=False)
    one = st.tuples(st.one_of(number, st.just(math.inf)), number)
    rows = draw(st.lists(st.lists(one, min_size=1, max_size=4), min_size=1, max_size=5))
    return [[e for e, _ in row] for row in rows], [[s for _, s in row] for row in rows]


@law(small_tables(), st.floats(0, 1), examples=150)
def test_the_size_is_that_of_the_best_of_all_plans(tables: Tables, share: float) -> None:
    errors, sizes = tables
    least = np.array([min(row) for row in errors]).sum()
    budget = least + share * 10 if math.isfinite(least) else 1.0
    optimum = enumerate_plans(errors, sizes, budget)
    if math.isinf(optimum):
        with pytest.raises(GradlabError, match="no setting with a finite error"):
            allocate(errors, sizes, budget)
        return
    allocation = allocate(errors, sizes, budget)
    error, size = totals(errors, sizes, allocation)
    assert error <= budget
    assert size == allocation.size == pytest.approx(optimum, rel=1e-9, abs=1e-12)
    assert allocation.bound == allocation.size
    assert allocation.gap == 0


@law(small_tables(), seeds, examples=100)
def test_a_plan_is_reachable_at_its_own_error(tables: Tables, seed: int) -> None:
    """alpha = 1: the budget is a plan's own error, to the last bit, and no plan chosen is larger than that one."""
    errors, sizes = tables
    rng = np.random.default_rng(seed)
    finite = [[c for c, e in enumerate(row) if math.isfinite(e)] for row in errors]
    if not all(finite):
        return
    plan = [int(rng.choice(row)) for row in finite]
    budget = float(np.array([row[c] for row, c in zip(errors, plan, strict=True)]).sum())
    allocation = allocate(errors, sizes, budget)
    assert totals(errors, sizes, allocation)[0] <= budget
    assert allocation.size <= np.array([row[c] for row, c in zip(sizes, plan, strict=True)]).sum() * (1 + 1e-11)


@law(seeds, st.integers(1, 64), st.sampled_from(["noise", "one rate", "layers"]), examples=40)
def test_a_search_cut_short_says_how_far_off_it_may_be(seed: int, states: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    errors, sizes = random_tables(rng, 25, 10, kind)
    budget = budgets(rng, errors)
    optimum, allocation = allocate(errors, sizes, budget), allocate(errors, sizes, budget, most_states=states)
    assert optimum.gap == 0
    assert allocation.bound <= optimum.size <= allocation.size
    assert totals(errors, sizes, allocation)[0] <= budget


def test_large_tables_are_solved() -> None:
    """500 layers with 30 settings, also where size and error trade at nearly one rate."""
    rng = np.random.default_rng(0)
    for kind in ("layers", "one rate", "noise"):
        errors, sizes = random_tables(rng, 500, 30, kind)
        budget = float(np.where(np.isfinite(errors), errors, 0).mean(1).sum())
        allocation = allocate(errors, sizes, budget)
        assert allocation.gap == 0
        assert totals(errors, sizes, allocation)[0] <= budget


def test_errors_may_be_negative_and_budgets_infinite() -> None:
    """A loss may fall where a gradient is compressed."""
    allocation = allocate([[-3.0, 1.0], [2.0, -1.0]], [[4.0, 1.0], [1.0, 9.0]], 0.0)
    assert (allocation.choice.tolist(), allocation.size) == ([0, 0], 5.0)
    allocation = allocate([[3.0, 1.0], [2.0, 0.0]], [[4.0, 1.0], [7.0, 9.0]], math.inf)
    assert (allocation.choice.tolist(), allocation.size, allocation.bound) == ([1, 0], 8.0, 8.0)


def test_huge_errors_that_no_plan_can_afford_cost_no_digits() -> None:
    best = allocate([[1e30, 0.25, 0.0], [1e300, 0.5, 0.125]], [[1, 2, 3], [1, 2, 3]], 0.625)
    assert (best.choice.tolist(), best.size) == ([2, 1], 5.0) or (best.choice.tolist(), best.size) == ([1, 2], 5.0)


# --- Algorithm 1 ------------------------------------------------------------------------------------------------------


def algorithm_1(errors: np.ndarray, costs: np.ndarray, budget: float, steps: int) -> float:
    """The paper's lines, one by one, errors rounded up; returns the plan's size."""
    layers, settings = errors.shape
    step = budget / steps
    whole = np.where(np.isfinite(errors), np.ceil(np.where(np.isfinite(errors), errors, 0.0) / step), steps + 1)
    best = np.full((layers, steps + 1), np.inf)
    for c in range(settings):
        if whole[0, c] <= steps:
            best[0, int(whole[0, c])] = min(best[0, int(whole[0, c])], costs[0, c])
    for layer in range(1, layers):
        for c in range(settings):
            for e in range(int(whole[layer, c]), steps + 1):
                best[layer, e] = min(best[layer, e], best[layer - 1, e - int(whole[layer, c])] + costs[layer, c])
    return float(best[-1].min())


@pytest.fixture(scope="module")
def rounded_size() -> Iterator[Callable[..., float]]:
    """The benchmark's Algorithm 1."""
    with benchmark_modules("planner") as modules:
        yield modules["planner"].rounded_size


@law(seeds, st.sampled_from(["noise", "layers"]), st.sampled_from([20, 100]), examples=25)
def test_algorithm_1_is_the_papers(rounded_size: Callable[..., float], seed: int, kind: str, steps: int) -> None:
    rng = np.random.default_rng(seed)
    errors, sizes = random_tables(rng, 6, 5, kind)
    budget = budgets(rng, errors) + 1
    size = rounded_size(errors, sizes, budget, steps)
    assert size == algorithm_1(errors, sizes, budget, steps)
    assert allocate(errors, sizes, budget).size <= size


def test_algorithm_1_comes_close_and_may_miss_the_uniform_plan(rounded_size: Callable[..., float]) -> None:
    rng = np.random.default_rng(5)
    errors, sizes = random_tables(rng, 100, 12, "layers")
    budget = float(errors[:, 6].sum())
    exact = allocate(errors, sizes, budget).size
    assert exact <= rounded_size(errors, sizes, budget) < 1.1 * exact
    one = errors[:, 6:7]  # nothing but the uniform plan: exact finds it, rounding up does not
    assert allocate(one, sizes[:, 6:7], budget).size == sizes[:, 6].sum()
    assert rounded_size(one, sizes[:, 6:7], budget) == math.inf


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("errors", "sizes", "budget", "message"),
    [
        ([[2.0, 1.0], [5.0, 4.0]], [[1, 2], [1, 2]], 4.5, "smallest reachable is 5"),
        ([[1.0]], [[1.0]], math.nan, "budget is NaN"),
        ([[1.0, math.nan]], [[1.0, 2.0]], 3.0, "NaN in layer 0, setting 1"),
        ([[1.0, 2.0]], [[1.0, -2.0]], 3.0, "layer 0, setting 1: size -2 is negative"),
        ([[1.0, 2.0]], [[1.0]], 3.0, "layer 0 has 2 errors and 1 sizes"),
        ([[1.0]], [[1.0], [2.0]], 3.0, "errors of 1 layers and sizes of 2"),
        ([], [], 3.0, "errors of 0 layers"),
        ([[1.0], []], [[1.0], []], 3.0, "layer 1 has no setting"),
        ([[math.inf]], [[1.0]], 3.0, "layer 0 has no setting"),
        ([[-math.inf]], [[1.0]], 3.0, "an error of -infinity"),
        ([1.0], [1.0], 3.0, "row 0 has shape"),
        (5.0, 5.0, 3.0, "expected numbers of shape"),
        ([["much"]], [[1.0]], 3.0, "expected numbers of shape"),
    ],
)
def test_bad_tables_are_named(errors: object, sizes: object, budget: float, message: str) -> None:
    with pytest.raises(GradlabError, match=message):
        allocate(errors, sizes, budget)  # type: ignore[arg-type]
