"""Read images and classes from a NumPy archive with the keys x_train, y_train, x_test, y_test."""

from __future__ import annotations

import lzma
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from gradlab.datasets.splits import MAX_SIDE, Splits, check_header, reason
from gradlab.errors import GradlabError

_DAMAGE = (
    *(zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError),
    *(SyntaxError, MemoryError, tokenize.TokenError),  # of headers, which are Python's literals, of any nesting
)


def read_npz(path: Path, image: tuple[int, ...] | None, target: tuple[int, ...] = ()) -> Splits:
    """Read the four arrays. No object is built (allow_pickle=False), and every header is checked before its data.

    Args:
        path: the archive.
        image: shape of one image. None: (height, width, 3) of any size, with one class for every pixel.
        target: shape of one image's classes, () for one class; with `image` None it is ignored.
    Raises:
        GradlabError: for a missing key, a wrong type or shape, or a damaged file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if image is None:
                image = _image(archive, str(path))
                target = image[:2]
            return Splits(*(_read_array(archive, key, image, str(path), target) for key in Splits._fields))
    except GradlabError:
        raise
    except _DAMAGE as error:
        raise GradlabError(f"{path}: a damaged or truncated .npz ({reason(error)}): get the file again") from error


def _image(archive: zipfile.ZipFile, source: str) -> tuple[int, ...]:
    """Read height, width and colours of the training images from their header."""
    shape, dtype = _member_header(archive, "x_train", source)
    if len(shape) != 4 or shape[3] != 3 or not all(1 <= side <= MAX_SIDE for side in shape[1:3]):
        raise GradlabError(
            f"{source}: x_train is {dtype} of shape {shape}, expected uint8 of shape (samples, height, width, 3) with "
            f"sides of at most {MAX_SIDE}"
        )
    return shape[1:]


def _member_header(archive: zipfile.ZipFile, key: str, source: str) -> tuple[tuple[int, ...], np.dtype]:
    member = f"{key}.npy"
    names = archive.namelist()
    if member not in names:
        there = ", ".join(sorted(name.removesuffix(".npy") for name in names)[:8]) or "nothing"
        raise GradlabError(f"{source}: no array {key}; expected {', '.join(Splits._fields)}, found {there}")
    with archive.open(member) as stream:
        return _header(stream)


def _read_array(
    archive: zipfile.ZipFile, key: str, image: tuple[int, ...], source: str, target: tuple[int, ...]
) -> np.ndarray:
    check_header(key, *_member_header(archive, key, source), image, source, target)
    with archive.open(f"{key}.npy") as stream:
        array = np.lib.format.read_array(stream, allow_pickle=False)
        if stream.read(1):  # at a member's end its checksum is compared
            raise GradlabError(f"{source}: {key} goes on behind the values that its header announces")
    return array


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    elif version == (2, 0):
        shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
    else:
        raise ValueError(f"array format version {version}")
    return shape, dtype
