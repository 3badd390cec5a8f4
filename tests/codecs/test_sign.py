"""Blockwise signs and dist-EF-blockSGDM: the paper's algorithms line by line in numpy, its lemmas, majority votes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from gradlab.codec import Codec, Compressor, Context, Exchanged, Table, Tensors, Training, exchange_group
from gradlab.codec.abilities import decompress
from gradlab.codecs.sign import Sign, pack_signs, write_signs
from gradlab.collectives import LockstepResult, run_lockstep
from gradlab.ddp.optimizers import HeldLayers
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan import Plan, Wrap, method_plan
from gradlab.plan.recipes import SIGN_METHODS
from gradlab.runtime.run_report import residual_statement
from gradlab.wrappers.error_feedback import ErrorFeedback
from gradlab.wrappers.local_momentum import LocalMomentum
from gradlab.wrappers.two_way import TwoWay
from support.laws import law, thorough
from support.process_pool import ProcessPool

Vector = np.ndarray
seeds = st.integers(0, 10_000)


def explicit(vector: Vector, size: int | None, scale: str = "mean") -> Vector:
    """C_B(v), section 3.2, block by block; the scale is a float32."""
    sent = np.empty_like(vector)
    for start in range(0, len(vector), size or max(1, len(vector))):
        block = vector[start : start + size] if size else vector
        factor = 1.0 if scale == "one" else float(np.float32(np.abs(block).mean()))
        for i, value in enumerate(block):
            sent[start + i] = -factor if value < 0 else factor
    return sent


def random(numel: int, seed: int, dtype: type = np.float64) -> Vector:
    values = np.random.default_rng(seed).standard_normal(numel)
    values[np.random.default_rng(seed + 1).random(numel) < 0.2] = 0.0
    return values.astype(dtype)


def compressed(sign: Sign, vector: torch.Tensor) -> torch.Tensor:
    return decompress(sign, sign.compress(vector, torch.Generator().manual_seed(0)), vector)


def sign(size: int | None = None, **settings: Any) -> Sign:
    return Sign(Sign.Settings(size, **settings))


# --- the compressor -------------------------------------------------------------------------------------------------


@law(st.integers(0, 400), st.none() | st.integers(1, 90), st.sampled_from(["mean", "one"]), seeds)
def test_it_is_equation_1_block_by_block(numel: int, size: int | None, scale: str, seed: int) -> None:
    vector = random(numel, seed)
    result = compressed(sign(size, scale=scale), torch.from_numpy(vector)).numpy()
    np.testing.assert_allclose(result, explicit(vector, size, scale), rtol=2e-7, atol=0)


@pytest.mark.parametrize("numel", [2**16 - 3, 2**16, 2**18 + 5, 300_001])
@pytest.mark.parametrize("size", [None, 100, 70_000, 2**16])
def test_long_vectors_are_treated_piece_by_piece_alike(numel: int, size: int | None) -> None:
    vector = random(numel, 3, np.float32)
    result = compressed(sign(size), torch.from_numpy(vector)).numpy()
    scales = [np.abs(vector[a : a + (size or numel)].astype(np.float64)).mean() for a in range(0, numel, size or numel)]
    each = np.repeat(scales, size or numel)[:numel]
    np.testing.assert_allclose(np.abs(result), each, rtol=1e-6)
    assert ((result < 0) == (vector < 0)).all()


@law(st.integers(1, 300), st.none() | st.integers(1, 50), seeds)
def test_the_error_is_what_proposition_1_says(numel: int, size: int | None, seed: int) -> None:
    """||C(v) - v||^2 = ||v||^2 - sum_b ||v_b||_1^2 / d_b where no element is zero, and at most (1 - delta) ||v||^2."""
    vector = np.random.default_rng(seed).standard_normal(numel) + 1e-9
    blocks = np.split(vector, range(size, numel, size)) if size else [vector]
    error = np.sum((compressed(sign(size), torch.from_numpy(vector)).numpy() - vector) ** 2)
    norm = np.sum(vector**2)
    exact = norm - sum(np.abs(b).sum() ** 2 / len(b) for b in blocks)
    assert error == pytest.approx(exact, rel=1e-5, abs=1e-6 * norm)
    delta = min(np.abs(b).sum() ** 2 / (len(b) * np.sum(b**2)) for b in blocks)
    assert delta >= min(1 / len(b) for b in blocks) - 1e-12
    assert error <= (1 - delta) * norm + 1e-6 * norm


@law(st.integers(0, 200), seeds)
def test_signs_are_packed_eight_to_a_byte(numel: int, seed: int) -> None:
    vector = torch.from_numpy(random(numel, seed))
    packed = pack_signs(vector)
    assert packed.dtype == torch.uint8
    assert len(packed) == -(-numel // 8)
    signs = write_signs(torch.empty(8 * len(packed), dtype=torch.float64), packed, 1.0)
    assert torch.equal(signs[:numel] < 0, vector < 0)
    assert bool((signs[numel:] == 1).all())
    for i in range(numel):
        assert bool(packed[i // 8] >> i % 8 & 1) == bool(vector[i] < 0)


def test_a_block_of_zeros_comes_back_zero_and_what_is_not_finite_is_seen() -> None:
    vector = torch.tensor([0.0, -0.0, 0.0, 1.0, -3.0, 0.0])
    assert compressed(sign(3), vector).tolist() == pytest.approx([0, 0, 0, 4 / 3, -4 / 3, 4 / 3])
    for bad in (torch.nan, torch.inf, -torch.inf):
        assert not compressed(sign(2), torch.tensor([1.0, bad, 2.0, 2.0]))[:2].isfinite().any()
    assert compressed(sign(2), torch.tensor([1.0, torch.nan, 2.0, 2.0]))[2:].tolist() == [2, 2]


def test_a_coin_decides_the_sign_of_zero() -> None:
    vector = torch.cat([torch.zeros(4000), torch.ones(10), -torch.ones(10)])
    result = compressed(sign(scale="one", zeros="random"), vector)
    assert torch.equal(result[4000:], vector[4000:])
    assert set(result[:4000].tolist()) == {-1.0, 1.0}
    assert abs(float(result[:4000].sum())) < 5 * 4000**0.5  # five standard deviations: once in 1.7 million runs
    assert bool((compressed(sign(scale="one"), vector)[:4000] == 1).all())


# --- the algorithms -------------------------------------------------------------------------------------------------


class DistEF:
    """Algorithms 2 to 4 of M workers and one server, line by line. size: of blocks; mu = 0: without momentum."""

    def __init__(self, start: Vector, workers: int, size: int | None, mu: float = 0.0) -> None:
        self.x, self.size, self.mu = start.copy(), size, mu
        self.m = np.zeros((workers, len(start)))
        self.e, self.server_e = np.zeros((workers, len(start))), np.zeros(len(start))
        self.last_rate = 0.0

    def step(self, gradients: Sequence[Vector], rate: float) -> Vector:
        ratio = self.last_rate / rate
        sent = []
        for i, g in enumerate(gradients):
            self.m[i] = self.mu * self.m[i] + g
            p = (self.mu * self.m[i] + g if self.mu else g) + ratio * self.e[i]
            sent.append(explicit(p, self.size))
            self.e[i] = p - sent[-1]
        p = np.mean(sent, axis=0) + ratio * self.server_e
        answer = explicit(p, self.size)
        self.server_e = p - answer
        self.x -= rate * answer
        self.last_rate = rate
        return answer


def dist_ef(size: int | None, mu: float = 0.0, server: str = "sharded") -> Codec:
    codec = dist_ef_of(sign(size), {"server": server, "step_size_ratio": True})
    return LocalMomentum(codec, LocalMomentum.Settings(mu)) if mu else codec


def dist_ef_of(compressor: Compressor, settings: dict[str, Any]) -> Codec:
    """Algorithm 2 with some compressor. settings: of two_way."""
    inner = TwoWay(compressor, TwoWay.Settings(**settings))
    return ErrorFeedback(inner, ErrorFeedback.Settings(step_size_ratio=True))


def one_step(
    codec: Codec, gradients: Sequence[Vector], states: Sequence[Tensors], step: int, rate: float, before: float
) -> list[LockstepResult[Exchanged]]:
    rates = {"learning_rate": {"w": rate}, "previous_learning_rate": {"w": before or rate}}
    context = Context(0, len(gradients), step, "w", seed=5, training=Training(**rates))
    return run_lockstep(
        [
            exchange_group(codec, {"w": torch.from_numpy(g)}, state, replace(context, rank=rank))
            for rank, (g, state) in enumerate(zip(gradients, states, strict=True))
        ]
    )


class Quadratic:
    """Workers' gradients of (x - c_i)^T A (x - c_i) / 2, with noise: what depends on x shows a wrong iterate."""

    def __init__(self, workers: int, numel: int, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.centres = self.random.standard_normal((workers, numel))
        self.curvature = self.random.random(numel) + 0.1

    def gradients(self, x: Vector) -> list[Vector]:
        return [self.curvature * (x - centre) + 0.3 * self.random.standard_normal(len(x)) for centre in self.centres]


RATES = [0.1, 0.1, 0.2, 0.05, 0.4, 0.01, 0.01, 0.3, 0.25, 0.2, 0.15, 0.1]
WITH_PAUSES = [0.0, *RATES[:4], 0.0, 0.0, *RATES[4:]]


@pytest.mark.parametrize("size", [None, 7], ids=["tensor", "blocks"])
@pytest.mark.parametrize("mu", [0.0, 0.9], ids=["SGD", "SGDM"])
@pytest.mark.parametrize("server", ["sharded", "rank"])
@pytest.mark.parametrize("workers", [1, 3])
def test_runs_follow_the_papers_algorithms_line_by_line(size: int | None, mu: float, server: str, workers: int) -> None:
    """Algorithms 2 (one block), 3 and 4, over rates that change: answers, residuals of workers and servers."""
    codec, problem = dist_ef(size, mu, server), Quadratic(workers, 40, 1)
    oracle, states, before = DistEF(np.ones(40), workers, size, mu), [{}] * workers, 0.0
    for step, rate in enumerate(RATES):
        gradients = problem.gradients(oracle.x)
        results = one_step(codec, gradients, states, step, rate, before)
        answer = oracle.step(gradients, rate)
        for result in results:
            np.testing.assert_allclose(result.value.mean["w"].numpy(), answer, rtol=1e-6, atol=1e-12)
        states, before = [result.value.state for result in results], rate
        residuals = np.stack([state["w/residual"].numpy() for state in states])
        np.testing.assert_allclose(residuals, oracle.e, atol=1e-5)
        server_residual = np.concatenate([state["w/server_residual"].numpy() for state in states])
        np.testing.assert_allclose(server_residual, oracle.server_e, atol=1e-5)


@pytest.mark.parametrize("mu", [0.0, 0.9], ids=["Lemma 1", "Lemma 3"])
@pytest.mark.parametrize("size", [None, 7], ids=["tensor", "blocks"])
def test_the_error_corrected_iterate_follows_its_recurrence(mu: float, size: int | None) -> None:
    """x~_t = x_t - eta_(t-1) (e~_t + mean e_t,i); x~_(t+1) = x~_t - eta_t mean(g), or mean(mu m + g), to rounding.

    Over rates of zero as well: eta_(t-1) is then the last that was not.
    """
    workers, codec, problem = 4, dist_ef(size, mu), Quadratic(4, 40, 2)
    x, states, before = np.ones(40), [{}] * workers, 0.0
    corrected, m = x.copy(), np.zeros((workers, 40))
    for step, rate in enumerate(WITH_PAUSES * 2):
        gradients = problem.gradients(x)
        m = mu * m + np.stack(gradients)
        results = one_step(codec, gradients, states, step, rate, before)
        states, before = [result.value.state for result in results], rate or before
        x = x - rate * results[0].value.mean["w"].numpy()
        corrected -= rate * np.mean(mu * m + gradients if mu else gradients, axis=0)
        owed = np.zeros(40)
        if before:
            owed += np.mean([state["w/residual"].numpy() for state in states], axis=0)
            owed += np.concatenate([state["w/server_residual"].numpy() for state in states])
        np.testing.assert_allclose(x - before * owed, corrected, rtol=0, atol=1e-12)


def test_the_residual_stays_within_lemma_2() -> None:
    """||e~_t + mean e_t,i||^2 <= 8 (1 - delta) G^2 / delta^2 (1 + 16 / delta^2), under a constant rate."""
    workers, codec, problem = 4, dist_ef(None), Quadratic(4, 40, 3)
    states: list[Tensors] = [{}] * workers
    norms, second, delta = [], 0.0, 1.0
    for step in range(240):
        gradients = problem.gradients(np.ones(40))
        before = states
        results = one_step(codec, gradients, states, step, 0.1, 0.1)
        states = [result.value.state for result in results]
        asked = [g + (s["w/residual"].numpy() if s else 0) for g, s in zip(gradients, before, strict=True)]
        delta = min(delta, *(np.abs(p).sum() ** 2 / (40 * np.sum(p**2)) for p in asked))
        second = max(second, *(np.sum(g**2) for g in gradients))
        owed = np.mean([state["w/residual"].numpy() for state in states], axis=0)
        owed += np.concatenate([state["w/server_residual"].numpy() for state in states])
        norms.append(float(np.sum(owed**2)))
        server = np.mean([result.value.own["w"].numpy() for result in results], axis=0)
        server += np.concatenate([s["w/server_residual"].numpy() for s in before]) if step else 0
        delta = min(delta, np.abs(server).sum() ** 2 / (40 * np.sum(server**2)))
    largest = max(norms)
    # The bound is a thousand times what is seen; that nothing grows says more.
    assert max(norms[120:]) < 1.5 * max(norms[:120])
    assert 0 < largest <= 8 * (1 - delta) * second / delta**2 * (1 + 16 / delta**2)


@pytest.mark.parametrize("size", [None, 5])
def test_algorithm_1_is_error_feedback_with_the_ratio_on_one_worker(size: int | None) -> None:
    """p = eta g + e; x -= C(p); e = p - C(p). C is linear in scale, so that e / eta is the residual kept here."""
    codec = ErrorFeedback(sign(size), ErrorFeedback.Settings(step_size_ratio=True))
    problem, x, e = Quadratic(1, 23, 4), np.ones(23), np.zeros(23)
    states: list[Tensors] = [{}]
    before = 0.0
    for step, rate in enumerate(RATES):
        (g,) = problem.gradients(x)
        result = one_step(codec, [g], states, step, rate, before)[0].value
        p = rate * g + e
        sent = explicit(p, size)
        e = p - sent
        np.testing.assert_allclose(rate * result.mean["w"].numpy(), sent, rtol=1e-6, atol=1e-12)
        np.testing.assert_allclose(rate * result.state["w/residual"].numpy(), e, atol=1e-6)
        states, before, x = [result.state], rate, x - sent


def test_coordinates_that_are_always_zero_gather_no_error() -> None:
    """They are sent a sign like all others; what that adds is taken back, at both ends."""
    workers, codec = 3, dist_ef(None)
    states: list[Tensors] = [{}] * workers
    moved = np.zeros(50)
    for step in range(150):
        gradients = [random(50, 100 * step + rank) for rank in range(workers)]
        for g in gradients:
            g[::5] = 0.0
        results = one_step(codec, gradients, states, step, 0.1, 0.1)
        states = [result.value.state for result in results]
        moved += results[0].value.mean["w"].numpy()
        largest = max(np.abs(result.value.own["w"].numpy()).max() for result in results)
        for state in states:
            assert np.abs(state["w/residual"].numpy()[::5]).max() <= 1.01 * max(1.0, largest)
    assert np.abs(moved[::5]).max() < 6  # of 150 steps with scales near 0.6


def test_a_plan_of_signs_is_two_way_by_default_and_of_every_tensor() -> None:
    layers = [
        Layer("w", (30, 30)),
        Layer("b", (30,)),
        Layer("s", ()),
        Layer("large", (1024, 1024)),
        Layer("last", (2,)),
    ]
    plan = Plan.uniform(layers, "sign", block_size=64)
    assert plan.groups[0].wrappers == (Wrap("error_feedback"), Wrap("two_way"))
    assert Plan.uniform(layers, "sign", wrappers=()).groups[0].wrappers == ()
    assert [group.layers for group in plan.groups] == [("w", "b", "s"), ("large",), ("last",)]
    assert plan.groups[0].name == "w to s"
    assert [group.layers for group in Plan.uniform(layers, "sign", group_bytes=math.inf).groups] == [
        tuple(layer.name for layer in layers)
    ]
    assert len(Plan.uniform(layers, "sign", group_bytes=0).groups) == 5


shape_lists = st.lists(st.sampled_from([(), (1,), (3,), (7, 5), (0,), (64,), (40, 3), (130,)]), min_size=1, max_size=6)


@pytest.mark.parametrize("server", ["sharded", "rank"])
@law(shape_lists, st.none() | st.integers(1, 50), st.integers(1, 5), seeds, examples=15)
def test_layers_in_one_group_are_what_each_is_alone_bit_for_bit(
    server: str, shapes: list[tuple[int, ...]], size: int | None, workers: int, seed: int
) -> None:
    """They share messages and servers, no scale."""
    named = {f"l{i}": shape for i, shape in enumerate(shapes)}
    codec = dist_ef(size, 0.9, server)
    together: list[Tensors] = [{}] * workers
    alone: dict[str, list[Tensors]] = {name: [{}] * workers for name in named}
    for step in range(3):
        grads = [
            {
                n: torch.from_numpy(random(math.prod(s), seed + 97 * step + rank, np.float32)).view(s)
                for n, s in named.items()
            }
            for rank in range(workers)
        ]
        rates = [{name: (0.1 + t) * (1 + i % 3) for i, name in enumerate(named)} for t in (step, max(0, step - 1))]
        context = Context(0, workers, step, "g", training=Training(rates[0], rates[1]))
        results = run_lockstep(
            [
                exchange_group(codec, g, s, replace(context, rank=r))
                for r, (g, s) in enumerate(zip(grads, together, strict=True))
            ]
        )
        together = [result.value.state for result in results]
        for name, states in alone.items():
            single = run_lockstep(
                [
                    exchange_group(codec, {name: g[name]}, s, replace(context, rank=r))
                    for r, (g, s) in enumerate(zip(grads, states, strict=True))
                ]
            )
            alone[name] = [result.value.state for result in single]
            for result, of_all in zip(single, results, strict=True):
                assert torch.equal(result.value.mean[name], of_all.value.mean[name])
                assert torch.equal(result.value.own[name], of_all.value.own[name])
                assert torch.equal(result.value.state[f"{name}/residual"], of_all.value.state[f"{name}/residual"])
    layers = [Layer(name, shape) for name, shape in named.items()]
    counted = sum(result.payload_bytes for result in results) / workers
    assert counted == pytest.approx(codec.forecast(layers, workers).payload)


def test_across_layers_is_equation_1_of_the_model() -> None:
    grads = {"a": torch.from_numpy(random(30, 1)), "b": torch.from_numpy(10 * random(50, 2))}
    for across in (False, True):
        codec = dist_ef_of(sign(across_layers=across), {"step_size_ratio": True})
        (result,) = run_lockstep([exchange_group(codec, grads, {}, Context(0, 1, 0, "g"))])
        whole = np.concatenate([grad.numpy() for grad in grads.values()])
        wanted = (
            explicit(whole, None) if across else np.concatenate([explicit(g.numpy(), None) for g in grads.values()])
        )
        np.testing.assert_allclose(torch.cat(list(result.value.own.values())).numpy(), wanted, rtol=2e-7)


@law(st.lists(st.integers(1, 300), min_size=2, max_size=9), st.integers(1, 6))
def test_shards_end_where_blocks_end(numels: list[int], parts: int) -> None:
    codec = sign().for_layers(Table.of_shapes([(numel,) for numel in numels]))
    bounds = codec.blocks.bounds(sum(numels), parts)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, sum(numels), parts + 1)
    assert bounds == sorted(bounds)
    ends = {0, *np.cumsum(numels).tolist()}
    assert set(bounds) <= ends
    for n, place in enumerate(bounds[1:-1], 1):
        assert abs(place - sum(numels) * n / parts) == min(abs(end - sum(numels) * n / parts) for end in ends)


