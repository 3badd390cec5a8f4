"""Checksums of values before they go to the disk, and elements that are not finite."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradlab.trace.crc import crc32

_EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00}  # all ones: infinite or NaN
_SIGNLESS = np.uint16(0x7FFF)


def chunk_checksums(chunks: np.ndarray, numel: int) -> np.ndarray:
    """Compute the CRC-32, uint32 (rows,), of rows of `numel` elements in chunks (chunks, rows, columns).

    They are those that `row_checksums` computes of whole rows. Columns beyond `numel` do not count.
    """
    width, sums = chunks.shape[2], np.zeros(chunks.shape[1], np.uint32)
    for row in range(chunks.shape[1]):
        checksum = 0
        for at, chunk in enumerate(chunks):
            checksum = crc32(chunk[row, : numel - at * width], checksum)
        sums[row] = checksum
    return sums


def all_finite(chunks: np.ndarray, dtype: str) -> bool:
    """Say in one pass over stored values that none is infinite or NaN. False asks for a count."""
    if dtype == "float32":
        values = chunks.reshape(-1)
        with np.errstate(all="ignore"):
            return bool(np.isfinite(np.einsum("i,i->", values, values)))  # large finite ones overflow
    limit = _EXPONENT[dtype]
    # Chunk by chunk, so that what is compared stays in the processor's cache.
    return all(int((chunk.view(np.uint16) & _SIGNLESS).max(initial=0)) < limit for chunk in chunks)


def count_non_finite(layers: Sequence[np.ndarray], dtype: str) -> np.ndarray:
    """Count the infinite or NaN elements of each step, int64 (steps,), in stored values (steps, numel) per layer."""
    return np.add.reduce([_count_rows(rows, dtype) for rows in layers], axis=0)


def _count_rows(rows: np.ndarray, dtype: str) -> np.ndarray:
    rows = np.ascontiguousarray(rows)
    if all_finite(rows[:, None], dtype):  # a count takes several times as long
        return np.zeros(len(rows), np.int64)
    if dtype == "float32":
        return np.count_nonzero(~np.isfinite(rows), axis=1)
    return np.count_nonzero((rows.view(np.uint16) & _SIGNLESS) >= _EXPONENT[dtype], axis=1)
