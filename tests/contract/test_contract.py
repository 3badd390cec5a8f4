"""The contract suite: every codec in gradlab/codecs, found by itself, on every case."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any, get_args

import pytest
import torch
from hypothesis import strategies as st

from gradlab import codecs
from gradlab.codec import Batch, Codec, Context, Tensors, check_codec, exchange_group
from gradlab.codec.settings import Field, fields_of
from gradlab.codec.wrapper import innermost
from gradlab.collectives import run_lockstep
from gradlab.errors import GradlabError
from gradlab.executor.lockstep_plan import LockstepPlan
from gradlab.layout import Layer
from gradlab.plan import Group, Plan
from support.contract import (
    STARTS_BARE,
    asks_for_means,
    cases,
    codec_of,
    keeps_what_was_counted,
    lockstep,
    plan_for,
    sizes_vary,
)
from support.laws import law, thorough
from support.prescribed import SHAPES, gradients
from support.process_pool import ProcessPool

# What an autoencoder cannot learn from, such as zeros, it says it has not learned.
pytestmark = pytest.mark.filterwarnings("ignore:gradlab. .*the autoencoder's error")
CODECS = cases()
METHODS = [codec for codec in CODECS if codec == codec_of(codec)]
RINGS = [codec for codec in CODECS if codec.endswith(", ring")]
# One of each kind of request: means, a gather, one of lengths that differ, shards, a broadcast, sums of integers.
KINDS = ["identity", "topk", "ecsq", "qsgd", "clt_k", "intsgd", "lgc_ring, by value"]
AWKWARD = ("plain", "equal", "one value", "zero on a rank", "tiny", "huge")


FEW = {name: SHAPES[name] for name in ("conv", "wide")}
# A group's layers together, and each alone.
ALONE = {name: SHAPES[name] for name in ("conv", "vector")}
SOME = {name: SHAPES[name] for name in ("conv", "transposed", "vector", "scalar", "empty")}


@pytest.mark.parametrize("codec", [one if one in METHODS or one in RINGS else thorough(one) for one in CODECS])
def test_a_codec_keeps_the_contract(codec: str) -> None:
    plan = plan_for(codec, "model", feedback=False, shapes=ALONE)
    check_codec(plan.build(plan.groups[0]), plan.layers, world_sizes=[3])


@pytest.mark.parametrize("codec", KINDS)
def test_feedback_keeps_the_contract(codec: str) -> None:
    plan = plan_for(codec, "model", feedback=True, shapes=FEW)
    check_codec(plan.build(plan.groups[0]), plan.layers, world_sizes=[1])


@pytest.mark.parametrize("codec", KINDS)
def test_non_contiguous_gradients(codec: str) -> None:
    """A transposed view gives what its contiguous copy gives."""
    plan = plan_for(codec, "layer", feedback=False)

    def strided(rank: int, step: int) -> Tensors:
        grads = gradients(SHAPES, rank, step)
        return {name: g.T.contiguous().T if g.ndim == 2 else g for name, g in grads.items()}

    assert not strided(0, 0)["wide"].is_contiguous()
    plain = lockstep(plan, 2, 1, lambda rank, step: gradients(SHAPES, rank, step))[0]
    views = lockstep(plan, 2, 1, strided)[0]
    for group in plan.groups:
        for name in group.layers:
            assert torch.equal(plain[group.name][0].value.mean[name], views[group.name][0].value.mean[name])


def drawn_settings(method: type[Codec]) -> st.SearchStrategy[dict[str, Any]]:
    """Some of a method's settings, each within the range that its field says."""
    return st.fixed_dictionaries({}, optional={field.name: drawn_value(field) for field in fields_of(method.Settings)})


def drawn_value(field: Field) -> st.SearchStrategy[Any]:
    """Values in a setting's range, None where its type has it; numbers without an upper end stay small."""
    about, types = field.about, get_args(field.hint) or (field.hint,)
    if about.choices:
        values = st.sampled_from(about.choices)
    elif bool in types:
        values = st.booleans()
    elif int in types:
        least = int(about.least or 0)
        values = st.integers(least, least + 40 if about.most is None else int(about.most))
    else:
        low, high = (about.above if about.least is None else about.least), about.below or about.most or 1e3
        values = st.floats(low, high, exclude_min=about.least is None, exclude_max=about.below is not None)
    values |= st.sampled_from(about.also) if about.also else st.nothing()
    return values | st.none() if type(None) in types else values


