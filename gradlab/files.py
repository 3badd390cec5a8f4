"""Write files whole: neither another process nor the next run after a power cut reads half of one."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def write_whole(path: Path, data: bytes | memoryview) -> None:
    """Write `data` to `path`, and replace a file that is there: readers see the old file or the new one.

    The folder must exist. Several processes may write one path at once. The last one's file stays.

    Raises:
        OSError: if the file cannot be written; what was there before is still there, and nothing else is left.
    """
    # In the same folder, as a rename is atomic inside one file system only.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


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
