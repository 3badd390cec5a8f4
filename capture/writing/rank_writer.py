"""Write what one rank records: some steps make a block, blocks make a segment, and an index lists the segments."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from gradlab.capture.settings import SEGMENT_BYTES
from gradlab.capture.writing.buffers import Block, StepBuffer
from gradlab.capture.writing.folder import lock_rank, unlock_rank
from gradlab.capture.writing.segment import SegmentWriter
from gradlab.trace.schema import (
    Manifest,
    RankIndex,
    block_steps,
    rank_folder,
    write_index,
)

SPACE_RESERVE = 4 * 2**20  # bytes of the disk that recording leaves free, for closing the files


class RankWriter:
    """Writes the recording of one rank, in the thread that calls it.

    Steps come in blocks, in order of their rows. A step is safe from a kill once `flush` or a full block has committed
    it. A full disk raises OSError in `append`, `flush` or `close`.

    segment_bytes: after which a new segment begins (always whole blocks).
    rows: rows of the blocks that its steps have to come in, at most 16 (see `block_steps`).
    steps_committed: number of steps that a kill of this process can no longer lose.
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
        self.rows = block_steps(manifest.row_bytes, most_steps)
        self._segment_steps = segment_steps(self.rows, manifest.row_bytes, segment_bytes)
        self._segment: SegmentWriter | None = None
        self._segments: list[tuple[int, int]] = []
        self._filled = self._written = 0  # rows of the block: filled in memory; of these, committed
        (folder / rank_folder(rank)).mkdir(exist_ok=True)
        self._lock = lock_rank(folder, rank)
        self._block: Block | None = None  # the last one that a step came in

    @property
    def bytes_committed(self) -> int:
        """Bytes of gradients that are committed."""
        return self.steps_committed * self._manifest.row_bytes

    @property
    def steps_waiting(self) -> int:
        """Steps that are in memory only."""
        return self._filled - self._written

    def append(self, step: StepBuffer) -> None:
        """Take the next row of a block; commit the block when it is full. It is read until then, and not afterwards."""
        step.wait()
        self._block, self._filled = step.block, step.index + 1
        if step.last:
            self.flush()

    def flush(self) -> None:
        """Commit all steps that are in memory only."""
        self._commit(self.rows)

    def _commit(self, chunk_rows: int) -> None:
        """Commit them; chunk_rows: of a segment that begins with them."""
        block = self._block
        if block is not None and self._filled > self._written:
            require_space(self._folder, self._manifest.world_size * self.rows * self._manifest.row_bytes)
            if self._segment is None:
                number = len(self._segments)
                self._segment = SegmentWriter(self._folder, self._manifest, self._rank, number, rows=chunk_rows)
            self._segment.append_block(block, self._written, self._filled)
            self.steps_committed += self._filled - self._written
        self._written = self._filled
        if self._filled == self.rows:
            self._filled = self._written = 0
            self._block = None
            if self._segment is not None and self._segment.committed >= self._segment_steps:
                self._finish_segment()

    def _finish_segment(self) -> None:
        if self._segment is not None:
            self._segment.finish()
            self._segments.append((self._segment.number, self._segment.committed))
            self._segment = None

    def close(self, steps_lost: int = 0) -> None:
        """Commit what is left and write the rank's index, which marks its recording as closed."""
        self._commit(max(1, self.steps_waiting))  # nothing follows: a new file needs no larger chunks
        self._finish_segment()
        index = RankIndex(self._manifest.run, self._rank, tuple(self._segments), steps_lost)
        write_index(self._folder, index)
        self._release()

    def abandon(self) -> None:
        """Leave the files as they are, for `repair`."""
        if self._segment is not None:
            self._segment.abandon()
            self._segment = None
        self._filled = self._written = 0
        self._block = None
        self._release()

    def _release(self) -> None:
        if self._lock >= 0:
            unlock_rank(self._folder, self._rank, self._lock)
            self._lock = -1


def segment_steps(rows: int, row_bytes: int, segment_bytes: int) -> int:
    """Return the number of steps in a file: as many whole blocks of `rows` steps as fit, at least one."""
    return rows * max(1, segment_bytes // max(1, row_bytes * rows))


def require_space(folder: Path, block_bytes: int) -> None:
    """Raise ENOSPC before the disk is full: HDF5 may crash the process when it cannot write what it holds.

    block_bytes: bytes that all ranks may write at once; twice as many and `SPACE_RESERVE` must be free.
    """
    disk = os.statvfs(folder)
    if disk.f_bavail * disk.f_frsize < 2 * block_bytes + SPACE_RESERVE:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
