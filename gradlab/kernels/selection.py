"""The largest magnitudes of each layer, or of each chunk, with their positions, and sums of several ranks' ones.

Positions are coded as `gradlab.coding.positions` does it and ascend in each layer or chunk. Among equal magnitudes the
first ones are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from gradlab.coding.bits import packed_bytes
from gradlab.kernels import launch
from gradlab.kernels.blocks import magnitude_bits
from gradlab.kernels.codes import load_codes, random_words, rows_of, store_codes

_TILE, _BINS = 4096, 2048  # elements of a layer that a program works on, and numbers of a digit of magnitudes
_ENTRIES = 128  # of a message that are added together
_FINITE, _INFINITE = 0x7F7FFFFF, 0x7F800000  # bits of the largest finite magnitude, and of infinity


@dataclass(frozen=True)
class Places:
    """The layers of a vector and the coding of positions in them, on a device.

    rows: each layer's start, size, number of elements sent, first tile, place of its values, first byte of its
        class in a message, places of a position in the class before its own, positions of the class, bits and bytes
        from one to the next of a position, and whether it is a bit map, (layers, 11), int64.
    of_tiles: the layer of each run of at most `_TILE` elements of a layer, (tiles,), int64.
    bitmaps: whether a layer has one, and whether one of several tiles has.
    """

    rows: torch.Tensor
    of_tiles: torch.Tensor
    bitmaps: tuple[bool, bool]


class Counted(NamedTuple):
    """Elements of layers that a kernel has counted, for one that writes them.

    limits: bits of a magnitude above which a layer's elements are sent, and how many equal it, (2 * layers,), int32.
    counts: number of a tile's elements above that magnitude, and of those that equal it, (2 * tiles,), int32.
    words: zeros for coded positions, int32; None: there are none yet.
    unsound: a number that is not 0 if all values have to be NaN, (1,), int32; None: they never have to.
    """

    limits: torch.Tensor
    counts: torch.Tensor
    words: torch.Tensor | None = None
    unsound: torch.Tensor | None = None


def places_of(rows: Sequence[Sequence[int]], device: torch.device) -> Places:
    """Bring rows of `Places`, without the first tile, to a device."""
    found: list[tuple[int, ...]] = []
    of_tiles: list[int] = []
    for at, (start, size, count, *rest) in enumerate(rows):
        found.append((start, size, count, len(of_tiles), *rest))
        of_tiles += [at] * -(-size // _TILE)
    table = torch.tensor(found, dtype=torch.int64).view(-1, 11)
    sizes = [row[1] for row in rows if row[-1]]
    bitmaps = (bool(sizes), max(sizes, default=0) > _TILE)
    return Places(table.to(device), torch.tensor(of_tiles, dtype=torch.int64).to(device), bitmaps)


@triton.jit
def _put_field(words, first, slot, code, groups, width, inside, SIZE: tl.constexpr):
    # Words of zeros, to which several programs add.
    before = width // (2 * SIZE) * (2 * SIZE)
    bit = 8 * (first + groups * before) + slot * SIZE
    field = ((code >> before) & (2**SIZE - 1)).to(tl.int32) << (bit % 32).to(tl.int32)
    tl.atomic_add(words + bit // 32, field, mask=inside & ((width + slot * 0) & SIZE != 0), sem="relaxed")


@triton.jit
def _get_field(octets, first, slot, groups, width, inside, SIZE: tl.constexpr):
    before = width // (2 * SIZE) * (2 * SIZE)
    at = first + groups * before + slot * SIZE // 8
    octet = tl.load(octets + at, mask=inside & ((width + slot * 0) & SIZE != 0), other=0).to(tl.int64)
    return ((octet >> (slot * SIZE % 8)) & (2**SIZE - 1)) << before


@triton.jit
def _plane(of_class, step):
    return tl.where(step == 1, (of_class + 7) // 8 * 8, 1)


@triton.jit
def _put(octets, words, first, slot, code, of_class, width, step, inside):
    groups, plane = (of_class + 7) // 8, _plane(of_class, step)
    for j in range(width // 8):
        tl.store(octets + first + j * plane + slot * step, ((code >> (8 * j)) & 255).to(tl.uint8), mask=inside)
    for w in tl.static_range(3):
        _put_field(words, first, slot, code, groups, width, inside, 4 >> w)


@triton.jit
def _get(octets, first, slot, of_class, width, step, inside):
    groups, plane = (of_class + 7) // 8, _plane(of_class, step)
    code = (slot * 0).to(tl.int64)
    for j in range(width // 8):
        code |= tl.load(octets + first + j * plane + slot * step, mask=inside, other=0).to(tl.int64) << (8 * j)
    for w in tl.static_range(3):
        code |= _get_field(octets, first, slot, groups, width, inside, 4 >> w)
    return code


@triton.jit
def _row(rows, layer, given):
    at = rows + 11 * layer
    count, of_class = tl.load(at + 2), tl.load(at + 7)
    count, of_class = tl.where(given < 0, count, given), tl.where(given < 0, of_class, given)
    return tl.load(at), tl.load(at + 1), count, tl.load(at + 3), tl.load(at + 4), of_class


@triton.jit
def _coding(rows, layer):
    at = rows + 11 * layer
    return tl.load(at + 5), tl.load(at + 6), tl.load(at + 8), tl.load(at + 9), tl.load(at + 10) > 0


@triton.jit
def _threshold(bins, layers, layer, wanted, PASSES: tl.constexpr, BINS: tl.constexpr):
    """Return the leading digits of the smallest magnitude that is sent, and how many are sent that begin so."""
    found = (wanted * 0).to(tl.int32)
    digits = tl.arange(0, BINS)
    for p in tl.static_range(PASSES):
        n = tl.load(bins + (p * layers + layer) * BINS + digits)
        reached = tl.sum(n, 0) - tl.cumsum(n, 0) + n >= wanted
        digit = tl.sum(reached.to(tl.int32), 0) - 1
        wanted -= tl.sum(tl.where(digits > digit, n, 0), 0)
        found = found * (512 if p == 2 else 2048) + digit
    return found, wanted


@triton.jit
def _sampled_at(at, first, layer, rows, seed, TILE: tl.constexpr):
    if layer == 1:  # elements of the first layer, drawn at random
        high = random_words(seed, first, TILE) >> 32
        at = ((high * tl.load(rows + 1).to(tl.uint64)) >> 32).to(tl.int64)
    return at


@triton.jit
def _histogram(
    x, rows, of_tiles, bins, mark, layers, given, seed,
    PASS: tl.constexpr, MARKED: tl.constexpr, SAMPLED: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    layer = tl.load(of_tiles + tile)
    start, size, count, first_tile, _, _ = _row(rows, layer, given)
    first = (tile - first_tile) * TILE
    i = first + tl.arange(0, TILE)
    inside = i < size
    at = _sampled_at(start + i, first, layer, rows, seed, TILE) if SAMPLED else start + i
    key = magnitude_bits(tl.load(x + at, mask=inside, other=0.0))
    if PASS == 0 and MARKED > 0:
        tl.store(mark, 1, mask=(tl.max(tl.where(inside, key, 0), 0) > MARKED) & (layer >= SAMPLED))
    found, _ = _threshold(bins, layers, layer, count, PASS, BINS)
    if PASS == 0:
        digit = key >> 20
    elif PASS == 1:
        digit = (key >> 9) & 2047
        inside = inside & (key >> 20 == found)
    else:
        digit = key & 511
        inside = inside & (key >> 9 == found)
    # All others are counted as zeros, and taken off.
    digits = tl.arange(0, BINS)
    others = TILE - tl.sum(inside.to(tl.int32), 0)
    n = tl.histogram(tl.where(inside, digit, 0), BINS) - tl.where(digits == 0, others, 0)
    tl.atomic_add(bins + (PASS * layers + layer) * BINS + digits, n, mask=n > 0, sem="relaxed")


@triton.jit
def _tally(key, limit, ties, limits, counts, layer, tile, first_tile):
    """Write a tile's part of `Counted`, and return the number of elements above the limit."""
    above = tl.sum((key > limit).to(tl.int32), 0)
    tl.store(counts + 2 * tile, above)
    tl.store(counts + 2 * tile + 1, tl.sum((key == limit).to(tl.int32), 0))
    if tile == first_tile:
        tl.store(limits + 2 * layer, limit)
        tl.store(limits + 2 * layer + 1, ties.to(tl.int32))
    return above


