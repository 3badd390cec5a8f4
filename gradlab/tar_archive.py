"""Read tar archives that anybody may have written, as a stream, in bounded memory: nothing is extracted here."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from gradlab.errors import GradlabError

_DAMAGE = (tarfile.TarError, zlib.error, gzip.BadGzipFile, EOFError, ValueError, RecursionError)
_PIECE = 1 << 20


@contextmanager
def open_tar(path: Path, most_bytes: int, expected: str) -> Iterator[tarfile.TarFile]:
    """Open an archive, gzip-compressed or plain, for one pass over its members. A damaged one is refused, also while
    members are read, and so is one that unpacks to more than `most_bytes`."""
    with path.open("rb") as head:
        packed = head.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(path) if packed else path.open("rb") as stream:
            # The stream may claim to be a gzip.GzipFile or a file: both read bytes.
            bounded = _Bounded(stream, str(path), most_bytes, expected)  # type: ignore[arg-type]
            with tarfile.open(fileobj=bounded, mode="r|") as archive:  # type: ignore[call-overload]
                yield archive
            bounded.drain()
    except GradlabError:
        raise
    except _DAMAGE as error:
        line = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise GradlabError(f"{path}: a damaged or truncated archive ({line}): get the file again") from error


class _Bounded:
    """A stream that refuses to give more than some bytes: a small gzip file can unpack to any size."""

    def __init__(self, stream: IO[bytes], source: str, most_bytes: int, expected: str) -> None:
        self._stream, self._left = stream, most_bytes
        self._refusal = f"{source}: unpacks to more than {most_bytes} bytes, not {expected}"

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise GradlabError(self._refusal)
        return data

    def drain(self) -> None:
        """Read what follows the archive: a gzip stream compares its checksum at its end."""
        while self.read(_PIECE):
            pass
