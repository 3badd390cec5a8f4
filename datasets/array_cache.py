"""Keep unpacked arrays as .npy files, so that only the first of many processes unpacks them.

The files lie in $XDG_CACHE_HOME/gradlab, or else ~/.cache/gradlab. Their folder is named after the source's path, size
and time of change, so that a changed source is read anew. Each array is put in place by one rename, so that several
processes may write the same array at once. The cache only saves time. It may be removed while no process runs; if it
cannot be written, the arrays are used as read.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gradlab.datasets.splits import Splits, checked
from gradlab.files import write_whole
from gradlab.layout import canonical_json


def cached(source: Path, image: tuple[int, ...], read: Callable[[], Splits]) -> Splits:
    """Return the arrays of `source`: memory-mapped from the cache if they are sound there, else read and then cached.

    Args:
        source: the file that holds the arrays.
        image: the shape that one image must have.
        read: reads the arrays from `source`.
    Raises:
        GradlabError: if `read` raises it.
        OSError: if `source` cannot be read.
    """
    root, key = _root(), _key(source)
    splits = _load(root / key, image) if root else None
    if splits is None:
        splits = read()
        if root and _key(source) == key:  # else `source` changed while it was read
            with contextlib.suppress(OSError):
                _store(splits, root / key)
    return splits


def _root() -> Path | None:
    given = os.environ.get("XDG_CACHE_HOME")
    if given and os.path.isabs(given):
        return Path(given) / "gradlab"
    try:
        return Path.home() / ".cache" / "gradlab"
    except RuntimeError:  # no home folder is known
        return None


def _key(source: Path) -> str:
    status = source.stat()
    identity = canonical_json([str(source.resolve()), status.st_size, status.st_mtime_ns])
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def _load(place: Path, image: tuple[int, ...]) -> Splits | None:
    try:
        arrays = [np.load(place / f"{key}.npy", mmap_mode="r", allow_pickle=False) for key in Splits._fields]
        return checked(Splits(*arrays), image, str(place))
    except (OSError, EOFError, ValueError):  # GradlabError is a ValueError: in every such case the source is read
        return None


def _store(splits: Splits, place: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for key, array in splits._asdict().items():
        content = io.BytesIO()
        np.save(content, array, allow_pickle=False)
        write_whole(place / f"{key}.npy", content.getbuffer())
