"""Memory for steps on their way from the hook to the disk: a fixed number of blocks, used again and again.

A block lies in memory as its steps will lie in the file, chunk by chunk. The hook's copy of a gradient is then the only
one: the writer hands whole chunks to the disk. Fresh memory costs several times the copy itself.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence

import numpy as np
import torch

from gradlab.ddp.step_clock import StepSeconds
from gradlab.layout import Layer
from gradlab.trace.sample import LayerSample
from gradlab.trace.schema import NOT_TIMED, STEP_DTYPE, TIMES, chunk_shape

_TORCH_DTYPE = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Block:
    """Memory for some steps in a row, of layers as the trace holds them; pinned for copies from a GPU.

    chunks: chunks of each layer, as stored: (chunks, rows, columns). Columns beyond the layer's elements are zeros.
    records: `STEP_DTYPE` (rows,), the values stored beside the gradients.
    unused: bool (rows, layers).
    """

    def __init__(self, layers: Sequence[Layer], dtype: str, rows: int, pinned: bool = False) -> None:
        self.rows = rows
        self._numels = [layer.numel for layer in layers]
        self._values = [_empty_chunks(layer.numel, rows, _TORCH_DTYPE[dtype], pinned) for layer in layers]
        self.chunks = [_stored(values) for values in self._values]
        self.records = np.zeros(rows, STEP_DTYPE)
        self.unused = np.zeros((rows, len(layers)), bool)

    def step(self, row: int) -> StepBuffer:
        """Clear a row for a new step."""
        self.records[row] = (-1, np.nan, np.nan, 1.0, 1, 0, -1, *NOT_TIMED, 0)
        self.unused[row] = False
        return StepBuffer(self, row)

    def row(self, position: int, row: int) -> list[torch.Tensor]:
        """A layer's elements in one step, in order: flat parts of memory that do not touch."""
        values, numel = self._values[position], self._numels[position]
        if self.rows == 1:
            return [values.view(-1)[:numel]]
        width = values.shape[2]
        return [chunk[row, : numel - at * width] for at, chunk in enumerate(values)]

    def stored(self, position: int, start: int, stop: int) -> np.ndarray:
        """A layer's values as stored, in whole rows: (stop - start, numel)."""
        chunks = self.chunks[position][:, start:stop]
        rows = chunks[0] if len(chunks) == 1 else np.concatenate(list(chunks), axis=1)
        return rows[:, : self._numels[position]]


def _empty_chunks(numel: int, rows: int, dtype: torch.dtype, pinned: bool) -> torch.Tensor:
    width = chunk_shape(numel, rows)[1]
    pieces = max(1, -(-numel // max(1, width)))
    values = torch.empty((pieces, rows, width), dtype=dtype, pin_memory=pinned)
    values[-1, :, numel - (pieces - 1) * width :] = 0
    return values


def _stored(values: torch.Tensor) -> np.ndarray:
    """The same memory as numpy's, which knows no bfloat16."""
    return values.view(torch.int16).numpy().view(np.uint16) if values.dtype == torch.bfloat16 else values.numpy()


class StepBuffer:
    """One recorded step: a row of a block.

    record: one element of `STEP_DTYPE`, (1,).
    unused: bool (layers,).
    seen: bool (layers,): the hook has met the layer in this iteration.
    copies: events of copies from a GPU, each reached when a copy is done.
    times: function that tells how long the step took, once the GPU has done it.
    """

    def __init__(self, block: Block, row: int) -> None:
        self.block, self.index = block, row
        self.record, self.unused = block.records[row : row + 1], block.unused[row]
        self.seen = np.zeros(len(self.unused), bool)
        self.copies: list[torch.cuda.Event] = []
        self.times: Callable[[], StepSeconds] | None = None

    @property
    def last(self) -> bool:
        """Whether the block is full with it."""
        return self.index + 1 == self.block.rows

    @torch.no_grad()
    def put(self, position: int, gradient: torch.Tensor, sample: LayerSample | None = None) -> None:
        """Copy the gradient, in the model's shape, of the layer at a position; with a sample, the part that is kept."""
        parts = self.block.row(position, self.index)
        if len(parts) == 1 and sample is None:
            parts[0].view(gradient.shape).copy_(gradient, non_blocking=True)
        elif len(parts) == 1 and sample is not None:
            sample.copy(parts[0].view(sample.stored.shape), gradient)
        else:
            flat = (gradient if sample is None else sample.take(gradient)).reshape(-1)
            for part, values in zip(parts, flat.split(len(parts[0])), strict=True):
                part.copy_(values, non_blocking=True)

    def put_zeros(self, position: int) -> None:
        """Record zeros for a layer."""
        for part in self.block.row(position, self.index):
            part.zero_()

    def wait(self) -> None:
        """Wait until copies from a GPU have arrived, and the step's times are known."""
        for event in self.copies:
            event.synchronize()
        if self.times is not None:
            for name, value in zip(TIMES, self.times(), strict=True):
                self.record[name] = value


class BufferPool:
    """A limited number of blocks, made when first needed, whose rows are given out in order.

    One thread acquires and keeps steps. Another one may release blocks. There is room for `steps` while the writer
    works on one more block.
    """

    def __init__(self, layers: Sequence[Layer], dtype: str, rows: int, steps: int, pinned: bool = False) -> None:
        self._layers, self._dtype, self._rows, self._pinned = layers, dtype, rows, pinned
        self._to_make = 1 + -(-steps // rows)
        self._free: queue.SimpleQueue[Block] = queue.SimpleQueue()
        self._block: Block | None = None  # that steps are taken from, from row `_row` on
        self._row = 0

    def acquire(self, keep_waiting: Callable[[], bool]) -> StepBuffer | None:
        """Return an empty step, again until it is kept; None if `keep_waiting` says no while all blocks are in use."""
        if self._block is None:
            self._block, self._row = self._take() or self._make(), 0
        while self._block is None and keep_waiting():
            self._block = self._take(timeout=0.05)
        return None if self._block is None else self._block.step(self._row)

    def keep(self, step: StepBuffer) -> None:
        """Give out the next row from now on, after the step that was acquired last."""
        self._row = step.index + 1
        if step.last:
            self._block = None

    def release(self, block: Block) -> None:
        """Take back a block that has been written, all of whose steps were kept."""
        self._free.put(block)

    def _take(self, timeout: float = 0.0) -> Block | None:
        try:
            return self._free.get(block=timeout > 0, timeout=timeout or None)
        except queue.Empty:
            return None

    def _make(self) -> Block | None:
        if not self._to_make:
            return None
        self._to_make -= 1
        return Block(self._layers, self._dtype, self._rows, self._pinned)
