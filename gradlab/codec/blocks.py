"""Blocks: runs of elements that must stay together when a vector is cut into shards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WHOLE = 2**62  # elements of a block that has no end


class Blocks:
    """The blocks of a vector, one after another.

    Args:
        size: elements of each block; the last one may have fewer.
        sizes: elements of each block, where they are not all alike, (blocks,).

    Attributes:
        starts: first elements of such blocks, and the vector's end, (blocks + 1,); else None.
    """

    def __init__(self, size: int = 1, sizes: Sequence[int] | np.ndarray | None = None) -> None:
        self.size = size
        self.sizes = None if sizes is None else np.array(sizes, np.int64)
        self.starts = None if self.sizes is None else np.concatenate([[0], np.cumsum(self.sizes)])

    def count(self, numel: int) -> int:
        """Return how many blocks a vector (numel,) has."""
        return -(-numel // self.size) if self.sizes is None else len(self.sizes)

    def bounds(self, numel: int, parts: int) -> list[int]:
        """Choose where to cut a vector (numel,) into shards of whole blocks, as equal as possible.

        Returns:
            Ascending positions 0, ..., numel, one more than there are parts.
        """
        if self.starts is None:
            blocks = self.count(numel)
            return [min(numel, self.size * (blocks * n // parts)) for n in range(parts + 1)]
        # The start nearest to where equal shards would begin.
        wanted = np.arange(parts + 1) * numel / parts
        above = np.searchsorted(self.starts, wanted).clip(1, None)
        below, above = self.starts[above - 1], self.starts[above]
        return [int(edge) for edge in np.where(wanted - below < above - wanted, below, above)]

    def part(self, start: int, stop: int) -> Blocks:
        """Return the blocks of the shard vector[start:stop], whose ends `bounds` has chosen."""
        if self.sizes is None or self.starts is None:
            return self
        first, last = np.searchsorted(self.starts, [start, stop])
        return Blocks(self.size, self.sizes[first:last])

    def repeated(self, numel: int, times: int) -> Blocks:
        """Return the blocks of a number of vectors (numel,), one after another."""
        size = min(self.size, numel)
        if self.sizes is None and numel % size == 0:
            return Blocks(size)
        return Blocks(self.size, np.tile(block_sizes(numel, size) if self.sizes is None else self.sizes, times))

    def between(self, start: int, stop: int) -> tuple[int, int]:
        """Return the indices of the first and the last block of the elements from start to stop."""
        if self.starts is None:
            return start // self.size, (stop - 1) // self.size
        first, last = np.searchsorted(self.starts, [start, stop - 1], "right") - 1
        return int(first), int(last)


def block_sizes(numel: int, size: int) -> list[int]:
    """List the sizes of a layer's blocks, in elements. The last one may be smaller than the others."""
    size = min(size, max(1, numel))
    return [size] * (numel // size) + ([numel % size] if numel % size else [])
