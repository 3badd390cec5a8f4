"""Keep unpacked arrays as .npy files, so that only the first of many processes unpacks them.

The files lie in $XDG_CACHE_HOME/gradlab, or else ~/.cache/gradlab. Their folder is named after the source's path, size
and time of change, so that a changed source is read anew. Each array is put in place by one rename, so that several
processes may write the same array at once, and `digests.json` comes last, with the SHA-256 of each file: what does not
have it is read anew. The cache only saves time. It may be removed while no process runs; if it cannot be written, the
arrays are used as read.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gradlab.datasets.splits import Splits, checked
from gradlab.files import write_whole
from gradlab.layout import canonical_json

_DIGESTS = "digests.json"
_PIECE = 2**22  # bytes read at a time


def cached(
    source: Path, image: tuple[int, ...], read: Callable[[], Splits], others: Callable[[Splits], list[str]]
) -> tuple[Splits, list[str]]:
    """Return the arrays of `source`: memory-mapped from the cache if they are sound there, else read and then cached.

    Args:
        source: the file that holds the arrays, with checksums that `read` compares.
        image: the shape that one image must have.
        read: reads the arrays from `source`.
        others: says what they differ in from what is published, see `gradlab.datasets.published`.

    Returns:
        The arrays, and what `others` said when they were read.

    Raises:
        GradlabError: if `read` raises it.
        OSError: if `source` cannot be read.
    """
    root, key = _root(), _key(source)
    known = _load(root / key, image) if root else None
    if known is None:
        splits = read()
        known = splits, others(splits)
        if root and _key(source) == key:  # else `source` changed while it was read
            with contextlib.suppress(OSError):
                _store(*known, root / key)
    return known


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


def _load(place: Path, image: tuple[int, ...]) -> tuple[Splits, list[str]] | None:
    try:
        kept = json.loads((place / _DIGESTS).read_text("utf-8"))
        files = {key: place / f"{key}.npy" for key in Splits._fields}
        if kept["digests"] != {key: _digest(file) for key, file in files.items()}:
            return None
        arrays = [np.load(file, mmap_mode="r", allow_pickle=False) for file in files.values()]
        return checked(Splits(*arrays), image, str(place)), [str(name) for name in kept["others"]]
    except (OSError, EOFError, ValueError, LookupError, TypeError, RecursionError):
        # In every such case the source is read.
        return None


def _store(splits: Splits, others: list[str], place: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    digests = {}
    for key, array in splits._asdict().items():
        content = io.BytesIO()
        np.save(content, array, allow_pickle=False)
        write_whole(place / f"{key}.npy", content.getbuffer())
        digests[key] = hashlib.sha256(content.getbuffer()).hexdigest()
    write_whole(place / _DIGESTS, canonical_json({"digests": digests, "others": others}).encode())


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while part := stream.read(_PIECE):
            digest.update(part)
    return digest.hexdigest()
