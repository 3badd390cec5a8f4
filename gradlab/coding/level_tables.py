"""Tables of a layer's levels that both sides know before a message: how often codes occur, and where values lie."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradlab.coding.levels import FREQUENCIES, ones_and_all

CLASSES = 3  # of levels: 1, 2, and all higher ones
UNIT = 1 / 128  # of a step: resolution of centroids
_FORGOTTEN = 3  # an eighth of the earlier frequencies, with every iteration
_SHARES = 256  # of level 1 among all levels, that centroids are tabulated for


@dataclass(frozen=True)
class LevelTables:
    """Frequencies and centroids of L layers.

    frequencies: counts of codes by layer, each (3, 256), whole numbers from 0.
    centroids: how far values of level 1, 2 and of all higher ones lie from as many steps, in `UNIT`, (L, 3), int64.
    """

    frequencies: Sequence[np.ndarray]
    centroids: np.ndarray

    @functools.cached_property
    def digest(self) -> bytes:
        """Three bytes that differ, but for one in 16 million, where tables do."""
        crc = zlib.crc32(self.centroids.astype("<i8").tobytes())
        for one in self.frequencies:
            crc = zlib.crc32(np.ascontiguousarray(one, "<i8").tobytes(), crc)
        return crc.to_bytes(4, "little")[:3]


def nothing_known(layers: int) -> list[np.ndarray]:
    """Return frequencies of no code at all, by layer."""
    return [np.zeros(FREQUENCIES, np.int64) for _ in range(layers)]


def running(frequencies: Sequence[np.ndarray], dead_zone: float) -> LevelTables:
    """Return the tables of frequencies alone, with the centroids of values that are exponentially distributed."""
    centroids = [_expected(*ones_and_all(one), dead_zone) for one in frequencies]
    return LevelTables(frequencies, np.repeat(np.array(centroids, np.int64).reshape(-1, 1), CLASSES, 1))


def advanced(before: Sequence[np.ndarray], seen: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Add the frequencies of an iteration's messages, and forget a part of the earlier ones."""
    return [old - (old >> _FORGOTTEN) + new for old, new in zip(before, seen, strict=True)]


def _expected(ones: int, levels: int, dead_zone: float) -> int:
    return _tabulated(dead_zone)[_SHARES * ones // levels] if levels else 0


@functools.lru_cache(maxsize=64)
def _tabulated(dead_zone: float) -> list[int]:
    """Compute how far values lie from their level on average, by the share of level 1 in 256ths, in `UNIT`.

    If magnitudes have the density exp(-s x), level 1 has the share 1 - exp(-s), and values of level k lie dead_zone
    - 1 + 1 / s - 1 / (exp(s) - 1) from k steps.
    """
    found = []
    for share in range(_SHARES + 1):
        left = 1 - (share + 0.5) / (_SHARES + 1)
        within = -1 / math.log(left) - left / (1 - left)
        found.append(max(-128, min(127, round((dead_zone - 1 + within) / UNIT))))
    return found
