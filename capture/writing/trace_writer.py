"""Write a trace of several emulated ranks from one process: for synthetic gradients, other trainers, and tests."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from gradlab.capture.settings import SEGMENT_BYTES, check_metadata
from gradlab.capture.writing.buffers import BufferPool
from gradlab.capture.writing.folder import require_free, start_folder
from gradlab.capture.writing.rank_writer import RankWriter
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.trace.sample import LayerSample
from gradlab.trace.schema import NOT_TIMED, STORED_DTYPE, Manifest
from gradlab.version import VERSION


class TraceWriter:
    """Writes a trace of all ranks from one process, in the calling thread.

        with TraceWriter("trace", layers, world_size=4) as writer:
            writer.append(rank=0, index=0, gradients={"conv1.weight": gradient, ...}, loss=2.3)

    Memory: a block of at most 16 steps per rank, fewer of large models.

    >>> from gradlab.capture import TraceWriter
    >>> with TraceWriter("written", [Layer("weight", (2, 3))], world_size=2) as writer:
    ...     for rank in range(2):
    ...         writer.append(rank, 0, {"weight": torch.full((2, 3), rank + 1.0)})
    >>> Trace("written").mean("weight").tolist()
    [[1.5, 1.5, 1.5, 1.5, 1.5, 1.5]]

    Args:
        path: folder of the trace, new or empty.
        layers: the layers that every step holds, in order.
        world_size: number of ranks.
        dtype: stored type: float32, float16 or bfloat16.
        metadata, overwrite, segment_bytes: those of `TraceRecorder`.
        samples: blocks of the layers that are not held whole; `layers` then has their `stored` form.
        model_layers: the model's layers, in order, if `layers` leaves some of them out.
        most_steps: steps that will be written at most, so that memory and files fit them; None: not known.
    Raises:
        GradlabError: if the folder is not free, or an argument is out of range.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        layers: Sequence[Layer],
        world_size: int,
        *,
        dtype: str = "float32",
        metadata: dict[str, Any] | None = None,
        overwrite: bool = False,
        segment_bytes: int = SEGMENT_BYTES,
        samples: Sequence[LayerSample] = (),
        model_layers: Sequence[Layer] = (),
        most_steps: int | None = None,
    ) -> None:
        self.path = Path(path)
        if dtype not in STORED_DTYPE:
            raise GradlabError(f"dtype is {dtype!r}, expected one of {', '.join(STORED_DTYPE)}")
        check_metadata(metadata or {})
        require_free(self.path, overwrite)
        metadata = {"gradlab": VERSION, "emulated": True} | (metadata or {})
        by_name = {sample.layer.name: sample for sample in samples}
        manifest = Manifest(world_size, tuple(layers), dtype, metadata, samples=by_name, model=tuple(model_layers))
        self._manifest = Manifest.from_json(manifest.to_json(), self.path)
        start_folder(self.path, self._manifest, overwrite)
        self._ranks = [
            RankWriter(self.path, self._manifest, rank, segment_bytes, most_steps) for rank in range(world_size)
        ]
        self._pools = [BufferPool(manifest.layers, dtype, writer.rows, 0) for writer in self._ranks]
        self._last = [-1] * world_size
        self._closed = False

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def append(
        self,
        rank: int,
        index: int,
        gradients: Mapping[str, np.ndarray | torch.Tensor],
        *,
        loss: float = float("nan"),
        learning_rate: float = float("nan"),
        loss_scale: float = 1.0,
        accumulation: int = 1,
        optimizer_step: int = -1,
        unused: Sequence[str] = (),
    ) -> None:
        """Write one step of one rank.

        Args:
            rank: the rank, from 0.
            index: iteration, ascending per rank.
            gradients: layer name -> values of the layer's shape.
            loss, learning_rate, loss_scale, accumulation, optimizer_step: this step's, see `STEP_DTYPE`.
            unused: names of layers without a gradient.
        Raises:
            GradlabError: if a layer is missing or of another shape, or a rank or an iteration is out of range.
        """
        if not 0 <= rank < len(self._ranks) or index <= self._last[rank]:
            raise GradlabError(f"rank {rank}, iteration {index}: expected a rank below {len(self._ranks)}, ascending")
        self._require_whole(gradients)
        pool = self._pools[rank]
        step = pool.acquire(lambda: False)
        assert step is not None
        step.record[:] = (index, loss, learning_rate, loss_scale, accumulation, 0, optimizer_step, *NOT_TIMED, 0)
        for position, layer in enumerate(self._manifest.layers):
            step.put(position, torch.as_tensor(gradients[layer.name]))
            step.unused[position] = layer.name in unused
        pool.keep(step)
        self._ranks[rank].append(step)
        if step.last:
            pool.release(step.block)
        self._last[rank] = index

    def _require_whole(self, gradients: Mapping[str, np.ndarray | torch.Tensor]) -> None:
        for layer in self._manifest.layers:
            value = gradients.get(layer.name)
            if value is None or tuple(value.shape) != layer.shape:
                came = "nothing" if value is None else f"shape {tuple(value.shape)}"
                raise GradlabError(f"layer {layer.name!r}: got {came}, expected shape {layer.shape}")

    def close(self) -> None:
        """Commit everything and close the trace."""
        if not self._closed:
            self._closed = True
            for rank in self._ranks:
                rank.close()