# --- methods by name ------------------------------------------------------------------------------------------------


LAYERS = [Layer("w", (30, 30), "linear"), Layer("b", (30,), "bias")]


def test_methods_are_what_the_paper_compares() -> None:
    wrapped = {name: [wrap.name for wrap in method_plan(LAYERS, name).groups[0].wrappers] for name in SIGN_METHODS}
    both = ["error_feedback", "two_way"]
    assert wrapped == {
        "SGD": [],
        "SGDM": ["momentum"],
        "signSGD": ["two_way"],
        "signum": ["local_momentum", "two_way"],
        "dist-EF-SGD": both,
        "dist-EF-SGDM": ["local_momentum", *both],
        "dist-EF-blockSGD": both,
        "dist-EF-blockSGDM": ["local_momentum", *both],
    }
    assert not method_plan(LAYERS, "SGD").compressed_groups
    plan = method_plan(LAYERS, "dist-EF-blockSGDM", momentum=0.8, weight_decay=1e-3, server="rank", block_size=64)
    (group,) = plan.groups
    assert group.settings == {"block_size": 64}
    assert [dict(wrap.settings) for wrap in group.wrappers] == [
        {"rate": 1e-3},
        {"momentum": 0.8, "nesterov": True},
        {"step_size_ratio": True},
        {"step_size_ratio": True, "server": "rank"},
    ]
    # One scale for all in the non-block form.
    assert method_plan(LAYERS, "dist-EF-SGD").payload_bytes(2) == 2 * (4 + -(-930 // 8)) * 3 / 4 + 4


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("DIST-EF-blockSGDN", {}, "did you mean dist-EF-blockSGD"),
        ("x", {}, "there are SGD, SGDM, signSGD"),
        (3, {}, "no method 3"),
        ("dist-EF-blockSGD", {"group_bytes": math.nan}, "group_bytes = nan, expected a number from 0"),
        ("dist-EF-blockSGD", {"group_bytes": "all"}, "group_bytes = 'all'"),
        ("SGDM", {"momentum": "0.9"}, "momentum = '0.9', expected float"),
        ("signum", {"momentum": 1.0}, "momentum = 1.0, expected a number in"),
        ("signum", {"weight_decay": -1.0}, "rate = -1.0, expected a number in"),
        ("signSGD", {"server": "nobody"}, "server = 'nobody'"),
        ("dist-EF-SGD", {"block_size": 0}, "block_size = 0"),
    ],
)
def test_bad_methods_are_refused(name: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(GradlabError, match=re.escape(message)):
        method_plan(LAYERS, name, **settings)


# --- real runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", ["dist-EF-blockSGDM", *(thorough(name) for name in ("dist-EF-blockSGD", "dist-EF-SGDM", "signum"))]
)
def test_the_engine_is_lockstep_and_the_sharded_server_one_server_bit_for_bit(pool: ProcessPool, method: str) -> None:
    arguments = {"method": method}
    results = [
        result
        for server in ("sharded", "rank")
        for result in pool.run("jobs.sign_tasks:engine_equals_lockstep", 3, server=server, **arguments)
    ]
    assert all(result["bitwise"] and result["states"] for result in results)
    assert results[0]["groups"] == (1 if method == "dist-EF-SGDM" else 3)
    assert len({result["means"] for result in results}) == 1


