"""EF21 against its algorithm in plain numpy, its laws, and what it does where error feedback leaves a residual."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gradlab.codec import Context, Tensors, exchange_group
from gradlab.codec.wrapper import resize
from gradlab.codecs.topk import TopK
from gradlab.collectives import run_lockstep
from gradlab.executor import LockstepPlan
from gradlab.layout import Layer
from gradlab.plan import Plan, Wrap, method_plan
from gradlab.wrappers.ef21 import EF21
from gradlab.wrappers.two_way import TwoWay
from support.wrapper_oracles import keep_largest

NUMEL, DENSITY = 60, 0.1
LAYERS = (Layer("w", (6, 10), "linear"),)


def plan_of(*wrappers: Wrap, codec: str = "topk", **settings: Any) -> Plan:
    settings = {"density": DENSITY} if codec == "topk" else settings
    return Plan.uniform(LAYERS, codec, wrappers=wrappers, minimum_numel=1, **settings)


def gradients(ranks: int, step: int) -> list[np.ndarray]:
    random = np.random.default_rng(step)
    return [random.standard_normal(NUMEL) for _ in range(ranks)]


def named(vectors: list[np.ndarray]) -> list[dict[str, torch.Tensor]]:
    return [{"w": torch.tensor(vector).view(6, 10)} for vector in vectors]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_it_is_the_algorithm(ranks: int, momentum: float) -> None:
    """Algorithm 2 of EF21, and with momentum Algorithm 1 of EF21-SGDM with eta = 1 - momentum, from v = g."""
    around = [Wrap("local_momentum", {"momentum": momentum, "nesterov": False, "dampening": True})] if momentum else []
    lockstep = LockstepPlan(plan_of(*around, Wrap("ef21")), ranks)
    estimates, velocities = [np.zeros(NUMEL) for _ in range(ranks)], [np.zeros(NUMEL) for _ in range(ranks)]
    for step in range(8):
        grads = gradients(ranks, step)
        result = lockstep.step(step, named(grads))
        for rank, grad in enumerate(grads):
            velocities[rank] = momentum * velocities[rank] + (1 - momentum) * grad if step else grad
            estimates[rank] = estimates[rank] + keep_largest(velocities[rank] - estimates[rank], DENSITY)
        [exchanged] = result.exchanged.values()
        for done, estimate in zip(exchanged, estimates, strict=True):
            np.testing.assert_allclose(done.own["w"].reshape(-1), estimate, atol=1e-12)
            np.testing.assert_allclose(done.mean["w"].reshape(-1), np.mean(estimates, 0), atol=1e-12)
            left = done.compressor_input["w"] - done.own["w"]
            np.testing.assert_allclose(done.compression_error["w"], left, atol=1e-12)


@pytest.mark.parametrize("warmup", [1, 3])
@pytest.mark.parametrize("method", ["EF21", "EF21-SGDM"])
def test_compression_begins_from_the_estimates_of_the_warm_up(method: str, warmup: int) -> None:
    """After dense steps the first error is that of C of the last change, and nothing where nothing changes."""
    momentum = 0.9 if method == "EF21-SGDM" else 0.0
    lockstep = LockstepPlan(method_plan(LAYERS, method, density=DENSITY, minimum_numel=1, warmup_steps=warmup), 2)
    estimates, velocities = [np.zeros(NUMEL)] * 2, [np.zeros(NUMEL)] * 2
    for step in range(warmup + 2):
        grads = gradients(2, step)
        result = lockstep.step(step, named(grads))
        velocities = [momentum * v + (1 - momentum) * g if step else g for v, g in zip(velocities, grads, strict=True)]
        moved = [
            v if step < warmup else e + keep_largest(v - e, DENSITY) for v, e in zip(velocities, estimates, strict=True)
        ]
        estimates = moved
        for state, estimate in zip(lockstep.states, estimates, strict=True):
            np.testing.assert_allclose(state["w"]["w/estimate"].reshape(-1), estimate, atol=1e-12)
            np.testing.assert_allclose(state["w"]["w/aggregate"].reshape(-1), np.mean(estimates, 0), atol=1e-12)
    np.testing.assert_allclose(result.exchanged["w"][0].mean["w"].reshape(-1), np.mean(estimates, 0), atol=1e-12)


def test_a_layer_that_is_held_in_the_warm_up_keeps_its_estimate() -> None:
    layers = (*LAYERS, Layer("v", (6, 10), "linear"))
    plan = Plan.uniform(layers, "topk", density=DENSITY, wrappers=[Wrap("ef21")], minimum_numel=1, warmup_steps=9)
    lockstep = LockstepPlan(plan, 2, hold_unused=True)
    first, second = named(gradients(2, 0)), named(gradients(2, 1))
    lockstep.step(0, [{**own, "v": own["w"]} for own in first])
    lockstep.step(1, [{**own, "v": torch.zeros_like(own["w"])} for own in second])
    for state, before, now in zip(lockstep.states, first, second, strict=True):
        held = {key: value for of_group in state.values() for key, value in of_group.items()}
        assert torch.equal(held["v/estimate"], before["w"])
        assert torch.equal(held["w/estimate"], now["w"])


def test_a_dense_iteration_applies_the_mean_whatever_a_server_kept_back() -> None:
    codec = EF21(TwoWay(TopK(TopK.Settings(DENSITY))))
    states: list[Tensors] = [{}, {}]
    for step, dense in enumerate([False, True, False, False]):
        grads = named(gradients(2, step))
        contexts = [Context(rank, 2, step, "w", dense=dense) for rank in range(2)]
        results = run_lockstep([exchange_group(codec, *one) for one in zip(grads, states, contexts, strict=True)])
        states = [result.value.state for result in results]
        aggregate = states[0]["w/aggregate"].reshape(-1)
        kept_back = torch.cat(
            [state["w/server_residual"] for state in states if "w/server_residual" in state] or [torch.zeros(NUMEL)]
        )
        estimates = torch.stack([state["w/estimate"] for state in states]).mean(0).reshape(-1)
        torch.testing.assert_close(aggregate + kept_back, estimates)
        torch.testing.assert_close(results[1].value.mean["w"].reshape(-1), aggregate)


def test_gradients_that_stand_still_are_applied_as_they_are() -> None:
    """After 1 / density steps nothing is missing, where error feedback goes on to send what it held back."""
    grads = gradients(2, 0)
    errors = {}
    for name in ("ef21", "error_feedback"):
        lockstep = LockstepPlan(plan_of(Wrap(name)), 2)
        for step in range(12):
            result = lockstep.step(step, named(grads))
        [exchanged] = result.exchanged.values()
        errors[name] = float(np.abs(exchanged[0].mean["w"].reshape(-1).numpy() - np.mean(grads, 0)).max())
    assert errors["ef21"] < 1e-12
    assert errors["error_feedback"] > 0.1


@pytest.mark.parametrize("codec", ["qsgd", "random_k", "terngrad"])
def test_a_codec_that_does_not_contract_is_scaled(codec: str) -> None:
    """Estimates stay near the gradient, where they would leave it without bounds."""
    settings = {"random_k": {"density": 0.1, "unbiased": True}}.get(codec, {"bits": 2} if codec == "qsgd" else {})
    lockstep = LockstepPlan(plan_of(Wrap("ef21"), codec=codec, **settings), 2)
    grads = gradients(2, 0)
    for step in range(60):
        result = lockstep.step(step, named(grads))
    [exchanged] = result.exchanged.values()
    distance = np.linalg.norm(exchanged[0].own["w"].reshape(-1).numpy() - grads[0])
    assert distance < 0.5 * np.linalg.norm(grads[0])


@pytest.mark.parametrize("residuals", ["sum", "split", "drop"])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_another_number_of_ranks_keeps_the_mean_of_the_estimates(residuals: str, ranks: int) -> None:
    lockstep = LockstepPlan(plan_of(Wrap("ef21")), 3)
    for step in range(4):
        lockstep.step(step, named(gradients(3, step)))
    old = [state["w"] for state in lockstep.states]
    codec = lockstep.codecs["w"]
    assert isinstance(codec, EF21)
    new = [resize(codec, old, rank, ranks, residuals) for rank in range(ranks)]
    if residuals == "drop":
        assert all("w/estimate" not in state and "w/aggregate" not in state for state in new)
        return
    mean = torch.stack([state["w/estimate"] for state in new]).mean(0)
    torch.testing.assert_close(mean, torch.stack([state["w/estimate"] for state in old]).mean(0))
    assert all(torch.equal(state["w/aggregate"], old[0]["w/aggregate"]) for state in new)
    torch.testing.assert_close(mean, new[0]["w/aggregate"])
