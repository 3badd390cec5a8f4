"""Packed codes: nothing is lost, parts can be cut off and joined, and a GPU's way gives the CPU's bytes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import strategies as st

from gradlab.coding.bits import (
    PIECE,
    Packer,
    cut,
    fold_by_numpy,
    fold_by_torch,
    join,
    pack,
    packed_bytes,
    unfold_by_numpy,
    unfold_by_torch,
    unpack,
)
from support.laws import law

WIDTHS = [*range(1, 9), 12, 22]


def codes_of(bits: int, numel: int, seed: int) -> torch.Tensor:
    dtype = torch.uint8 if bits <= 8 else torch.int64
    return torch.randint(2**bits, (numel,), generator=torch.Generator().manual_seed(seed), dtype=dtype)


@law(st.sampled_from(WIDTHS), st.integers(0, 300), st.integers(0, 40), st.integers(0, 10_000))
def test_any_part_can_be_unpacked_by_itself(bits: int, numel: int, first: int, seed: int) -> None:
    codes = codes_of(bits, numel, seed)
    packed, start = pack(codes, bits), min(8 * first, numel // 8 * 8)
    assert len(packed) == packed_bytes(numel, bits)
    assert torch.equal(unpack(packed, bits)[:numel], codes)
    for stop in (start, (start + numel + 1) // 2, numel):
        assert torch.equal(unpack(packed, bits, start, stop), codes[start:stop])


@law(st.sampled_from(WIDTHS), st.lists(st.integers(0, 12), max_size=5), st.integers(0, 30), st.integers(0, 10_000))
def test_parts_are_cut_and_joined_as_if_packed_alone(bits: int, groups: list[int], rest: int, seed: int) -> None:
    bounds = [0]
    for group in groups:
        bounds.append(bounds[-1] + 8 * group)
    bounds.append(bounds[-1] + rest)
    codes = codes_of(bits, bounds[-1], seed)
    packed = pack(codes, bits)
    parts = cut(packed, bits, bounds)
    alone = [pack(codes[a:b], bits) for a, b in pairwise(bounds)]
    assert all(torch.equal(part, one) for part, one in zip(parts, alone, strict=True))
    assert torch.equal(join(parts, bits), packed)


@pytest.mark.parametrize("bits", WIDTHS)
def test_pieces_are_parts_of_one_whole(bits: int) -> None:
    """More than is worked on at a time, written in parts of another size."""
    codes = codes_of(bits, PIECE + 8 * 1000 + 3, 1)
    packer = Packer(len(codes), bits, torch.device("cpu"))
    for start in range(0, len(codes), 8 * 5000):
        packer.write(start, codes[start : start + 8 * 5000])
    assert torch.equal(packer.packed, pack(codes, bits))
    assert torch.equal(unpack(packer.packed, bits)[: len(codes)], codes)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_gpu_packs_as_a_cpu_does(width: int) -> None:
    field = codes_of(width, 8 * 333, 2)
    packed = fold_by_torch(field, width)
    assert torch.equal(packed, torch.from_numpy(fold_by_numpy(field.numpy(), width)))
    assert torch.equal(unfold_by_torch(packed, width), field)
    assert torch.equal(torch.from_numpy(unfold_by_numpy(packed.numpy(), width)), field)
