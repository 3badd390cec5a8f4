"""The wrappers' laws, against the simulations in `wrapper_oracles` and against torch.optim."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import support.wrapper_oracles as oracles
from gradlab import codecs, wrappers
from gradlab.codec import (
    Codec,
    Compressor,
    Context,
    Exchanged,
    Table,
    Tensors,
    Training,
    check_codec,
    concatenate,
    exchange_group,
)
from gradlab.codec.kept import state_problem
from gradlab.codec.settings import build_settings
from gradlab.codec.wrapper import (
    POLICIES,
    acts_when_dense,
    in_own_memory,
    kept_buffer,
    load_buffer,
    load_buffers,
    resize,
    store_buffer,
    store_buffers,
    wrappers_of,
)
from gradlab.codecs.identity import Identity
from gradlab.codecs.powersgd import PowerSGD
from gradlab.codecs.qsgd import QSGD
from gradlab.codecs.topk import TopK
from gradlab.collectives import LockstepResult, run_lockstep
from gradlab.errors import GradlabError
from gradlab.executor import LockstepPlan
from gradlab.executor.lockstep_plan import LockstepWatch
from gradlab.layout import Layer
from gradlab.plan import Plan, Wrap
from gradlab.wrappers.error_feedback import ErrorFeedback
from gradlab.wrappers.local_momentum import LocalMomentum
from gradlab.wrappers.momentum import Momentum
from gradlab.wrappers.momentum_correction import MomentumCorrection
from gradlab.wrappers.sparsity_warmup import SparsityWarmup
from gradlab.wrappers.two_way import TwoWay
from support.laws import law, thorough
from support.stacks import WRAPPINGS, Stack, judged

SHAPES: dict[str, tuple[int, ...]] = {"matrix": (12, 9), "empty": (0, 3), "vector": (5,), "scalar": ()}
Results = list[LockstepResult[Exchanged]]
Shapes = Mapping[str, Sequence[int]]

SETTINGS: dict[str, dict[str, Any]] = {
    "topk": {"density": 0.1},
    "powersgd": {"rank": 2},
    "qsgd": {"bits": 3, "bucket_size": 20},
    "sign": {"block_size": 20},
}
# Outermost first; what the wrappers are around is put in last.
STACKS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "feedback": [("error_feedback", {})],
    "low-pass, int8": [("error_feedback", {"decay": 0.3, "buffer": "int8"})],
    "ratio": [("error_feedback", {"step_size_ratio": True})],
    "momentum": [("momentum", {"nesterov": True})],
    "momentum, feedback": [("momentum", {}), ("error_feedback", {})],
    "correction": [("momentum_correction", {})],
    "correction, all": [("momentum_correction", {"nesterov": True, "clip_norm": 0.5, "buffer": "int8"})],
    "local momentum, feedback": [("local_momentum", {}), ("error_feedback", {})],
    "local momentum": [("local_momentum", {"nesterov": False, "dampening": True, "buffer": "int8"})],
    "two-way": [("two_way", {})],
    "feedback, two-way": [("error_feedback", {}), ("two_way", {})],
    "feedback, server": [("error_feedback", {}), ("two_way", {"server": "rank", "buffer": "int8"})],
    "server, no feedback": [("two_way", {"server": "rank", "error_feedback": False})],
    "correction, two-way": [("momentum_correction", {}), ("two_way", {"step_size_ratio": True})],
    "warm-up, feedback": [("sparsity_warmup", {"steps": 4}), ("error_feedback", {})],
    "correction, warm-up, two-way": [("momentum_correction", {}), ("sparsity_warmup", {"steps": 4}), ("two_way", {})],
}


def build(stack: Sequence[tuple[str, dict[str, Any]]], codec: Codec) -> Codec:
    for name, settings in reversed(stack):
        method = wrappers.get(name)
        codec = method(codec, build_settings(method, settings))
    return codec


def valid_stacks() -> dict[str, Codec]:
    """Every stack around a selection, some around a quantizer and factors; tests/support/stacks.py has all."""
    some = {"qsgd": ("two-way", "server"), "powersgd": ("momentum", "correction"), "topk": ("",)}
    built: dict[str, Codec] = {}
    for codec in ("powersgd", "qsgd", "topk"):
        method = codecs.get(codec)
        for stack, around in STACKS.items():
            if not any(word in stack for word in some[codec]):
                continue
            settings = build_settings(method, SETTINGS.get(codec, {}))
            two_way, warm_up = (any(name == w for w, _ in around) for name in ("two_way", "sparsity_warmup"))
            one_server = any(wrap.get("server") == "rank" for _, wrap in around)
            built_alone = method(settings)
            alone = isinstance(built_alone, Compressor) and not (one_server and built_alone.traits.varying)
            if (two_way and not alone) or (warm_up and not hasattr(settings, "density")):
                with pytest.raises(GradlabError):
                    build(around, method(settings))
            else:
                built[f"{stack} | {codec}"] = build(around, method(settings))
    return built


VALID = valid_stacks()
every_stack = pytest.mark.parametrize("codec", list(VALID.values()), ids=list(VALID))


def topk(density: float) -> TopK:
    return TopK(TopK.Settings(density))


def feedback(codec: Codec, **settings: Any) -> ErrorFeedback:
    return ErrorFeedback(codec, ErrorFeedback.Settings(**settings))


def correction(codec: Codec, **settings: Any) -> MomentumCorrection:
    return MomentumCorrection(codec, MomentumCorrection.Settings(**settings))


def two_way(codec: Codec, **settings: Any) -> TwoWay:
    return TwoWay(codec, TwoWay.Settings(**settings))


def draw(rank: int, step: int, shapes: Shapes = SHAPES, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(1_000_000 * seed + 1000 * step + rank)
    return {name: torch.randn(tuple(shape), generator=generator, dtype=dtype) for name, shape in shapes.items()}


def drawn(ranks: int, step: int, *args: Any, **kwargs: Any) -> list[Tensors]:
    return [draw(rank, step, *args, **kwargs) for rank in range(ranks)]


def run(
    codec: Codec, grads: Sequence[Tensors], states: Sequence[Tensors], step: int = 0, dense: bool = False, **at: Any
) -> Results:
    """One iteration on all ranks."""
    context = Context(0, len(grads), step, "group", seed=5, training=Training(**at))
    return run_lockstep(
        [
            exchange_group(codec, grad, state, replace(context, rank=rank, dense=dense))
            for rank, (grad, state) in enumerate(zip(grads, states, strict=True))
        ]
    )


def states_of(results: Results) -> list[Tensors]:
    return [result.value.state for result in results]


def flat(tensors: Tensors) -> np.ndarray:
    """All layers as one vector, in the group's order (a codec's answer may have another)."""
    names = SHAPES if tensors.keys() == SHAPES.keys() else tensors
    return concatenate({name: tensors[name] for name in names}).numpy()


def mean_of(vectors: Sequence[np.ndarray]) -> np.ndarray:
    return np.mean(np.stack(vectors), axis=0)


def buffers(states: Sequence[Tensors], what: str, shapes: Shapes) -> list[np.ndarray]:
    """Per rank the group's buffers as one vector of the length of all layers; zeros for a layer that has none."""
    vectors = []
    for state in states:
        held = {name: load_buffer(state, name, what) for name in shapes}
        zeros = {name: torch.zeros(tuple(shape), dtype=torch.float64) for name, shape in shapes.items()}
        vectors.append(flat({name: zeros[name] if held[name] is None else held[name].double() for name in shapes}))
    return vectors


