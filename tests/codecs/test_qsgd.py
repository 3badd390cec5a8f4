"""QSGD against its definition, its lemma, and the properties the engine relies on."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from scipy import stats

from gradlab.codec import Context, Table, Tensors, exchange_group
from gradlab.codec.abilities import decompress
from gradlab.codecs.qsgd import QSGD, norms_of_rows
from gradlab.coding.bits import pack, unpack
from gradlab.coding.random_bits import RandomBits
from gradlab.collectives import run_lockstep
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.wrappers.error_feedback import ErrorFeedback
from gradlab.wrappers.two_way import TwoWay
from support.laws import law

WIDTHS = list(range(1, 9))
CASES = [(bits, norm) for bits in WIDTHS for norm in ("max", "l2") if (bits, norm) != (1, "l2")]
FALSE_ALARM = 1e-6  # of each statistical test below, over the choice of its seed


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=generator(1000 + seed))


def quantizer(**settings: Any) -> QSGD:
    return QSGD(QSGD.Settings(**settings))


def decoded(codec: QSGD, vector: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return decompress(codec, codec.compress(vector, generator(seed)), vector)


def draws(bits: int, norm: str, vector: torch.Tensor, count: int, seed: int = 0) -> torch.Tensor:
    """(count, numel): C(x) again and again, each time as one bucket; float64."""
    codec = quantizer(bits=bits, norm=norm, bucket_size=vector.numel())
    return decoded(codec, vector.repeat(count), seed).view(count, -1).double()


def grid(bits: int, norm: str, vector: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The definition, in float64: neighbouring values (numel,) each below and above, and the step between them."""
    x = vector.double()
    size = float(x.abs().max() if norm == "max" else x.square().sum().sqrt())
    step = 2 * size if bits == 1 else size / (2 ** (bits - 1) - 1)
    low = ((x + size) / step).floor() * step - size
    return low, (low + step).clamp(max=size), step


# --- one vector -----------------------------------------------------------------------------------------------------


@law(st.sampled_from(CASES), st.integers(1, 40), st.integers(0, 2**31))
def test_every_element_becomes_a_neighbour_on_the_grid(case: tuple[int, str], numel: int, seed: int) -> None:
    vector = normal(numel, seed)
    low, high, step = grid(*case, vector)
    (got,) = draws(*case, vector, 1, seed)
    off = torch.minimum((got - low).abs(), (got - high).abs())
    rounding = 4 * 2**-24 * float(vector.double().norm())  # of a norm and of its product with a level, in float32
    assert float(off.max()) <= 1e-5 * step + rounding


@pytest.mark.parametrize(
    ("bits", "norm", "kind"), [(bits, norm, f"float{32 << at % 2}") for at, (bits, norm) in enumerate(CASES)]
)
def test_unbiased(bits: int, norm: str, kind: str) -> None:
    """The mean of 8000 draws: the squared deviations, in standard errors, are chi-square. False alarm: 1e-6."""
    vector, count = torch.cat([normal(45), torch.tensor([0.0, 1e-3, -1e-3])]).to(getattr(torch, kind)), 8000
    low, high, _ = grid(bits, norm, vector)
    variance = (vector - low) * (high - vector)
    deviation = draws(bits, norm, vector, count, seed=bits).mean(0) - vector
    uncertain = variance > 1e-5 * variance.max()
    assert int(uncertain.sum()) >= 40
    squares = deviation[uncertain].square() * count / variance[uncertain]
    assert stats.chi2.sf(float(squares.sum()), int(uncertain.sum())) > FALSE_ALARM
    assert (deviation[~uncertain].abs() < 1e-5 * vector.abs().max()).all()


def vectors() -> dict[str, torch.Tensor]:
    spikes = torch.zeros(256)
    spikes[[3, 77]] = torch.tensor([2.0, -1.0])
    return {
        "normal": normal(256),
        "equal": torch.ones(256),
        "spikes": spikes,
        "heavy": normal(256) * normal(256, 1).exp() ** 2,
        "one": torch.tensor([-3.0]),
    }


