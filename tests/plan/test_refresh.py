"""A plan that is chosen anew while training: when, from what, what is carried over, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import jobs.refresh_tasks as tasks
from gradlab.artifact import Artifact
from gradlab.codec import Context
from gradlab.codec.wrapper import adopted
from gradlab.codecs.powersgd import PowerSGD
from gradlab.errors import GradlabError
from gradlab.executor.lockstep_plan import LockstepPlan
from gradlab.knapsack import allocate
from gradlab.layout import Layer
from gradlab.plan import FEEDBACK, Group, Plan, Wrap
from gradlab.plan.layer_errors import Candidate, squared_errors
from gradlab.plan.refresh import Refresh, is_critical
from gradlab.plan.replanning import Regimes, Replanner, choose
from support.laws import law, thorough
from support.prescribed import gradients
from support.process_pool import ProcessPool


def run(codec: str, world_size: int = 2, steps: int = tasks.STEPS) -> tuple[LockstepPlan, list[Any], list[Plan]]:
    lockstep = LockstepPlan(tasks.plan_of(codec), world_size)
    results, plans = [], []
    for step in range(steps):
        results.append(lockstep.step(step, [tasks.drawn(rank, step) for rank in range(world_size)]))
        plans.append(lockstep.plan)
    return lockstep, results, plans


@pytest.mark.parametrize("codec", ["powersgd", "topk"])
def test_nothing_is_lost_across_two_refreshes(codec: str) -> None:
    """own + residual == gradient + old residual in every iteration, also where the settings change."""
    lockstep = LockstepPlan(tasks.plan_of(codec), 3)
    changed = []
    for step in range(tasks.STEPS):
        grads = [tasks.drawn(rank, step) for rank in range(3)]
        before, plan = [dict(state) for state in lockstep.states], lockstep.plan.digest
        result = lockstep.step(step, grads)
        changed += [step] if lockstep.plan.digest != plan else []
        for rank, state in enumerate(lockstep.states):
            for name, held in state.items():
                old = before[rank].get(name, {}).get(f"{name}/residual", torch.zeros(()))
                own = result.exchanged[name][rank].own[name] if name in result.exchanged else None
                if own is not None:
                    torch.testing.assert_close(own + held[f"{name}/residual"], grads[rank][name] + old)
    assert changed == [7, 11]


def test_a_choice_is_what_the_planner_makes_of_the_accumulated_gradients() -> None:
    """By hand: rank 0's mean over the window, the grid's errors, the reference's as budget."""
    plan = tasks.plan_of("topk")
    _, _, plans = run("topk")
    window = range(1, 5)
    for_hand = {name: sum(tasks.drawn(0, step)[name] for step in window) / 4 for name in tasks.SHAPES}
    layers = {layer.name: layer for layer in plan.layers}
    names = [group.name for group in plan.compressed_groups]
    candidates = [Candidate("topk", settings) for settings in tasks.GRIDS["topk"]]
    errors = [np.sqrt(squared_errors(layers[name], for_hand[name], candidates)) for name in names]
    sizes = [[c.build().forecast([layers[name]], 2).payload for c in candidates] for name in names]
    choice = allocate(errors, sizes, float(np.array([row[2] for row in errors]).sum())).choice
    assert [group.settings for group in plans[7].compressed_groups] == [tasks.GRIDS["topk"][c] for c in choice]
    assert choose(plan, for_hand, 2, 4) == dict(zip(names, map(int, choice), strict=True))
    # Settings change before iterations 7 and 11: chosen after 4 and 8, two iterations to measure in.
    digests = [one.digest for one in plans]
    assert [step for step in range(1, tasks.STEPS) if digests[step] != digests[step - 1]] == [7, 11]
    assert choose(plan, {}, 2, 4) == dict.fromkeys(names, 2)


