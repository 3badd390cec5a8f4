"""Images and classes from a NumPy archive with the keys x_train, y_train, x_test, y_test."""

from __future__ import annotations

import lzma
import zipfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from gradlab.datasets.splits import Splits, check_header, reason
from gradlab.errors import GradlabError

_DAMAGE = (zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError)


def read_npz(path: Path, image: tuple[int, ...]) -> Splits:
    """Read the four arrays, of images of the shape `image`.

    No object is ever built (allow_pickle=False), no header is believed before its check.

    Raises:
        GradlabError: for a missing key, a wrong type or shape, or a damaged file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return Splits(*(_read_array(archive, key, image, str(path)) for key in Splits._fields))
    except GradlabError:
        raise
    except _DAMAGE as error:
        raise GradlabError(f"{path}: a damaged or truncated .npz ({reason(error)}): get the file again") from error


def _read_array(archive: zipfile.ZipFile, key: str, image: tuple[int, ...], source: str) -> np.ndarray:
    member = f"{key}.npy"
    names = archive.namelist()
    if member not in names:
        found = ", ".join(sorted(name.removesuffix(".npy") for name in names)[:8]) or "nothing"
        raise GradlabError(f"{source}: no array {key}; expected {', '.join(Splits._fields)}, found {found}")
    with archive.open(member) as stream:
        shape, dtype = _header(stream)
    check_header(key, shape, dtype, image, source)
    with archive.open(member) as stream:
        return np.lib.format.read_array(stream, allow_pickle=False)


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    elif version == (2, 0):
        shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
    else:
        raise ValueError(f"array format version {version}")
    return shape, dtype