@pytest.mark.parametrize("what", vectors())
@pytest.mark.parametrize("bits", [2, 3, 5, 8])
def test_lemma_3_1(bits: int, what: str) -> None:
    """Variance min(n / s^2, sqrt(n) / s) ||x||^2 and s (s + sqrt(n)) non-zeros, met by the mean of 2000 draws.

    Where equality is possible the mean may exceed the bound by 5 standard errors (false alarm below 1e-6).
    """
    vector, count = vectors()[what], 2000
    n, s = vector.numel(), 2 ** (bits - 1) - 1
    got = draws(bits, "l2", vector, count, seed=bits)
    errors = (got - vector).square().sum(1) / float(vector.square().sum())
    slack = 5 * float(errors.std()) / math.sqrt(count) + 1e-9
    assert float(errors.mean()) <= min(n / s**2, math.sqrt(n) / s) + slack
    assert float((got != 0).sum(1).double().mean()) <= s * (s + math.sqrt(n))


@pytest.mark.parametrize("what", vectors())
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_variance_under_the_max_norm(bits: int, what: str) -> None:
    """No error exceeds a step, and their mean square is at most n / (4 s^2) max|x|^2, plus 5 standard errors."""
    vector, s = vectors()[what], 2 ** (bits - 1) - 1
    step = float(vector.abs().max()) / s
    errors = draws(bits, "max", vector, 2000, seed=bits) - vector
    assert float(errors.abs().max()) <= step * (1 + 1e-5)
    squares = errors.square().sum(1)
    slack = 5 * float(squares.std()) / math.sqrt(2000) + 1e-9
    assert float(squares.mean()) <= vector.numel() * step**2 / 4 + slack


def expected_relative_error(bits: int, norm: str, vector: torch.Tensor) -> float:
    """E||C(x) - x||^2 / ||x||^2 from the definition, no draws."""
    low, high, _ = grid(bits, norm, vector)
    return float(((vector - low) * (high - vector)).sum() / vector.double().square().sum())


def test_where_it_is_no_contraction() -> None:
    """512 Gaussian elements: above 1 up to 2 bits with max and 4 with l2, below 1 from there on."""
    vector = normal(512)
    assert [expected_relative_error(bits, "max", vector) > 1 for bits in WIDTHS] == [True] * 2 + [False] * 6
    assert [expected_relative_error(bits, "l2", vector) > 1 for bits in WIDTHS[1:]] == [True] * 3 + [False] * 4
    measured = (draws(4, "max", vector, 500) - vector).square().sum(1).mean() / vector.square().sum()
    assert float(measured) == pytest.approx(expected_relative_error(4, "max", vector), rel=0.05)


DIVERGING = [(2, "l2", True), (3, "l2", True), (4, "max", False), (8, "l2", False)]


@pytest.mark.parametrize(("bits", "norm", "grows"), DIVERGING)
def test_feedback_around_no_contraction_diverges(bits: int, norm: str, grows: bool) -> None:
    """A constant gradient, 100 steps, not scaled: the residual stays below the gradient, or leaves it behind."""
    unscaled = ErrorFeedback.Settings(contraction="none")
    codec, vector = ErrorFeedback(quantizer(bits=bits, norm=norm), unscaled), normal(1024)
    state: Tensors = {}
    for step in range(100):
        (result,) = run_lockstep([exchange_group(codec, {"a": vector}, state, Context(0, 1, step))])
        state = result.value.state
    ratio = float(state["a/residual"].norm() / vector.norm())
    assert ratio > 10 if grows else ratio < 1


def test_chance_is_independent_of_elements_ranks_and_steps() -> None:
    """Correlation of rounding errors between neighbours, ranks and steps: below 5 / sqrt(numel), false alarm 6e-7."""
    vector, codec = normal(2**16), quantizer(bits=4)

    def error(rank: int, step: int) -> torch.Tensor:
        return decoded_with(codec, vector, Context(rank, 2, step, "g").random.of_rank()) - vector

    first = error(0, 0)
    pairs = [(first[1:], first[:-1]), (first, error(1, 0)), (first, error(0, 1))]
    for one, other in pairs:
        assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 5 / math.sqrt(len(one))
    assert torch.equal(first, error(0, 0))


def decoded_with(codec: QSGD, vector: torch.Tensor, source: torch.Generator) -> torch.Tensor:
    return decompress(codec, codec.compress(vector, source), vector)


def test_sixteen_random_bits_are_uniform() -> None:
    """Chi-square over both bytes of 2^18 draws; false alarm 1e-6 each."""
    drawn = RandomBits(generator(5), torch.device("cpu")).sixteen(torch.empty(2**18 - 1))
    assert drawn.dtype == torch.int16
    for byte in drawn.view(torch.uint8).view(-1, 2).T:
        assert stats.chisquare(torch.bincount(byte.int(), minlength=256).numpy()).pvalue > FALSE_ALARM