@pytest.mark.parametrize(
    ("method", "server"),
    [thorough("dist-EF-blockSGD", "rank"), ("dist-EF-blockSGDM", "sharded")],
    ids=["Lemma 1", "Lemma 3"],
)
def test_the_lemmas_hold_in_real_runs(pool: ProcessPool, method: str, server: str) -> None:
    """Several buckets, rates by parameter group that change, pause at zero and return; the last layers join
    in mid-run. To rounding of numbers near 1.
    """
    for result in pool.run("jobs.sign_tasks:lemma", 2, method=method, server=server):
        assert result["largest"] < 1e-14
        assert result["owed"] > 1e-3


@pytest.mark.parametrize("form", ["gradient", "apart"])
def test_weight_decay_is_torchs(pool: ProcessPool, form: str) -> None:
    for difference in pool.run("jobs.sign_tasks:weight_decay_is_torchs", 2, form=form):
        assert difference < 1e-14


def test_a_state_says_what_an_optimizer_must_not_do_and_what_holds(pool: ProcessPool) -> None:
    for rank, texts in enumerate(pool.run("jobs.sign_tasks:refusals", 2)):
        assert (
            "the plan applies momentum (local_momentum) and the optimizer has momentum = 0.9" in texts["own momentum"]
        )
        assert "betas = (0.9, 0.999)" in texts["adam"]
        assert "the plan applies weight decay and the optimizer has weight_decay = 0.0001" in texts["own weight decay"]
        assert texts["no optimizer"].startswith("the plan's error_feedback follows the learning rate")
        for name in ("momentum", "weight decay"):
            assert "pass optimizer=, so that its own is known to be off" in texts[f"no optimizer, {name}"]
        assert texts["adam, feedback by default"].startswith("residuals are kept as they are under AdamW with betas")
        assert texts["adam, feedback by default"].endswith("nothing to do when the learning rate changes (0 warnings)")
        assert texts["adam, residuals follow"].endswith(f"keeps them as they are ({int(rank == 0)} warnings)")
        assert "train with a plan without momentum: AdamW keeps its own" in texts["adam"]
        assert texts["plain"].endswith("residuals follow the learning rate (0 warnings)")
        assert texts["nothing kept"] == "None (0 warnings)"
        assert "under SGD with momentum = 0.9: the error-corrected" in texts["ratio asked of momentum"]
        assert f"({int(rank == 0)} warnings)" in texts["ratio asked of momentum"]


