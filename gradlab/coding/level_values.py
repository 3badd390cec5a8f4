"""The values of levels: multiples of a step, moved to where values lie above them.

Centroids are by layer and class of levels (1, 2, and all higher ones), in `UNIT` of a step. Whoever sends a message and
whoever receives it decode by the same arithmetic.
"""

from __future__ import annotations

import numpy as np
import torch

from gradlab.coding.level_tables import CLASSES, UNIT


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
