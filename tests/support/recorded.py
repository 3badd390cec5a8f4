"""Small traces for the tests of the analysis, written by the real writer and read back by the real reader."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gradlab.capture.writing.trace_writer import TraceWriter
from gradlab.layout import Layer
from gradlab.trace import Trace

CONVOLUTION = Layer("conv.weight", (4, 2, 3, 3), "convolution")
LINEAR = Layer("head.weight", (5, 6), "linear")
BIAS = Layer("head.bias", (5,), "bias")
LAYERS = (CONVOLUTION, LINEAR, BIAS)


def random_gradients(seed: int, steps: int, ranks: int, layers: Sequence[Layer] = LAYERS) -> list[list[dict]]:
    """Standard normal gradients by step, rank and layer name."""
    rng = np.random.default_rng(seed)
    return [
        [{layer.name: rng.standard_normal(layer.shape).astype(np.float32) for layer in layers} for _ in range(ranks)]
        for _ in range(steps)
    ]


def record(
    path: Path,
    gradients: Sequence[Sequence[dict]],
    layers: Sequence[Layer] = LAYERS,
    *,
    indices: Sequence[int] | None = None,
    learning_rates: Sequence[float] | None = None,
    loss_scale: float | Sequence[float] = 1.0,
    metadata: dict | None = None,
    model_layers: Sequence[Layer] = (),
) -> Trace:
    """Write gradients (by step, rank and name) as a trace and open it. indices: iteration numbers, from 0 if None;
    loss_scale: of all steps, or of each."""
    ranks = len(gradients[0])
    scales = [loss_scale] * len(gradients) if isinstance(loss_scale, (int, float)) else loss_scale
    with TraceWriter(path, layers, ranks, metadata=metadata, model_layers=model_layers) as writer:
        for position, by_rank in enumerate(gradients):
            for rank, grads in enumerate(by_rank):
                writer.append(
                    rank,
                    position if indices is None else indices[position],
                    {name: value * np.float32(scales[position]) for name, value in grads.items()},
                    loss=1.0 / (1 + position),
                    learning_rate=0.1 if learning_rates is None else learning_rates[position],
                    loss_scale=scales[position],
                )
    return Trace(path)


def record_layer(path: Path, values: np.ndarray, layer: Layer) -> Trace:
    """A trace of one layer from values (steps, ranks, numel)."""
    return record(path, [[{layer.name: of_rank.reshape(layer.shape)} for of_rank in step] for step in values], [layer])
