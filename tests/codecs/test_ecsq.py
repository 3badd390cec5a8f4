"""Entropy-coded scalar quantization against its definition, and the control of its step."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from gradlab.codec import Context, Exchanged, Table, Tensors, exchange_group
from gradlab.codec.abilities import decompress
from gradlab.codecs.ecsq import ECSQ
from gradlab.coding.level_values import DEAD_ZONE
from gradlab.collectives import LockstepResult, Request, observed, run_lockstep
from gradlab.errors import GradlabError
from gradlab.wrappers import two_way
from gradlab.wrappers.error_feedback import ErrorFeedback
from gradlab.wrappers.two_way import TwoWay
from support.laws import law

SHAPES = {"w": (40, 300), "b": (70,), "v": (8000,)}


def draw(rank: int, step: int = 0, scale: float = 1.0) -> Tensors:
    """Layers whose standard deviations differ by a factor of 20."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    widths = zip(SHAPES.items(), (1.0, 5.0, 0.25), strict=True)
    return {name: scale * width * torch.randn(shape, generator=generator) for (name, shape), width in widths}


def exchange(codec: ECSQ, states: list[Tensors], step: int, scale: float = 1.0) -> list[LockstepResult[Exchanged]]:
    contexts = [Context(rank, len(states), step, "g") for rank in range(len(states))]
    grads = [draw(rank, step, scale) for rank in range(len(states))]
    rows = zip(grads, states, contexts, strict=True)
    return run_lockstep([exchange_group(codec, own, state, context) for own, state, context in rows])