def server_residual(states: Sequence[Tensors], shapes: Shapes) -> np.ndarray:
    """The servers' residual, put together from the ranks' shards."""
    pieces = []
    for name, shape in shapes.items():
        held = [piece for s in states if (piece := load_buffer(s, name, "server_residual")) is not None]
        pieces.append(torch.cat(held).double() if held else torch.zeros(math.prod(shape), dtype=torch.float64))
        assert pieces[-1].numel() == math.prod(shape)
    return torch.cat(pieces).numpy()


def owed(states: Sequence[Tensors], shapes: Shapes) -> np.ndarray:
    """What has not reached the model yet: the mean of the ranks' residuals, and the servers' one."""
    return mean_of(buffers(states, "residual", shapes)) + server_residual(states, shapes)


sizes = st.lists(st.integers(0, 7), min_size=1, max_size=4).map(lambda ns: {f"l{i}": (n,) for i, n in enumerate(ns)})
worlds = st.integers(1, 5)
seeds = st.integers(0, 2**20)


# --- error feedback -------------------------------------------------------------------------------------------------


@law(sizes, worlds, st.floats(0.05, 1.0), seeds, examples=40)
def test_own_and_residual_are_gradient_and_old_residual_bit_for_bit(
    shapes: Shapes, ranks: int, density: float, seed: int
) -> None:
    codec, states = feedback(topk(density)), [{}] * ranks
    for step in range(3):
        grads = drawn(ranks, step, shapes, torch.float32, seed)
        results = run(codec, grads, states, step)
        for grad, state, result in zip(grads, states, results, strict=True):
            for name in grad:
                asked = grad[name] + state.get(f"{name}/residual", torch.zeros(()))
                left = result.value.state[f"{name}/residual"]
                assert torch.equal(result.value.own[name] + left, asked)
                assert torch.equal(result.value.compressor_input[name], asked)
                assert torch.equal(result.value.compression_error[name], left)
        states = states_of(results)


@pytest.mark.parametrize("inner", [PowerSGD(PowerSGD.Settings(2)), QSGD(), two_way(QSGD()), Identity()])
def test_own_and_residual_are_gradient_and_old_residual_to_rounding(inner: Codec) -> None:
    codec, states = feedback(inner), [{}] * 3
    for step in range(3):
        grads = drawn(3, step)
        results = run(codec, grads, states, step)
        before, after = (buffers(s, "residual", SHAPES) for s in (states, states_of(results)))
        for grad, old, new, result in zip(grads, before, after, results, strict=True):
            np.testing.assert_allclose(flat(result.value.own) + new, flat(grad) + old, rtol=0, atol=1e-13)
        states = states_of(results)


@law(st.integers(1, 30), worlds, st.floats(0.0, 0.99), st.floats(0.05, 1.0), seeds, examples=30)
def test_low_pass_feedback_is_scalecoms(numel: int, ranks: int, decay: float, density: float, seed: int) -> None:
    codec, states, residual = feedback(topk(density), decay=decay), [{}] * ranks, np.zeros((ranks, numel))
    for step in range(4):
        grads = drawn(ranks, step, {"w": (numel,)}, seed=seed)
        results = run(codec, grads, states, step)
        states, sent = states_of(results), np.zeros((ranks, numel))
        for rank, grad in enumerate(grads):
            sent[rank], residual[rank] = oracles.low_pass(residual[rank], flat(grad), density, decay)
            np.testing.assert_allclose(states[rank]["w/residual"].numpy(), residual[rank], rtol=0, atol=1e-12)
        np.testing.assert_allclose(flat(results[0].value.mean), sent.mean(0), rtol=0, atol=1e-12)


rates = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.sampled_from([0.0, 1e-3, 0.1, 0.5, 2.0]))


