"""Integers that are summed on their way: IntSGD's formulas, and what holds for sums of codes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import strategies as st

from gradlab.codec import Context, Exchanged, Tensors, exchange_group
from gradlab.codecs.intsgd import IntSGD
from gradlab.collectives import LockstepResult, Request, Sum, observed, run_lockstep
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan import method_plan
from support.laws import law


def exchange(
    codec: IntSGD, grads: list[Tensors], states: list[Tensors] | None = None, seen: list[Request] | None = None
) -> list[LockstepResult[Exchanged]]:
    ranks = len(grads)
    rows = [
        exchange_group(codec, own, {} if states is None else states[rank], Context(rank, ranks, 0, "g"))
        for rank, own in enumerate(grads)
    ]
    return run_lockstep(rows if seen is None else [observed(rows[0], seen), *rows[1:]])


def drawn(rank: int, numel: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return scale * torch.randn(numel, generator=torch.Generator().manual_seed(1000 * seed + rank))


@law(st.integers(1, 40), st.integers(1, 200), st.integers(-60, 60), st.booleans(), st.integers(0, 99))
def test_what_travels_are_sums_that_fit(ranks: int, numel: int, exponent: int, random: bool, seed: int) -> None:
    """With the largest magnitude no code is cut: a rank is off by one step at most, by half of one without chance."""
    grads = [{"w": drawn(rank, numel, 2.0**exponent, seed), "b": drawn(rank, 3, seed=seed)} for rank in range(ranks)]
    seen: list[Request] = []
    results = exchange(IntSGD(IntSGD.Settings(random=random)), grads, seen=seen)
    assert [request.tensor.dtype for request in seen if isinstance(request, Sum)] == [torch.int8, torch.int8]
    for name in ("w", "b"):
        largest = max(float(own[name].abs().max()) for own in grads)
        step = largest / (127 // ranks)
        for rank, result in enumerate(results):
            missed = (result.value.own[name] - grads[rank][name]).abs().max()
            assert float(missed) <= step * (1.0 if random else 0.5) * (1 + 1e-4)
            codes = result.value.own[name] / step
            torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-3)
            assert torch.equal(result.value.mean[name], results[0].value.mean[name])
        total = torch.stack([result.value.own[name].double() for result in results]).mean(0)
        torch.testing.assert_close(results[0].value.mean[name].double(), total, rtol=1e-5, atol=1e-5 * step)


def test_it_is_right_on_average() -> None:
    codec, x, numel = IntSGD(), drawn(0, 500), 500
    total = torch.zeros(numel, dtype=torch.float64)
    for draw in range(100):
        rows = [exchange_group(codec, {"w": x}, {}, Context(rank, 2, draw, "g")) for rank in range(2)]
        total += run_lockstep(rows)[0].value.mean["w"].double()
    step = float(x.abs().max()) / 63
    assert float((total / 100 - x).abs().max()) < 5 * step / math.sqrt(4 * 2 * 100)


def test_the_running_scale_is_that_of_the_paper() -> None:
    """Algorithm 1 on a quadratic under SGD: alpha_k = eta sqrt(d) / sqrt(2 n r_k + eta^2 eps^2), with r_k the running
    average of ||x_k - x_(k-1)||^2; the first step is exact."""
    ranks, numel, rate, beta, eps = 3, 40, 0.1, 0.9, 1e-8
    codec = IntSGD(IntSGD.Settings(bits=32, scale="running", random=False))
    targets = [drawn(rank, numel) for rank in range(ranks)]
    ours, states = torch.zeros(numel, dtype=torch.float64), [dict[str, torch.Tensor]() for _ in range(ranks)]
    theirs, moved = ours.clone(), 0.0
    for step in range(20):
        results = exchange(codec, [{"w": ours - target.double()} for target in targets], states)
        states = [result.value.state for result in results]
        ours = ours - rate * results[0].value.mean["w"]
        grads = [theirs - target.double() for target in targets]
        if step == 0:
            mean = sum(grads) / ranks
        else:
            alpha = rate * math.sqrt(numel) / math.sqrt(2 * ranks * moved + rate**2 * eps**2)
            mean = sum((alpha * grad).round() for grad in grads) / (ranks * alpha)
        before, theirs = theirs, theirs - rate * mean
        distance = float((theirs - before).square().sum())
        moved = distance if step == 0 else beta * moved + (1 - beta) * distance
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    assert float((ours - sum(targets).double() / ranks).norm()) < 0.3 * float(ours.norm())


def test_more_ranks_than_eight_bits_hold_are_refused() -> None:
    grads = [{"w": drawn(rank, 4)} for rank in range(128)]
    assert len(exchange(IntSGD(), grads[:127])) == 127
    with pytest.raises(GradlabError, match="intsgd: sums of 128 ranks do not fit 8 bits, expected at most 127 ranks"):
        exchange(IntSGD(), grads)
    assert len(exchange(IntSGD(IntSGD.Settings(bits=32)), grads)) == 128


def test_methods_are_plans() -> None:
    layers = [Layer("w", (64, 64), "linear"), Layer("b", (64,), "bias")]
    assert {group.codec for group in method_plan(layers, "IntSGD").groups} == {"intsgd"}
    (group,) = method_plan(layers, "THC, uniform").compressed_groups
    assert [wrap.name for wrap in group.wrappers] == ["hadamard"]
