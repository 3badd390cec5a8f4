"""Compressors of blocks: runs of elements that share a number, such as a scale. Each block lies in one layer.

A compressor of blocks must know where layers end, and where a vector may be cut into shards.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch

from gradlab.codec.compressor import Compressor

WHOLE = 2**62  # elements of a block that has no end
CACHED = 2**16  # elements worked on at a time
_ROWS_CACHED = 2**18
Span = tuple[int, int]
Self = TypeVar("Self", bound="BlockCompressor")


class BlockCompressor(Compressor):
    """A compressor of blocks whose elements share a number.

    A block has `block` elements. The last one may have fewer. The compressor that `for_layers` returns also ends its
    blocks where layers end.
    """

    block: int = WHOLE

    def __init__(self, settings: Any = None, learned: Mapping[str, torch.Tensor] | None = None) -> None:
        super().__init__(settings, learned)
        self._sizes: np.ndarray | None = None  # of the blocks, where they are not all alike; and where they begin
        self._starts = np.zeros(1, np.int64)
        self._relatives: dict[tuple[Any, ...], Any] = {}

    @abstractmethod
    def block_of(self, shape: Sequence[int]) -> int:
        """Return the elements of a block in a layer of this shape.

        More elements than the layer has mean one block for the whole layer.
        """

    def for_layers(self: Self, shapes: Sequence[Sequence[int]]) -> Self:
        key = tuple(map(tuple, shapes))
        if key not in self._relatives:
            if len(shapes) == 1:
                self._relatives[key] = self._relative(block=self.block_of(shapes[0]))
            else:
                sizes = [size for shape in shapes for size in block_sizes(math.prod(shape), self.block_of(shape))]
                self._relatives[key] = self._of_sizes(np.array(sizes, np.int64))
        return self._relatives[key]

    def part(self: Self, start: int, stop: int) -> Self:
        if self._sizes is None:
            return self
        key = (-1, start, stop)
        if key not in self._relatives:
            first, last = np.searchsorted(self._starts, [start, stop])
            self._relatives[key] = self._of_sizes(self._sizes[first:last])
        return self._relatives[key]

    def _of_sizes(self: Self, sizes: np.ndarray) -> Self:
        relative = self._relative(block=self.block)
        relative._sizes, relative._starts = sizes, np.concatenate([[0], np.cumsum(sizes)])
        return relative

    def _relative(self: Self, block: int) -> Self:
        relative = type(self)(self.settings)
        relative.block = block
        return relative

    def blocks(self, numel: int) -> int:
        return super().blocks(numel) if self._sizes is None else len(self._sizes)

    def bounds(self, numel: int, parts: int) -> list[int]:
        if self._sizes is None:
            return super().bounds(numel, parts)
        # The start nearest to where equal shards would begin.
        wanted = np.arange(parts + 1) * numel / parts
        above = np.searchsorted(self._starts, wanted).clip(1, None)
        below, above = self._starts[above - 1], self._starts[above]
        return [int(edge) for edge in np.where(wanted - below < above - wanted, below, above)]

    def rows(self, vector: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the blocks of a vector (numel,) in order, as views (m, n): m blocks of n elements each."""
        if not vector.numel():
            return
        if self._sizes is None:
            yield from pieces(vector, min(self.block, vector.numel()))
            return
        ends = [*(np.flatnonzero(np.diff(self._sizes)) + 1).tolist(), len(self._sizes)]
        for first, last in pairwise([0, *ends]):
            if size := int(self._sizes[first]):
                yield from pieces(vector[self._starts[first] : self._starts[last]], size)

    def span(self, like: torch.Tensor) -> int:
        """Return the number of elements worked on at a time.

        It is what fits the cache, a multiple of 8, and a number of whole blocks if possible. On a GPU it is the whole
        vector.
        """
        if like.device.type != "cpu":
            return max(8, like.numel() + -like.numel() % 8)
        together = math.lcm(self.block, 8)
        return CACHED - CACHED % together if together <= CACHED else CACHED

    def spans(self, like: torch.Tensor) -> Iterator[Span]:
        """Return (start, stop) of each run of elements that is worked on at a time, in order."""
        numel, most = like.numel(), self.span(like)
        return ((start, min(numel, start + most)) for start in range(0, numel, most))

    def blocks_of(self, start: int, stop: int) -> Span:
        """Return the indices of the first and the last block of the elements from start to stop."""
        if self._sizes is None:
            return start // self.block, (stop - 1) // self.block
        first, last = np.searchsorted(self._starts, [start, stop - 1], "right") - 1
        return int(first), int(last)

    def scale(self, values: torch.Tensor, factors: torch.Tensor, start: int) -> torch.Tensor:
        """Multiply a part of a vector by its blocks' factors, in place, and return it.

        Args:
            values: the part, (n,).
            factors: of all the vector's blocks, (blocks,).
            start: the part's first element in the vector.
        """
        return self._with_blocks(torch.Tensor.mul_, values, factors, start)

    def shift(self, values: torch.Tensor, terms: torch.Tensor, start: int) -> torch.Tensor:
        """Add to a part of a vector its blocks' terms, in place, and return it.

        Args:
            values: the part, (n,).
            terms: of all the vector's blocks, (blocks,).
            start: the part's first element in the vector.
        """
        return self._with_blocks(torch.Tensor.add_, values, terms, start)

    def _with_blocks(self, change: Any, values: torch.Tensor, numbers: torch.Tensor, start: int) -> torch.Tensor:
        first, last = self.blocks_of(start, start + len(values))
        if first == last:
            return change(values, float(numbers[first]))
        if self._sizes is not None:
            return change(values, self._spread(numbers, start, start + len(values)))
        _blockwise(change, values, numbers, start, self.block)
        return values

    def _spread(self, numbers: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Repeat each block's number for its elements from start to stop: (stop - start,)."""
        first, last = int(np.searchsorted(self._starts, start, "right")) - 1, int(np.searchsorted(self._starts, stop))
        counts = np.diff(self._starts[first : last + 1].clip(start, stop))
        return numbers[first:last].repeat_interleave(torch.from_numpy(counts).to(numbers.device))


def block_sizes(numel: int, block: int) -> list[int]:
    """List the sizes of a layer's blocks, in elements. The last one may be smaller than the others."""
    size = min(block, max(1, numel))
    return [size] * (numel // size) + ([numel % size] if numel % size else [])


def pieces(vector: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Cut a vector (numel,) into views: matrices (m, size) of whole blocks, and (1, rest) of the remaining elements.

    On a CPU each matrix fits the cache.
    """
    whole = vector.numel() // size * size
    most = max(1, _ROWS_CACHED // size) * size if vector.device.type == "cpu" else max(1, whole)
    matrices = [vector[a:b].view(-1, size) for a, b in pairwise([*range(0, whole, most), whole])]
    rest = vector[whole:]
    return [*matrices, rest.view(1, -1)] if rest.numel() else matrices


def _blockwise(change: Any, values: torch.Tensor, numbers: torch.Tensor, start: int, size: int) -> None:
    first, offset = divmod(start, size)
    head = min(len(values), size - offset) if offset else 0
    whole = head + (len(values) - head) // size * size
    if head:
        change(values[:head], numbers[first])
        first += 1
    if whole > head:
        count = (whole - head) // size
        change(values[head:whole].view(count, size), numbers[first : first + count, None])
        first += count
    if whole < len(values):
        change(values[whole:], numbers[first])
