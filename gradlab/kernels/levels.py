"""Levels of a vector as the bytes of `gradlab.coding.levels`, and back, by a few launches.

A program works on a slot: 4,096 elements of a part, or as many of its symbols. Sums of slots are running sums of
PyTorch's. Codes and fields are put into words by atomic operations on bits that nobody else sets, so that their order
does not matter.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from gradlab.coding import levels as form
from gradlab.coding.huffman import LONGEST, SYMBOLS
from gradlab.coding.level_values import DEAD_ZONE, PARTS, UNIT
from gradlab.kernels import launch
from gradlab.kernels.selection import joined

_SLOT = form.CODES
_LANES = 32  # slots whose codes one program decodes
_PER = 128  # parts that one program reads
_MOST = 2**28  # elements of messages that are decoded together, which take a byte each and a little more


@dataclass(frozen=True)
class Codes:
    """The codes that everybody knows, on a device: K of them, kind by kind, and what `gradlab.coding.levels` has.

    widths, codes: widths and bits by code and symbol, (K * 256,), int32.
    known: symbols and widths by the next 15 bits of a stream, (K, 2^15), int16.
    firsts: codes before each kind's, and all, (4,), int64.
    classes, least, in_gap, in_more: tables by number, low bits and symbol, int32.
    weights: bytes that bytes of codes, of second streams, blocks and misfits add, and misfits, (2, 4), float64.
    """

    widths: torch.Tensor
    codes: torch.Tensor
    known: torch.Tensor
    firsts: torch.Tensor
    classes: torch.Tensor
    least: torch.Tensor
    in_gap: torch.Tensor
    in_more: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class LevelTable:
    """Parts of a vector's layers, on a device.

    edges: beginnings of P parts, and the end, (P + 1,), int64.
    slots: slots before each part, and all, (P + 1,), int64.
    part_of: the part of each slot, (B,), int64.
    places: bits before each part's row in a message, and before what follows its table, (P + 1,), int64.
    count_bits: bits of a part's count there, (P,), int64.
    of: the codes.
    nbytes, fixed: bytes of a message's header and table, and beside 0, (2,), float64.
    """

    edges: torch.Tensor
    slots: torch.Tensor
    part_of: torch.Tensor
    places: torch.Tensor
    count_bits: torch.Tensor
    of: Codes
    nbytes: int
    fixed: torch.Tensor

    @property
    def parts(self) -> int:
        return len(self.count_bits)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _level(x, i, inside, step, least, ZONE: tl.constexpr, LARGEST: tl.constexpr):
    """Return the magnitudes of levels of elements, int32, and whether they are negative."""
    value = tl.load(x + i, mask=inside, other=0.0)
    size = tl.abs(value)
    level = tl.floor(tl.div_rn(size, step + tl.zeros_like(size)) - ZONE) + 1.0
    level = tl.minimum(tl.maximum(level, 1.0), LARGEST)
    return tl.where(size >= least, level, 0.0).to(tl.int32), value < 0


@triton.jit
def _kind(size, count, paired):
    """Return how parts are sent: a kind, the low bits of gaps, and the number of symbols."""
    dense = 5 * count > 2 * size
    gap = tl.maximum(size // tl.maximum(count, 1), 1)
    low = gap * 0
    for bit in tl.static_range(3, 19):
        low += ((gap >> bit) > 0).to(tl.int64)
    symbols = tl.where(dense, tl.where(paired, (size + 1) // 2, size), count)
    return tl.where(dense, tl.where(paired, 1, 2), 0).to(tl.int64), low, symbols


@triton.jit
def _part(p, edges, slots, run, stride):
    """Return what `_kind` does, by running sums of slots' numbers other than zero and of large ones, and the number."""
    first, last = tl.load(slots + p), tl.load(slots + p + 1)
    count = tl.load(run + last) - tl.load(run + first)
    large = tl.load(run + stride + last) - tl.load(run + stride + first)
    kind, low, symbols = _kind(tl.load(edges + p + 1) - tl.load(edges + p), count, 200 * large <= count)
    return kind, low, symbols, count


@triton.jit
def _rest_widths(symbol, kind, low, in_gap, in_more):
    """Return how many bits symbols leave open, int64."""
    more = symbol & 15
    of_gap = tl.load(in_gap + low * 256 + symbol) + tl.where(more >= 8, tl.load(in_more + more), 0)
    of_pair = tl.where(symbol >> 4 == 15, 31, 0) + tl.where(more == 15, 31, 0)
    of_number = tl.where(symbol == 255, 31, 0)
    return tl.where(kind == 0, of_gap, tl.where(kind == 1, of_pair, of_number)).to(tl.int64)


@triton.jit
def _count(x, edges, slots, part_of, sums, lasts, stride, steps, ZONE: tl.constexpr, LARGEST: tl.constexpr,
           WHOLE: tl.constexpr, SLOT: tl.constexpr):  # fmt: skip # type: ignore[no-untyped-def]
    slot = tl.program_id(0).to(tl.int64)
    p = tl.load(part_of + slot)
    i = tl.load(edges + p) + (slot - tl.load(slots + p)) * SLOT + tl.arange(0, SLOT)
    inside, step = i < tl.load(edges + p + 1), tl.load(steps)
    level, _ = _level(x, i, inside, step, tl.load(steps + 1), ZONE, LARGEST)
    sums += slot + 1
    tl.store(sums, tl.sum((level > 0).to(tl.int64)))
    tl.store(sums + stride, tl.sum((level > 7).to(tl.int64)))
    tl.store(lasts + slot + 1, tl.max(tl.where(level > 0, i + 1, 0)))  # 0: none
    size = tl.abs(tl.load(x + i, mask=inside, other=0.0))
    beyond = tl.div_rn(size, step + tl.zeros_like(size)) - level.to(tl.float32)
    whole = tl.floor(tl.where(level > 0, tl.minimum(beyond, 1e9), 0.0).to(tl.float64) * WHOLE).to(tl.int64)
    for k in tl.static_range(1, 4):
        here = (level == k) if k < 3 else (level > 2)
        tl.store(sums + 2 * k * stride, tl.sum(here.to(tl.int64)))
        tl.store(sums + (2 * k + 1) * stride, tl.sum(tl.where(here, whole, 0)))


