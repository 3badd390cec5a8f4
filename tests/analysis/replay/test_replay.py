"""Replay against explicit simulations and laws."""

from __future__ import annotations

import itertools
import json
import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradlab.analysis.fit.gradiveq import fit_gradiveq
from gradlab.analysis.fit.lgc.fit import fit_lgc
from gradlab.analysis.fit.signs import fit_block_sizes
from gradlab.analysis.fit.uniform import uniform_artifact
from gradlab.analysis.layer_plan.lgreco import fit_lgreco
from gradlab.analysis.questions.accuracy import replay_table, replay_verdict
from gradlab.analysis.replay import parts_of, replay, replay_plans, replay_steps
from gradlab.analysis.replay.result import Replay, ReplayStep
from gradlab.artifact import Artifact
from gradlab.codec import Context, Exchanged, mean_only
from gradlab.codec.settings import build_settings
from gradlab.codecs.gradiveq import GradiVeQ
from gradlab.codecs.identity import Identity
from gradlab.collectives import Mean, all_reduce_wire_bytes, run_lockstep
from gradlab.errors import GradlabError
from gradlab.executor.lockstep_plan import LockstepPlan, Spent, timed
from gradlab.formatting import format_ratio, format_seconds
from gradlab.layout import Layer
from gradlab.plan import FEEDBACK, FINITE_FLAG_BYTES, Group, Plan, Schedule, Wrap
from gradlab.trace import Trace
from support.laws import thorough
from support.recorded import BIAS, CONVOLUTION, LAYERS, LINEAR, random_gradients, record, record_layer
from support.stacks import Stack

DENSE_BYTES = 4 * sum(layer.numel for layer in LAYERS)


def uniform(codec, **kwargs):
    return Plan.uniform(LAYERS, codec, minimum_numel=1, **kwargs)


def fitted_gradiveq(gradients):
    """A GradiVeQ plan for the convolution, fitted on the gradients' own averages."""
    averages = np.stack([np.mean([rank[CONVOLUTION.name] for rank in step], axis=0) for step in gradients])
    settings = {"ratio": 8, "slice_size": 24, "compressed_steps": 0}
    codec = GradiVeQ(build_settings(GradiVeQ, settings)).fit(
        [CONVOLUTION], {CONVOLUTION.name: torch.from_numpy(averages)}
    )
    group = Group("conv", (CONVOLUTION.name,), "gradiveq", settings)
    return Plan(LAYERS, (group,), learned={"conv": codec.learned})


@pytest.mark.parametrize("ranks", [1, 3])
def test_identity_changes_nothing_and_costs_what_dense_costs(tmp_path, ranks):
    with record(tmp_path / "t", random_gradients(0, 5, ranks)) as trace:
        result = replay(trace, uniform("identity"))
    assert [step.contribution_error for step in result.steps] == [0.0] * 5
    assert [step.aggregate_error for step in result.steps] == [0.0] * 5
    assert [step.cosine for step in result.steps] == pytest.approx([1.0] * 5, abs=1e-6)
    assert {step.payload_bytes_mean for step in result.steps} == {DENSE_BYTES}
    ratios = (result.summary().compression_ratio, result.summary().ratio_to_16_bits)
    assert ratios == ((None, None) if ranks == 1 else pytest.approx((1.0, 0.5), rel=0.01))  # but for padding
    row = replay_table({"identity": result.to_json()})
    assert dict(zip(row.columns, row.rows[0], strict=True))["vs 16 bits"] == format_ratio(ratios[1])
    assert result.warnings == []


def test_a_plan_is_replayed_in_the_form_that_it_will_have(tmp_path):
    """Few recorded ranks stand for many nodes: their means come back compressed, as those of many do."""
    default, both_ways = uniform("topk"), uniform("topk", wrappers=[*FEEDBACK, Wrap("two_way", {"answer": 4.0})])
    with record(tmp_path / "t", random_gradients(0, 6, 3)) as trace:
        found = {nodes: replay_plans(trace, {"": default}, nodes=nodes)[""] for nodes in (None, 4, 5, 64)}
        shards, gathered = replay(trace, both_ways), replay(trace, uniform("topk", wrappers=FEEDBACK))
    for nodes, replayed in found.items():
        alike = gathered if nodes in (None, 4) else shards
        assert [step.cosine for step in replayed.steps] == [step.cosine for step in alike.steps]
        assert replayed.steps[-1].payload_bytes_mean == pytest.approx(replayed.forecast_payload_bytes, rel=0.1)
        assert (replayed.plan_digest, replayed.nodes) == (default.digest, nodes or 3)
        told = f"3 recorded ranks stand for {nodes}"
        assert (told in (replayed.caution or "")) == (nodes is not None)
        assert uniform_artifact(default, replayed).provenance["replay"]["nodes"] == (nodes or 3)