@pytest.mark.parametrize("name", codecs.names())
def test_any_settings_in_range_make_a_codec_that_keeps_its_word(name: str) -> None:
    """Ranks agree, the forecast is what is counted, and a plan's JSON gives the same codec."""
    layer = Layer("w", (12, 10), "linear")

    @law(drawn_settings(codecs.get(name)), examples=20)
    def holds(drawn: dict[str, Any]) -> None:
        values = {key: value for key, value in drawn.items() if value != "fitted"}  # that comes with an artifact
        try:
            codec = codecs.make(name, **values)
        except GradlabError as refused:  # what two settings have to do with each other
            assert str(refused).startswith(f"{name}: setting ")  # noqa: PT017
            return
        plan = Plan((layer,), (Group("w", ("w",), name, values),))
        assert innermost(Plan.from_json(plan.to_json()).build(plan.groups[0])) == codec
        grads = [gradients({"w": layer.shape}, rank, 0) for rank in range(2)]
        results = run_lockstep(
            [exchange_group(codec, Batch.of(grads[rank], [layer]), {}, Context(rank, 2, 0, "w")) for rank in range(2)]
        )
        assert torch.equal(results[0].value.mean["w"], results[1].value.mean["w"])
        counted = sum(result.payload_bytes for result in results) / 2
        assert codec.traits.varying or counted == pytest.approx(codec.forecast([layer], 2, {}).payload, rel=1e-12)

    holds()


def awkward(grad: torch.Tensor, kind: str, rank: int) -> torch.Tensor:
    if kind == "equal":
        return torch.where(grad < 0, -0.25, 0.25)
    if kind == "zero on a rank":
        return grad * (rank != 1)
    if kind == "one value":
        return grad * (torch.arange(grad.numel()).view(grad.shape) == 0)
    return grad * {"plain": 1.0, "tiny": 1e-37, "huge": 1e30}[kind]


def odd_gradients(codec: str, rank: int, step: int) -> Tensors:
    """Another kind for each layer, and in each step: all magnitudes equal, all but one element zero, all zero on a
    rank, near the ends of float32."""
    kinds = AWKWARD[:5] if codec_of(codec) == "cast" else AWKWARD  # float16 ends at 65504
    first = CODECS.index(codec) + step if codec in CODECS else step
    grads = gradients(SOME, rank, step)
    return {
        name: awkward(grad, kinds[(first + at) % len(kinds)], rank) for at, (name, grad) in enumerate(grads.items())
    }


@pytest.mark.parametrize("codec", CODECS)
def test_lockstep_laws(codec: str) -> None:
    """Ranks agree, all is finite, and what was sent and what is left are what there was, of gradients of all kinds."""
    plan = plan_for(codec, "layer", feedback=True, shapes=SOME)
    residual: dict[tuple[int, str], torch.Tensor] = {}
    history = lockstep(plan, 3, 4, functools.partial(odd_gradients, codec))
    assert codec_of(codec) in ("gradiveq", *STARTS_BARE) or keeps_what_was_counted(plan, history)
    for step, results in enumerate(history):
        for rank in range(3):
            grads = odd_gradients(codec, rank, step)
            for by_rank in results.values():
                result = by_rank[rank].value
                for name, mean in result.mean.items():
                    assert mean.shape == result.own[name].shape == grads[name].shape
                    assert bool(mean.isfinite().all())
                    assert torch.equal(mean, by_rank[0].value.mean[name])
                    asked, sent = grads[name] + residual.get((rank, name), 0.0), result.own[name]
                    residual[rank, name] = result.state[f"{name}/residual"]
                    scale = float(torch.maximum(asked.abs(), sent.abs()).max()) if asked.numel() else 0.0
                    atol = 1e-5 * scale + 1e-42
                    torch.testing.assert_close(sent + residual[rank, name], asked, rtol=1e-5, atol=atol)


# Codecs that draw numbers in every exchange, or whose leader changes with the iteration.
DRAWING = {"clt_k", "gradiveq", "lgc_ring", "natural", "qsgd", "random_k", "sampled_threshold", "terngrad"}


def _run(plan: Plan, steps: Sequence[tuple[int, int, bool]]) -> tuple[list[Tensors], list[Tensors]]:
    """Run a plan on 3 ranks: the last step's means by rank, and the states.

    steps: number of the iteration, number of the gradients, and whether rank 1 overflows.
    """
    run = LockstepPlan(plan, 3)
    for iteration, drawn, overflows in steps:
        grads = [gradients(FEW, rank, drawn) for rank in range(3)]
        if overflows:
            grads[1] = {name: torch.full_like(grad, torch.inf) for name, grad in grads[1].items()}
        result = run.step(iteration, grads)
        assert result.finite != overflows
    means = [{k: v for done in result.exchanged.values() for k, v in done[rank].mean.items()} for rank in range(3)]
    return means, [{f"{g} {k}": v for g, kept in rank.items() for k, v in kept.items()} for rank in run.states]


