"""Unpacked arrays kept as .npy files, so that only the first of many processes pays for unpacking.

Beside the file, in NAME.gradlab-cache, or in $XDG_CACHE_HOME/gradlab where that folder cannot be written; under the
file's sha256, so that a changed file is read anew. Arrays follow from the file alone and each is put in place by one
rename: processes may write at once, and whoever comes last changes nothing. The cache only saves time; where none
can be written, the arrays are used as read.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gradlab.datasets.splits import Splits, checked

_BLOCK = 1 << 20


def cached(source: Path, read: Callable[[], Splits]) -> Splits:
    """The arrays of `source`, mapped from a cache if it holds them sound and whole, else by `read` and then cached.

    Raises:
        GradlabError: what `read` raises.
        OSError: if `source` cannot be read.
    """
    key = _sha256(source)
    places = [root / key[:32] for root in (_beside(source), _user_cache()) if root]
    for place in places:
        splits = _load(place)
        if splits is not None:
            return splits
    splits = read()
    for place in places:
        if _store(splits, place):
            break
    return splits


def _sha256(source: Path) -> str:
    digest = hashlib.sha256()
    with source.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _beside(source: Path) -> Path | None:
    # The mode is asked too: to the superuser every folder is writable, but one marked read-only is left as it is.
    marked_writable = source.parent.stat().st_mode & 0o222
    if not marked_writable or not os.access(source.parent, os.W_OK):
        return None
    return source.with_name(f"{source.name}.gradlab-cache")


def _user_cache() -> Path | None:
    given = os.environ.get("XDG_CACHE_HOME")
    if given and os.path.isabs(given):
        return Path(given) / "gradlab"
    try:
        return Path.home() / ".cache" / "gradlab"
    except RuntimeError:  # no home folder is known
        return None


def _load(place: Path) -> Splits | None:
    try:
        arrays = [np.load(place / f"{key}.npy", mmap_mode="r", allow_pickle=False) for key in Splits._fields]
        return checked(Splits(*arrays), str(place))
    except (OSError, EOFError, ValueError):  # GradlabError among them: whatever is amiss, the file itself is read
        return None


def _store(splits: Splits, place: Path) -> bool:
    try:
        place.mkdir(parents=True, exist_ok=True)
        for key, array in splits._asdict().items():
            _write(place, f"{key}.npy", array)
    except OSError:
        return False
    return True


def _write(folder: Path, name: str, array: np.ndarray) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=name, suffix=".part", dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            np.save(stream, array, allow_pickle=False)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, folder / name)
    except BaseException:
        os.unlink(temporary)
        raise
