"""Tables of a layer's levels that both sides know before a message, and the values of levels.

Tables say how often codes occur, and where values lie. A level's value is its multiple of the step, moved by a centroid
to where values lie above it. Who sends a message and who receives it decode by the same arithmetic.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gradlab.coding.levels import FREQUENCIES, ones_and_all

DEAD_ZONE = 0.65  # steps below which values are zero; at 0.5 all would be rounded
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
    def content(self) -> bytes:
        """The numbers of all, one after another."""
        return b"".join(np.ascontiguousarray(one, "<i8").tobytes() for one in (self.centroids, *self.frequencies))

    @functools.cached_property
    def digest(self) -> bytes:
        """Three bytes that differ, but for one in 16 million, where tables do."""
        return zlib.crc32(self.content).to_bytes(4, "little")[:3]


def nothing_known(layers: int) -> list[np.ndarray]:
    """Return frequencies of no code at all, by layer."""
    return [np.zeros(FREQUENCIES, np.int64) for _ in range(layers)]


def running(frequencies: Sequence[np.ndarray]) -> LevelTables:
    """Return the tables of frequencies alone, with the centroids of values that are exponentially distributed."""
    counts = map(ones_and_all, frequencies)
    centroids = [_tabulated()[_SHARES * ones // levels] if levels else 0 for ones, levels in counts]
    return LevelTables(frequencies, np.repeat(np.array(centroids, np.int64).reshape(-1, 1), CLASSES, 1))


def advanced(before: Sequence[np.ndarray], seen: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Add the frequencies of an iteration's messages, and forget a part of the earlier ones."""
    return [old - (old >> _FORGOTTEN) + new for old, new in zip(before, seen, strict=True)]


@functools.cache
def _tabulated() -> list[int]:
    """Compute how far values lie from their level on average, by the share of level 1 in 256ths, in `UNIT`.

    If magnitudes have the density exp(-s x), level 1 has the share 1 - exp(-s), and values of level k lie `DEAD_ZONE`
    - 1 + 1 / s - 1 / (exp(s) - 1) from k steps.
    """
    found = []
    for share in range(_SHARES + 1):
        left = 1 - (share + 0.5) / (_SHARES + 1)
        within = -1 / math.log(left) - left / (1 - left)
        found.append(max(-128, min(127, round((DEAD_ZONE - 1 + within) / UNIT))))
    return found


def values_of(
    levels: torch.Tensor, step: float, centroids: np.ndarray, dtype: torch.dtype, layers: torch.Tensor | None = None
) -> torch.Tensor:
    """Decode levels (count,), int32, by centroids in `UNIT`, (L, 3), and the layers that levels belong to, (count,),
    int64; None: L is 1."""
    upwards = centroids * UNIT
    table = np.concatenate([-upwards[:, ::-1], np.zeros((len(upwards), 1)), upwards], 1).reshape(-1)
    classes = levels.clamp(-CLASSES, CLASSES).add_(CLASSES)
    if layers is not None:
        classes = layers * (2 * CLASSES + 1) + classes
    offsets = torch.from_numpy(table).to(levels.device, wide(dtype))
    return levels.to(wide(dtype)).add_(offsets.index_select(0, classes)).mul_(step).to(dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that levels are computed in: half precision ends below the largest ones."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def centroids_of(offsets: torch.Tensor, levels: torch.Tensor) -> list[int]:
    """Average the offsets of levels 1, 2 and of all higher ones, in 128ths of a step."""
    of_class = [(levels == level).to(offsets.dtype) for level in range(1, CLASSES)]
    counts = [int(which.sum(dtype=torch.float64)) for which in of_class]
    sums = [float(torch.dot(offsets, which)) for which in of_class]
    counts.append(len(levels) - sum(counts))
    sums.append(float(offsets.sum()) - sum(sums))
    means = (total / count if count else 0.0 for total, count in zip(sums, counts, strict=True))
    return in_units(np.array(list(means))).tolist()


def in_units(offsets: np.ndarray) -> np.ndarray:
    """Round offsets, in steps, to `UNIT`."""
    return np.clip(np.rint(offsets / UNIT), -128, 127).astype(np.int64)
