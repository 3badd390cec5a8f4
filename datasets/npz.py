"""Read image data sets from NumPy archives with the arrays x_train, y_train, x_test and y_test.

No object is built (allow_pickle=False). Every header is checked before its data take memory.
"""

from __future__ import annotations

import lzma
import math
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gradlab.errors import GradlabError

EXPECTED = "an .npz with x_train, y_train, x_test, y_test"
MAX_SAMPLES = 200_000  # of one split
SIDES = (16, 2048)  # pixels, least and most, where the file determines the size of an image
MAX_VALUES = 2**30  # of one array
_DAMAGE = (
    *(zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError),
    *(SyntaxError, MemoryError, tokenize.TokenError),  # of headers, which are Python's literals, of any nesting
)

Header = tuple[tuple[int, ...], np.dtype]  # shape and type of an array


class Splits(NamedTuple):
    """Images and classes to train and to test on, as they lie in the file.

    x_train, x_test: uint8 (samples, height, width[, 3]).
    y_train, y_test: int64, one class per image (samples,), or per pixel (samples, height, width).
    """

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def read_npz(path: str, image: tuple[int | None, ...], classes: int, *, per_pixel: bool = False) -> Splits:
    """Read the four arrays and check that they fit each other, with labels from 0 to classes - 1.

    image: shape of one image; None for a side that the file determines.
    """
    try:
        place = Path(path)
        if not place.is_file():
            what = "not a regular file" if place.exists() else "no such file"
            raise GradlabError(f"{path}: {what}, expected {EXPECTED}")
        with zipfile.ZipFile(place) as archive:
            splits = _read(archive, path, image, per_pixel)
    except GradlabError:
        raise
    except OSError as error:
        raise GradlabError(f"{path}: cannot be read ({error.strerror or error})") from error
    except _DAMAGE as error:
        # Libraries' messages can have many lines and quote the file.
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise GradlabError(f"{path}: not a whole .npz ({reason}), expected {EXPECTED}") from error
    _check_labels(splits, classes, path)
    return splits


def _read(archive: zipfile.ZipFile, source: str, image: tuple[int | None, ...], per_pixel: bool) -> Splits:
    missing = [key for key in Splits._fields if f"{key}.npy" not in archive.namelist()]
    if missing:
        there = ", ".join(sorted(name.removesuffix(".npy") for name in archive.namelist())[:8]) or "nothing"
        raise GradlabError(f"{source}: no array {missing[0]}; expected {EXPECTED}, found {there}")
    headers = {key: _header(archive, key) for key in Splits._fields}
    _check_header("x_train", headers["x_train"], image, source)
    sides = headers["x_train"][0][1:]
    for key, header in headers.items():
        _check_header(key, header, sides if key.startswith("x") else sides[:2] if per_pixel else (), source)
    return Splits(*(_values(archive, key, source) for key in Splits._fields))


def _header(archive: zipfile.ZipFile, key: str) -> Header:
    with archive.open(f"{key}.npy") as stream:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"array format version {version}")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
    return shape, dtype


def _check_header(key: str, header: Header, sides: tuple[int | None, ...], source: str) -> None:
    """Refuse an array by its shape and type alone."""
    (shape, dtype), images = header, key.startswith("x")
    least, most = SIDES
    fits = len(shape) == 1 + len(sides) and all(
        least <= size <= most if side is None else size == side for size, side in zip(shape[1:], sides, strict=True)
    )
    if not fits or dtype.hasobject or not (dtype == np.uint8 if images else dtype.kind in "iu"):
        expected = ", ".join(["samples", *(f"{least} to {most}" if side is None else str(side) for side in sides)])
        kind = "uint8" if images else "integers"
        raise GradlabError(f"{source}: {key} is {dtype} of shape {shape}, expected {kind} of shape ({expected})")
    if not 1 <= shape[0] <= MAX_SAMPLES:
        raise GradlabError(f"{source}: {key} holds {shape[0]} samples, expected 1 to {MAX_SAMPLES}")
    if math.prod(shape) > MAX_VALUES:
        raise GradlabError(f"{source}: {key} of shape {shape} holds {math.prod(shape)} values, at most {MAX_VALUES}")


def _values(archive: zipfile.ZipFile, key: str, source: str) -> np.ndarray:
    with archive.open(f"{key}.npy") as stream:
        array = np.lib.format.read_array(stream, allow_pickle=False)
        if stream.read(1):  # at a member's end its checksum is compared
            raise GradlabError(f"{source}: {key} goes on behind the values that its header announces")
    return array if key.startswith("x") else array.astype(np.int64, copy=False)


def _check_labels(splits: Splits, classes: int, source: str) -> None:
    for split in ("train", "test"):
        images, labels = getattr(splits, f"x_{split}"), getattr(splits, f"y_{split}")
        if len(images) != len(labels):
            raise GradlabError(f"{source}: {len(images)} {split} images but {len(labels)} labels")
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= classes:
            raise GradlabError(f"{source}: y_{split} runs from {low} to {high}, expected 0 to {classes - 1}")
