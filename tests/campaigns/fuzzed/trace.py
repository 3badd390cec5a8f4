"""Recordings: any of their files damaged, manifests and HDF5's own structure altered."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from campaigns.fuzzed.case import Case, Format, altered_json, damaged
from campaigns.fuzzed.trace_bombs import bombs
from gradlab.errors import GradlabError
from gradlab.layout import canonical_json
from gradlab.trace import Trace, check
from support.recorded import random_gradients, record

Files = dict[str, bytes]
SEGMENT = "rank-00001/000000.h5"


class TraceFiles(Format):
    """A recording of two ranks, its files packed into a zip of our own, which is never damaged."""

    file_name = "trace.zip"

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace"
            record(path, random_gradients(0, 6, 2)).close()
            self._files = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
            packed = Path(folder) / self.file_name
            packed.write_bytes(pack(self._files))
            self._expected = read(packed)
        self._bombs = list(bombs())

    def case(self, draw: np.random.Generator) -> Case:
        if draw.random() < 0.04:
            kind, make = self._bombs[int(draw.integers(len(self._bombs)))]
            return Case(kind, pack(make()), True, self._expected, read)
        files = dict(self._files)
        way, altered = int(draw.integers(4)), False
        if way == 0:
            kind = self._structure(files, draw)
        elif way == 1:
            name = str(draw.choice(["manifest.json", "rank-00000/index.json"]))
            changed, altered = altered_json(json.loads(files[name]), draw), draw.random() < 0.8
            kind, files[name] = f"{name}, altered", sealed(changed, altered)
        else:
            name = str(draw.choice([*files, SEGMENT, SEGMENT]))
            kind, files[name] = damaged(files[name], draw)
        if draw.random() < 0.05:
            del files[str(draw.choice(list(files)))]
        return Case(kind, pack(files), altered, self._expected, read)

    def _structure(self, files: Files, draw: np.random.Generator) -> str:
        """Alter a segment through HDF5."""
        held = io.BytesIO(files[SEGMENT])
        with h5py.File(held, "r+") as file:
            names: list[str] = []
            file.visit(names.append)
            leaves = [name for name in names if name != "gradients"]
            one, other = (str(name) for name in draw.choice(leaves, 2, replace=False))
            ways: dict[str, Callable[[], object]] = {
                "deleted": lambda: file.__delitem__(one),
                "renamed": lambda: file.move(one, f"{one} x"),
                "a second name": lambda: self._replace(file, other, lambda: file.__setitem__(other, file[one])),
                "a link outside": lambda: self._replace(
                    file, one, lambda: file.__setitem__(one, h5py.ExternalLink("elsewhere.h5", "/x"))
                ),
                "a link to nowhere": lambda: self._replace(
                    file, one, lambda: file.__setitem__(one, h5py.SoftLink("/nowhere"))
                ),
                "text": lambda: self._replace(file, one, lambda: file.create_dataset(one, data=b"abc")),
                "empty": lambda: self._replace(file, one, lambda: file.create_dataset(one, data=np.zeros((0, 3)))),
                "huge and compressed": lambda: self._replace(
                    file,
                    one,
                    lambda: file.create_dataset(
                        one, shape=(2**34,), dtype="f4", chunks=(2**20,), compression="gzip", fillvalue=0
                    ),
                ),
                "compressed": lambda: self._replace(file, one, self._copied(file, one, compression="gzip")),
                "other values": lambda: self._replace(
                    file, one, lambda: file.create_dataset(one, data=draw.standard_normal((6, 72)).astype(np.float32))
                ),
                "a group": lambda: self._replace(file, one, lambda: file.create_group(one)),
                "an attribute": lambda: file[one].attrs.__setitem__("odd", np.arange(int(draw.integers(1, 2000)))),
                "a root attribute": lambda: file.attrs.__setitem__(
                    str(draw.choice([*file.attrs, "odd"])), draw.standard_normal(3)
                ),
            }
            kind = str(draw.choice(list(ways)))
            ways[kind]()
        files[SEGMENT] = held.getvalue()
        return f"HDF5: {kind}"

    @staticmethod
    def _copied(file: h5py.File, name: str, **how: Any) -> Callable[[], object]:
        """The same values, stored in another way."""
        values = file[name][()] if isinstance(file[name], h5py.Dataset) else np.zeros(1)
        return lambda: file.create_dataset(name, data=values, **how)

    @staticmethod
    def _replace(file: h5py.File, name: str, make: Callable[[], object]) -> None:
        if name in file:
            del file[name]
        make()


def sealed(content: Any, again: bool) -> bytes:
    """Write a JSON document, with the right sha256 if it is to be sealed again and can be."""
    if again and isinstance(content, dict):
        content = {key: value for key, value in content.items() if key != "sha256"}
        with contextlib.suppress(ValueError):
            content["sha256"] = hashlib.sha256(canonical_json(content).encode()).hexdigest()
    return json.dumps(content).encode()


def pack(files: Files) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return held.getvalue()


def read(path: Path) -> str:
    """Check a recording, then read all of it; refused if the check finds fault or the reader refuses."""
    folder = path.with_name("trace")
    shutil.rmtree(folder, ignore_errors=True)
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder)
    checked = check(folder)
    digest = hashlib.sha256()
    with Trace(folder) as trace:
        for step in trace.iterate():
            for rank, own in enumerate(step.gradients):
                for name in sorted(own):
                    digest.update(f"{step.index} {rank} {name}".encode())
                    digest.update(np.ascontiguousarray(own[name]).tobytes())
    if checked.problems:
        raise GradlabError(checked.problems[0])
    return digest.hexdigest()
