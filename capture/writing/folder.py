"""The folder of a new trace: checks, creation, removal, and a lock per rank."""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack
from pathlib import Path

from gradlab.ddp.groups import Ranks
from gradlab.errors import GradlabError
from gradlab.trace.schema import (
    INDEX,
    LOCK,
    MANIFEST,
    PART,
    Manifest,
    rank_folder,
    read_manifest,
    segment_name,
    segment_numbers,
    write_manifest,
)

NEW = ".new"  # suffix of a segment that cannot hold a committed step yet
REPAIR = ".repair"  # suffix of the copy of a segment that repair is writing
DAMAGED = ".damaged"  # suffix that repair gives to a segment that it could not read to the end


def require_free(path: Path, overwrite: bool) -> None:
    """Raise GradlabError unless a folder is new or empty, or `overwrite` is true and it holds a gradlab trace."""
    if path.is_symlink() and not path.exists():
        raise GradlabError(f"{path}: a link that leads nowhere; choose another folder")
    if path.exists() and not path.is_dir():
        raise GradlabError(f"{path}: a file is in the way, expected a new or empty folder")
    if not path.exists() or not any(path.iterdir()):
        return
    if not overwrite:
        raise GradlabError(f"{path}: not empty; nothing is overwritten, choose another folder or pass overwrite=True")
    try:
        read_manifest(path)
    except GradlabError:
        message = f"{path}: not empty and not a gradlab trace, which alone is overwritten; choose another folder"
        raise GradlabError(message) from None


def start_folder(path: Path, manifest: Manifest, overwrite: bool) -> None:
    """Make the folder and write the manifest; with `overwrite`, remove a trace that is there first."""
    try:
        if overwrite and (path / MANIFEST).exists():
            clear_trace(path)
        path.mkdir(parents=True, exist_ok=True)
        write_manifest(path, manifest)
    except OSError as error:
        raise GradlabError(f"{path}: cannot be written ({error.strerror})") from None


def start_together(path: Path, manifest: Manifest, overwrite: bool, ranks: Ranks) -> Manifest:
    """Start the folder on rank 0, and return rank 0's manifest on every rank. A collective; all ranks raise the same.

    A rank on a machine that does not share the folder writes a copy of the manifest, so that the ranks' folders can be
    put together later.
    """
    ranks.raise_together(_problem(path, manifest, overwrite) if ranks.rank == 0 else None)
    agreed = Manifest.from_json(ranks.gather(manifest.to_json())[0], path / MANIFEST)
    missing = not (path / MANIFEST).exists() or read_manifest(path).run != agreed.run
    ranks.raise_together(_problem(path, agreed, overwrite) if missing else None)
    return agreed


def _problem(path: Path, manifest: Manifest, overwrite: bool) -> str | None:
    try:
        start_folder(path, manifest, overwrite)
    except GradlabError as error:
        return str(error)
    return None


def clear_trace(path: Path) -> None:
    """Remove a trace's own files and nothing else; refuse while a process is still recording it."""
    ranks = [rank for rank in range(read_manifest(path).world_size) if (path / rank_folder(rank)).is_dir()]
    with ExitStack() as locks:
        for rank in ranks:  # all before the first is cleared: another rank may be alive still
            locks.callback(os.close, lock_rank(path, rank))
        for rank in ranks:
            _clear_rank(path / rank_folder(rank))
    (path / MANIFEST).unlink()


def _clear_rank(folder: Path) -> None:
    for suffix in ("", PART, NEW, REPAIR, DAMAGED):
        for number in segment_numbers(folder, suffix):
            (folder / (segment_name(number) + suffix)).unlink()
    (folder / INDEX).unlink(missing_ok=True)
    (folder / LOCK).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def lock_rank(path: Path, rank: int) -> int:
    """Lock a rank's folder; return the lock's file descriptor. The kernel unlocks it when the process dies."""
    lock = path / rank_folder(rank) / LOCK
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise GradlabError(f"{lock.parent}: still being recorded by another process; close it first") from None
    except OSError:  # a file system without locks: recording matters more
        pass
    return descriptor


def unlock_rank(path: Path, rank: int, descriptor: int) -> None:
    """Release the lock of `lock_rank` and remove its file."""
    (path / rank_folder(rank) / LOCK).unlink(missing_ok=True)
    os.close(descriptor)
