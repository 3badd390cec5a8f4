"""Huffman codes of bytes by frequencies that both sides know, in DEFLATE's form (RFC 1951).

A DEFLATE block begins with its table. If both sides can make the table, this beginning does not travel: the
decoder puts it in front again, and any inflater does the rest.
"""

from __future__ import annotations

import functools
import heapq
from dataclasses import dataclass

import numpy as np

from gradlab.coding.deflate import CODES_ALONE, deflated, inflated

SYMBOLS = 256
_END = SYMBOLS  # the symbol that ends a block
_LONGEST = 15  # bits of a code, at most
_SEEN = 16  # times the weight of a symbol that never occurred, at least, has one that occurred once
_RAREST = 2**15  # a symbol counts as one in so many at least, so that every one has a code
_OF_TABLE, _OF_SYMBOL = 90, 5  # bits that DEFLATE takes for a table, about, and for each of its symbols
_NODES = 10  # bits of a tree's node
_NODE = 2**_NODES - 1
_REPEATED = 1024  # so many that are alike are not sent one by one
_KNOWN = b"\2"  # what codes under a known table begin with; `deflated` begins with 0 or 1


@dataclass(frozen=True)
class _Table:
    """A code for every byte, and for the end.

    widths: widths of the codes in bits, (257,), int64.
    codes: their bits, the first one lowest, (257,), uint64.
    head: the whole bytes that a DEFLATE block with this table begins with.
    rest, rest_width: the bits of that beginning that are left, and how many.
    excess: bits of a code over the entropy, of bytes of just these frequencies.
    """

    widths: np.ndarray
    codes: np.ndarray
    head: bytes
    rest: int
    rest_width: int
    excess: float


def coded(symbols: np.ndarray, frequencies: np.ndarray) -> bytes:
    """Encode bytes (count,), uint8, by frequencies elsewhere (256,), whole numbers from 0, that both sides know, or
    with a table of their own where that is shorter."""
    if not len(symbols):
        return deflated(symbols)
    table, counts = _table_of(frequencies), np.bincount(symbols, minlength=SYMBOLS)
    if counts.max() == len(symbols) > _REPEATED:
        return deflated(symbols, CODES_ALONE)
    own = _OF_TABLE + _OF_SYMBOL * np.count_nonzero(counts) + max(len(symbols), table.excess * _entropy(counts))
    if int(counts @ table.widths[:SYMBOLS]) > own:
        return deflated(symbols, CODES_ALONE)
    return _KNOWN + _packed(symbols, table)


def uncoded(data: bytes, count: int, frequencies: np.ndarray, what: str) -> tuple[bytes, bytes]:
    """Decode the result of `coded` under the same frequencies; arguments, result and errors are those of `inflated`."""
    if data[:1] != _KNOWN:
        return inflated(data, count, what)
    return inflated(b"\1" + _table_of(frequencies).head + data[1:], count, what)


def _table_of(frequencies: np.ndarray) -> _Table:
    """Make the table of frequencies: the same one wherever these are the same."""
    return _table(np.ascontiguousarray(frequencies, "<i8").tobytes())


