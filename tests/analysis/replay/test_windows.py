"""Sums over windows of steps, against an oracle that keeps every vector; and what feedback and its lack do to them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from gradlab.analysis.replay import lockstep_of, replay, replay_steps
from gradlab.analysis.replay.run import parts_of
from gradlab.analysis.replay.windows import RunningSums, WindowSums, joined
from gradlab.plan import Plan, Wrap
from support.laws import law
from support.recorded import LAYERS, random_gradients, record


def uniform(codec: str, feedback: bool, **settings: object) -> Plan:
    wrappers = [Wrap("error_feedback")] if feedback else []
    return Plan.uniform(LAYERS, codec, minimum_numel=1, wrappers=wrappers, **settings)


def oracle(applied: np.ndarray, true: np.ndarray, length: int) -> list[tuple[float, float]]:
    """Error and cosine of each whole window, from all vectors (T, n) kept in float64."""
    rows = []
    for start in range(0, len(applied) - length + 1, length):
        a, g = (vectors[start : start + length].sum(0) for vectors in (applied, true))
        rows.append((np.linalg.norm(a - g) / np.linalg.norm(g), a @ g / np.linalg.norm(a) / np.linalg.norm(g)))
    return rows


@law(st.integers(0, 2**16), st.integers(1, 40), st.integers(1, 9), st.integers(1, 3), examples=30)
def test_running_sums_are_those_of_an_oracle_that_keeps_every_vector(
    seed: int, steps: int, length: int, parts: int
) -> None:
    """Whatever layers a plan's parts hold, for lengths that do and do not divide the number of steps."""
    rng = np.random.default_rng(seed)
    applied, true = (rng.standard_normal((steps, parts, 5)).astype(np.float32) for _ in range(2))
    sums = [RunningSums({}, tuple({1, length})) for _ in range(parts)]
    for t in range(steps):
        for part, running in enumerate(sums):
            name = f"layer {part}"
            running.add(t, {name: torch.from_numpy(applied[t, part])}, {name: torch.from_numpy(true[t, part])})
    found = joined([running.windows for running in sums])
    flat = [vectors.reshape(steps, -1).astype(np.float64) for vectors in (applied, true)]
    for size in {1, length}:
        own = [window for window in found if window.length == size]
        expected = oracle(*flat, size)
        found_rows = np.array(sorted((w.error, w.cosine) for w in own)).reshape(-1, 2)
        np.testing.assert_allclose(found_rows, np.array(sorted(expected)).reshape(-1, 2), rtol=1e-4, atol=1e-5)
        assert {(w.first, w.last) for w in own} == {(at, at + size - 1) for at in range(0, steps - size + 1, size)}


def test_weights_count_as_repeated_values() -> None:
    """A layer of weight 3 is as three layers with its values."""
    values = {name: torch.randn(7, generator=torch.Generator().manual_seed(i)) for i, name in enumerate("abcd")}
    once, thrice = RunningSums({"x": 3.0}, (2,)), RunningSums({}, (2,))
    for step, (a, g) in enumerate((("a", "b"), ("c", "d"))):
        once.add(step, {"x": values[a]}, {"x": values[g]})
        thrice.add(step, dict.fromkeys("xyz", values[a]), dict.fromkeys("xyz", values[g]))
    (left,), (right,) = joined([once.windows]), joined([thrice.windows])
    assert (left.error, left.cosine) == pytest.approx((right.error, right.cosine))


def test_a_step_that_is_not_finite_in_one_part_leaves_its_windows_out_in_all() -> None:
    one = {"x": torch.ones(3)}
    sums = [RunningSums({}, (2,)) for _ in range(2)]
    for step in range(4):
        sums[0].add(step, one, one)
        sums[1].add(step, *((None, None) if step == 1 else (one, one)))
    windows = joined([running.windows for running in sums])
    assert [(w.first, w.last, w.error, w.cosine) for w in windows] == [(0, 1, None, None), (2, 3, 0.0, 1.0)]


def test_steps_are_not_changed_by_being_summed() -> None:
    """The first step's tensors are copied: they may be a codec's workspace."""
    mean = {"x": torch.ones(3)}
    running = RunningSums({}, (2,))
    running.add(0, mean, mean)
    mean["x"].fill_(5.0)
    running.add(1, {"x": torch.zeros(3)}, {"x": torch.zeros(3)})
    assert running.windows == [WindowSums(2, 0, 1, True, (0.0, pytest.approx(3.0), pytest.approx(3.0), 3.0))]