def test_recorded_nodes_are_called_nodes(tmp_path):
    record(tmp_path / "t", random_gradients(0, 6, 4)).close()
    with Trace(tmp_path / "t", average_ranks=2) as trace:
        caution = replay_plans(trace, {"": uniform("topk")}, nodes=8)[""].caution
    assert caution.startswith("2 recorded nodes stand for 8")


def simulated_topk(gradients, density, names):
    """Error feedback and top-k in plain numpy: per step the contribution error and the aggregate error."""
    ranks = len(gradients[0])
    residual = [dict.fromkeys(names, 0.0) for _ in range(ranks)]
    rows = []
    for step in gradients:
        lost = asked_norm = wrong = true_norm = 0.0
        for name in names:
            sent = []
            for rank in range(ranks):
                asked = (step[rank][name] + residual[rank][name]).astype(np.float32).ravel()
                kept = np.argsort(-np.abs(asked))[: math.ceil(density * asked.size)]
                own = np.zeros_like(asked)
                own[kept] = asked[kept]
                residual[rank][name] = (asked - own).reshape(step[rank][name].shape)
                lost += float(np.square(asked - own, dtype=np.float64).sum())
                asked_norm += float(np.square(asked, dtype=np.float64).sum())
                sent.append(own)
            true = np.mean([step[rank][name].ravel() for rank in range(ranks)], axis=0, dtype=np.float64)
            wrong += float(np.square(np.mean(sent, axis=0, dtype=np.float64) - true).sum())
            true_norm += float(np.square(true).sum())
        rows.append((math.sqrt(lost / asked_norm), math.sqrt(wrong / true_norm)))
    return np.array(rows)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**16), ranks=st.integers(1, 3), density=st.sampled_from([0.05, 0.3, 1.0]))
def test_topk_with_feedback_is_the_simulation_in_numpy(tmp_path_factory, seed, ranks, density):
    gradients = random_gradients(seed, 6, ranks)
    with record(tmp_path_factory.mktemp("t") / "t", gradients) as trace:
        result = replay(trace, uniform("topk", density=density))
    expected = simulated_topk(gradients, density, [CONVOLUTION.name, LINEAR.name])
    assert [step.contribution_error for step in result.steps] == pytest.approx(expected[:, 0], rel=1e-4, abs=1e-6)
    assert [step.aggregate_error for step in result.steps] == pytest.approx(expected[:, 1], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("codec", "kwargs"), [("topk", {"density": 0.1}), ("powersgd", {"rank": 1})])
def test_what_was_sent_and_what_is_kept_add_up_to_all_gradients(tmp_path, codec, kwargs):
    gradients = random_gradients(1, 8, 2)
    lockstep = LockstepPlan(uniform(codec, error_feedback=True, **kwargs), 2)
    sent = {rank: torch.zeros(CONVOLUTION.shape, dtype=torch.float64) for rank in range(2)}
    with record(tmp_path / "t", gradients) as trace:
        for result, _ in replay_steps(trace, lockstep, 0, 8):
            for rank, done in enumerate(result.exchanged[CONVOLUTION.name]):
                sent[rank] += done.own[CONVOLUTION.name].double()
    for rank in range(2):
        total = np.sum([step[rank][CONVOLUTION.name] for step in gradients], axis=0, dtype=np.float64)
        kept = lockstep.states[rank][CONVOLUTION.name][f"{CONVOLUTION.name}/residual"].double()
        torch.testing.assert_close(sent[rank] + kept, torch.from_numpy(total), atol=1e-5, rtol=0)


