"""A recorded trace, opened for reading: the local gradients of every rank at every recorded iteration.

    with Trace("trace") as trace:
        for step in trace.iterate():
            step.gradients[0]["conv1.weight"]     # rank 0's local gradient, float32, in the layer's shape

Ranks may hold different steps, because one was killed earlier or dropped a step. `Trace.steps` are the iterations that
every rank committed, and a position is an index into them. `gradlab.trace.schema` describes the files.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from gradlab.errors import GradlabError
from gradlab.formatting import format_percent
from gradlab.layout import Layer, canonical_json
from gradlab.trace.checking import RankCheck, TraceCheck, check
from gradlab.trace.rank import OpenSegments, RankSteps, require_none
from gradlab.trace.rules import empty_problems, folder_problems, pass_remark, remarks
from gradlab.trace.sample import LayerSample, describe_samples
from gradlab.trace.schema import CHUNK_STEPS, RankIndex, read_index, read_manifest, rows_at_once
from gradlab.trace.times import RecordedTimes, recorded_times

__all__ = ["RankCheck", "Trace", "TraceCheck", "TraceSource", "TraceStep", "check"]

_BLOCK_BYTES = 32 * 2**20  # most bytes of a block that `iterate` reads ahead


@dataclass(frozen=True)
class TraceStep:
    """One iteration of a trace on all N ranks, its L layers in the order of `Trace.layers`."""

    position: int  # index into Trace.steps
    index: int  # iteration of the training run
    gradients: list[dict[str, np.ndarray]]  # per rank: layer name -> float32 array of the layer's shape
    loss: np.ndarray  # (N,), NaN where it was not annotated
    learning_rate: float  # rank 0's, of the first parameter group
    loss_scale: np.ndarray  # (N,): recorded gradient divided by the true one
    accumulation: np.ndarray  # (N,): forward passes that make up the gradient
    non_finite: np.ndarray  # (N,): infinite or NaN elements
    optimizer_step: int  # optimizer steps before it, from 0; -1: not known
    unused: np.ndarray  # (N, L) bool: layers without a gradient on that rank


@dataclass(frozen=True)
class TraceSource:
    """Arguments by which another process opens the same trace.

    path: the trace's folder.
    average_ranks: see `Trace`.

    >>> source = Trace("trace").source
    >>> with source.open(only=["head.weight"]) as trace:
    ...     trace.mean("head.weight").shape
    (40, 640)
    """

    path: str
    average_ranks: int = 1

    def open(self, only: Collection[str] | None = None) -> Trace:
        """Open the trace. only: see `Trace`."""
        return Trace(self.path, only=only, average_ranks=self.average_ranks)


class Trace:
    """A closed trace, read-only; a context manager.

    >>> with Trace("trace") as trace:
    ...     step = next(trace.iterate())
    >>> trace.world_size, len(trace.steps), step.gradients[0]["head.weight"].shape
    (2, 40, (10, 64))

    Args:
        path: the trace's folder.
        allow_empty: accept a trace that has no iteration common to all ranks.
        only: names of the layers that will be read, others cannot be. Opening checks the data set of every layer in
            every file, which takes longer than reading one layer. None: all.
        average_ranks: recorded ranks L that are a node: the trace then has the means of ranks 0 to L - 1, of the next
            L, and so on, as if these were its ranks. 1: each recorded rank by itself.
    Attributes:
        world_size: number of ranks N; with `average_ranks`, of nodes.
        layers: the layers as the trace holds them, in order. A layer in `samples` has a part of its elements.
        model_layers: the model's layers, in order, with those that were not recorded.
        unrecorded: those that were not, such as a recorder's choice left out.
        samples: layers of which the trace holds blocks only, by name. Empty: it holds all values.
        metadata: the JSON object that the recorder was given.
        steps: iterations that every rank committed, int64 (T,), ascending.
        rank_steps: committed steps of each recorded rank.
        steps_lost: steps of each recorded rank that were due, but not recorded.
    Raises:
        GradlabError: for a folder that is missing, foreign, damaged, newer, unfinished or empty, and for ranks
            that disagree.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        allow_empty: bool = False,
        only: Collection[str] | None = None,
        average_ranks: int = 1,
    ) -> None:
        self.path = Path(path)
        self._manifest = read_manifest(self.path)
        ranks = self._manifest.world_size
        if type(average_ranks) is not int or average_ranks < 1 or ranks % average_ranks:
            raise GradlabError(f"{self.path}: average_ranks = {average_ranks!r}, expected a divisor of {ranks} ranks")
        self.average_ranks = average_ranks
        self._options: dict[str, Any] = {"allow_empty": allow_empty, "only": only, "average_ranks": average_ranks}
        self.world_size: int = ranks // average_ranks
        self.layers: tuple[Layer, ...] = self._manifest.layers
        self.model_layers: tuple[Layer, ...] = self._manifest.model_layers
        names = {layer.name for layer in self.layers}
        self.unrecorded = tuple(layer for layer in self.model_layers if layer.name not in names)
        self.samples: Mapping[str, LayerSample] = self._manifest.samples
        self.metadata: dict[str, Any] = self._manifest.metadata
        self._by_name = {layer.name: layer for layer in self.layers}
        self._segments = OpenSegments(self.path, self._manifest, only)
        try:
            require_none(folder_problems(self.path, self._manifest))
            indices = self._read_indices()
            self._ranks = [RankSteps(self._segments, rank, index) for rank, index in enumerate(indices)]
            self.rank_steps: tuple[int, ...] = tuple(len(rank.records) for rank in self._ranks)
            self.steps: np.ndarray = reduce(np.intersect1d, [rank.iterations for rank in self._ranks])
            if not allow_empty:
                require_none(empty_problems(self.path, self.rank_steps, len(self.steps)))
        except GradlabError:
            self.close()
            raise
        self._rows = [np.searchsorted(rank.iterations, self.steps) for rank in self._ranks]
        self._scalars: dict[int, dict[str, np.ndarray]] = {}
        self.steps_lost: tuple[int, ...] = tuple(index.steps_lost for index in indices)

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        """Travel to another process, such as a DataLoader's worker, as path and options: it opens the files itself."""
        return partial(Trace, **self._options), (str(self.path.resolve()),)

    def close(self) -> None:
        """Close all files; a later read reopens them."""
        self._segments.close()

    def _read_indices(self) -> list[RankIndex]:
        by_rank = [read_index(self.path, rank) for rank in range(self._manifest.world_size)]
        indices = [index for index in by_rank if index is not None]
        if len(indices) < len(by_rank):
            open_ranks = ", ".join(str(rank) for rank, index in enumerate(by_rank) if index is None)
            raise GradlabError(
                f"{self.path}: recording was not closed (rank {open_ranks}); run `gradlab trace repair {self.path}`"
            )
        return indices

    @property
    def remarks(self) -> tuple[str, ...]:
        """Notes that are no errors, one line each: ranks hold different numbers of steps, layers are sampled."""
        sampled = (f"a sample: {self.extent}",) if self.samples else ()
        nodes = f"{self.world_size} nodes, each the mean of {self.average_ranks} of {len(self._ranks)} recorded ranks"
        averaged = (nodes,) if self.average_ranks > 1 else ()
        local = (self.local_steps,) if self.local_steps else ()
        several = (self.several_passes,) if self.several_passes else ()
        left_out = (self.left_out,) if self.left_out else ()
        return (*remarks(self.rank_steps, len(self.steps)), *several, *local, *left_out, *sampled, *averaged)

    @property
    def left_out(self) -> str:
        """Say how much of the model was not recorded; empty: all layers were."""
        if not self.unrecorded:
            return ""
        values, every = (sum(layer.numel for layer in some) for some in (self.unrecorded, self.model_layers))
        return (
            f"{len(self.unrecorded)} of the model's {len(self.model_layers)} layers were not recorded, "
            f"{format_percent(values / every)} of its values"
        )

    @property
    def several_passes(self) -> str:
        """Say that there are more backward passes than optimizer steps, and what to do; empty if there are not."""
        scalars = self.scalars(0)
        return pass_remark(scalars["index"], scalars["optimizer_step"])

    @property
    def on_gpu(self) -> bool:
        """Whether the recorded ranks computed on GPUs."""
        return self.metadata.get("device", "cpu") != "cpu"

    @property
    def local_steps(self) -> str:
        """Say, in one phrase, that these are pseudo-gradients, and of how many local steps; empty if they are not."""
        told = self.metadata.get("local_steps")
        if self.local_step_count is None or not isinstance(told, dict):
            return ""
        inner = f" of {told['optimizer']}" if isinstance(told.get("optimizer"), str) else ""
        return f"pseudo-gradients: what {self.local_step_count} local steps{inner} add up to on each rank"

    @property
    def local_step_count(self) -> int | None:
        """How many local steps a recorded pseudo-gradient adds up, H; None: gradients of single steps were recorded."""
        told = self.metadata.get("local_steps")
        steps = told.get("steps") if isinstance(told, dict) else None
        return steps if type(steps) is int and 1 <= steps <= 10**9 else None

    @property
    def times(self) -> RecordedTimes | None:
        """How long its steps took; None: they were not timed, or each is many local steps."""
        if self.local_steps:
            return None
        rows = [rank.records[at] for rank, at in zip(self._ranks, self._rows, strict=True)]
        return recorded_times(rows, gathers=self._gathers)

    @property
    def of_nodes(self) -> bool:
        """Whether its ranks are nodes: each is the mean of several ranks."""
        return self.average_ranks > 1 or self._gathers

    @property
    def _gathers(self) -> bool:
        return "averaged_ranks" in self.metadata

    @property
    def source(self) -> TraceSource:
        """Return the arguments by which another process opens this trace just so."""
        return TraceSource(str(self.path.resolve()), self.average_ranks)

    @property
    def extent(self) -> str:
        """Return the part of the layers that the trace holds, in one phrase: all values, or which share of which."""
        return describe_samples(self.samples, self.layers)

    @property
    def digest(self) -> str:
        """Sha256 (hex) that identifies the trace: its manifest with the unique run id, and every rank's steps."""
        digest = hashlib.sha256(canonical_json(self._manifest.to_json()).encode())
        for rank in self._ranks:
            digest.update(len(rank.records).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(rank.iterations).tobytes())
        return digest.hexdigest()

    @property
    def dtype(self) -> str:
        """The type gradients are stored in: float32, float16 or bfloat16. Reading always gives float32."""
        return self._manifest.dtype

    def layer(self, name: str) -> Layer:
        """Return the layer of this name.

        Raises:
            GradlabError: if the trace has none, with the closest names.
        """
        if name in self._by_name:
            return self._by_name[name]
        close = difflib.get_close_matches(name, self._by_name, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(list(self._by_name)[:3])}, ..."
        raise GradlabError(f"{self.path}: no layer {name!r} in the trace; {hint}")

    def read(
        self, layer: str, rank: int, start: int = 0, stop: int | None = None, columns: slice | None = None
    ) -> np.ndarray:
        """Read the local gradients of one layer on one rank, as recorded (times the loss scale of their step).

        Args:
            layer: name of the layer.
            rank: number of the rank, from 0.
            start, stop: positions in `steps`.
            columns: elements of the row-major flattening, contiguous; None reads and verifies whole rows.
        Returns:
            float32 (stop - start, numel[columns]).
        Raises:
            GradlabError: for an unknown layer or rank, positions out of range, or damaged data.
        """
        member = self.layer(layer)
        if not 0 <= rank < self.world_size:
            raise GradlabError(f"{self.path}: no rank {rank}; expected 0 to {self.world_size - 1}")
        start, stop = self._range(start, stop)
        columns = _contiguous(columns, member.numel)
        if self.average_ranks == 1:
            return self._ranks[rank].read(member, self._rows[rank][start:stop], columns)
        return self._node_mean(member, rank, slice(start, stop), columns)

    def _node_mean(self, layer: Layer, node: int, positions: slice, columns: slice) -> np.ndarray:
        """As `gradlab.collectives.mean_of_node` has it: the sum in the order of ranks, times 1/L, in float32."""
        first, *others = self._members(node)
        total = self._ranks[first].read(layer, self._rows[first][positions], columns)
        with np.errstate(invalid="ignore", over="ignore"):  # recorded infinities may meet
            for rank in others:
                total = total + self._ranks[rank].read(layer, self._rows[rank][positions], columns)
            return np.asarray(total * np.float32(1.0 / self.average_ranks), np.float32)

    def _members(self, node: int) -> range:
        """The recorded ranks of a node; of a rank that stands for itself, that one."""
        return range(node * self.average_ranks, (node + 1) * self.average_ranks)

    def mean(self, layer: str, start: int = 0, stop: int | None = None, columns: slice | None = None) -> np.ndarray:
        """Average a layer over all ranks, in float64. Arguments and errors as in `read`.

        Returns:
            float32 (stop - start, numel[columns]).
        """
        start, stop = self._range(start, stop)
        picked = _contiguous(columns, self.layer(layer).numel)
        out = np.empty((stop - start, picked.stop - picked.start), np.float32)
        rows = rows_at_once(out.shape[1])
        for first in range(start, stop, rows):
            last = min(first + rows, stop)
            total = np.zeros((last - first, out.shape[1]), np.float64)
            with np.errstate(invalid="ignore", over="ignore"):  # recorded infinities may meet
                for rank in range(self.world_size):
                    total += self.read(layer, rank, first, last, columns)
                out[first - start : last - start] = total / self.world_size
        return out

    def iterate(
        self, start: int = 0, stop: int | None = None, layers: Sequence[str] | None = None
    ) -> Iterator[TraceStep]:
        """Go step by step over all ranks, reading blocks of at most 16 steps and about 32 MiB.

        Args:
            start, stop: positions in `steps`.
            layers: names of the layers to read, None for all.
        Raises:
            GradlabError: as in `read`.
        """
        start, stop = self._range(start, stop)
        chosen = [self.layer(name) for name in layers] if layers is not None else list(self.layers)
        row_bytes = 4 * self.world_size * sum(layer.numel for layer in chosen)
        size = max(1, min(CHUNK_STEPS, _BLOCK_BYTES // max(row_bytes, 1)))
        for first in range(start, stop, size):
            last = min(first + size, stop)
            block = [
                {
                    layer.name: self.read(layer.name, rank, first, last).reshape(last - first, *layer.shape)
                    for layer in chosen
                }
                for rank in range(self.world_size)
            ]
            # What is handed out is not held here: whoever is done with a block's last step has its memory back.
            steps = [
                self._step(first + offset, [{name: rows[offset, ...] for name, rows in rank.items()} for rank in block])
                for offset in reversed(range(last - first))
            ]
            del block
            while steps:
                yield steps.pop()

    def _step(self, position: int, gradients: list[dict[str, np.ndarray]]) -> TraceStep:
        rows = [rank_rows[position] for rank_rows in self._rows]
        records = np.array([rank.records[row] for rank, row in zip(self._ranks, rows, strict=True)])
        unused = np.array([rank.unused[row] for rank, row in zip(self._ranks, rows, strict=True)])
        nodes = (self.world_size, self.average_ranks)
        return TraceStep(
            position=position,
            index=int(self.steps[position]),
            gradients=gradients,
            loss=_averaged("loss", records["loss"].reshape(nodes)),
            learning_rate=float(records["learning_rate"][0]),
            loss_scale=_averaged("loss_scale", records["loss_scale"].reshape(nodes)),
            accumulation=_averaged("accumulation", records["accumulation"].reshape(nodes)),
            non_finite=_averaged("non_finite", records["non_finite"].reshape(nodes)),
            optimizer_step=int(records["optimizer_step"][0]),
            unused=np.all(unused.reshape(*nodes, -1), axis=1),
        )

    def scalars(self, rank: int) -> dict[str, np.ndarray]:
        """Return what one rank stored beside gradients of each of the T common steps.

        It is put together once: whoever reads gradients in small blocks asks for the loss scale of each.

        Returns:
            By name: the fields of `gradlab.trace.schema.STEP_DTYPE` but the checksum, each (T,); and unused, bool
            (T, layers). None can be written to.
        """
        if not 0 <= rank < self.world_size:
            raise GradlabError(f"{self.path}: no rank {rank}; expected 0 to {self.world_size - 1}")
        if rank not in self._scalars:
            self._scalars[rank] = self._collect_scalars(rank)
        return dict(self._scalars[rank])

    def _collect_scalars(self, rank: int) -> dict[str, np.ndarray]:
        names = [name for name in self._ranks[rank].records.dtype.names or () if name != "checksum"]
        members = [(self._ranks[one], self._rows[one]) for one in self._members(rank)]
        unused: np.ndarray = np.all(np.stack([located.unused[rows] for located, rows in members]), axis=0)
        by_name = {name: np.stack([located.records[name][rows] for located, rows in members], 1) for name in names}
        collected = {name: _averaged(name, values) for name, values in by_name.items()} | {"unused": unused}
        for values in collected.values():
            values.flags.writeable = False
        return collected

    def _range(self, start: int, stop: int | None) -> tuple[int, int]:
        stop = len(self.steps) if stop is None else stop
        if not 0 <= start <= stop <= len(self.steps):
            raise GradlabError(
                f"{self.path}: positions {start}..{stop} do not lie in the trace's {len(self.steps)} steps"
            )
        return start, stop


def _averaged(name: str, values: np.ndarray) -> np.ndarray:
    """Return a step's records of a node's ranks (..., L) as one: counts added up, the loss averaged, else rank 0's."""
    if name == "loss" and values.shape[-1] > 1:
        return values.mean(axis=-1)
    return values.sum(axis=-1).astype(values.dtype) if name == "non_finite" else values[..., 0]


def _contiguous(columns: slice | None, numel: int) -> slice:
    start, stop, step = (columns or slice(None)).indices(numel)
    if step != 1:
        raise GradlabError(f"columns {columns}: expected a slice without a step")
    return slice(start, max(start, stop))