# --- votes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zeros", ["positive", "random"])
@law(st.integers(1, 12), seeds, examples=30)
def test_a_majority_decides_and_ties_are_as_the_setting_says(zeros: str, workers: int, seed: int) -> None:
    """signSGD with majority vote: sign of the sum of signs, counted one by one."""
    vote = TwoWay(sign(scale="one", zeros=zeros), TwoWay.Settings(error_feedback=False))
    gradients = [np.random.default_rng(seed + i).standard_normal(60) for i in range(workers)]
    results = one_step(vote, gradients, [{}] * workers, 0, 0.1, 0.1)
    for i in range(60):
        ayes = sum(g[i] > 0 for g in gradients)
        votes = {float(result.value.mean["w"][i]) for result in results}
        if 2 * ayes != workers:
            assert votes == {1.0 if 2 * ayes > workers else -1.0}
        else:
            assert len(votes) == 1
            assert votes <= ({1.0} if zeros == "positive" else {1.0, -1.0})


def test_signum_votes_on_dampened_momentum() -> None:
    vote = TwoWay(sign(scale="one"), TwoWay.Settings(error_feedback=False))
    codec = LocalMomentum(vote, LocalMomentum.Settings(0.9, nesterov=False, dampening=True, start="zero"))
    states: list[Tensors] = [{}] * 3
    m = np.zeros((3, 30))
    for step in range(6):
        gradients = [np.random.default_rng(10 * step + i).standard_normal(30) for i in range(3)]
        m = 0.9 * m + 0.1 * np.stack(gradients)
        results = one_step(codec, gradients, states, step, 0.1, 0.1)
        states = [result.value.state for result in results]
        np.testing.assert_array_equal(results[0].value.mean["w"].numpy(), np.sign(np.sign(m).sum(0)))


