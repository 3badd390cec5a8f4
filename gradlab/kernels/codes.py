"""Elements of a vector as packed codes of a few bits, and back: encoded at once, and averaged over ranks at once.

A pair of functions in `gradlab.kernels.formats` says what a code stands for. Packing is that of `gradlab.coding.bits`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl

from gradlab.coding.bits import packed_bytes
from gradlab.kernels import Form, Source, formats, launch
from gradlab.kernels.blocks import REDUCTIONS, TILE, BlockTable, block_at, magnitude_bits, of_parts


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
def _store_plane(packed, codes, first, last, groups, W: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr):
    # Wider fields of a code are in planes before this one, and in lower bits.
    per: tl.constexpr = 8 // W
    before: tl.constexpr = BITS & ~(2 * W - 1)
    field = tl.reshape((codes >> before) & (2**W - 1), (TILE // per, per))
    joined = tl.sum(field << (W * tl.arange(0, per))[None, :], 1)
    at = first // per + tl.arange(0, TILE // per)
    tl.store(packed + groups * before + at, joined.to(tl.uint8), mask=at < last * W)


@triton.jit
def store_codes(packed, codes, first, last, groups, BITS: tl.constexpr, TILE: tl.constexpr):
    """Pack codes, int32 (TILE,), of elements from `first` on, a multiple of 8. last: groups of eight elements up to the
    end of these. groups: all of the vector."""
    if BITS & 8:
        _store_plane(packed, codes, first, last, groups, 8, BITS, TILE)
    if BITS & 4:
        _store_plane(packed, codes, first, last, groups, 4, BITS, TILE)
    if BITS & 2:
        _store_plane(packed, codes, first, last, groups, 2, BITS, TILE)
    if BITS & 1:
        _store_plane(packed, codes, first, last, groups, 1, BITS, TILE)


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
    x, y, left, numbers, starts, packed, others, scales, units, given, of_blocks, numel, count, steps, groups, seed,
    tops, rows, stride,
    ADD: tl.constexpr, LEFT: tl.constexpr, CODE: tl.constexpr, VALUE: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    BITS: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr, SCALES: tl.constexpr, CLIP: tl.constexpr,
    SHARED: tl.constexpr, FINISH: tl.constexpr, LATER: tl.constexpr, RANDOM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    for one in range(tl.program_id(0), count if LATER else 0, tl.num_programs(0)):
        number, other = of_parts(given, starts, of_blocks, one, stride, 1.0, False, FINISH)
        tl.store(numbers + one, number)
        if LATER == 2:
            tl.store(numbers + count + one, other)
    first = tl.program_id(0).to(tl.int64) * TILE
    i = first + tl.arange(0, TILE)
    inside = i < numel
    given_value = tl.load(x + i, mask=inside, other=0.0)
    if ADD:
        given_value += tl.load(y + i, mask=inside, other=0.0)
    value, number = given_value, i * 0 + 1.0
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
    codes = tl.where(inside, CODE(value, number, drawn, P, Q, RANDOM), 0) & (2**BITS - 1)
    store_codes(packed, codes, first, groups, groups, BITS, TILE)
    if LEFT:
        if BITS == 9:  # the number is in the code
            number, codes = codes & 255, codes >> 8
        other = tl.load(numbers + count + block, mask=inside, other=0.0) if N == 2 else number
        tl.store(left + i, given_value + VALUE(codes, number, other, -1.0, P, Q), mask=inside)


@triton.jit
def _encode_tiles(
    x, y, left, numbers, packed, tiles, count, groups, seed, over,
    ADD: tl.constexpr, LEFT: tl.constexpr, CODE: tl.constexpr, VALUE: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    BITS: tl.constexpr, SIZE: tl.constexpr, SCALES: tl.constexpr, RANDOM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tiles += tl.program_id(0)
    first, stop, block = tl.load(tiles), tl.load(tiles + 1), tl.load(tiles + count + 1)
    i = first + tl.arange(0, TILE)
    inside = i < stop
    value = tl.load(x + i, mask=inside, other=0.0)
    if ADD:
        value += tl.load(y + i, mask=inside, other=0.0)
    largest = tl.max(tl.reshape(tl.where(inside, magnitude_bits(value), 0), (TILE // SIZE, SIZE)), 1)
    number = tl.div_rn(largest.to(tl.float32, bitcast=True), over)
    k = tl.arange(0, TILE // SIZE)
    if SCALES > 0:
        code = formats.scale_code(number, 1.0, Q, SCALES, RANDOM)
        tl.store(numbers + block + k, code.to(tl.uint8), mask=first + k * SIZE < stop)
        number = formats.scale_value(code, 1.0, SCALES)
    else:
        tl.store(numbers + block + k, number, mask=first + k * SIZE < stop)
    number = tl.reshape(tl.broadcast_to(number[:, None], (TILE // SIZE, SIZE)), (TILE,))
    drawn = sixteen(seed, first, TILE) if RANDOM else i.to(tl.int32)
    codes = tl.where(inside, CODE(value, number, drawn, P, Q, RANDOM), 0) & (2**BITS - 1)
    store_codes(packed, codes, first, (stop + 7) // 8, groups, BITS, TILE)
    if LEFT:
        tl.store(left + i, value + VALUE(codes, number, number, -1.0, P, Q), mask=inside)


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
    store_codes(out, total, first, groups, groups, WIDER, TILE)


def encode(
    source: Source,
    numbers: torch.Tensor,
    table: BlockTable,
    form: Form,
    seed: int | None = None,
    others: torch.Tensor | None = None,
    written: Sequence[torch.Tensor] = (),
    every: Sequence[torch.Tensor] = (),
    kind: str = "",
) -> torch.Tensor:
    """Pack the codes of a vector or a sum (numel,), each of an element and its block's number: (ceil(numel / 8) *
    bits,), uint8. The compression error is written where the source says.

    numbers: (blocks,), float32; or empty.
    seed: the key of random numbers; None: it rounds without them.
    others: magnitudes at which elements of blocks are cut off first, (blocks,); with E4M3's scales the largest of
        parts of the vector, (parts,). None: there are none.
    written: takes the scales of blocks whose largest magnitudes are `numbers`, (blocks,), uint8, after the float32
        number (1,) of E4M3's.
    every: numbers of all ranks, (blocks,) each; the largest of each block are taken, and written to `numbers`.
        Or, with a kind of means that `gradlab.kernels.blocks.reduced` knows, what chunks add up to, (3, chunks),
        float64: the means of blocks are written there, on which codes do not depend; no error is written then.
    """
    numel, bits, vector = source.vector.numel(), form.bits, source.vector
    packed = torch.empty(packed_bytes(numel, bits), dtype=torch.uint8, device=vector.device)
    places = (*_operands(source), numbers, table.starts, packed, numbers if others is None else others)
    scales, units = (written[-1], written[0]) if written else (packed, numbers)
    given, stride = (every[0], every[0].shape[-1]) if kind else rows_of(every) if every else (numbers, 0)
    sizes = (numel, table.count, table.steps, -(-numel // 8), seed or 0, 0 if others is None else len(others))
    _, finish, count = REDUCTIONS[kind or "norm"]
    constants = {**_constants(source, form, seed), "SIZE": table.size}
    constants |= {"SHARED": bool(every) and not kind, "FINISH": finish, "LATER": count if kind else 0}
    constants |= {"N": 0 if kind else _numbers(numbers, table), "CLIP": others is not None and not written}
    more, programs = (scales, units, given, table.of_blocks), triton.cdiv(numel, TILE)
    launch(_encode, programs, *places, *more, *sizes, len(every), stride, **constants)
    return packed


def encode_tiles(
    source: Source, table: BlockTable, form: Form, seed: int | None = None, over: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the number of each block, its largest magnitude divided by `over`, and pack codes as `encode` does, in one
    pass. The table has tiles; with random numbers at multiples of 16.

    Returns:
        Numbers (blocks,), float32, or uint8 where the form says so, and codes.
    """
    assert table.tiles is not None
    numel, device, count = source.vector.numel(), source.vector.device, table.tiles.shape[1] - 1
    numbers = torch.empty(table.count, dtype=torch.uint8 if form.scales else torch.float32, device=device)
    packed = torch.empty(packed_bytes(numel, form.bits), dtype=torch.uint8, device=device)
    given = (*_operands(source), numbers, packed, table.tiles, count, -(-numel // 8), seed or 0, over)
    launch(_encode_tiles, count, *given, **_constants(source, form, seed), SIZE=table.widest)
    return numbers, packed


def _operands(source: Source) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a source's tensors, the vector in place of what is not there."""
    vector, addend, left = source
    return vector, vector if addend is None else addend, vector if left is None else left


def _constants(source: Source, form: Form, seed: int | None) -> dict[str, Any]:
    """Return the constants of kernels that encode."""
    code, value = (getattr(formats, f"{form.name}_{what}") for what in ("code", "value"))
    found = {"CODE": code, "VALUE": value, "P": form.p, "Q": form.q, "BITS": form.bits, "SCALES": form.scales}
    found |= {"ADD": source.addend is not None, "LEFT": source.left is not None}
    return found | {"RANDOM": seed is not None, "TILE": TILE}


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
    constants |= {"N": _numbers(operands[-2][0], table), "SCALES": form.scales, "ADD": add, "TILE": TILE}
    places = (out, units, numbers, packed, table.starts)
    launch(_average, triton.cdiv(numel, TILE), *places, *sizes, *strides, **constants)
    return out


def sum_codes(parts: Sequence[torch.Tensor], numel: int, bits: int, wider: int) -> torch.Tensor:
    """Add up several ranks' codes of as many bits, and pack the sums (numel,) with more of them, at most 15."""
    packed, stride = rows_of(parts)
    out = packed.new_empty(packed_bytes(numel, wider))
    given = (packed, out, numel, -(-numel // 8), len(parts), stride)
    launch(_sum, triton.cdiv(numel, TILE), *given, BITS=bits, WIDER=wider, TILE=TILE)
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
