"""TernGrad, 1-bit SGD, natural compression, int8, int4, fp8 and MX, each against its paper in numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example
from hypothesis import strategies as st

from gradlab.codec import Codec, Compressor, Context, Tensors, exchange_group
from gradlab.codec.abilities import decompress
from gradlab.codecs.block_scaled import BlockScaled
from gradlab.codecs.natural import Natural
from gradlab.codecs.one_bit import OneBit, two_means, two_means_of_blocks
from gradlab.codecs.terngrad import TernGrad
from gradlab.coding.bits import unpack
from gradlab.coding.random_bits import RandomBits
from gradlab.collectives import run_lockstep
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.wrappers.error_feedback import ErrorFeedback
from gradlab.wrappers.two_way import TwoWay
from support.laws import law

SHAPES = {"w": (7, 30), "b": (11,)}
LAYERS = [Layer(name, shape) for name, shape in SHAPES.items()]
FOUR_BITS = BlockScaled(BlockScaled.Settings("int4"))
seeds = st.integers(0, 10_000)


def draw(rank: int, step: int = 0, dtype: torch.dtype = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}


def flat(tensors: Any) -> np.ndarray:
    return np.concatenate([tensors[name].numpy().reshape(-1) for name in SHAPES])


def exchange(codec: Codec, grads: list[Tensors], states: list[Tensors] | None = None, step: int = 0) -> Any:
    ranks = len(grads)
    states = states or [{}] * ranks
    return run_lockstep(
        [exchange_group(codec, grads[r], states[r], Context(r, ranks, step, "g")) for r in range(ranks)]
    )


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def returned(codec: Compressor, vector: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return decompress(codec, codec.compress(vector, generator(seed)), vector)


def uniform(like: torch.Tensor, seed: int) -> np.ndarray:
    """The numbers in (0, 1) that a codec draws from this seed, 16 bits each."""
    bits = RandomBits(generator(seed), torch.device("cpu"))
    return (bits.sixteen(like).double().numpy() + 2**15 + 0.5) / 2**16


# --- TernGrad -------------------------------------------------------------------------------------------------------


def ternary(g: np.ndarray, chance: np.ndarray, clip: float, s: float | None = None) -> np.ndarray:
    """Section 3.3's clipping, then eqs. (1) to (3) with the numbers that decide b."""
    if clip:
        limit = clip * np.sqrt(np.mean(np.square(g)))
        g = np.where(np.abs(g) > limit, np.sign(g) * limit, g)
    s = float(np.float32(np.abs(g).max(initial=0))) if s is None else s
    # b = 1 with probability |g| / s, on the side of g: the numbers that decide count from the other end for g > 0.
    probability = np.abs(g) / s if s else np.zeros_like(g)
    b = np.where(g > 0, 1 - chance, chance) < probability
    return s * np.sign(g) * b


@law(st.integers(1, 500), st.sampled_from([0.0, 1.0, 2.5]), seeds)
def test_terngrad_is_its_equations(numel: int, clip: float, seed: int) -> None:
    vector = torch.randn(numel, generator=generator(seed), dtype=torch.float64)
    codec = TernGrad(TernGrad.Settings(clip=clip))
    expected = ternary(vector.numpy(), uniform(vector, seed + 1), clip)
    received = returned(codec, vector, seed + 1).numpy()
    np.testing.assert_allclose(received, expected, rtol=1e-6, atol=1e-12)
    sizes = [part.nbytes for part in codec.compress(vector, generator(0))]
    assert sum(sizes) == codec.forecast([Layer("v", (numel,))], 1).payload


def test_terngrad_scales_each_layer_by_itself() -> None:
    grads = draw(0)
    grads["b"] *= 1000
    (result,) = exchange(TernGrad(), [grads])
    for name in SHAPES:
        (magnitude,) = set(result.value.own[name].abs().view(-1).tolist()) - {0.0}
        limit = min(float(grads[name].abs().max()), 2.5 * float(grads[name].double().square().mean().sqrt()))
        assert magnitude == pytest.approx(limit, rel=1e-6)


