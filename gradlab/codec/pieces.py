"""Shards that have a piece of every layer each, so that their messages are of like size where sizes follow from values.

The vector stays as it is. A codec that sends few values deals their positions out to the shards, and back.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np


def piece_of(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return where a rank's piece of a layer (numel,) begins and ends."""
    return numel * rank // world_size, numel * (rank + 1) // world_size


class Pieces:
    """The places of the shards' pieces in a vector of layers. A shard is its pieces of all layers, one after another.

    sizes: elements of each piece, (N, L), by shard and layer.
    """

    def __init__(self, numels: Sequence[int], world_size: int) -> None:
        ends = np.array([[piece_of(numel, rank, world_size)[1] for numel in numels] for rank in range(world_size)])
        ends = ends.reshape(world_size, len(numels)).astype(np.int64)
        self.world_size = world_size
        self.sizes = np.diff(ends, axis=0, prepend=0)
        layers = np.cumsum([0, *numels])[:-1]
        self._starts = layers + ends - self.sizes  # in the vector
        self._within = np.cumsum(self.sizes, 1) - self.sizes  # in the shard
        self._edges = np.append(self._starts.T.reshape(-1), sum(numels))  # pieces in the order of the vector

    def shapes(self, rank: int) -> list[tuple[int, ...]]:
        """Return the shapes of a shard's pieces."""
        return [(int(size),) for size in self.sizes[rank]]

    def numel(self, rank: int) -> int:
        """Return the elements of a shard."""
        return int(self.sizes[rank].sum())

    def deal(self, positions: np.ndarray, *values: np.ndarray) -> list[tuple[np.ndarray, ...]]:
        """Give every shard its ascending positions in it, and the values there, from ascending positions and values
        (count,)."""
        ends = np.searchsorted(positions, self._edges)
        firsts, counts = (of.reshape(-1, self.world_size).T for of in (ends[:-1], np.diff(ends)))
        of_shards = np.cumsum(counts.sum(1))[:-1]
        flat = counts.reshape(-1)
        order = np.repeat(firsts.reshape(-1) - np.cumsum(flat) + flat, flat) + np.arange(len(positions))
        dealt = positions.take(order) + np.repeat((self._within - self._starts).reshape(-1), flat)
        parts = [np.split(one, of_shards) for one in (dealt, *(value.take(order) for value in values))]
        return list(zip(*parts, strict=True))

    def in_vector(self, rank: int, positions: np.ndarray) -> np.ndarray:
        """Return where positions in a shard, ascending, (count,), int64, lie in the vector."""
        edges = np.append(self._within[rank], self.sizes[rank].sum())
        counts = np.diff(np.searchsorted(positions, edges))
        return positions + np.repeat(self._starts[rank] - self._within[rank], counts)


@functools.lru_cache(maxsize=256)
def pieces_of(numels: tuple[int, ...], world_size: int) -> Pieces:
    """Return the pieces of layers for N shards: all ranks of a process share them, and all steps."""
    return Pieces(numels, world_size)
