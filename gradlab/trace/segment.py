"""Read one segment of a trace: an HDF5 file that is checked before any value is used.

A segment may come from an untrusted source. Everything in HDF5 that can reach outside the file or claim more than the
file holds is refused: links that are not hard links, one object under two names, external storage, virtual datasets,
filters (the writer uses none; a compressed file may claim a thousand times its size), and data sets that together need
more bytes than the file has.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from gradlab.errors import GradlabError, NewerFormat
from gradlab.layout import Layer, canonical_json, fingerprint
from gradlab.trace.crc import crc32
from gradlab.trace.schema import (
    FORMAT,
    NOT_TIMED,
    STEP_DTYPE,
    STORED_DTYPE,
    TIMES,
    UNTIMED_STEP_DTYPE,
    VALUES_AT_ONCE,
    VERSION,
    Manifest,
    dataset_name,
    record_checksums,
    row_checksums,
)

_MAX_CHUNK_BYTES = 64 * 2**20
_MAX_HEADER_BYTES = 2**16
# Of a file system without locks, such as NFS or Lustre as they are often mounted, or one that can only be read.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EROFS}
_READ_ATTEMPTS = 26  # with pauses of 67 ms in all
_MEMBERS = {"gradients", "steps", "unused", "checksums", "committed"}


def header(manifest: Manifest, rank: int, number: int) -> str:
    """Return the canonical JSON in a segment that says which trace, rank and place it belongs to."""
    return canonical_json(
        {
            "format": FORMAT,
            "version": VERSION,
            "run": manifest.run,
            "world_size": manifest.world_size,
            "layers": fingerprint(manifest.layers),
            "dtype": manifest.dtype,
            "rank": rank,
            "segment": number,
        }
    )


@contextmanager
def _one_line(path: Path, doing: str) -> Iterator[None]:
    """Turn whatever h5py raises on a damaged file into one line that names the file."""
    try:
        yield
    except GradlabError:
        raise
    except (
        OSError,
        RuntimeError,
        KeyError,
        ValueError,
        TypeError,
        AttributeError,
        OverflowError,
        MemoryError,
    ) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise GradlabError(f"{path}: {doing}: {lines[0][:200]}") from None


def _open_growing(path: Path) -> h5py.File:
    """Open a file that may be growing. HDF5 reads half-written metadata again, by default 100 times with pauses
    doubling from 1 ns: opening a damaged file would never end."""
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    # h5py does not wrap this function; its module is linked with the library that has it.
    set_attempts = ctypes.CDLL(h5py.h5p.__file__).H5Pset_metadata_read_attempts
    if set_attempts(ctypes.c_int64(access.id), ctypes.c_uint(_READ_ATTEMPTS)) < 0:
        raise OSError("HDF5 refuses to limit its attempts at reading")

    def opened(**locking: bool) -> h5py.File:
        if locking:
            access.set_file_locking(locking["locking"], True)
        return h5py.File(h5py.h5f.open(os.fsencode(path), h5py.h5f.ACC_RDONLY | h5py.h5f.ACC_SWMR_READ, access))

    return locked_if_possible(opened)


def locked_if_possible(opened: Callable[..., h5py.File]) -> h5py.File:
    """Open a file under HDF5's lock, and without where the file system has no locks: a trace has a lock of its own."""
    try:
        return opened()
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return opened(locking=False)