@pytest.mark.parametrize(("ranks", "clip"), [(1, 2.5), (2, 0.0), (3, 0.0), (3, 2.5), (130, 0.0)])
def test_a_shared_scale_adds_up_whole_numbers(ranks: int, clip: float) -> None:
    """The mean is that of the ranks' ternary vectors, also where a sum takes more than a byte (N = 130); s is the
    largest of all ranks', and what the ranks contributed lies on it."""
    codec = TernGrad(TernGrad.Settings(clip=clip, shared_scale=True))
    grads = [draw(rank) for rank in range(ranks)]
    results = exchange(codec, grads)
    for name in SHAPES:
        owns = torch.stack([result.value.own[name] for result in results])
        torch.testing.assert_close(results[0].value.mean[name], owns.mean(0), rtol=1e-5, atol=1e-6)
        clipped = [g[name].abs().max() for g in grads]
        if clip:
            limits = [clip * float(g[name].double().square().mean().sqrt()) for g in grads]
            clipped = [min(float(a), limit) for a, limit in zip(clipped, limits, strict=True)]
        assert float(owns.abs().max()) == pytest.approx(float(max(clipped)), rel=1e-5)
        assert len(owns.abs().unique()) <= 2
    forecast = codec.forecast(LAYERS, ranks).payload
    assert sum(result.payload_bytes for result in results) / ranks == pytest.approx(forecast)
    if ranks == 130:  # 0..260 takes 9 bits
        assert forecast < 8 + 2 * -(-221 // 8) + 2 * ranks + 9 * (-(-221 // 8) + ranks) / ranks


def test_under_a_shared_scale_each_rank_is_clipped_by_its_own_deviation() -> None:
    """Equal magnitudes are never clipped; rank 1's, a hundred times rank 0's, are the scale and come back whole."""
    signs = torch.randn(200, generator=generator()).sign()
    codec = TernGrad(TernGrad.Settings(clip=2.5, shared_scale=True))
    results = exchange(codec, [{"w": signs.clone()}, {"w": -100 * signs}])
    torch.testing.assert_close(results[1].value.own["w"], -100 * signs)


# --- 1-bit SGD ------------------------------------------------------------------------------------------------------


def one_bit(matrix: np.ndarray) -> np.ndarray:
    """Section 3.2.1, row by row (the paper's columns): the means of what is >= 0 and of what is < 0."""
    coded = np.zeros_like(matrix)
    for row, out in zip(matrix, coded, strict=True):
        for chosen in (row >= 0, row < 0):
            if chosen.any():
                out[chosen] = row[chosen].mean(dtype=np.float64)
    return coded


@law(st.integers(1, 9), st.integers(1, 60), seeds)
def test_one_bit_is_two_means_of_each_unit(rows: int, columns: int, seed: int) -> None:
    matrix = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    matrix[np.random.default_rng(seed + 1).random(matrix.shape) < 0.2] = 0.0
    (result,) = run_lockstep([exchange_group(OneBit(), {"w": torch.from_numpy(matrix)}, {}, Context(0, 1, 0))])
    by_unit = columns >= 16
    expected = one_bit(matrix if by_unit else matrix.reshape(1, -1)).reshape(matrix.shape)
    np.testing.assert_allclose(result.value.own["w"].numpy(), expected, rtol=1e-5, atol=1e-6)
    assert result.payload_bytes == 8 * (rows if by_unit else 1) + -(-rows * columns // 8)


@law(st.integers(1, 9), st.integers(1, 60), seeds)
def test_one_bit_has_the_same_means_for_large_blocks_as_for_small_ones(rows: int, columns: int, seed: int) -> None:
    """Blocks beyond the cache are averaged in pieces, by another function."""
    matrix = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    starts, sizes = np.arange(0, rows * columns, columns), np.full(rows, columns)
    expected = two_means_of_blocks(torch.from_numpy(matrix).view(-1), starts, sizes)
    np.testing.assert_allclose(two_means(torch.from_numpy(matrix)).numpy(), expected, rtol=1e-5, atol=1e-6)


def test_one_bit_both_ways_in_stripes_is_the_papers_aggregation() -> None:
    """Section 3.3: each rank quantizes, a stripe's owner sums and quantizes again, both with feedback. Four steps of
    three ranks on a matrix whose units are shared out."""
    codec = ErrorFeedback(TwoWay(OneBit()))
    ranks, shape = 3, (7, 30)
    states: list[Tensors] = [{}] * ranks
    residual, answered = np.zeros((ranks, *shape)), np.zeros(shape)
    for step in range(4):
        grads = [{"w": draw(rank, step, torch.float64)["w"]} for rank in range(ranks)]
        results = exchange(codec, grads, states, step)
        states = [result.value.state for result in results]
        asked = np.stack([grad["w"].numpy() for grad in grads]) + residual
        sent = np.stack([one_bit(matrix) for matrix in asked])
        residual = asked - sent
        summed = sent.mean(0) + answered
        answer = one_bit(summed)
        answered = summed - answer
        for result in results:
            np.testing.assert_allclose(result.value.mean["w"].numpy(), answer, atol=1e-6)


# --- natural compression --------------------------------------------------------------------------------------------


@law(st.integers(1, 400), st.integers(-90, 90), seeds)
def test_natural_compression_is_definition_1(numel: int, exponent: int, seed: int) -> None:
    """With the numbers drawn: up to the next power of two where they are below what is left of it."""
    vector = torch.randn(numel, generator=generator(seed)) * 2.0**exponent
    t = vector.double().numpy()
    low = 2.0 ** np.floor(np.log2(np.abs(t)))
    up = uniform(vector, seed + 1) + np.abs(t) / low - 1 >= 1
    expected = np.sign(t) * np.where(up, 2 * low, low)
    received = returned(Natural(), vector, seed + 1).double().numpy()
    np.testing.assert_array_equal(received, expected)


def test_natural_compression_at_the_ends_of_float32() -> None:
    """Powers of two are exact, zeros stay, what is not finite shows, and nothing finite becomes infinite."""
    exact = torch.tensor([0.0, -0.0, 1.0, -2.0, 2.0**-126, 2.0**127, -(2.0**-100)])
    for seed in range(20):
        assert torch.equal(returned(Natural(), exact, seed), exact)
    largest = torch.full((1000,), torch.finfo(torch.float32).max)
    assert bool((returned(Natural(), largest) == 2.0**127).all())
    tiny = torch.full((4000,), 2.0**-128)  # subnormal: 0 or 2^-126, a quarter of them
    received = returned(Natural(), tiny)
    assert set(received.tolist()) == {0.0, 2.0**-126}
    assert 0.2 < float((received > 0).double().mean()) < 0.3
    for bad in (torch.nan, torch.inf, -torch.inf):
        received = returned(Natural(), torch.tensor([1.0, bad, 4.0]))
        assert not received[1].isfinite()
        assert received[[0, 2]].tolist() == [1.0, 4.0]


# --- blocks with a scale --------------------------------------------------------------------------------------------


def float8_values(mantissa: int, bias: int, largest: float) -> np.ndarray:
    """All values of a format from 0 on, by the definition of a floating-point number."""
    values = [m * 2.0 ** (1 - bias - mantissa) for m in range(2**mantissa)]
    values += [(1 + m / 2**mantissa) * 2.0 ** (e - bias) for e in range(1, 2 * bias + 2) for m in range(2**mantissa)]
    return np.array(sorted(value for value in values if value <= largest))


FORMATS = {
    "int8": np.arange(128.0),
    "int4": np.arange(8.0),
    "float8_e4m3fn": float8_values(3, 7, 448.0),
    "float8_e5m2": float8_values(2, 15, 57344.0),
}


@law(st.sampled_from(sorted(FORMATS)), st.integers(1, 400), st.integers(1, 90), seeds)
def test_the_nearest_value_of_the_format_is_sent(dtype: str, numel: int, size: int, seed: int) -> None:
    vector = torch.randn(numel, generator=generator(seed)) ** 5
    received = returned(BlockScaled(BlockScaled.Settings(dtype, size)), vector).double().numpy()
    values = np.concatenate([-FORMATS[dtype][::-1], FORMATS[dtype]])
    for start in range(0, numel, size):
        block = vector[start : start + size].double().numpy()
        s = np.float64(np.float32(np.abs(block).max()) / np.float32(FORMATS[dtype][-1])) or 1.0
        gaps = np.abs(block[:, None] / s - values)
        sent = received[start : start + size] / s
        errors = np.abs(block / s - sent)
        # The scale is a float32: a tie may fall either way.
        assert (errors <= gaps.min(1) + 1e-6 * np.abs(block / s)).all()
        assert (np.abs(values - sent[:, None]).min(1) <= 1e-6 * np.abs(sent) + 1e-12).all()


exponents = st.one_of(st.integers(-150, -138), st.integers(-137, 120))


@law(st.sampled_from(["int8", "int4"]), st.integers(1, 300), exponents, st.integers(1, 100), seeds)
@example("int8", 300, -141, 100, 0)
@example("int4", 300, -147, 100, 0)
def test_codes_are_rounded_quotients_at_any_magnitude(
    dtype: str, numel: int, exponent: int, size: int, seed: int
) -> None:
    """Ties go to the even one, and no code leaves the format where a block's scale is below the normal numbers."""
    vector = torch.randn(numel, generator=generator(seed)) * 2.0**exponent
    vector[::3] = vector.abs().max() * torch.randint(-15, 15, vector[::3].shape, generator=generator(seed)) / 14
    codec = BlockScaled(BlockScaled.Settings(dtype, size))
    scales, packed = codec.compress(vector, generator())
    blocks = np.arange(numel) // size
    largest = np.array([np.abs(vector.numpy()[blocks == block]).max() for block in range(blocks[-1] + 1)])
    ends = {"int8": 127, "int4": 7}[dtype]
    np.testing.assert_array_equal(scales.numpy(), largest / np.float32(ends))
    divisors = np.where(scales == 0, np.float32(1), scales.numpy())[blocks]
    expected = np.rint(vector.numpy() / divisors).clip(-ends, ends)
    codes = packed.view(torch.int8) if dtype == "int8" else unpack(packed, 4, 0, numel).to(torch.int8) - 8
    np.testing.assert_array_equal(codes.numpy(), expected)


@law(st.sampled_from(sorted(FORMATS)), st.integers(1, 300), seeds)
def test_at_random_it_is_one_of_the_two_beside_it(dtype: str, numel: int, seed: int) -> None:
    vector = torch.randn(numel, generator=generator(seed)) ** 3
    received = returned(BlockScaled(BlockScaled.Settings(dtype, 50, stochastic=True)), vector, seed).double().numpy()
    values = np.concatenate([-FORMATS[dtype][:0:-1], FORMATS[dtype]])
    for start in range(0, numel, 50):
        block = vector[start : start + 50].double().numpy()
        s = np.float64(np.float32(np.abs(block).max()) / np.float32(FORMATS[dtype][-1])) or 1.0
        scaled = block / s
        above = np.searchsorted(values, scaled).clip(1, len(values) - 1)
        sent = received[start : start + 50] / s
        near = np.minimum(np.abs(sent - values[above]), np.abs(sent - values[above - 1]))
        assert (near <= 1e-5 * np.maximum(1, np.abs(scaled))).all()


def test_a_fixed_scale_cuts_off_at_the_ends() -> None:
    """LoCo's: round(s x), -8 to 7 in four bits; one scale travels, and says what was not finite."""
    codec = BlockScaled(BlockScaled.Settings("int4", scale=2.0))
    vector = torch.tensor([0.3, -0.2, 3.5, 3.9, -4.0, -9.0, 100.0])
    assert returned(codec, vector).tolist() == [0.5, 0.0, 3.5, 3.5, -4.0, -4.0, 3.5]
    scales, codes = codec.compress(torch.randn(1000, generator=generator()), generator())
    assert scales.tolist() == [0.5]
    assert codes.numel() == 500
    for bad in (torch.nan, torch.inf, -torch.inf):
        assert not returned(codec, torch.tensor([1.0, bad])).isfinite().all()


# --- scales of one byte ---------------------------------------------------------------------------------------------

MX = {
    "mxfp8": FORMATS["float8_e4m3fn"],
    "mxfp8_e5m2": FORMATS["float8_e5m2"],
    "mxfp4": np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]),  # by code, as all of them
}
of_mx = st.sampled_from(sorted(MX))


