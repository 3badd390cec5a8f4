"""A corpus: a folder with corpus.json, which lists every file of it with its size and sha256.

    corpus.json               this manifest, with a sha256 of its own
    README.md                 what is in the corpus, and how a method is judged by it
    rows.jsonl                what became of methods, see `gradlab.analysis.corpus.outcome`
    <recording>/...           a trace, as `gradlab.trace.schema` describes it

Names of files follow a pattern that leaves no room for another folder, for a link, or for code.
"""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch

from gradlab.analysis.corpus.outcome import Outcome, read_outcomes
from gradlab.errors import GradlabError
from gradlab.files import write_whole
from gradlab.json_form import require_form
from gradlab.jsonable import Jsonable, plain
from gradlab.trace import Trace
from gradlab.trace.schema import read_document, write_document
from gradlab.version import VERSION as GRADLAB

FORMAT = "gradlab-corpus"
MANIFEST, README, ROWS = "corpus.json", "README.md", "rows.jsonl"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_FILE = re.compile(rf"README\.md|rows\.jsonl|{_NAME.pattern}/(manifest\.json|rank-\d{{5}}/(index\.json|\d{{6}}\.h5))")


_RECORDING = {
    **{"name": str, "title": str, "dtype": str, "digest": str, "iterations": [int], "seeds": {str: int}},
    **{"source": {"name": str, "licence": str, "origin": str}, "parameters": int, "world_size": int},
    **{"recorded_steps": int, "steps": int, "batch_size": int},
}


@dataclass(frozen=True)
class Source(Jsonable):
    """The data set that a recording's run was trained on; origin: who made it, or where it is published."""

    name: str
    licence: str
    origin: str


@dataclass(frozen=True)
class Recording(Jsonable):
    """One recording of a corpus.

    title: a few words on the training.
    iterations: first and last recorded iteration.
    steps, batch_size: iterations of the training, and its samples per rank and iteration.
    seeds: seeds of the recorded run, and of the runs that methods were trained in.
    """

    name: str
    title: str
    source: Source
    parameters: int
    world_size: int
    iterations: tuple[int, int]
    recorded_steps: int
    dtype: str
    steps: int
    batch_size: int
    seeds: Mapping[str, int]
    digest: str

    @classmethod
    def from_json(cls, value: Any, where: Path) -> Recording:
        """Read what `to_json` writes; an error names `where`."""
        value = require_form(value, _RECORDING, f"{where}: a recording")
        read = {item.name: value[item.name] for item in fields(cls)}
        if not _NAME.fullmatch(value["name"]):
            raise GradlabError(f"{where}: a recording is called {value['name'][:80]!r}, expected {_NAME.pattern}")
        if len(value["iterations"]) != 2:
            raise GradlabError(f"{where}: recording {value['name']}: expected its first and its last iteration")
        source = Source(**{item.name: value["source"][item.name] for item in fields(Source)})
        return cls(**{**read, "source": source, "iterations": tuple(value["iterations"])})


@dataclass(frozen=True)
class Corpus:
    """A corpus whose files are those that its manifest lists; manifest: all of corpus.json but its sha256."""

    folder: Path
    recordings: tuple[Recording, ...]
    outcomes: tuple[Outcome, ...]
    manifest: Mapping[str, Any]

    def outcomes_of(self, recording: str) -> tuple[Outcome, ...]:
        """Outcomes of methods on one recording."""
        return tuple(one for one in self.outcomes if one.recording == recording)


def is_corpus(path: Path) -> bool:
    """Say whether a path is a corpus's folder."""
    return (path / MANIFEST).is_file()


def check_name(name: Any, where: object) -> str:
    """Return the name of a corpus's file."""
    if not isinstance(name, str) or not (name == MANIFEST or _FILE.fullmatch(name)):
        raise GradlabError(
            f"{where}: holds {str(name)[:80]!r}, which is no file of a corpus: expected {MANIFEST}, {README}, {ROWS} "
            "and recordings"
        )
    return name


def describe(
    folder: Path,
    name: str,
    *,
    title: str,
    source: Source,
    steps: int,
    batch_size: int,
    seeds: Mapping[str, int],
) -> Recording:
    """Describe a recording that lies in a corpus's folder; arguments as in `Recording`."""
    with Trace(folder / name) as trace:
        return Recording(
            name,
            title,
            source,
            parameters=sum(layer.numel for layer in trace.model_layers),
            world_size=trace.world_size,
            iterations=(int(trace.steps[0]), int(trace.steps[-1])),
            recorded_steps=len(trace.steps),
            dtype=trace.dtype,
            steps=steps,
            batch_size=batch_size,
            seeds=dict(seeds),
            digest=trace.digest,
        )