def test_a_replay_tells_what_the_rules_of_a_run_would(tmp_path):
    unscaled = Wrap("error_feedback", {"contraction": "none"})
    growing = uniform("qsgd", bits=1, group_bytes=2**20, wrappers=[unscaled])
    with record(tmp_path / "t", random_gradients(1, 24, 2)) as trace:
        result = replay(trace, growing)
        healthy = replay(trace, uniform("topk", density=0.1, error_feedback=True))
    assert [(one.rule, one.ranks) for one in result.rules] == [("residual_grows", (0, 1))]
    assert result.to_json()["summary"]["rules"] == [one.to_json() for one in result.rules]
    assert "(rule residual_grows)" in result.warnings[-1]
    assert healthy.rules == ()


@pytest.mark.parametrize(("name", "ranks"), [("topk", 4), ("powersgd", 2), ("gradiveq", 1), thorough("gradiveq", 5)])
def test_counted_payload_is_the_plans_forecast(tmp_path, name, ranks):
    gradients = random_gradients(2, 4, ranks)
    plan = fitted_gradiveq(gradients) if name == "gradiveq" else uniform(name)
    with record(tmp_path / "t", gradients) as trace:
        result = replay(trace, plan)
    assert {step.payload_bytes_mean for step in result.steps} == {plan.payload_bytes(ranks)}
    assert {step.payload_bytes_max for step in result.steps} == {plan.payload_bytes(ranks)}
    assert result.forecast_payload_bytes == plan.payload_bytes(ranks)


def test_the_forecast_of_a_selection_in_shards_is_near_what_is_counted(tmp_path):
    plan = uniform("topk", density=0.1)
    with record(tmp_path / "t", random_gradients(2, 4, 5)) as trace:
        result = replay(trace, plan)
    counted = [step.payload_bytes_mean for step in result.steps]
    assert counted == pytest.approx([plan.payload_bytes(5)] * 4, rel=0.1)


@pytest.mark.parametrize(("codec", "wrapping"), [("threshold", "feedback"), thorough("ecsq", "two-way under feedback")])
def test_a_run_sends_the_bytes_that_a_replay_of_its_recording_counts(pool, tmp_path, codec, wrapping):
    """To the byte in every step, of codecs whose sizes vary, with a layer that some steps leave out."""
    ran = pool.run("jobs.executor_tasks:recorded", 3, folder=str(tmp_path / "t"), codec=codec, wrapping=wrapping)
    with Trace(tmp_path / "t") as trace:
        replayed = replay(trace, Stack(codec, wrapping).plan(trace.layers)).steps
    payload, wire = np.array([rank["sent"] for rank in ran], dtype=float).transpose(2, 1, 0)
    assert [step.payload_bytes_mean for step in replayed] == payload.mean(1).tolist()
    assert [step.payload_bytes_max for step in replayed] == payload.max(1).tolist()
    # The engine fuses requests, which pads a ring of three otherwise.
    assert [step.wire_bytes_mean for step in replayed] == pytest.approx(wire.mean(1).tolist(), rel=0.01)
    assert len(set(payload[:, 0])) > 2


def test_wire_bytes_of_dense_layers_and_flag_follow_the_ring(tmp_path):
    plan = fitted_gradiveq(random_gradients(3, 4, 4))
    with record(tmp_path / "t", random_gradients(3, 4, 4)) as trace:
        result = replay(trace, plan)
    dense = 4 * (LINEAR.numel + BIAS.numel)
    codes = all_reduce_wire_bytes(4 * 3 * 3, 4)  # three slices of 24 as three numbers each; no tail
    expected = all_reduce_wire_bytes(dense, 4) + all_reduce_wire_bytes(FINITE_FLAG_BYTES, 4) + codes
    assert {step.wire_bytes_mean for step in result.steps} == {expected}


