"""Wrappers that keep residuals around codecs that do not contract: these get a multiple of their input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradlab import codecs
from gradlab.codec import Batch, Codec, Context, Exchanged, Tensors, exchange_group
from gradlab.codec.contraction import inner_product, next_zeta
from gradlab.codec.wrapper import Wrapper, adopted, needs_scaling, resize
from gradlab.codecs.random_k import RandomK
from gradlab.collectives import run_lockstep
from gradlab.layout import Layer
from gradlab.wrappers.error_feedback import ErrorFeedback
from gradlab.wrappers.momentum_correction import MomentumCorrection
from gradlab.wrappers.two_way import TwoWay

RANKS, SHAPES = 3, {"a": (24, 40), "b": (100,)}
EXPANDING: dict[str, tuple[str, dict[str, Any]]] = {
    "qsgd, l2, 4 bits": ("qsgd", {"bits": 4, "norm": "l2"}),
    "qsgd, l2, 2 bits": ("qsgd", {"bits": 2, "norm": "l2"}),
    "qsgd, 1 bit": ("qsgd", {"bits": 1}),
    "terngrad": ("terngrad", {}),
    "terngrad, shared": ("terngrad", {"shared_scale": True, "clip": 0.0}),
    "random_k": ("random_k", {"density": 0.1, "unbiased": True}),
}
CONTRACTING: dict[str, tuple[str, dict[str, Any]]] = {
    "topk": ("topk", {"density": 0.1}),
    "sign": ("sign", {}),
    "natural": ("natural", {}),
    "qsgd, 8 bits": ("qsgd", {"bits": 8}),
    "powersgd": ("powersgd", {"rank": 1}),
    "random_k": ("random_k", {"density": 0.1}),
    "cast": ("cast", {}),
}
expanding = pytest.mark.parametrize("case", EXPANDING.values(), ids=EXPANDING)


def gradients(step: int, rank: int) -> Tensors:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(shape, generator=generator) + 0.3 for name, shape in SHAPES.items()}


def run(codec: Codec, steps: int, at: Callable[[int, list[Exchanged]], None] | None = None) -> list[list[Tensors]]:
    """The ranks' states after each step."""
    states: list[Tensors] = [{} for _ in range(RANKS)]
    history = []
    for step in range(steps):
        runs = [
            exchange_group(codec, gradients(step, rank), states[rank], Context(rank, RANKS, step, "g"))
            for rank in range(RANKS)
        ]
        results = [result.value for result in run_lockstep(runs)]
        if at is not None:
            at(step, results)
        states = [result.state for result in results]
        history.append(states)
    return history


def norm(state: Tensors, what: str = "residual") -> float:
    return sum(float(value.norm()) ** 2 for key, value in state.items() if key.rpartition("/")[2] == what) ** 0.5


@expanding
def test_decoded_and_residual_are_gradient_and_old_residual(case: tuple[str, dict[str, Any]]) -> None:
    before: list[Tensors] = [{} for _ in range(RANKS)]

    def holds(step: int, results: list[Exchanged]) -> None:
        for rank, result in enumerate(results):
            for name, gradient in gradients(step, rank).items():
                due = gradient + before[rank].get(f"{name}/residual", 0.0)
                torch.testing.assert_close(
                    result.own[name] + result.state[f"{name}/residual"], due, rtol=1e-5, atol=1e-5
                )
        mean = {name: torch.stack([result.own[name] for result in results]).mean(0) for name in SHAPES}
        for name, value in mean.items():
            torch.testing.assert_close(results[0].mean[name], value, rtol=1e-5, atol=1e-5)
        before[:] = [result.state for result in results]

    run(ErrorFeedback(codecs.make(case[0], **case[1])), 4, holds)


@expanding
def test_the_residual_stays_bounded_where_it_would_grow(case: tuple[str, dict[str, Any]]) -> None:
    """Within Stich and Karimireddy's bound, ||e|| <= 2 / delta max ||g|| for delta = 1 / zeta; no growth."""
    history = run(ErrorFeedback(codecs.make(case[0], **case[1])), 20)
    zeta = float(history[-1][0]["a/zeta"])
    largest = max(float(torch.cat([g.reshape(-1) for g in gradients(step, 0).values()]).norm()) for step in range(20))
    norms = [norm(states[0]) for states in history]
    assert zeta > 1
    assert max(norms) < 2 * zeta * largest
    assert max(norms[10:]) < 2 * max(norms[:10])


@pytest.mark.parametrize("around", [lambda codec: ErrorFeedback(TwoWay(codec)), MomentumCorrection])
def test_both_ends_stay_bounded(around: Callable[[Codec], Wrapper]) -> None:
    codec = around(codecs.make("qsgd", bits=2, norm="l2"))
    history = run(codec, 30)
    kept = [
        max(norm(state, what) for state in states for what in ("residual", "server_residual")) for states in history
    ]
    assert max(kept[15:]) < 2 * max(kept[:15])