@pytest.mark.parametrize("split", [False, True])
def test_a_replays_windows_are_those_of_an_oracle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: bool) -> None:
    """In one part or group by group; and the window of one step has the figures of the step."""
    plan = uniform("topk", True, density=0.1)
    with record(tmp_path / "t", random_gradients(3, 20, 2)) as trace:
        if split:
            monkeypatch.setattr("gradlab.analysis.replay.run._PART_VALUES", 1)
            assert len(parts_of(plan, 2)) > 1
        result = replay(trace, plan)
        applied, true = [], []
        for done, ranks in replay_steps(trace, lockstep_of(trace, plan), 0, 20):
            means = {name: mean for group in done.exchanged.values() for name, mean in group[0].mean.items()}
            applied.append(np.concatenate([means[name].double().numpy().ravel() for name in sorted(means)]))
            averages = [sum(rank[name].double().numpy() for rank in ranks) / 2 for name in sorted(means)]
            true.append(np.concatenate([average.ravel() for average in averages]))
    vectors = np.array(applied), np.array(true)
    for length in (4, 16):
        found = [(window.error, window.cosine) for window in result.windows if window.length == length]
        assert found == [pytest.approx(row, rel=1e-4) for row in oracle(*vectors, length)]
    steps = [(step.aggregate_error, step.cosine) for step in result.steps]
    assert steps == [pytest.approx(row, rel=1e-4) for row in oracle(*vectors, 1)]
    shortest = result.window_errors[0]
    summary = result.summary()
    assert (shortest.length, shortest.windows) == (1, 20)
    assert (shortest.aggregate_error, shortest.cosine) == (summary.aggregate_error, summary.cosine)


def test_identity_is_exact_in_every_window(tmp_path: Path) -> None:
    with record(tmp_path / "t", random_gradients(0, 64, 2)) as trace:
        result = replay(trace, Plan.uniform(LAYERS, "identity", minimum_numel=1))
    assert [one.length for one in result.window_errors] == [1, 4, 16, 64]
    assert [one.windows for one in result.window_errors] == [64, 16, 4, 1]
    assert {one.aggregate_error for one in result.window_errors} == {0.0}
    assert [one.cosine for one in result.window_errors] == pytest.approx([1.0] * 4, abs=1e-6)
    assert not result.memory


def lasting_gradients(steps: int) -> list[list[dict[str, np.ndarray]]]:
    """One gradient for all steps and ranks, with some noise: what is never sent is then missing from every sum."""
    (signal,) = random_gradients(5, 1, 1)
    noise = random_gradients(6, steps, 2)
    return [[{name: 3 * signal[0][name] + 0.1 * rank[name] for name in rank} for rank in step] for step in noise]


def test_feedback_sends_late_what_a_window_shows(tmp_path: Path) -> None:
    """With feedback the error of the sum falls with the window; without it the same coordinates are never sent."""
    errors = {}
    with record(tmp_path / "t", lasting_gradients(64)) as trace:
        for feedback in (True, False):
            result = replay(trace, uniform("topk", feedback, density=0.1))
            assert result.memory == feedback
            errors[feedback] = [one.aggregate_error for one in result.window_errors]
    fed, alone = errors[True], errors[False]
    assert fed[3] < fed[2] < fed[1] < fed[0]
    assert fed[3] < 0.5 * fed[1]
    assert alone[3] > 0.95 * alone[0]


def test_windows_of_a_fitted_plan_begin_after_its_fit(tmp_path: Path) -> None:
    with record(tmp_path / "t", random_gradients(0, 40, 2)) as trace:
        result = replay(trace, uniform("topk", True, density=0.1))
        fitted = result.held_out({"trace": trace.digest, "fitted_on": list(range(6))})
    assert {one.length: one.windows for one in result.window_errors} == {1: 40, 4: 10, 16: 2}
    assert {one.length: one.windows for one in fitted.window_errors} == {1: 34, 4: 8, 16: 1}
    few = fitted.held_out({"trace": fitted.trace_digest, "fitted_on": list(range(33))})
    assert (fitted.judgement.length, fitted.judgement.windows) == (4, 8)
    assert few.judgement is None  # one window of 4 alone


def test_memory_is_what_the_wrappers_keep(tmp_path: Path) -> None:
    kept = ("error_feedback", "momentum_correction", "local_momentum", "two_way")
    with record(tmp_path / "t", random_gradients(0, 4, 2)) as trace:
        for wrappers, memory in (
            *(([Wrap(name)], True) for name in kept),
            *((wrappers, False) for wrappers in ([], [Wrap("two_way", {"error_feedback": False})], [Wrap("hadamard")])),
        ):
            plan = Plan.uniform(LAYERS, "block_scaled", minimum_numel=1, wrappers=wrappers)
            assert replay(trace, plan).memory == memory


def test_a_replay_in_json_has_its_windows(tmp_path: Path) -> None:
    with record(tmp_path / "t", random_gradients(0, 32, 2)) as trace:
        result = replay(trace, uniform("topk", True, density=0.1))
    written = result.to_json()
    assert [one["length"] for one in written["windows"]] == [4] * 8 + [16] * 2
    assert [(one["first"], one["last"]) for one in written["windows"][-2:]] == [(0, 15), (16, 31)]
    assert [one["length"] for one in written["summary"]["windows"]] == [1, 4, 16]
    assert written["summary"]["judged_length"] == 4
    assert written["summary"]["judged_cosine"] == pytest.approx(np.median([w.cosine for w in result.windows[:8]]))
    assert all(math.isfinite(one["cosine"]) for one in written["windows"])