def write_manifest(folder: Path, recordings: Sequence[Recording], command: str, caveats: Sequence[str] = ()) -> None:
    """Write README.md and corpus.json, which list what lies in the folder."""
    write_whole(folder / README, readme(recordings, command, caveats).encode())
    tops = {README, ROWS, *(one.name for one in recordings)}
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    mine = [check_name(name, folder) for name in names if PurePosixPath(name).parts[0] in tops]
    body = {
        "recordings": plain(recordings),
        "files": {name: _described(folder / name) for name in mine},
        "command": command,
        "caveats": list(caveats),
        "versions": {
            "gradlab": GRADLAB,
            "torch": str(torch.__version__),
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }
    write_document(folder / MANIFEST, FORMAT, body)


def _described(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def read_corpus(folder: Path) -> Corpus:
    """Read a corpus, and hold every file against the manifest."""
    where = folder / MANIFEST
    if not where.is_file():
        raise GradlabError(f"{folder}: no corpus, there is no {MANIFEST} in it")
    content = read_document(where, FORMAT)
    _check_files(folder, content.get("files"))
    listed = content.get("recordings")
    if not isinstance(listed, list) or not listed:
        raise GradlabError(f"{where}: recordings = {str(listed)[:80]}, expected a list with at least one")
    recordings = tuple(Recording.from_json(value, where) for value in listed)
    if len({one.name for one in recordings}) < len(recordings):
        raise GradlabError(f"{where}: lists a recording twice")
    for one in recordings:
        _check_recording(folder, one)
    outcomes = read_outcomes(folder / ROWS)
    if strangers := {one.recording for one in outcomes} - {one.name for one in recordings}:
        raise GradlabError(f"{folder / ROWS}: names {min(strangers)[:80]!r}, which is no recording of this corpus")
    return Corpus(folder, recordings, outcomes, content)


def _check_files(folder: Path, files: Any) -> None:
    if not isinstance(files, dict) or ROWS not in files:
        raise GradlabError(f"{folder / MANIFEST}: files = {str(files)[:80]}, expected the corpus's files by name")
    for name, about in files.items():
        path = folder / check_name(name, folder / MANIFEST)
        known = isinstance(about, dict) and type(about.get("bytes")) is int and isinstance(about.get("sha256"), str)
        if not known:
            raise GradlabError(f"{folder / MANIFEST}: {name} is {str(about)[:80]}, expected its bytes and sha256")
        if any(part.is_symlink() for part in (path, *path.parents[: len(PurePosixPath(name).parts) - 1])):
            raise GradlabError(f"{path}: is a link, expected a file of the corpus itself")
        if not path.is_file():
            raise GradlabError(f"{path}: missing, but the corpus's manifest lists it: get the corpus again")
        if path.stat().st_size != about["bytes"] or _described(path) != about:
            raise GradlabError(f"{path}: damaged, it does not match its sha256 in {MANIFEST}: get the corpus again")


def _check_recording(folder: Path, recording: Recording) -> None:
    with Trace(folder / recording.name) as trace:
        if trace.digest != recording.digest:
            raise GradlabError(
                f"{folder / recording.name}: its digest is {trace.digest[:12]}, but the corpus's manifest lists "
                f"{recording.digest[:12]}: another recording lies there"
            )


def readme(recordings: Sequence[Recording], command: str, caveats: Sequence[str] = ()) -> str:
    """Write README.md: what is in the corpus, and how a method is judged by it."""
    lines = [
        "# A corpus of small recordings",
        "",
        "Gradients of small trainings, recorded on all ranks, and what became of methods that were trained there.",
        "A new compressor is judged by it in minutes, on one processor:",
        "",
        "    gradlab evaluate FOLDER topk:density=0.05",
        "    gradlab evaluate FOLDER my_codec.py",
        "",
        "| recording | what was trained | parameters | ranks | iterations | data | licence of the data |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in recordings:
        span = f"{one.iterations[0]} to {one.iterations[1]} of {one.steps}"
        cells = (one.name, one.title, str(one.parameters), str(one.world_size), span, one.source.name)
        lines.append(f"| {' | '.join(cells)} | {one.source.licence} |")
    lines += [
        "",
        "rows.jsonl has a line per method and recording: figures of the replay, what trainings with similar cosines",
        "ended at by gradlab's calibration, and the loss that training with the method ended at beside that of dense",
        "training with the same seed. corpus.json has the sha256 of every file. Nothing here is code.",
        "",
        *(["## What to mind", "", *(f"- {one}" for one in caveats), ""] if caveats else []),
        f"Made by: {command}",
        "",
    ]
    return "\n".join(lines)