# --- zeros, extremes and what is not finite -------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "norm"), CASES)
def test_zero_buckets_come_back_as_zero(bits: int, norm: str) -> None:
    vector = torch.cat([torch.zeros(100), normal(100), torch.zeros(50)])
    got = decoded(quantizer(bits=bits, norm=norm, bucket_size=100), vector)
    assert not got[:100].any()
    assert not got[200:].any()
    assert got[100:200].any()


@pytest.mark.parametrize(("place", "bad"), [(0, math.nan), (57, math.inf), (219, -math.inf)])
@pytest.mark.parametrize(("bits", "norm"), [(1, "max"), (2, "l2"), (4, "max"), (8, "l2")])
def test_what_is_not_finite_stays_so(bits: int, norm: str, bad: float, place: int) -> None:
    """The whole bucket, and no other; also once averaged with a finite rank's."""
    vector, codec = normal(220), quantizer(bits=bits, norm=norm, bucket_size=50)
    vector[place] = bad
    got = decoded(codec, vector)
    bucket = slice(place // 50 * 50, place // 50 * 50 + 50)
    assert not got[bucket].isfinite().any()
    assert int(got.isfinite().sum()) == 220 - len(got[bucket])
    both = [exchange_group(codec, {"a": v}, {}, Context(rank, 2, 0)) for rank, v in enumerate([vector, normal(220)])]
    results = run_lockstep(both)
    assert all(torch.equal(r.value.mean["a"].isfinite(), got.isfinite()) for r in results)


def test_a_norm_beyond_float32_is_not_silent() -> None:
    assert not decoded(quantizer(norm="l2"), torch.full((512,), 3e38)).isfinite().any()
    assert decoded(quantizer(norm="max"), torch.full((512,), 3e38)).isfinite().all()
    assert not decoded(quantizer(), torch.full((512,), 1e39, dtype=torch.float64)).isfinite().any()


@law(st.sampled_from(CASES), st.integers(-80, 100), st.integers(1, 300))
def test_powers_of_two_pass_through(case: tuple[int, str], exponent: int, numel: int) -> None:
    """C(2^k x) = 2^k C(x) bit for bit: no square over- or underflows, and a loss scale changes nothing."""
    codec, vector = quantizer(bits=case[0], norm=case[1], bucket_size=64), normal(numel)
    assert torch.equal(decoded(codec, vector * 2.0**exponent), decoded(codec, vector) * 2.0**exponent)


@law(st.integers(1, 40), st.integers(1, 90))
def test_the_l2_norm(rows: int, columns: int) -> None:
    matrix = normal(rows * columns).view(rows, columns)
    torch.testing.assert_close(norms_of_rows(matrix), matrix.double().norm(dim=1).float(), rtol=1e-6, atol=0)


# --- bits and bytes -------------------------------------------------------------------------------------------------


@law(st.integers(1, 8), st.integers(0, 200), st.integers(0, 2**31))
def test_packing_loses_nothing(bits: int, numel: int, seed: int) -> None:
    codes = torch.randint(2**bits, (numel,), generator=generator(seed), dtype=torch.uint8)
    kept = codes.clone()
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (math.ceil(numel / 8) * bits,)
    assert torch.equal(unpack(packed, bits)[:numel], kept)
    assert torch.equal(codes, kept)


@law(st.integers(1, 8), st.integers(0, 3000), st.integers(1, 700))
def test_forecast_is_what_is_sent(bits: int, numel: int, bucket_size: int) -> None:
    codec = quantizer(bits=bits, bucket_size=bucket_size)
    payload = codec.compress(normal(numel), generator())
    assert sum(part.nbytes for part in payload) == codec.forecast([Layer("a", (numel,))], 2).payload
    assert decoded(codec, normal(numel)).shape == (numel,)


def test_many_buckets_and_a_large_one() -> None:
    """More than is worked on at a time: every bucket has its own norm, and nothing is left out."""
    for bucket_size, numel in [(512, 2**19 + 700), (2**19, 2**20 + 5)]:
        vector = normal(numel)
        got = decoded(quantizer(bits=8, bucket_size=bucket_size), vector)
        for part, sent in zip(vector.split(bucket_size), got.split(bucket_size), strict=True):
            assert float((sent - part).abs().max()) <= float(part.abs().max()) / 127 * (1 + 1e-5)


GOLDEN = {
    (1, "max"): "5c089182e30e7c2d",
    (2, "max"): "609aed28513cdb03",
    (3, "l2"): "55c3679831856ffd",
    (4, "max"): "2e06b7727ceaf8e9",
    (4, "l2"): "75f81bebdb834288",
    (7, "max"): "077124611c690dac",
    (8, "l2"): "cb0a5a3dffd767bd",
}


@pytest.mark.parametrize(("bits", "norm"), GOLDEN)
def test_the_same_bits_on_every_machine(bits: int, norm: str) -> None:
    """A vector that needs no random numbers, under one generator: the sha256 of payload and decoded values."""
    vector = ((torch.arange(3000) * 7919 % 1009) - 504) / 64
    codec = quantizer(bits=bits, norm=norm)
    payload = codec.compress(vector, generator(11))
    digest = hashlib.sha256()
    for part in (*payload, decompress(codec, payload, vector)):
        digest.update(part.numpy().tobytes())
    assert digest.hexdigest()[:16] == GOLDEN[bits, norm]


def test_l2_norms_are_rounded_correctly() -> None:
    """Bit for bit numpy's, whose root is IEEE's on every processor; torch's own in float32 is not."""
    rows = torch.randn(4000, 8, generator=generator(3)) * 100
    largest = rows.abs().amax(1, keepdim=True).numpy()
    squares = np.square(rows.numpy() / largest)
    while (half := squares.shape[1] // 2) > 0:
        squares = squares[:, :half] + squares[:, half:]
    expected = largest[:, 0] * np.sqrt(squares[:, 0])
    assert np.array_equal(norms_of_rows(rows).numpy(), expected)


def test_the_mean_is_the_mean_of_what_ranks_sent() -> None:
    codec, shapes = (
        quantizer(bits=5, bucket_size=32, aggregation="gather"),
        {"a": (7, 9), "b": (), "c": (0, 3), "d": (50,)},
    )
    grads = [{n: normal(math.prod(s), rank).reshape(s) for n, s in shapes.items()} for rank in range(3)]
    context = Context(0, 3, 4, "g")
    results = run_lockstep([exchange_group(codec, grads[r], {}, replace(context, rank=r)) for r in range(3)])
    for name in shapes:
        mean = torch.stack([result.value.own[name] for result in results]).mean(0)
        torch.testing.assert_close(results[1].value.mean[name], mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("server", ["sharded", "rank"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_two_way(server: str, ranks: int) -> None:
    """Shards are whole buckets; the forecast holds; ranks agree; 8 bits there and back are close to the mean."""
    codec = TwoWay(quantizer(bits=8, bucket_size=64), TwoWay.Settings(server=server))
    assert all(start % 64 == 0 for start, _ in codec.shards(Table.of_shapes([(700,), (300,)]), ranks) if start < 1000)
    grads = [{"a": normal(700, rank), "b": normal(300, rank + 9)} for rank in range(ranks)]
    results = run_lockstep([exchange_group(codec, grads[r], {}, Context(r, ranks, 0)) for r in range(ranks)])
    forecast = codec.forecast([Layer("a", (700,)), Layer("b", (300,))], ranks).payload
    assert sum(result.payload_bytes for result in results) / ranks == forecast
    for name in grads[0]:
        mean = torch.stack([of_rank[name] for of_rank in grads]).mean(0)
        assert all(torch.equal(result.value.mean[name], results[0].value.mean[name]) for result in results)
        assert float((results[0].value.mean[name] - mean).norm() / mean.norm()) < 0.05


def test_one_bit_goes_by_the_largest_magnitude() -> None:
    with pytest.raises(GradlabError, match="qsgd: setting norm = 'l2', expected 'max' at 1 bit"):
        QSGD.Settings(bits=1, norm="l2")


@law(
    st.sampled_from([(1, "max"), (4, "max"), (2, "l2")]),
    st.integers(1, 400),
    st.integers(1, 90),
)
def test_a_bucket_is_scaled_as_if_it_were_alone(case: tuple[int, str], numel: int, bucket_size: int) -> None:
    """Also the last one, which may be shorter: its norm is that of its own elements."""

    def scales(elements: torch.Tensor, bucket: int) -> torch.Tensor:
        codec = quantizer(bits=case[0], norm=case[1], bucket_size=bucket)
        return codec.compress(elements, generator())[0]

    vector = normal(numel, numel)
    alone = [scales(part, len(part)) for part in vector.split(bucket_size)]
    assert torch.equal(scales(vector, bucket_size), torch.cat(alone))
