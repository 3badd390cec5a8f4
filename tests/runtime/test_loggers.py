"""`log_scalars`: what TensorBoard, W&B (offline) and Trackio wrote, read back from their files (`make loggers`)."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradlab.errors import GradlabError
from gradlab.runtime import log_scalars

JOB = Path(__file__).parents[1] / "jobs" / "loggers.py"
LOGGERS = ("tensorboard", "wandb", "trackio")


def job(what: str, name: str, folder: Path) -> dict[str, dict[str, Any]]:
    """The numbers by step that the job prints, in its last line: loggers print too."""
    done = subprocess.run(
        [sys.executable, str(JOB), what, name, str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", LOGGERS)
def test_its_files_hold_every_number_of_every_step(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip("needs gradlab[loggers]; `make loggers` installs it and runs this")
    logged = job("write", name, tmp_path)
    read = job("read", name, tmp_path)
    assert list(logged) == ["0", "1", "2", "3", "4"]
    assert any(number.startswith("gradlab/residual_norm/") for number in logged["0"])
    assert set(read) == set(logged)
    for step, numbers in logged.items():
        assert set(read[step]) == set(numbers)
        for number, value in numbers.items():
            kept = float(read[step][number])  # Trackio writes NaN as a text
            wanted = float(np.float32(value)) if name == "tensorboard" else value
            assert kept == wanted or (math.isnan(kept) and math.isnan(wanted)), number
    assert math.isnan(logged["1"]["rate"])


class Writer:
    """What has TensorBoard's method keeps what it is given."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))


class Run:
    """What has the method of runs of W&B and Trackio."""

    def __init__(self) -> None:
        self.lines: list[tuple[dict[str, float], int]] = []

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.lines.append((numbers, step))


def test_a_logger_is_known_by_its_method() -> None:
    writer, run = Writer(), Run()
    for logger in (writer, run, None):  # a rank without a logger
        log_scalars(logger, None, 3, loss=1.5, accuracy=0.25)
    assert writer.scalars == [("loss", 1.5, 3), ("accuracy", 0.25, 3)]
    assert run.lines == [({"loss": 1.5, "accuracy": 0.25}, 3)]
    with pytest.raises(GradlabError, match=r"^log_scalars: logger is a list, expected TensorBoard's SummaryWriter, or"):
        log_scalars([], None, 3, loss=1.5)
