"""torchtitan's own trainer and debug model on four ranks, with gradlab's lines of docs/examples: `make frameworks`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.command_line import Command

pytest.importorskip("torchtitan", reason="needs gradlab[torchtitan]")
JOB = Path(__file__).parents[1] / "jobs" / "torchtitan_job.py"
SAVED = 3  # the step of the checkpoint, of six
Runs = dict[str, list[dict[str, Any]]]  # by launch and rank


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torchtitan")


@pytest.fixture(scope="module")
def runs(folder: Path) -> Runs:
    """Runs from the start, and those that new processes resume."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(JOB)]
    for what in ("first", "resumed"):
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [*launch, str(folder), what]
        job = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
        assert job.returncode == 0, job.stderr[-8000:]
    names = {what: [folder / f"{what}-{rank}.json" for rank in range(4)] for what in ("first", "resumed")}
    return {what: [json.loads(path.read_text()) for path in paths] for what, paths in names.items()}


@pytest.mark.parametrize("attached", ["identity", "recorded"])
def test_without_compression_it_is_torchtitan_alone(runs: Runs, attached: str) -> None:
    """Losses and parameters, bit for bit."""
    for rank in runs["first"]:
        assert rank[attached]["losses"] == rank["alone"]["losses"]
        assert rank[attached]["parameters"] == rank["alone"]["parameters"]


@pytest.mark.parametrize("way", ["compressed", "local steps"])
def test_a_run_resumed_by_torchtitans_checkpoints_is_one_that_never_stopped(runs: Runs, way: str) -> None:
    for whole, rest in zip(runs["first"], runs["resumed"], strict=True):
        assert rest[way]["losses"] == whole[way]["losses"][SAVED:]
        assert rest[way]["parameters"] == whole[way]["parameters"]
        assert whole[way]["parameters"] != whole["alone"]["parameters"]


def test_gradients_and_parameters_compressed_train(runs: Runs) -> None:
    for rank, of_rank in enumerate(runs["first"]):
        compressed, alone, local = (of_rank[name] for name in ("compressed", "alone", "local steps"))
        assert compressed["losses"][-1] == pytest.approx(alone["losses"][-1], abs=0.05)
        assert max(compressed["losses"][-1], local["losses"][-1]) < alone["losses"][0] - 0.4
        report = compressed["report"]
        assert report["payload_bytes_per_step"] == report["forecast_payload_bytes"]
        assert report["compression_ratio"] > 7
        assert report["parameters"]["payload_bytes"] == report["parameters"]["forecast_payload_bytes"] > 0
        assert local["report"]["outer_steps"] == 3
        assert compressed["parameters"] == runs["first"][rank ^ 2]["compressed"]["parameters"]  # the other node's


def test_recommend_takes_the_recording(runs: Runs, folder: Path, gradlab: Command) -> None:
    question = ("--nodes", "2x2", "--fsdp", "--bandwidth", "50mbit", "--quick", "--workers", 1)
    code, printed, _ = gradlab("recommend", folder / "trace", "--out", folder / "plan.safetensors", *question)
    assert code == 0
    assert "At 50 Mbit/s between 2 nodes take " in printed
    assert "compress_fsdp(model, " in printed
