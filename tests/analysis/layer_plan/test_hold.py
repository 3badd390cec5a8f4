"""Plans whose error does not hold on later iterations: what is said, which alpha is proposed, and taking it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from gradlab.analysis.layer_plan.hold import Hold, holds, largest_alpha
from gradlab.analysis.layer_plan.lgreco import LgrecoFit, fit_lgreco
from gradlab.analysis.layer_plan.problem import Problem, total
from gradlab.analysis.replay.error_tables import ErrorTable, LayerTable
from gradlab.artifact import Artifact
from gradlab.errors import GradlabError
from gradlab.knapsack import allocate
from gradlab.layout import Layer
from gradlab.plan.layer_errors import Candidate
from gradlab.trace import Trace
from support.command_line import Command
from support.laws import law
from support.recorded import record

LAYERS = (Layer("early.weight", (24, 30), "linear"), Layer("late.weight", (30, 24), "linear"))
RANKS, STEPS = 2, 8


def drifting(seed: int, later: float) -> list[list[dict]]:
    """Gradients of two layers; in the second half the late layer's are `later` times larger."""
    rng = np.random.default_rng(seed)
    spectrum = np.exp(-np.arange(24) / 4)
    scale = {"early.weight": 1.0, "late.weight": 0.3}
    steps = []
    for step in range(STEPS):
        row = []
        for _ in range(RANKS):
            one = {}
            for layer in LAYERS:
                rows, columns = layer.shape
                left, right = rng.standard_normal((rows, 24)), rng.standard_normal((24, columns))
                grown = later if layer.name == "late.weight" and step >= STEPS // 2 else 1.0
                one[layer.name] = (grown * scale[layer.name] * (left * spectrum) @ right).astype(np.float32)
            row.append(one)
        steps.append(row)
    return steps


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return record(tmp_path_factory.mktemp("hold") / "t", drifting(0, 4.0), LAYERS)


def fitted(trace: Trace, metric: str, **options: object) -> LgrecoFit:
    return fit_lgreco(trace, "topk", {"density": 0.05}, metric=metric, **options)


def error_over_uniform(fit: LgrecoFit, metric: str, chosen: np.ndarray | None = None) -> float:
    """On the held-out windows, by hand: sums over windows, layers and the means over ranks."""
    sums = []
    for choice in (fit.allocation.choice if chosen is None else chosen, fit.problem.reference):
        rows = zip(fit.problem.table.layers, choice, strict=True)
        sums.append(sum((t.l2 if metric == "l2" else t.squared_l2)[w, c] for t, c in rows for w in (2, 3)))
    return float(sums[0] / sums[1])


@pytest.mark.parametrize("metric", ["l2", "squared-l2"])
def test_the_largest_alpha_that_holds_is_named_and_taken(trace: Trace, metric: str) -> None:
    """Against the plan of every hundredth: none between the one proposed and the one asked for holds."""
    plain = fitted(trace, metric)
    assert error_over_uniform(plain, metric) > 1
    hold = plain.provenance.hold
    assert hold is not None
    assert (hold.asked, hold.holds, hold.taken) == (1.0, False, False)
    assert plain.provenance.alpha == 1.0
    errors, costs = plain.problem.errors(metric, slice(0, 2)), plain.problem.costs
    by_hand = next(
        hundredth / 100
        for hundredth in range(99, 0, -1)
        if error_over_uniform(plain, metric, allocate(errors, costs, hundredth / 100).choice) <= 1
    )
    assert hold.largest == by_hand < 1
    taken = fitted(trace, metric, hold=True, refresh_every=8)
    assert taken.provenance.hold == Hold(1.0, False, by_hand, taken=True)
    assert taken.provenance.alpha == by_hand
    assert error_over_uniform(taken, metric) <= 1
    assert list(taken.allocation.choice) == list(fitted(trace, metric, alpha=by_hand).allocation.choice)
    assert taken.provenance.budget == pytest.approx(by_hand * plain.provenance.budget)
    assert taken.plan.refresh is not None
    assert taken.plan.refresh.alpha == by_hand
    assert plain.provenance.size < taken.provenance.size