@functools.lru_cache(maxsize=4096)
def _table(frequencies: bytes) -> _Table:
    known = np.frombuffer(frequencies, "<i8")
    counts = [_SEEN * count for count in known.tolist()]
    rarest, widths = max(1, sum(counts) // _RAREST), [_LONGEST + 1]
    while max(widths) > _LONGEST:  # once, but for frequencies that are far apart
        widths = _widths([*(max(rarest, count) for count in counts), rarest])
        rarest *= 2
    beginning, bits = _beginning(widths)
    whole = bits // 8
    head = (beginning & (1 << 8 * whole) - 1).to_bytes(whole, "little")
    lengths, codes = np.array(widths, np.int64), np.array(_codes(widths), np.uint64)
    excess = float(known @ lengths[:SYMBOLS]) / max(1.0, _entropy(known))
    return _Table(lengths, codes, head, beginning >> 8 * whole, bits % 8, max(1.0, excess))


def _entropy(counts: np.ndarray) -> float:
    """Return the bits of all bytes of these frequencies."""
    there = counts[counts > 0].astype(np.float64)
    return float(there @ np.log2(there.sum() / there))


def _widths(weights: list[int]) -> list[int]:
    """Return how long each code is in a Huffman tree of these weights, in bits."""
    parents = [0] * (2 * len(weights) - 1)
    heap = [weight << _NODES | node for node, weight in enumerate(weights)]  # one number: pairs take twice the time
    heapq.heapify(heap)
    for inner in range(len(weights), len(parents)):
        first = heapq.heappop(heap)
        second = heap[0]
        parents[first & _NODE] = parents[second & _NODE] = inner
        heapq.heapreplace(heap, (first >> _NODES) + (second >> _NODES) << _NODES | inner)
    depths = [0] * len(parents)
    for node in range(len(parents) - 2, -1, -1):
        depths[node] = depths[parents[node]] + 1
    return depths[: len(weights)]


def _codes(widths: list[int]) -> list[int]:
    """Return the code of each symbol (RFC 1951, section 3.2.2), its first bit lowest."""
    codes, code, last, reversed_bits = [0] * len(widths), 0, 0, _reversed_bits()
    for width, symbol in sorted(zip(widths, range(len(widths)), strict=True)):
        code <<= width - last
        codes[symbol] = reversed_bits[code] >> _LONGEST - width
        code, last = code + 1, width
    return codes


@functools.cache
def _reversed_bits() -> list[int]:
    """Return all numbers of `_LONGEST` bits with their bits in the other order."""
    numbers = np.arange(2**_LONGEST)
    return np.bitwise_or.reduce([(numbers >> bit & 1) << _LONGEST - 1 - bit for bit in range(_LONGEST)]).tolist()


def _beginning(widths: list[int]) -> tuple[int, int]:
    """Return the bits that a last block begins with (section 3.2.7), the first one lowest, and how many. Widths are
    written by a code of sixteen words of four bits; two codes of one bit are for distances."""
    written = bits = 0
    fields = ((1, 1), (2, 2), (len(widths) - 257, 5), (1, 5), (15, 4))
    of_widths = ((0, 3), (0, 3), (0, 3), *((4, 3),) * 16)  # of 16, 17, 18, which are not used, and of 0 to 15
    for number, width in (*fields, *of_widths):
        written |= number << bits
        bits += width
    halves = bytes(_reversed_bits()[width] >> _LONGEST - 4 for width in (*widths, 1, 1, 0))
    bytewise = bytes(low | high << 4 for low, high in zip(halves[0::2], halves[1::2], strict=True))
    return written | int.from_bytes(bytewise, "little") << bits, bits + 4 * (len(widths) + 2)


def _packed(symbols: np.ndarray, table: _Table) -> bytes:
    """Write the codes of symbols and of the end, after the rest of the beginning. Four codes in a row make one number
    of up to 60 bits, which lies in one or two words of 64 bits."""
    padded = np.zeros((len(symbols) + 2 + 3) // 4 * 4, np.uint64)
    widths = np.zeros(len(padded), np.int64)
    padded[0], widths[0] = table.rest, table.rest_width
    within = slice(1, len(symbols) + 1)
    np.take(table.codes, symbols, out=padded[within])
    np.take(table.widths, symbols, out=widths[within])
    padded[within.stop], widths[within.stop] = table.codes[_END], table.widths[_END]
    for _ in range(2):
        padded = padded[0::2] | padded[1::2] << widths[0::2].astype(np.uint64)
        widths = widths[0::2] + widths[1::2]
    ends = np.cumsum(widths)
    starts = ends - widths
    words, shifts = starts >> 6, (starts & 63).astype(np.uint64)
    firsts = np.flatnonzero(np.diff(words, prepend=-1))
    out = np.zeros(len(firsts) + 1, "<u8")
    out[:-1] = np.bitwise_or.reduceat(padded << shifts, firsts)
    lasts = np.append(firsts[1:], len(words)) - 1  # only the last number of a word reaches into the next one
    out[1:] |= padded[lasts] >> (np.uint64(63) - shifts[lasts]) >> np.uint64(1)
    return out.tobytes()[: -(-int(ends[-1]) // 8)]
