"""Image data sets: arrays in an .npz."""

from __future__ import annotations

import hashlib
import io
import struct
import tempfile
import zipfile
from pathlib import Path

import numpy as np

from campaigns.fuzzed.case import Case, Format, damaged
from gradlab.datasets.npz import Splits, read_npz


def splits() -> Splits:
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (24, 32, 32, 3), dtype=np.uint8)
    labels = draw.integers(0, 10, 24)
    return Splits(images[:20], labels[:20], images[20:], labels[20:])


def digest(found: Splits) -> str:
    parts = [repr((array.shape, array.dtype.str)).encode() + array.tobytes() for array in found]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def read_images(path: Path) -> str:
    return digest(read_npz(str(path), (32, 32, 3), 10))


def assert_read(name: str, data: bytes, expected: str) -> None:
    """What is not damaged is taken, or a campaign would find nothing."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        assert read_images(path) == expected


class Arrays(Format):
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
