"""Memory for steps on their way from the hook to the writer thread: a fixed number of reused buffers."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from gradlab.layout import Layer
from gradlab.trace.schema import STEP_DTYPE

_TORCH_DTYPE = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass
class StepBuffer:
    """One recorded step: a flat tensor (numel,) per layer, and the values stored beside the gradients."""

    gradients: list[torch.Tensor]
    record: np.ndarray  # STEP_DTYPE, shape (1,)
    unused: np.ndarray  # bool (layers,)
    seen: np.ndarray  # bool (layers,): the hook has met the layer in this iteration
    copies: list[torch.cuda.Event] = field(default_factory=list)  # each is reached when a copy from a GPU is done

    @classmethod
    def empty(cls, layers: Sequence[Layer], dtype: str, pinned: bool = False) -> StepBuffer:
        rows = [torch.empty(layer.numel, dtype=_TORCH_DTYPE[dtype], pin_memory=pinned) for layer in layers]
        count = len(layers)
        buffer = cls(rows, np.zeros(1, STEP_DTYPE), np.zeros(count, bool), np.zeros(count, bool))
        buffer.clear()
        return buffer

    def clear(self) -> None:
        self.record[:] = (-1, np.nan, np.nan, 1.0, 1, 0, 0)
        self.unused[:] = False
        self.seen[:] = False
        self.copies.clear()

    def stored(self) -> list[np.ndarray]:
        """Return each layer's values (numel,) as stored, once copies from a GPU have arrived."""
        for event in self.copies:
            event.synchronize()
        return [
            (row.view(torch.int16).numpy().view(np.uint16) if row.dtype == torch.bfloat16 else row.numpy())
            for row in self.gradients
        ]


class BufferPool:
    """A limited number of step buffers, made when first needed.

    count: step buffers at most.
    pinned: whether they are in pinned memory, for copies from a GPU.
    """

    def __init__(self, layers: Sequence[Layer], dtype: str, count: int, pinned: bool) -> None:
        self._layers, self._dtype, self._pinned = layers, dtype, pinned
        self._to_make = count
        self._free: queue.SimpleQueue[StepBuffer] = queue.SimpleQueue()

    def acquire(self, keep_waiting: Callable[[], bool]) -> StepBuffer | None:
        """Return an empty buffer, and wait for one if all are in use.

        Args:
            keep_waiting: asked again and again. False ends the wait.

        Returns:
            The buffer; None: the wait ended without one.
        """
        buffer = self._take() or self._make()
        while buffer is None and keep_waiting():
            buffer = self._take(timeout=0.05)
        if buffer is not None:
            buffer.clear()
        return buffer

    def release(self, buffer: StepBuffer) -> None:
        self._free.put(buffer)

    def _take(self, timeout: float = 0.0) -> StepBuffer | None:
        try:
            return self._free.get(block=timeout > 0, timeout=timeout or None)
        except queue.Empty:
            return None

    def _make(self) -> StepBuffer | None:
        if not self._to_make:
            return None
        self._to_make -= 1
        return StepBuffer.empty(self._layers, self._dtype, self._pinned)
