"""Image data sets: CIFAR-10's archives, arrays in an .npz, and IDX files."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import struct
import tarfile
import tempfile
import zipfile
from pathlib import Path

import numpy as np

from campaigns.fuzzed.case import Case, Format, damaged
from gradlab.datasets.cifar_archive import BATCHES
from gradlab.datasets.cifar_files import read_splits
from gradlab.datasets.idx import read_idx
from gradlab.datasets.splits import Splits


def splits() -> Splits:
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (24, 32, 32, 3), dtype=np.uint8)
    labels = draw.integers(0, 10, 24)
    return Splits(images[:20], labels[:20], images[20:], labels[20:])


def digest(found: Splits) -> str:
    parts = [repr((array.shape, array.dtype.str)).encode() + array.tobytes() for array in found]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def read_images(path: Path) -> str:
    """Read images without a cache of earlier cases."""
    os.environ["XDG_CACHE_HOME"] = str(path.parent / "cache")
    return digest(read_splits(str(path)))


def assert_read(name: str, data: bytes, expected: str) -> None:
    """What is not damaged is taken, or a campaign would find nothing."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        assert read_images(path) == expected


def batches(found: Splits) -> dict[str, bytes]:
    """The six pickles of the published form."""
    images, labels = np.concatenate([found.x_train, found.x_test]), np.concatenate([found.y_train, found.y_test])
    planes = np.ascontiguousarray(images.transpose(0, 3, 1, 2)).reshape(len(images), -1)
    return {
        name: pickle.dumps({b"labels": labels[at : at + 4].tolist(), "data": planes[at : at + 4]}, protocol=3)
        for name, at in zip(BATCHES, range(0, 24, 4), strict=True)
    }


def archive(contents: dict[str, bytes]) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as file:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return written.getvalue()


class Cifar10(Format):
    """Archives: damaged as they are, and within, compressed again."""

    file_name = "cifar.tar.gz"

    def __init__(self) -> None:
        self._contents, self._expected = batches(splits()), digest(splits())
        assert_read(self.file_name, gzip.compress(archive(self._contents)), self._expected)

    def case(self, draw: np.random.Generator) -> Case:
        tar = archive(self._contents)
        way = int(draw.integers(4))
        if way < 2:
            kind, data = damaged(gzip.compress(tar, 6), draw)
            return Case(kind, data, False, self._expected, read_images)
        if way == 2:
            kind, tar = damaged(tar, draw)
            return Case(f"{kind}, compressed again", gzip.compress(tar, 1), True, self._expected, read_images)
        name = BATCHES[int(draw.integers(6))]
        kind, content = damaged(self._contents[name], draw)
        data = gzip.compress(archive({**self._contents, name: content}), 1)
        return Case(f"{kind} of a batch, compressed again", data, True, self._expected, read_images)


class Cifar10Arrays(Format):
    """Arrays in a zip: damaged as they are, and headers written anew."""

    file_name = "cifar.npz"

    def __init__(self) -> None:
        self._arrays, self._expected = splits()._asdict(), digest(splits())
        assert_read(self.file_name, self._zipped({}, 1), self._expected)

    def case(self, draw: np.random.Generator) -> Case:
        if draw.random() < 0.6:
            kind, data = damaged(self._zipped({}, int(draw.integers(2))), draw)
            return Case(kind, data, False, self._expected, read_images)
        name = str(draw.choice(list(self._arrays)))
        member = self._member(name)
        kind, changed = damaged(member[:120] + member[120:], draw)
        if draw.random() < 0.5:
            kind, changed = "a header's claim", self._claiming(draw)
        return Case(f"{kind}, zipped again", self._zipped({name: changed}, 1), True, self._expected, read_images)

    def _member(self, name: str) -> bytes:
        stream = io.BytesIO()
        np.save(stream, self._arrays[name])
        return stream.getvalue()

    def _zipped(self, changed: dict[str, bytes], deflated: int) -> bytes:
        written = io.BytesIO()
        with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED) as file:
            for name in self._arrays:
                file.writestr(f"{name}.npy", changed.get(name) or self._member(name))
        return written.getvalue()

    @staticmethod
    def _claiming(draw: np.random.Generator) -> bytes:
        shapes = ["(199999, 32, 32, 3)", "(10**9,)", "()", "(-1, 32, 32, 3)", "(20,)", "(" * 3000, "[" * 900, "None"]
        kinds = ["|u1", "<i8", "|O", "<U9999", "[('a', '|u1')]", "<f8", "?" * 50]
        shape, kind = (str(draw.choice(some)) for some in (shapes, kinds))
        said = f"{{'descr': {kind if kind.startswith('[') else repr(kind)}, 'fortran_order': False, 'shape': {shape}}}"
        header = said.encode() + b"\n"
        return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + draw.bytes(200)


class FashionMnist(Format):
    """One IDX file of images, plain or compressed."""

    file_name = "images-idx3-ubyte"

    def __init__(self) -> None:
        images = np.random.default_rng(0).integers(0, 256, (9, 28, 28), dtype=np.uint8)
        self._data = struct.pack(">4B3I", 0, 0, 8, 3, *images.shape) + images.tobytes()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "a"
            path.write_bytes(self._data)
            self._expected = read_numbers(path)

    def case(self, draw: np.random.Generator) -> Case:
        if draw.random() < 0.6:
            kind, data = damaged(gzip.compress(self._data, 6), draw)
            return Case(kind, data, False, self._expected, read_numbers)
        kind, data = damaged(self._data, draw)  # plain files have no checksum
        data = gzip.compress(data, 1) if draw.random() < 0.5 else data
        return Case(f"{kind}, plain", data, True, self._expected, read_numbers)


def read_numbers(path: Path) -> str:
    found = read_idx(path, (28, 28))
    return hashlib.sha256(repr(found.shape).encode() + found.tobytes()).hexdigest()
