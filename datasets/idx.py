"""Read arrays of unsigned bytes from IDX files, plain or gzip-compressed: the format of MNIST and its successors.

LeCun, Cortes and Burges, "The MNIST database" (1998), file format: two zero bytes, the type (8: unsigned byte), the
number of axes, each axis' length as a big-endian 32-bit integer, then the values row by row.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from gradlab.datasets.splits import MAX_IMAGES, reason
from gradlab.errors import GradlabError

_UNSIGNED_BYTE = 8


def read_idx(path: Path, item: tuple[int, ...]) -> np.ndarray:
    """Read a file's values, uint8 (items, *item), for items of the shape `item`.

    The header is checked before it is used. At most one value more than it announces is unpacked.

    Raises:
        GradlabError: if the file is damaged, truncated, too long, or does not hold such items.
        OSError: if the file cannot be read.
    """
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        if not packed:
            return _values(file, item, str(path))
        try:
            with gzip.open(file) as stream:
                return _values(stream, item, str(path))  # type: ignore[arg-type]
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise GradlabError(f"{path}: damaged or truncated gzip ({reason(error)}): get the file again") from error


def _values(stream: IO[bytes], item: tuple[int, ...], source: str) -> np.ndarray:
    shape = _shape(stream, item, source)
    expected = math.prod(shape)
    content = stream.read(expected + 1)
    if len(content) != expected:
        held = f"only {len(content)}: truncated" if len(content) < expected else "more than that"
        raise GradlabError(f"{source}: its header announces {expected} values, it holds {held}")
    return np.frombuffer(content, np.uint8).reshape(shape)


def _shape(stream: IO[bytes], item: tuple[int, ...], source: str) -> tuple[int, ...]:
    axes = 1 + len(item)
    magic = bytes((0, 0, _UNSIGNED_BYTE, axes))
    start = stream.read(4)
    if start != magic:
        raise GradlabError(
            f"{source}: starts with {start.hex(' ') or 'nothing'}, expected the magic number {magic.hex(' ')} of an "
            f"IDX file of unsigned bytes in {axes} axes"
        )
    lengths = stream.read(4 * axes)
    if len(lengths) < 4 * axes:
        raise GradlabError(f"{source}: ends within its header: truncated")
    shape = struct.unpack(f">{axes}I", lengths)
    if shape[1:] != item or not 1 <= shape[0] <= MAX_IMAGES:
        expected = " x ".join(["(1 to " + str(MAX_IMAGES) + ")", *map(str, item)])
        raise GradlabError(f"{source}: its header announces {' x '.join(map(str, shape))} values, expected {expected}")
    return shape
