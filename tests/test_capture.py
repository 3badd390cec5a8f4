"""Recording under real DDP: torchrun runs tests/capture_scenarios.py once, the tests read what each rank found."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradlab.capture import repair
from gradlab.capture.folder import lock_rank, start_folder, unlock_rank
from gradlab.capture.rank_writer import RankWriter
from gradlab.capture.selection import choose_layers
from gradlab.capture.settings import RecorderSettings
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.trace import Trace, check
from gradlab.trace_schema import STEP_DTYPE, Manifest

HERE = Path(__file__).parent
RANKS = 3  # not a power of two: multiplying by 1/N and dividing by N differ


@contextlib.contextmanager
def torchrun(script: str, ranks: int, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A running job; whatever happens, it has ended afterwards."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    process = subprocess.Popen(
        [*command, str(HERE / script), *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()  # torchrun ends its ranks
        if process.stdout is not None and not process.stdout.closed:
            process.communicate()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("scenarios")
    with torchrun("capture_scenarios.py", RANKS, folder) as process:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output[-4000:]
    return folder, [json.loads((folder / f"results-{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.fixture
def results(run: tuple[Path, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return run[1]


def test_recording_changes_no_bit_of_training_and_records_the_local_gradients(results: list[dict[str, Any]]) -> None:
    for rank in results:
        found = rank["plain_training_is_unchanged"]
        assert found["buckets"] >= 3
        for case in ("plain", "bucket_view", "static_graph"):
            unchanged, recorded_as_computed_apart = found[case]
            assert unchanged, case
            assert recorded_as_computed_apart, case


def test_each_step_carries_its_values(results: list[dict[str, Any]]) -> None:
    for rank in results:
        found = rank["step_values"]
        assert found["index"] == [0, 1, 2, 3]
        assert found["loss"] == [0.5, 1.5, 2.5, 3.5]
        assert found["learning_rate"] == [0.25] * 4
        assert found["loss_scale"] == [128.0] * 4
        assert found["accumulation"] == [2] * 4
        assert [count > 0 for count in found["non_finite"]] == [False, False, True, False]
        assert found["finite"] == [True, True, False, True]
        assert found["metadata"]["note"] == "x"
        assert found["metadata"]["model"] == "TwoPaths"


def test_steps_and_layers_can_be_chosen(results: list[dict[str, Any]]) -> None:
    for rank in results:
        found = rank["choice_of_steps_and_layers"]
        assert found["layers"] == ["first.weight", "first.bias", "last.weight"]
        assert found["steps"] == [1, 4]
        assert found["equal"]


def test_layers_without_a_gradient_are_marked_per_rank(results: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(results):
        found = rank["unused_layers"]
        assert found["unused"] == (["extra.weight", "extra.bias"] if number == 1 else [])
        assert found["same_every_step"]
        assert found["equal"]


def test_a_wrapped_hook_does_the_averaging(results: list[dict[str, Any]]) -> None:
    assert all(rank["wrapped_hook"] == {"same": True, "equal": True} for rank in results)


def test_a_full_disk_stops_recording_and_not_training(run: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    folder, results = run
    found = [rank["full_disk"] for rank in results]
    assert all(rank["same"] and rank["again"] for rank in found)
    assert [rank["lost"] for rank in (found[0], found[2])] == [0, 0]
    assert 16 <= found[1]["written"] < 100
    assert found[1]["written"] + found[1]["lost"] == 100
    assert found[1]["reason"] == os.strerror(27)
    assert f"{found[1]['lost']} steps lost" in found[1]["text"]
    assert len(found[1]["log"]) == 1
    assert "training goes on" in found[1]["log"][0]
    trace = tmp_path / "t"
    shutil.copytree(folder / "full_disk" / "t", trace)
    assert [rank.closed for rank in check(trace).ranks] == [True, False, True]
    assert [rank.steps for rank in check(trace).ranks] == [100, found[1]["written"], 100]
    assert [rank.steps for rank in repair(trace)] == [100, found[1]["written"], 100]
    assert check(trace).ok
    with Trace(trace) as opened:
        assert len(opened.steps) == found[1]["written"]


def test_a_slow_disk_drops_steps_and_says_how_many(results: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(results):
        found = rank["slow_disk"]
        assert found["lost"] > 0
        assert found["written"] + found["lost"] == 40
        assert found["held"][number] == found["written"]
        assert found["index"] == found["lost"]


def test_a_backward_pass_that_fails_half_way_loses_its_own_step_only(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert rank["failed_backward"] == {"message": "a hook that fails", "written": 2, "lost": 1}


REFUSALS = {
    "twice": "has the communication hook capture_hook already",
    "built_in": "has the communication hook BuiltinCommHookType.ALLREDUCE already",
    "not_ddp": "needs a DistributedDataParallel model, got a TwoPaths",
    "not_empty": "first: not empty; nothing is overwritten",
    "foreign": "other: not empty and not a gradlab trace",
    "file": "a file is in the way",
    "no_such_layer": "rank 1: layers: 'lost.*' matches no trainable layer",
    "disagree": "ranks disagree about every: rank 1 has 2, rank 0 has 1",
    "every": "every is 0, expected a whole number of at least 1",
    "metadata": "metadata cannot be written as JSON",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_are_one_line_and_the_same_on_all_ranks(results: list[dict[str, Any]], name: str) -> None:
    lines = {rank["refusals"][name] for rank in results}
    assert len(lines) == 1
    line = lines.pop()
    assert REFUSALS[name] in line
    assert "\n" not in line


def test_a_refusal_writes_and_overwrites_nothing(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert rank["refusals"]["kept"] == "keepkeep"
        assert rank["refusals"]["second_exists"] == "False"


def test_overwrite_replaces_a_trace(results: list[dict[str, Any]]) -> None:
    assert all(rank["overwritten"]["steps"] == [0, 1, 2] for rank in results)


def test_one_rank_alone_is_recorded_with_one_warning(results: list[dict[str, Any]]) -> None:
    for rank in results:
        found = rank["one_rank_alone"]
        assert found["warnings"] == ["recording one rank alone: its trace says nothing about other ranks"]
        assert found["steps"] == list(range(9))
        assert found["same"]


def test_ranks_need_not_share_a_folder(results: list[dict[str, Any]]) -> None:
    assert all(rank["separate_machines"]["equal"] for rank in results)


def test_a_recorder_that_is_collected_closes_its_trace_and_its_thread(results: list[dict[str, Any]]) -> None:
    assert all(rank["collected"] == {"steps": 9, "threads": []} for rank in results)


def test_whatever_fails_in_recording_training_goes_on(results: list[dict[str, Any]]) -> None:
    for rank in results:
        found = rank["broken_optimizer"]
        assert found == {"same": True, "lost": 9, "reason": "IndexError: list index out of range"}


def test_a_recorder_that_nobody_closes_is_closed_at_exit(run: tuple[Path, list[dict[str, Any]]]) -> None:
    with Trace(run[0] / "never_closed" / "t") as trace:
        assert trace.rank_steps == (9,) * RANKS


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
    lines = file.read_text().split("\n")[1:-1] if file.exists() else []
    return int(lines[-1]) if lines else 0


@pytest.fixture
def killed_trace(killed: tuple[Path, list[int]], tmp_path: Path) -> tuple[Path, list[int]]:
    shutil.copytree(killed[0], tmp_path / "trace")
    return tmp_path / "trace", killed[1]


def test_check_reads_what_a_killed_run_acknowledged(killed_trace: tuple[Path, list[int]]) -> None:
    path, acknowledged = killed_trace
    found = check(path)
    assert found.problems == ()
    assert [rank.closed for rank in found.ranks] == [False, False]
    assert all(rank.steps >= steps for rank, steps in zip(found.ranks, acknowledged, strict=True))
    assert found.common_steps == min(rank.steps for rank in found.ranks)


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


def left_open(folder: Path, steps: int) -> list[np.ndarray]:
    """A trace of two ranks whose writers stopped without closing; the rows of a.weight, the same on both ranks."""
    generator = np.random.default_rng(0)
    rows = [generator.standard_normal(600).astype(np.float32) for _ in range(steps)]
    manifest = Manifest(2, tuple(LAYERS))
    start_folder(folder, manifest, overwrite=False)
    for rank in range(2):
        writer = RankWriter(folder, manifest, rank, segment_bytes=1)
        for index, row in enumerate(rows):
            record = np.zeros(1, STEP_DTYPE)
            record["index"] = index
            writer.append([row, row[:30]], record[0], np.zeros(2, bool))
        writer.flush()
        writer.abandon()
    return rows


def test_repair_goes_on_after_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    left_open(tmp_path / "t", 20)
    part = tmp_path / "t" / "rank-00000" / "000001.h5.part"
    part.write_bytes(part.read_bytes()[:2000])
    rows = repair(tmp_path / "t")
    assert [row.steps for row in rows] == [16, 20]
    assert len(rows[0].problems) == 1
    assert "kept as 000001.h5.damaged" in rows[0].problems[0]
    assert (tmp_path / "t" / "rank-00000" / "000001.h5.damaged").exists()
    assert rows[1].problems == ()
    with Trace(tmp_path / "t") as trace:
        assert trace.rank_steps == (16, 20)


@pytest.mark.parametrize("damaged", [16, 18, 19])
def test_repair_keeps_the_steps_around_a_damaged_one(tmp_path: Path, damaged: int) -> None:
    rows = left_open(tmp_path / "t", 20)
    part = tmp_path / "t" / "rank-00001" / "000001.h5.part"
    content = bytearray(part.read_bytes())
    content[content.index(rows[damaged].tobytes()) + 100] ^= 1
    part.write_bytes(content)
    assert f"at iteration {damaged} is damaged" in check(tmp_path / "t").ranks[1].problems[0]
    repaired = repair(tmp_path / "t")
    assert [row.steps for row in repaired] == [20, 19]
    assert f"iteration {damaged} is damaged" in repaired[1].problems[0]
    with Trace(tmp_path / "t") as trace:
        assert trace.steps.tolist() == [index for index in range(20) if index != damaged]
        kept = [row for index, row in enumerate(rows) if index != damaged]
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
    assert [row.steps for row in repair(tmp_path / "t")] == [20, 20]
    assert check(tmp_path / "t").ok
    assert sorted(file.name for file in folder.iterdir()) == ["000000.h5", "000001.h5", "index.json"]


def test_a_trace_that_is_still_being_recorded_is_not_repaired(tmp_path: Path) -> None:
    left_open(tmp_path / "t", 3)
    held = lock_rank(tmp_path / "t", 0)
    rows = repair(tmp_path / "t")
    unlock_rank(tmp_path / "t", 0, held)
    assert "still being recorded" in rows[0].problems[0]
    assert [row.changed for row in rows] == [False, True]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("every", 0),
        ("every", 1.5),
        ("start", -1),
        ("max_steps", 0),
        ("queue_steps", 0),
        ("on_full", "panic"),
        ("dtype", "float64"),
        ("flush_seconds", 0),
        ("segment_bytes", 0),
    ],
)
def test_a_setting_out_of_range_is_named(setting: str, value: Any) -> None:
    with pytest.raises(GradlabError, match=setting):
        RecorderSettings(**{setting: value}).check()


def test_the_schedule_is_every_kth_iteration_from_the_start() -> None:
    settings = RecorderSettings(every=3, start=2, max_steps=4)
    taken: list[int] = []
    for iteration in range(30):
        if settings.wants(iteration, len(taken)):
            taken.append(iteration)
    assert taken == [2, 5, 8, 11]
    assert settings.finished(len(taken))


class _Bare(torch.nn.Module):
    parameters_to_ignore = frozenset({"1.weight", "1.bias"})

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        (None, ["0.weight", "0.bias"]),
        ("*.bias", ["0.bias"]),
        (["0.weight"], ["0.weight"]),
        (lambda layer: layer.role == "linear", ["0.weight"]),
    ],
)
def test_layers_are_chosen_by_name_pattern_or_function(choice: Any, names: list[str]) -> None:
    assert [layer.name for layer, _ in choose_layers(_Bare(), choice)] == names  # type: ignore[arg-type]


@pytest.mark.parametrize("choice", ["1.weight", ["0.weight", "9.*"], [], [3], lambda layer: False])
def test_a_choice_without_layers_is_refused(choice: Any) -> None:
    with pytest.raises(GradlabError, match="layers: "):
        choose_layers(_Bare(), choice)  # type: ignore[arg-type]
