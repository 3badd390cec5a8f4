"""Encode whole numbers that are mostly zero as bytes, near their entropy.

A layer in which at most two fifths of the numbers are other than zero is sent as gaps: how many zeros stand before each
of these. The class of a gap's high part and the class of a magnitude are a byte, a symbol. The number of low bits
follows from the layer's share of zeros, so that gaps of layers whose shares differ share one table. A symbol of a
denser layer is two numbers or one. Symbols get Huffman codes. A second stream has what they leave open: signs, places
in classes, low bits and large numbers, which are nearly uniform.

Large layers are cut into parts. A message begins with a table of parts: which of the codes that everybody knows a part
has (`gradlab.coding.level_codes`), its numbers other than zero, and the bytes of its second stream. The bits of each
4,096 codes are sent before them, so that they are written and read side by side. Codes and second streams of each part
begin with a byte. Parts that no such code fits come last, with tables as DEFLATE writes them anew for every 32 thousand
symbols or so.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from gradlab.coding.deflate import CODES_ALONE, deflated, inflated
from gradlab.coding.fields import ends_of, numbers_at_bytes, packed_fields, packed_together, padded, read_fields
from gradlab.coding.huffman import SYMBOLS, Code
from gradlab.coding.level_codes import INDEX, Book, books
from gradlab.coding.threads import each
from gradlab.errors import GradlabError

LARGEST = 2**30  # magnitude
_KEPT = 2  # binary digits of the mean gap that its high part has
# The least number of each class, and how many bits say where in its class a number is; the last class has no end.
_LEAST = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64, 128, 256], np.int32)
_INSIDE = np.array([0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 3, 3, 5, 6, 7, 0])
_ENDLESS = len(_LEAST) - 1
_ALONE = 8  # the first class that is not of one number alone
CLASS = (np.searchsorted(_LEAST, np.arange(_LEAST[-1] + 1), "right") - 1).astype(np.uint8)  # of 0 to 256
_MIDDLE = 127  # byte of a zero in a dense layer; 255 stands for a number in the second stream
_PAIRED = 7  # half a byte of a zero, where two numbers share a byte; 15 stands for such a number
_FEW = 200  # so many numbers up to 7 for each larger one, and two share a byte
_OF_GAPS, _OF_PAIRS, _OF_NUMBERS = range(3)  # what bytes are codes of
_COUNT = struct.Struct("<I")
HEAD = 2 + INDEX  # bits of a part's row in the table, before its count
PART, _BLOCK = 2**18, 2**16  # elements of a layer's part, and numbers other than zero that are worked on together
CODES = 4096  # of which a message tells the bits
_TOGETHER = 4  # codes that make one field
_OF_LEVEL = LARGEST.bit_length()  # bits of a level's sign and its magnitude, less one
_OF_GAP = PART.bit_length() - 1  # bits of a gap, at most
_OF_CLASS, _SYMBOLS = np.arange(len(_LEAST)), np.arange(SYMBOLS)
IN_MORE = np.where(_OF_CLASS == _ENDLESS, _OF_LEVEL - 1, _INSIDE).astype(np.uint8)
_SHIFTS = np.arange(_OF_GAP + 1)[:, None]
# By the low bits of a layer's gaps and by symbol: the least gap, and the bits of its sign and its place, (19 * 256,).
LEAST_GAP = (_LEAST.astype(np.int64)[_SYMBOLS >> 4] << _SHIFTS).clip(0, PART).astype(np.int32).reshape(-1)
IN_GAP = 1 + np.where(_SYMBOLS >> 4 == _ENDLESS, _OF_GAP, _INSIDE[_SYMBOLS >> 4] + _SHIFTS).clip(0, _OF_GAP)
IN_GAP = IN_GAP.astype(np.uint8).reshape(-1)
_MASKS = (2 ** np.arange(_OF_GAP + 2) - 1).astype(np.uint32)
_LONGEST_REST = 7  # bytes of a number in the second stream, at most


@dataclass(frozen=True)
class _Layers:
    """How the numbers of layers, or parts of layers, are sent.

    edges: beginnings of layers, and the end: (L + 1,).
    counts: numbers other than zero of each layer, (L,).
    dense: whether a layer is sent number by number, (L,).
    low_bits: low bits of the gaps of each layer, (L,).
    """

    edges: np.ndarray
    counts: np.ndarray
    dense: np.ndarray
    low_bits: np.ndarray


def _layers(edges: np.ndarray, counts: np.ndarray) -> _Layers:
    numels = np.diff(edges)
    mean_gap = np.maximum(1, numels // np.maximum(1, counts))
    low_bits = np.maximum(0, np.frexp(mean_gap.astype(np.float64))[1] - 1 - _KEPT).astype(np.uint8)
    return _Layers(edges, counts, 5 * counts > 2 * numels, low_bits)


@dataclass(frozen=True)
class _Parts:
    """P parts as a message's table tells them.

    layers: the parts as `gradlab.coding.levels` has them.
    own: whether a part's codes come with their table, (P,), bool.
    paired: whether a dense part has two numbers to a symbol, (P,), bool.
    codes: number of a part's code in the book of its kind, (P,), int64.
    """

    layers: _Layers
    own: np.ndarray
    paired: np.ndarray
    codes: np.ndarray

    @cached_property
    def sizes(self) -> np.ndarray:
        return np.diff(self.layers.edges)

    @cached_property
    def kinds(self) -> np.ndarray:
        return np.where(self.layers.dense, np.where(self.paired, _OF_PAIRS, _OF_NUMBERS), _OF_GAPS)

    @cached_property
    def symbols(self) -> np.ndarray:
        """Count the symbols of each part, (P,)."""
        of_dense = np.where(self.paired, (self.sizes + 1) // 2, self.sizes)
        return np.where(self.layers.dense, of_dense, self.layers.counts)


@dataclass(frozen=True)
class _Row:
    """K parts of one kind as symbols.

    parts: numbers of the parts, (K,).
    symbols, ends: symbols of all, uint8, and counts of those before each part, and of all, (K + 1,).
    fields, widths: numbers of the second stream, uint64, and their bits, uint8.
    field_ends: counts of fields before each part, and of all, (K + 1,).
    """

    kind: int
    parts: np.ndarray
    symbols: np.ndarray
    ends: np.ndarray
    fields: np.ndarray
    widths: np.ndarray
    field_ends: np.ndarray

    @cached_property
    def of_parts(self) -> list[np.ndarray]:
        return [self.symbols[first:last] for first, last in pairwise(self.ends.tolist())]


def book_of(kind: int) -> Book:
    """Return the codes of symbols of a kind: of gaps, of pairs, or of numbers."""
    return books(tuple(_LEAST.tolist()), _PAIRED, _MIDDLE)[kind]


def encode_levels(positions: np.ndarray, levels: np.ndarray, sizes: Sequence[int]) -> bytes:
    """Encode levels other than zero, int32 up to `LARGEST`, and ascending positions, int64, (count,) each."""
    edges = edges_of(sizes)
    ends = np.searchsorted(positions, edges)
    none = np.zeros(len(edges) - 1, bool)
    parts = _Parts(_layers(edges, np.diff(ends)), none, none.copy(), none.astype(np.int64))
    bits, codes, rests = ([b""] * len(none) for _ in range(3))

    def write(chosen: np.ndarray) -> bytes:
        last = b""
        for row in _rows(_joined(positions, chosen, ends), _joined(levels, chosen, ends), parts.layers, chosen):
            counts, book = np.stack([_counted(one) for one in row.of_parts]), book_of(row.kind)
            parts.codes[row.parts] = picked = book.shortest(counts)
            tables = [book.codes[number] for number in picked.tolist()]
            fits = np.array([table.fits(one) for table, one in zip(tables, counts, strict=True)])
            coded = _codes_of(row, np.flatnonzero(fits), tables)
            for part, *streams in zip(row.parts[fits].tolist(), *coded, strict=True):
                bits[part], codes[part] = streams
            parts.own[row.parts], parts.paired[row.parts] = ~fits, row.kind == _OF_PAIRS
            of_row = _cut(*packed_fields(row.fields, row.widths, row.field_ends))
            for part, rest in zip(row.parts.tolist(), of_row, strict=True):
                rests[part] = rest
            if not fits.all():
                own = deflated(_joined(row.symbols, np.flatnonzero(~fits), row.ends), CODES_ALONE)
                last += _COUNT.pack(len(own)) + own
        return last

    own = each(write, _chunks(parts.layers))
    return b"".join([_table(parts, np.array([*map(len, rests)])), *bits, *codes, *rests, *own])


def decode_levels(data: bytes, sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Decode the bytes of `encode_levels` to ascending positions (count,), int64, and levels (count,), int32."""
    edges = edges_of(sizes)
    parts, bits, code_cuts, rest_cuts = _from_table(data, edges)
    ends = ends_of(parts.layers.counts)
    positions, levels = np.empty(ends[-1], np.int64), np.empty(ends[-1], np.int32)

    def read(row: tuple[np.ndarray, bytes]) -> None:
        chosen, last = row
        own, counts = parts.own[chosen], parts.symbols[chosen]
        symbols = _decoded(data, chosen, parts, code_cuts, bits, _inflated_alone(last, int(counts[own].sum())))
        rest = _joined(np.frombuffer(data, np.uint8), chosen, rest_cuts)
        numbers = _from_gaps if parts.kinds[chosen[0]] == _OF_GAPS else _from_dense
        where, there = numbers(symbols, rest, np.diff(rest_cuts)[chosen], parts, chosen)
        _put(positions, where, chosen, ends)
        _put(levels, there, chosen, ends)

    each(read, _cut_rows(data, int(rest_cuts[-1]), parts))
    return positions, levels


