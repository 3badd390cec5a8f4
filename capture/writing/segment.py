"""Write one segment of a trace: an HDF5 file that a reader may open while it grows and that survives a kill.

HDF5's single-writer-multiple-reader (SWMR) mode with a flush per block keeps every committed row readable after
kill -9. A full block goes to the file as it lies in memory, chunk by chunk: HDF5 neither gathers nor caches it.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import h5py
import numpy as np

from gradlab.capture.writing.buffers import Block
from gradlab.capture.writing.folder import NEW
from gradlab.capture.writing.values import all_finite, chunk_checksums, count_non_finite
from gradlab.files import sync_folder
from gradlab.trace.schema import (
    CHUNK_STEPS,
    PART,
    STEP_DTYPE,
    STORED_DTYPE,
    Manifest,
    chunk_shape,
    dataset_name,
    rank_folder,
    record_checksums,
    row_checksums,
    segment_name,
)
from gradlab.trace.segment import header, locked_if_possible

_RECORDS_PER_CHUNK = 256
# Bytes of a file that stay in the page cache. A small trace is read from there. Of a large one the cache would keep
# what nobody reads, instead of what training reads. And writing to memory that a virtual machine has not used lately
# costs eight times as much.
CACHED_BYTES = 2**28


class SegmentWriter:
    """An open segment, whose number counts from 0 on its rank; `finish` gives it its final name, without `suffix`."""

    def __init__(
        self, folder: Path, manifest: Manifest, rank: int, number: int, suffix: str = PART, rows: int = CHUNK_STEPS
    ) -> None:
        self.path = folder / rank_folder(rank) / segment_name(number)
        self.number = number
        self._part = self.path.with_name(self.path.name + suffix)
        self.committed = 0
        self._ends: deque[int] = deque()  # sizes of the file after the commits whose bytes may be in the page cache
        self._manifest, self._rows = manifest, rows
        unfinished = self.path.with_name(self.path.name + NEW)
        # The oldest file format that knows SWMR, so that older HDF5 libraries can read a trace as well.
        self._file = locked_if_possible(partial(h5py.File, unfinished, "w", libver=("v110", "v110"), rdcc_nbytes=0))
        try:
            # HDF5 checksums text of fixed length, but not text of variable length.
            self._file.attrs["gradlab"] = np.bytes_(header(manifest, rank, number))
            self._create_datasets()
            self._file.swmr_mode = True
            # A file under the name .part is readable from its first moment on.
            os.rename(unfinished, self._part)
        except BaseException:
            self.abandon()
            unfinished.unlink(missing_ok=True)
            raise

    def _create_datasets(self) -> None:
        """Create all datasets before SWMR mode, which allows no new ones."""
        count = len(self._manifest.layers)
        stored = STORED_DTYPE[self._manifest.dtype]
        gradients = self._file.create_group("gradients")
        self._gradients = [
            self._growing(
                gradients, dataset_name(layer.name), (layer.numel,), stored, chunk_shape(layer.numel, self._rows)
            )
            if layer.numel
            else None
            for layer in self._manifest.layers
        ]
        bits = -(-count // 8)
        self._records = self._growing(self._file, "steps", (), STEP_DTYPE, (_RECORDS_PER_CHUNK,))
        self._unused = self._growing(self._file, "unused", (bits,), np.dtype("u1"), (_RECORDS_PER_CHUNK, bits))
        self._checksums = self._growing(self._file, "checksums", (count,), np.dtype("<u4"), (self._rows, count))
        self._counter = self._file.create_dataset("committed", data=np.zeros(1, np.dtype("<i8")))
        if self._manifest.dtype == "bfloat16":
            for dataset in filter(None, self._gradients):
                dataset.attrs["logical_dtype"] = np.bytes_("bfloat16")

    @staticmethod
    def _growing(
        group: h5py.Group, name: str, row: tuple[int, ...], dtype: np.dtype, chunks: tuple[int, ...]
    ) -> h5py.Dataset:
        return group.create_dataset(name, shape=(0, *row), maxshape=(None, *row), dtype=dtype, chunks=chunks)

    def append_block(self, block: Block, start: int, stop: int) -> None:
        """Write and commit a block's new rows, start to stop. Their numbers of non-finite elements are filled in."""
        layers, records = range(len(self._gradients)), block.records[start:stop]
        if (start, stop) != (0, self._rows) or block.rows != self._rows or self.committed % self._rows:
            rows = [block.stored(position, start, stop) for position in layers]
            records["non_finite"] = count_non_finite(rows, self._manifest.dtype)
            self.append(rows, records, block.unused[start:stop])
            return
        records["non_finite"] = 0
        checksums = np.zeros((stop, len(layers)), np.uint32)
        for position, (dataset, layer) in enumerate(zip(self._gradients, self._manifest.layers, strict=True)):
            if dataset is not None:
                chunks = block.chunks[position]
                if not all_finite(chunks, self._manifest.dtype):
                    records["non_finite"] += count_non_finite(
                        [block.stored(position, start, stop)], self._manifest.dtype
                    )
                checksums[:, position] = chunk_checksums(chunks, layer.numel)
                self._write_chunks(dataset, chunks, layer.numel)
        self._commit(records, block.unused[start:stop], checksums)

    def append(self, gradients: Sequence[np.ndarray], records: np.ndarray, unused: np.ndarray) -> None:
        """Write and commit steps: stored values (steps, numel) by layer, records (steps,), `unused` (steps, layers)."""
        start, stop = self.committed, self.committed + len(records)
        for dataset, rows in zip(self._gradients, gradients, strict=True):
            if dataset is not None:
                dataset.resize(stop, axis=0)
                dataset[start:stop] = rows
        self._commit(records, unused, np.stack([row_checksums(rows) for rows in gradients], axis=1))

    def _write_chunks(self, dataset: h5py.Dataset, chunks: np.ndarray, numel: int) -> None:
        """Write the next chunks of a layer of so many elements, (chunks, rows, columns), as they are."""
        start, width = self.committed, chunks.shape[2]
        dataset.id.set_extent((start + self._rows, numel))
        for at, chunk in enumerate(chunks):
            dataset.id.write_direct_chunk((start, at * width), chunk)

    def _commit(self, records: np.ndarray, unused: np.ndarray, checksums: np.ndarray) -> None:
        """Write what steps have beside gradients, then the counter that makes them valid."""
        start, stop = self.committed, self.committed + len(records)
        bits = np.packbits(unused, axis=1)
        records = records.copy()
        records["checksum"] = record_checksums(records, bits, checksums)
        for dataset, rows in ((self._records, records), (self._unused, bits), (self._checksums, checksums)):
            dataset.resize(stop, axis=0)
            dataset[start:stop] = rows
        self._file.flush()
        self._counter[0] = stop
        self._file.flush()
        self.committed = stop
        self._pass_to_disk()

    def _pass_to_disk(self) -> None:
        """Let the kernel begin to write what is new, and forget what it has written long ago.

        The disk works while a segment grows then, and not when it is closed. Bytes before the end of the
        first commit, such as the headers of data sets, are written again and again and never forgotten.
        """
        descriptor = self._file.id.get_vfd_handle()
        self._ends.append(os.fstat(descriptor).st_size)
        if len(self._ends) > 1:
            _forget(descriptor, self._ends[-2], self._ends[-1])  # too early to forget, so it is written only
        while len(self._ends) > 2 and self._ends[-1] - self._ends[1] > CACHED_BYTES:
            _forget(descriptor, self._ends.popleft(), self._ends[0])

    def finish(self) -> None:
        """Close the file, force it to disk, and give it its final name."""
        self._file.close()
        with open(self._part, "rb") as file:
            os.fsync(file.fileno())
            if os.fstat(file.fileno()).st_size > CACHED_BYTES:
                _forget(file.fileno(), 0, 0)
        os.rename(self._part, self.path)
        sync_folder(self.path.parent)

    def abandon(self) -> None:
        """Close the file as far as the disk allows; a second call does nothing.

        Every appended row stays readable, under the name .part.
        """
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            self._file.close()


def _forget(descriptor: int, start: int, stop: int) -> None:
    """Start writing bytes start to stop (0: the end) to disk, and drop those there from the page cache. No wait."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # advice that a file system does not take
            os.posix_fadvise(descriptor, start, stop - start if stop else 0, os.POSIX_FADV_DONTNEED)
