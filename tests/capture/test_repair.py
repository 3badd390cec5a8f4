"""Traces that a killed run left open: what `check` and `repair` find and keep, as functions and as commands."""

import importlib
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from gradlab.capture import TraceWriter, repair
from gradlab.capture.writing.buffers import BufferPool
from gradlab.capture.writing.folder import lock_rank, start_folder, unlock_rank
from gradlab.capture.writing.rank_writer import RankWriter
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.trace import Trace, check
from gradlab.trace.schema import Manifest, RankIndex, read_index, write_index
from support.command_line import Command
from support.torchrun_job import torchrun
from support.warm_python import python


@pytest.fixture
def command(gradlab: Command) -> Command:
    """Run `gradlab trace ...`."""
    return lambda *words: gradlab("trace", *words)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A trace whose ranks were killed with SIGKILL while recording, and what each had acknowledged by then."""
    folder = tmp_path_factory.mktemp("killed")
    files = [folder / f"progress-{rank}" for rank in range(2)]
    with torchrun("capture_killed.py", 2, folder) as process:
        deadline = time.monotonic() + 120
        while not all(_acknowledged(file) >= 40 for file in files):
            assert process.poll() is None, process.communicate()[0][-4000:]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for file in files:
            os.kill(int(file.read_text().split("\n")[0]), signal.SIGKILL)
        process.communicate(timeout=60)
        assert process.returncode != 0
    return folder / "trace", [_acknowledged(file) for file in files]


def _acknowledged(file: Path) -> int:
    lines = file.read_text(encoding="utf-8").split("\n")[1:-1] if file.exists() else []
    return int(lines[-1]) if lines else 0


@pytest.fixture
def killed_trace(killed: tuple[Path, list[int]], tmp_path: Path) -> tuple[Path, list[int]]:
    shutil.copytree(killed[0], tmp_path / "trace")
    return tmp_path / "trace", killed[1]


def test_check_reads_what_a_killed_run_acknowledged(killed_trace: tuple[Path, list[int]]) -> None:
    path, acknowledged = killed_trace
    report = check(path)
    assert report.problems == ()
    assert [rank.closed for rank in report.ranks] == [False, False]
    assert all(rank.steps >= steps for rank, steps in zip(report.ranks, acknowledged, strict=True))
    assert report.common_steps == min(rank.steps for rank in report.ranks)


def test_a_killed_trace_names_the_command_that_repairs_it(killed_trace: tuple[Path, list[int]]) -> None:
    with pytest.raises(GradlabError, match=r"not closed \(rank 0, 1\); run `gradlab trace repair "):
        Trace(killed_trace[0])


def test_repair_closes_a_killed_trace_and_loses_nothing(killed_trace: tuple[Path, list[int]]) -> None:
    path, _ = killed_trace
    before = check(path)
    first = repair(path)
    assert [rank.steps for rank in first] == [rank.steps for rank in before.ranks]
    assert all(rank.changed and not rank.problems for rank in first)
    assert check(path).ok
    files = {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.is_file()}
    assert not [file for file in files if file.suffix not in (".h5", ".json")]
    again = repair(path)
    assert [(rank.steps, rank.changed) for rank in again] == [(rank.steps, False) for rank in first]
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.is_file()} == files
    with Trace(path) as trace:
        assert trace.rank_steps == tuple(rank.steps for rank in first)
        assert np.isfinite(trace.mean("last.weight")).all()


LAYERS = [Layer("a.weight", (30, 20), "linear"), Layer("a.bias", (30,), "bias")]


def left_open(folder: Path, *steps: int) -> list[np.ndarray]:
    """A trace whose writers stopped without closing, one per number of steps (of a single number: two ranks).

    Returns:
        the rows of a.weight, the same on all ranks.
    """
    generator = np.random.default_rng(0)
    rows = [generator.standard_normal(600).astype(np.float32) for _ in range(max(steps))]
    by_rank = steps if len(steps) > 1 else steps * 2
    manifest = Manifest(len(by_rank), tuple(LAYERS))
    start_folder(folder, manifest, overwrite=False)
    for rank, held in enumerate(by_rank):
        writer = RankWriter(folder, manifest, rank, segment_bytes=1)
        pool = BufferPool(LAYERS, "float32", writer.rows, held)
        for index, row in enumerate(rows[:held]):
            step = pool.acquire(lambda: False)
            assert step is not None
            step.record["index"] = index
            for position, layer in enumerate(LAYERS):
                step.put(position, torch.from_numpy(row[: layer.numel]).view(layer.shape))
            pool.keep(step)
            writer.append(step)
        writer.flush()
        writer.abandon()
    return rows


@pytest.mark.parametrize("left", [0, 2000, 10000])
def test_repair_goes_on_after_a_file_that_cannot_be_opened(tmp_path: Path, left: int) -> None:
    """Opened as one that may be growing: HDF5 would look again and again for what is cut off."""
    left_open(tmp_path / "t", 20)
    part = tmp_path / "t" / "rank-00000" / "000001.h5.part"
    part.write_bytes(part.read_bytes()[:left])
    rows = repair(tmp_path / "t")
    assert [row.steps for row in rows] == [16, 20]
    assert len(rows[0].problems) == 1
    assert "kept as 000001.h5.damaged" in rows[0].problems[0]
    assert (tmp_path / "t" / "rank-00000" / "000001.h5.damaged").exists()
    assert rows[1].problems == ()
    with Trace(tmp_path / "t") as trace:
        assert trace.rank_steps == (16, 20)


@pytest.mark.parametrize(("damaged", "block"), [([16], 16), ([18], 16), ([19], 16), ([16, 19], 2)])
def test_repair_keeps_the_steps_around_damaged_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: list[int], block: int
) -> None:
    monkeypatch.setattr(
        importlib.import_module("gradlab.capture.repair"), "block_steps", lambda row_bytes, most: min(block, most)
    )
    rows = left_open(tmp_path / "t", 20)
    part = tmp_path / "t" / "rank-00001" / "000001.h5.part"
    content = bytearray(part.read_bytes())
    for step in damaged:
        content[content.index(rows[step].tobytes()) + 100] ^= 1
    part.write_bytes(content)
    assert f"at iteration {damaged[0]} is damaged" in check(tmp_path / "t").ranks[1].problems[0]
    repaired = repair(tmp_path / "t")
    assert [row.steps for row in repaired] == [20, 20 - len(damaged)]
    for step, problem in zip(damaged, repaired[1].problems, strict=True):
        assert f"iteration {step} is damaged" in problem
    with Trace(tmp_path / "t") as trace:
        assert trace.steps.tolist() == [index for index in range(20) if index not in damaged]
        kept = [row for index, row in enumerate(rows) if index not in damaged]
        np.testing.assert_array_equal(trace.read("a.weight", 1), kept)
        np.testing.assert_array_equal(trace.read("a.weight", 0), kept)


def test_repair_that_was_interrupted_can_run_again(tmp_path: Path) -> None:
    """Stopped between giving the copy its final name and removing the open file; and stopped while copying."""
    left_open(tmp_path / "t", 20)
    folder = tmp_path / "t" / "rank-00000"
    shutil.copy(folder / "000001.h5.part", tmp_path / "kept")
    repair(tmp_path / "t")
    (folder / "index.json").unlink()
    shutil.copy(tmp_path / "kept", folder / "000001.h5.part")
    (folder / "000001.h5.repair").write_bytes(b"half a copy")
    assert [rank.steps for rank in check(tmp_path / "t").ranks] == [20, 20]  # those of the copy and of the open file
    assert [row.steps for row in repair(tmp_path / "t")] == [20, 20]
    assert check(tmp_path / "t").ok
    assert sorted(file.name for file in folder.iterdir()) == ["000000.h5", "000001.h5", "index.json"]


SECOND_RECORDER = """
import sys
import numpy as np
from gradlab.capture import TraceWriter
from gradlab.errors import GradlabError
from gradlab.layout import Layer
for overwrite in (False, True):
    try:
        TraceWriter(sys.argv[1], [Layer("a.weight", (30, 20), "linear")], 2, overwrite=overwrite).close()
    except GradlabError as error:
        print(error)
