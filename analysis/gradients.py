"""Read the gradients of a trace, divided by the loss scale that was recorded with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from gradlab.trace import Trace, TraceStep


def loss_scales(trace: Trace) -> np.ndarray:
    """Return the loss scales of N ranks at the trace's T common steps, (N, T)."""
    return np.stack([trace.scalars(rank)["loss_scale"] for rank in range(trace.world_size)])


def read_unscaled(
    trace: Trace, layer: str, rank: int, start: int, stop: int, columns: slice | None = None
) -> np.ndarray:
    """Read one rank's gradients of a layer, float32 (stop - start, columns). Arguments as in `Trace.read`."""
    gradients = trace.read(layer, rank, start, stop, columns)
    return _divided(gradients, trace.scalars(rank)["loss_scale"][start:stop])


def mean_unscaled(trace: Trace, layer: str, start: int, stop: int) -> np.ndarray:
    """Average a layer's gradients over all ranks, float32 (stop - start, numel). Arguments as in `Trace.mean`."""
    scales = loss_scales(trace)[:, start:stop]
    if (scales == scales[0]).all():
        return _divided(trace.mean(layer, start, stop), scales[0])
    total = np.zeros((stop - start, trace.layer(layer).numel))
    for rank in range(trace.world_size):
        total += read_unscaled(trace, layer, rank, start, stop)
    return (total / trace.world_size).astype(np.float32)


def step_gradients(step: TraceStep) -> list[dict[str, np.ndarray]]:
    """Return one step's unscaled gradients: per rank, layer name -> array of the layer's shape."""
    return [
        gradients if scale == 1 else {name: value / np.float32(scale) for name, value in gradients.items()}
        for gradients, scale in zip(step.gradients, step.loss_scale, strict=True)
    ]


def _divided(gradients: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return gradients if (scales == 1).all() else gradients / scales[:, None].astype(np.float32)
