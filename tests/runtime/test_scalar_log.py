"""A run's numbers in a file while it trains, and `gradlab watch`, which shows them."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradlab.artifact import Artifact
from gradlab.cli.watch import pause
from gradlab.datasets import get
from gradlab.errors import GradlabError
from gradlab.formatting import BARS, POINTS, sparkline
from gradlab.layout import layers_of
from gradlab.plan import Plan
from gradlab.run_log import Series, WatchedLog, summary
from gradlab.runtime import ScalarLog
from support.command_line import Command
from support.warm_python import python

STEPS = 12


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of a compressed training on two real ranks."""
    folder = tmp_path_factory.mktemp("logged")
    plan = Plan.uniform(layers_of(get("digits").model(0)), "topk", density=0.05, warmup_steps=2)
    Artifact(plan).save(folder / "plan.safetensors")
    words = [
        "train",
        "digits",
        "--steps",
        STEPS,
        "--compress",
        folder / "plan.safetensors",
        "--log",
        folder / "run.jsonl",
    ]
    done = subprocess.run([python(), "-m", "gradlab", *map(str, words)], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run.jsonl"


def test_a_line_per_step_on_one_rank(trained: Path) -> None:
    *steps, end = [json.loads(line) for line in trained.read_text(encoding="utf-8").splitlines()]
    assert [one["step"] for one in steps] == list(range(1, STEPS + 1))
    assert (end["step"], end["ended"]) == (STEPS, True)
    assert [one["time"] for one in steps] == sorted(one["time"] for one in steps)
    assert all(math.isfinite(one["loss"]) for one in steps)
    assert steps[0]["payload_bytes"] > 5 * steps[-1]["payload_bytes"]  # dense, then compressed
    for one in steps:
        assert one["compression_ratio"] == steps[0]["payload_bytes"] / one["payload_bytes"]  # the first one is dense
        assert one["ratio_to_16_bits"] == one["compression_ratio"] / 2
    layers = {name.split("/", 1)[1] for name in steps[-1] if name.startswith("relative_error/")}
    assert layers
    assert layers == {name.split("/", 1)[1] for name in steps[-1] if name.startswith("residual_norm/")}


def test_watch_shows_it(trained: Path, gradlab: Command) -> None:
    code, text, _ = gradlab("watch", trained, "--once")
    assert code == 0
    assert f"step {STEPS}, ended" in text
    assert all(words in text for words in ("loss", "payload bytes", "ratio", "layers with the largest error"))
    assert gradlab("watch", trained)[:2] == (0, text)  # a run that has ended, and no terminal
    last = json.loads(gradlab("watch", trained, "--json")[1])
    assert (last["last"]["step"], last["end"]) == (STEPS, "ended")


def test_it_follows_a_run_to_its_end(tmp_path: Path) -> None:
    """A real process that watches, a log that grows, in pieces of lines too."""
    path = tmp_path / "run.jsonl"
    path.write_text("")
    watching = subprocess.Popen([python(), "-m", "gradlab", "watch", path], stdout=subprocess.PIPE, text=True)
    with open(path, "a", encoding="utf-8") as file:
        for piece in ('{"step": 1, "time": 1.0, "loss": 2', '.5}\n{"step": 2,', ' "time": 3.0, "loss": 1.5}\n'):
            file.write(piece)
            file.flush()
            time.sleep(0.1)
        assert watching.poll() is None
        file.write('{"step": 2, "time": 3.0, "error": "ValueError: over"}\n')
    text, _ = watching.communicate(timeout=60)
    assert watching.returncode == 0
    assert "\nstep 2, ended with an error: ValueError: over, 2.00 s a step\n" in text


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.touch()
    seen = WatchedLog(path)
    for run in range(2):
        with ScalarLog(path) as log:
            log.add(loss=float(run))
            seen.look()
            assert (len(seen.rows), seen.ended) == (run + 1, False)
        seen.look()
        assert seen.end == "ended"
    path.write_text('{"step": 1, "time": 1.0, "loss": 7.0}\n')  # another run's, in its place
    seen.look()
    assert seen.rows[-1]["loss"] == seen.last["loss"] == 7.0


def test_a_wrong_line_costs_no_other_line(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.touch()
    seen = WatchedLog(path)
    path.write_text('{"step": 1, "time": 1}\nno line\n{"step": 2, "time": 2}\n')
    with pytest.raises(GradlabError, match="is no log: expected lines of JSON with a \"step\", got 'no line'"):
        seen.look()
    seen.look()
    assert [row["step"] for row in seen.rows] == [1, 2]


def test_a_line_is_reduced_to_the_run_as_a_whole() -> None:
    errors = {"relative_error/a": 0.5, "relative_error/b": 0.25}
    first = summary({"step": 1.0, "time": 10.0, **errors, "residual_norm/a": 3.0, "residual_norm/b": 4.0}, {})
    assert first == {"step": 1.0, "time": 10.0, "residual_norm": 5.0, "largest_relative_error": 0.5}
    second = summary({"step": 3.0, "time": 14.0, "loss": 1.0, "residual_norm/a": None, "relative_error/a": None}, first)
    assert (second["step_seconds"], second["residual_norm"], second["largest_relative_error"]) == (2.0, None, None)
    assert summary({"step": 4.0, "time": 15.0, "step_seconds": 7.0}, second)["step_seconds"] == 7.0  # the script's own
    assert "step_seconds" not in summary({"step": 4.0, "time": 9.0}, second)  # a clock that was set back


def test_what_is_not_finite_is_null_and_an_error_is_told(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "run.jsonl"

    def failing() -> None:
        with ScalarLog(path, every=2) as log:
            for value in (1.0, math.nan, 2.0, math.inf):
                log.add(loss=value)
            raise ValueError("over")

    with pytest.raises(ValueError, match="over"):
        failing()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(one["step"], one.get("loss", "-")) for one in lines] == [(2, None), (4, None), (4, "-")]
    assert lines[-1]["error"] == "ValueError: over"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no device that is always full")
def test_a_full_disk_warns_once_and_training_goes_on() -> None:
    with warnings.catch_warnings(record=True) as said, ScalarLog("/dev/full") as log:
        warnings.simplefilter("always")
        for value in (1.0, 2.0, 3.0):
            log.add(loss=value)
    assert [str(one.message) for one in said] == ["gradlab: the log ends here: No space left on device"]


def test_what_is_no_log_is_refused(tmp_path: Path, gradlab: Command) -> None:
    path = tmp_path / "other"
    for content in (b"\xff\xfe\x00", b'{"loss": 1}\n', b'{"step": true}\n', b"[" * 100_000 + b"\n", b"x" * 3_000_000):
        path.write_bytes(content + b"\n")
        code, _, err = gradlab("watch", path, "--once")
        assert (code, err.startswith(f"gradlab: {path} is no log")) == (2, True), err
    path.write_bytes(b"")
    assert gradlab("watch", path, "--once")[0] == 2
    code, _, err = gradlab("watch", tmp_path / "absent", "--once")
    assert (code, err) == (2, f"gradlab: cannot read {tmp_path / 'absent'}: No such file or directory\n")
    with pytest.raises(GradlabError, match="every = 0"):
        ScalarLog(path, every=0)
    with pytest.raises(GradlabError, match="cannot write the log"):
        ScalarLog(path / "below")


def test_names_and_rules_of_a_log_drive_no_terminal(tmp_path: Path, gradlab: Command) -> None:
    line: dict[str, Any] = {"step": 1, "time": 1.0, "\x1b[31mred[bold]": 1.0, "rules": ["\x1b]0;title\x07 fired"]}
    line |= {"relative_error/\x1b[2J": 10**400, "huge": 10**400, "\u202eturned": None, "x" * 5000: 1.0, "word": "x"}
    (tmp_path / "run.jsonl").write_text(json.dumps(line) + "\n")
    code, text, _ = gradlab("watch", tmp_path / "run.jsonl", "--once")
    assert code == 0
    assert not re.search("[\x00-\x09\x0b-\x1f\u202a-\u202e]", text)
    assert "red[bold]" in text
    assert max(map(len, text.splitlines())) < 1000


@given(st.lists(st.one_of(st.none(), st.floats(-1e300, 1e300)), max_size=200))
def test_a_sparkline_has_its_highest_where_the_series_has(series: list[float | None]) -> None:
    drawn = sparkline(series)
    assert len(drawn) == min(POINTS, len(series))
    if len(series) <= POINTS:
        assert [mark == " " for mark in drawn] == [value is None for value in series]
        finite = [value for value in series if value is not None]
        if finite and max(finite) > min(finite):
            assert drawn[series.index(max(finite))] == "█"
            assert drawn[series.index(min(finite))] == "▁"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([0.0, 0.0, 0.0], "constant"),
        ([1.0, 1.00000001, 1.0], "constant"),
        ([1.0, 1.01], ""),
        ([None, 2.0, None, 2.0], "constant"),
        ([None, 2.0, None, 2.5], ""),
        ([2.0], "constant"),
        ([None, None], "never finite"),
    ],
)
def test_what_does_not_change_has_words_in_place_of_a_line(values: list[float | None], words: str) -> None:
    drawn = Series("x", values).cells()[-1]
    assert drawn == words or (not words and set(drawn) <= {*BARS, " "})


def test_the_numbers_are_those_of_the_last_line_and_a_wrong_line_is_named(tmp_path: Path, gradlab: Command) -> None:
    lines: list[dict[str, Any]] = [
        {"step": 1, "time": 10.0, "payload_bytes": 4e6, "loss": 2.5},
        {"step": 2, "time": 10.5, "payload_bytes": 1e6, "loss": 1.5},
    ]
    path = tmp_path / "run.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    cells = [one.cells()[:3] for one in WatchedLog(path).series()]
    assert cells[0] == ("loss", "1.500", "2.000")
    assert cells[1:] == [("step seconds", "500 ms", "500 ms"), ("payload bytes", "1.00 MB", "2.50 MB")]
    path.write_text('{"step": 5, "rules": 5}\n')
    refusal = f"gradlab: {path}: step 5: rules is 5, expected null or a list\n"
    assert gradlab("watch", path, "--once") == (2, "", refusal)


def test_looking_takes_a_tenth_of_the_time_at_most() -> None:
    assert (pause(0.0), pause(0.01), pause(2.0)) == (0.5, 0.5, 20.0)
