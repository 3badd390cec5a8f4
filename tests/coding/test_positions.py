"""Codings of positions: there and back, their sizes, the smallest of them, and bytes that are not theirs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from gradlab.coding.bits import pack, packed_bytes, unpack
from gradlab.coding.positions import CODINGS, decode, encode, in_order, index_bytes, varies
from gradlab.errors import GradlabError
from support.laws import law


def drawn(numel: int, count: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.sort(np.random.default_rng(seed).choice(numel, count, replace=False)).astype(np.int64))


few = st.integers(0, 3000).flatmap(lambda numel: st.tuples(st.just(numel), st.integers(0, numel)))


@law(few, st.sampled_from(CODINGS), st.integers(0, 1000), examples=300)
def test_positions_come_back(sizes: tuple[int, int], coding: str, seed: int) -> None:
    numel, count = sizes
    positions = drawn(numel, count, seed)
    if not in_order(coding, count, numel):
        positions = positions[torch.randperm(count, generator=torch.Generator().manual_seed(seed))]
    encoded = encode(positions, numel, coding)
    assert encoded.dtype == torch.uint8
    assert torch.equal(decode(encoded, count, numel, coding), positions)
    if not varies(coding):
        assert len(encoded) == index_bytes(coding, count, numel)


@law(few, st.integers(0, 1000))
def test_the_smallest_is_the_smallest(sizes: tuple[int, int], seed: int) -> None:
    numel, count = sizes
    positions = drawn(numel, count, seed)
    lengths = {coding: len(encode(positions, numel, coding)) for coding in CODINGS}
    assert lengths["fixed"] == min(lengths[coding] for coding in ("raw", "packed", "bitmap"))
    assert lengths["smallest"] == min(lengths[coding] for coding in ("raw", "packed", "bitmap", "deflate")) + 1


@pytest.mark.parametrize("numel", [1, 2, 255, 256, 257, 65536, 65537, 2**22, 2**22 + 1, 2**31 + 5, 2**40])
def test_positions_take_as_many_bits_as_the_last_one(numel: int) -> None:
    """At the edges of a byte, and beyond what 32 bits hold."""
    positions = torch.tensor([0, numel // 3, numel - 1]).unique()
    count = len(positions)
    for coding in ("raw", "packed", "deflate"):
        assert torch.equal(decode(encode(positions, numel, coding), count, numel, coding), positions)
    assert index_bytes("packed", 8, numel) == math.ceil(math.log2(numel))
    assert index_bytes("raw", 8, numel) == (32 if numel <= 2**31 else 64)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
def test_deflate_comes_near_the_entropy_of_random_positions(density: float) -> None:
    """Within a tenth of n H(density) bits, where plain positions take twice as much; clustered ones take less."""
    numel = 500_000
    count = int(density * numel)
    entropy = -numel * (density * math.log2(density) + (1 - density) * math.log2(1 - density)) / 8
    forecast = index_bytes("deflate", count, numel)
    assert entropy < forecast < 1.15 * entropy
    assert len(encode(drawn(numel, count, 5), numel, "deflate")) == pytest.approx(forecast, rel=0.02)
    clustered = torch.cat([drawn(numel // 10, count // 2, 1), drawn(numel // 10, count // 2, 2) + numel // 2])
    assert len(encode(clustered, numel, "deflate")) < 0.85 * forecast


@law(st.integers(1, 40), st.integers(0, 200), st.integers(0, 1000))
def test_codes_of_any_width_are_packed(bits: int, numel: int, seed: int) -> None:
    codes = torch.from_numpy(np.random.default_rng(seed).integers(0, 2**bits, numel))
    narrow = codes.to(torch.uint8) if bits <= 8 else codes
    packed = pack(narrow, bits)
    assert len(packed) == packed_bytes(numel, bits)
    assert torch.equal(unpack(packed, bits)[:numel], narrow)


@pytest.mark.parametrize(
    ("encoded", "coding", "message"),
    [
        ([], "smallest", "coding [], expected one of 0 to 3"),
        ([9, 1], "smallest", "coding [9]"),
        ([], "deflate", "0 bytes each"),
        ([9, 1, 2], "deflate", "9 bytes each"),
        ([1, 1, 7, 3], "deflate", "not what was compressed"),
        ([1, 0, 7, 3], "deflate", "2 bytes, expected 3"),
        ([1, 2, 7, 3, 1], "deflate", "expected a byte 0 or 1"),
        ([1, 0, 7, 3, 1, 1], "deflate", "1 bytes more"),
    ],
)
def test_other_bytes_are_refused(encoded: list[int], coding: str, message: str) -> None:
    with pytest.raises(GradlabError) as refused:
        decode(torch.tensor(encoded, dtype=torch.uint8), 3, 100, coding)
    assert message in str(refused.value)


def test_deflated_bytes_of_another_number_of_positions_are_refused() -> None:
    """Nor does a small message unfold into a large one."""
    encoded = encode(drawn(10_000, 100, 0), 10_000, "deflate")
    for count in (99, 101):
        with pytest.raises(GradlabError, match=r"expected (99|101|a byte 0 or 1)|more than"):
            decode(encoded, count, 10_000, "deflate")
    with pytest.raises(GradlabError, match="1 to 1"):
        decode(encoded, 100, 50, "deflate")


@pytest.mark.parametrize("coding", ["raw", "packed", "bitmap", "deflate"])
def test_positions_beyond_the_end_and_other_numbers_of_them_are_refused(coding: str) -> None:
    """They would be written to, on a GPU without a word of whose they are."""
    beyond = encode(torch.tensor([3, 200]), 256, coding)
    with pytest.raises(GradlabError, match=r"expected (19 for )?2 below 150"):
        decode(beyond, 2, 150, coding)
    if coding == "bitmap":
        with pytest.raises(GradlabError, match="positions: 2, expected 1 below 256"):
            decode(beyond, 1, 256, coding)
