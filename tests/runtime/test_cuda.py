"""The checks that need a GPU (`make gpu`): all where there is one; on the CPU, that they can pass and fail.

Benchmarks of one GPU (`make gpu-speed`, `make gpu-loss`) run here on the CPU, with tiny models.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradlab import codecs
from support.benchmark_modules import benchmark_modules
from support.laws import thorough
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
    wanted = ["exchange: topk", "*engine is lockstep: powersgd", "speed: cast, dtype float16"]
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


def benchmark(name: str, folder: Path, *arguments: str) -> tuple[str, list[dict[str, Any]]]:
    """Run a benchmark of one GPU on the CPU; its output, and its rows, of which another folder has a copy."""
    rows = folder / "kept" / "rows.jsonl"
    options = ["--device", "cpu", "--tiny", "--rows", str(rows), "--out", str(folder / "out"), *arguments]
    command = [torch_python(), str(RUNNER / "checkout.py"), str(RUNNER.parents[1] / "benchmarks"), name, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    text = rows.with_stem("rows-tiny").read_text()
    assert (folder / "out" / "rows-tiny.jsonl").read_text() == text
    assert (folder / "out" / "rows-tiny.md").read_text() in done.stdout
    return done.stdout, [json.loads(line) for line in text.splitlines()]


def test_speeds_are_kept_row_by_row_and_go_on_after_a_failure(tmp_path: Path) -> None:
    """The bf16 hook wants NCCL: that is its row, and what comes after it is measured in another process."""
    ways = ("plain", "PyTorch bf16 hook", "block_scaled, dtype int4")
    wanted = ["--only", *(f"step of GPT-2 small: {way}" for way in ways), "300 small layers: sign"]
    text, rows = benchmark("gpu_speed", tmp_path, *wanted)
    assert [row.get("way", row.get("case")) for row in rows] == [*ways, "sign"]
    assert "BF16 all reduce" in rows[1].pop("failed")
    assert min(rows[2]["seconds"], rows[2]["plain"], rows[3]["copy"], rows[3]["encode"]) > 0
    assert "| GPT-2 small | plain |" in text
    assert "GPT-2 small: PyTorch bf16 hook: TypeError" in text
    assert benchmark("gpu_speed", tmp_path, *wanted)[1][2:] == rows[2:]


@pytest.mark.thorough  # in the way of the speeds above
def test_losses_are_kept_run_by_run(tmp_path: Path) -> None:
    wanted = ["--steps", "10", "--plans", "dense", "int4", "--ranks", "4", "--seeds", "0"]
    text, (dense, int4) = benchmark("gpu_loss", tmp_path, "--work", str(tmp_path), "--text", __file__, *wanted)
    assert [step for step, _, _ in dense["curve"]] == list(range(1, 11))
    assert dense["curve"][-1][1] < dense["curve"][0][1] < 6
    assert [one == other for one, other in zip(dense["curve"], int4["curve"], strict=True)] == [True, *[False] * 9]
    assert int4["wire"] < dense["wire"] / 3
    assert "| int4 | 4 | 0 |" in text


@pytest.mark.parametrize("plan", [thorough("int4"), "ecsq 1", thorough("PowerSGD 4")])
def test_a_run_that_was_cut_off_is_the_one_that_was_not(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = {"plan": plan, "ranks": 2, "seed": 1, "steps": 10, "text": ""}
    with benchmark_modules("gpu_loss") as modules:
        loss = modules["gpu_loss"]
        tokens = [torch.from_numpy(one) for one in loss.tokens_of(Path(__file__).read_bytes(), 300)]
        task = loss.Task(loss.TINY, loss.replace(loss.RECIPE, batch_size=2, steps=10, warmup_steps=2), *tokens)
        clock = iter(range(1000))
        fake = SimpleNamespace(time=lambda: next(clock), perf_counter=lambda: 0.0)
        monkeypatch.setattr(loss, "time", fake)

        def run(name: str, seconds: float) -> dict[str, Any]:
            begun = loss.Run(task, key, tmp_path / name, torch.device("cpu"))
            return begun.until(fake.time() + seconds)

        whole, parts = run("whole", 900), [run("cut", 9) for _ in range(3)]
    assert [part.get("steps") for part in parts] == [4, 8, None]
    assert parts[2] == whole
    assert not [*tmp_path.iterdir()]


def test_the_text_that_is_always_there_has_frequent_pieces_and_bytes() -> None:
    with benchmark_modules("gpu_loss") as modules:
        text = modules["gpu_loss"].read_text(None, 10_000)
        train, held = modules["gpu_loss"].tokens_of(text, 300)
    assert len(text) == 10_000
    assert len(text) > len(train) > 15 * len(held) > 0
    assert (min(train) < 128, max(train)) == (True, 299)
