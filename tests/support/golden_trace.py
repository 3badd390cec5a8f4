"""The trace that tests/golden keeps: two ranks, three steps, and values that follow from arithmetic alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gradlab.capture import TraceWriter
from gradlab.layout import Layer

GOLDEN = Path(__file__).parents[1] / "golden" / "trace"
LAYERS = (Layer("conv.weight", (3, 4), "linear"), Layer("conv.bias", (3,), "bias"))


def golden_gradient(rank: int, index: int) -> np.ndarray:
    """The gradient of conv.weight."""
    return np.arange(12, dtype=np.float32).reshape(3, 4) + 100 * rank + index


def write_golden_trace(path: Path) -> None:
    """Write steps 0, 2 and 4; conv.bias has no gradient in step 2."""
    with TraceWriter(path, LAYERS, 2, overwrite=True, metadata={"note": "golden"}) as writer:
        for index in (0, 2, 4):
            for rank in range(2):
                gradients = {"conv.weight": golden_gradient(rank, index), "conv.bias": np.zeros(3, np.float32)}
                unused = ("conv.bias",) if index == 2 else ()
                writer.append(rank, index, gradients, loss=index / 2, optimizer_step=index, unused=unused)


if __name__ == "__main__":
    write_golden_trace(GOLDEN)
