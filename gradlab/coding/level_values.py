"""What levels stand for: multiples of a step, moved to where values lie above them, or less a dither.

Centroids are by layer and class of levels (1, 2, and all higher ones), in `UNIT` of a step. Whoever sends a message and
whoever receives it decode by the same arithmetic.
"""

from __future__ import annotations

import struct

import numpy as np
import torch

from gradlab.coding.level_tables import CLASSES, UNIT
from gradlab.coding.random_bits import RandomBits

SEED = struct.Struct("<q")  # of a dither, in a message


def values_of(
    levels: torch.Tensor, step: float, centroids: np.ndarray, dtype: torch.dtype, layers: torch.Tensor | None = None
) -> torch.Tensor:
    """Decode levels (count,), int32.

    centroids: of layers, in `UNIT`, (L, 3), or of all alike, (1, 3).
    layers: that levels belong to, (count,), int64; None: L is 1.
    """
    upwards = centroids * UNIT
    table = np.concatenate([-upwards[:, ::-1], np.zeros((len(upwards), 1)), upwards], 1).reshape(-1)
    classes = levels.clamp(-CLASSES, CLASSES).add_(CLASSES)
    if layers is not None:
        classes = layers * (2 * CLASSES + 1) + classes
    offsets = torch.from_numpy(table).to(levels.device, dtype)
    return levels.to(dtype).add_(offsets.index_select(0, classes)).mul_(step)


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


def uniform(bits: RandomBits, like: torch.Tensor) -> torch.Tensor:
    """Draw numbers in (0, 1) in 2^16 places, in the shape of `like`."""
    return bits.sixteen(like).to(like.dtype).mul_(2.0**-16).add_(0.5 + 2.0**-17)


def dither(seed: bytes, like: torch.Tensor) -> torch.Tensor:
    """Draw what a message's seed stands for, the same in whoever sends and whoever receives: on the host."""
    generator = torch.Generator().manual_seed(*SEED.unpack(seed))
    return uniform(RandomBits(generator, torch.device("cpu")), like.cpu()).to(like.device)


def undithered(places: torch.Tensor, positions: torch.Tensor, levels: torch.Tensor, step: float) -> torch.Tensor:
    """Decode (k + 1/2 - u) step, (numel,).

    places: u, changed.
    positions, levels: of k other than zero.
    """
    return places.neg_().add_(0.5).index_add_(0, positions, levels.to(places.dtype)).mul_(step)