def test_accordion_says_whose_error_is_the_budget() -> None:
    """By hand, window by window: flags from norms and rates, the flagged settings' error, the smallest plan within."""
    plan = tasks.plan_of("topk", accordion=True)
    lockstep = LockstepPlan(plan, 2)
    layers = {layer.name: layer for layer in plan.layers}
    candidates = [Candidate("topk", settings) for settings in tasks.GRIDS["topk"]]
    names = [group.name for group in plan.compressed_groups]
    sizes = [[c.build().forecast([layers[name]], 2).payload for c in candidates] for name in names]
    norms: dict[str, float] = {}
    expected = []
    for first in (1, 5):
        means = {name: sum(tasks.drawn(0, s)[name] for s in range(first, first + 4)) / 4 for name in names}
        now = {name: float(mean.norm()) for name, mean in means.items()}
        critical = [name for name in names if not norms or abs(now[name] / norms[name] - 1) >= 0.5]
        errors = [np.sqrt(squared_errors(layers[name], means[name], candidates)) for name in names]
        allowed = sum(row[3 if name in critical else 0] for name, row in zip(names, errors, strict=True))
        expected.append([tasks.GRIDS["topk"][c] for c in allocate(errors, sizes, allowed).choice])
        norms = now
    assert critical == ["conv", "wide"]
    used = []
    for step in range(tasks.STEPS):
        lockstep.step(step, [tasks.drawn(rank, step) for rank in range(2)], dict.fromkeys(names, 0.1))
        used.append([group.settings for group in lockstep.plan.compressed_groups])
    assert used[7] == used[10] == expected[0] == [{"density": 0.3}] * 3  # nothing is left to choose
    assert used[11] == used[13] == expected[1] != expected[0]


@law(
    st.lists(
        st.tuples(*[st.sampled_from([0.0, 1.0, 1.4, 1.6, 3.0])] * 3, st.sampled_from([0.1, 0.08, 0.05])),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 5),
)
def test_training_sees_the_regimes_that_recorded_windows_have(rows: list[tuple[float, ...]], saved: int) -> None:
    """Window by window, and across a checkpoint: as the analysis of a whole recording finds them."""
    plan = tasks.plan_of("topk", accordion=True)
    assert plan.refresh is not None
    assert plan.refresh.accordion is not None
    names = ["conv", "wide", "tall"]
    windows, rates = np.array([row[:3] for row in rows]), np.array([[np.nan], *([row[3]] for row in rows)])
    before = np.concatenate([np.full_like(windows[:1], np.nan), windows[:-1]])
    expected = is_critical(before, windows, rates[:-1], rates[1:])
    regimes = Regimes(plan, plan.refresh.accordion)
    for window, (*norms, rate) in enumerate(rows):
        if window == saved:
            kept, regimes = regimes.state(), Regimes(plan, plan.refresh.accordion)
            regimes.load(kept)
        means = {name: torch.full((4,), norm / 2) for name, norm in zip(names, norms, strict=True)}
        reference = regimes.after(means, dict.fromkeys(names, rate))
        flags = dict(zip(names, expected[window], strict=True))
        assert regimes.critical == {name for name in names if flags[name]}
        assert reference == {name: 3 if flags[name] else 0 for name in names}


def test_bytes_follow_the_settings_and_the_choice_is_counted() -> None:
    _, results, plans = run("topk")
    for step in range(1, tasks.STEPS):
        choice_bytes = 8 * 3 if step in (7, 11) else 0
        assert results[step].payload[0] == plans[step].payload_bytes(2) + choice_bytes
        assert results[step].payload[1] == plans[step].payload_bytes(2)