def test_warm_up_is_dense_and_states_start_after_it(tmp_path):
    gradients = random_gradients(4, 7, 2)
    with record(tmp_path / "a", gradients) as trace:
        warm = replay(trace, uniform("topk", density=0.1, warmup_steps=3))
    with record(tmp_path / "b", gradients[3:], indices=range(3, 7)) as trace:
        cold = replay(trace, uniform("topk", density=0.1, warmup_steps=3))
    assert [step.compressing for step in warm.steps] == [False] * 3 + [True] * 4
    assert {step.payload_bytes_mean for step in warm.steps[:3]} == {DENSE_BYTES}
    assert [step.contribution_error for step in warm.steps[:3]] == [None] * 3
    assert [s.contribution_error for s in warm.steps[3:]] == [s.contribution_error for s in cold.steps]
    assert warm.summary().compressed_steps == 4


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_leaves_the_states_as_they_were(tmp_path, value):
    gradients = random_gradients(5, 6, 2)
    broken = random_gradients(5, 6, 2)
    broken[3][1][BIAS.name][0] = value  # a dense layer: the flag speaks for all layers
    plan = uniform("topk", density=0.2)
    with record(tmp_path / "a", broken) as trace:
        result = replay(trace, plan)
        lockstep = LockstepPlan(plan, 2)
        steps = replay_steps(trace, lockstep, 0, 6)
        for _ in range(3):
            next(steps)
        before = [{name: dict(state) for name, state in states.items()} for states in lockstep.states]
        next(steps)
        for states, kept in zip(lockstep.states, before, strict=True):
            assert states.keys() == kept.keys()
            assert all(states[group][key] is kept[group][key] for group in kept for key in kept[group])
    without = gradients[:3] + gradients[4:]
    with record(tmp_path / "b", without, indices=[0, 1, 2, 4, 5]) as trace:
        expected = replay(trace, plan)
    assert [step.finite for step in result.steps] == [True, True, True, False, True, True]
    assert result.summary().nonfinite_steps == [3]
    assert result.steps[3].contribution_error is None
    assert [s.contribution_error for s in result.steps if s.finite] == [s.contribution_error for s in expected.steps]


def test_random_streams_follow_the_iteration_number_of_the_run(tmp_path):
    gradients = random_gradients(6, 6, 2)
    plan = uniform("powersgd", rank=1, warm_start=False, error_feedback=False)
    with record(tmp_path / "a", gradients) as trace:
        whole, part = replay(trace, plan), replay(trace, plan, start=3)
    assert [s.contribution_error for s in part.steps] == [s.contribution_error for s in whole.steps[3:]]
    with record(tmp_path / "b", gradients, indices=range(100, 106)) as trace:
        elsewhere = replay(trace, plan)
    assert [s.contribution_error for s in elsewhere.steps] != [s.contribution_error for s in whole.steps]


class Listener(Identity):
    """Identity that keeps the contexts it was run in."""

    def __init__(self):
        super().__init__()
        self.contexts: list[Context] = []

    def exchange(self, grads, state, context):
        self.contexts.append(context)
        done = yield from mean_only(grads)
        return Exchanged(done.mean, done.own)


def test_context_carries_learning_rates_iteration_and_seed(tmp_path):
    plan = Plan(LAYERS, (Group("conv", (CONVOLUTION.name,), "topk"),), Schedule(0), seed=7)
    lockstep, listener = LockstepPlan(plan, 2), Listener()
    for run in lockstep.runs:
        run.codecs["conv"] = listener
    rates = [0.1, 0.2, math.nan]
    with record(tmp_path / "t", random_gradients(7, 3, 2), indices=[4, 5, 6], learning_rates=rates) as trace:
        list(replay_steps(trace, lockstep, 0, 3))
    carried = [(c.iteration, c.rank, c.seed, c.training.learning_rate.get("head.bias")) for c in listener.contexts]
    assert carried[:4] == [(4, 0, 7, 0.1), (4, 1, 7, 0.1), (5, 0, 7, 0.2), (5, 1, 7, 0.2)]
    assert [c.training.previous_learning_rate.get("conv.weight") for c in listener.contexts[::2]] == [0.1, 0.1, 0.2]
    assert listener.contexts[-1].training.learning_rate == {}


def test_loss_scale_is_divided_out(tmp_path):
    gradients, plan = random_gradients(8, 4, 2), uniform("topk", density=0.1)
    with record(tmp_path / "a", gradients) as trace:
        plainly = replay(trace, plan)
    with record(tmp_path / "b", gradients, loss_scale=1024.0) as trace:
        scaled = replay(trace, plan)
    assert [s.contribution_error for s in scaled.steps] == [s.contribution_error for s in plainly.steps]