@pytest.mark.parametrize("case", CONTRACTING.values(), ids=CONTRACTING)
@pytest.mark.parametrize("wrapper", [ErrorFeedback, MomentumCorrection])
def test_a_contraction_is_left_as_it_is(case: tuple[str, dict[str, Any]], wrapper: type[Wrapper]) -> None:
    """No bit differs from contraction = "none", and no state is added."""
    scaled, plain = (
        run(wrapper(codecs.make(case[0], **case[1]), wrapper.Settings(contraction=c)), 3)[-1]
        for c in ("measured", "none")
    )
    for one, other in zip(scaled, plain, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_feedback_takes_the_factor_of_a_sample_out_again() -> None:
    """random_k times numel / k, scaled, is random_k: zeta is numel / k."""
    scaled, plain = (ErrorFeedback(RandomK(RandomK.Settings(0.1, unbiased))) for unbiased in (True, False))
    for one, other in zip(run(scaled, 5), run(plain, 5), strict=True):
        assert float(one[0]["a/zeta"]) == pytest.approx(10.0, rel=1e-4)
        for name in SHAPES:
            torch.testing.assert_close(one[0][f"{name}/residual"], other[0][f"{name}/residual"], rtol=1e-4, atol=1e-4)


@expanding
def test_nothing_is_added_to_the_message(case: tuple[str, dict[str, Any]]) -> None:
    sizes = []
    for contraction in ("measured", "none"):
        codec = ErrorFeedback(codecs.make(case[0], **case[1]), ErrorFeedback.Settings(contraction=contraction))
        runs = [exchange_group(codec, gradients(0, rank), {}, Context(rank, RANKS, 0, "g")) for rank in range(RANKS)]
        sizes.append([result.payload_bytes for result in run_lockstep(runs)])
    assert sizes[0] == sizes[1]


def test_what_was_measured_is_left_behind_with_other_settings_and_ranks() -> None:
    old, new = (ErrorFeedback(TwoWay(codecs.make("qsgd", bits=bits, norm="l2"))) for bits in (4, 2))
    states = run(old, 2)[-1]
    assert {"a/zeta", "a/server_zeta"} <= states[0].keys()
    kept = adopted(new, new.kept([Layer(*one) for one in SHAPES.items()], 0, RANKS, "g"), states[0])
    assert kept.keys() == states[0].keys() - {"a/zeta", "a/server_zeta"}
    assert not any(key.endswith("zeta") for key in resize(old, states, 1, 2, "sum"))


def test_zeta_follows_at_once_upwards_and_slowly_downwards() -> None:
    """||C||^2 / <x, C> of C = c x is c; without a direction in common, or without numbers, zeta stays."""
    x, two = torch.arange(1.0, 5.0), torch.tensor(2.0)
    assert float(next_zeta(two, [x], [x * 3.0])) == 6.0
    assert float(next_zeta(two, [x], [x * 0.75])) == pytest.approx(1.95)
    assert float(next_zeta(torch.tensor(1.0), [x], [x * 0.5])) == 1.0
    for sent in (-x, torch.zeros(4), x * torch.nan, x * torch.inf):
        assert float(next_zeta(two, [x], [sent])) == 2.0
    assert float(next_zeta(two, [torch.zeros(4)], [torch.zeros(4)])) == 2.0


def test_inner_products_are_exact_for_whole_numbers_and_finite_for_large_ones() -> None:
    a, b = torch.arange(100_000.0), torch.arange(100_000.0).flip(0)
    assert float(inner_product(a, b)) == sum(k * (99_999 - k) for k in range(100_000))
    assert float(inner_product(torch.full((4,), 1e30), torch.full((4,), 1e30))) == pytest.approx(4e60)


def test_a_first_gradient_of_zeros_measures_nothing() -> None:
    codec = ErrorFeedback(codecs.make("qsgd", bits=2, norm="l2"))
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    (result,) = run_lockstep([exchange_group(codec, zeros, {}, Context(0, 1, 0, "g"))])
    assert float(result.value.state["a/zeta"]) == 1.0
    (after,) = run_lockstep([exchange_group(codec, gradients(1, 0), result.value.state, Context(0, 1, 1, "g"))])
    assert float(after.value.state["a/zeta"]) > 5


def test_what_is_scaled() -> None:
    for name, settings in EXPANDING.values():
        assert needs_scaling(codecs.make(name, **settings), Batch.of(gradients(1, 0)).table)
    for name, settings in CONTRACTING.values():
        assert not needs_scaling(codecs.make(name, **settings), Batch.of(gradients(1, 0)).table)
