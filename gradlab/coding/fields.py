"""Numbers of a few bits each in a row, as numpy arrays."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

_FEW = 512


def ends_of(counts: Any) -> np.ndarray:
    """Count what comes before each of several groups, and in all, (groups + 1,), int64."""
    ends = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, dtype=np.int64, out=ends[1:])
    return ends


def packed_fields(fields: np.ndarray, widths: np.ndarray, ends: np.ndarray) -> tuple[bytes, np.ndarray]:
    """Write numbers of a few bits each, the first bit lowest, those of each group from a whole byte on.

    Args:
        fields: (count,), uint64.
        widths: their bits, up to 64, (count,), uint8.
        ends: counts of fields before each group, and of all, (groups + 1,).

    Returns:
        The bytes, and where groups begin and end there, (groups + 1,).
    """
    most = int(widths.max(initial=0))
    # Of few fields each, groups take more time to lay out than fields that are written one by one.
    together = 1 if most > 32 or _FEW * len(ends) > len(fields) else 2 if most > 16 else 4
    begins = padded(ends, together)
    if begins[-1] > len(fields):
        laid = np.zeros(begins[-1], np.uint64), np.zeros(begins[-1], np.uint8)
        for of_all, one in zip(laid, (fields, widths), strict=True):
            for first, (start, stop) in zip(begins.tolist(), pairwise(ends.tolist()), strict=False):
                of_all[first : first + stop - start] = one[start:stop]
        fields, widths = laid
    return packed_together(fields, widths, begins, together)[:2]


def padded(ends: np.ndarray, together: int) -> np.ndarray:
    """Return where groups begin, and the end, if each takes a whole number of so many fields."""
    return ends_of(-(-np.diff(ends) // together) * together)


def packed_together(
    fields: np.ndarray, widths: np.ndarray, ends: np.ndarray, together: int
) -> tuple[bytes, np.ndarray, np.ndarray]:
    """Do what `packed_fields` does where groups are of a whole number of so many fields, which take 64 bits at most,
    and return the bits before so many fields each, too."""
    for _ in range(together.bit_length() - 1):
        fields, widths = fields[0::2] | fields[1::2] << widths[0::2], widths[0::2] + widths[1::2]
    before, ends = ends_of(widths), ends // together
    of_groups = before[ends]
    cuts = ends_of(np.diff(of_groups) + 7 >> 3)
    if not len(fields):
        return b"", cuts, before
    starts = before[:-1] if len(ends) == 2 else before[:-1] + np.repeat(8 * cuts[:-1] - of_groups[:-1], np.diff(ends))
    words, shifts = starts >> 6, starts.astype(np.uint8) & 63
    lasts = np.append(np.flatnonzero(words[1:] != words[:-1]), len(words) - 1)
    firsts = np.append(0, lasts[:-1] + 1)
    out = np.zeros((cuts[-1] >> 3) + 2, "<u8")
    out[words[firsts]] = np.bitwise_or.reduceat(fields << shifts, firsts)
    # Only the last number of a word reaches into the next one.
    out[words[lasts] + 1] |= fields[lasts] >> np.uint8(63) - shifts[lasts] >> np.uint8(1)
    return out.tobytes()[: cuts[-1]], cuts, before


def read_fields(data: np.ndarray, starts: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Read numbers of up to 63 bits, uint64, that begin at these bits of bytes; there are zeros after the bytes."""
    words = np.concatenate([data, np.zeros(16 - len(data) % 8, np.uint8)]).view("<u8")
    at, shifts = starts >> 6, (starts & 63).astype(np.uint64)
    found = words.take(at, mode="clip") >> shifts
    found |= words.take(at + 1, mode="clip") << (np.uint64(63) - shifts) << np.uint64(1)
    return found & ((np.uint64(1) << widths.astype(np.uint64)) - np.uint64(1))


def numbers_at_bytes(data: np.ndarray) -> Any:
    """Return the numbers of 32 bits that begin at each of several bytes and one more."""
    padded = np.concatenate([data, np.zeros(4, np.uint8)])
    return np.ascontiguousarray(np.ndarray((len(data) + 1,), "<u4", padded, strides=(1,)))
