"""Write files whole: neither another process nor the next run after a power cut reads half of one, or of several."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


def write_whole(path: Path, data: bytes | memoryview) -> None:
    """Write `data` to `path` in a folder that exists: readers see the old file or the new one, and after an OSError the
    old one. Several processes may write one path at once. The last one's file stays."""
    with written_beside(path, data) as written:
        written.take_its_name()


@dataclass(frozen=True)
class Written:
    """A file that is on the disk under a name of its own."""

    temporary: Path
    path: Path

    def take_its_name(self) -> None:
        """Replace the file at `path`, which survives a power cut then. Raise OSError if that is impossible."""
        os.replace(self.temporary, self.path)
        sync_folder(self.path.parent)


@contextmanager
def written_beside(path: Path, data: bytes | memoryview) -> Iterator[Written]:
    """Write `data` beside `path`, for a writer that has to wait for others before it may take that name. The file is
    removed if it has not taken its name when the context ends."""
    # In the same folder, as a rename is atomic inside one file system only.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield Written(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_all(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write several files, by path, into a folder, in order, and replace those that are there: all of them, or none.
    All are on the disk before the first takes its name, so that a full disk leaves the folder as it was."""
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    temporary = folder / f".{uuid.uuid4().hex}.tmp"
    try:
        for name in files:
            if (folder / name).is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(folder / name))
        temporary.mkdir(parents=True)
        for number, data in enumerate(files.values()):
            write_whole(temporary / str(number), data)
        for number, name in enumerate(files):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(temporary / str(number), folder / name)
        for parent in {(folder / name).parent for name in files}:
            sync_folder(parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        for one in made:  # those that hold nothing
            with suppress(OSError):
                one.rmdir()


def sync_folder(folder: Path) -> None:
    """Make renames inside this folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
