"""A recording that is looked at while it grows: what is seen of it, and that its writer does not notice."""

from __future__ import annotations

import doctest
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from gradlab.capture import TraceWriter, repair
from gradlab.capture.writing.folder import lock_rank, unlock_rank
from gradlab.errors import GradlabError
from gradlab.trace import GrowingTrace, Trace, check, growing
from gradlab.trace.schema import LOCK, MANIFEST, rank_folder, segment_name
from jobs.recording_in_blocks import BLOCK, BUDGET
from support.growing_recording import recording
from support.recorded import LAYERS, random_gradients, record


def test_every_committed_step_is_seen_and_nothing_else(tmp_path: Path) -> None:
    with recording(tmp_path / "t") as writer:
        assert writer.block() == BLOCK
        trace = GrowingTrace(tmp_path / "t")
        for blocks in range(1, 6):  # over ends of segments, which change their names there
            seen = trace.look()
            steps = blocks * BLOCK
            assert (seen.closed, seen.common_steps, seen.problems) == (False, steps, ())
            assert [(rank.steps, rank.last_iteration, rank.steps_lost) for rank in seen.ranks] == [
                (steps, steps - 1, 0)
            ] * 2
            assert seen.last_iteration == steps - 1
            assert (seen.budget, seen.most_steps) == (BUDGET, 10_000)
            on_disk = sum(file.stat().st_size for file in (tmp_path / "t").rglob("*") if file.is_file())
            assert seen.nbytes == on_disk
            writer.block()
        writer.end()
    done = trace.look()
    assert (done.closed, done.common_steps) == (True, 6 * BLOCK)
    assert check(tmp_path / "t").ok


def test_its_writer_does_not_notice(tmp_path: Path) -> None:
    """Looked at without a pause, a recording has every value of one that nobody looked at, and steps only grow."""
    with recording(tmp_path / "alone") as writer:
        for _ in range(4):
            writer.block()
        writer.end()
    problems, steps, ended = [], [0], threading.Event()

    def look_on() -> None:
        trace = GrowingTrace(tmp_path / "seen")
        while not ended.is_set():
            seen = trace.look()
            steps.append(min((rank.steps for rank in seen.ranks), default=0))
            problems.extend(seen.problems)

    with recording(tmp_path / "seen") as writer:
        writer.block()
        looking = threading.Thread(target=look_on)
        looking.start()
        for _ in range(3):
            writer.block()
        writer.end()
        ended.set()
        looking.join()
    assert (problems, steps) == ([], sorted(steps))
    assert len(steps) > 3
    assert check(tmp_path / "seen").ok
    with Trace(tmp_path / "alone") as alone, Trace(tmp_path / "seen") as seen:
        assert np.array_equal(alone.steps, seen.steps)
        for layer in LAYERS:
            for rank in range(2):
                assert np.array_equal(alone.read(layer.name, rank), seen.read(layer.name, rank))


def test_a_killed_recording_is_seen_to_its_last_committed_step(tmp_path: Path) -> None:
    with recording(tmp_path / "t") as writer:
        steps = [writer.block() for _ in range(3)][-1]
        writer.kill()
        trace = GrowingTrace(tmp_path / "t")
        seen = trace.look()
    assert (seen.closed, seen.common_steps, seen.problems) == (False, steps, ())
    repair(tmp_path / "t")
    seen = trace.look()
    assert (seen.closed, seen.common_steps, seen.problems) == (True, steps, ())


def test_looking_takes_no_lock(tmp_path: Path) -> None:
    """A recorder that starts in the middle of a look gets its lock."""
    record(tmp_path / "t", random_gradients(0, 20, 2)).close()
    (tmp_path / "t" / rank_folder(0) / LOCK).touch()
    ended = threading.Event()

    def look_on() -> None:
        trace = GrowingTrace(tmp_path / "t")
        while not ended.is_set():
            trace.look()

    looking = threading.Thread(target=look_on)
    looking.start()
    try:
        for _ in range(500):
            unlock_rank(tmp_path / "t", 0, lock_rank(tmp_path / "t", 0))
    finally:
        ended.set()
        looking.join()