def received(payload: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The same bytes elsewhere: what a codec has sent itself it need not decode."""
    return tuple(part.clone() for part in payload)


@law(
    st.integers(1, 400),
    st.floats(0.01, 30.0),
    st.integers(-100, 100),
    st.integers(0, 999),
    st.booleans(),
)
def test_a_value_is_its_level_and_the_middle_of_that_level(
    numel: int, step: float, exponent: int, seed: int, double: bool
) -> None:
    dtype = torch.float64 if double else torch.float32
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 2.0**exponent
    step = float(np.float32(step * 2.0**exponent))
    codec = ECSQ(ECSQ.Settings(step=step))
    decoded = decompress(codec, received(codec.compress(x, torch.Generator())), x).double().numpy()
    scaled = np.abs(x.double().numpy()) / step
    levels = np.maximum(0, np.floor(scaled - DEAD_ZONE) + 1)
    edge = np.abs(scaled - DEAD_ZONE - np.round(scaled - DEAD_ZONE)) < 1e-5  # rounding decides there
    expected = np.zeros(numel)
    for which in (levels == 1, levels == 2, levels >= 3):
        if which.any():
            expected[which] = (levels[which] + (scaled - levels)[which].mean()) * step
    expected = np.copysign(expected, x.numpy())
    # The middle of a level is known to half a 128th of a step; a value on an edge may move it further.
    allowed = step * (1 / 256 + 1e-4 + edge.sum())
    assert (np.abs(decoded - expected)[~edge] <= allowed).all()
    assert np.square(decoded - x.double().numpy()).sum() <= np.square(x.double().numpy()).sum() * (1 + 1e-5)
    payload = codec.compress(x, torch.Generator())
    assert torch.equal(decompress(codec, payload, x), decompress(codec, received(payload), x))


def kinds(numel: int, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(numel, generator=generator), torch.rand(numel, generator=generator)
    return {"Gaussian": x, "1 %": x * (y < 0.01), "heavy tails": x / y.clamp_min(1e-3), "signs": x.sign()}


@pytest.mark.parametrize(
    ("bits", "kind"),
    [(0.1, "Gaussian"), (8.0, "Gaussian"), (2.0, "1 %"), (0.1, "heavy tails"), (2.0, "signs")],
)
def test_every_message_takes_the_bits_asked_for(bits: float, kind: str) -> None:
    """The first one, and those after the scale of a gradient has changed, with and without feedback; never more, and
    fewer only where the values have no more: of 1 % a third of a bit, of signs alone one bit or none."""
    bare, numel = ECSQ(ECSQ.Settings(bits=bits)), 30_000
    most = 0.3 if kind == "1 %" else math.inf
    for codec in (bare, ErrorFeedback(bare)):
        state, counted = dict[str, torch.Tensor](), []
        for step, scale in enumerate([1.0, 1e6, 1e6, 1.0, 1.0]):
            context = Context(0, 1, step, "g")
            row = exchange_group(codec, {"w": scale * kinds(numel, step)[kind]}, state, context)
            (result,) = run_lockstep([row])
            state = result.value.state
            counted.append(8 * result.payload_bytes / numel)
        assert max(counted) < 1.15 * bits
        if kind != "signs":
            assert counted[0] == pytest.approx(bits, rel=0.03) or counted[0] > most
            assert min(counted) > min(bits, most) / 1.15


@pytest.mark.parametrize("bits", [0.1, 3.0])
def test_ranks_take_the_bits_asked_for_each_by_its_own_step(bits: float) -> None:
    """Layers of different variances, in a gradient that grows a hundredfold; all ranks come to one mean."""
    codec, states, numel = ECSQ(ECSQ.Settings(bits=bits)), [{}, {}, {}], sum(map(math.prod, SHAPES.values()))
    counted = []
    for step in range(8):
        results = exchange(codec, states, step, 1.0 if step < 4 else 100.0)
        states = [result.value.state for result in results]
        assert states[0]["w/step"].dtype == torch.float64
        assert all(torch.equal(r.value.mean["w"], results[0].value.mean["w"]) for r in results)
        counted.append([8 * result.payload_bytes / numel for result in results])
    assert counted[0] == pytest.approx([bits] * 3, rel=0.06)  # two numbers to a byte or one: there sizes jump
    assert np.abs(np.array(counted) / bits - 1).max() < 0.1
    assert np.mean(counted) == pytest.approx(bits, rel=0.03)


@law(st.sampled_from(["Gaussian", "1 %", "heavy tails"]), st.integers(-80, 80), st.integers(0, 99), examples=20)
def test_a_scale_of_two_to_the_k_changes_nothing_but_the_scale(kind: str, k: int, seed: int) -> None:
    x, codec = kinds(3000, seed)[kind], ECSQ(ECSQ.Settings(bits=1.0))
    done, scaled = codec.apply(x), codec.apply(x * 2.0**k)
    assert scaled.payload_bytes == done.payload_bytes
    assert torch.equal(scaled.decoded, done.decoded * 2.0**k)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_take_the_bits_asked_for(dtype: torch.dtype) -> None:
    for bits in (0.25, 4.0):
        done = ECSQ(ECSQ.Settings(bits=bits)).apply(kinds(30_000, 0)["Gaussian"].to(dtype))
        assert 8 * done.payload_bytes / 30_000 == pytest.approx(bits, rel=0.1)
        assert done.relative_error == pytest.approx({0.25: 0.87, 4.0: 0.085}[bits], rel=0.1)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_values_that_are_all_alike_take_next_to_nothing(value: float) -> None:
    done = ECSQ(ECSQ.Settings(bits=0.1)).apply(torch.full((100_000,), value))
    assert 8 * done.payload_bytes / 100_000 < 0.02
    assert done.relative_error < 0.01


def test_feedback_does_not_make_bits_swing() -> None:
    """Of a gradient that never changes, few values now are many in the next iteration: a step that follows by half of
    their logarithm swings between a third and three times the bits."""
    draw = torch.Generator().manual_seed(0)
    tails = [
        scale * torch.randn(20_000, generator=draw) * torch.randn(20_000, generator=draw).exp() for scale in (1, 9)
    ]
    gradient, state, counted = torch.cat(tails), dict[str, torch.Tensor](), []
    codec = ErrorFeedback(ECSQ(ECSQ.Settings(bits=0.25)))
    for iteration in range(60):
        (result,) = run_lockstep([exchange_group(codec, {"w": gradient}, state, Context(0, 1, iteration, "g"))])
        state = result.value.state
        counted.append(8 * result.payload_bytes / len(gradient))
    assert np.mean(counted[30:]) == pytest.approx(0.25, rel=0.15)
    assert np.std(counted[30:]) < 0.6 * 0.25


def test_ranks_miss_as_much_as_asked_for() -> None:
    codec, states = ECSQ(ECSQ.Settings(error=0.4)), [{}, {}]
    missed = []
    for step in range(24):
        results = exchange(codec, states, step)
        states = [result.value.state for result in results]
        for rank, result in enumerate(results):
            x, own = (torch.cat([one[n].reshape(-1) for n in SHAPES]) for one in (draw(rank, step), result.value.own))
            missed.append(float((x - own).norm() / x.norm()))
    assert np.mean(missed[12:]) == pytest.approx(0.4, rel=0.02)


@pytest.mark.parametrize("bits", [0.25, 1.2, 3.0])
def test_one_step_is_near_reverse_water_filling(bits: float) -> None:
    """Gaussian layers of different variances: at most 0.3 bits above the rate-distortion function of these variances
    (a uniform quantizer with entropy coding costs 0.25 bits at high rates), and the coder's 3 percent."""
    x = torch.cat([s * torch.randn(60_000, generator=torch.Generator().manual_seed(3)) for s in (4.0, 1.0, 0.25)])
    codec = ECSQ(ECSQ.Settings(bits=bits)).for_layers(Table.of_shapes([(60_000,)] * 3))
    (message,) = codec.compress(x, torch.Generator())
    missed = float((decompress(codec, received((message,)), x) - x).square().mean())
    variances, low, high = np.array([16.0, 1.0, 0.0625]), 0.0, 16.0
    for _ in range(60):
        level = (low + high) / 2
        low, high = (level, high) if np.minimum(level, variances).mean() < missed else (low, level)
    least = float(np.maximum(0, np.log2(variances / level) / 2).mean())
    assert least <= 8 * len(message) / len(x) <= 1.03 * least + 0.3


def test_nothing_to_send_and_what_is_not_finite() -> None:
    codec = ECSQ()
    for value in (0.0, 1e-45, 3e38):
        x = torch.full((300,), value)
        done = codec.apply(x)
        assert torch.allclose(done.decoded, x, rtol=1e-2)
    # No step that can be sent is small enough for them: nothing is.
    (message,) = codec.compress(torch.full((300,), 1e-60, dtype=torch.float64), torch.Generator())
    assert len(message) < 40
    x = torch.randn(300, generator=torch.Generator().manual_seed(0))
    for bad, fixed in itertools.product((math.nan, math.inf, -math.inf), (None, 1e-30, 1.0)):
        x[7] = bad
        assert ECSQ(ECSQ.Settings(step=fixed)).apply(x).decoded.isnan().all()
        (one_bad,) = codec.compress(torch.tensor([0.0, bad]), torch.Generator())
        assert decompress(codec, received((one_bad,)), torch.zeros(2)).isnan().all()
    # A rank without a gradient has no step yet, and one of zeros goes on with what it had.
    one, other = torch.zeros(1000), torch.randn(1000, generator=torch.Generator().manual_seed(1))
    contexts = [Context(rank, 2, 0, "g") for rank in range(2)]
    first = run_lockstep([exchange_group(codec, {"w": g}, {}, c) for g, c in zip((one, other), contexts, strict=True)])
    assert float(first[0].value.state["w/step"]) == 0
    assert float(first[1].value.state["w/step"]) > 0
    again = run_lockstep(
        [exchange_group(codec, {"w": one}, r.value.state, c) for r, c in zip(first, contexts, strict=True)]
    )
    assert float(again[1].value.state["w/step"]) > 0
    empty = run_lockstep(
        [exchange_group(codec, {"w": one}, {}, contexts[0]), exchange_group(codec, {"w": one}, {}, contexts[1])]
    )
    assert float(empty[0].value.state["w/step"]) == 0


def test_an_empty_shard_leaves_the_step() -> None:
    """As of a layer of fewer elements than ranks, from another step than zero."""
    codec, empty = ECSQ(), torch.zeros(0)
    payload = codec.compress(empty, torch.Generator())
    assert codec.next_step(*payload, 0) is None
    assert decompress(codec, received(payload), empty).numel() == 0


def test_a_size_that_cannot_be_reached_leaves_the_step_where_it_can_return() -> None:
    """Ten values cannot fill a message, however small the step. After 80 such iterations dense gradients are coded in
    the bits asked for as soon as the step has doubled as often as the largest level has digits."""
    codec, numel, state = ECSQ(ECSQ.Settings(bits=0.25)), 20_000, {}
    draw = torch.Generator().manual_seed(0)
    few = torch.zeros(numel)
    few[::2000] = torch.randn(10, generator=draw)
    counted = []
    for iteration in range(130):
        x = few if iteration < 80 else torch.randn(numel, generator=draw)
        (result,) = run_lockstep([exchange_group(codec, {"w": x}, state, Context(0, 1, iteration, "g"))])
        state = result.value.state
        counted.append(8 * result.payload_bytes / numel)
    assert np.mean(counted[-10:]) == pytest.approx(0.25, rel=0.05)


def test_feedback_keeps_what_is_not_sent() -> None:
    codec, states = ErrorFeedback(ECSQ(ECSQ.Settings(bits=0.2))), [{}, {}]
    sent = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    given = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(20):
        results = exchange(codec, states, step)  # type: ignore[arg-type]
        states = [result.value.state for result in results]
        for name in SHAPES:
            sent[name] += results[0].value.mean[name]
            given[name] += (draw(0, step)[name] + draw(1, step)[name]) / 2
    for name in SHAPES:
        left = (states[0][f"{name}/residual"] + states[1][f"{name}/residual"]) / 2
        torch.testing.assert_close(sent[name] + left, given[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("least", [1, 8192])
def test_both_ways_messages_together_have_the_size_asked_for(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has one step for all shards, whose layers differ by a factor of 20, and sends nothing to ranks that do not
    serve. What servers keep is not lost: what was applied and what all have kept is what was given."""
    monkeypatch.setattr(two_way, "_LEAST", least)
    ranks, bits, numel = 3, 0.5, sum(map(math.prod, SHAPES.values()))
    codec, states = ErrorFeedback(TwoWay(ECSQ(ECSQ.Settings(bits=bits)))), [dict[str, torch.Tensor]()] * ranks
    left = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    counted, to_servers = [], []
    for step in range(20):
        seen: list[Request] = []
        contexts = [Context(rank, ranks, step, "g") for rank in range(ranks)]
        rows = [
            exchange_group(codec, draw(rank, step), state, context)
            for rank, (state, context) in enumerate(zip(states, contexts, strict=True))
        ]
        results = run_lockstep([observed(rows[0], seen), *rows[1:]])
        states = [result.value.state for result in results]
        assert all(torch.equal(r.value.mean["w"], results[0].value.mean["w"]) for r in results)
        counted.append([8 * result.payload_bytes / numel for result in results])
        to_servers.append([tensor.nbytes for tensor in seen[0].tensors])  # type: ignore[union-attr]
        for name in SHAPES:
            left[name] += sum(draw(rank, step)[name] for rank in range(ranks)) / ranks - results[0].value.mean[name]
    rates = np.mean(counted[10:], 0)
    assert (rates if least == 1 else rates.mean()) == pytest.approx(bits * (1 + 1 / ranks), rel=0.06)
    assert np.mean(np.sum(to_servers[10:], 1)) == pytest.approx(bits * numel / 8, rel=0.05)
    assert sum(size > 0 for size in to_servers[-1]) == (ranks if least == 1 else 1)  # all, or at most half
    if least == 1:
        assert min(np.mean(to_servers[10:], 0)) < bits * numel / 8 / ranks / 2  # of the layer that is small
    for name, shape in SHAPES.items():
        of_ranks = sum(state[f"{name}/residual"] for state in states) / ranks
        of_servers = torch.cat([state[f"{name}/server_residual"] for state in states]).view(shape)
        torch.testing.assert_close(of_ranks + of_servers, left[name], rtol=1e-4, atol=2e-3)


def test_a_damaged_message_is_refused() -> None:
    codec, x = ECSQ(), torch.randn(500, generator=torch.Generator().manual_seed(0))
    (message,) = codec.compress(x, torch.Generator())
    with pytest.raises(GradlabError, match="ecsq: a message of 3 bytes, expected 11 or more"):
        decompress(codec, (message[:3],), x)
    with pytest.raises(GradlabError, match="ecsq: a message of 3 bytes, expected 11 or more"):
        codec.next_step(message[:3], 500)
    with pytest.raises(GradlabError, match="levels: "):
        decompress(codec, (message[:-1],), x)


def test_an_error_and_a_step_together_are_refused() -> None:
    with pytest.raises(GradlabError, match=r"ecsq: setting error = 0.1, expected None where the step is set"):
        ECSQ.Settings(error=0.1, step=1.0)
