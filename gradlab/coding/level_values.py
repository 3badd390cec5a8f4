"""Values of levels: multiples of a step, moved by a centroid to where values lie above each.

Who sends a message and who receives it decode by the same arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

DEAD_ZONE = 0.65  # steps below which values are zero; at 0.5 all would be rounded
CLASSES = 3  # of levels: 1, 2, and all higher ones
UNIT = 1 / 128  # of a step: resolution of centroids
PARTS = 2**16  # of a step, that sums of offsets are whole numbers of: the same in any order


def values_of(levels: torch.Tensor, step: float, told: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Decode levels (count,), int32. told: centroids of level 1, 2 and all higher ones, in `UNIT`."""
    upwards = np.array(told, np.float64) * UNIT
    table = torch.from_numpy(np.concatenate([-upwards[::-1], np.zeros(1), upwards]))
    offsets = table.to(levels.device, wide(dtype)).index_select(0, levels.clamp(-CLASSES, CLASSES).add_(CLASSES))
    return levels.to(wide(dtype)).add_(offsets).mul_(step).to(dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that levels are computed in: half precision ends below the largest ones."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def centroids_of(offsets: torch.Tensor, levels: torch.Tensor) -> list[int]:
    """Average the offsets of levels 1, 2 and of all higher ones, in steps, in `UNIT`."""
    whole = offsets.double().mul_(PARTS).floor_()
    of_class = [(levels == level).double() for level in range(1, CLASSES)]
    counts, sums = [float(which.sum()) for which in of_class], [float(torch.dot(whole, one)) for one in of_class]
    counts.append(len(levels) - sum(counts))
    sums.append(float(whole.sum()) - sum(sums))
    means = (total / max(1.0, count) for total, count in zip(sums, counts, strict=True))
    return [max(-128, min(127, math.floor(mean / (PARTS * UNIT) + 0.5))) for mean in means]