def test_layer_errors_are_energies_over_all_ranks_and_steps(tmp_path):
    gradients = random_gradients(9, 3, 2)
    with record(tmp_path / "t", gradients) as trace:
        result = replay(trace, uniform("topk", density=0.1, error_feedback=False))
    values = np.stack([step[rank][LINEAR.name].ravel() for step in gradients for rank in range(2)])
    kept = -np.sort(-np.abs(values), axis=1)[:, : math.ceil(0.1 * LINEAR.numel)]
    expected = math.sqrt(1 - np.square(kept).sum() / np.square(values).sum())
    assert result.layer_errors[LINEAR.name] == pytest.approx(expected, rel=1e-5)
    assert set(result.layer_errors) == {CONVOLUTION.name, LINEAR.name}


def test_json_is_plain_and_complete(tmp_path):
    zeros = [[{layer.name: np.zeros(layer.shape, np.float32) for layer in LAYERS}] * 2] * 2
    with record(tmp_path / "t", random_gradients(10, 2, 2) + zeros) as trace:
        result = replay(trace, uniform("topk")).to_json()
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert len(result["steps"]) == 4
    assert result["summary"]["codec_seconds"] > 0


def test_layers_sent_dense_may_be_missing_from_the_trace(tmp_path):
    gradients = random_gradients(11, 3, 2)
    plan = Plan(LAYERS, (Group("conv", (CONVOLUTION.name,), "topk", {"density": 0.1}, FEEDBACK),))
    with record(tmp_path / "a", gradients) as trace:
        whole = replay(trace, plan)
    part = [[{CONVOLUTION.name: rank[CONVOLUTION.name]} for rank in step] for step in gradients]
    with record(tmp_path / "b", part, [CONVOLUTION]) as trace:
        result = replay(trace, plan)
    timeless = [{**step.__dict__, "codec_seconds": 0, "codec_wall_seconds": 0, "costs": {}} for step in result.steps]
    assert timeless == [
        {**step.__dict__, "codec_seconds": 0, "codec_wall_seconds": 0, "costs": {}} for step in whole.steps
    ]


def test_what_was_not_recorded_counts_in_bytes_and_in_nothing_else(tmp_path):
    """The slow way: the plan of the recorded layers alone, for errors; the plan of the whole model, for bytes."""
    gradients, recorded = random_gradients(11, 3, 2), [LINEAR, BIAS]
    part = [[{layer.name: rank[layer.name] for layer in recorded} for rank in step] for step in gradients]
    plan, alone = uniform("topk", density=0.1), Plan.uniform(recorded, "topk", minimum_numel=1, density=0.1)
    assert len(plan.compressed_groups) == 2
    with record(tmp_path / "alone", part, recorded) as trace:
        few = replay(trace, alone)
    with record(tmp_path / "t", part, recorded, model_layers=LAYERS) as trace:
        found = replay(trace, plan)
        with pytest.raises(GradlabError, match="this plan is for another model"):
            replay(trace, alone)
        one = Plan(LAYERS, tuple(group for group in plan.groups if group.layers == (CONVOLUTION.name,)))
        with pytest.raises(GradlabError, match="layers were not recorded, 67"):
            replay(trace, one)
        for fit in (fit_lgc, fit_lgreco, lambda trace, *_: fit_block_sizes(trace, 2.0, 1)):
            with pytest.raises(GradlabError, match=r"1 of the model's 3 layers were not recorded.*record them, too"):
                fit(trace, *(["topk"] if fit is fit_lgreco else []))
    assert [step.contribution_error for step in found.steps] == [step.contribution_error for step in few.steps]
    assert found.plan_digest == plan.digest
    assert found.forecast_payload_bytes == plan.payload_bytes(2)
    assert found.dense_payload_bytes == plan.payload_bytes(2, compressing=False)
    for step, less in zip(found.steps, few.steps, strict=True):
        scale = plan.payload_bytes(2) / alone.payload_bytes(2)
        assert step.payload_bytes_mean == pytest.approx(scale * less.payload_bytes_mean)
        assert step.codec_seconds == 0.0
    assert any("1 of the model's 3 layers were not recorded" in line for line in found.remarks)