@pytest.mark.parametrize("alternating", [False, True])
def test_warm_starts_survive_a_change_of_rank(alternating: bool) -> None:
    """The rows there are go on; more are drawn, alike on all ranks; and the approximation is as good as a warm one."""
    kept = {"w/q": torch.randn(4, 10)}
    fewer, more = (PowerSGD(PowerSGD.Settings(rank, alternating=alternating)) for rank in (2, 6))
    matrix = torch.zeros(30, 10)
    for codec, rank in ((fewer, 2), (more, 6)):
        state = adopted(codec, codec.kept([Layer("w", (30, 10))], 0, 2, "w"), kept)
        assert state == kept
        started = codec._start("w", matrix, state, Context(0, 2, 5, group="w"))
        assert started.shape == (rank, 10)
        torch.testing.assert_close(started[: min(rank, 4)], kept["w/q"][: min(rank, 4)])
        torch.testing.assert_close(started, codec._start("w", matrix, state, Context(1, 2, 5, group="w")))
        assert bool(started.any(1).all())
    cold = PowerSGD(PowerSGD.Settings(2, warm_start=False))
    context = Context(0, 2, 5, group="w")
    torch.testing.assert_close(cold._start("w", matrix, kept, context), cold._start("w", matrix, {}, context))


@pytest.mark.parametrize(("codec", "ranks"), [("powersgd", 3), thorough("topk", 3), thorough("qsgd", 2)])
def test_the_engine_does_what_lockstep_does(pool: ProcessPool, codec: str, ranks: int) -> None:
    """Bit for bit in deterministic mode, bytes included; the settings change twice."""
    for result in pool.run("jobs.refresh_tasks:against_lockstep", ranks, codec=codec):
        assert result["same"]
        assert result["same_states"]
        used = result["used"]
        assert [step for step in range(1, tasks.STEPS) if used[step] != used[step - 1]] == [7, 11]
        assert result["report"]["failure"] == ""
        assert set(result["report"]["choice"]) == {"conv", "wide", "tall"}


def test_the_engine_follows_accordion_as_lockstep_does(pool: ProcessPool) -> None:
    """All layers are critical first and after the rate fell; in between, those that became the loud one or were it."""
    root, *others = pool.run("jobs.refresh_tasks:against_lockstep", 2, codec="topk", accordion=True)
    for result in (root, *others):
        assert result["same"]
        assert result["same_states"]
        assert [step for step in range(1, tasks.STEPS) if result["used"][step] != result["used"][step - 1]] == [7, 11]
    everyone = ["conv", "tall", "wide"]
    assert root["critical"] == [None] * 4 + [everyone] * 4 + [["conv", "wide"]] * 4 + [everyone] * 2
    assert all(result["critical"] == [None] * tasks.STEPS for result in others)


@pytest.mark.parametrize(
    ("stop", "accordion"), [thorough(3, True), (6, True), (7, False), thorough(12, True), thorough(12, False)]
)
def test_resumed_is_never_stopped(pool: ProcessPool, stop: int, accordion: bool) -> None:
    """Amid accumulating; with a choice made and not told; just after one; with one more under way."""
    for result in pool.run("jobs.refresh_tasks:resumed", 2, codec="powersgd", stop=stop, accordion=accordion):
        assert result == {"equal": True, "same_plan": True}


def test_a_choice_that_fails_changes_nothing_and_is_reported(pool: ProcessPool) -> None:
    root, other = pool.run("jobs.refresh_tasks:failing", 2)
    assert root["stayed"]
    assert other["stayed"]
    assert "smallest reachable" in root["report"]["failure"]
    assert root["report"]["choice"] is None
    lockstep = LockstepPlan(tasks.plan_of("powersgd", alpha=1e-9), 2)
    for step in range(tasks.STEPS):
        lockstep.step(step, [tasks.drawn(rank, step) for rank in range(2)])
    assert all("no plan could be chosen" in line and "smallest reachable" in line for line in lockstep.remarks)
    assert len(lockstep.remarks) == 2
    assert lockstep.stateful


