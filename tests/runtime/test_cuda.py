"""The checks that need a GPU (`make gpu`): all where there is one; on the CPU, that they can pass and fail."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gradlab import codecs
from support.warm_python import torch_python

RUNNER = Path(__file__).parents[1] / "gpu"
NO_GPU = 3
CHECKS = """
import os
import torch
import torch.distributed as dist
from outcome import PASSED, Difference, Outcome

def sound(place):
    return Outcome(PASSED, f"rank {place.rank} of {place.world_size}")

def wrong(place):
    difference = Difference()
    difference.add("x", torch.ones(2), torch.tensor([1.0, 1.0 + place.rank]))
    return difference.outcome(1e-3)

def missing(place):
    import a_package_that_is_not_there

def alone(place):
    if place.rank == 1:
        raise ValueError("on rank 1")
    dist.barrier(group=place.group)

def dies(place):
    os._exit(7) if place.rank == 0 else dist.barrier(group=place.group)

CHECKS = {"first": sound, "wrong": wrong, "missing": missing, "alone": alone, "dies": dies, "last": sound}
"""


def gpu(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    command = [torch_python(), str(RUNNER), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def test_with_a_gpu_all_checks_pass_and_without_one_it_is_reported() -> None:
    done = gpu(timeout=520)
    if torch.cuda.is_available():
        assert done.returncode == 0, done.stdout + done.stderr
    else:
        assert done.returncode == NO_GPU
        assert done.stdout.startswith("no GPU")
        assert done.stdout.count("\n") == 1


def test_every_codec_is_checked_everywhere() -> None:
    listed = gpu("--device", "cpu", "--list").stdout.splitlines()
    for name in codecs.names():
        assert {f"exchange: {name}", f"gloo x 2: engine is lockstep: {name}", f"nccl x 1: resume: {name}"} <= {*listed}
        assert any(line.startswith(f"speed: {name}") for line in listed)


@pytest.mark.thorough
def test_the_checks_themselves_on_the_cpu() -> None:
    wanted = ["exchange: topk", "*engine is lockstep: powersgd", "speed: cast*"]
    done = gpu("--device", "cpu", "--numel", str(4096 * 27), "--only", *wanted)
    assert done.returncode == 0, done.stdout + done.stderr
    *_, counts, left_out = done.stdout.splitlines()
    assert counts.startswith("1 measured, 1 not run, 2 passed")
    assert left_out.startswith("not run, needs a GPU: nccl x 1: engine is lockstep: powersgd")


@pytest.mark.thorough
def test_no_time_is_reported_by_name() -> None:
    done = gpu("--device", "cpu", "--seconds", "0", "--only", "exchange: topk", "gloo x 2: identity*")
    assert "not run, the time was up: exchange: topk; gloo x 2: identity is plain DDP" in done.stdout


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The runner's module `launch`, whose processes find the checks above."""
    (tmp_path / "checks_of_a_test.py").write_text(CHECKS)
    benchmarks = RUNNER.parents[1] / "benchmarks"
    folders = [*map(str, (tmp_path, RUNNER, RUNNER.parent, benchmarks, benchmarks / "speed"))]
    for place in reversed(folders):
        monkeypatch.syspath_prepend(place)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(sys, "executable", torch_python())
    import launch

    return launch


def test_a_failure_is_a_row_and_the_other_checks_go_on(launch: Any) -> None:
    names = ("first", "wrong", "missing", "alone", "dies", "last")
    job = launch.Job("two", "checks_of_a_test", names, ("cpu", "cpu"), "gloo")
    rows = {check: outcome for _, check, outcome in launch.run(job, time.time() + 240, 1, lambda _: None)}
    assert tuple(rows) == names
    assert [rows[name].status for name in names] == ["passed", "FAILED", "not run", "FAILED", "FAILED", "passed"]
    assert rows["wrong"].found.startswith("4.5e-01")  # of rank 1: |(1, 1) - (1, 2)| / |(1, 2)|
    assert rows["missing"].found == "needs a_package_that_is_not_there"
    assert rows["alone"].found == "ValueError: on rank 1"
    assert rows["dies"].found.startswith("rank 0 ended with exit code 7")