def test_a_trace_of_other_layers_is_refused(tmp_path):
    smaller = Layer("conv.weight", (4, 2, 1, 1))
    for number, (layers, words) in enumerate(
        (
            ([LINEAR, BIAS], "records 2 of the model's 3 layers; the plan compresses conv.weight"),
            ([*LAYERS, Layer("other", (2,), "other")], "this plan is for another model"),
            ([smaller, LINEAR, BIAS], "this plan is for another model"),
            ([smaller, LINEAR], r"conv.weight: expected shape \[4, 2, 3, 3\], the model has \[4, 2, 1, 1\]"),
        )
    ):
        with (
            record(tmp_path / str(number), random_gradients(12, 2, 1, layers), layers) as trace,
            pytest.raises(GradlabError, match=words),
        ):
            replay(trace, uniform("topk"))


def test_ranges_without_anything_to_replay_are_refused(tmp_path):
    with record(tmp_path / "t", random_gradients(13, 3, 1)) as trace:
        with pytest.raises(GradlabError, match=r"nothing to replay in positions 2\.\.2 of 3"):
            replay(trace, uniform("topk"), start=2, stop=2)
        with pytest.raises(GradlabError, match="ends at iteration 2, the plan is dense until iteration 3"):
            replay(trace, uniform("topk", warmup_steps=3))


def test_memory_across_gaps_and_cold_starts_is_pointed_out(tmp_path):
    gradients = random_gradients(14, 4, 1)
    remembering, forgetful = uniform("topk"), uniform("topk", error_feedback=False)
    with record(tmp_path / "a", gradients, indices=[0, 10, 20, 30]) as trace:
        assert "lacks iterations in 3 places" in replay(trace, remembering).warnings[0]
        assert replay(trace, forgetful).warnings == []
    with record(tmp_path / "b", gradients) as trace:
        assert replay(trace, remembering).warnings == []
        assert "begins at iteration 2 with an empty one" in replay(trace, remembering, start=2).warnings[0]


# --- plans fitted on the trace they are replayed on ---------------------------------------------------------------


@pytest.fixture(scope="module")
def noise(tmp_path_factory):
    """A fit on 24 steps of pure noise, compressed from step 4 on, and its replay over all 40 as the fit judges it."""
    layer = Layer("conv.weight", (8, 4, 3, 3), "convolution")
    values = np.random.default_rng(0).standard_normal((40, 2, layer.numel)).astype(np.float32)
    with record_layer(tmp_path_factory.mktemp("noise") / "t", values, layer) as trace:
        fit = fit_gradiveq(trace, samples=24, start=6, warmup_steps=4, settings=GradiVeQ.Settings(loss_threshold=0.0))
        yield trace, fit, replay(trace, fit.plan)


ERRORS = ("contribution_error", "aggregate_error", "cosine")


def medians(steps):
    return {key: float(np.median([getattr(step, key) for step in steps])) for key in ERRORS}


def test_errors_of_a_fit_to_noise_are_those_of_later_iterations(noise):
    _, fit, unjudged = noise
    summary = unjudged.held_out(fit.provenance).summary()
    assert unjudged.summary().aggregate_error < 1e-3  # what the replay alone would say
    assert summary.aggregate_error > 0.9
    assert summary.cosine < 0.4
    assert {key: getattr(summary, key) for key in ERRORS} == medians(unjudged.steps[30:])
    assert summary.in_sample.to_json() == {"steps": 24, **medians(unjudged.steps[6:30])}
    assert (summary.compressed_steps, summary.judged_steps) == (36, 10)
    assert unjudged.held_out(fit.provenance).layer_errors["conv.weight"] == pytest.approx(
        summary.contribution_error, rel=0.05
    )


def test_in_sample_figures_stand_beside_with_a_warning(noise):
    _, fit, unjudged = noise
    judged = unjudged.held_out(fit.provenance)
    assert "fitted on 24 of the compressed iterations" in judged.warnings[0]
    assert "Only the 10 later iterations are a prediction" in judged.warnings[0]
    both = {"gradiveq": judged.to_json()}
    table = replay_table(both)
    assert dict(zip(table.columns, table.rows[0], strict=True))["error of the mean"].startswith("9")
    assert table.columns[-1] == "in-sample: rank, mean, cosine"
    assert ", 1.000" in table.rows[0][-1]
    assert both["gradiveq"]["fitted_on"] == list(range(6, 30))
    assert both["gradiveq"]["summary"]["in_sample"]["aggregate_error"] < 1e-3
    alone = replay_table({"gradiveq": unjudged.to_json()})
    assert len(alone.columns) == len(alone.rows[0]) == len(table.columns) - 1