# --- servers --------------------------------------------------------------------------------------------------------


@law(st.integers(1, 200), st.none() | st.integers(1, 40), st.integers(1, 5), seeds, examples=40)
def test_a_sharded_server_computes_what_one_does_bit_for_bit(
    numel: int, size: int | None, workers: int, seed: int
) -> None:
    states: dict[str, list[Tensors]] = {server: [{}] * workers for server in ("sharded", "rank")}
    for step in range(3):
        gradients = [random(numel, seed + 10 * step + i, np.float32) for i in range(workers)]
        means = {}
        for server in states:
            results = one_step(dist_ef(size, 0.9, server), gradients, states[server], step, 0.1 + step, 0.1)
            states[server] = [result.value.state for result in results]
            means[server] = results[0].value.mean["w"]
        assert torch.equal(means["sharded"], means["rank"])


@pytest.mark.parametrize(
    ("wrappers", "expected"),
    [
        ([Wrap("two_way", {"error_feedback": False})], None),
        ([Wrap("two_way")], "residuals follow the learning rate"),
        ([Wrap("error_feedback")], "residuals follow the learning rate"),
        ([Wrap("error_feedback", {"step_size_ratio": False}), Wrap("two_way")], "some residuals are kept as they are"),
        ([Wrap("local_momentum"), Wrap("error_feedback"), Wrap("two_way")], "residuals follow the learning rate"),
        ([Wrap("momentum_correction", {"step_size_ratio": True})], "residuals follow the learning rate"),
        ([Wrap("momentum_correction")], "residuals are kept as they are as the plan says"),
    ],
)
def test_what_is_said_of_residuals_under_plain_sgd(wrappers: list[Wrap], expected: str | None) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    statement = residual_statement(Plan.uniform(LAYERS, "sign", wrappers=wrappers), HeldLayers(optimizer))
    assert (statement is None) == (expected is None)
    assert expected is None or (expected or "") in (statement or "")


def test_a_mean_is_finite_where_its_sum_is_not() -> None:
    vector = torch.full((70_000,), 1e34)
    assert compressed(sign(), vector)[0] == pytest.approx(1e34, rel=1e-6)


def test_dense_layers_beside_dampened_momentum_are_dampened_too() -> None:
    around = [Wrap("local_momentum", {"nesterov": False, "dampening": True}), Wrap("two_way")]
    plan = Plan.uniform(LAYERS, "sign", roles=("linear",), wrappers=around)
    (rest,) = [group for group in plan.groups if group.codec == "identity"]
    codec, first, second = plan.build(rest), torch.tensor([1.0, -2.0]), torch.tensor([4.0, 8.0])
    (begun,) = run_lockstep([exchange_group(codec, {"b": first}, {}, Context(0, 1, 0, "b"))])
    (result,) = run_lockstep([exchange_group(codec, {"b": second}, begun.value.state, Context(0, 1, 1, "b"))])
    torch.testing.assert_close(result.value.mean["b"], 0.9 * first + 0.1 * second)