@triton.jit
def _told(run, last, stride, UNIT_PARTS: tl.constexpr):
    """Return three bytes of a header: centroids, by running sums of slots' numbers and of their offsets."""
    told = tl.full((), 0, tl.int64)
    for k in tl.static_range(1, 4):
        count = tl.load(run + 2 * k * stride + last).to(tl.float64)
        total = tl.load(run + (2 * k + 1) * stride + last).to(tl.float64)
        mean = tl.floor(total / tl.maximum(count, 1.0) / UNIT_PARTS + 0.5)
        mean = tl.minimum(tl.maximum(mean, -128.0), 127.0).to(tl.int64)
        told |= (mean & 255) << (8 * (k - 1))
    return told


@triton.jit
def _escape(level, negative, large):
    return tl.where(large, ((level - 1).to(tl.int64) << 1) + negative.to(tl.int64), 0)


@triton.jit
def _number(level, negative, middle, escape):
    return tl.where(level > middle, escape, tl.where(negative, -level, level) + middle)


@triton.jit
def _add_counts(seen, symbol, there):
    byte, outside = tl.arange(0, 256), tl.sum((there == 0).to(tl.int32))
    counts = tl.histogram(tl.where(there, symbol, 0), 256) - tl.where(byte == 0, outside, 0)
    tl.atomic_add(seen + byte, counts.to(tl.int64), mask=counts > 0)


@triton.jit
def _keep(symbols, fields, seen, at, symbol, field, there):
    """Store symbols and what they leave open, and count the symbols of a part."""
    tl.store(symbols + at, symbol.to(tl.uint8), mask=there)
    tl.store(fields + at, field, mask=there)
    _add_counts(seen, symbol, there)


@triton.jit
def _keep_gaps(x, symbols, fields, seen, classes, least_gap, in_gap, begin, start, end, earlier, before, low, step,
               least, ZONE: tl.constexpr, LARGEST: tl.constexpr, SLOT: tl.constexpr):  # fmt: skip
    i = start + tl.arange(0, SLOT)
    inside = i < end
    level, negative = _level(x, i, inside, step, least, ZONE, LARGEST)
    there = level > 0
    last, _ = _level(x, i - 1, inside & (i > start), step, least, ZONE, LARGEST)
    last = tl.associative_scan(tl.where(last > 0, i - 1, -1), 0, _larger)
    gap = i - 1 - tl.maximum(tl.maximum(last, before), begin - 1)
    more = level - 1
    of_gap = tl.load(classes + tl.minimum(gap >> low, 256), mask=there, other=0)
    of_more = tl.load(classes + tl.minimum(more, 256), mask=there, other=0)
    symbol = of_gap << 4 | of_more
    place = low * 256 + symbol
    field = ((gap - tl.load(least_gap + place)) << 1) + negative.to(tl.int64)
    wide = tl.where(of_more >= 8, more - tl.load(least_gap + (of_more << 4)), 0).to(tl.int64)
    field |= wide << tl.load(in_gap + place).to(tl.int64)
    _keep(symbols, fields, seen, begin + earlier + tl.cumsum(there.to(tl.int64), 0) - 1, symbol, field, there)


