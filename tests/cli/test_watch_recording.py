"""`gradlab watch TRACE`: a recording in the terminal, while it grows, closed, and killed."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from gradlab.trace import RankProgress
from gradlab.trace.schema import rank_folder
from gradlab.trace.watched import WatchedTrace, rank_cells
from support.command_line import Command
from support.growing_recording import recording
from support.recorded import random_gradients, record
from support.warm_python import python


def test_a_closed_recording_is_shown_whole(tmp_path: Path, gradlab: Command) -> None:
    record(tmp_path / "t", random_gradients(0, 20, 2), metadata={"budget": 2**30}).close()
    code, text, err = gradlab("watch", tmp_path / "t")
    assert (code, err) == (0, "")
    assert "20 steps on each of 2 ranks, closed" in text
    assert "budget: 1.07 GB, 1.07 GB left (100 %)" in text
    seen = json.loads(gradlab("watch", tmp_path / "t", "--json")[1])
    assert (seen["closed"], seen["common_steps"], seen["last_iteration"]) == (True, 20, 19)
    assert [rank["steps"] for rank in seen["ranks"]] == [20, 20]
    size = sum(file.stat().st_size for file in (tmp_path / "t").rglob("*") if file.is_file())
    assert (seen["nbytes"], seen["budget"], seen["problems"]) == (size, 2**30, [])


def test_it_follows_a_recording_to_its_end(tmp_path: Path) -> None:
    with recording(tmp_path / "t") as writer:
        writer.block()
        command = [python(), "-m", "gradlab.cli.main", "watch", tmp_path / "t"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
            writer.block()
            time.sleep(0.5)
            assert watching.poll() is None
            writer.block()
            writer.end()
            text, _ = watching.communicate(timeout=60)
    assert watching.returncode == 0
    assert "48 of at most 10000 steps on each of 2 ranks, closed" in text


def test_a_recording_that_was_left_open_is_shown(tmp_path: Path, gradlab: Command) -> None:
    record(tmp_path / "t", random_gradients(0, 20, 2)).close()
    (tmp_path / "t" / rank_folder(1) / "index.json").unlink()
    code, text, _ = gradlab("watch", tmp_path / "t", "--once")
    assert code == 0
    assert "20 steps on each of 2 ranks, open\n" in text
    assert "after its run was killed, gradlab trace repair closes it" in text
    part = tmp_path / "t" / rank_folder(1) / "000001.h5.part"
    part.write_bytes(b"half a file")
    code, text, _ = gradlab("watch", tmp_path / "t", "--once")
    assert code == 0
    assert f"problems:\n  {part}: " in text


def test_a_folder_that_is_no_trace_is_one_line(tmp_path: Path, gradlab: Command) -> None:
    code, _, err = gradlab("watch", tmp_path, "--once")
    assert (code, err) == (2, f"gradlab: {tmp_path}: not a gradlab trace, there is no manifest.json in it\n")


def test_rates_are_of_what_was_written_between_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    with recording(tmp_path / "t") as writer:
        writer.block()
        monkeypatch.setattr("gradlab.trace.watched.time.monotonic", lambda: float(next(clock)))
        watched = WatchedTrace(tmp_path / "t")  # at second 0
        before = watched.to_json()["nbytes"]
        watched.look()
        writer.block()
        watched.look()
        grown = watched.to_json()["nbytes"] - before
        assert watched.bytes_per_second == grown / 2
        watched.look()
        assert watched.bytes_per_second == grown / 3


def test_of_many_ranks_those_furthest_behind_are_listed() -> None:
    ranks = [RankProgress(rank, 100 - rank, 99 - rank, 0, 10, False) for rank in range(20)]
    for listed, expected in (
        (ranks, [*(str(rank) for rank in range(19, 3, -1)), "and 4 more"]),
        (ranks[:16], [str(rank) for rank in range(16)]),
    ):
        assert [row[0] for row in rank_cells(listed)] == expected