def test_a_gradient_that_is_not_finite_is_left_out() -> None:
    """The window's other gradients choose; a step that is not committed changes no state."""
    lockstep, clean = LockstepPlan(tasks.plan_of("topk"), 2), run("topk")[2]
    for step in range(8):
        grads = [tasks.drawn(rank, step) for rank in range(2)]
        if step == 2:
            grads[0] = {name: torch.full_like(grad, torch.nan) for name, grad in grads[0].items()}
        lockstep.step(step, grads)
    assert lockstep.plan.refresh == clean[7].refresh
    assert lockstep.plan.digest != tasks.plan_of("topk").digest


def chosen(windows: dict[str, list[float]]) -> dict[str, int] | None:
    """The choice after a window of four iterations. windows: by layer, the loss scale of each; NaN: not finite."""
    plan, grid = tasks.plan_of("topk"), [{"density": float(density)} for density in np.geomspace(0.005, 0.5, 21)]
    assert plan.refresh is not None
    names = list(plan.refresh.settings)
    refresh = replace(plan.refresh, settings=dict.fromkeys(names, grid), reference=dict.fromkeys(names, 10))
    replanner = Replanner(replace(plan, refresh=refresh), rank=0, world_size=2, beside=False)
    for step in range(5):
        for name, scales in windows.items():
            scale = scales[(step - 1) % 4]
            replanner.add({name: gradients(tasks.SHAPES, 0, 0)[name] * scale}, step, 1.0 if np.isnan(scale) else scale)
        replanner.end(step)
    return replanner.settled()


def test_a_loss_scale_weighs_no_layer_and_no_iteration() -> None:
    """Layers whose gradients were left out in some iterations count by the mean of the others."""
    names = list(tasks.SHAPES)
    expected = chosen({name: [1.0] * 4 for name in names})
    assert expected is not None
    for name in names:
        rest = {other: [1.0] * 4 for other in names if other != name}
        assert chosen({**rest, name: [2.0**16, 1.0, 2.0**-8, 2.0**10]}) == expected
        assert chosen({**rest, name: [1.0, np.nan, np.nan, np.nan]}) == expected


# --- formats and refusals ---------------------------------------------------------------------------------------------


def test_an_artifact_keeps_its_refresh(tmp_path: Path) -> None:
    plan = tasks.plan_of("powersgd", accordion=True)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))).digest == plan.digest
    path = Artifact(plan).save(tmp_path / "a.safetensors")
    assert Artifact.load(path).plan.refresh == plan.refresh
    still = replace(plan, refresh=None)
    assert still.digest != plan.digest
    assert "refresh" not in still.to_json()


