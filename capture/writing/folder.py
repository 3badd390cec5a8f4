"""The folder of a new trace: what may be written where, and who writes it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from gradlab.ddp.agreement import Ranks
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
REPAIR = ".repair"  # suffix of a segment that repair is copying
DAMAGED = ".damaged"  # suffix that repair gives to what it could not read to the end


def require_free(path: Path, overwrite: bool) -> None:
    """Check that a recording can go into this folder.

    Raises:
        GradlabError: if something is there; `overwrite` admits a gradlab trace, and nothing else.
    """
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
    """Make the folder and write the manifest.

    Raises:
        GradlabError: if that is impossible.
    """
    try:
        if overwrite and (path / MANIFEST).exists():
            clear_trace(path)
        path.mkdir(parents=True, exist_ok=True)
        write_manifest(path, manifest)
    except OSError as error:
        raise GradlabError(f"{path}: cannot be written ({error.strerror})") from None


def start_together(path: Path, manifest: Manifest, overwrite: bool, ranks: Ranks) -> Manifest:
    """Rank 0 starts the folder, and every rank returns its manifest; a collective.

    Ranks on machines that do not share the folder write a copy, so that the parts can be put together later.

    Raises:
        GradlabError: the same on all ranks, if one of them cannot write.
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
    """Remove a trace's own files and nothing else.

    Raises:
        GradlabError: if a process is still recording it.
    """
    for rank in range(read_manifest(path).world_size):
        folder = path / rank_folder(rank)
        if folder.is_dir():
            descriptor = lock_rank(path, rank)
            _clear_rank(folder)
            os.close(descriptor)
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
    """Take the lock of a rank's folder, which the kernel gives back when the process dies; its file descriptor.

    Raises:
        GradlabError: if a process that is alive holds it.
    """
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
    """Give the lock back and remove its file."""
    (path / rank_folder(rank) / LOCK).unlink(missing_ok=True)
    os.close(descriptor)
