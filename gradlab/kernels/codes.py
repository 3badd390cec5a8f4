"""Elements of a vector as packed codes of a few bits, and back: encoded at once, and averaged over ranks at once.

A pair of functions in `gradlab.kernels.formats` says what a code stands for. Packing is that of `gradlab.coding.bits`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import triton
import triton.language as tl

from gradlab.coding.bits import packed_bytes
from gradlab.kernels import Form, formats, launch
from gradlab.kernels.blocks import REDUCTIONS, BlockTable, block_at, magnitude_bits, of_parts

_TILE = 1024


@triton.jit
def _philox_round(a, b, c, d, k0, k1):
    m0 = tl.full(a.shape, 0xD2E7470EE14C6C93, tl.uint64)
    m1 = tl.full(a.shape, 0xCA5A826395121157, tl.uint64)
    return tl.umulhi(m1, c) ^ b ^ k0, m1 * c, tl.umulhi(m0, a) ^ d ^ k1, m0 * a


@triton.jit
def philox(seed, counters):
    """Return four words each of numpy's Philox 4x64-10 with this key, whose counters begin at 0."""
    a = (counters + 1).to(tl.uint64)
    b = a * 0
    c, d = b, b
    k0, k1 = b + seed.to(tl.uint64), b
    for _ in tl.static_range(10):
        a, b, c, d = _philox_round(a, b, c, d, k0, k1)
        k0 += tl.full(a.shape, 0x9E3779B97F4A7C15, tl.uint64)
        k1 += tl.full(a.shape, 0xBB67AE8584CAA73B, tl.uint64)
    return a, b, c, d


@triton.jit
def lanes_of(words, TILE: tl.constexpr):
    """Cut words (TILE / 4,) into whole numbers in [-2^15, 2^15), int32 (TILE,)."""
    lanes = (words[:, None] >> (16 * tl.arange(0, 4))[None, :].to(tl.uint64)) & 0xFFFF
    return ((tl.reshape(lanes, (TILE,)).to(tl.int32)) ^ 0x8000) - 0x8000


@triton.jit
def random_words(seed, first, TILE: tl.constexpr):
    """Return the random words first, first + 1, ..., uint64 (TILE,). first: a multiple of 4."""
    a, b, c, d = philox(seed, first // 4 + tl.arange(0, TILE // 4))
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (TILE,))  # a, b, c, d of each counter in turn