def test_a_half_written_segment_is_no_problem_until_it_stays_so(tmp_path: Path) -> None:
    record(tmp_path / "t", random_gradients(0, 20, 1)).close()
    folder = tmp_path / "t" / rank_folder(0)
    (folder / "index.json").unlink()
    closed, part = folder / segment_name(0), folder / f"{segment_name(0)}.part"
    whole = closed.read_bytes()
    closed.unlink()
    unreadable = 0
    for left in range(0, len(whole), len(whole) // 7):
        part.write_bytes(whole[:left])
        trace = GrowingTrace(tmp_path / "t")
        first = trace.look()
        assert first.problems == ()
        assert first.ranks[0].steps == (0 if trace.unsettled else 20)  # what a step has beside gradients may be whole
        if trace.unsettled:
            unreadable += 1
            [problem] = trace.look().problems
            assert str(part) in problem
            assert not trace.unsettled
        part.write_bytes(whole)
        sound = trace.look()
        assert (sound.problems, sound.ranks[0].steps) == ((), 20)
    assert unreadable > 3


def test_what_is_wrong_with_a_rank_is_told_and_the_others_are_seen(tmp_path: Path) -> None:
    record(tmp_path / "t", random_gradients(0, 20, 3)).close()
    shutil.rmtree(tmp_path / "t" / rank_folder(2))
    (tmp_path / "t" / rank_folder(1) / "index.json").write_text("{")
    seen = GrowingTrace(tmp_path / "t").look()
    assert [rank.steps for rank in seen.ranks] == [20, 20]
    assert (seen.common_steps, seen.closed) == (0, False)
    [problem] = seen.problems
    assert f"{rank_folder(1)}/index.json is not JSON" in problem
    (tmp_path / "t" / rank_folder(1) / "index.json").unlink()
    (tmp_path / "t" / rank_folder(1)).rename(tmp_path / "elsewhere")
    (tmp_path / "t" / rank_folder(1)).write_text("a file in its place")
    (tmp_path / "t" / "rank-99999").mkdir()  # of no rank of the manifest
    assert [rank.steps for rank in GrowingTrace(tmp_path / "t").look().ranks] == [20, 0]


def test_a_rank_that_dropped_steps_has_lost_them(tmp_path: Path) -> None:
    gradients = random_gradients(0, 1, 1)[0][0]
    with TraceWriter(tmp_path / "t", LAYERS, 3) as writer:
        for step in range(32):
            writer.append(0, step, gradients)
            if step % 4:
                writer.append(1, step, gradients)
            if step < 16:
                writer.append(2, step, gradients)  # it is behind, which is no loss
    for rank in range(3):
        (tmp_path / "t" / rank_folder(rank) / "index.json").unlink()
    seen = GrowingTrace(tmp_path / "t").look()
    assert [rank.steps for rank in seen.ranks] == [32, 24, 16]
    assert [rank.steps_lost for rank in seen.ranks] == [0, 8, 0]
    assert seen.common_steps == 12


def test_another_recording_in_its_place_is_another_one(tmp_path: Path) -> None:
    record(tmp_path / "t", random_gradients(0, 20, 2)).close()
    trace = GrowingTrace(tmp_path / "t")
    assert trace.look().common_steps == 20
    shutil.rmtree(tmp_path / "t")
    with pytest.raises(GradlabError, match="no such folder"):
        trace.look()
    record(tmp_path / "t", random_gradients(1, 5, 3)).close()
    seen = trace.look()
    assert (seen.common_steps, len(seen.ranks), seen.problems) == (5, 3, ())


def test_a_folder_without_a_rank_has_not_begun(tmp_path: Path) -> None:
    record(tmp_path / "t", random_gradients(0, 4, 2)).close()
    for rank in range(2):
        shutil.rmtree(tmp_path / "t" / rank_folder(rank))
    seen = GrowingTrace(tmp_path / "t").look()
    assert (seen.closed, seen.ranks, seen.common_steps, seen.last_iteration) == (False, (), 0, None)
    (tmp_path / "t" / MANIFEST).unlink()
    with pytest.raises(GradlabError, match="not a gradlab trace"):
        GrowingTrace(tmp_path / "t")


def test_examples_in_docstrings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "trace", random_gradients(0, 3, 2)).close()
    monkeypatch.chdir(tmp_path)
    assert doctest.testmod(growing, extraglobs={"np": np, "Trace": Trace}).failed == 0