@pytest.mark.parametrize("mu", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("start", ["gradient", "zero"])
def test_dampened_momentum_is_an_average_of_gradients(mu: float, start: str) -> None:
    """At a constant gradient g it is g, or from zero (1 - mu^t) g, which tends to g."""
    codec = LocalMomentum(Identity(), LocalMomentum.Settings(mu, nesterov=False, dampening=True, start=start))
    states: list[Tensors] = [{}]
    for step in range(5):
        results = run(codec, drawn(1, 0), states, step)
        states = states_of(results)
        share = 1 if start == "gradient" else 1 - mu ** (step + 1)
        np.testing.assert_allclose(flat(results[0].value.mean), share * flat(drawn(1, 0)[0]))


@law(rates, rates, st.sampled_from([True, False, None]), st.booleans(), st.booleans(), examples=25)
def test_the_step_size_ratio_is_each_layers_own(
    before: dict[str, float], now: dict[str, float], setting: bool | None, plain: bool, corrected: bool
) -> None:
    """At the workers and at the server; 1 where a rate is not known. Where it is zero now, residuals are held."""
    shapes = {"a": (3,), "b": (2, 2), "c": ()}
    two_ways = two_way(topk(0.3), step_size_ratio=setting)
    codec = (
        correction(two_ways, momentum=0.0, masking=False, step_size_ratio=setting)
        if corrected
        else feedback(two_ways, step_size_ratio=setting)
    )
    states = states_of(run(codec, drawn(2, 0, shapes), [{}] * 2))
    results = run(
        codec, drawn(2, 1, shapes), states, 1, learning_rate=now, previous_learning_rate=before, plain_sgd=plain
    )
    wanted = plain if setting is None else setting
    sizes = {"a": 3, "b": 4, "c": 1}
    still = oracles.by_element({name: float(wanted and now.get(name) == 0) for name in shapes}, sizes) > 0
    factor = {name: oracles.rates_ratio(before.get(name), now.get(name)) if wanted else 1.0 for name in shapes}
    ratio = np.where(still, 0.0, oracles.by_element(factor, sizes))
    for rank, (result, old) in enumerate(zip(results, buffers(states, "residual", shapes), strict=True)):
        asked = flat(draw(rank, 1, shapes)) + ratio * old
        np.testing.assert_allclose(flat(result.value.compressor_input), asked, rtol=1e-13, atol=1e-13)
    merged = mean_of([flat(r.value.own) for r in results]) + ratio * server_residual(states, shapes)
    kept = states_of(results)
    after = flat(results[0].value.mean) + server_residual(kept, shapes)
    np.testing.assert_allclose(after[~still], merged[~still], rtol=1e-13, atol=1e-13)
    np.testing.assert_array_equal(server_residual(kept, shapes)[still], server_residual(states, shapes)[still])
    for new, old in zip(buffers(kept, "residual", shapes), buffers(states, "residual", shapes), strict=True):
        np.testing.assert_array_equal(new[still], old[still])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("server", [None, "sharded", "rank"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_under_changing_step_sizes_no_step_is_lost(ranks: int, server: str | None, momentum: float) -> None:
    """Lemmas 1 and 3 of dist-EF-blockSGDM: x_t - eta_(t-1) (server's + mean of workers' residuals) walks plainly."""
    inner = topk(0.1) if server is None else two_way(topk(0.1), server=server, step_size_ratio=True)
    codec: Codec = feedback(inner, step_size_ratio=True)
    if momentum:  # Algorithm 4
        codec = correction(inner, momentum=momentum, nesterov=True, masking=False, step_size_ratio=True)
    states, moved, path = [{}] * ranks, np.zeros(114), np.zeros(114)
    velocity, steps = np.zeros((ranks, 114)), [0.1, 0.3, 0.3, 0.01, 0.5, 0.2]
    for step, rate in enumerate(steps):
        before = steps[max(0, step - 1)]
        grads = drawn(ranks, step)
        results = run(
            codec,
            grads,
            states,
            step,
            learning_rate=dict.fromkeys(SHAPES, rate),
            previous_learning_rate=dict.fromkeys(SHAPES, before),
        )
        states = states_of(results)
        for rank, grad in enumerate(grads):
            velocity[rank] = momentum * velocity[rank] + flat(grad)
        path -= rate * mean_of([momentum * velocity[r] + flat(grad) for r, grad in enumerate(grads)])
        moved -= rate * flat(results[0].value.mean)
        np.testing.assert_allclose(moved - rate * owed(states, SHAPES), path, rtol=0, atol=1e-12)


# --- dense iterations ------------------------------------------------------------------------------------------------

CONSERVING: dict[str, Callable[[], Codec]] = {
    "feedback": lambda: feedback(topk(0.1)),
    "feedback, powersgd": lambda: feedback(PowerSGD(PowerSGD.Settings(1))),
    "feedback, two-way": lambda: feedback(two_way(topk(0.1))),
    "feedback, server": lambda: feedback(two_way(topk(0.1), server="rank")),
    "feedback, qsgd two-way": lambda: feedback(two_way(QSGD(QSGD.Settings(bits=3, bucket_size=20)))),
    "correction": lambda: correction(topk(0.1), masking=False),
    "correction, Nesterov": lambda: correction(topk(0.1), nesterov=True, masking=False),
    "correction, two-way": lambda: correction(two_way(topk(0.1)), masking=False),
    "warm-up": lambda: SparsityWarmup(feedback(two_way(topk(0.1))), SparsityWarmup.Settings(steps=4)),
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", CONSERVING)
def test_a_dense_iteration_sends_all_that_is_owed(name: str, ranks: int) -> None:
    """Compressed and dense iterations in turns: what was applied and what is owed are what there was to apply."""
    codec = CONSERVING[name]()
    m = codec.settings.momentum if isinstance(codec, MomentumCorrection) else 0.0
    ahead = m if isinstance(codec, MomentumCorrection) and codec.settings.nesterov else 0.0
    states, applied, due, velocity = [{}] * ranks, np.zeros(114), np.zeros(114), np.zeros((ranks, 114))
    for step, dense in enumerate([True, False, False, True, True, False, False, False, True]):
        grads = drawn(ranks, step)
        results = run(codec, grads, states, step, dense)
        for rank, grad in enumerate(grads):
            velocity[rank] = m * velocity[rank] + flat(grad)
            due += ((ahead * velocity[rank] + flat(grad)) if ahead else velocity[rank]) / ranks
        states, applied = states_of(results), applied + flat(results[0].value.mean)
        np.testing.assert_allclose(applied + owed(states, SHAPES), due, rtol=0, atol=1e-12)
        left = [key for state in states for key in state if key.rpartition("/")[2].removesuffix("_scale") in RESIDUALS]
        assert not (dense and left)
        assert dense or float(np.abs(owed(states, SHAPES)).max()) > 0.01  # there is something to lose
        assert all(acts_when_dense(codec, state) for state in states) or dense


RESIDUALS = ("residual", "server_residual", "server_whole")


@pytest.mark.parametrize(
    "codec",
    [
        feedback(topk(0.1), step_size_ratio=True),
        feedback(two_way(topk(0.1), step_size_ratio=True), step_size_ratio=True),
        correction(topk(0.1), step_size_ratio=True),
    ],
    ids=["feedback", "feedback, two-way", "correction"],
)
def test_a_dense_iteration_that_is_not_applied_leaves_what_is_owed(codec: Codec) -> None:
    """At a learning rate of zero what it sends moves nothing, so that no residual may be sent along with it."""
    rate, zero = (dict.fromkeys(SHAPES, value) for value in (0.1, 0.0))
    before = states_of(run(codec, drawn(2, 0), [{}] * 2, 0, learning_rate=rate))
    results = run(codec, drawn(2, 1), before, 1, True, learning_rate=zero, previous_learning_rate=rate)
    for old, new in zip(before, states_of(results), strict=True):
        residuals = [key for key in old if key.rpartition("/")[2] in RESIDUALS]
        assert residuals
        assert all(torch.equal(old[key], new[key]) for key in residuals)


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_the_warm_up_runs_what_does_more_than_average(wrapping: str) -> None:
    """A group takes part in dense steps wherever a dense exchange changes the mean or the state."""
    stacks = [stack for codec in ("topk", "sign", "identity") if not (stack := judged(Stack(codec, wrapping))).refusal]
    for stack in stacks[:1]:
        plan = stack.plan([Layer("w", (16, 20), "linear")], warmup_steps=3)
        lockstep, codec, states = LockstepPlan(plan, 2), plan.build(plan.groups[0]), [dict[str, torch.Tensor]()] * 2
        for step in range(3):
            grads = drawn(2, step, {"w": (16, 20)})
            asked, parameters = lockstep.runs[0].active, {"w": grads[0]["w"]}
            context = Context(0, 2, step, "w", plan.seed, training=Training(start=3, parameters=parameters), dense=True)
            of_ranks = zip(grads, states, (context, replace(context, rank=1)), strict=True)
            results = run_lockstep([exchange_group(codec, *one) for one in of_ranks])
            states, mean = states_of(results), (grads[0]["w"] + grads[1]["w"]) / 2
            assert asked or (not states[0] and torch.allclose(results[0].value.mean["w"], mean))
            lockstep.step(step, grads, parameters=parameters)
            for state, own in zip(states, lockstep.states, strict=True):
                assert state.keys() == own.get("w", {}).keys()
                assert all(torch.equal(value, own["w"][key]) for key, value in state.items())


@pytest.mark.parametrize("wrapper", ["momentum_correction", "error_feedback"])
def test_a_state_that_huge_steps_have_spoiled_is_named(wrapper: str) -> None:
    """Finite gradients that overflow name it; gradients that are not finite themselves name no state."""
    plan = Plan.uniform([Layer("w", (16, 16))], "topk", density=0.01, minimum_numel=1, wrappers=[Wrap(wrapper)])
    seen = {}
    for value in (1e38, math.nan):
        lockstep = LockstepPlan(plan, 2)
        watch = LockstepWatch(lockstep)
        for step in range(12):
            grads = {"w": torch.full((16, 16), value if step < 3 or math.isnan(value) else 0.1 * value)}
            watch.see(lockstep.step(step, [grads] * 2), [grads] * 2)
        seen[value] = {one.rule: one.seen for one in watch.findings}
        assert list(seen[value]) == ["non_finite"]
        named = f"the residual of {wrapper} holds values of up to" in seen[value]["non_finite"]
        assert named == ("e+38 in w, with which" in seen[value]["non_finite"]) == (value == 1e38)


# --- 8-bit buffers --------------------------------------------------------------------------------------------------

magnitudes = st.one_of(st.floats(-(2.0**100), 2.0**100, width=32), st.floats(-(2.0**-120), 2.0**-120, width=32))


@law(st.lists(magnitudes, max_size=8), st.integers(0, 600), st.sampled_from([torch.float32, torch.float64]), seeds)
def test_an_8_bit_buffer_errs_by_half_a_step_of_its_block(
    values: list[float], numel: int, dtype: torch.dtype, seed: int
) -> None:
    """Half of 1/127 of the largest of 256 neighbours; and of the smallest normal number for blocks below that."""
    vector = draw(0, 0, {"w": (numel,)}, dtype, seed)["w"]
    scattered = torch.randint(max(1, numel), (len(values),), generator=torch.Generator().manual_seed(seed))
    if numel:
        vector[scattered] = torch.tensor(values, dtype=dtype)
    state = store_buffer("w", "residual", vector, "int8")
    loaded = load_buffer(state, "w", "residual")
    assert loaded is not None
    assert (loaded.dtype, loaded.shape) == (dtype, vector.shape)
    for first in range(0, numel, 256):
        block = vector[first : first + 256].double()
        bound = max(float(block.abs().max()) / 254 * (1 + 1e-5), torch.finfo(dtype).tiny)
        assert float((loaded[first : first + 256].double() - block).abs().max()) <= bound
    assert {key: tensor.dtype for key, tensor in state.items()} == {"w/residual": torch.int8, "w/residual_scale": dtype}
    assert sum(t.nbytes for t in state.values()) == numel + -(-numel // 256) * vector.element_size()


@law(st.lists(magnitudes, max_size=8), st.integers(1, 60), seeds, examples=25)
def test_a_16_bit_buffer_is_rounded_at_random_without_bias(values: list[float], numel: int, seed: int) -> None:
    """To a neighbour in bfloat16, by draws of this rank and iteration; what it has stays.
    The mean of 100 draws is within 6 standard errors."""
    tensors = {"a": torch.tensor(values), "b": draw(0, 0, {"b": (numel, 2)}, torch.float32, seed)["b"]}

    def loaded(iteration: int, rank: int = 0) -> Tensors:
        context = Context(rank, 2, iteration, seed=seed)
        return load_buffers(
            store_buffers(tensors, "residual", "bfloat16", context), tensors, "residual", "bfloat16", context
        )

    draws = [torch.cat([one.reshape(-1) for one in loaded(step).values()]) for step in range(100)]
    exact = torch.cat([one.reshape(-1) for one in tensors.values()]).double()
    ulp = torch.maximum(exact.abs(), torch.tensor(2.0**-126)).log2().floor().exp2() * 2**-7
    assert bool(((torch.stack(draws) - exact).abs() < ulp).all())
    assert bool(((torch.stack(draws).double().mean(0) - exact).abs() <= 6 * ulp / 2 / 10).all())
    assert all(torch.equal(one, two) for one, two in zip(loaded(7).values(), loaded(7).values(), strict=True))
    differ = draws[0] != torch.cat([one.reshape(-1) for one in loaded(0, rank=1).values()])
    assert numel < 30 or bool(differ.any())
    before, tensors = tensors, loaded(3)
    assert all(torch.equal(one, tensors[name]) for name, one in loaded(4).items())
    assert {name: one.shape for name, one in tensors.items()} == {name: one.shape for name, one in before.items()}


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_buffers_of_all_layers_are_those_of_each(kind: str) -> None:
    tensors = {name: torch.randn(shape) for name, shape in {"a": (300,), "b": (7, 9), "c/d": ()}.items()}
    one_by_one: Tensors = {}
    for name, tensor in tensors.items():
        one_by_one |= store_buffer(name, "residual", tensor, kind)
    context = Context(0, 1, 0)
    state = store_buffers(tensors, "residual", kind, context)
    problem = state_problem(kept_buffer("a", "residual", (300,), kind), {"a/residual": state["a/residual"]})
    assert problem == (None if kind == "float32" else "'a/residual_scale' is missing")
    assert list(state) == list(one_by_one)
    assert all(torch.equal(value, one_by_one[key]) for key, value in state.items())
    loaded = load_buffers(state, [*tensors, "of no layer"], "residual", kind, context)
    assert list(loaded) == list(tensors)
    for name, value in loaded.items():
        same = load_buffer(one_by_one, name, "residual")
        assert same is not None
        assert torch.equal(value, same)


def test_a_part_of_a_vector_that_is_kept_alone_does_not_keep_the_vector() -> None:
    vector = torch.arange(10.0)
    part = in_own_memory(vector[2:5])
    assert part.tolist() == [2, 3, 4]
    assert part.untyped_storage().nbytes() == part.nbytes
    assert in_own_memory(vector) is vector
    assert in_own_memory(part) is part


@pytest.mark.parametrize(("kind", "steps"), [("int8", 253), ("bfloat16", 2**7)])
def test_feedback_with_a_small_buffer_is_feedback_on_what_the_buffer_holds(kind: str, steps: int) -> None:
    eight, plain, state, width = feedback(topk(0.05), buffer=kind), feedback(topk(0.05)), {}, {"w": (20, 30)}
    for step in range(5):
        held = load_buffer(state, "w", "residual")
        (exact,) = run(plain, drawn(1, step, width), [{} if held is None else {"w/residual": held}], step)
        (result,) = run(eight, drawn(1, step, width), [state], step)
        state, unsent = result.value.state, exact.value.state["w/residual"]
        assert torch.equal(result.value.mean["w"], exact.value.mean["w"])
        kept = load_buffer(state, "w", "residual")
        assert kept is not None
        assert 0 < float((kept - unsent).abs().max()) <= float(unsent.abs().max()) / steps


# --- momentum -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nesterov", "dampening"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("ranks", [1, 3])
def test_momentum_after_the_average_is_torchs_bit_for_bit(ranks: int, nesterov: bool, dampening: bool) -> None:
    codec = Momentum(Identity(), Momentum.Settings(0.9, nesterov, dampening))
    shapes, states, rate = {"w": (40, 7)}, [{}] * ranks, 0.05
    ours, theirs = (torch.nn.Parameter(draw(9, 9, shapes, torch.float32)["w"]) for _ in range(2))
    plain = torch.optim.SGD([ours], lr=rate)
    reference = torch.optim.SGD([theirs], rate, 0.9, dampening=0.9 * dampening, nesterov=nesterov)
    for step in range(20):
        for group in (*plain.param_groups, *reference.param_groups):
            group["lr"] = rate / (1 + step % 5)
        grads = [{"w": draw(rank, step, shapes, torch.float32)["w"] + ours.detach()} for rank in range(ranks)]
        results = run(codec, grads, states, step, dense=step % 3 == 0)
        states = states_of(results)
        ours.grad = results[0].value.mean["w"]
        theirs.grad = run(Identity(), grads, [{}] * ranks, step)[0].value.mean["w"]
        plain.step()
        reference.step()
        assert torch.equal(ours, theirs)
        ours.grad.zero_()  # what the loop does to its gradient afterwards must not reach the momentum
        assert all(torch.equal(state["w/momentum"], states[0]["w/momentum"]) for state in states)


BEFORE_COMPRESSION: dict[str, tuple[Codec, dict[str, Any]]] = {
    "correction": (correction(Identity()), {}),
    "correction, Nesterov": (correction(Identity(), nesterov=True), {"nesterov": True}),
    "local": (LocalMomentum(Identity(), LocalMomentum.Settings(nesterov=False)), {}),
    "local, Nesterov": (LocalMomentum(Identity()), {"nesterov": True}),
    "local, dampened": (LocalMomentum(Identity(), LocalMomentum.Settings(0.9, False, True)), {"dampening": 0.9}),
}


@pytest.mark.parametrize("form", BEFORE_COMPRESSION)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_momentum_before_compression_is_torchs_without_compression(ranks: int, form: str) -> None:
    codec, theirs = BEFORE_COMPRESSION[form]
    states, parameter = [{}] * ranks, torch.nn.Parameter(torch.zeros(114, dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.9, **theirs)
    moved = np.zeros(114)
    for step in range(12):
        grads = drawn(ranks, step)
        results = run(codec, grads, states, step, dense=step % 4 == 1)
        states, moved = states_of(results), moved - flat(results[0].value.mean)
        parameter.grad = torch.from_numpy(mean_of([flat(grad) for grad in grads]))
        optimizer.step()
        np.testing.assert_allclose(moved, parameter.detach().numpy(), rtol=0, atol=1e-11)


@law(sizes, worlds, st.floats(0.05, 1.0), st.booleans(), st.booleans(), seeds, examples=30)
def test_correction_without_momentum_is_feedback_bit_for_bit(
    shapes: Shapes, ranks: int, density: float, nesterov: bool, masking: bool, seed: int
) -> None:
    ours = correction(topk(density), momentum=0.0, nesterov=nesterov, masking=masking)
    plain, states, expected = feedback(topk(density)), [{}] * ranks, [{}] * ranks
    for step in range(4):
        grads, dense = drawn(ranks, step, shapes, torch.float32, seed), step == 2
        results, reference = run(ours, grads, states, step, dense), run(plain, grads, expected, step, dense)
        states, expected = states_of(results), states_of(reference)
        for result, other in zip(results, reference, strict=True):
            for name in shapes:
                for what in ("mean", "own", "compressor_input"):
                    assert torch.equal(getattr(result.value, what)[name], getattr(other.value, what)[name])
        for state, other in zip(states, expected, strict=True):
            assert all(torch.equal(state[key], value) for key, value in other.items())


@law(
    sizes,
    worlds,
    st.floats(0.05, 1.0),
    st.sampled_from([0.0, 0.5, 0.9]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.0, 0.3, 1.0, 100.0]),
    seeds,
    examples=40,
)
def test_momentum_correction_is_deep_gradient_compression(
    shapes: Shapes, ranks: int, density: float, m: float, nesterov: bool, masking: bool, clip: float, seed: int
) -> None:
    codec = correction(topk(density), momentum=m, nesterov=nesterov, masking=masking, clip_norm=clip)
    numel = sum(math.prod(shape) for shape in shapes.values())
    settings = {"density": density, "m": m, "nesterov": nesterov, "masking": masking, "clip_norm": clip}
    oracle, states = oracles.DGC.start(ranks, numel, **settings), [{}] * ranks
    for step in range(5):
        grads = drawn(ranks, step, shapes, seed=seed)
        results = run(codec, grads, states, step)
        states = states_of(results)
        mean = oracle.step([flat(grad) for grad in grads])
        np.testing.assert_allclose(flat(results[0].value.mean), mean, rtol=0, atol=1e-12)
        np.testing.assert_allclose(np.stack(buffers(states, "velocity", shapes)), oracle.momentum, rtol=0, atol=1e-12)
        np.testing.assert_allclose(np.stack(buffers(states, "residual", shapes)), oracle.velocity, rtol=0, atol=1e-12)


def test_masking_is_for_sparsifications_unless_it_is_set() -> None:
    """Around a codec that sends every element a little, masking would erase all momentum."""
    for inner, kept in ((topk(0.1), False), (two_way(topk(0.1)), False), (QSGD(), True), (PowerSGD(), True)):
        (result,) = run(correction(inner), drawn(1, 0, {"w": (9, 9)}), [{}])
        velocity, own = result.value.state["w/velocity"], result.value.own["w"]
        assert bool(own.any())
        assert bool(velocity[own != 0].any()) == kept
    (result,) = run(correction(topk(0.1), masking=False), drawn(1, 0), [{}])
    assert bool(result.value.state["matrix/velocity"].all())


# --- two-way --------------------------------------------------------------------------------------------------------

servers = st.sampled_from(["sharded", "rank"])


def shards_of(server: str, numel: int, ranks: int) -> oracles.Shards:
    return oracles.equal_shards(numel, ranks) if server == "sharded" else oracles.one_server(numel, ranks, 0)


def served(density: float, server: str, ranks: int, **settings: Any) -> TwoWay:
    return two_way(topk(density), server=server, **settings)


@law(sizes, worlds, st.floats(0.05, 1.0), servers, st.booleans(), seeds, examples=40)
def test_two_way_is_the_server_simulation(
    shapes: Shapes, ranks: int, density: float, server: str, worker_feedback: bool, seed: int
) -> None:
    numel = sum(math.prod(shape) for shape in shapes.values())
    oracle = oracles.ServerSimulation.start(ranks, numel, density, shards_of(server, numel, ranks))
    inner = served(density, server, ranks, step_size_ratio=True)
    codec = feedback(inner, step_size_ratio=True) if worker_feedback else inner
    states, before = [{}] * ranks, dict.fromkeys(shapes, 0.1)
    for step in range(4):
        now = {name: 0.1 * 2.0 ** ((step * i) % 3) for i, name in enumerate(shapes)}
        grads = drawn(ranks, step, shapes, seed=seed)
        results = run(codec, grads, states, step, learning_rate=now, previous_learning_rate=before)
        states = states_of(results)
        factor = {name: oracles.rates_ratio(before[name], now[name]) for name in shapes}
        ratio = oracles.by_element(factor, {name: math.prod(shape) for name, shape in shapes.items()})
        answer = oracle.step([flat(grad) for grad in grads], ratio, worker_feedback)
        np.testing.assert_allclose(flat(results[0].value.mean), answer, rtol=0, atol=1e-12)
        np.testing.assert_allclose(server_residual(states, shapes), oracle.server, rtol=0, atol=1e-12)
        np.testing.assert_allclose(np.stack(buffers(states, "residual", shapes)), oracle.worker, rtol=0, atol=1e-12)
        before = now


compressors = st.one_of(
    st.floats(0.05, 1.0).map(topk),
    st.builds(QSGD.Settings, bits=st.integers(1, 8), bucket_size=st.integers(1, 9)).map(QSGD),
)


@law(sizes, worlds, compressors, servers, seeds, examples=35)
def test_what_servers_answer_and_keep_is_what_they_got_and_kept(
    shapes: Shapes, ranks: int, inner: Codec, server: str, seed: int
) -> None:
    codec, states = two_way(inner, server=server), [{}] * ranks
    for step in range(3):
        results = run(codec, drawn(ranks, step, shapes, seed=seed), states, step)
        got = mean_of([flat(result.value.own) for result in results]) + server_residual(states, shapes)
        states = states_of(results)
        kept = server_residual(states, shapes)
        np.testing.assert_allclose(
            flat(results[0].value.mean) + kept, got, rtol=0, atol=1e-9 * (1 + np.abs(got).max(initial=0))
        )
        for result in results[1:]:
            assert all(torch.equal(result.value.mean[name], results[0].value.mean[name]) for name in shapes)


@law(st.integers(0, 100), worlds, st.integers(1, 9))
def test_shards_cover_a_vector_in_whole_blocks_of_equal_number(numel: int, ranks: int, block: int) -> None:
    shards = two_way(QSGD(QSGD.Settings(bucket_size=block))).shards(Table.of_shapes([(numel,)]), ranks)
    assert [shards[0][0], *(stop for _, stop in shards)] == [*(start for start, _ in shards), numel]
    assert all(start % block == 0 or start == numel for start, _ in shards)
    blocks = [-(-(stop - start) // block) for start, stop in shards]
    assert max(blocks) - min(blocks) <= 1


def test_a_server_without_feedback_keeps_nothing() -> None:
    codec = feedback(two_way(topk(0.1), error_feedback=False))
    results = run(codec, drawn(3, 0), [{}] * 3)
    oracle = oracles.ServerSimulation.start(3, 114, 0.1, oracles.equal_shards(114, 3))
    np.testing.assert_allclose(flat(results[0].value.mean), oracle.step([flat(g) for g in drawn(3, 0)]), atol=1e-12)
    assert not any("server" in key for state in states_of(results) for key in state)


@pytest.mark.parametrize("server", ["sharded", "rank"])
def test_a_layer_without_a_server_residual_does_not_cost_the_others_theirs(server: str) -> None:
    """The engine keeps no state for a layer that has had no gradient on any rank yet."""
    codec, ranks = served(0.1, server, 3), 3
    states = states_of(run(codec, drawn(ranks, 0), [{}] * ranks))
    without = [{key: value for key, value in state.items() if not key.startswith("vector/")} for state in states]
    results = run(codec, drawn(ranks, 1), without, 1)
    got = mean_of([flat(result.value.own) for result in results]) + server_residual(without, SHAPES)
    assert np.abs(server_residual(without, SHAPES)).max() > 0.1
    after = flat(results[0].value.mean) + server_residual(states_of(results), SHAPES)
    np.testing.assert_allclose(after, got, rtol=0, atol=1e-12)


# --- every stack ----------------------------------------------------------------------------------------------------


# A warm-up's forecast is of the time after it, and a clipped gradient spreads what is not finite over all layers.
@pytest.mark.parametrize(
    "name",
    [
        name if name.endswith("topk") else thorough(name)
        for name in VALID
        if "warm-up" not in name and "all" not in name
    ],
)
def test_a_stack_keeps_the_contract(name: str) -> None:
    check_codec(VALID[name], [Layer(layer, tuple(shape)) for layer, shape in SHAPES.items()], world_sizes=[2])


# --- sparsity warm-up -------------------------------------------------------------------------------------------------


def test_the_warm_ups_densities_are_the_papers() -> None:
    codec = SparsityWarmup(topk(0.001), SparsityWarmup.Settings(steps=400))
    densities = [codec.at(step).settings.density for step in (0, 99, 100, 200, 300, 399, 400, 10**6)]
    assert densities == pytest.approx([0.25, 0.25, 0.0625, 0.015625, 0.004, 0.004, 0.001, 0.001], rel=0.02)
    assert (densities[0], densities[-1]) == (0.25, 0.001)


@law(st.integers(1, 6), st.integers(0, 30), st.floats(0.001, 0.2), st.floats(0.2, 1.0), st.integers(0, 50), examples=40)
def test_the_warm_up_counts_from_where_compression_starts(
    stages: int, more: int, final: float, initial: float, start: int
) -> None:
    """What travels in iteration t is the paper's geometric progression in the stage floor((t - start) S / steps)."""
    steps, numel = stages + more, 500
    settings = SparsityWarmup.Settings(steps, stages, initial)
    codec = feedback(SparsityWarmup(topk(final), settings))
    grad = draw(0, 0, {"w": (numel,)})
    for step in range(0, steps + 3, 1 + steps // 8):
        (result,) = run(codec, [grad], [{}], start + step, start=start)
        stage = min(stages, math.floor(step * stages / steps))
        density = initial * (final / initial) ** (stage / stages)
        assert int((result.value.own["w"] != 0).sum()) in {
            math.ceil(density * numel - 1e-6),
            math.ceil(density * numel),
        }


def test_a_stack_hands_on_what_concerns_the_codec() -> None:
    """Fitting and changed settings reach the codec at the heart; the wrappers stay."""
    method = codecs.get("gradiveq")
    layers, samples = [Layer("w", (6, 9))], {"w": torch.stack([draw(0, t, {"w": (6, 9)})["w"] for t in range(6)])}
    plain = method(build_settings(method, {"loss_threshold": 0.3, "slice_size": 9}))
    stack = Momentum(feedback(plain, decay=0.25), Momentum.Settings(0.5))
    fitted, alone = stack.fit(layers, samples), plain.fit(layers, samples)
    fitted.check(layers)
    results, inner = run(fitted, drawn(2, 0, {"w": (6, 9)}), [{}] * 2), run(alone, drawn(2, 0, {"w": (6, 9)}), [{}] * 2)
    assert torch.equal(results[0].value.own["w"], inner[0].value.own["w"])
    assert [type(wrapper) for wrapper in wrappers_of(fitted)] == [Momentum, ErrorFeedback]


def test_the_warm_up_hands_states_through() -> None:
    plain, states, expected = feedback(topk(0.1)), [{}] * 2, [{}] * 2
    codec = SparsityWarmup(plain, SparsityWarmup.Settings(steps=1, stages=1, initial_density=0.1))
    for step, dense in enumerate([False, True, False]):
        results, reference = (run(c, drawn(2, step), s, step, dense) for c, s in ((codec, states), (plain, expected)))
        states, expected = states_of(results), states_of(reference)
        assert all(torch.equal(states[1][key], value) for key, value in expected[1].items())
        assert states[1].keys() == expected[1].keys()
        assert acts_when_dense(codec, states[0]) == acts_when_dense(plain, expected[0]) == (not dense)


# --- another number of ranks ------------------------------------------------------------------------------------------


def redistributed(codec: Codec, states: Sequence[Tensors], ranks: int, policy: str) -> list[Tensors]:
    return [resize(codec, states, rank, ranks, policy) for rank in range(ranks)]


@law(worlds, worlds, st.sampled_from(["sum", "split"]), st.booleans(), examples=25)
def test_what_is_owed_survives_another_number_of_ranks(old: int, new: int, policy: str, eight: bool) -> None:
    """(1/M) sum e' == (1/N) sum e, for residuals and velocities; to the buffer's precision."""
    codec = correction(topk(0.1), buffer="int8" if eight else "float32")
    states: list[Tensors] = [{}] * old
    for step in range(2):
        states = states_of(run(codec, drawn(old, step), states, step))
    again = redistributed(codec, states, new, policy)
    for what in ("residual", "velocity"):
        before, after = (mean_of(buffers(s, what, SHAPES)) for s in (states, again))
        atol = new * 4 * float(np.abs(before).max()) / 127 if eight else 1e-13
        np.testing.assert_allclose(after, before, rtol=0, atol=atol)
    if policy == "split" or old == new:
        other = again[0] if policy == "split" else states[new - 1]
        for key, value in other.items():
            assert torch.equal(again[new - 1][key], value) or eight


@law(worlds, worlds, servers, st.sampled_from(["sum", "split"]), st.booleans(), st.booleans(), seeds, examples=40)
def test_servers_at_another_number_of_ranks_continue_with_the_whole_residual(
    old: int, new: int, server: str, policy: str, eight: bool, twice: bool, seed: int
) -> None:
    """The next answer is that of a simulation given the whole; also from a checkpoint in between, or layers missing."""
    shapes = {"a": (4,), "b": (3, 3), "c": (0,), "d": (7,)}
    buffer = "int8" if eight else "float32"
    codec = two_way(topk(0.2), server=server, buffer=buffer)
    states = states_of(run(codec, drawn(old, 0, shapes, seed=seed), [{}] * old))
    if seed % 2:
        states = [{key: value for key, value in state.items() if not key.startswith("b/")} for state in states]
    whole = server_residual(states, shapes)
    states = redistributed(codec, states, 3, policy) if twice else states
    states = redistributed(codec, states, new, policy)
    shards = oracles.equal_shards(20, new) if server == "sharded" else oracles.one_server(20, new, 0)
    oracle = oracles.ServerSimulation(np.zeros((new, 20)), whole.copy(), 0.2, shards)
    for step in range(1, 2 if eight else 4):
        results = run(codec, drawn(new, step, shapes, seed=seed), states, step)
        states = states_of(results)
        answer = oracle.step([flat(grad) for grad in drawn(new, step, shapes, seed=seed)], feedback=False)
        np.testing.assert_allclose(flat(results[0].value.mean), answer, rtol=0, atol=1e-12)
        assert {key.rpartition("/")[2].removesuffix("_scale") for key in states[0]} == {"server_residual"}


@pytest.mark.parametrize(("ranks", "server"), [(1, "sharded"), (1, "rank"), (3, "rank"), (3, "sharded")])
def test_a_shard_that_is_the_group_sends_a_share_of_each_layer(ranks: int, server: str) -> None:
    """The mean and what is owed are what was given, if each layer has a selection of its own."""
    codec = feedback(two_way(TopK(TopK.Settings(0.1, across_layers=False)), server=server))
    results = run(codec, drawn(ranks, 0), [{}] * ranks)
    arrived = flat(results[0].value.mean) + owed(states_of(results), SHAPES)
    np.testing.assert_allclose(arrived, mean_of([flat(grad) for grad in drawn(ranks, 0)]), rtol=0, atol=1e-12)
    sent = {name: int(value.count_nonzero()) for name, value in results[0].value.own.items()}
    assert ranks == 3 or all(sent[name] == math.ceil(0.1 * math.prod(shape)) for name, shape in SHAPES.items())


FEW_RANKS: dict[str, Callable[[], Codec]] = {
    "topk": lambda: topk(0.1),
    "qsgd": lambda: QSGD(QSGD.Settings(bits=3, bucket_size=20)),
    "sign": lambda: codecs.make("sign", block_size=20),
    "ecsq": lambda: codecs.make("ecsq", bits=1.0),
    "threshold": lambda: codecs.make("threshold", density=0.1),
}


@law(st.sampled_from(list(FEW_RANKS)), worlds, worlds, worlds, seeds, examples=30)
def test_between_fewer_ranks_two_way_is_its_codec_and_nothing_is_lost(
    inner: str, first: int, then: int, last: int, seed: int
) -> None:
    """`from_ranks` ranks have servers. A run that goes on with fewer or more applies and owes what it was given."""
    codec, alone = feedback(two_way(FEW_RANKS[inner](), from_ranks=3)), feedback(FEW_RANKS[inner]())
    given, applied = np.zeros(flat(draw(0, 0)).size), np.zeros(flat(draw(0, 0)).size)
    states: list[Tensors] = [{}] * first
    for step, ranks in enumerate((first, first, then, then, last)):
        states = states if ranks == len(states) else redistributed(codec, states, ranks, "split")
        grads = drawn(ranks, step, seed=seed)
        if ranks < 3 and step == 0:
            plain = run(alone, grads, states)
            for result, other in zip(run(codec, grads, states), plain, strict=True):
                assert all(torch.equal(result.value.mean[name], other.value.mean[name]) for name in SHAPES)
                assert result.value.state.keys() == other.value.state.keys()
                assert result.wire_bytes == other.wire_bytes
        results = run(codec, grads, states, step)
        states = states_of(results)
        given += mean_of([flat(grad) for grad in grads])
        applied += flat(results[0].value.mean)
        what = {key.rpartition("/")[2] for state in states for key in state}
        assert ("server_residual" in what) == (ranks >= 3)
        np.testing.assert_allclose(applied + owed(states, SHAPES), given, rtol=0, atol=1e-5)


@every_stack
def test_any_stack_goes_on_at_another_number_of_ranks(codec: Codec) -> None:
    """Ranks agree, on what a dense iteration needs too; "drop" leaves what all of them shared."""
    before: list[Tensors] = [{}] * 2
    states = states_of(run(codec, drawn(2, 0), before))
    own = ("residual", "velocity", "server_residual")
    shared = {k: v for k, v in states[0].items() if k.rpartition("/")[2].removesuffix("_scale") not in own}
    for policy in POLICIES:
        assert redistributed(codec, before, 3, policy) == [{}] * 3
        moved = redistributed(codec, states, 3, policy)
        for kept in moved if policy == "drop" else ():
            assert kept.keys() == shared.keys()
            assert all(torch.equal(kept[key], value) for key, value in shared.items())
        assert len({acts_when_dense(codec, state) for state in moved}) == 1
        for dense in (False, True):
            results = run(codec, drawn(3, 1), moved, 1, dense)
            assert len({tuple(state) for state in states_of(results)}) == 1
            for result in results:
                assert all(torch.equal(result.value.mean[name], results[0].value.mean[name]) for name in SHAPES)
                assert all(bool(value.isfinite().all()) for value in result.value.mean.values())


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stack", "codec", "message"),
    [
        (["error_feedback", "error_feedback"], "topk", "error_feedback stacked on itself"),
        (["error_feedback", "momentum", "error_feedback"], "topk", "error_feedback stacked on itself"),
        (["error_feedback", "momentum_correction"], "topk", "both add the residual"),
        (["momentum_correction", "momentum", "error_feedback"], "topk", "both"),
        (["momentum", "momentum_correction"], "topk", "both apply momentum"),
        (["two_way", "error_feedback"], "topk", "two_way around error_feedback: it needs a codec that a rank computes"),
        (["two_way"], "powersgd", "two_way around powersgd"),
        (["two_way"], "identity", "two_way around identity"),
        (["sparsity_warmup"], "qsgd", "sparsity_warmup around qsgd, which has no density"),
    ],
)
def test_stacks_that_make_no_sense_are_refused(stack: list[str], codec: str, message: str) -> None:
    with pytest.raises(GradlabError, match=message) as refusal:
        build([(name, {}) for name in stack], codecs.get(codec)())
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("wrapper", "settings", "message"),
    [
        ("error_feedback", {"beta": 0.1}, "no setting beta; it has: decay"),
        ("sparsity_warmup", {"steps": 3}, "steps = 3"),
        ("sparsity_warmup", {"initial_density": 0.05}, "initial_density = 0.05 is below the density 0.1"),
    ],
)
def test_settings_out_of_range_are_refused(wrapper: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(GradlabError, match=message) as refusal:
        build([(wrapper, settings)], topk(0.1))
    assert "\n" not in str(refusal.value)


def test_masking_around_a_codec_that_sends_everything_is_refused() -> None:
    with pytest.raises(GradlabError, match="masking = true around qsgd"):
        correction(QSGD(), masking=True)


def test_settings_of_another_wrapper_are_refused() -> None:
    with pytest.raises(GradlabError, match=r"error_feedback takes ErrorFeedback\.Settings"):
        ErrorFeedback(topk(0.1), Momentum.Settings())