def test_nothing_is_claimed_where_no_later_iteration_was_replayed(noise):
    trace, fit, _ = noise
    judged = replay(trace, fit.plan, stop=30).held_out(fit.provenance)
    assert judged.summary().contribution_error is None
    assert judged.summary().in_sample.steps == 24
    assert judged.layer_errors == {}
    assert "nothing is known" in judged.warnings[0]
    assert replay_verdict({"gradiveq": judged.to_json()}).startswith("Nothing is known about gradiveq")


def test_only_a_provenance_of_this_trace_holds_anything_out(noise):
    trace, fit, unjudged = noise
    for provenance in ({}, {"trace": trace.digest}, {**fit.provenance, "trace": "another"}):
        assert unjudged.held_out(provenance) == unjudged
    with pytest.raises(GradlabError, match="fitted_on = all, expected a list of iterations"):
        unjudged.held_out({"trace": trace.digest, "fitted_on": "all"})
    with pytest.raises(GradlabError, match="expected a list of iterations"):
        unjudged.held_out({"trace": trace.digest, "fitted_on": [1.5]})


def test_an_artifact_without_a_fit_says_where_it_comes_from(tmp_path):
    plan = uniform("topk", density=0.1)
    with record(tmp_path / "t", random_gradients(16, 4, 2)) as trace:
        result = replay(trace, plan)
        digest = trace.digest
    artifact = uniform_artifact(plan, result)
    assert artifact.plan is plan
    assert artifact.provenance == {
        "method": "uniform",
        "trace": digest,
        "world_size": 2,
        "payload_bytes": plan.payload_bytes(2),
        "dense_payload_bytes": DENSE_BYTES,
        "replay": result.to_json()["summary"],
    }
    assert Artifact.load(artifact.save(tmp_path / "a.safetensors")).provenance == artifact.provenance
    with pytest.raises(GradlabError, match="replay the plan itself"):
        uniform_artifact(uniform("topk", density=0.2), result)


@pytest.mark.parametrize("codec", ["topk", "sign", *map(thorough, ("powersgd", "qsgd", "identity"))])
def test_parts_of_a_plan_add_up_to_the_whole(tmp_path, monkeypatch, codec):
    """Replayed group by group, as a large model is: the same bytes, errors and memory."""
    layers = [Layer(f"block{i}.weight", (12, 8 + i), "linear") for i in range(4)] + [Layer("bias", (7,), "bias")]
    settings = {"group_bytes": 400} if codec == "sign" else {}
    plan = Plan.uniform(tuple(layers), codec, minimum_numel=1, warmup_steps=2, **settings)
    gradients = random_gradients(21, 7, 3, layers)
    gradients[4][1]["block2.weight"][0, 0] = np.nan
    with record(tmp_path / "t", gradients, layers) as trace:
        whole = replay(trace, plan)
        monkeypatch.setattr("gradlab.analysis.replay.run._PART_VALUES", 3 * 250)
        assert len(parts_of(plan, 3)) > 1
        parts = replay(trace, plan)
    assert [step.finite for step in parts.steps] == [True] * 4 + [False] + [True] * 2
    for step, expected in zip(parts.steps, whole.steps, strict=True):
        for name in ("iteration", "compressing", "finite", "payload_bytes_mean", "wire_bytes_mean", "wire_bytes_max"):
            assert getattr(step, name) == getattr(expected, name), name
        for name in ("contribution_error", "aggregate_error", "cosine", "unsent"):
            pair = getattr(step, name), getattr(expected, name)
            assert pair == (None, None) or pair[0] == pytest.approx(pair[1], rel=1e-9, abs=1e-12), name
        assert set(step.costs) == set(expected.costs)
    assert parts.layer_errors == pytest.approx(whole.layer_errors, rel=1e-9)
    assert (parts.remarks, parts.plan_digest) == (whole.remarks, whole.plan_digest)