def made(dtype: str, **settings: Any) -> BlockScaled:
    return BlockScaled(BlockScaled.Settings(dtype, **settings))


def nearest_values(values: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The nearest of a format's values to each place; of two as near, that with the even code; else the last one."""
    gaps = np.abs(np.abs(places)[:, None] - values)
    odd = np.arange(len(values)) % 2
    return np.copysign(values[np.lexsort((np.broadcast_to(odd, gaps.shape), gaps), axis=1)[:, 0]], places)


@law(of_mx, st.integers(1, 200), st.one_of(st.integers(-150, -110), st.integers(-109, 120)), seeds)
@example("mxfp4", 33, -126, 0)
@example("mxfp8", 200, -119, 0)
def test_mx_is_the_specifications_conversion(dtype: str, numel: int, exponent: int, seed: int) -> None:
    """OCP MX 1.0, section 6.3: 2^(floor(log2 max) - emax), values over it to the nearest or cut off. Bit for bit."""
    vector = torch.randn(numel, generator=generator(seed)) * 2.0**exponent
    vector[::3] = vector.abs().max() * torch.randint(-64, 65, vector[::3].shape, generator=generator(seed)) / 64
    scales, packed = made(dtype).compress(vector, generator())
    received, emax = returned(made(dtype), vector).double().numpy(), math.frexp(MX[dtype][-1])[1] - 1
    assert (scales.dtype, len(scales)) == (torch.uint8, -(-numel // 32))
    for block, code in enumerate(scales.tolist()):
        values = vector[32 * block : 32 * block + 32].double().numpy()
        largest = np.abs(values).max()
        assert code == max(0, math.frexp(largest)[1] - 1 - emax + 127 if largest else 0)
        expected = nearest_values(MX[dtype], values / 2.0 ** (code - 127)) * 2.0 ** (code - 127)
        np.testing.assert_array_equal(received[32 * block : 32 * block + 32], expected)
    if hasattr(torch, "float8_e8m0fnu") and dtype != "mxfp4":  # torch's own reading of both
        element = torch.float8_e4m3fn if dtype == "mxfp8" else torch.float8_e5m2
        factors = scales.view(torch.float8_e8m0fnu).double().repeat_interleave(32)[:numel]
        np.testing.assert_array_equal(received, (packed.view(element).double() * factors).numpy())


def test_e2m1_has_its_eight_magnitudes_and_their_codes() -> None:
    """Sixteenths from -7 to 7, ties among them; two codes to a byte, the first in the low bits."""
    places = torch.arange(-112, 113) / 16
    blocks = torch.cat([torch.tensor([7.0] * len(places))[:, None], places[:, None].expand(-1, 31)], 1)
    scales, packed = made("mxfp4").compress(blocks.reshape(-1), generator())
    assert set(scales.tolist()) == {127}
    codes = unpack(packed, 4).view(-1, 32)[:, 1].numpy()
    values = np.concatenate([MX["mxfp4"], -MX["mxfp4"]])[codes]
    np.testing.assert_array_equal(values, nearest_values(MX["mxfp4"], places.numpy()))
    assert (codes[places == -1.5], codes[places == 0.5], codes[places == 6.0]) == (11, 1, 7)
    assert packed[:16].tolist() == [0xF7, *[0xFF] * 15]


@law(st.integers(1, 300), st.integers(-100, 100), seeds)
def test_nvfp4_has_scales_in_e4m3_and_a_float32(numel: int, exponent: int, seed: int) -> None:
    """NVIDIA, appendix C: t = max / (6 * 448), E4M3(max of 16 / 6 t), values over both to the nearest."""
    vector = torch.randn(numel, generator=generator(seed)) ** 5 * 2.0**exponent
    unit, scales, _ = made("nvfp4").compress(vector, generator())
    received, largest = returned(made("nvfp4"), vector).double().numpy(), vector.abs().max().double()
    assert float(unit) == pytest.approx(float(largest) / 2688, rel=1e-6)
    for block, code in enumerate(scales.view(torch.float8_e4m3fn).double().tolist()):
        values = vector[16 * block : 16 * block + 16].double().numpy()
        wanted = np.abs(values).max() / 6 / float(unit)
        assert np.abs(FORMATS["float8_e4m3fn"] - wanted).min() >= abs(code - wanted) - 1e-6 * wanted
        s = float(np.float32(code) * np.float32(unit.item()))
        sent = received[16 * block : 16 * block + 16]
        gaps = np.abs(np.abs(values)[:, None] - s * MX["mxfp4"]).min(1)
        assert (np.abs(values - sent) <= gaps + 1e-6 * np.abs(values)).all()


@law(st.sampled_from([*sorted(MX), "nvfp4"]), st.integers(1, 300), st.integers(-100, 100), seeds)
def test_at_random_scales_of_one_byte_cut_nothing_off(dtype: str, numel: int, exponent: int, seed: int) -> None:
    """Each place becomes one of the two values beside it, also at the end of the format."""
    vector = torch.randn(numel, generator=generator(seed)) ** 3 * 2.0**exponent
    codec = made(dtype, stochastic=True)
    *numbers, _ = codec.compress(vector, generator(seed))
    values, size = MX.get(dtype, MX["mxfp4"]), codec.blocks.size
    s = codec._factors(numbers).double().repeat_interleave(size)[:numel].numpy()
    places, sent = (np.abs(one.double().numpy()) / s for one in (vector, returned(codec, vector, seed)))
    assert places.max() <= values[-1] * (1 + 1e-6)
    above = np.searchsorted(values, places).clip(1, len(values) - 1)
    near = np.minimum(np.abs(sent - values[above]), np.abs(sent - values[above - 1]))
    assert (near <= 1e-5 * values[above]).all()


@pytest.mark.parametrize("dtype", [*sorted(MX), "nvfp4"])
@pytest.mark.parametrize("chance", [False, True])
def test_scales_of_one_byte_at_the_ends(dtype: str, chance: bool) -> None:
    """Zeros, subnormal numbers, the largest ones, none, float64; and what is not finite shows, in its block."""
    codec, size = made(dtype, stochastic=chance), made(dtype).blocks.size
    for numel in (0, 1, size - 1, size + 1):
        assert not returned(codec, torch.zeros(numel)).any()
        payload = codec.compress(torch.ones(numel), generator())
        assert sum(part.nbytes for part in payload) == codec.compressed_bytes(numel)
    for kind in (torch.float32, torch.float64):
        for value in (1e-36, 1e-20, 1.0, 1e38 if chance else 3.4e38):
            received = returned(codec, torch.tensor([value, -value], dtype=kind))
            assert received.dtype == kind
            assert (received.double().abs() / value - 1).abs().max() <= 1 / 3
    assert returned(codec, torch.tensor([1e-44, -1e-44])).abs().max() <= 2.0**-127
    assert not returned(codec, torch.tensor([1e-60], dtype=torch.float64)).any()
    for bad in (torch.nan, torch.inf, -torch.inf, -torch.nan):
        received = returned(codec, torch.cat([torch.ones(size), torch.tensor([1.0, bad, 4.0])]))
        assert not received[size:].isfinite().any()
        assert received[:size].isfinite().all() == (dtype != "nvfp4")  # whose float32 is of the vector


def test_formats_with_blocks_of_their_own_refuse_others() -> None:
    assert made("mxfp4", block_size=32).blocks.size == made("mxfp4").blocks.size == 32
    with pytest.raises(GradlabError, match="block_size = 64, expected the default or 16, as nvfp4 has it"):
        made("nvfp4", block_size=64)
    with pytest.raises(GradlabError, match=r"scale = 2\.0, expected None with mxfp8"):
        made("mxfp8", scale=2.0)


# --- LoCo -----------------------------------------------------------------------------------------------------------


def test_loco_is_algorithm_1() -> None:
    """h = g + e; d = Q(h); e' = (1 - beta) e + beta (h - d), and zero after every T_c-th iteration; with a float32
    buffer, as its int8 is a rounding of its own."""
    beta, reset = 0.25, 3
    codec = ErrorFeedback(
        BlockScaled(BlockScaled.Settings("int4", scale=1.5)),
        ErrorFeedback.Settings(decay=1 - beta, reset_steps=reset, step_size_ratio=False),
    )
    states: list[Tensors] = [{}, {}]
    error = np.zeros((2, 221))
    for step in range(7):
        grads = [draw(rank, step, torch.float64) for rank in range(2)]
        results = exchange(codec, grads, states, step)
        states = [result.value.state for result in results]
        h = np.stack([flat(grad) for grad in grads]) + error
        d = (np.round(h * 1.5).clip(-8, 7)) / 1.5
        error = (1 - beta) * error + beta * (h - d) if (step + 1) % reset else np.zeros_like(error)
        np.testing.assert_allclose(flat(results[0].value.mean), d.mean(0), atol=1e-7)


@pytest.mark.parametrize("numel", [1, 2, 50])
def test_terngrad_does_not_clip_equal_values_to_nothing(numel: int) -> None:
    """A deviation from their mean would be zero: a layer of one element could never move."""
    for value in (0.3, -1e-30, 1e30):
        vector = torch.full((numel,), value)
        assert torch.equal(returned(TernGrad(), vector), vector)
