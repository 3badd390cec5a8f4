"""Recording under real DDP: torchrun runs tests/jobs/capture_scenarios.py once, the tests read what each rank found."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradlab.capture import repair
from gradlab.capture.layers import choose_layers
from gradlab.capture.settings import RecorderSettings
from gradlab.cli.options import profile_of_step
from gradlab.ddp.model import synchronised_layers
from gradlab.errors import GradlabError
from gradlab.trace import Trace, check
from gradlab.trace.schema import TIMES
from jobs.capture_scenarios import DISK_STEPS, SLOW_SECONDS, STEPS
from support.small_disk import small_disk
from support.torchrun_job import torchrun
from support.warm_python import python

RANKS = 3  # not a power of two: multiplying by 1/N and dividing by N differ


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
        result = rank["plain_training_is_unchanged"]
        assert result["buckets"] >= 3
        for case in ("plain", "bucket_view", "static_graph"):
            unchanged, recorded_as_computed_apart = result[case]
            assert unchanged, case
            assert recorded_as_computed_apart, case


def test_each_step_carries_its_values(results: list[dict[str, Any]]) -> None:
    for rank in results:
        result = rank["step_values"]
        assert result["index"] == [0, 1, 2, 3]
        assert result["loss"] == [0.5, 1.5, 2.5, 3.5]
        assert result["learning_rate"] == [0.25] * 4
        assert result["loss_scale"] == [128.0] * 4
        assert result["accumulation"] == [2] * 4
        assert [count > 0 for count in result["non_finite"]] == [False, False, True, False]
        assert result["finite"] == [True, True, False, True]
        assert result["metadata"]["note"] == "x"
        assert result["metadata"]["model"] == "TwoPaths"
        assert result["metadata"]["plain_sgd"] is True
        assert result["metadata"]["optimizer"]["name"] == "SGD"
        assert result["metadata"]["optimizer"]["groups"][0]["momentum"] == 0


def test_each_step_carries_its_times(run: tuple[Path, list[dict[str, Any]]]) -> None:
    """The others wait for the rank that sleeps in each step; and a forecast takes its times."""
    folder = run[0] / "step_values" / "t"
    with Trace(folder) as trace:
        for rank in range(trace.world_size):
            scalars = trace.scalars(rank)
            seconds, waited, _, recording = (scalars[name][1:] for name in TIMES[:-1])
            assert np.isnan(scalars["seconds"][0])
            assert (seconds >= np.maximum(waited, recording)).all()
            assert min(waited.min(), recording.min()) >= 0
            assert scalars["averaged_bytes"].tolist() == [sum(4 * layer.numel for layer in trace.layers)] * 4
        times = trace.times
        assert times is not None
        assert times.seconds > times.computing >= SLOW_SECONDS
        profile = profile_of_step(None, trace)
        assert (profile.compute_seconds, profile.compute_source) == (times.computing, "as recorded on 3 ranks")
        assert profile_of_step(str(folder), trace) == profile
        assert profile_of_step("2s", trace).compute_seconds == 2


def test_steps_and_layers_can_be_chosen(results: list[dict[str, Any]]) -> None:
    for rank in results:
        result = rank["choice_of_steps_and_layers"]
        assert result["layers"] == ["first.weight", "first.bias", "last.weight"]
        assert result["steps"] == [1, 4]
        assert result["equal"]
        assert result["timed"] <= 1  # training goes on without a recorder, and keeps no time of it


def test_layers_without_a_gradient_are_marked_per_rank(results: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(results):
        result = rank["unused_layers"]
        assert result["unused"] == (["extra.weight", "extra.bias"] if number == 1 else [])
        assert result["same_every_step"]
        assert result["equal"]


def test_a_wrapped_hook_does_the_averaging(results: list[dict[str, Any]]) -> None:
    assert all(rank["wrapped_hook"] == {"same": True, "equal": True} for rank in results)


def test_recording_around_the_compression_hook_changes_nothing_and_records_what_enters_it(
    results: list[dict[str, Any]],
) -> None:
    for rank in results:
        result = rank["wrapped_compression"]
        assert result["hook"] == "compression_hook"
        assert result["compressed_differs_from_plain"]
        assert result["same"]
        assert result["equal"]


def test_the_one_exception_differs_in_the_last_bits_only_and_records_the_local_gradients(
    results: list[dict[str, Any]],
) -> None:
    for rank in results:
        result = rank["zeroed_bucket_views"]
        assert result["largest_difference"] < 1e-6
        assert result["equal"]


def test_a_full_disk_stops_recording_and_not_training(run: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    folder, results = run
    ranks = [rank["full_disk"] for rank in results]
    assert all(rank["same"] and rank["again"] for rank in ranks)
    assert [rank["lost"] for rank in (ranks[0], ranks[2])] == [0, 0]
    assert 16 <= ranks[1]["written"] < DISK_STEPS
    assert ranks[1]["written"] + ranks[1]["lost"] == DISK_STEPS
    assert ranks[1]["reason"] == os.strerror(27)
    assert f"{ranks[1]['lost']} steps lost" in ranks[1]["text"]
    assert len(ranks[1]["log"]) == 1
    assert "training goes on" in ranks[1]["log"][0]
    trace = tmp_path / "t"
    shutil.copytree(folder / "full_disk" / "t", trace)
    assert [rank.closed for rank in check(trace).ranks] == [True, False, True]
    assert [rank.steps for rank in check(trace).ranks] == [DISK_STEPS, ranks[1]["written"], DISK_STEPS]
    assert [rank.steps for rank in repair(trace)] == [DISK_STEPS, ranks[1]["written"], DISK_STEPS]
    assert check(trace).ok
    assert [rank.steps_lost for rank in check(trace).ranks] == [0, ranks[1]["lost"], 0]
    with Trace(trace) as opened:
        assert len(opened.steps) == ranks[1]["written"]


def test_waiting_for_ddps_buffers_is_no_computing(results: list[dict[str, Any]]) -> None:
    found = [rank["waits_for_buffers"] for rank in results]
    assert min(rank["waited"] for rank in found[1:]) > 0.8 * SLOW_SECONDS
    assert [rank["left"] for rank in found] == [[0, 0]] * len(found)


def test_a_slow_disk_drops_steps_and_says_how_many(results: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(results):
        result = rank["slow_disk"]
        assert result["lost"] > 0
        assert result["written"] + result["lost"] == 40
        assert result["held"][number] == result["written"]
        assert result["index"] == result["lost"]


def test_a_backward_pass_that_fails_half_way_loses_its_own_step_only(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert rank["failed_backward"] == {"message": "a hook that fails", "written": 2, "lost": 1}


REFUSALS = {
    "twice": "has the communication hook capture_hook already",
    "built_in": "has the communication hook BuiltinCommHookType.ALLREDUCE already",
    "not_ddp": "TraceRecorder: got a TwoPaths, not in DDP; wrap it first",
    "not_empty": "first: not empty; nothing is overwritten",
    "foreign": "other: not empty and not a gradlab trace",
    "file": "a file is in the way",
    "no_such_layer": "rank 1: layers: 'lost.*' matches no trainable layer",
    "disagree": "ranks disagree about every: rank 1 has 2, rank 0 has 1",
    "every": "every is 0, expected a whole number of at least 1",
    "optimizer": "optimizer is str, expected a torch optimizer",
    "scaler": "scaler is int, expected a GradScaler",
    "complex": "weight, bias: complex parameters",
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
        assert rank["refusals"]["first_exists"] == "True"
        assert rank["refusals"]["second_exists"] == "False"


def test_overwrite_replaces_a_trace(results: list[dict[str, Any]]) -> None:
    chosen = {"steps": [0, 1, 2], "whole": True, "recorded": ["last.bias"]}
    assert all(rank["overwritten"] == chosen for rank in results)


def test_one_rank_alone_is_recorded_with_one_warning(results: list[dict[str, Any]]) -> None:
    for rank in results:
        result = rank["one_rank_alone"]
        assert result["warnings"] == ["recording one rank alone: its trace says nothing about other ranks"]
        assert result["steps"] == list(range(STEPS))
        assert result["same"]


def test_ranks_need_not_share_a_folder(results: list[dict[str, Any]]) -> None:
    assert all(rank["separate_machines"]["equal"] for rank in results)


def test_a_recorder_that_is_collected_closes_its_trace_and_its_thread(results: list[dict[str, Any]]) -> None:
    assert all(rank["collected"] == {"steps": STEPS, "threads": []} for rank in results)


def test_whatever_fails_in_recording_training_goes_on(results: list[dict[str, Any]]) -> None:
    for rank in results:
        result = rank["broken_optimizer"]
        assert result == {"same": True, "lost": STEPS, "reason": "IndexError: list index out of range"}


def test_a_recorder_that_nobody_closes_is_closed_at_exit(run: tuple[Path, list[dict[str, Any]]]) -> None:
    with Trace(run[0] / "never_closed" / "t") as trace:
        assert trace.rank_steps == (STEPS,) * RANKS


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
    assert [layer.name for layer, _ in choose_layers(synchronised_layers(_Bare()), choice)] == names  # type: ignore[arg-type]


@pytest.mark.parametrize("choice", ["1.weight", ["0.weight", "9.*"], [], [3], lambda layer: False])
def test_a_choice_without_layers_is_refused(choice: Any) -> None:
    with pytest.raises(GradlabError, match="layers: "):
        choose_layers(synchronised_layers(_Bare()), choice)  # type: ignore[arg-type]


FILL_A_DISK = """
import sys, numpy as np
from gradlab.capture import TraceWriter
from gradlab.layout import Layer
writer = TraceWriter(sys.argv[1], (Layer("weight", (300, 300), "linear"),), 1)
try:
    for step in range(200):
        writer.append(0, step, {"weight": np.ones((300, 300), np.float32)})
except OSError as error:
    print(step, error.strerror)
"""


@pytest.mark.parametrize("free", [64, 1000, 6000, 24000])
def test_a_full_disk_does_not_kill_the_process(tmp_path: Path, free: int) -> None:
    """A real small file system, filled but for `free` kB: writing stops with an error while HDF5 still has room."""
    size = 32 * 1024
    with small_disk(tmp_path, 1024 * size) as disk:
        (disk / "filling").write_bytes(bytes(1024 * (size - free)))
        command = [python(), "-c", FILL_A_DISK, str(disk / "trace")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        step, reason = done.stdout.split(maxsplit=1)
        assert reason.strip() == "No space left on device"
        assert (int(step) >= 16) == (free == 24000)
