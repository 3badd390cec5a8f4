"""A real small file system."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[Path]:
    """Mount a file system of so many bytes under `folder`; skip the test where that needs more rights."""
    disk = folder / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", disk]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs more rights than this process has")
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


def fill(disk: Path, left: int) -> None:
    """Leave so many bytes of a small disk free."""
    filling = disk / "filling"
    with open(filling, "wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    os.truncate(filling, max(0, filling.stat().st_size // 4096 * 4096 - left))


def make_read_only(disk: Path) -> None:
    """Remount a small disk, so that nothing on it can be changed."""
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
