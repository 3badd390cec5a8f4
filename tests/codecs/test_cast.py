"""The cast codec: what rounding does, what the loss scale saves, and PyTorch's own hook beside it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st

from gradlab.codec import Context, Exchanged, Tensors, Training, exchange_group
from gradlab.codecs.cast import Cast
from gradlab.collectives import LockstepResult, Mean, run_lockstep, sum_in_rank_order
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from support.laws import law
from support.process_pool import ProcessPool

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


def exchange(dtype: str, grads: list[Tensors], scale: float = 1.0) -> list[LockstepResult[Exchanged]]:
    codec, context = Cast(Cast.Settings(dtype)), Context(0, len(grads), 0, training=Training(loss_scale=scale))
    return run_lockstep(
        [exchange_group(codec, each, {}, replace(context, rank=rank)) for rank, each in enumerate(grads)]
    )


def own(dtype: str, values: list[float], scale: float = 1.0) -> torch.Tensor:
    (result,) = exchange(dtype, [{"a": torch.tensor(values)}], scale)
    assert torch.equal(result.value.own["a"], result.value.mean["a"])  # one rank: the mean is its own
    return result.value.own["a"]


@law(st.sampled_from(list(DTYPES)), st.lists(st.floats(2.0**-14, 65000.0, width=32), min_size=1, max_size=20))
def test_the_relative_error_is_a_half_unit(dtype: str, values: list[float]) -> None:
    vector = torch.tensor(values)
    assert ((own(dtype, values) - vector).abs() <= ROUNDING[dtype] * vector).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_the_mean_travels_in_16_bits(dtype: str, kind: torch.dtype) -> None:
    """Requests, bytes and arithmetic: cast, times 1/N in 16 bits, summed in rank order, cast back."""
    shapes = {"a": (5, 7), "b": (), "c": (0, 3)}
    generator = torch.Generator().manual_seed(1)
    grads = [{n: torch.randn(s, generator=generator, dtype=kind) for n, s in shapes.items()} for _ in range(3)]
    requests = next(exchange_group(Cast(Cast.Settings(dtype)), grads[0], {}, Context(0, 3, 0)))
    assert isinstance(requests, tuple)
    assert [type(r) for r in requests] == [Mean] * 3
    assert {r.tensor.dtype for r in requests if isinstance(r, Mean)} == {DTYPES[dtype]}
    for rank, result in enumerate(exchange(dtype, grads)):
        assert result.payload_bytes == Cast().forecast([Layer(n, s) for n, s in shapes.items()], 3).payload == 2 * 36
        for name in shapes:
            narrow = [each[name].to(DTYPES[dtype]) for each in grads]
            assert torch.equal(result.value.mean[name], sum_in_rank_order(narrow).to(kind))
            assert torch.equal(result.value.own[name], narrow[rank].to(kind))
            assert result.value.mean[name].dtype == kind


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_at_random_it_is_one_of_the_two_beside_it(kind: torch.dtype) -> None:
    """Upwards as often as a value is near to the one above; what bfloat16 has stays, from zero to infinity."""
    at_random = Cast(Cast.Settings("bfloat16", stochastic=True))
    shares = torch.tensor([0.0, 2.0**-16, 0.3, 0.5, 0.9], dtype=kind)[:, None]
    for below, step in ((1.0, 2.0**-7), (-3.0, -(2.0**-6)), (2.0**-126, 2.0**-133), (0.0, 2.0**-133)):
        sent = at_random.apply((below + shares * step).expand(5, 20_000).contiguous()).decoded
        up = (sent - below) / step
        assert set(up.unique().tolist()) <= {0.0, 1.0}
        assert ((up.mean(1) - shares[:, 0]).abs() <= 5 * (shares[:, 0] / 20_000).sqrt()).all()
    exact = torch.tensor([0.0, -0.0, 1.0, -1.5, 2.0**-133, math.inf, -math.inf], dtype=kind)
    assert torch.equal(at_random.apply(exact).decoded, exact)
    nan = torch.tensor([0x7FFFFFFF, -1, 0x7F800001] * 100, dtype=torch.int32).view(torch.float32).to(kind)
    assert at_random.apply(nan).decoded.isnan().all()
    with pytest.raises(GradlabError, match="cast: setting stochastic = True, expected False with float16"):
        Cast(Cast.Settings(stochastic=True))


def test_overflow_is_infinite_and_reaches_every_rank() -> None:
    """No value is clipped to the largest float16."""
    assert own("float16", [65504.0, 65520.0, -1e6]).tolist() == [65504.0, math.inf, -math.inf]
    assert own("float16", [40000.0], scale=2.0).tolist() == [math.inf]
    assert own("bfloat16", [1e6], scale=2.0**100).isfinite().all()
    for result in exchange("float16", [{"a": torch.tensor([1.0])}, {"a": torch.tensor([7e4])}]):
        assert result.value.mean["a"].tolist() == [math.inf]
    (result,) = exchange("float16", [{"a": torch.tensor([math.nan])}])
    assert result.value.mean["a"].isnan().all()


def test_the_loss_scale_saves_small_gradients() -> None:
    """2^-27 is below float16; under a scale of 2^16 it passes exactly, and the scale is off again."""
    assert own("float16", [2.0**-27]).tolist() == [0.0]
    assert own("float16", [2.0**-27], scale=2.0**16).tolist() == [2.0**-27]
    assert own("bfloat16", [2.0**-27]).tolist() == [2.0**-27]


@law(st.integers(-10, 30), st.floats(-1.0, 1.0, width=32))
def test_executors_may_hand_over_scaled_gradients(exponent: int, value: float) -> None:
    """`exchange_group` takes the scale off, the codec puts it back: the mean is the scaled gradient's cast."""
    scale = 2.0**exponent
    scaled = torch.tensor([value * scale])
    coroutine = exchange_group(
        Cast(), {"a": scaled}, {}, Context(0, 1, 0, training=Training(loss_scale=scale)), scaled_by=scale
    )
    (result,) = run_lockstep([coroutine])
    assert torch.equal(result.value.mean["a"], scaled.half().float())


