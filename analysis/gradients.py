"""Gradients of a trace, with the loss scaler's factor that the recorder saw divided out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from gradlab.trace import Trace, TraceStep


def loss_scales(trace: Trace) -> np.ndarray:
    """Loss scale of the recorded gradients by rank and position, (N, T)."""
    return np.stack([trace.scalars(rank)["loss_scale"] for rank in range(trace.world_size)])


def read_unscaled(
    trace: Trace, layer: str, rank: int, start: int, stop: int, columns: slice | None = None
) -> np.ndarray:
    """One rank's gradients, float32 (stop - start, columns)."""
    gradients = trace.read(layer, rank, start, stop, columns)
    return _divided(gradients, trace.scalars(rank)["loss_scale"][start:stop])


def mean_unscaled(trace: Trace, layer: str, start: int, stop: int) -> np.ndarray:
    """Averaged gradients over ranks, float32 (stop - start, numel)."""
    scales = loss_scales(trace)[:, start:stop]
    if (scales == scales[0]).all():
        return _divided(trace.mean(layer, start, stop), scales[0])
    total = np.zeros((stop - start, trace.layer(layer).numel))
    for rank in range(trace.world_size):
        total += read_unscaled(trace, layer, rank, start, stop)
    return (total / trace.world_size).astype(np.float32)


def step_gradients(step: TraceStep) -> list[dict[str, np.ndarray]]:
    """The unscaled gradients of one step by rank and layer name, in the layers' shapes."""
    return [
        gradients if scale == 1 else {name: value / np.float32(scale) for name, value in gradients.items()}
        for gradients, scale in zip(step.gradients, step.loss_scale, strict=True)
    ]


def _divided(gradients: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return gradients if (scales == 1).all() else gradients / scales[:, None].astype(np.float32)