@pytest.mark.parametrize("codec", sorted({*KINDS, *DRAWING}))
def test_a_skipped_iteration_keeps_its_number_and_its_draws(codec: str) -> None:
    """What follows an overflow is as if the iteration had been left out, draws and leaders by its number included."""
    plan = plan_for(codec, "layer", feedback=True, shapes=FEW)
    skipped = _run(plan, [(0, 0, False), (1, 1, True), (2, 2, False)])
    left_out = _run(plan, [(0, 0, False), (2, 2, False)])
    for one, other in zip(itertools.chain(*skipped), itertools.chain(*left_out), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    renumbered = _run(plan, [(0, 0, False), (1, 2, False)])
    moved = any(
        not torch.equal(one[key], other[key])
        for one, other in zip(left_out[0], renumbered[0], strict=True)
        for key in one
    )
    assert moved or codec not in DRAWING


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_sent_are_those_forecast(codec: str) -> None:
    """At 2 or 5 ranks, of a steady exchange: within a thirtieth and what padding adds."""
    shapes = {"wide": (64, 96)}
    plan = plan_for(codec, "layer", feedback=False, shapes=shapes)
    (group,) = plan.groups
    built, members = plan.build(group), plan.members(group)
    ranks = 2 + 3 * (CODECS.index(codec) % 2)
    *_, results = history = lockstep(plan, ranks, 4, lambda rank, step: gradients(shapes, rank, step))
    assert codec_of(codec) == "gradiveq" or keeps_what_was_counted(plan, history)
    payload, sent = (
        sum(getattr(result, name) for result in results[group.name]) / ranks for name in ("payload_bytes", "wire_bytes")
    )
    within = 0.05 if sizes_vary(codec) else 1e-3
    forecast = built.forecast(members, ranks)
    steady = payload == pytest.approx(forecast.payload, rel=within)  # else a mean over a cycle
    assert not steady or sent == pytest.approx(forecast.sent, rel=1 / 30, abs=8 * ranks)


@pytest.mark.parametrize(
    "codec", [*(one for one in KINDS if one != "ecsq"), "block_scaled", "cast", "sign", "terngrad"]
)
def test_many_ranks(codec: str) -> None:
    """At 33 ranks ranks agree, nothing is beyond what they have, forecast == count."""
    shapes, ranks = {"wide": (6, 24)}, 33
    plan = plan_for(codec, "layer", feedback=False, shapes=shapes)
    (results,) = lockstep(plan, ranks, 1, lambda rank, step: gradients(shapes, rank, step))
    for group in plan.groups:
        by_rank = results[group.name]
        counted = sum(result.payload_bytes for result in by_rank) / ranks
        forecast = plan.build(group).forecast(plan.members(group), ranks, {}).payload
        assert sizes_vary(codec) or counted == pytest.approx(forecast, rel=1e-12)
        mean = by_rank[0].value.mean["wide"]
        assert bool(mean.isfinite().all())
        assert all(torch.equal(mean, by_rank[rank].value.mean["wide"]) for rank in range(ranks))
        largest = max(float(gradients(shapes, rank, 0)["wide"].abs().max()) for rank in range(ranks))
        assert float(mean.abs().max()) <= 20 * largest


@pytest.mark.parametrize(
    ("cases", "grouping", "ranks", "deterministic", "dtype"),
    [
        thorough([*METHODS, *RINGS], "model", 3, True, "float32"),
        thorough(METHODS, "model", 2, True, "bfloat16"),
        thorough(KINDS, "model", 1, True, "float32"),
        ([*KINDS, *RINGS], "layer", 3, True, "float32"),
        (["topk", "qsgd"], "model", 1, True, "float32"),
        (["cast", "identity", "clt_k", "lgc_ring, by value"], "model", 2, False, "float32"),
        (["identity", "topk", "ecsq", "intsgd"], "model", 2, True, "bfloat16"),
    ],
    ids=lambda value: str(len(value)) if isinstance(value, list) else str(value),
)
def test_the_engine_computes_what_lockstep_does(
    pool: ProcessPool, cases: list[str], grouping: str, ranks: int, deterministic: bool, dtype: str
) -> None:
    """Under real DDP on several buckets, codecs in one model: gradients and states bit for bit, bytes as forecast.

    With the backend's all-reduce, whose sums have one order at two ranks, codecs that ask for a Mean stay close.
    """
    for varying in sorted(set(map(sizes_vary, cases))):  # whose bytes are known beforehand, and the others
        some = [case for case in cases if sizes_vary(case) == varying]
        arguments = {"cases": some, "grouping": grouping, "deterministic": deterministic, "dtype": dtype}
        results = pool.run("support.contract:engine_against_lockstep", ranks, **arguments)
        for result in results:
            assert result["more_states"] == []
            for case, found in result["cases"].items():
                assert (found["ranks_agree"], found["finite"]) == (True, True), case
                if deterministic or ranks == 2 or not asks_for_means(case):
                    assert (found["bitwise"], found["state_bitwise"]) == (True, True), case
                assert found["largest"] < (5e-3 if case == "cast" else 1e-4), case  # it sums in 16 bits
        if not varying and dtype == "float32":  # which forecasts are of
            payload = [sum(step) / ranks for step in zip(*(result["payload"] for result in results), strict=True)]
            assert payload == pytest.approx(results[0]["forecast"], rel=1e-12)
        for result in results if "gradiveq, ring" not in some and dtype == "float32" else ():
            assert operator.eq(*result["kept"])


def test_nan_reaches_all_ranks_and_no_state(pool: ProcessPool) -> None:
    for outcomes in pool.run("support.contract:non_finite", 2, cases=KINDS, grouping="layer"):
        assert [outcome["finite"] for outcome in outcomes] == [True, True, False, False, True]
        assert outcomes[2]["changed"] == outcomes[3]["changed"] == []
        assert len(outcomes[4]["changed"]) > 0.7 * len(KINDS)