@triton.jit
def _count(
    x, rows, of_tiles, bins, limits, counts, found, mark, layers, given, stride,
    LEVELS: tl.constexpr, LOWERED: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    layer = tl.load(of_tiles + tile)
    start, size, count, first_tile, _, _ = _row(rows, layer, given)
    i = (tile - first_tile) * TILE + tl.arange(0, TILE)
    key = tl.where(i < size, magnitude_bits(tl.load(x + start + i, mask=i < size, other=0.0)), -1)
    if BINS > 0:
        limit, ties = _threshold(bins, layers, layer, count, 3, BINS)
    else:
        limit, ties = given, count * 0
    _tally(key, limit, ties, limits, counts, layer, tile, first_tile)
    if LEVELS > 0:
        least, _ = _threshold(bins, layers, 1, tl.load(rows + 13), 3, BINS)
        level = tl.where(tl.load(mark) > 0, 0x7FFFFFFF, least).to(tl.float32, bitcast=True)
        for at in tl.static_range(LEVELS):
            limits += stride
            counts += stride
            # NaN reaches all levels, as all elements do NaN.
            limit = tl.where(level == level, level.to(tl.int32, bitcast=True), 0) - 1
            reached = _tally(key, limit, count * 0, limits, counts, layer, tile, first_tile)
            tl.atomic_add(found + at, reached, sem="relaxed")
            level = level * LOWERED


@triton.jit
def _write(
    x, rows, of_tiles, limits, counts, values, octets, words, mark, given,
    MARKED: tl.constexpr, TILE: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    layer = tl.load(of_tiles + tile)
    start, size, _, first_tile, of_values, of_class = _row(rows, layer, given)
    first, base, width, step, bitmap = _coding(rows, layer)
    i = (tile - first_tile) * TILE + tl.arange(0, TILE)
    value = tl.load(x + start + i, mask=i < size, other=0.0)
    key = tl.where(i < size, magnitude_bits(value), -1)
    limit, ties = tl.load(limits + 2 * layer), tl.load(limits + 2 * layer + 1)
    above = tl.zeros((TOGETHER,), tl.int32)
    alike = above
    for begin in range(first_tile, tile, TOGETHER):
        j = begin + tl.arange(0, TOGETHER)
        above += tl.load(counts + 2 * j, mask=j < tile, other=0)
        alike += tl.load(counts + 2 * j + 1, mask=j < tile, other=0)
    same = (key == limit).to(tl.int32)
    left = ties - tl.sum(alike, 0)
    sent = (key > limit) | ((same > 0) & (tl.cumsum(same, 0) <= left))
    before = tl.sum(above, 0) + tl.minimum(tl.sum(alike, 0), ties)
    slot = before + tl.cumsum(sent.to(tl.int32), 0) - 1
    if MARKED:
        value = tl.where(tl.load(mark) > 0, float("nan"), value + 0.0)
    tl.store(values + of_values + slot, value, mask=sent)
    place = base + tl.where(bitmap, i, slot.to(tl.int64))
    _put(octets, words, first, place, tl.where(bitmap, 1, i), of_class, width, step, sent)


@triton.jit
def _first_at(octets, first, base, of_class, width, step, count, wanted, steps):
    """Return how many of a layer's positions are below `wanted`, of each rank."""
    low = (wanted * 0).to(tl.int64)
    high = low + count
    for _ in range(steps):
        middle = (low + high) // 2
        open = low < high
        below = open & (_get(octets, first, base + middle, of_class, width, step, open) < wanted)
        low = tl.where(below, middle + 1, low)
        high = tl.where(open & (below == 0), middle, high)
    return low


@triton.jit
def _bits(octets, sent, rows, of_tiles, counts, tiles, stride, VARYING: tl.constexpr, TILE: tl.constexpr):
    rank, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    layer = tl.load(of_tiles + tile)
    _, size, _, first_tile, _, of_class = _row(rows, layer, -1)
    first, base, width, step, bitmap = _coding(rows, layer)
    if bitmap:
        i = (tile - first_tile) * TILE + tl.arange(0, TILE)
        octets += tl.load(sent + 3 * rank + 2) if VARYING else rank.to(tl.int64) * stride
        bits = _get(octets, first, base + i, of_class, width, step, i < size)
        tl.store(counts + rank * tiles + tile, tl.sum(bits.to(tl.int32), 0))


@triton.jit
def _message(values, octets, sent, rank, count, VARYING: tl.constexpr):
    """Return where a rank's values and positions are, and how many. sent: these of each rank, if they are others."""
    if VARYING:
        count = tl.load(sent + 3 * rank)
        values += tl.load(sent + 3 * rank + 1)
        octets += tl.load(sent + 3 * rank + 2)
    return values, octets, count


@triton.jit
def _add(
    out, values, octets, least, greatest, sent, rows, of_tiles, counts, tiles, ranks, value_stride, stride, given,
    steps, scale, BITMAPS: tl.constexpr, ADD: tl.constexpr, TAKE: tl.constexpr, VARYING: tl.constexpr,
    RANKS: tl.constexpr, TILE: tl.constexpr, ENTRIES: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    layer = tl.load(of_tiles + tile)
    start, size, count, first_tile, of_values, of_class = _row(rows, layer, given)
    first, base, width, step, bitmap = _coding(rows, layer)
    begin = (tile - first_tile) * TILE
    i = begin + tl.arange(0, TILE)
    end = tl.minimum(begin + TILE, size)
    here, values = out + start, values + of_values
    unsound = tl.load(least) * 0.0 + tl.load(greatest) * 0.0 if TAKE else 0.0
    if BITMAPS and bitmap:
        total = tl.load(here + i, mask=i < size, other=0.0) if ADD else tl.zeros((TILE,), tl.float32)
        for rank in range(ranks):
            before = tl.zeros((TOGETHER,), tl.int32)
            for j in range(first_tile, tile, TOGETHER):
                k = j + tl.arange(0, TOGETHER)
                before += tl.load(counts + rank * tiles + k, mask=k < tile, other=0)
            source, mine, n = _message(values, octets, sent, rank, count, VARYING)
            bit = _get(mine, first, base + i, of_class, width, step, i < size).to(tl.int32)
            slot = tl.minimum(tl.sum(before, 0) + tl.cumsum(bit, 0) - 1, n - 1)
            if TAKE:
                tl.store(values + slot, total + unsound, mask=bit > 0)
            else:
                value = tl.load(source + slot, mask=bit > 0, other=0.0)
                total = tl.where(bit > 0, total + value * scale, total)
            octets += stride
            values += value_stride
        if not TAKE:
            tl.store(here + i, total, mask=i < size)
    else:
        if not ADD:
            tl.store(here + i, tl.zeros((TILE,), tl.float32), mask=i < size)
        number = tl.arange(0, 2 * RANKS).to(tl.int64)
        each = tl.minimum(number // 2, ranks - 1)
        wanted = tl.where(number % 2 == 0, begin, end)  # of each rank, for two searches at once
        _, of_ranks, of_each = _message(values, octets + each * stride, sent, each, count, VARYING)
        edges = _first_at(of_ranks, first, base, of_each if VARYING else of_class, width, step, of_each, wanted, steps)
        for rank in range(ranks):
            tl.debug_barrier()  # all that the rank before has written is there
            source, mine, n = _message(values, octets, sent, rank, count, VARYING)
            low = tl.sum(tl.where(number == 2 * rank, edges, 0), 0)
            high = tl.sum(tl.where(number == 2 * rank + 1, edges, 0), 0)
            for j in range(low, high, ENTRIES):
                slot = j + tl.arange(0, ENTRIES)
                place = _get(mine, first, base + slot, n if VARYING else of_class, width, step, slot < high)
                some = (slot < high) & (place >= begin) & (place < end)  # of a bad message no place is beyond
                total = tl.load(here + place, mask=some, other=0.0)
                if TAKE:
                    tl.store(values + slot, total + unsound, mask=some)
                else:
                    value = tl.load(source + slot, mask=some, other=0.0)
                    tl.store(here + place, total + value * scale, mask=some)
            octets += stride
            values += value_stride


def largest_of_each(
    vector: torch.Tensor,
    places: Places,
    count: int,
    nbytes: int,
    given: int = -1,
    counted: Counted | None = None,
    sound: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the largest magnitudes of each layer of a vector (numel,): values (count,) and coded positions, uint8.

    given: number of elements that are sent of the only layer; -1: the table has it.
    counted: the result of `counts_above` or `levels_reached`; None: the largest are counted here.
    sound: whether all values are NaN if there is NaN or infinity anywhere in the vector.
    """
    if counted is None:
        counted = _counted(vector, places, nbytes, given, _FINITE if sound else 0)[1][0]
    words = counted.words
    words = vector.new_zeros(-(-nbytes // 4) + 1, dtype=torch.int32) if words is None else words
    octets, values, mark = words.view(torch.uint8), vector.new_empty(count), counted.unsound
    tensors = (vector, places.rows, places.of_tiles, counted.limits, counted.counts, values, octets, words)
    constants = {"MARKED": mark is not None, "TILE": _TILE, "TOGETHER": 256}
    launch(_write, len(places.of_tiles), *tensors, words if mark is None else mark, given, **constants)
    return values, octets[:nbytes]


def _counted(
    vector: torch.Tensor, places: Places, nbytes: int, given: int, marked: int,
    levels: int = 0, lowered: float = 0.0, seed: int = 0,
) -> tuple[torch.Tensor, list[Counted]]:  # fmt: skip
    """Count the largest magnitudes of each layer; with levels, do what `levels_reached` does."""
    layers, tiles = (1, -(-vector.numel() // _TILE)) if levels else (len(places.rows), len(places.of_tiles))
    stride, tables = 2 * (layers + tiles), len(places.rows)
    bin_count, word_count = 3 * tables * _BINS, -(-nbytes // 4) + 1
    scratch = vector.new_zeros(bin_count + 16 + word_count, dtype=torch.int32)
    bins, found, mark, words = scratch.split([bin_count, 15, 1, word_count])
    rows, table = scratch.new_empty(levels + 1, stride), (places.rows, places.of_tiles)
    form = {"MARKED": marked, "SAMPLED": int(levels > 0), "BINS": _BINS, "TILE": _TILE}
    for at in range(3):
        given_numbers = (tables, given, seed)
        launch(_histogram, len(places.of_tiles), vector, *table, bins, mark, *given_numbers, PASS=at, **form)
    unsound = mark if marked and not levels else None
    counted = [Counted(row[: 2 * layers], row[2 * layers :], words, unsound) for row in rows.unbind()]
    tensors = (vector, *table, bins, counted[0].limits, counted[0].counts, found, mark)
    launch(_count, tiles, *tensors, tables, given, stride, LEVELS=levels, LOWERED=lowered, BINS=_BINS, TILE=_TILE)
    return found[:levels], counted


def counts_above(vector: torch.Tensor, places: Places, level: float) -> Counted:
    """Count the elements of a vector's only layer that reach a level, and NaN."""
    limit, tiles = int(np.float32(level).view(np.int32)) - 1, len(places.of_tiles)
    limits, counts = vector.new_empty(2 + 2 * tiles, dtype=torch.int32).split([2, 2 * tiles])
    tensors = (vector, places.rows, places.of_tiles, limits, limits, counts, limits, limits)
    launch(_count, tiles, *tensors, 1, limit, 0, LEVELS=0, LOWERED=0.0, BINS=0, TILE=_TILE)
    return Counted(limits, counts)


def levels_reached(
    vector: torch.Tensor, places: Places, nbytes: int, seed: int, levels: int, lowered: float
) -> tuple[torch.Tensor, list[Counted]]:
    """Count the elements of a vector (numel,) that reach the least of a random sample's largest magnitudes, and that
    lowered by a factor once, twice, ... NaN reaches all, as all do NaN.

    Args:
        places: the vector, with how many of its largest may be sent, and the sample, with how many of it are taken.
        nbytes: the most bytes of coded positions.
        seed: the key of random numbers, from which the sample's positions follow as in `RandomBits.below`.
        levels: number of levels, at most 15.
        lowered: the factor.

    Returns:
        The counts (levels,), int32; and what `largest_of_each` takes to send as many of the largest as may be, and to
        send what reaches each of the levels.
    """
    return _counted(vector, places, nbytes, -1, _INFINITE, levels, lowered, seed)


def add_selected(
    out: torch.Tensor,
    payloads: Sequence[Sequence[torch.Tensor]],
    places: Places,
    scale: float,
    add: bool,
    given: int | Sequence[int] = -1,
    extremes: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Write the sum of what payloads, values and positions, stand for, in their order, times a factor, to a vector
    (numel,).

    add: whether it is added to what `out` has.
    given: number of elements as for `largest_of_each`, or that of each payload, all in one coding, if they differ.
    extremes: least and greatest of the vector, from which values are then taken, all NaN if one of them is not finite.
    """
    varying, sent = not isinstance(given, int), places.rows
    if isinstance(given, int):
        (values, value_stride), (octets, stride) = map(rows_of, zip(*payloads, strict=True))
        count = len(payloads[0][0])
    else:
        (values, of_values), (octets, of_octets) = map(joined, zip(*payloads, strict=True))
        sent = torch.tensor(list(zip(given, of_values, of_octets, strict=True))).to(out.device, non_blocking=True)
        value_stride, stride, count, given = 0, 0, max(given), 0
    tiles, ranks, form = len(places.of_tiles), len(payloads), {"VARYING": varying, "TILE": _TILE}
    counts = octets.new_empty(ranks * tiles, dtype=torch.int32)
    if places.bitmaps[1]:
        launch(_bits, ranks * tiles, octets, sent, places.rows, places.of_tiles, counts, tiles, stride, **form)
    sizes = (tiles, ranks, value_stride, stride, given, count.bit_length(), scale)
    constants = {"BITMAPS": places.bitmaps[0], "ADD": add, "RANKS": triton.next_power_of_2(ranks)}
    constants |= {"TAKE": extremes is not None, "ENTRIES": _ENTRIES, "TOGETHER": 256, **form}
    given_tensors = (out, values, octets, *(extremes or (out, out)), sent, places.rows, places.of_tiles, counts)
    launch(_add, tiles, *given_tensors, *sizes, **constants)


def joined(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    """Return a tensor, and where in it others begin, which are joined if they are no parts of one memory."""
    first = next((one for one in tensors if len(one)), tensors[0])
    if len({one.untyped_storage().data_ptr() for one in tensors if len(one)}) < 2:
        apart = [one.data_ptr() - first.data_ptr() if len(one) else 0 for one in tensors]
        return first, [one // first.element_size() for one in apart]
    return torch.cat(list(tensors)), [sum(map(len, tensors[:at])) for at in range(len(tensors))]


def values_at(vector: torch.Tensor, encoded: torch.Tensor, places: Places, count: int) -> torch.Tensor:
    """Take the values (count,) of a vector at coded positions, all NaN if it holds NaN or infinity anywhere."""
    taken = vector.new_empty(count)
    add_selected(vector, [(taken, encoded)], places, 1.0, True, extremes=torch.aminmax(vector))
    return taken


# --- chunks ---------------------------------------------------------------------------------------------------------


@triton.jit
def _of_chunk(
    x, values, octets, words, extremes, numel, sent, width, chunk, count, of_left, TILE: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    size = tl.minimum(chunk, numel - at * chunk)
    wanted = tl.where(size == chunk, count, of_left)
    i = tl.arange(0, TILE)
    value = tl.load(x + at * chunk + i, mask=i < size, other=0.0)
    key = tl.where(i < size, magnitude_bits(value), -1)
    limit = (wanted * 0).to(tl.int32)
    for b in range(31):
        higher = limit | (1 << (30 - b))
        limit = tl.where(tl.sum((key >= higher).to(tl.int32), 0) >= wanted, higher, limit)
    same = (key == limit).to(tl.int32)
    above = tl.sum((key > limit).to(tl.int32), 0)
    chosen = (key > limit) | ((same > 0) & (tl.cumsum(same, 0) <= wanted - above))
    slot = at * count + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(values + slot, value, mask=chosen)
    tl.store(extremes + 2 * at, limit)
    tl.store(extremes + 2 * at + 1, tl.max(key, 0))
    _put(octets, words, 0, slot, i, sent, width, 1, chosen)


@triton.jit
def _quantize(
    values, extremes, codes, parts, sent, chunks, programs, BINS: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    least = tl.full((TILE,), 0x7FFFFFFF, tl.int32)
    largest = tl.zeros((TILE,), tl.int32)
    for begin in range(0, chunks, TILE):
        j = begin + tl.arange(0, TILE)
        least = tl.minimum(least, tl.load(extremes + 2 * j, mask=j < chunks, other=0x7FFFFFFF))
        largest = tl.maximum(largest, tl.load(extremes + 2 * j + 1, mask=j < chunks, other=0))
    low = tl.min(least, 0).to(tl.float32, bitcast=True)
    range_ = tl.max(largest, 0).to(tl.float32, bitcast=True) - low
    range_ = tl.where(range_ < 1.1754943508222875e-38, 1.1754943508222875e-38, range_)
    first = tl.program_id(0).to(tl.int64) * TILE
    i = first + tl.arange(0, TILE)
    inside = i < sent
    value = tl.load(values + i, mask=inside, other=0.0)
    magnitude = tl.abs(value)
    place = tl.floor(tl.div_rn(magnitude - low, range_ + magnitude * 0) * BINS)
    place = tl.where(place == place, tl.minimum(tl.maximum(place, 0.0), BINS - 1.0), 0.0)  # NaN is in the first bin
    number = place.to(tl.int32)
    code = tl.where(inside, 2 * number + (value < 0).to(tl.int32), 0)
    groups = (sent + 7) // 8
    store_codes(codes, code, first, groups, groups, BITS, TILE)
    for bin in range(BINS):
        here = inside & (number == bin)
        total = tl.sum(tl.where(here, magnitude, 0.0).to(tl.float64), 0)
        at = parts + 2 * (bin * programs + tl.program_id(0))
        tl.store(at, total)
        tl.store(at + 1, tl.sum(here.to(tl.int32), 0).to(tl.float64))


@triton.jit
def _means(parts, means, programs, TILE: tl.constexpr):
    bin = tl.program_id(0)
    total = tl.zeros((TILE,), tl.float64)
    count = total
    for begin in range(0, programs, TILE):
        j = begin + tl.arange(0, TILE)
        at = parts + 2 * (bin * programs + j)
        total += tl.load(at, mask=j < programs, other=0.0)
        count += tl.load(at + 1, mask=j < programs, other=0.0)
    tl.store(means + bin, (tl.sum(total, 0) / tl.maximum(tl.sum(count, 0), 1.0)).to(tl.float32))


@triton.jit
def _add_chunk(
    out, octets, codes, values, ranks, stride, code_stride, value_stride, numel, sent, width, chunk, count, of_left,
    scale, BITS: tl.constexpr, ADD: tl.constexpr, COUNT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    size = tl.minimum(chunk, numel - at * chunk)
    wanted = tl.where(size == chunk, count, of_left)
    here = out + at * chunk
    if not ADD:
        i = tl.arange(0, TILE)
        tl.store(here + i, tl.zeros((TILE,), tl.float32), mask=i < size)
    j = tl.arange(0, COUNT)
    some, slot = j < wanted, at * count + j
    for _ in range(ranks):
        tl.debug_barrier()  # all that the rank before has written is there
        place = tl.minimum(_get(octets, 0, slot, sent, width, 1, some), size - 1)
        if BITS == 0:
            value = tl.load(values + slot, mask=some, other=0.0)
        else:
            code = load_codes(codes, slot, some, (sent + 7) // 8, BITS)
            value = tl.load(values + code // 2, mask=some, other=0.0)
            value = tl.where(code % 2 == 1, -value, value)
        total = tl.load(here + place, mask=some, other=0.0)
        tl.store(here + place, total + value * scale, mask=some)
        octets += stride
        codes += code_stride
        values += value_stride


def largest_of_chunks(
    vector: torch.Tensor, chunk: int, count: int, of_left: int, width: int, bits: int | None
) -> tuple[torch.Tensor, ...]:
    """Select the largest magnitudes of each chunk of a vector (numel,), as `ChunkTopK.compress` does, the means of bins
    but for their last bits. of_left: number of values that are sent of the last chunk, if it is shorter."""
    numel = vector.numel()
    chunks, sent = -(-numel // chunk), numel // chunk * count + of_left
    nbytes = packed_bytes(sent, width)
    words = vector.new_zeros(-(-nbytes // 4) + 1, dtype=torch.int32)
    octets, extremes, values = words.view(torch.uint8), words.new_empty(2 * chunks), vector.new_empty(sent)
    given = (vector, values, octets, words, extremes, numel, sent, width, chunk, count, of_left)
    launch(_of_chunk, chunks, *given, TILE=triton.next_power_of_2(chunk))
    if bits is None:
        return octets[:nbytes], values
    bins, programs = 2 ** (bits - 1), triton.cdiv(sent, 1024)
    codes, means = octets.new_empty(packed_bytes(sent, bits)), vector.new_empty(bins if sent else 0)
    parts = vector.new_empty(2 * bins * programs, dtype=torch.float64)
    sizes = (sent, chunks, programs)
    launch(_quantize, programs, values, extremes, codes, parts, *sizes, BINS=bins, BITS=bits, TILE=1024)
    launch(_means, len(means), parts, means, programs, TILE=256)
    return octets[:nbytes], codes, means


def add_chunks(
    out: torch.Tensor,
    payloads: Sequence[Sequence[torch.Tensor]],
    sizes: tuple[int, int, int, int],
    bits: int | None,
    scale: float,
    add: bool,
) -> None:
    """Do what `add_selected` does with what `largest_of_chunks` returned. sizes: its `chunk`, `count`, `of_left` and
    `width`."""
    chunk, count, of_left, width = sizes
    numel = out.numel()
    sent = numel // chunk * count + of_left
    (octets, stride), *of_codes, (values, value_stride) = map(rows_of, zip(*payloads, strict=True))
    ((codes, code_stride),) = of_codes or [(octets, 0)]
    given = (octets, codes, values, len(payloads), stride, code_stride, value_stride)
    rest = (numel, sent, width, chunk, count, of_left, scale)
    constants = {"BITS": bits or 0, "ADD": add, "COUNT": triton.next_power_of_2(count)}
    launch(_add_chunk, -(-numel // chunk), out, *given, *rest, **constants, TILE=triton.next_power_of_2(chunk))