def test_a_sum_in_16_bits_grows_worse_with_ranks() -> None:
    """The largest error of means of values between 1 and 2, in half units of bfloat16."""
    errors = {}
    for ranks in (2, 64):
        generator = torch.Generator().manual_seed(ranks)
        grads = [{"a": (1 + torch.rand(500, generator=generator)).bfloat16().float()} for _ in range(ranks)]
        exact = torch.stack([own["a"] for own in grads]).mean(0)
        errors[ranks] = float((exchange("bfloat16", grads)[0].value.mean["a"] - exact).abs().max() * 2**8)
    assert errors[2] <= 1
    assert errors[64] > 4


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_pytorchs_fp16_hook(pool: ProcessPool, ranks: int) -> None:
    """Bit for bit at two ranks. At others the hook's buckets are summed in another order, and at three it divides by
    N where we multiply by 1/N: a few units of float16's rounding."""
    for result in pool.run("jobs.cast_tasks:against_torch_fp16", ranks, steps=5):
        assert result["layers"] == 2
        assert result["agree"]
        assert result["equal"] or ranks > 2
        assert result["largest"] < 2 * ranks


def test_what_overflows_on_the_way_is_no_step(pool: ProcessPool) -> None:
    """Every rank looks at what comes back as well: all gradients become NaN, and no residual holds an infinity."""
    for result in pool.run("jobs.cast_tasks:overflow_on_the_way", 2):
        assert result["finite"] == [True, False, True]
        assert result["nan"] == [[False, False], [True, True], [False, False]]
        assert result["unchanged"] == [False, True, False]


def test_dtype_is_one_of_two() -> None:
    with pytest.raises(GradlabError, match="cast: setting dtype = 'fp16', expected 'float16' or 'bfloat16'"):
        Cast(Cast.Settings("fp16"))
