"""Codes of slices against explicit loops over eqs. (3) and (5), and the segments that a ring cuts them into."""

from __future__ import annotations

import random
from zlib import crc32

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from gradlab.codecs.gradiveq import GradiVeQ
from gradlab.datasets.resnet import initialized
from gradlab.layout import layers_of
from gradlab.learning.slice_code import CodedSlices, SliceCode, SliceCoder, random_coordinates
from gradlab.workspace import Workspace
from support.laws import law

SIZE = 7


def drawn_code(seed: int, slices: int, reuse: int | None, coordinates: int) -> tuple[SliceCode, torch.Tensor]:
    """A code, and slices to code; float64."""
    draw, dimension = torch.Generator().manual_seed(seed), random.Random(seed).randint(0 if coordinates else 1, 4)
    bases = -(-slices // reuse) if reuse else 1
    basis = torch.linalg.qr(torch.randn(bases, SIZE, dimension, generator=draw).double()).Q
    chosen = random_coordinates(np.array([seed], np.uint64), bases, SIZE, coordinates) if coordinates else None
    return SliceCode(basis, reuse, chosen), torch.randn(slices, SIZE, generator=draw).double()


def splitmix(seed: int, count: int) -> list[int]:
    """SplitMix64 in whole numbers, from the mixed seed: Steele, Lea and Flood, OOPSLA 2014."""

    def mixed(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    return [mixed((mixed(seed) + place * 0x9E3779B97F4A7C15) % 2**64) for place in range(1, count + 1)]


def test_the_numbers_are_splitmix64s() -> None:
    """The first numbers of the state 0, as published implementations print them."""
    assert splitmix(0, 3) == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@law(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5), st.integers(1, 3), st.integers(1, 40), st.data())
def test_coordinates_drawn_together_are_those_with_the_smallest_numbers(
    seeds: list[int], bases: int, size: int, data: st.DataObject
) -> None:
    """What is drawn is part of the format that resumed runs rely on."""
    count = data.draw(st.integers(1, size))
    rows = []
    for seed in seeds:
        numbers = splitmix(seed, bases * size)
        for first in range(0, bases * size, size):
            of_basis = numbers[first : first + size]
            rows.append(sorted(sorted(range(size), key=of_basis.__getitem__)[:count]))
    assert random_coordinates(np.array(seeds, np.uint64), bases, size, count).tolist() == rows


def test_all_coordinates_are_drawn_as_often() -> None:
    """By chance alone, counts of 8 of 64 in 4,096 draws would give as large a chi-squared once in 10,000 times."""
    drawn = random_coordinates(np.arange(4096, dtype=np.uint64), 1, 64, 8)
    counts = torch.bincount(drawn.flatten(), minlength=64).double()
    expected = drawn.numel() / 64
    assert float(((counts - expected) ** 2 / expected).sum()) < 115


def explicit(code: SliceCode, m: int, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of slice m and what they stand for, one column and one coordinate at a time."""
    b = m // code.reuse if code.reuse else 0
    columns = [code.basis[b, :, j] for j in range(code.basis.shape[2])]
    codes = [column @ row for column in columns]
    decoded = sum((value * column for value, column in zip(codes, columns, strict=True)), torch.zeros_like(row))
    left = row - decoded
    for k in [] if code.coordinates is None else code.coordinates[b].tolist():
        codes.append(left[k])
        decoded = decoded + left[k] * torch.eye(SIZE, dtype=row.dtype)[k]
    return torch.stack(codes), decoded


cases = (st.integers(0, 999), st.integers(1, 9), st.sampled_from([None, 1, 2, 3]), st.integers(0, SIZE))


@law(*cases)
def test_codes_are_the_equations(seed: int, slices: int, reuse: int | None, coordinates: int) -> None:
    """Slice by slice under its own basis, wherever a run of slices begins; what is sent is not left."""
    code, rows = drawn_code(seed, slices, reuse, coordinates)
    pairs = [explicit(code, m, row) for m, row in enumerate(rows)]
    codes = code.encode(rows)
    torch.testing.assert_close(codes, torch.cat([one for one, _ in pairs]))
    assert {len(one) for one, _ in pairs} == {code.width}
    decoded = code.decode(codes, torch.empty_like(rows))
    torch.testing.assert_close(decoded, torch.stack([one for _, one in pairs]))
    assert (rows - decoded).square().sum() <= rows.square().sum() * (1 + 1e-12)  # a contraction
    first = seed % slices
    torch.testing.assert_close(code.encode(rows[first:], first), codes[code.width * first :])
    torch.testing.assert_close(
        code.decode(codes[code.width * first :], torch.empty_like(rows[first:]), first), decoded[first:]
    )


@law(*cases, st.integers(1, 12), st.booleans())
def test_segments_in_any_order_give_the_same_bits(
    seed: int, slices: int, reuse: int | None, coordinates: int, segments: int, whitening: bool
) -> None:
    """Every rank of a ring comes to the segments in another order; what it codes and decodes is what one pass gives."""
    code, rows = drawn_code(seed, slices, reuse, coordinates)
    mean = rows.flip(0) / 2 if whitening else None
    coded = CodedSlices(rows, code, mean, Workspace())
    coders = [SliceCoder(coded, segments, seed) for _ in range(2)]
    orders = [list(range(segments)), random.Random(seed).sample(range(segments), segments)]
    for coder, order in zip(coders, orders, strict=True):
        for segment in order:
            bounds = coder.bounds[segment]
            coder.receive(*bounds, coder.encode(*bounds).clone())
    assert torch.equal(coders[0].decoded(), coders[1].decoded())
    assert torch.equal(coders[0].own(), coders[0].decoded())
    centred = rows if mean is None else rows - mean
    expected = code.decode(code.encode(centred), torch.empty_like(rows)) + (rows * 0 if mean is None else mean)
    torch.testing.assert_close(coders[0].decoded(), expected)
    assert torch.equal(coded.decode(coded.encode()), expected)


def test_codes_that_are_missing_are_noticed() -> None:
    code, rows = drawn_code(0, 4, None, 2)
    coder = SliceCoder(CodedSlices(rows, code, None, Workspace()), 3, 0)
    coder.receive(*coder.bounds[0], coder.encode(*coder.bounds[0]))
    with pytest.raises(RuntimeError, match="codes have not been received"):
        coder.decoded()


@pytest.mark.parametrize("ranks", [4, 6, 8, 16])
@pytest.mark.parametrize("ratio", [8, 20])
def test_algorithm_1_has_equal_segments_over_all_fused_layers(ranks: int, ratio: int) -> None:
    """ResNet-32, its layers fused as one bucket, or as DDP's two: the longest segment is the equal share to 5 %."""
    model = initialized(channels=3, widths=(16, 32, 64), blocks=(5, 5, 5), classes=100, seed=0)
    layers = [layer for layer in layers_of(model) if layer.role == "convolution"]
    assert len(layers) == 31
    codec = GradiVeQ(GradiVeQ.Settings(ratio=ratio))
    lengths = []
    for layer in layers:
        size = codec.slice_size(layer)
        code = SliceCode(torch.zeros(1, size, size // ratio))
        slices = torch.zeros(layer.numel // size, size)
        coded = CodedSlices(slices, code, None, Workspace())
        coder = SliceCoder(coded, ranks, crc32(layer.name.encode()))
        lengths.append(torch.tensor([last - first for first, last in coder.bounds]))
    for fused in (lengths, lengths[:-4], lengths[-4:], lengths[:12]):
        total = torch.stack(fused).sum(0)
        assert int(total.max()) <= 1.05 * float(total.sum()) / ranks
        assert int(total.min()) > 0
