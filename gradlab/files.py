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
    """Write `data` to `path`, and replace a file that is there: readers see the old file or the new one.

    The folder must exist. Several processes may write one path at once. The last one's file stays.

    Raises:
        OSError: if the file cannot be written; what was there before is still there, and nothing else is left.
    """
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
    """Write `data` beside `path`, for whoever has to wait for others before it may take that name.

    What has not taken its name when the context ends is removed.

    Raises:
        OSError: if the file cannot be written; nothing is left then.
    """
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
    """Write several files into a folder, and replace those that are there: all of them, or none.

    All are on the disk before the first takes its name, so that a full disk leaves the folder as it was. Other files in
    it stay. Names appear in the order given.

    Args:
        folder: made if it is missing.
        files: by path in the folder, such as "figures/loss.svg".

    Raises:
        OSError: if one cannot be written; what was there before is still there, and nothing else is left.
    """
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
    """Make renames inside this folder survive a power cut.

    Raises:
        OSError: if the folder cannot be opened or its disk fails.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