def test_a_metric_sums_norms_or_their_squares() -> None:
    """By all plans of a small grid: the choice is the smallest within the reference's error, by either metric."""
    plan = tasks.plan_of("topk")
    assert plan.refresh is not None
    layers = {layer.name: layer for layer in plan.layers}
    # Of equal norms no layer's squares would weigh more.
    drawn = {name: grad * scale for (name, grad), scale in zip(tasks.drawn(0, 1).items(), (1, 9, 0.1, 1), strict=True)}
    candidates = [Candidate("topk", settings) for settings in tasks.GRIDS["topk"]]
    names = list(plan.refresh.settings)
    squares = np.array([squared_errors(layers[name], drawn[name], candidates) for name in names])
    sizes = np.array([[c.build().forecast([layers[name]], 2).payload for c in candidates] for name in names])
    for metric, errors in (("l2", np.sqrt(squares)), ("squared-l2", squares)):
        rows = range(len(names))
        allowed = [
            choice
            for choice in product(range(len(candidates)), repeat=len(names))
            if errors[rows, choice].sum() <= errors[:, 2].sum()
        ]
        least = min(sizes[rows, choice].sum() for choice in allowed)
        chosen_by = choose(replace(plan, refresh=replace(plan.refresh, metric=metric)), drawn, 2, 4)
        choice = tuple(chosen_by[name] for name in names)
        assert choice in allowed
        assert sizes[rows, choice].sum() == least


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"every": 0}, "every = 0"),
        ({"every": 2.0}, "every = 2.0"),
        ({"delay": 4}, r"delay = 4, expected 0 to 4 - 1 iterations"),
        ({"alpha": 0}, "alpha = 0"),
        ({"metric": "loud"}, "metric = loud"),
        ({"metric": 3}, "metric = 3"),
        ({"reference": {"conv": 0}}, "one index for each group"),
        ({"reference": {"conv": 9, "wide": 0, "tall": 0}}, "an index among the settings of conv"),
        ({"settings": {"nosuch": [{}]}, "reference": {"nosuch": 0}}, "nosuch is not a compressed group"),
        ({"settings": {"conv": [{"rank": 0}]}, "reference": {"conv": 0}}, "rank = 0"),
        ({"settings": {"conv": [{"speed": 1}]}, "reference": {"conv": 0}}, "no setting speed"),
    ],
)
def test_a_refresh_that_makes_no_sense_is_named(changes: dict[str, Any], message: str) -> None:
    plan = tasks.plan_of("powersgd")
    assert plan.refresh is not None
    with pytest.raises(GradlabError, match=message):
        replace(plan, refresh=replace(plan.refresh, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eta": -0.1}, "accordion: eta = -0.1"),
        ({"eta": True}, "accordion: eta = True"),
        ({"least_decay": 1.0}, "accordion: least_decay = 1.0, expected a number from 0, below 1"),
        ({"least": {"conv": 0}}, "accordion's least = .* one index for each group"),
        ({"most": {"conv": 0, "wide": 4, "tall": 0}}, "accordion's most = .* an index among the settings of wide"),
    ],
)
def test_an_accordion_that_makes_no_sense_is_named(changes: dict[str, Any], message: str) -> None:
    refresh = tasks.plan_of("topk", accordion=True).refresh
    assert refresh is not None
    assert refresh.accordion is not None
    with pytest.raises(GradlabError, match=message):
        replace(refresh, accordion=replace(refresh.accordion, **changes))
    for broken in (None, {}, {**refresh.accordion.to_json(), "least": 3}):
        with pytest.raises(GradlabError, match="not the Accordion of a refresh"):
            Refresh.from_json({**refresh.to_json(), "accordion": broken})


@pytest.mark.parametrize(
    "broken", [None, {}, {"norms": {"conv": "1"}}, {"rates": {"nosuch": 1.0}}, {"critical": ["nosuch"]}, {"norms": 3}]
)
def test_regimes_of_another_plan_are_refused(broken: Any) -> None:
    replanner = Replanner(tasks.plan_of("topk", accordion=True), 0, 2, beside=False)
    state = replanner.state()
    replanner.load(state)
    assert replanner.state() == state
    with pytest.raises(GradlabError, match="Accordion's regimes"):
        replanner.load({**state, "regimes": {**state["regimes"], **broken} if broken else broken})


def test_what_belongs_to_one_setting_is_refused() -> None:
    plan = tasks.plan_of("topk")
    around = (*FEEDBACK, Wrap("two_way"))
    groups = tuple(Group(g.name, g.layers, g.codec, g.settings, around) for g in plan.groups)
    assert replace(plan, groups=groups).groups == groups  # shards are the same at every density
    first, *others = plan.groups
    blocks = Group(first.name, first.layers, "block_scaled", {"block_size": 64}, around)
    cut_apart = {first.name: tuple({"block_size": size} for size in (64, 256))}
    assert plan.refresh is not None
    reference = {**plan.refresh.reference, first.name: 0}
    refresh = replace(plan.refresh, settings={**plan.refresh.settings, **cut_apart}, reference=reference)
    with pytest.raises(GradlabError, match="servers of two_way would have other shards"):
        replace(plan, groups=(blocks, *others), refresh=refresh)
    for broken in ({}, {"every": 1}, None, {**plan.refresh.to_json(), "settings": {"conv": 3}}):  # type: ignore[union-attr]
        with pytest.raises(GradlabError, match="not a refresh"):
            Refresh.from_json(broken)
