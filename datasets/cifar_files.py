"""Recognise a CIFAR-10 file or folder by its content, not its name, and read it without running anything in it."""

from __future__ import annotations

from pathlib import Path

from gradlab.datasets.array_cache import cached
from gradlab.datasets.cifar_archive import read_folder, read_tar
from gradlab.datasets.image_npz import read_npz
from gradlab.datasets.published import CIFAR10, cifar10_files, others, tell
from gradlab.datasets.splits import Splits, checked
from gradlab.errors import GradlabError

IMAGE = (32, 32, 3)  # height, width, colours
_EXPECTED = "an .npz, cifar-10-python.tar.gz, cifar-10-binary.tar.gz, or the folder extracted from either"
_TAR_MAGIC_AT = 257


def read_splits(path: str) -> Splits:
    """Read the images and labels of an .npz, a published archive (gzip or plain tar), or an extracted folder.

    Arrays of an .npz or a gzip archive, which have checksums, are kept unpacked in the user's cache (see
    `array_cache`). As many images as were published, which are not the published ones, are warned of.

    Raises:
        GradlabError: if the path is missing, cannot be read, or does not hold CIFAR-10.
    """
    place = Path(path)
    try:
        splits, differ = _read(place, path)
    except OSError as error:
        raise GradlabError(f"{path}: cannot be read ({error.strerror or error})") from error
    tell(path, differ)
    return splits


def _read(place: Path, path: str) -> tuple[Splits, list[str]]:
    """Read the arrays, and say which of the published files they differ from."""
    if place.is_dir():
        splits = checked(read_folder(place), IMAGE, path)
        return splits, _others(splits)
    if not place.is_file():
        raise GradlabError(f"{path}: {'not a regular file' if place.exists() else 'no such file'}, give {_EXPECTED}")
    with place.open("rb") as stream:
        head = stream.read(_TAR_MAGIC_AT + 5)
    if head.startswith(b"PK"):
        return cached(place, IMAGE, lambda: checked(read_npz(place, IMAGE), IMAGE, path), _others)
    if head.startswith(b"\x1f\x8b"):
        return cached(place, IMAGE, lambda: checked(read_tar(place), IMAGE, path), _others)
    if head[_TAR_MAGIC_AT:] == b"ustar":
        splits = checked(read_tar(place), IMAGE, path)
        return splits, _others(splits)
    raise GradlabError(f"{path}: neither a zip nor a tar file, expected {_EXPECTED}")


def _others(splits: Splits) -> list[str]:
    return others(splits, CIFAR10, cifar10_files(splits), (50_000, 10_000))
