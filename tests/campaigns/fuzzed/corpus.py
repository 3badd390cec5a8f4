"""Corpora: a file damaged as it is, and a manifest and outcomes that were altered, listed again and sealed."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from campaigns.fuzzed.case import Case, Format, altered_json, damaged
from campaigns.fuzzed.trace import pack
from gradlab.analysis.corpus.judgements import outcome_cells
from gradlab.analysis.corpus.manifest import FORMAT, MANIFEST, ROWS, Source, describe, read_corpus
from gradlab.analysis.corpus.manifest import write_manifest as write
from gradlab.analysis.corpus.outcome import Outcome, written
from gradlab.analysis.forecast.endings import EndingRange
from gradlab.trace.schema import read_document, write_document
from support.recorded import random_gradients, record

RANGE = EndingRange(-0.1, 0.0, 0.1, 0.4, 0.6, 5)
ROW = Outcome("small", "top-k", "topk", True, {1: 0.4, 4: 0.5}, 0.5, 4, 0.9, 5.0, 40.0, RANGE, 2.2, 2.0, 9, 1, 0)


def read_packed(path: Path) -> str:
    """Check a corpus, and look at everything in it as `gradlab evaluate` does."""
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder)
        found = read_corpus(Path(folder))
        for one in found.outcomes:
            outcome_cells(one)
        return hashlib.sha256(repr((found.recordings, found.outcomes)).encode()).hexdigest()


class Corpus(Format):
    """A corpus of one recording, its files packed into a zip of our own, which is never damaged."""

    file_name = "corpus.zip"

    def __init__(self) -> None:
        self._work = tempfile.TemporaryDirectory()
        folder = Path(self._work.name) / "corpus"
        record(folder / "small", random_gradients(0, 3, 2)).close()
        (folder / ROWS).write_bytes(written([ROW]))
        source = Source("noise", "none", "numpy")
        numbers = {"steps": 9, "batch_size": 1, "seeds": {"recorded": 0}}
        write(folder, [describe(folder, "small", title="noise", source=source, **numbers)], "none")
        names = (MANIFEST, *sorted(read_corpus(folder).manifest["files"]))
        self._files = {name: (folder / name).read_bytes() for name in names}
        self._folder = folder
        self._expected = self._read(self._files)

    def close(self) -> None:
        self._work.cleanup()

    def _read(self, files: dict[str, bytes]) -> str:
        path = Path(self._work.name) / self.file_name
        path.write_bytes(pack(files))
        return read_packed(path)

    def case(self, draw: np.random.Generator) -> Case:
        kind = str(draw.choice(["bytes", "manifest", "rows"]))
        if kind == "bytes":
            files, name = dict(self._files), str(draw.choice(list(self._files)))
            kind, files[name] = damaged(files[name], draw)
            return Case(kind, pack(files), False, self._expected, read_packed)
        files = self._altered(kind, draw)
        return Case(kind, pack(files), True, self._expected, read_packed)

    def _altered(self, kind: str, draw: np.random.Generator) -> dict[str, bytes]:
        """The files with one of them altered, and a manifest that seals them."""
        with tempfile.TemporaryDirectory() as place:
            folder = Path(shutil.copytree(self._folder, Path(place) / "corpus"))
            body = read_document(folder / MANIFEST, FORMAT)
            del body["format"], body["version"]
            files = dict(self._files)
            if kind == "rows":
                files[ROWS] = json.dumps(altered_json(json.loads(files[ROWS]), draw)).encode()
                body["files"][ROWS] = {"bytes": len(files[ROWS]), "sha256": hashlib.sha256(files[ROWS]).hexdigest()}
            else:
                body = _object(altered_json(body, draw))
            write_document(folder / MANIFEST, FORMAT, body)
            return files | {MANIFEST: (folder / MANIFEST).read_bytes()}


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
