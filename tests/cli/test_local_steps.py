"""`gradlab train --emulate N -s local_steps=H`: recorded, compressed, and said to be what it is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradlab.cli.train.local_steps import emulate_local_steps
from gradlab.cli.train.settings import TrainSettings
from gradlab.trace import Trace
from support.command_line import Command

SMALL = ["train", "digits", "--emulate", 3, "-s", "local_steps=4", "--steps", 13, "--batch-size", 4]
SMALL += ["-s", "train_limit=96"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A recording of pseudo-gradients, and its run's report."""
    path = tmp_path_factory.mktemp("local") / "trace"
    settings = TrainSettings("digits", ranks=3, steps=13, batch_size=4, train_limit=96, capture=str(path))
    report = emulate_local_steps(replace(settings, emulate=True, local_steps=4))
    return path, json.loads(json.dumps(report.to_json()))


def test_a_recording_is_of_outer_steps(recorded: tuple[Path, dict[str, Any]]) -> None:
    path, report = recorded
    assert (report["local_steps"], report["steps"], len(report["losses"])) == (4, 12, 12)
    assert report["recorded"][0]["steps_written"] == 3
    with Trace(path) as trace:
        assert trace.local_steps == "pseudo-gradients: what 4 local steps of SGD add up to on each rank"
        assert (trace.world_size, list(trace.steps)) == (3, [0, 1, 2])
        first, second, _ = trace.iterate()
        assert first.loss == pytest.approx(np.full(3, np.mean(report["losses"][:4])), rel=0.5)
        assert first.learning_rate == 0.7
        # Workers begin alike and see other samples.
        names = list(first.gradients[0])
        assert any(np.any(first.gradients[0][name] != first.gradients[1][name]) for name in names)
        assert any(np.any(first.gradients[0][name] != second.gradients[0][name]) for name in names)


def test_plain_and_recorded_runs_are_one_run(gradlab: Command, recorded: tuple[Path, dict[str, Any]]) -> None:
    _, report = recorded
    code, text, _ = gradlab(*SMALL, "--json")
    plain = json.loads(text)
    assert code == 0
    assert (plain["losses"], plain["final_score"]) == (report["losses"], report["final_score"])


def test_what_was_recorded_is_judged_and_trained_with(
    gradlab: Command, recorded: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """The run of a plan sends what its replay forecast; every command says that these are no gradients."""
    path, _ = recorded
    fit = ["fit", "uniform", path, "--codec", "topk", "--set", "density=0.1", "--out", tmp_path / "plan.safetensors"]
    assert gradlab(*fit)[0] == 0
    code, text, err = gradlab(
        *SMALL, "--compress", tmp_path / "plan.safetensors", "--out", tmp_path / "run.json", "--json"
    )
    assert code == 0, err
    run = json.loads(text)
    code, text, err = gradlab("evaluate", path, tmp_path / "plan.safetensors", "--json")
    assert code == 0, err
    assert "pseudo-gradients: what 4 local steps" in text
    assert run["payload_bytes_per_step"]["mean"] == pytest.approx(run["forecast_payload_bytes"])
    assert 0 < run["errors"]["relative"][0] < 1
    assert len(run["errors"]["steps"]) == 3
    assert "pseudo-gradients" in gradlab("trace", "info", path)[1]
    code, _, err = gradlab("predict", tmp_path / "plan.safetensors", "--run", tmp_path / "run.json")
    assert (code, "that of all emulated workers in turn; give --compute-seconds" in err) == (2, True)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["-s", "local_steps=4"], "local steps are emulated: local_steps needs --emulate N"),
        (["--emulate", 2, "-s", "local_steps=0"], "local_steps = 0, expected at least 1"),
        (["--emulate", 2, "-s", "local_steps=9", "--steps", 5], "5 steps are no outer step of 9: give --steps more"),
        (
            ["--emulate", 2, "-s", "local_steps=2", "-s", "outer_momentum=1"],
            "outer momentum = 1, expected a number in",
        ),
        (["--emulate", 2, "-s", "local_steps=2", "-s", "outer_learning_rate=0"], "outer learning rate = 0, expected"),
        (["--emulate", 2], "--emulate needs --capture, and no --compress, but for local_steps"),
    ],
)
def test_wrong_use_is_one_line(gradlab: Command, words: list[Any], problem: str) -> None:
    code, _, err = gradlab("train", "digits", *words)
    assert (code, err.count("\n")) == (2, 1)
    assert problem in err
