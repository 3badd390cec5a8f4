"""Read the gradients of a trace, divided by the loss scale that was recorded with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from gradlab.trace import Trace, TraceStep

_GAP = 4  # positions from one to the next, up to which what lies between is read too


def loss_scales(trace: Trace) -> np.ndarray:
    """Read the loss scales of N ranks at the trace's T common steps, float64 (N, T)."""
    return np.stack([trace.scalars(rank)["loss_scale"] for rank in range(trace.world_size)])


def finite_positions(trace: Trace) -> np.ndarray:
    """Return the positions in `Trace.steps`, (n,), at which the recorder counted no element that was not finite."""
    counts = [trace.scalars(rank)["non_finite"] for rank in range(trace.world_size)]
    return np.flatnonzero(np.sum(counts, axis=0) == 0)


def read_unscaled(
    trace: Trace, layer: str, rank: int, start: int, stop: int, columns: slice | None = None
) -> np.ndarray:
    """Read one rank's gradients of a layer, divided by the loss scale, float32 (stop - start, columns)."""
    gradients = trace.read(layer, rank, start, stop, columns)
    return _divided(gradients, trace.scalars(rank)["loss_scale"][start:stop])


def read_positions(
    trace: Trace, layer: str, rank: int, positions: np.ndarray, columns: slice | None = None
) -> np.ndarray:
    """Read one rank's gradients of a layer at rising positions (n,), without the loss scale: float32 (n, columns)."""
    cuts = np.flatnonzero(np.diff(positions) > _GAP) + 1
    parts = []
    for run in np.split(positions, cuts):
        first = int(run[0])
        block = read_unscaled(trace, layer, rank, first, int(run[-1]) + 1, columns)
        parts.append(block if len(block) == len(run) else block[run - first])
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def mean_unscaled(trace: Trace, layer: str, start: int, stop: int) -> np.ndarray:
    """Average a layer's gradients over all ranks, divided by each rank's loss scale, float32 (stop - start, numel)."""
    scales = loss_scales(trace)[:, start:stop]
    if (scales == scales[0]).all():
        return _divided(trace.mean(layer, start, stop), scales[0])
    total = np.zeros((stop - start, trace.layer(layer).numel))
    for rank in range(trace.world_size):
        total += read_unscaled(trace, layer, rank, start, stop)
    return (total / trace.world_size).astype(np.float32)


def step_gradients(step: TraceStep) -> list[dict[str, np.ndarray]]:
    """Divide one step's gradients by the loss scales: per rank, float32 arrays by layer name."""
    return [
        gradients if scale == 1 else {name: np.asarray(value / np.float32(scale)) for name, value in gradients.items()}
        for gradients, scale in zip(step.gradients, step.loss_scale, strict=True)
    ]


def _divided(gradients: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return gradients if (scales == 1).all() else gradients / scales[:, None].astype(np.float32)
