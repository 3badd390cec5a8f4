"""A corpus: its files are those that the manifest lists, packing is reproducible, and nothing leaves the folder."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradlab.analysis.corpus.archive import TOP, pack, unpack
from gradlab.analysis.corpus.manifest import FORMAT, MANIFEST, ROWS, check_name, read_corpus
from gradlab.analysis.corpus.outcome import Outcome, judge, read_outcomes, written
from gradlab.analysis.replay import replay
from gradlab.errors import GradlabError
from gradlab.formatting import parse_bytes
from gradlab.plan import Plan
from gradlab.trace import Trace
from gradlab.trace.schema import read_document, write_document
from support.small_corpus import METHODS, NAME, make_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


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


# --- packing --------------------------------------------------------------------------------------------------------


def test_the_same_files_give_the_same_bytes(corpus: Path, copy: Path, tmp_path: Path) -> None:
    """Whatever their times, owners and permissions."""
    for path in copy.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    one, two = tmp_path / "one.tar.gz", tmp_path / "two.tar.gz"
    told = [pack(corpus, one), pack(copy, two)]
    assert one.read_bytes() == two.read_bytes()
    assert told[0].split()[1:] == told[1].split()[1:]
    with tarfile.open(one) as archive:
        members = archive.getmembers()
    names = [member.name for member in members]
    assert names == [f"{TOP}/{MANIFEST}", *sorted(names[1:])]
    assert all((member.mtime, member.uid, member.gid, member.uname) == (0, 0, 0, "") for member in members)
    assert all(member.isreg() for member in members)


def test_an_unpacked_corpus_is_the_corpus(corpus: Path, tmp_path: Path) -> None:
    pack(corpus, tmp_path / "corpus.tar.gz")
    found = read_corpus(unpack(tmp_path / "corpus.tar.gz", tmp_path / "there"))
    assert found.outcomes == read_corpus(corpus).outcomes
    assert found.manifest == read_corpus(corpus).manifest


def test_what_does_not_shrink_is_not_compressed(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradlab.analysis.corpus.archive._gzipped", lambda data: data + b" ")
    assert pack(corpus, tmp_path / "corpus.tar.gz").startswith(f"{tmp_path / 'corpus.tar'}: ")
    assert read_corpus(unpack(tmp_path / "corpus.tar", tmp_path / "there")).folder == tmp_path / "there" / TOP


def archive_of(path: Path, *members: tuple[str, bytes | tarfile.TarInfo]) -> Path:
    """An archive with these members; a TarInfo in place of a content is a member without one."""
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            info = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.name = name
            if isinstance(content, tarfile.TarInfo):
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return path


def link(kind: bytes, target: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo()
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("/etc/passwd", b"x", "which is no file of a corpus"),
        ("../corpus.json", b"x", "which is no file of a corpus"),
        (f"{TOP}/../../rows.jsonl", b"x", "which is no file of a corpus"),
        (f"{TOP}/digits/rank-00000/../index.json", b"x", "which is no file of a corpus"),
        (f"{TOP}/my_codec.py", b"x", "which is no file of a corpus"),
        (f"{TOP}/digits/sitecustomize.py", b"x", "which is no file of a corpus"),
        (f"{TOP}/rows.jsonl", link(tarfile.SYMTYPE, "/etc/passwd"), "is a link or a device"),
        (f"{TOP}/rows.jsonl", link(tarfile.LNKTYPE, "/etc/passwd"), "is a link or a device"),
        (f"{TOP}/digits", link(tarfile.SYMTYPE, "/tmp"), "is a link or a device"),
        (f"{TOP}/rows.jsonl", link(tarfile.FIFOTYPE, ""), "is a link or a device"),
        (f"{TOP}/rows.jsonl", link(tarfile.CHRTYPE, ""), "is a link or a device"),
    ],
)
def test_members_that_leave_the_folder_are_refused(
    tmp_path: Path, name: str, content: bytes | tarfile.TarInfo, message: str
) -> None:
    archive = archive_of(tmp_path / "corpus.tar", (name, content))
    with pytest.raises(GradlabError, match=message):
        unpack(archive, tmp_path / "there")
    assert sorted(path.name for path in tmp_path.rglob("*") if not path.is_dir()) == ["corpus.tar"]


def test_archives_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twice = archive_of(tmp_path / "twice.tar", (f"{TOP}/{ROWS}", b"a"), (ROWS, b"b"))
    with pytest.raises(GradlabError, match=f"holds '{ROWS}' twice"):
        unpack(twice, tmp_path / "twice")
    (tmp_path / "text.tar.gz").write_text("no archive")
    with pytest.raises(GradlabError, match="a damaged or truncated archive"):
        unpack(tmp_path / "text.tar.gz", tmp_path / "text")
    monkeypatch.setattr("gradlab.analysis.corpus.archive.MOST_BYTES", 2**20)
    bomb = tmp_path / "bomb.tar.gz"
    bomb.write_bytes(gzip.compress(archive_of(tmp_path / "zeros.tar", (ROWS, bytes(2**21))).read_bytes()))
    with pytest.raises(GradlabError, match="unpacks to more than 1048576 bytes"):
        unpack(bomb, tmp_path / "bomb")
    monkeypatch.setattr("gradlab.analysis.corpus.archive.MOST_FILES", 1)
    with pytest.raises(GradlabError, match="more than 1 members"):
        unpack(archive_of(tmp_path / "many.tar", (ROWS, b""), (MANIFEST, b"")), tmp_path / "many")


def test_a_truncated_archive_is_refused_wherever_it_ends(corpus: Path, tmp_path: Path) -> None:
    pack(corpus, tmp_path / "corpus.tar.gz")
    whole = (tmp_path / "corpus.tar.gz").read_bytes()
    for number, end in enumerate((0, 100, len(whole) // 2, len(whole) - 4)):
        (tmp_path / "cut.tar.gz").write_bytes(whole[:end])
        with pytest.raises(GradlabError, match=r"cut\.tar\.gz: a damaged or truncated archive|no corpus, there is no"):
            read_corpus(unpack(tmp_path / "cut.tar.gz", tmp_path / str(number)))


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
