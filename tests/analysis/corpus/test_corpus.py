"""A corpus: its files are those that the manifest lists, and the same recordings and outcomes give the same bytes."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradlab.analysis.corpus.manifest import FORMAT, MANIFEST, README, ROWS, check_name, read_corpus, write_manifest
from gradlab.analysis.corpus.outcome import Outcome, judge, read_outcomes, written
from gradlab.analysis.replay import replay
from gradlab.errors import GradlabError
from gradlab.formatting import parse_bytes
from gradlab.plan import Plan
from gradlab.trace import Trace
from gradlab.trace.schema import read_document, write_document
from support.small_corpus import METHODS, NAME


@pytest.fixture
def copy(corpus: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(corpus, tmp_path / "corpus"))


def test_a_corpus_holds_what_was_predicted_beside_what_was_observed(corpus: Path) -> None:
    found = read_corpus(corpus)
    (recording,) = found.recordings
    assert (recording.name, recording.world_size, recording.recorded_steps) == (NAME, 2, 8)
    assert recording.iterations == (8, 15)
    assert recording.dtype == "bfloat16"
    another, *methods = found.outcomes_of(NAME)
    assert [one.method for one in methods] == list(METHODS)
    assert another.cosine is None
    assert another.loss != another.dense_loss
    assert len({one.dense_loss for one in found.outcomes}) == 1
    by_method = {one.method: one for one in methods}
    half = by_method["16-bit floats"]
    assert abs(half.excess) < 0.01
    assert half.cosine is not None
    assert half.cosine > 0.9999
    assert half.saving.ratio_to_16_bits == pytest.approx(1, abs=0.02)
    assert by_method["top-k 1 %"].memory
    assert by_method["top-k 1 %"].payload_bytes < by_method["top-k 10 %"].payload_bytes / 4


def test_a_replay_of_a_rows_words_is_the_row(corpus: Path) -> None:
    """Whoever evaluates a method of the corpus again gets the figures that the corpus has of it."""
    found = read_corpus(corpus)
    with Trace(corpus / NAME) as trace:
        again = judge(replay(trace, Plan.uniform(trace.model_layers, "topk", density=0.1)), found.outcomes)
    [row] = [one for one in found.outcomes if one.method == "top-k 10 %"]
    assert (again.cosine, again.length, again.payload_bytes) == (row.cosine, row.length, row.payload_bytes)
    assert again.predicted == row.predicted
    assert (str(again.by_cosine), str(again.by_bytes)) == ("1 of 3", "3 of 5")


def test_a_recording_is_within_its_budget(corpus: Path) -> None:
    files = [path for path in (corpus / NAME).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= parse_bytes("4MB")


def test_outcomes_are_read_as_they_were_written(tmp_path: Path, corpus: Path) -> None:
    outcomes = [*read_corpus(corpus).outcomes]
    diverged = [Outcome(**{**vars(outcomes[1]), "loss": None})]
    assert math.isinf(diverged[0].excess)
    (tmp_path / ROWS).write_bytes(written([*outcomes, *diverged]))
    assert list(read_outcomes(tmp_path / ROWS)) == [*outcomes, *diverged]


# --- files ----------------------------------------------------------------------------------------------------------


def test_the_same_files_give_the_same_bytes(corpus: Path, copy: Path) -> None:
    """Whatever their times, owners and permissions."""
    for path in copy.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    found = read_corpus(copy)
    for name in (README, MANIFEST, ROWS):
        (copy / name).unlink()
    (copy / ROWS).write_bytes(written(found.outcomes))
    write_manifest(copy, found.recordings, found.manifest["command"], found.manifest["caveats"])
    for name in (README, MANIFEST, ROWS):
        assert (copy / name).read_bytes() == (corpus / name).read_bytes()


@pytest.mark.parametrize("name", ["..", "", "a\\b", "digits/../rows.jsonl", "digits/rank-00000/000000.h5\n", None, 3])
def test_names_of_files_leave_no_room(name: Any) -> None:
    with pytest.raises(GradlabError, match="which is no file of a corpus"):
        check_name(name, "here")


# --- damage ---------------------------------------------------------------------------------------------------------


def altered(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """A change of the manifest that is sealed again, as somebody would who means harm."""

    def hurt(folder: Path) -> None:
        body = read_document(folder / MANIFEST, FORMAT)
        change(body)
        del body["format"], body["version"]
        write_document(folder / MANIFEST, FORMAT, body)

    return hurt


def rewritten(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """A change of the first outcome, with a manifest that lists it."""

    def hurt(folder: Path) -> None:
        first, *others = (folder / ROWS).read_text().splitlines()
        value = json.loads(first)
        change(value)
        (folder / ROWS).write_text("\n".join([json.dumps(value), *others]))
        _list_again(folder)

    return hurt


def _list_again(folder: Path) -> None:
    content = (folder / ROWS).read_bytes()
    about = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    altered(lambda body: body["files"].update({ROWS: about}))(folder)


def _linked(folder: Path) -> None:
    path = folder / NAME / "manifest.json"
    path.rename(folder.parent / "elsewhere.json")
    path.symlink_to(folder.parent / "elsewhere.json")


def _flipped(folder: Path) -> None:
    path = folder / NAME / "rank-00001" / "000000.h5"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "there is no corpus.json": lambda folder: (folder / MANIFEST).unlink(),
    "is not JSON": lambda folder: (folder / MANIFEST).write_text("{"),
    "expected a 'gradlab-corpus' document": lambda folder: (folder / MANIFEST).write_text("{}"),
    "does not match its sha256$": lambda folder: (folder / MANIFEST).write_text(
        (folder / MANIFEST).read_text().replace("ResNet-10", "ResNet-11")
    ),
    "000000.h5: damaged, it does not match its sha256 in corpus.json": _flipped,
    "rows.jsonl: missing": lambda folder: (folder / ROWS).unlink(),
    "manifest.json: is a link": _linked,
    "'../rows.jsonl', which is no file of a corpus": altered(lambda body: body["files"].update({"../rows.jsonl": {}})),
    "'/etc/passwd', which is no file of a corpus": altered(lambda body: body["files"].update({"/etc/passwd": {}})),
    "expected its bytes and sha256": altered(lambda body: body["files"].update({ROWS: {"bytes": "3"}})),
    "expected the corpus's files by name": altered(lambda body: body.update(files=[])),
    "expected a list with at least one": altered(lambda body: body.update(recordings=[])),
    "lists a recording twice": altered(lambda body: body.update(recordings=body["recordings"] * 2)),
    "a recording is called '../digits'": altered(lambda body: body["recordings"][0].update(name="../digits")),
    "a recording: world_size is '2', expected a whole number": altered(
        lambda body: body["recordings"][0].update(world_size="2")
    ),
    "another recording lies there": altered(lambda body: body["recordings"][0].update(digest="0" * 64)),
    "names 'other', which is no recording": rewritten(lambda row: row.update(recording="other")),
    "line 1: cosines, bytes or dense_loss": rewritten(lambda row: row.update(cosines={"x": 1})),
    "line 1: cosines, bytes or dense_loss are": rewritten(lambda row: row.update(dense_loss=0)),
    "line 1: memory is 1, expected true or false": rewritten(lambda row: row.update(memory=1)),
    "line 1: predicted is ": rewritten(lambda row: row.update(predicted={})),
}


@pytest.mark.parametrize("message", list(DAMAGE))
def test_damage_is_one_line_that_names_the_file(copy: Path, message: str) -> None:
    DAMAGE[message](copy)
    with pytest.raises(GradlabError, match=message) as refusal:
        read_corpus(copy)
    assert "\n" not in str(refusal.value)
    assert str(copy) in str(refusal.value)


def test_a_newer_corpus_says_upgrade(copy: Path) -> None:
    text = (copy / MANIFEST).read_text()
    (copy / MANIFEST).write_text(text.replace('"version": 1', '"version": 2'))
    with pytest.raises(GradlabError, match=r"written by a newer gradlab \(version 2, this one reads 1\): upgrade"):
        read_corpus(copy)