@triton.jit
def _keep_pairs(x, symbols, fields, seen, begin, start, end, step, least, ZONE: tl.constexpr, LARGEST: tl.constexpr,
                SLOT: tl.constexpr):  # fmt: skip
    k = tl.arange(0, SLOT // 2)
    i = start + 2 * k
    a, a_negative = _level(x, i, i < end, step, least, ZONE, LARGEST)
    b, b_negative = _level(x, i + 1, i + 1 < end, step, least, ZONE, LARGEST)
    symbol = _number(a, a_negative, 7, 15) << 4 | _number(b, b_negative, 7, 15)
    field = _escape(b, b_negative, b > 7) << tl.where(a > 7, 31, 0).to(tl.int64)
    field |= _escape(a, a_negative, a > 7)
    _keep(symbols, fields, seen, begin + (start - begin) // 2 + k, symbol, field, i < end)


@triton.jit
def _keep_numbers(x, symbols, fields, seen, start, end, step, least, ZONE: tl.constexpr, LARGEST: tl.constexpr,
                  SLOT: tl.constexpr):  # fmt: skip
    i = start + tl.arange(0, SLOT)
    level, negative = _level(x, i, i < end, step, least, ZONE, LARGEST)
    symbol, field = _number(level, negative, 127, 255), _escape(level, negative, level > 127)
    _keep(symbols, fields, seen, i, symbol, field, i < end)


@triton.jit
def _symbols(x, edges, slots, part_of, run, before, symbols, fields, seen, classes, least_gap, in_gap, stride, steps,
             ZONE: tl.constexpr, LARGEST: tl.constexpr, SLOT: tl.constexpr):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    step, least = tl.load(steps), tl.load(steps + 1)
    p = tl.load(part_of + slot)
    kind, low, _, _ = _part(p, edges, slots, run, stride)
    begin, end, first = tl.load(edges + p), tl.load(edges + p + 1), tl.load(slots + p)
    start = begin + (slot - first) * SLOT
    seen += p * 256
    if kind == 0:
        earlier = tl.load(run + slot) - tl.load(run + first)
        _keep_gaps(x, symbols, fields, seen, classes, least_gap, in_gap, begin, start, end, earlier,
                   tl.load(before + slot) - 1, low, step, least, ZONE, LARGEST, SLOT)  # fmt: skip
    elif kind == 1:
        _keep_pairs(x, symbols, fields, seen, begin, start, end, step, least, ZONE, LARGEST, SLOT)
    else:
        _keep_numbers(x, symbols, fields, seen, start, end, step, least, ZONE, LARGEST, SLOT)


@triton.jit
def _choose(edges, slots, run, seen, widths, firsts, chosen, told, stride, parts, SLOT: tl.constexpr):
    """Choose the code under which a part's symbols take the fewest bits, and tell whether it needs its own table."""
    p = tl.program_id(0).to(tl.int64)
    kind, _, symbols, count = _part(p, edges, slots, run, stride)
    byte = tl.arange(0, 256)
    counts = tl.load(seen + p * 256 + byte)
    best, last = tl.full((), 2**62, tl.int64), tl.load(firsts + kind + 1)
    for first in range(tl.load(firsts + kind), last, 16):
        code = first + tl.arange(0, 16)
        width = tl.load(widths + code[:, None] * 256 + byte[None, :], mask=code[:, None] < last, other=2**12)
        best = tl.minimum(best, tl.min(tl.sum(counts[None, :] * width.to(tl.int64), 1) * 1024 + code))
    took = best >> 10
    share = tl.where(counts > 0, symbols, 1).to(tl.float64) / tl.maximum(counts, 1).to(tl.float64)
    entropy = tl.sum(counts.to(tl.float64) * tl.log2(share))
    own = 90 + 5 * tl.sum((counts > 0).to(tl.int64)).to(tl.float64)
    own += tl.maximum(symbols.to(tl.float64), entropy)
    alike = (tl.max(counts) == symbols) & (symbols > 1024)
    misses = ((8 * took).to(tl.float64) > 9 * own) | alike
    tl.store(chosen + p, tl.where(count > 0, best & 1023, tl.load(firsts + kind)))
    tl.store(told + 2 * (parts + 1) + p + 1, (symbols + SLOT - 1) // SLOT)
    tl.store(told + 3 * (parts + 1) + p + 1, (misses & (count > 0)).to(tl.int64))


@triton.jit
def _bits(edges, slots, part_of, chosen, run, symbols, widths, in_gap, in_more, sums, stride, SLOT: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64)
    p = tl.load(part_of + slot)
    kind, low, count, _ = _part(p, edges, slots, run, stride)
    k = (slot - tl.load(slots + p)) * SLOT + tl.arange(0, SLOT)
    inside = k < count
    symbol = tl.load(symbols + tl.load(edges + p) + k, mask=inside, other=0).to(tl.int32)
    width = tl.load(widths + tl.load(chosen + p) * 256 + symbol)
    tl.store(sums + slot + 1, tl.sum(tl.where(inside, width, 0).to(tl.int64)))
    rest = _rest_widths(symbol, kind, low, in_gap, in_more)
    tl.store(sums + stride + slot + 1, tl.sum(tl.where(inside, rest, 0)))


@triton.jit
def _bytes(slots, bits, told, stride, parts):
    p = tl.program_id(0).to(tl.int64)
    first, last = tl.load(slots + p), tl.load(slots + p + 1)
    for stream in tl.static_range(2):
        took = tl.load(bits + stream * stride + last) - tl.load(bits + stream * stride + first)
        tl.store(told + stream * (parts + 1) + p + 1, (took + 7) >> 3)


@triton.jit
def _put(words, at, field, inside, most):
    """Set bits of a message from bit `at` on. field: int64, below 2^62."""
    word, shift = at >> 5, at & 31
    low, high = field << shift, (field >> 1) >> (63 - shift)
    tl.atomic_or(words + word, (low & 0xFFFFFFFF).to(tl.int32), mask=inside & (word < most))
    middle = ((low >> 32) & 0xFFFFFFFF).to(tl.int32)
    tl.atomic_or(words + word + 1, middle, mask=inside & (middle != 0) & (word + 1 < most))
    tl.atomic_or(words + word + 2, high.to(tl.int32), mask=inside & (high != 0) & (word + 2 < most))


@triton.jit
def _pack(edges, slots, part_of, chosen, places, count_bits, run, bits, told, symbols, fields, widths, codes, in_gap,
          in_more, firsts, words, steps, most, nbytes, stride, parts, UNIT_PARTS: tl.constexpr, HEAD: tl.constexpr,
          SLOT: tl.constexpr):  # fmt: skip # type: ignore[no-untyped-def]
    slot = tl.program_id(0).to(tl.int64)
    p = tl.load(part_of + slot)
    kind, low, count, numbers = _part(p, edges, slots, run, stride)
    first, step = tl.load(slots + p), parts + 1
    blocks = tl.load(told + 2 * step + parts)
    code_at = 8 * (nbytes + 2 * blocks + tl.load(told + p)) + tl.load(bits + slot) - tl.load(bits + first)
    rest_at = 8 * (nbytes + 2 * blocks + tl.load(told + parts) + tl.load(told + step + p))
    rest_at += tl.load(bits + stride + slot) - tl.load(bits + stride + first)
    k = (slot - first) * SLOT + tl.arange(0, SLOT)
    inside = k < count
    at = tl.load(edges + p) + k
    symbol = tl.load(symbols + at, mask=inside, other=0).to(tl.int32)
    code = tl.load(chosen + p)
    row = code * 256 + symbol
    width = tl.where(inside, tl.load(widths + row), 0).to(tl.int64)
    _put(words, code_at + tl.cumsum(width, 0) - width, tl.load(codes + row).to(tl.int64), inside, most)
    rest = tl.where(inside, _rest_widths(symbol, kind, low, in_gap, in_more), 0)
    field = tl.load(fields + at, mask=inside, other=0)
    _put(words, rest_at + tl.cumsum(rest, 0) - rest, field, inside & (rest > 0), most)
    head = tl.load(steps).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    head |= _told(run, stride - 1, stride, UNIT_PARTS) << 32
    _put(words, slot, head, slot == 0, most)
    one = tl.arange(0, 2)  # the table's row of the part, in its first slot, and the bits of this one's codes
    bits_here = tl.load(bits + slot + 1) - tl.load(bits + slot)
    of_rest = tl.load(told + step + p + 1) - tl.load(told + step + p)
    row_here = tl.where(kind == 1, 2, 0) | tl.where(numbers > 0, code - tl.load(firsts + kind), 0) << 2
    row_here |= numbers << HEAD | of_rest << (HEAD + tl.load(count_bits + p))
    place = 8 * (nbytes + 2 * (tl.load(told + 2 * step + p) + slot - first))
    wanted = (slot - first) * SLOT + one * 0 < tl.where(one == 0, 1, count)
    _put(words, tl.where(one == 0, tl.load(places + p), place), tl.where(one == 0, row_here, bits_here), wanted, most)


@triton.jit
def _get(message, at, inside, total):
    """Return 57 bits of a message from bit `at` on, or more, int64; zeros beyond its end."""
    byte = at >> 3
    found = byte * 0
    for k in tl.static_range(8):
        there = inside & (byte + k < total)
        found |= tl.load(message + byte + k, mask=there, other=0).to(tl.int64) << (8 * k)
    return (found >> (at & 7)) & 0x1FFFFFFFFFFFFFF


@triton.jit
def _head(message, total):
    """Return a message's step, three bytes of centroids, and the share that it misses."""
    place = tl.full((1,), 0, tl.int64)
    head = tl.sum(_get(message, place, place == 0, total))
    told = tl.sum(_get(message, place + 32, place == 0, total))
    missed = (told >> 24).to(tl.int32).to(tl.float32, bitcast=True)
    return head.to(tl.int32).to(tl.float32, bitcast=True), told & 0xFFFFFF, missed


@triton.jit
def _message(messages, sent, rank):
    """Return where a rank's message is, and its bytes."""
    return messages + tl.load(sent + 2 * rank), tl.load(sent + 2 * rank + 1)


@triton.jit
def _read_parts(messages, sent, edges, slots, places, count_bits, told, part, flags, firsts, nbytes, parts,
                HEAD: tl.constexpr, PER: tl.constexpr, SLOT: tl.constexpr):  # fmt: skip # type: ignore[no-untyped-def]
    programs = (parts + PER - 1) // PER
    rank = tl.program_id(0) // programs
    message, total = _message(messages, sent, rank)
    told, part = told + rank * 2 * (parts + 1), part + rank * 5 * parts
    p = (tl.program_id(0) % programs).to(tl.int64) * PER + tl.arange(0, PER)
    step, _, missed = _head(message, total)
    fits = (step >= 0) & (step < float("inf")) & (missed >= 0) & (missed <= 1)
    tl.atomic_or(flags, tl.where(fits, 0, 1).to(tl.int64))
    inside = p < parts
    size = tl.load(edges + p + 1, mask=inside, other=0) - tl.load(edges + p, mask=inside, other=0)
    place, bits = tl.load(places + p, mask=inside, other=0), tl.load(count_bits + p, mask=inside, other=0)
    row = _get(message, place, inside, total)
    row &= (tl.full((PER,), 1, tl.int64) << (tl.load(places + p + 1, mask=inside, other=0) - place)) - 1
    count, rest = (row >> HEAD) & ((tl.full((PER,), 1, tl.int64) << bits) - 1), row >> (HEAD + bits)
    kind, low, symbols = _kind(size, tl.minimum(count, size), (row & 2) > 0)
    number, first = (row >> 2) & ((1 << (HEAD - 2)) - 1), tl.load(firsts + kind)
    there = tl.load(firsts + kind + 1) - first
    wrong = tl.where(count > size, 2, 0) | tl.where(((row & 1) > 0) & (count > 0), 1, 0)
    wrong |= tl.where((number >= there) & (count > 0), 2, 0)
    tl.atomic_or(flags + p * 0, wrong.to(tl.int64), mask=inside & (wrong > 0))
    step = parts + 1
    tl.store(told + p + 1, (symbols + SLOT - 1) // SLOT, mask=inside)
    tl.store(told + step + p + 1, rest, mask=inside)
    tl.store(part + p, kind, mask=inside)
    tl.store(part + parts + p, low, mask=inside)
    tl.store(part + 2 * parts + p, symbols, mask=inside)
    tl.store(part + 3 * parts + p, count, mask=inside)
    tl.store(part + 4 * parts + p, first + tl.minimum(number, there - 1), mask=inside)


@triton.jit
def _read_lengths(messages, sent, slots, told, begins, codes, nbytes, parts, count, MOST: tl.constexpr):
    rank, p = tl.program_id(0) // parts, (tl.program_id(0) % parts).to(tl.int64)
    message, total = _message(messages, sent, rank)
    told, begins, codes = told + rank * 2 * (parts + 1), begins + rank * (count + 1), codes + rank * (parts + 1)
    first, slot = tl.load(told + p), tl.arange(0, MOST)
    inside = slot < tl.load(told + p + 1) - first
    bits = tl.where(inside, _get(message, 8 * (nbytes + 2 * (first + slot)), inside, total) & 0xFFFF, 0)
    tl.store(begins + tl.load(slots + p) + slot, tl.cumsum(bits, 0) - bits, mask=inside)
    tl.store(codes + p + 1, (tl.sum(bits) + 7) >> 3)


@triton.jit
def _read_codes(messages, sent, edges, slots, part_of, told, part, begins, codes, known, symbols, flags, nbytes,
                parts, count, numel, SLOT: tl.constexpr, LANES: tl.constexpr, BITS: tl.constexpr):  # fmt: skip # type: ignore[no-untyped-def]
    programs = (count + LANES - 1) // LANES
    rank = (tl.program_id(0) // programs).to(tl.int64)
    message, total = _message(messages, sent, rank)
    told, part, symbols = told + rank * 2 * (parts + 1), part + rank * 5 * parts, symbols + rank * numel
    begins, codes = begins + rank * (count + 1), codes + rank * (parts + 1)
    slot = (tl.program_id(0) % programs).to(tl.int64) * LANES + tl.arange(0, LANES)
    inside = slot < count
    p = tl.load(part_of + slot, mask=inside, other=0)
    k = (slot - tl.load(slots + p)) * SLOT
    left = tl.where(inside, tl.minimum(tl.load(part + 2 * parts + p) - k, SLOT), 0)
    row = tl.load(part + 4 * parts + p) << BITS
    at = 8 * (nbytes + 2 * tl.load(told + parts) + tl.load(codes + p))
    at += tl.load(begins + slot, mask=inside & (left > 0), other=0)
    length = 8 * (nbytes + 2 * (tl.load(told + p) + slot - tl.load(slots + p)))
    end = at + (_get(message, length, inside & (left > 0), total) & 0xFFFF)
    where = tl.load(edges + p) + k
    for number in range(0, tl.max(left)):
        here = inside & (number < left)
        byte = at >> 3
        peek = tl.load(message + byte, mask=here & (byte < total), other=0).to(tl.int32)
        peek |= tl.load(message + byte + 1, mask=here & (byte + 1 < total), other=0).to(tl.int32) << 8
        peek |= tl.load(message + byte + 2, mask=here & (byte + 2 < total), other=0).to(tl.int32) << 16
        found = tl.load(known + row + ((peek >> (at & 7).to(tl.int32)) & ((1 << BITS) - 1)), mask=here, other=0).to(
            tl.int32
        )
        tl.store(symbols + where + number, (found & 255).to(tl.uint8), mask=here)
        at += found >> 8
    wrong = (left > 0) & (at != end)
    tl.atomic_or(flags + slot * 0, tl.full((LANES,), 4, tl.int64), mask=wrong)


@triton.jit
def _symbols_of(slot, slots, edges, part_of, part, symbols, in_gap, in_more, parts, SLOT: tl.constexpr):
    """Return a slot's part, its symbols' numbers and the symbols, which of them there are, and their bits in the second
    stream."""
    p = tl.load(part_of + slot)
    k = (slot - tl.load(slots + p)) * SLOT + tl.arange(0, SLOT)
    inside = k < tl.load(part + 2 * parts + p)
    symbol = tl.load(symbols + tl.load(edges + p) + k, mask=inside, other=0).to(tl.int32)
    width = _rest_widths(symbol, tl.load(part + p), tl.load(part + parts + p), in_gap, in_more)
    return p, k, symbol, inside, tl.where(inside, width, 0)


@triton.jit
def _rest_bits(edges, slots, part_of, part, symbols, in_gap, in_more, sums, parts, count, numel, SLOT: tl.constexpr):
    rank, slot = (tl.program_id(0) // count).to(tl.int64), (tl.program_id(0) % count).to(tl.int64)
    part, symbols = part + rank * 5 * parts, symbols + rank * numel
    _, _, _, _, width = _symbols_of(slot, slots, edges, part_of, part, symbols, in_gap, in_more, parts, SLOT)
    tl.store(sums + rank * (count + 1) + slot + 1, tl.sum(width))


@triton.jit
def _value(level, negative, centroids, step, scale, UNIT: tl.constexpr):
    told = (centroids >> (8 * (tl.minimum(tl.maximum(level, 1), 3) - 1)).to(tl.int64)) & 255
    offset = (tl.where(told > 127, told - 256, told)).to(tl.float32) * UNIT
    offset = tl.where(negative, -offset, offset)
    return (tl.where(negative, -level, level).to(tl.float32) + offset) * step * scale


@triton.jit
def _unescaped(code, field, middle, escape):
    """Return the magnitude of a level of a dense part and whether it is negative."""
    level, large = code - middle, code == escape
    negative = tl.where(large, (field & 1) > 0, level < 0)
    return tl.where(large, ((field & 0x7FFFFFFF) >> 1).to(tl.int32) + 1, tl.abs(level)), negative


@triton.jit
def _add_at(out, i, end, start, stop, level, negative, inside, flags, centroids, step, scale, UNIT: tl.constexpr,
            LARGEST: tl.constexpr):  # fmt: skip
    """Add levels at those elements i of a part that lie from start to stop, and return how many there are."""
    wrong = inside & ((i >= end) & (level != 0) | (level > LARGEST) | (level < 0))
    tl.atomic_or(flags + i * 0, tl.full(i.shape, 2, tl.int64), mask=wrong)
    there = inside & (level > 0) & (i >= start) & (i < stop) & (wrong == 0)
    total = tl.load(out + i, mask=there, other=0.0)
    tl.store(out + i, total + _value(level, negative, centroids, step, scale, UNIT), mask=there)
    return tl.sum(there.to(tl.int64))


@triton.jit
def _places(slot, slots, edges, part_of, told, part, codes, rest, symbols, in_gap, in_more, nbytes, parts,
            SLOT: tl.constexpr):  # fmt: skip
    """Return what `_symbols_of` returns, and where the bits are."""
    p, k, symbol, inside, width = _symbols_of(slot, slots, edges, part_of, part, symbols, in_gap, in_more, parts, SLOT)
    at = 8 * (nbytes + 2 * tl.load(told + parts) + tl.load(codes + parts) + tl.load(told + parts + 1 + p))
    at += tl.load(rest + slot) - tl.load(rest + tl.load(slots + p)) + tl.cumsum(width, 0) - width
    return p, k, symbol, inside, width, at


@triton.jit
def _gaps_of(message, symbol, low, inside, width, at, least_gap, in_gap, total):
    """Return gaps and one, whether levels are negative, and the rest of their magnitudes."""
    place = low * 256 + symbol
    bits = tl.load(in_gap + place).to(tl.int64)
    field = _get(message, at, inside & (width > 0), total)
    lower = field & ((tl.full(field.shape, 1, tl.int64) << bits) - 1)
    gap = tl.where(inside, (lower >> 1) + tl.load(least_gap + place) + 1, 0)
    above = (field >> bits) & ((tl.full(field.shape, 1, tl.int64) << tl.maximum(width - bits, 0)) - 1)
    return gap, (lower & 1) > 0, above


@triton.jit
def _gap_sums(messages, sent, edges, slots, part_of, told, part, codes, rest, symbols, least_gap, in_gap, in_more, sums,
              nbytes, parts, count, numel, SLOT: tl.constexpr):  # fmt: skip # type: ignore[no-untyped-def]
    rank, slot = (tl.program_id(0) // count).to(tl.int64), (tl.program_id(0) % count).to(tl.int64)
    message, total = _message(messages, sent, rank)
    told, part, symbols = told + rank * 2 * (parts + 1), part + rank * 5 * parts, symbols + rank * numel
    codes, rest = codes + rank * (parts + 1), rest + rank * (count + 1)
    p, _, symbol, inside, width, at = _places(
        slot, slots, edges, part_of, told, part, codes, rest, symbols, in_gap, in_more, nbytes, parts, SLOT
    )
    if tl.load(part + p) == 0:
        low = tl.load(part + parts + p)
        gap, _, _ = _gaps_of(message, symbol, low, inside, width, at, least_gap, in_gap, total)
        tl.store(sums + rank * (count + 1) + slot + 1, tl.sum(gap))


@triton.jit
def _reaching(kind, slot, first, symbols, gaps, begin, start, stop, MOST: tl.constexpr, SLOT: tl.constexpr):
    """Return the first of a part's slots whose symbols stand for elements from start to stop, and the last and one."""
    low = tl.where(kind == 1, (slot - first) // 2, slot - first)
    high = low + 1
    if kind == 0:
        some, there = tl.arange(0, MOST), tl.arange(0, MOST) * SLOT < symbols
        before = tl.load(gaps + first)
        ends = begin - 1 + tl.load(gaps + first + some + 1, mask=there, other=0) - before
        begins = begin + tl.load(gaps + first + some, mask=there, other=0) - before
        low = tl.sum((there & (ends < start)).to(tl.int64), 0)
        high = tl.sum((there & (begins < stop)).to(tl.int64), 0)
    return low, high


@triton.jit
def _add(messages, sent, out, edges, slots, part_of, told, part, codes, rest, gaps, symbols, least_gap, in_gap, in_more,
         numbers, flags, scale, ranks, nbytes, parts, count, numel, UNIT: tl.constexpr, LARGEST: tl.constexpr,
         MOST: tl.constexpr, SLOT: tl.constexpr):  # fmt: skip # type: ignore[no-untyped-def]
    here = tl.program_id(0).to(tl.int64)
    p = tl.load(part_of + here)
    begin, end, first = tl.load(edges + p), tl.load(edges + p + 1), tl.load(slots + p)
    start = begin + (here - first) * SLOT
    stop = tl.minimum(start + SLOT, end)
    for rank in range(ranks):
        tl.debug_barrier()  # all that the rank before has written is there
        message, total = _message(messages, sent, rank)
        step, centroids, _missed = _head(message, total)
        kind, low, of_part = tl.load(part + p), tl.load(part + parts + p), tl.load(part + 2 * parts + p)
        number = tl.full((), 0, tl.int64)
        from_slot, to_slot = _reaching(kind, here, first, of_part, gaps, begin, start, stop, MOST, SLOT)
        for slot in range(first + from_slot, first + to_slot):
            _of, k, symbol, inside, width, at = _places(
                slot, slots, edges, part_of, told, part, codes, rest, symbols, in_gap, in_more, nbytes, parts, SLOT
            )
            if kind == 0:
                gap, negative, above = _gaps_of(message, symbol, low, inside, width, at, least_gap, in_gap, total)
                more = symbol & 15
                level = tl.load(least_gap + (more << 4)) + 1 + tl.where(more >= 8, above, 0).to(tl.int32)
                i = begin - 1 + tl.load(gaps + slot) - tl.load(gaps + first) + tl.cumsum(gap, 0)
                number += _add_at(out, i, end, start, stop, level, negative, inside, flags, centroids, step, scale,
                                  UNIT, LARGEST)  # fmt: skip
            elif kind == 1:
                a, b = symbol >> 4, symbol & 15
                level, negative = _unescaped(a, _get(message, at, inside & (a == 15), total), 7, 15)
                number += _add_at(out, begin + 2 * k, end, start, stop, level, negative, inside, flags, centroids,
                                  step, scale, UNIT, LARGEST)  # fmt: skip
                at += tl.where(a == 15, 31, 0)
                level, negative = _unescaped(b, _get(message, at, inside & (b == 15), total), 7, 15)
                number += _add_at(out, begin + 2 * k + 1, end, start, stop, level, negative, inside, flags, centroids,
                                  step, scale, UNIT, LARGEST)  # fmt: skip
            else:
                level, negative = _unescaped(symbol, _get(message, at, inside & (symbol == 255), total), 127, 255)
                number += _add_at(out, begin + k, end, start, stop, level, negative, inside, flags, centroids, step,
                                  scale, UNIT, LARGEST)  # fmt: skip
        tl.store(numbers + here, number)
        told, part, symbols = told + 2 * (parts + 1), part + 5 * parts, symbols + numel
        codes, rest, gaps, numbers = codes + parts + 1, rest + count + 1, gaps + count + 1, numbers + count


@triton.jit
def _check(sent, slots, told, part, codes, rest, numbers, flags, nbytes, parts, count, MOST: tl.constexpr):
    rank, p = tl.program_id(0) // parts, (tl.program_id(0) % parts).to(tl.int64)
    told, part, codes = told + rank * 2 * (parts + 1), part + rank * 5 * parts, codes + rank * (parts + 1)
    rest, numbers, total = rest + rank * (count + 1), numbers + rank * count, tl.load(sent + 2 * rank + 1)
    first, last, slot = tl.load(slots + p), tl.load(slots + p + 1), tl.arange(0, MOST)
    there = tl.sum(tl.load(numbers + first + slot, mask=first + slot < last, other=0))
    took, announced = tl.load(rest + last) - tl.load(rest + first), tl.load(told + parts + 1 + p)
    end = nbytes + 2 * tl.load(told + parts) + tl.load(codes + parts) + tl.load(told + 2 * parts + 1)
    wrong = (there != tl.load(part + 3 * parts + p)) | ((took + 7) >> 3 != tl.load(told + parts + 2 + p) - announced)
    tl.atomic_or(flags, ((wrong | (end != total)).to(tl.int64)) * 4)


def _moved(array: Any, device: torch.device, dtype: Any = np.int32) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype)).to(device)


@functools.cache
def codes_on(device: torch.device) -> Codes:
    """Bring the codes to a device."""
    books = [form.book_of(kind) for kind in range(3)]
    every = [code for book in books for code in book.codes]
    known = np.zeros((len(every), 2**LONGEST), np.int16)
    for row, code in zip(known, every, strict=True):
        for symbol, (width, bits) in enumerate(zip(code.widths.tolist(), code.codes.tolist(), strict=True)):
            row[bits :: 1 << width] = np.uint16(symbol | width << 8).view(np.int16)
    return Codes(
        widths=_moved(np.stack([code.widths for code in every]).reshape(-1), device),
        codes=_moved(np.stack([code.codes for code in every]).reshape(-1), device),
        known=_moved(known, device, np.int16),
        firsts=_moved(form.ends_of([len(book.codes) for book in books]), device, np.int64),
        classes=_moved(form.CLASS, device),
        least=_moved(form.LEAST_GAP, device),
        in_gap=_moved(form.IN_GAP, device),
        in_more=_moved(form.IN_MORE, device),
        weights=_moved([[1, 1, 2, 0], [0, 0, 0, 1]], device, np.float64),
    )


def table_for(sizes: Sequence[int], device: torch.device, head: int) -> LevelTable:
    """Bring to a device where layers of these sizes lie. head: bytes of a message's header."""
    edges = form.edges_of(sizes)
    numels = np.diff(edges)
    of_count, of_rest = form.in_table(numels)
    places = 8 * head + form.ends_of(form.HEAD + of_count + of_rest)
    slots = form.ends_of(-(-numels // _SLOT))
    return LevelTable(
        edges=_moved(edges, device, np.int64),
        slots=_moved(slots, device, np.int64),
        part_of=_moved(np.repeat(np.arange(len(numels)), np.diff(slots)), device, np.int64),
        places=_moved(places, device, np.int64),
        count_bits=_moved(of_count, device, np.int64),
        of=codes_on(device),
        nbytes=-(-int(places[-1]) // 8),
        fixed=_moved([-(-int(places[-1]) // 8), 0], device, np.float64),
    )


def _zeros(device: torch.device, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Make several tensors of zeros, int64, at once."""
    sizes = [math.prod(shape) for shape in shapes]
    whole = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
    return [one.view(shape) for one, shape in zip(whole.split(sizes), shapes, strict=True)]


def encode(
    vector: torch.Tensor, step: torch.Tensor, table: LevelTable, capacity: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode the levels of a vector (numel,), float32, under a step (), float32.

    capacity: bytes that the message may take.

    Returns:
        The message, (capacity,), uint8, zeros after its end; and its bytes, and how many parts no code fits, (2,),
        float64. The message is not valid if one does not fit, or if it takes more bytes.
    """
    device, count, parts, of = vector.device, len(table.part_of), table.parts, table.of
    steps = torch.stack([step, (step.double() * DEAD_ZONE).float()])
    levels = {"ZONE": DEAD_ZONE, "LARGEST": form.LARGEST, "SLOT": _SLOT}
    sums, sums_of_bits, lasts, told, seen, chosen = _zeros(
        device, (8, count + 1), (2, count + 1), (count + 1,), (4, parts + 1), (parts, SYMBOLS), (parts,)
    )
    where, rest = (table.edges, table.slots, table.part_of), (of.in_gap, of.in_more)
    launch(_count, count, vector, *where, sums, lasts, count + 1, steps, WHOLE=PARTS, **levels)
    run, before = sums.cumsum(1), lasts.cummax(0).values
    symbols = torch.empty(max(1, len(vector)), dtype=torch.uint8, device=device)
    fields = torch.empty(max(1, len(vector)), dtype=torch.int64, device=device)
    by_class = (of.classes, of.least, of.in_gap)
    launch(_symbols, count, vector, *where, run, before, symbols, fields, seen, *by_class, count + 1, steps, **levels)
    of_parts = (table.edges, table.slots, run, seen, of.widths, of.firsts, chosen, told)
    launch(_choose, parts, *of_parts, count + 1, parts, SLOT=_SLOT)
    launch(_bits, count, *where, chosen, run, symbols, of.widths, *rest, sums_of_bits, count + 1, SLOT=_SLOT)
    bits = sums_of_bits.cumsum(1)
    launch(_bytes, parts, table.slots, bits, told, count + 1, parts)
    told = told.cumsum(1)
    words = torch.zeros(-(-capacity // 4), dtype=torch.int32, device=device)
    of_table = (*where, chosen, table.places, table.count_bits)
    streams = (run, bits, told, symbols, fields, of.widths, of.codes, *rest, of.firsts)
    end = (len(words), table.nbytes, count + 1, parts)
    constants = {"UNIT_PARTS": UNIT * PARTS, "HEAD": form.HEAD, "SLOT": _SLOT}
    launch(_pack, count, *of_table, *streams, words, steps, *end, **constants)
    return words.view(torch.uint8), torch.addmv(table.fixed, of.weights, told[:, -1].double())


def add_decoded(total: torch.Tensor, messages: Sequence[torch.Tensor], scale: float, table: LevelTable) -> torch.Tensor:
    """Add scale times the values of messages, each (bytes,), uint8, with their headers, to a vector (numel,), float32.

    Returns:
        (1,), int64: 0; or bits: 1 if a part has its own table or a message's header is not of numbers, 2 if something
        is out of its bounds, 4 if sums differ. Then the vector is not valid, but nothing was written outside.
    """
    flags = torch.zeros(1, dtype=torch.int64, device=total.device)
    together = max(1, _MOST // max(1, len(total)))
    for first in range(0, len(messages), together):
        _add_together(total, messages[first : first + together], scale, table, flags)
    return flags


def _add_together(
    total: torch.Tensor, messages: Sequence[torch.Tensor], scale: float, table: LevelTable, flags: torch.Tensor
) -> None:
    device, count, parts, of, ranks = total.device, len(table.part_of), table.parts, table.of, len(messages)
    memory, starts = joined(messages)
    sent = torch.tensor(list(zip(starts, map(len, messages), strict=True))).to(device, non_blocking=True)
    told, part, begins, codes, rest, gaps, numbers = _zeros(
        device, (ranks, 2, parts + 1), (ranks, 5, parts), *((ranks, size + 1) for size in (count, parts, count, count)),
        (ranks, count),
    )  # fmt: skip
    of_table, end = (table.edges, table.slots, table.places, table.count_bits), (table.nbytes, parts, count)
    given = (memory, sent, *of_table, told, part, flags, of.firsts)
    launch(_read_parts, ranks * triton.cdiv(parts, _PER), *given, *end[:2], HEAD=form.HEAD, PER=_PER, SLOT=_SLOT)
    told = told.cumsum(2)
    most = triton.next_power_of_2(form.PART // _SLOT)
    launch(_read_lengths, ranks * parts, memory, sent, table.slots, told, begins, codes, *end, MOST=most)
    codes, sizes = codes.cumsum(1), (*end, len(total))
    symbols = torch.empty(max(1, ranks * len(total)), dtype=torch.uint8, device=device)
    where, bits = (table.edges, table.slots, table.part_of), (of.in_gap, of.in_more)
    launch(
        _read_codes, ranks * triton.cdiv(count, _LANES), memory, sent, *where, told, part, begins, codes, of.known,
        symbols, flags, *sizes, SLOT=_SLOT, LANES=_LANES, BITS=LONGEST,
    )  # fmt: skip
    launch(_rest_bits, ranks * count, *where, part, symbols, *bits, rest, *sizes[1:], SLOT=_SLOT)
    streams, by_symbol = (told, part, codes, rest.cumsum(1)), (symbols, of.least, *bits)
    launch(_gap_sums, ranks * count, memory, sent, *where, *streams, *by_symbol, gaps, *sizes, SLOT=_SLOT)
    launch(
        _add, count, memory, sent, total, *where, *streams, gaps.cumsum(1), *by_symbol, numbers, flags, scale, ranks,
        *sizes, UNIT=UNIT, LARGEST=form.LARGEST, MOST=most, SLOT=_SLOT,
    )  # fmt: skip
    launch(_check, ranks * parts, sent, table.slots, *streams, numbers, flags, *end, MOST=most)