class SegmentReader:
    """One open segment of a trace; a damaged, untrusted or foreign file is refused.

    swmr: open a file whose writer was killed or is still writing.
    only: names of the layers whose data sets are opened and checked; no other can be read. None: all.
    committed: number of steps.
    records: `STEP_DTYPE` (committed,), `NOT_TIMED` where times are not stored.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        rank: int,
        number: int,
        *,
        swmr: bool = False,
        only: Collection[str] | None = None,
    ) -> None:
        self.path = path
        self.layers = manifest.layers
        self._position = {layer.name: position for position, layer in enumerate(manifest.layers)}
        self._stored = STORED_DTYPE[manifest.dtype]
        self._dtype = manifest.dtype
        self._seen: set[int] = set()  # addresses of the data sets in the file
        self._claimed = 0  # bytes that these need together
        if not path.is_file():
            raise GradlabError(f"{path}: not a file")
        with _one_line(path, "not a readable HDF5 file, or truncated"):
            self._file = _open_growing(path) if swmr else locked_if_possible(partial(h5py.File, path, "r"))
        try:
            with _one_line(path, "damaged"):
                self._check_header(header(manifest, rank, number))
                self._open_datasets(only)
        except GradlabError:
            self.close()
            raise

    def close(self) -> None:
        self._file.close()

    def _header(self) -> Any:
        """Return the file's own header, None if it has none of fixed length. Text of variable length lies in HDF5's
        global heap, which has no checksum: a flipped bit there can keep HDF5 reading for ever."""
        if "gradlab" not in self._file.attrs:
            return None
        attribute = self._file.attrs.get_id("gradlab")
        fixed = attribute.shape == () and attribute.dtype.kind == "S" and attribute.dtype.itemsize <= _MAX_HEADER_BYTES
        return json.loads(self._file.attrs["gradlab"]) if fixed else None

    def _check_header(self, expected: str) -> None:
        header = self._header()
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise GradlabError(f"{self.path}: not a segment of a gradlab trace")
        version = header.get("version")
        if type(version) is int and version > VERSION:
            raise NewerFormat(
                f"{self.path}: written by a newer gradlab (version {version}, this one reads {VERSION}): upgrade"
            )
        for key, value in json.loads(expected).items():
            if header.get(key) != value:
                came = f"its {key} is {header.get(key)!r}, the manifest says {value!r}"
                raise GradlabError(f"{self.path}: does not belong to this trace: {came}")

    def _open_datasets(self, only: Collection[str] | None) -> None:
        names = set(self._file)
        if names != _MEMBERS:
            raise GradlabError(f"{self.path}: damaged, members {sorted(names ^ _MEMBERS)} are missing or unknown")
        count = len(self.layers)
        counter = self._dataset(self._file, "committed", np.dtype("<i8"), (1,))
        self.committed = int(counter[0])
        if self.committed < 0:
            raise GradlabError(f"{self.path}: damaged, {self.committed} committed steps")
        rows = self.committed
        timed = getattr(self._hard(self._file, "steps"), "dtype", None) != UNTIMED_STEP_DTYPE
        records = self._rows("steps", STEP_DTYPE if timed else UNTIMED_STEP_DTYPE, (rows,))
        self._unused_bits = self._rows("unused", np.dtype("u1"), (rows, -(-count // 8)))
        self._checksums = self._rows("checksums", np.dtype("<u4"), (rows, count))
        if (record_checksums(records, self._unused_bits, self._checksums) != records["checksum"]).any():
            raise GradlabError(f"{self.path}: damaged, the values stored per step do not match their checksums")
        self.records = records if timed else _untimed(records)
        self._open_gradients(only)

    def _open_gradients(self, only: Collection[str] | None) -> None:
        if not isinstance(self._hard(self._file, "gradients"), h5py.Group):
            raise GradlabError(f"{self.path}: 'gradients' is not a group")
        group = self._file["gradients"]
        expected = {dataset_name(layer.name) for layer in self.layers if layer.numel}
        different = sorted(expected ^ set(group))
        if different:
            raise GradlabError(f"{self.path}: layers differ from the manifest: {', '.join(different[:4])}")
        self._datasets = {
            layer.name: self._dataset(group, dataset_name(layer.name), self._stored, (self.committed, layer.numel))
            for layer in self.layers
            if layer.numel and (only is None or layer.name in only)
        }

    def _rows(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        return self._dataset(self._file, name, dtype, shape)[: self.committed]

    def _hard(self, group: Any, name: str) -> Any:
        if group.id.links.get_info(name.encode()).type != h5py.h5l.TYPE_HARD:
            kind = type(group.get(name, getlink=True)).__name__
            raise GradlabError(f"{self.path}: {name!r} is a {kind}; links out of a trace are refused")
        return group[name]

    def _dataset(self, group: Any, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> Any:
        """Return a data set after checking its type, at least `shape[0]` rows, and storage for all of them."""
        dataset = self._hard(group, name)
        if not isinstance(dataset, h5py.Dataset):
            raise GradlabError(f"{self.path}: {name!r} is not a data set")
        properties = dataset.id.get_create_plist()
        if properties.get_layout() == h5py.h5d.VIRTUAL:
            raise GradlabError(f"{self.path}: {name!r} is a virtual data set; data outside a trace is refused")
        if properties.get_external_count():
            raise GradlabError(f"{self.path}: {name!r} has external storage; data outside a trace is refused")
        if properties.get_nfilters():
            filter_code = properties.get_filter(0)[0]
            raise GradlabError(f"{self.path}: {name!r} uses the HDF5 filter {filter_code}; gradlab writes without any")
        address = h5py.h5o.get_info(dataset.id).addr
        if address in self._seen:
            raise GradlabError(f"{self.path}: {name!r} is a data set that has another name, too")
        self._seen.add(address)
        self._check_shape(dataset, name, dtype, shape)
        return dataset

    def _check_shape(self, dataset: Any, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> None:
        found, held, chunks = dataset.dtype, dataset.shape, dataset.chunks  # each of which asks HDF5
        if found != dtype:
            raise GradlabError(f"{self.path}: {name!r} holds {found}, expected {dtype}")
        if len(held) != len(shape) or held[0] < shape[0] or held[1:] != shape[1:]:
            raise GradlabError(f"{self.path}: {name!r} has shape {held}, the manifest needs {shape}")
        if chunks is not None and math.prod(chunks) * dtype.itemsize > _MAX_CHUNK_BYTES:
            raise GradlabError(f"{self.path}: {name!r} has chunks of an absurd shape {chunks}")
        needed = math.prod(shape) * dtype.itemsize
        self._claimed += needed
        if needed > dataset.id.get_storage_size() or self._claimed > self.path.stat().st_size:
            raise GradlabError(f"{self.path}: {name!r} claims {needed} bytes of data that the file does not hold")

    @property
    def unused(self) -> np.ndarray:
        """Layers without a gradient on this rank: bool (committed, layers)."""
        return np.unpackbits(self._unused_bits, axis=1, count=len(self.layers)).astype(bool)

    def verify(self, layer: Layer, start: int, stop: int) -> None:
        """Compare rows start..stop with their checksums, in pieces of about 64 MiB however long a row is."""
        if layer.numel <= VALUES_AT_ONCE:
            self.read_stored(layer, start, stop)
            return
        for row in range(start, stop):
            checksum = 0
            for column in range(0, layer.numel, VALUES_AT_ONCE):
                columns = slice(column, min(column + VALUES_AT_ONCE, layer.numel))
                checksum = crc32(self.read_stored(layer, row, row + 1, columns).view(np.uint8), checksum)
            if checksum != self._checksums[row, self._position[layer.name]]:
                raise self._damaged(layer, row)

    def _damaged(self, layer: Layer, row: int) -> GradlabError:
        step = int(self.records["index"][row])
        return GradlabError(f"{self.path}: layer {layer.name!r} at iteration {step} is damaged (checksum)")

    def read_stored(self, layer: Layer, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        """Read rows start..stop as stored, (stop - start, columns), float32, float16, or uint16 for bfloat16; whole
        rows are compared with their checksums."""
        if layer.numel == 0:
            return np.zeros((stop - start, 0), self._stored)
        if layer.name not in self._datasets:
            raise GradlabError(f"{self.path}: opened for other layers alone, not for {layer.name!r}")
        with _one_line(self.path, f"cannot read layer {layer.name!r}"):
            rows = self._datasets[layer.name][start:stop, columns]
        if rows.shape[1] == layer.numel:
            expected = self._checksums[start:stop, self._position[layer.name]]
            wrong = np.flatnonzero(row_checksums(rows) != expected)
            if wrong.size:
                raise self._damaged(layer, start + int(wrong[0]))
        return rows

    def read(self, layer: Layer, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        """Read rows start..stop of a layer as float32 (stop - start, columns). Raises as `read_stored`."""
        return as_float32(self.read_stored(layer, start, stop, columns), self._dtype)


def _untimed(records: np.ndarray) -> np.ndarray:
    """Records without times as `STEP_DTYPE` has them."""
    whole = np.zeros(len(records), STEP_DTYPE)
    for name in UNTIMED_STEP_DTYPE.names or ():
        whole[name] = records[name]
    for name, nothing in zip(TIMES, NOT_TIMED, strict=True):
        whole[name] = nothing
    return whole


def as_float32(stored: np.ndarray, dtype: str) -> np.ndarray:
    """Convert stored values to float32; bfloat16 is the upper half of a float32's bits."""
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return stored.astype(np.float32, copy=False)