def _decoded(
    data: bytes, chosen: np.ndarray, parts: _Parts, cuts: np.ndarray, bits: np.ndarray, own: np.ndarray
) -> np.ndarray:
    """Decode the symbols of some parts of one kind, beside those that came with their own tables."""
    found, within, book = [], 0, book_of(int(parts.kinds[chosen[0]]))
    for part, count in zip(chosen.tolist(), parts.symbols[chosen].tolist(), strict=True):
        if parts.own[part]:
            found.append(own[within : within + count])
            within += count
            continue
        if (number := int(parts.codes[part])) >= len(book.codes):
            raise GradlabError(f"levels: code {number} of part {part}, expected one below {len(book.codes)}")
        code = book.codes[number]
        found.append(code.decoded(data[cuts[part] : cuts[part + 1]], count, "levels: codes"))
        if int(_counted(found[-1]) @ book.widths[number]) != bits[part]:
            raise GradlabError("levels: codes of other widths than announced")
    return found[0] if len(found) == 1 else np.concatenate(found)


def _cut_rows(data: bytes, at: int, parts: _Parts) -> list[tuple[np.ndarray, bytes]]:
    """Cut parts into rows of one kind that are worked on together, with the bytes from `at` of those that have their
    own tables."""
    rows = []
    for chunk in _chunks(parts.layers):
        for kind in (_OF_GAPS, _OF_PAIRS, _OF_NUMBERS):
            chosen, nbytes = chunk[parts.kinds[chunk] == kind], 0
            if parts.own[chosen].any():
                _at_least(data, at + _COUNT.size)
                nbytes, at = _COUNT.unpack_from(data, at)[0], at + _COUNT.size
                _at_least(data, at + nbytes)
            if len(chosen):
                rows.append((chosen, data[at : at + nbytes]))
            at += nbytes
    if at < len(data):
        raise GradlabError(f"levels: {len(data) - at} bytes more than there should be")
    return rows


