"""Write what one rank records: some steps make a block, blocks make a segment, and an index lists the segments."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gradlab.capture.settings import SEGMENT_BYTES
from gradlab.capture.writing.folder import lock_rank, unlock_rank
from gradlab.capture.writing.segment import SegmentWriter
from gradlab.trace.schema import (
    STEP_DTYPE,
    STORED_DTYPE,
    Manifest,
    RankIndex,
    block_steps,
    rank_folder,
    write_index,
)

SPACE_RESERVE = 4 * 2**20  # bytes of the disk that recording leaves free, for closing the files


class RankWriter:
    """Writes the recording of one rank, in the thread that calls it.

    Memory: one block, of at most 16 steps (see `block_steps`). A step is safe from a kill once `flush` or a full block
    has committed it.

    Args:
        folder: the trace's folder, which already holds its manifest.
        manifest: the trace's manifest.
        rank: the rank whose steps are written.
        segment_bytes: size in bytes after which a new segment begins (always whole blocks).
        most_steps: steps that will be written at most; None: not known.
    Raises:
        GradlabError: if another process is recording this rank.
        OSError: if the rank's folder cannot be written; from `append`, `flush` and `close` also if the disk is full.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        rank: int,
        segment_bytes: int = SEGMENT_BYTES,
        most_steps: int | None = None,
    ) -> None:
        self.steps_committed = 0
        self._folder, self._manifest, self._rank = folder, manifest, rank
        self._rows = block_steps(manifest.row_bytes, most_steps)
        self._segment_steps = segment_steps(self._rows, manifest.row_bytes, segment_bytes)
        self._segment: SegmentWriter | None = None
        self._segments: list[tuple[int, int]] = []
        self._filled = self._written = 0  # rows of the block: filled in memory; of these, committed
        (folder / rank_folder(rank)).mkdir(exist_ok=True)
        self._lock = lock_rank(folder, rank)
        self._blocks: list[np.ndarray] = []
        self._records = np.zeros(self._rows, STEP_DTYPE)
        self._unused = np.zeros((self._rows, len(manifest.layers)), bool)

    @property
    def bytes_committed(self) -> int:
        """Bytes of gradients that are committed."""
        return self.steps_committed * self._manifest.row_bytes

    @property
    def steps_waiting(self) -> int:
        """Steps that are in memory only."""
        return self._filled - self._written

    def append(self, gradients: Sequence[np.ndarray], record: np.void, unused: np.ndarray) -> None:
        """Add one step to the block; commit the block when it is full.

        Args:
            gradients: per layer, stored values (numel,).
            record: one element of `STEP_DTYPE`; unused: bool (layers,).
        """
        if not self._blocks:
            stored = STORED_DTYPE[self._manifest.dtype]
            self._blocks = [np.empty((self._rows, layer.numel), stored) for layer in self._manifest.layers]
        for block, row in zip(self._blocks, gradients, strict=True):
            block[self._filled] = row
        self._records[self._filled] = record
        self._unused[self._filled] = unused
        self._filled += 1
        if self._filled == self._rows:
            self.flush()

    def flush(self) -> None:
        """Commit all steps that are in memory only."""
        self._commit(self._rows)

    def _commit(self, chunk_rows: int) -> None:
        """Commit them; chunk_rows: of a segment that begins with them."""
        new = slice(self._written, self._filled)
        if self._filled > self._written:
            require_space(self._folder, self._manifest.world_size * self._rows * self._manifest.row_bytes)
            if self._segment is None:
                number = len(self._segments)
                self._segment = SegmentWriter(self._folder, self._manifest, self._rank, number, rows=chunk_rows)
            gradients = [block[new] for block in self._blocks]
            self._records["non_finite"][new] = _non_finite(gradients, self._manifest.dtype)
            self._segment.append(gradients, self._records[new], self._unused[new])
            self.steps_committed += self._filled - self._written
        self._written = self._filled
        if self._filled == self._rows:
            self._filled = self._written = 0
            if self._segment is not None and self._segment.committed >= self._segment_steps:
                self._finish_segment()

    def _finish_segment(self) -> None:
        if self._segment is not None:
            self._segment.finish()
            self._segments.append((self._segment.number, self._segment.committed))
            self._segment = None

    def close(self, steps_lost: int = 0, reason: str | None = None) -> None:
        """Commit what is left and write the rank's index, which marks its recording as closed."""
        self._commit(max(1, self.steps_waiting))  # nothing follows: a new file needs no larger chunks
        self._finish_segment()
        index = RankIndex(self._manifest.run, self._rank, tuple(self._segments), steps_lost, reason)
        write_index(self._folder, index)
        self._release()

    def abandon(self) -> None:
        """Leave the files as they are, for `repair`."""
        if self._segment is not None:
            self._segment.abandon()
            self._segment = None
        self._filled = self._written = 0
        self._blocks = []
        self._release()

    def _release(self) -> None:
        if self._lock >= 0:
            unlock_rank(self._folder, self._rank, self._lock)
            self._lock = -1


def segment_steps(rows: int, row_bytes: int, segment_bytes: int) -> int:
    """Return the number of steps in a file: as many whole blocks of `rows` steps as fit, at least one."""
    return rows * max(1, segment_bytes // max(1, row_bytes * rows))


def require_space(folder: Path, block_bytes: int) -> None:
    """Raise before the disk is full: HDF5 may crash the process when it cannot write what it holds.

    Args:
        folder: any folder on the disk.
        block_bytes: bytes that all ranks may write at once; twice as many and `SPACE_RESERVE` must be free.
    Raises:
        OSError: ENOSPC, which the disk itself would raise a little later.
    """
    disk = os.statvfs(folder)
    if disk.f_bavail * disk.f_frsize < 2 * block_bytes + SPACE_RESERVE:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def _non_finite(layers: Sequence[np.ndarray], dtype: str) -> np.ndarray:
    """Count the infinite or NaN elements of each step: layers of (steps, numel) -> (steps,)."""
    return np.add.reduce([_non_finite_rows(rows, dtype) for rows in layers], axis=0)


def _non_finite_rows(rows: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        exponent = np.uint16(0x7F80)
        return np.count_nonzero((rows & exponent) == exponent, axis=1)
    counts = np.zeros(len(rows), np.int64)
    with np.errstate(all="ignore"):
        # A row whose sum of squares is finite has nothing to count.
        doubtful = ~np.isfinite(np.einsum("sn,sn->s", rows, rows)) if dtype == "float32" else np.ones(len(rows), bool)
    counts[doubtful] = rows.shape[1] - np.count_nonzero(np.isfinite(rows[doubtful]), axis=1)
    return counts