"""


def test_a_second_recorder_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    """Another process, also where rank 0 has ended and rank 1 is still recording."""
    path, rows = tmp_path / "t", left_open(tmp_path / "t", 5)
    lock = lock_rank(path, 1)
    done = subprocess.run([python(), "-c", SECOND_RECORDER, str(path)], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert "not empty; nothing is overwritten" in first
    assert second == f"{path / 'rank-00001'}: still being recorded by another process; close it first"
    unlock_rank(path, 1, lock)
    repair(path)
    with Trace(path) as trace:
        np.testing.assert_array_equal(trace.read("a.weight", 0), np.stack(rows))


def test_a_trace_that_is_still_being_recorded_is_not_repaired(tmp_path: Path) -> None:
    left_open(tmp_path / "t", 3)
    held = lock_rank(tmp_path / "t", 0)
    rows = repair(tmp_path / "t")
    unlock_rank(tmp_path / "t", 0, held)
    assert "still being recorded" in rows[0].problems[0]
    assert [row.changed for row in rows] == [False, True]


def test_repair_sets_a_closed_segment_aside_that_cannot_be_opened(tmp_path: Path) -> None:
    left_open(tmp_path / "t", 20)
    segment = tmp_path / "t" / "rank-00000" / "000000.h5"
    segment.write_bytes(segment.read_bytes()[:2000])
    rows = repair(tmp_path / "t")
    assert [(row.steps, row.steps_lost) for row in rows] == [(4, 16), (20, 0)]
    assert "kept as 000000.h5.damaged" in rows[0].problems[0]
    assert check(tmp_path / "t").ok


@pytest.mark.parametrize("steps", [[20, 9, 17]])
def test_repair_counts_the_steps_that_other_ranks_hold_as_lost(tmp_path: Path, steps: list[int]) -> None:
    left_open(tmp_path / "t", *steps)
    assert [row.steps_lost for row in repair(tmp_path / "t")] == [20 - held for held in steps]
    with Trace(tmp_path / "t") as trace:
        assert trace.steps_lost == tuple(20 - held for held in steps)


def test_repair_writes_a_damaged_index_anew(tmp_path: Path) -> None:
    left_open(tmp_path / "t", 20)
    repair(tmp_path / "t")
    index = tmp_path / "t" / "rank-00001" / "index.json"
    before = read_index(tmp_path / "t", 1)
    index.write_bytes(index.read_bytes()[:-9])
    assert [(row.changed, row.problems) for row in repair(tmp_path / "t")] == [(False, ()), (True, ())]
    assert read_index(tmp_path / "t", 1) == before


def test_repair_removes_what_a_killed_repair_left(tmp_path: Path) -> None:
    left_open(tmp_path / "t", 3)
    repair(tmp_path / "t")
    left = tmp_path / "t" / "rank-00001" / f".index.json.{'0' * 32}.tmp"
    left.write_text("{")
    repair(tmp_path / "t")
    assert not left.exists()


def test_repair_leaves_a_closed_rank_of_another_run_alone_and_says_so(tmp_path: Path) -> None:
    left_open(tmp_path / "t", 3)
    write_index(tmp_path / "t", index := RankIndex("0" * 32, 1, ()))
    rows = repair(tmp_path / "t")
    assert [row.changed for row in rows] == [True, False]
    assert "of another run" in rows[1].problems[0]
    assert read_index(tmp_path / "t", 1) == index


# --- the commands -----------------------------------------------------------------------------------------------


def test_the_commands_take_a_killed_trace_to_a_sound_one(
    killed_trace: tuple[Path, list[int]], command: Command
) -> None:
    path, _ = killed_trace
    held = [rank.steps for rank in check(path).ranks]
    code, out, error = command("check", path)
    assert code == 2
    assert f"{min(held)} steps on all ranks" in out
    assert "no" in out
    assert error == (
        f"gradlab: {path}: left open by a run that was killed; close it with: gradlab trace repair {path}\n"
    )
    code, out, error = command("check", path, "--json")
    report = json.loads(out)
    assert code == 2
    assert (report["ok"], report["closed"], report["problems"]) == (False, False, [])
    assert [rank["steps"] for rank in report["ranks"]] == held
    code, _, error = command("info", path)
    assert code == 2
    assert "gradlab trace repair" in error

    code, out, error = command("repair", path, "--json")
    assert (code, error) == (0, "")
    assert [(rank["steps"], rank["changed"]) for rank in json.loads(out)] == [(steps, True) for steps in held]
    code, out, error = command("repair", path)
    assert (code, error) == (0, "")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert rows == [[str(rank), str(steps), str(max(held) - steps), "no", "0"] for rank, steps in enumerate(held)]
    assert command("check", path)[0] == 0
    code, out, _ = command("info", path, "--json")
    assert code == 0
    assert json.loads(out)["steps_by_rank"] == held


def test_the_commands_say_in_a_line_that_ranks_hold_different_numbers(tmp_path: Path, command: Command) -> None:
    left_open(tmp_path / "t", 5, 3)
    repair(tmp_path / "t")
    line = "ranks hold 3 to 5 steps each; the 3 that all ranks hold are read, the others are not"
    for name in ("check", "info"):
        code, out, error = command(name, tmp_path / "t")
        assert (code, error) == (0, "")
        assert sum(line in printed for printed in out.splitlines()) == 1
        code, out, _ = command(name, tmp_path / "t", "--json")
        assert json.loads(out)["remarks"] == [line]


def test_repair_ends_with_the_first_problem_that_it_could_not_mend(tmp_path: Path, command: Command) -> None:
    left_open(tmp_path / "t", 20)
    part = tmp_path / "t" / "rank-00001" / "000001.h5.part"
    part.write_bytes(part.read_bytes()[:2000])
    code, out, error = command("repair", tmp_path / "t")
    assert code == 2
    assert error.count("\n") == 1
    assert "kept as 000001.h5.damaged" in error
    assert "kept as 000001.h5.damaged" in out
    code, out, error = command("repair", tmp_path / "t", "--json")
    assert (code, error) == (0, "")
    assert [rank["steps"] for rank in json.loads(out)] == [20, 16]
    assert command("check", tmp_path / "t")[0] == 0


@pytest.mark.parametrize("name", ["check", "repair"])
def test_what_concerns_no_single_rank_ends_with_exit_code_2(name: str, tmp_path: Path, command: Command) -> None:
    TraceWriter(tmp_path / "empty", LAYERS, 2).close()
    code, _, error = command(name, tmp_path / "empty")
    assert code == 2
    assert "empty trace, no step is common to all ranks" in error
    left_open(tmp_path / "t", 3)
    repair(tmp_path / "t")
    (tmp_path / "t" / "rank-00002").mkdir()
    code, _, error = command(name, tmp_path / "t")
    assert code == 2
    assert "ranks disagree, the manifest has 2, but rank-00002 is there" in error


def test_check_counts_problems_and_ends_with_the_first(tmp_path: Path, command: Command) -> None:
    rows = left_open(tmp_path / "t", 3, 3)[0]
    repair(tmp_path / "t")
    for rank in range(2):
        segment = tmp_path / "t" / f"rank-{rank:05d}" / "000000.h5"
        content = bytearray(segment.read_bytes())
        content[content.index(rows.tobytes()) + 8] ^= 1
        segment.write_bytes(content)
    code, out, error = command("check", tmp_path / "t")
    assert code == 2
    assert error.startswith(f"gradlab: {tmp_path / 't'}: 2 problems: {tmp_path / 't' / 'rank-00000'}")
    assert out.count("at iteration 0 is damaged (checksum)") == 2
