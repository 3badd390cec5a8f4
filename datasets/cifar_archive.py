"""CIFAR-10 as published: five training batches and a test batch, in a tar archive or an extracted folder.

https://www.cs.toronto.edu/~kriz/cifar.html describes both forms. Binary: records of one label byte and 3072 pixel
bytes. Python: a pickle, whose opcodes `cifar_pickle` reads. Archives are read in memory, never extracted.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import numpy as np

from gradlab.datasets.cifar_pickle import read_batch
from gradlab.datasets.splits import CLASSES, Splits
from gradlab.errors import GradlabError
from gradlab.tar_archive import open_tar

BATCHES = (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")
PIXELS = 3072  # 3 colour planes of 32 x 32
MAX_BATCH_BYTES = 64 << 20  # a published batch has 31 MB
MAX_TAR_BYTES = 512 << 20  # unpacked; the published archives have 186 MB

Batch = tuple[np.ndarray, np.ndarray]  # pixels (samples, 3072) as bytes, labels (samples,)


def read_folder(folder: Path) -> Splits:
    """Read the batches of an extracted folder (cifar-10-batches-py or cifar-10-batches-bin).

    Raises:
        GradlabError: for a missing, oversized or malformed batch.
    """
    contents = {}
    for name in _members():
        file = folder / name
        if not file.is_file():
            continue
        with file.open("rb") as stream:
            contents[name] = stream.read(MAX_BATCH_BYTES + 1)
        _refuse_oversize(len(contents[name]), str(file))
    return _splits(contents, str(folder))


def read_tar(path: Path) -> Splits:
    """Read the batches of a published archive, gzip-compressed or plain, in one pass over its members.

    Raises:
        GradlabError: for a damaged archive, a missing, oversized, repeated or malformed batch.
    """
    with open_tar(path, MAX_TAR_BYTES, "a CIFAR-10 archive") as archive:
        contents = _tar_members(archive, str(path))
    return _splits(contents, str(path))


def _members() -> list[str]:
    return [name + ending for name in BATCHES for ending in ("", ".bin")]


def _tar_members(archive: tarfile.TarFile, source: str) -> dict[str, bytes]:
    contents: dict[str, bytes] = {}
    wanted = set(_members())
    for member in archive:
        name = PurePosixPath(member.name).name
        if name not in wanted or not member.isreg():
            continue
        if name in contents:
            raise GradlabError(f"{source}: holds {name} twice, not a CIFAR-10 archive")
        _refuse_oversize(member.size, f"{source}: {name}")
        stream = archive.extractfile(member)
        contents[name] = stream.read() if stream else b""
    return contents


def _refuse_oversize(size: int, what: str) -> None:
    if size > MAX_BATCH_BYTES:
        raise GradlabError(f"{what}: more than {MAX_BATCH_BYTES} bytes, a CIFAR-10 batch has about 31 million")


def _splits(contents: dict[str, bytes], source: str) -> Splits:
    if not contents:
        raise GradlabError(f"{source}: holds no CIFAR-10 batches: expected {', '.join(BATCHES)}, or the same in .bin")
    ending = "" if any(name in contents for name in BATCHES) else ".bin"
    missing = [name + ending for name in BATCHES if name + ending not in contents]
    if missing:
        raise GradlabError(f"{source}: no {', '.join(missing)}; expected the six batches of CIFAR-10")
    decode: Callable[[bytes, str], Batch] = binary_batch if ending else read_batch
    batches = [decode(contents.pop(name + ending), f"{source}: {name}{ending}") for name in BATCHES]
    x_train = np.concatenate([_images(pixels) for pixels, _ in batches[:-1]])
    y_train = np.concatenate([labels for _, labels in batches[:-1]])
    return Splits(x_train, y_train, _images(batches[-1][0]), batches[-1][1])


def _images(pixels: np.ndarray) -> np.ndarray:
    """Turn colour planes (samples, 3072) into images (samples, 32, 32, 3)."""
    return np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def binary_batch(content: bytes, source: str) -> Batch:
    """Read records of 1 + 3072 bytes: uint8 pixels (samples, 3072) and int64 labels (samples,).

    Raises:
        GradlabError: if the size is not a positive multiple of 3073 bytes, or a label exceeds 9.
    """
    if not content or len(content) % (1 + PIXELS):
        raise GradlabError(f"{source}: {len(content)} bytes, expected records of {1 + PIXELS}: truncated?")
    records = np.frombuffer(content, np.uint8).reshape(-1, 1 + PIXELS)
    labels = records[:, 0].astype(np.int64)
    if labels.max() >= CLASSES:
        raise GradlabError(f"{source}: label {labels.max()}, expected 0 to {CLASSES - 1}")
    return records[:, 1:], labels