@triton.jit
def sixteen(seed, first, TILE: tl.constexpr):
    """Return the random numbers in [-2^15, 2^15) of elements first, first + 1, ..., int32 (TILE,). first: a multiple of
    16."""
    return lanes_of(random_words(seed, first // 4, TILE // 4), TILE)


@triton.jit
def _store_plane(packed, codes, first, groups, W: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr):
    # Wider fields of a code are in planes before this one, and in lower bits.
    per: tl.constexpr = 8 // W
    before: tl.constexpr = BITS & ~(2 * W - 1)
    field = tl.reshape((codes >> before) & (2**W - 1), (TILE // per, per))
    joined = tl.sum(field << (W * tl.arange(0, per))[None, :], 1)
    at = first // per + tl.arange(0, TILE // per)
    tl.store(packed + groups * before + at, joined.to(tl.uint8), mask=at < groups * W)


@triton.jit
def store_codes(packed, codes, first, groups, BITS: tl.constexpr, TILE: tl.constexpr):
    """Pack codes, int32 (TILE,), of elements from `first` on. groups: of eight elements that the vector has."""
    if BITS & 8:
        _store_plane(packed, codes, first, groups, 8, BITS, TILE)
    if BITS & 4:
        _store_plane(packed, codes, first, groups, 4, BITS, TILE)
    if BITS & 2:
        _store_plane(packed, codes, first, groups, 2, BITS, TILE)
    if BITS & 1:
        _store_plane(packed, codes, first, groups, 1, BITS, TILE)


@triton.jit
def _load_plane(packed, i, inside, groups, W: tl.constexpr, BITS: tl.constexpr):
    per: tl.constexpr = 8 // W
    before: tl.constexpr = BITS & ~(2 * W - 1)
    byte = tl.load(packed + groups * before + i // per, mask=inside, other=0).to(tl.int32)
    return ((byte >> (W * (i % per)).to(tl.int32)) & (2**W - 1)) << before


@triton.jit
def load_codes(packed, i, inside, groups, BITS: tl.constexpr):
    """Unpack the codes of elements i, int32."""
    codes = (i * 0).to(tl.int32)
    if BITS & 8:
        codes |= _load_plane(packed, i, inside, groups, 8, BITS)
    if BITS & 4:
        codes |= _load_plane(packed, i, inside, groups, 4, BITS)
    if BITS & 2:
        codes |= _load_plane(packed, i, inside, groups, 2, BITS)
    if BITS & 1:
        codes |= _load_plane(packed, i, inside, groups, 1, BITS)
    return codes


@triton.jit
def _encode(
    x, numbers, starts, packed, others, scales, units, given, of_blocks, numel, count, steps, groups, seed, tops, rows,
    stride, CODE: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, BITS: tl.constexpr, SIZE: tl.constexpr,
    N: tl.constexpr, SCALES: tl.constexpr, CLIP: tl.constexpr, SHARED: tl.constexpr, FINISH: tl.constexpr,
    LATER: tl.constexpr, RANDOM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    for one in range(tl.program_id(0), count if LATER else 0, tl.num_programs(0)):
        number, other = of_parts(given, starts, of_blocks, one, stride, 1.0, False, FINISH)
        tl.store(numbers + one, number)
        if LATER == 2:
            tl.store(numbers + count + one, other)
    first = tl.program_id(0).to(tl.int64) * TILE
    i = first + tl.arange(0, TILE)
    inside = i < numel
    value = tl.load(x + i, mask=inside, other=0.0)
    number = i * 0 + 1.0
    if N > 0:
        block = block_at(i, starts, count, steps, SIZE)
        if SHARED:
            largest = tl.zeros((TILE,), tl.int32)
            for _ in range(rows):
                largest = tl.maximum(largest, magnitude_bits(tl.load(given + block, mask=inside, other=1.0)))
                given += stride
            number = largest.to(tl.float32, bitcast=True)
            tl.store(numbers + block, number, mask=inside & (tl.load(starts + block, mask=inside, other=-1) == i))
        else:
            number = tl.load(numbers + block, mask=inside, other=1.0)
        if CLIP:
            limit = tl.load(others + block, mask=inside, other=1.0)
            value = formats.clamped(value, -limit, limit)
        if SCALES != 0:
            unit = 1.0
            if SCALES < 0:
                largest = tl.zeros((TILE,), tl.int32)
                for begin in range(0, tops, TILE):
                    j = begin + tl.arange(0, TILE)
                    largest = tl.maximum(largest, magnitude_bits(tl.load(others + j, mask=j < tops, other=0.0)))
                unit = tl.div_rn(tl.max(largest, 0).to(tl.float32, bitcast=True), 448.0 * Q)
            code = formats.scale_code(number, unit, Q, SCALES, RANDOM)
            number = formats.scale_value(code, unit, SCALES)
            first_of_block = inside & (tl.load(starts + block, mask=inside, other=-1) == i)
            tl.store(scales + block, code.to(tl.uint8), mask=first_of_block)
            if SCALES < 0:
                tl.store(units, unit, mask=first == 0)
    drawn = sixteen(seed, first, TILE) if RANDOM else i.to(tl.int32)
    store_codes(packed, tl.where(inside, CODE(value, number, drawn, P, Q, RANDOM), 0), first, groups, BITS, TILE)


@triton.jit
def _average(
    out, units, numbers, packed, starts, numel, count, steps, groups, ranks,
    unit_stride, number_stride, packed_stride, scale,
    VALUE: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, BITS: tl.constexpr, SIZE: tl.constexpr,
    N: tl.constexpr, SCALES: tl.constexpr, ADD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = i < numel
    block = block_at(i, starts, count, steps, SIZE)
    total = tl.load(out + i, mask=inside, other=0.0)
    for rank in range(ranks):
        code = load_codes(packed, i, inside, groups, BITS)
        number = tl.load(numbers + block, mask=inside, other=0) if N > 0 else 1.0
        if SCALES != 0:
            number = formats.scale_value(number, tl.load(units) if SCALES < 0 else 1.0, SCALES)
        other = tl.load(numbers + count + block, mask=inside, other=0.0) if N == 2 else number
        value = VALUE(code, number, other, scale, P, Q)
        total = total + value if ADD else tl.where(rank == 0, value, total + value)
        packed += packed_stride
        numbers += number_stride
        units += unit_stride
    tl.store(out + i, total, mask=inside)


@triton.jit
def _sum(packed, out, numel, groups, ranks, stride, BITS: tl.constexpr, WIDER: tl.constexpr, TILE: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * TILE
    i = first + tl.arange(0, TILE)
    total = (i * 0).to(tl.int32)
    for _ in range(ranks):
        total += load_codes(packed, i, i < numel, groups, BITS)
        packed += stride
    store_codes(out, total, first, groups, WIDER, TILE)


def encode(
    vector: torch.Tensor,
    numbers: torch.Tensor,
    table: BlockTable,
    form: Form,
    seed: int | None = None,
    others: torch.Tensor | None = None,
    written: Sequence[torch.Tensor] = (),
    every: Sequence[torch.Tensor] = (),
    kind: str = "",
) -> torch.Tensor:
    """Pack the codes of a vector (numel,), each of an element and its block's number: (ceil(numel / 8) * bits,), uint8.

    numbers: (blocks,), float32; or empty.
    seed: the key of random numbers; None: it rounds without them.
    others: magnitudes at which elements of blocks are cut off first, (blocks,); with E4M3's scales the largest of
        parts of the vector, (parts,). None: there are none.
    written: takes the scales of blocks whose largest magnitudes are `numbers`, (blocks,), uint8, after the float32
        number (1,) of E4M3's.
    every: numbers of all ranks, (blocks,) each; the largest of each block are taken, and written to `numbers`.
        Or, with a kind of means that `gradlab.kernels.blocks.reduced` knows, what chunks add up to, (3, chunks),
        float64: the means of blocks are written there, on which codes do not depend.
    """
    numel, bits = vector.numel(), form.bits
    packed = torch.empty(packed_bytes(numel, bits), dtype=torch.uint8, device=vector.device)
    places = (vector, numbers, table.starts, packed, numbers if others is None else others)
    scales, units = (written[-1], written[0]) if written else (packed, numbers)
    given, stride = (every[0], every[0].shape[-1]) if kind else rows_of(every) if every else (numbers, 0)
    sizes = (numel, table.count, table.steps, -(-numel // 8), seed or 0, 0 if others is None else len(others))
    _, finish, count = REDUCTIONS[kind or "norm"]
    constants = {
        "CODE": getattr(formats, f"{form.name}_code"),
        "P": form.p,
        "Q": form.q,
        "BITS": bits,
        "SIZE": table.size,
    }
    constants |= {"SHARED": bool(every) and not kind, "FINISH": finish, "LATER": count if kind else 0}
    constants |= {"N": 0 if kind else _numbers(numbers, table), "RANDOM": seed is not None, "TILE": _TILE}
    constants |= {"SCALES": form.scales, "CLIP": others is not None and not written}
    more, programs = (scales, units, given, table.of_blocks), triton.cdiv(numel, _TILE)
    launch(_encode, programs, *places, *more, *sizes, len(every), stride, **constants)
    return packed


def average(
    out: torch.Tensor,
    operands: Sequence[Sequence[torch.Tensor]],
    table: BlockTable,
    form: Form,
    scale: float,
    add: bool = False,
) -> torch.Tensor:
    """Sum what payloads stand for, in their order, times a factor, into a vector (numel,).

    operands: the float32 number of a vector, with E4M3's scales, the numbers of blocks, and packed codes.
    add: whether the sum is added to what `out` has.
    """
    numel = out.numel()
    *of_vectors, (numbers, number_stride), (packed, packed_stride) = map(rows_of, operands)
    ((units, unit_stride),) = of_vectors or [(out, 0)]
    sizes = (numel, table.count, table.steps, -(-numel // 8), len(operands[0]))
    strides = (unit_stride, number_stride, packed_stride, scale)
    constants = {
        "VALUE": getattr(formats, f"{form.name}_value"),
        "P": form.p,
        "Q": form.q,
        "BITS": form.bits,
        "SIZE": table.size,
    }
    constants |= {"N": _numbers(operands[-2][0], table), "SCALES": form.scales, "ADD": add, "TILE": _TILE}
    places = (out, units, numbers, packed, table.starts)
    launch(_average, triton.cdiv(numel, _TILE), *places, *sizes, *strides, **constants)
    return out


def sum_codes(parts: Sequence[torch.Tensor], numel: int, bits: int, wider: int) -> torch.Tensor:
    """Add up several ranks' codes of as many bits, and pack the sums (numel,) with more of them, at most 15."""
    packed, stride = rows_of(parts)
    out = packed.new_empty(packed_bytes(numel, wider))
    given = (packed, out, numel, -(-numel // 8), len(parts), stride)
    launch(_sum, triton.cdiv(numel, _TILE), *given, BITS=bits, WIDER=wider, TILE=_TILE)
    return out


def _numbers(numbers: torch.Tensor, table: BlockTable) -> int:
    return numbers.numel() // max(1, table.count)


def rows_of(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Return the first of vectors of one size, and the elements from one to the next; they are joined if unequal."""
    first, size = tensors[0], tensors[0].element_size()
    if len(tensors) == 1:
        return first, 0
    places = [tensor.data_ptr() for tensor in tensors]
    step = places[1] - places[0]
    alike = all(b - a == step for a, b in pairwise(places)) and step % size == 0
    if alike and first.untyped_storage().data_ptr() == tensors[-1].untyped_storage().data_ptr():
        return first, step // size
    return torch.stack(list(tensors)), first.numel()
