"""Huffman codes of bytes by frequencies that both sides know, in DEFLATE's form (RFC 1951).

A DEFLATE block begins with its table. If both sides can make the table, this beginning does not travel: the
decoder puts it in front again, and any inflater does the rest.
"""

from __future__ import annotations

import functools
import heapq
from dataclasses import dataclass

import numpy as np

from gradlab.coding.deflate import inflated_alone

SYMBOLS = 256
LONGEST = 15  # bits of a code, at most
_SEEN = 16  # times the weight of a symbol that never occurred, at least, has one that occurred once
_RAREST = 2**15  # a symbol counts as one in so many at least, so that every one has a code
_OF_TABLE, _OF_SYMBOL = 90, 5  # bits that DEFLATE takes for a table, about, and for each of its symbols
_NODES = 10  # bits of a tree's node
_NODE = 2**_NODES - 1
_REPEATED = 1024  # so many that are alike are not sent one by one
_EMPTY, _OF_EMPTY = 2, 10  # a DEFLATE block of nothing, and its bits: a table's beginning ends with a whole byte then


@dataclass(frozen=True)
class Code:
    """A code for every byte.

    widths: widths of the codes in bits, (256,), uint8.
    codes: their bits, the first one lowest, (256,), uint64.
    head: beginning of DEFLATE data with this table.
    """

    widths: np.ndarray
    codes: np.ndarray
    head: bytes

    def fits(self, counts: np.ndarray) -> bool:
        """Whether bytes of these frequencies (256,) take at most an eighth more bits than with a table of their own,
        about."""
        count = int(counts.sum())
        if counts.max() == count > _REPEATED:
            return False
        own = _OF_TABLE + _OF_SYMBOL * np.count_nonzero(counts) + max(count, _entropy(counts))
        return bool(8 * int(counts @ self.widths.astype(np.int64)) <= 9 * own)

    def decoded(self, data: bytes, count: int, what: str) -> np.ndarray:
        """Decode codes of `count` bytes, uint8; bytes that follow are not looked at. Errors are those of `inflated`."""
        return np.frombuffer(inflated_alone(self.head + data, count, what), np.uint8)


def code_of(frequencies: np.ndarray) -> Code:
    """Make the code of frequencies (256,), whole numbers from 0: the same one wherever these are the same."""
    counts = [_SEEN * count for count in frequencies.tolist()]
    rarest, widths = max(1, sum(counts) // _RAREST), [LONGEST + 1]
    while max(widths) > LONGEST:  # once, but for frequencies that are far apart
        widths = _widths([*(max(rarest, count) for count in counts), rarest])  # the last one is the end's
        rarest *= 2
    beginning, bits = _beginning(widths)
    head = (_EMPTY | beginning << _OF_EMPTY).to_bytes((_OF_EMPTY + bits) // 8, "little")
    of_bytes, codes = np.array(widths[:SYMBOLS], np.uint8), np.array(_codes(widths)[:SYMBOLS], np.uint64)
    return Code(of_bytes, codes, head)


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
    codes, code, last, backwards = [0] * len(widths), 0, 0, reversed_bits()
    for width, symbol in sorted(zip(widths, range(len(widths)), strict=True)):
        code <<= width - last
        codes[symbol] = backwards[code] >> LONGEST - width
        code, last = code + 1, width
    return codes


@functools.cache
def reversed_bits() -> list[int]:
    """Return all numbers of `LONGEST` bits with their bits in the other order."""
    numbers = np.arange(2**LONGEST)
    return np.bitwise_or.reduce([(numbers >> bit & 1) << LONGEST - 1 - bit for bit in range(LONGEST)]).tolist()


def _beginning(widths: list[int]) -> tuple[int, int]:
    """Return the bits that a last block begins with (section 3.2.7), the first one lowest, and how many. Widths are
    written by a code of sixteen words of four bits; two codes of one bit are for distances."""
    written = bits = 0
    fields = ((1, 1), (2, 2), (len(widths) - 257, 5), (1, 5), (15, 4))
    of_widths = ((0, 3), (0, 3), (0, 3), *((4, 3),) * 16)  # of 16, 17, 18, which are not used, and of 0 to 15
    for number, width in (*fields, *of_widths):
        written |= number << bits
        bits += width
    halves = bytes(reversed_bits()[width] >> LONGEST - 4 for width in (*widths, 1, 1, 0))
    bytewise = bytes(low | high << 4 for low, high in zip(halves[0::2], halves[1::2], strict=True))
    return written | int.from_bytes(bytewise, "little") << bits, bits + 4 * (len(widths) + 2)