def test_the_plan_whose_like_trained_best_is_named_whatever_its_ranks_errors_are() -> None:
    def summary(own: float | None, mean: float | None, cosine: float, **other: Any) -> dict:
        errors = {"contribution_error": own, "aggregate_error": mean, "compression_ratio": 4.0}
        judged = {"judged_cosine": cosine, "judged_length": 4, "memory": True, "caution": None}
        return {"summary": {**errors, **judged, **other}}

    replays = {
        "sums": summary(0.9, 0.2, 0.97),
        "ranks": summary(0.3, 0.1, 0.9),
        "lossless": summary(0.0, 1e-9, 1.0),
    }
    said = replay_verdict(replays)
    assert said.startswith(
        "Of the lossy plans replayed, sums is the one whose similar methods trained best: it sends 4.00x fewer bytes"
    )
    assert "with a similar error (cosine 0.97 over 4 steps)" in said
    assert "Median errors of a step: 20.0 % of the mean, 90.0 % of a rank's own." in said
    said = replay_verdict({"zeros": summary(0.5, None, 0.0), "sums": replays["sums"]})
    assert "sums is the one whose similar methods trained best" in said
    assert "Nothing is known about zeros: no finite iteration with a gradient" in said
    assert replay_verdict({"sums": replays["sums"]}).startswith("sums sends 4.00x fewer bytes")
    said = replay_verdict({name: summary(0.3, 0.1, 0.9, caution="few") for name in ("a", "b")})
    assert said.count("Preliminary: few.") == 1


def test_a_recording_that_is_short_or_of_the_beginning_is_said_to_be() -> None:
    same = (True, True, 0.1, 0.1, 0.9, 1.0, 1, 1.0, 1, 0.0)
    for start, count in itertools.product((0, 90, 255, 256, 9000), (31, 64)):
        made = Replay(tuple(ReplayStep(start + t, *same) for t in range(count)), 2, "", "", (), 1.0, 1.0)
        caution = made.caution or ""
        assert ("fewer than 32" in caution) == (count < 32)
        assert ("of the beginning of training" in caution) == (start < 4 * count)


# --- codec times ----------------------------------------------------------------------------------------------------


def test_codec_times_are_one_measurement_with_its_spread(tmp_path):
    """Summary, groups and table are of the same steps: medians lie in the range, parts sum up to their plan's."""
    with record(tmp_path / "t", random_gradients(0, 5, 2)) as trace:
        result = replay(trace, uniform("topk", density=0.1, warmup_steps=2))
    summary, times = result.summary(), [step.codec_seconds for step in result.compressed]
    assert len(times) == 3
    assert summary.codec_seconds == np.median(times)
    assert summary.codec_seconds_range == (min(times), max(times))
    for step in result.compressed:
        assert step.codec_seconds == pytest.approx(sum(cost.codec_seconds for cost in step.costs.values()))
    table = replay_table({"topk": json.loads(json.dumps(result.to_json()))})
    least, middle, most = (format_seconds(value) for value in sorted(times))
    assert dict(zip(table.columns, table.rows[0], strict=True))["codec time"] == f"{middle} ({least} to {most})"


def test_waiting_is_in_the_clocks_time_alone_and_the_table_says_it(tmp_path):
    """A codec that waits, as one does on a busy machine: its processor time does not grow, and the note says so."""

    def waiting():
        time.sleep(0.05)
        yield Mean(torch.ones(3))
        time.sleep(0.05)

    spent = Spent()
    run_lockstep([timed(waiting(), spent)])
    assert spent.wall_seconds >= 0.1
    assert spent.seconds < 0.05
    with record(tmp_path / "t", random_gradients(0, 3, 2)) as trace:
        result = replay(trace, uniform("topk", density=0.1))

    def note(factor):
        steps = tuple(replace(step, codec_wall_seconds=factor * step.codec_seconds) for step in result.steps)
        return replay_table({"topk": replace(result, steps=steps).to_json()}).note

    assert "busy" not in note(1.1)
    assert "of 1 of 1 plans" in note(3.0)
    assert "topk's 3.0 times" in note(3.0)
