"""The committed steps of one rank of a closed trace, over all its segments."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np

from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.trace.rules import count_problems, index_problems, order_problems
from gradlab.trace.schema import STEP_DTYPE, Manifest, RankIndex, rank_folder, segment_name
from gradlab.trace.segment import SegmentReader

_MAX_OPEN_SEGMENTS = 64


class OpenSegments:
    """The segments of a trace, opened on demand; at most 64 stay open, those used last. only: as of `SegmentReader`."""

    def __init__(self, folder: Path, manifest: Manifest, only: Collection[str] | None = None) -> None:
        self.folder, self.manifest, self._only = folder, manifest, only
        self._open: OrderedDict[tuple[int, int], SegmentReader] = OrderedDict()

    def get(self, rank: int, number: int) -> SegmentReader:
        """Return an open segment, valid until the next call. Raises as `SegmentReader`."""
        key = (rank, number)
        if key in self._open:
            self._open.move_to_end(key)
            return self._open[key]
        path = self.folder / rank_folder(rank) / segment_name(number)
        self._open[key] = SegmentReader(path, self.manifest, rank, number, only=self._only)
        if len(self._open) > _MAX_OPEN_SEGMENTS:
            self._open.popitem(last=False)[1].close()
        return self._open[key]

    def close(self) -> None:
        """Close all files; `get` reopens them."""
        while self._open:
            self._open.popitem()[1].close()


class RankSteps:
    """The S steps that one rank committed, in rows 0 .. S - 1, whatever the other ranks hold.

    records: `STEP_DTYPE` (S,).
    unused: bool (S, layers), layers without a gradient.
    """

    def __init__(self, segments: OpenSegments, rank: int, index: RankIndex) -> None:
        folder, manifest = segments.folder, segments.manifest
        require_none(index_problems(folder, manifest, rank, index))
        self._segments, self._rank = segments, rank
        self._numbers = [number for number, _ in index.segments]
        records, unused = [np.zeros(0, STEP_DTYPE)], [np.zeros((0, len(manifest.layers)), bool)]
        for number in self._numbers:
            segment = segments.get(rank, number)
            records.append(segment.records)
            unused.append(segment.unused)
        sizes = [len(part) for part in records]
        require_none(count_problems(folder, index, dict(zip(self._numbers, sizes[1:], strict=True))))
        self._starts = np.cumsum(sizes)  # segment k holds rows starts[k] .. starts[k + 1]
        self.records: np.ndarray = np.concatenate(records)
        self.unused: np.ndarray = np.concatenate(unused)
        require_none(order_problems(folder, rank, self.iterations))

    @property
    def iterations(self) -> np.ndarray:
        """Iterations of the training run, int64 (S,), ascending."""
        return self.records["index"]

    def read(self, layer: Layer, rows: np.ndarray, columns: slice) -> np.ndarray:
        """Read ascending rows of a layer: float32 (len(rows), columns). Raises as `SegmentReader.read`."""
        parts = [
            self._segments.get(self._rank, self._numbers[segment]).read(layer, first, last, columns)
            for segment, first, last in runs(rows, self._starts)
        ]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([np.empty((0, columns.stop - columns.start), np.float32), *parts])


def require_none(problems: Sequence[str]) -> None:
    """Raise GradlabError with the first problem, if there is one."""
    if problems:
        raise GradlabError(problems[0])


def runs(rows: np.ndarray, starts: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Cut ascending rows into consecutive ones of one segment: segment, first and last + 1 row in it; segment k holds
    rows starts[k] .. starts[k + 1] - 1."""
    if not len(rows):
        return
    segments = np.searchsorted(starts, rows, side="right") - 1
    cuts = np.flatnonzero((np.diff(rows) != 1) | (np.diff(segments) != 0)) + 1
    for first, last in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        segment = int(segments[first])
        base = int(starts[segment])
        yield segment, int(rows[first]) - base, int(rows[last - 1]) + 1 - base