def _inflated_alone(data: bytes, count: int) -> np.ndarray:
    found, rest = inflated(data, count, "levels: codes") if data else (b"", b"")
    if rest or len(found) != count:
        raise GradlabError(f"levels: {len(found)} codes and {len(rest)} bytes, expected {count} codes alone")
    return np.frombuffer(found, np.uint8)


def edges_of(sizes: Sequence[int]) -> np.ndarray:
    """Cut layers into P parts whose work fits the cache: return where parts begin, and the end, (P + 1,)."""
    lengths = [min(PART, size - start) for size in sizes for start in range(0, max(1, size), PART)]
    return ends_of(np.array(lengths, np.int64))


# --- parts ---------------------------------------------------------------------------------------------------------


def _table(parts: _Parts, nbytes: np.ndarray) -> bytes:
    """Write the table of parts. nbytes: of their second streams, (P,)."""
    of_count, of_rest = in_table(parts.sizes)
    rows = parts.own | parts.paired << 1 | parts.codes << 2 | parts.layers.counts << HEAD | nbytes << HEAD + of_count
    widths = (HEAD + of_count + of_rest).astype(np.uint8)
    return packed_fields(rows.astype(np.uint64), widths, np.array([0, len(rows)]))[0]


def in_table(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return how many bits of the table tell a part's count and the bytes of its second stream, (P,) each."""
    of_count, of_rest = (np.frexp(most * sizes.astype(float))[1].astype(np.int64) for most in (1, _LONGEST_REST))
    return of_count, of_rest


def _from_table(data: bytes, edges: np.ndarray) -> tuple[_Parts, np.ndarray, np.ndarray, np.ndarray]:
    """Read a message's parts, the bits of each one's codes, (P,), and where the first and the second streams begin and
    end, (P + 1,) each, all within the message."""
    sizes = np.diff(edges)
    of_count, of_rest = in_table(sizes)
    ends = ends_of(HEAD + of_count + of_rest)
    at = -(-int(ends[-1]) // 8)
    _at_least(data, at)
    rows = read_fields(np.frombuffer(data, np.uint8, at), ends[:-1], np.diff(ends)).astype(np.int64)
    counts = rows >> HEAD & (1 << of_count) - 1
    if (counts > sizes).any():
        worst = int(np.argmax(counts - sizes))
        raise GradlabError(f"levels: {counts[worst]} numbers in part {worst}, expected at most {sizes[worst]}")
    flags = (rows & 1).astype(bool), (rows & 2).astype(bool)
    parts = _Parts(_layers(edges, counts), *flags, rows >> 2 & (1 << INDEX) - 1)
    of_blocks = ends_of(np.where(parts.own, 0, -(-parts.symbols // CODES)))
    _at_least(data, at + 2 * int(of_blocks[-1]))
    blocks = np.frombuffer(data, "<u2", of_blocks[-1], at)
    bits = np.diff(ends_of(blocks)[of_blocks])
    code_cuts = at + blocks.nbytes + ends_of((bits + 7) >> 3)
    rest_cuts = code_cuts[-1] + ends_of(rows >> HEAD + of_count)
    _at_least(data, int(rest_cuts[-1]))
    return parts, bits, code_cuts, rest_cuts


def _at_least(data: bytes, nbytes: int) -> None:
    if len(data) < nbytes:
        raise GradlabError(f"levels: {len(data)} bytes, expected {nbytes} or more")


def _chunks(layers: _Layers) -> list[np.ndarray]:
    """Cut the parts that are dense and those that are not, without empty ones, into rows of as many as are worked on
    together."""
    chunks = []
    for dense in (False, True):
        chosen = np.flatnonzero((layers.dense == dense) & (layers.counts > 0))
        ends, first = ends_of(layers.counts[chosen]), 0
        while first < len(chosen):
            last = max(first + 1, int(np.searchsorted(ends, ends[first] + _BLOCK, "right")) - 1)
            chunks.append(chosen[first:last])
            first = last
    return chunks


def _joined(of_all: np.ndarray, chosen: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Lay what belongs to the chosen parts, ascending, end to end."""
    if _in_a_row(chosen, ends):
        return of_all[ends[chosen[0]] : ends[chosen[-1] + 1]]
    return np.concatenate([of_all[ends[part] : ends[part + 1]] for part in chosen.tolist()])


def _put(of_all: np.ndarray, joined: np.ndarray, chosen: np.ndarray, ends: np.ndarray) -> None:
    """Invert `_joined`."""
    if _in_a_row(chosen, ends):
        of_all[ends[chosen[0]] : ends[chosen[-1] + 1]] = joined
        return
    cuts = pairwise(ends_of(np.diff(ends)[chosen]).tolist())
    for part, (first, last) in zip(chosen.tolist(), cuts, strict=True):
        of_all[ends[part] : ends[part + 1]] = joined[first:last]


def _in_a_row(chosen: np.ndarray, ends: np.ndarray) -> bool:
    """Whether nothing lies between what belongs to the chosen parts."""
    return bool((ends[chosen + 1] - ends[chosen]).sum() == ends[chosen[-1] + 1] - ends[chosen[0]])


def _counted(symbols: np.ndarray) -> np.ndarray:
    return np.bincount(symbols, minlength=SYMBOLS)


# --- symbols -------------------------------------------------------------------------------------------------------


def _rows(positions: np.ndarray, levels: np.ndarray, layers: _Layers, chosen: np.ndarray) -> Iterator[_Row]:
    """Make the numbers of some parts, all dense or none, symbols."""
    ends = ends_of(layers.counts[chosen])
    if not layers.dense[chosen[0]]:
        yield _gaps(positions, levels, layers, chosen, ends)
        return
    large = np.diff(np.searchsorted(np.flatnonzero(np.abs(levels) > _PAIRED), ends))
    paired = _FEW * large <= layers.counts[chosen]
    for kind, which in ((_OF_PAIRS, paired), (_OF_NUMBERS, ~paired)):
        if which.any():
            some = np.flatnonzero(which)
            yield _numbers(_joined(positions, some, ends), _joined(levels, some, ends), layers, chosen[some], kind)


def _gaps(positions: np.ndarray, levels: np.ndarray, layers: _Layers, chosen: np.ndarray, ends: np.ndarray) -> _Row:
    gaps = np.empty(len(positions), np.int32)
    np.subtract(positions[1:], positions[:-1] + 1, out=gaps[1:], casting="unsafe")
    gaps[ends[:-1]] = positions[ends[:-1]] - layers.edges[chosen]
    shifts, magnitudes = _low_bits(layers, chosen), np.abs(levels)
    of_more = CLASS.take(magnitudes - 1, mode="clip")
    symbols = CLASS.take(gaps >> shifts, mode="clip") << 4 | of_more
    at = _in_tables(symbols, shifts)
    fields = ((gaps - LEAST_GAP.take(at, mode="clip") << 1) + (levels < 0)).astype(np.uint64)
    widths = IN_GAP.take(at, mode="clip")
    if len(wider := np.flatnonzero(of_more >= _ALONE)):
        more = magnitudes[wider] - 1 - _LEAST[of_more[wider]]
        fields[wider] |= more.astype(np.uint64) << widths[wider]
        widths[wider] += IN_MORE[of_more[wider]]
    return _Row(_OF_GAPS, chosen, symbols, ends, fields, widths, ends)


def _low_bits(layers: _Layers, chosen: np.ndarray) -> Any:
    """List the low bits of each gap, uint8; one number if all are the same."""
    low_bits = layers.low_bits[chosen]
    return low_bits[0] if (low_bits == low_bits[0]).all() else np.repeat(low_bits, layers.counts[chosen])


def _in_tables(symbols: np.ndarray, shifts: Any) -> np.ndarray:
    """Return where symbols are in the tables by low bits and symbol."""
    return symbols + shifts.astype(np.uint16) * np.uint16(SYMBOLS) if np.any(shifts) else symbols


def _from_gaps(
    symbols: np.ndarray, rest: np.ndarray, nbytes: np.ndarray, parts: _Parts, chosen: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Invert `_gaps`, and refuse gaps that lead out of their part. rest: second streams; nbytes: of each, (K,)."""
    layers, ends = parts.layers, ends_of(parts.layers.counts[chosen])
    counts, firsts, edges = layers.counts[chosen], ends[:-1], layers.edges
    at, levels = _in_tables(symbols, _low_bits(layers, chosen)), (symbols & 15).astype(np.int32)
    in_gap = widths = IN_GAP.take(at, mode="clip")
    if len(wider := np.flatnonzero(levels >= _ALONE)):
        widths = in_gap.copy()
        widths[wider] += IN_MORE[levels[wider]]
    starts = _starts(widths, ends, nbytes)
    fields = numbers_at_bytes(rest).take(starts >> 3, mode="clip") >> (starts.astype(np.uint8) & 7)
    fields = (fields & _MASKS.take(in_gap, mode="clip")).view(np.int32)
    if len(wider):
        of_more = levels[wider]
        more = read_fields(rest, starts[wider] + in_gap[wider], IN_MORE[of_more]).astype(np.int64) + _LEAST[of_more]
        if more.max() >= LARGEST:
            raise GradlabError(f"levels: a magnitude beyond {LARGEST}")
        levels[wider] = more
    negative = -(fields & 1)
    levels = (levels + 1 ^ negative) - negative
    passed = np.cumsum((fields >> 1) + LEAST_GAP.take(at, mode="clip") + 1, dtype=np.int64)
    before = np.concatenate([[0], passed[firsts[1:] - 1]])
    passed += np.repeat(edges[chosen] - before - 1, counts)
    if (passed[ends[1:] - 1] >= edges[chosen + 1]).any():
        raise GradlabError("levels: a position beyond the end of its layer")
    return passed, levels


def _numbers(positions: np.ndarray, levels: np.ndarray, layers: _Layers, chosen: np.ndarray, kind: int) -> _Row:
    counts, begins = layers.counts[chosen], _laid(layers, chosen, kind)
    middle, escape = (_PAIRED, 15) if kind == _OF_PAIRS else (_MIDDLE, 255)
    codes, large = np.full(begins[-1], middle, np.uint8), np.flatnonzero(np.abs(levels) > middle)
    shorter = levels.astype(np.int8).view(np.uint8) + np.uint8(middle)
    shorter[large] = escape
    codes[positions + np.repeat(begins[:-1] - layers.edges[chosen], counts)] = shorter
    there = levels[large]
    fields = ((np.abs(there) - 1 << 1) + (there < 0)).astype(np.uint64)
    symbols, ends = (codes[0::2] << 4 | codes[1::2], begins // 2) if kind == _OF_PAIRS else (codes, begins)
    widths = np.full(len(fields), _OF_LEVEL, np.uint8)
    return _Row(kind, chosen, symbols, ends, fields, widths, np.searchsorted(large, ends_of(counts)))


def _from_dense(
    symbols: np.ndarray, rest: np.ndarray, nbytes: np.ndarray, parts: _Parts, chosen: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Invert `_numbers`, with the arguments of `_from_gaps`."""
    layers, kind = parts.layers, int(parts.kinds[chosen[0]])
    begins = _laid(layers, chosen, kind)
    middle, escape = (_PAIRED, 15) if kind == _OF_PAIRS else (_MIDDLE, 255)
    codes = np.stack([symbols >> 4, symbols & 15], 1).reshape(-1) if kind == _OF_PAIRS else symbols
    within = np.flatnonzero(codes != middle)
    levels = codes.take(within).astype(np.int32) - middle
    large, ends = np.flatnonzero(levels == escape - middle), np.searchsorted(within, begins)
    odd = begins[1:] - begins[:-1] > parts.sizes[chosen]  # half of the last symbol is beyond the end
    if (codes[begins[1:][odd] - 1] != middle).any() or (np.diff(ends) != layers.counts[chosen]).any():
        raise GradlabError("levels: a dense layer has not as many numbers as it announces")
    widths = np.full(len(large), _OF_LEVEL, np.uint8)
    fields = read_fields(rest, _starts(widths, np.searchsorted(large, ends), nbytes), widths).astype(np.int64)
    levels[large] = ((fields >> 1) + 1) * (1 - 2 * (fields & 1))
    positions = within + np.repeat(layers.edges[chosen] - begins[:-1], layers.counts[chosen])
    return positions, levels


def _laid(layers: _Layers, chosen: np.ndarray, kind: int) -> np.ndarray:
    """Lay dense parts end to end, each from a whole symbol on: return where they begin, and the end, (K + 1,)."""
    sizes = layers.edges[chosen + 1] - layers.edges[chosen]
    return ends_of(sizes + (sizes & 1) if kind == _OF_PAIRS else sizes)


# --- streams -------------------------------------------------------------------------------------------------------


def _codes_of(row: _Row, kept: np.ndarray, tables: Sequence[Code]) -> tuple[list[bytes], list[bytes]]:
    """Return the bits of each 4,096 codes, and the codes, of each of some parts. Four codes in a row make one field of
    up to 60 bits."""
    counts = np.diff(row.ends)[kept]
    begins = padded(ends_of(counts), _TOGETHER)
    codes, widths = np.zeros(begins[-1], np.uint64), np.zeros(begins[-1], np.uint8)
    for at, first in zip(kept.tolist(), begins.tolist(), strict=False):
        symbols = row.of_parts[at]
        tables[at].codes.take(symbols, out=codes[first : first + len(symbols)], mode="clip")
        tables[at].widths.take(symbols, out=widths[first : first + len(symbols)], mode="clip")
    data, cuts, ends = packed_together(codes, widths, begins, _TOGETHER)
    blocks, begins = -(-counts // CODES), begins // _TOGETHER
    of_blocks = ends_of(blocks)
    within = np.arange(of_blocks[-1]) - np.repeat(of_blocks[:-1], blocks) + 1
    lasts = np.minimum(np.repeat(begins[:-1], blocks) + within * (CODES // _TOGETHER), np.repeat(begins[1:], blocks))
    bits = np.diff(ends[lasts], prepend=0).astype("<u2").tobytes()
    return _cut(bits, 2 * of_blocks), _cut(data, cuts)


def _cut(data: bytes, cuts: np.ndarray) -> list[bytes]:
    return [data[first:last] for first, last in pairwise(cuts.tolist())]


def _starts(widths: np.ndarray, ends: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
    """Return the bit at which each field of several second streams begins, and refuse streams of other lengths than
    announced. ends: how many fields come before each stream, and in all."""
    before = ends_of(widths)
    of_parts = before[ends]
    if (np.diff(of_parts) + 7 >> 3 != nbytes).any():
        raise GradlabError("levels: a part's second stream is not as long as announced")
    if len(nbytes) == 1:
        return before[:-1]
    return before[:-1] + np.repeat(8 * ends_of(nbytes)[:-1] - of_parts[:-1], np.diff(ends))