def test_a_plan_that_holds_stays(trace: Trace, tmp_path: Path) -> None:
    steady = record(tmp_path / "steady", drifting(0, 4.0)[:4] * 2, LAYERS)  # the second half is the first once more
    one, other = (fitted(steady, "l2", hold=hold) for hold in (False, True))
    assert one.provenance == other.provenance
    assert one.provenance.hold == Hold(1.0, True, 1.0)
    # More error asked for is more error allowed later on.
    more = fitted(steady, "l2", alpha=1.3).provenance
    assert more.hold == Hold(1.3, True, 1.3)
    errors = more.relative_error
    assert errors.plan.held_out is not None
    assert errors.uniform.held_out is not None
    assert errors.uniform.held_out < errors.plan.held_out <= 1.3 * errors.uniform.held_out
    alone = fitted(trace, "l2", window=6).provenance
    assert alone.hold is None
    assert "hold" not in alone.to_json()
    assert fitted(trace, "l2", budget=1e9).provenance.hold is None
    with pytest.raises(GradlabError, match="hold: the trace is one window"):
        fitted(trace, "l2", window=6, hold=True)
    with pytest.raises(GradlabError, match="hold: looks for an alpha, and a budget is given"):
        fitted(trace, "l2", budget=1.0, hold=True)


def problem_of(errors: Sequence[np.ndarray], reference: Sequence[int]) -> Problem:
    """errors: per layer (2 windows, candidates): one chosen on, one held out. Less error costs more."""
    count = errors[0].shape[1]
    tried = tuple(Candidate("topk", {"density": (k + 1) / 100}) for k in range(count))
    ones = np.ones(2)
    tables = [LayerTable(LAYERS[0], tried, rows**2, rows, ones, ones) for rows in errors]
    costs = tuple(np.arange(1.0, count + 1) * (layer + 1) for layer in range(len(errors)))
    return Problem(ErrorTable(tuple(tables), ((0, 0), (1, 1)), 1, "none"), costs, np.array(reference))


@law(st.integers(0, 10**6), st.sampled_from(["l2", "squared-l2"]), st.sampled_from([0.5, 1.0, 1.505, 2.0]), examples=30)
def test_no_larger_alpha_holds(seed: int, metric: str, asked: float) -> None:
    """On random tables, whose errors later are not those that plans are chosen by: against all hundredths."""
    rng = np.random.default_rng(seed)
    errors = [np.sort(rng.lognormal(size=(2, 5)))[:, ::-1] for _ in range(4)]
    problem = problem_of(errors, rng.integers(0, 5, 4))
    chosen_on, held_out = slice(0, 1), slice(1, 2)
    rows = problem.errors(metric, chosen_on)

    def choose(alpha: float) -> np.ndarray:
        return allocate(rows, problem.costs, alpha * total(rows, problem.reference)).choice

    def within(alpha: float) -> bool:
        table = [row[1] ** (1 if metric == "l2" else 2) for row in errors]
        try:
            error = sum(row[c] for row, c in zip(table, choose(alpha), strict=True))
        except GradlabError:
            return False
        return bool(error <= max(1.0, alpha) * sum(row[c] for row, c in zip(table, problem.reference, strict=True)))

    found = largest_alpha(problem, metric, held_out, asked, choose)
    assert found == next((k / 100 for k in range(200, 0, -1) if k / 100 < asked and within(k / 100)), None)
    assert found is None or holds(problem, choose(found), metric, held_out, found)


def test_nothing_may_hold() -> None:
    """Later on every candidate but the uniform plan's is much worse, and a smaller alpha cannot have that one."""
    errors = [np.array([[4.0, 3.0, 1.0], [9.0, 1.0, 9.0]])]
    problem = problem_of(errors, [1])
    rows = problem.errors("l2", slice(0, 1))

    def choose(alpha: float) -> np.ndarray:
        return allocate(rows, problem.costs, alpha * total(rows, problem.reference)).choice

    assert largest_alpha(problem, "l2", slice(1, 2), 1.0, choose) is None


def test_the_command_proposes_and_takes_it(gradlab: Command, trace: Trace, tmp_path: Path) -> None:
    words = ["fit", "lgreco", trace.path, "--codec", "topk", "--set", "density=0.05", "-s", "metric=l2", "--out"]
    code, text, err = gradlab(*words, tmp_path / "a.safetensors")
    assert code == 0, err
    expected = fitted(trace, "l2").provenance.hold
    assert expected is not None
    assert (
        f"give --hold: it takes --alpha {expected.largest:g}, the largest whose error is as allowed there."
        in " ".join(text.split())
    )
    code, text, err = gradlab(*words, tmp_path / "b.safetensors", "--hold", "--json")
    assert code == 0, err
    hold = {"asked": 1.0, "holds": False, "largest": expected.largest, "taken": True}
    assert json.loads(text)["hold"] == hold == Artifact.load(tmp_path / "b.safetensors").provenance["hold"]
    assert json.loads(text)["alpha"] == expected.largest
    code, text, err = gradlab(*words, tmp_path / "c.safetensors", "--hold")
    assert code == 0, err
    flat = " ".join(text.split())
    assert (
        f"With --alpha 1 it was more than allowed, so that the plan is that of {expected.largest:g}, the largest"
        in flat
    )
    assert "its error is no larger than the uniform plan's" in flat
