"""Commands whose output goes to a terminal of another encoding, or to a reader who stops, on gradients of any value."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from gradlab.cli.console import Table, print_table
from gradlab.cli.main import main
from gradlab.cli.streams import BROKEN_PIPE
from gradlab.layout import Layer
from support import warm_python
from support.recorded import random_gradients, record

LAYERS = (
    Layer("卷积.重量🦊", (4, 6, 3, 3), "convolution"),
    Layer("tête→β \x1b[31m", (16, 20), "linear"),
    Layer("zero", (5,), "bias"),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder, not of ASCII, with a trace, and a trace of values as large as there are."""
    folder = tmp_path_factory.mktemp("plän🦊")
    record(folder / "trace", random_gradients(0, 6, 2, LAYERS), LAYERS)
    odd = random_gradients(1, 6, 2, LAYERS)
    for number, step in enumerate(odd):
        for own in step:
            own[LAYERS[0].name] *= np.float32(1e30)
            own["zero"] *= 0
            if number == 2:
                own[LAYERS[1].name].flat[:3] = (np.nan, np.inf, -np.inf)
    record(folder / "odd", odd, LAYERS)
    return folder


def run(monkeypatch: pytest.MonkeyPatch, encoding: str, *words: object) -> tuple[int, str, str]:
    """A command between strict streams of an encoding; its exit code and what they hold."""
    streams = {name: io.TextIOWrapper(io.BytesIO(), encoding, "strict") for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    monkeypatch.setattr("sys.argv", ["gradlab", *map(str, words)])
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # as for a user: the tests make errors of warnings
        with pytest.raises(SystemExit) as end:
            main()
    out, err = (written(stream, encoding) for stream in streams.values())
    return int(end.value.code or 0), out, err


def written(stream: io.TextIOWrapper, encoding: str) -> str:
    stream.flush()
    return stream.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_commands_end_well_whatever_their_output_can_hold(
    place: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    artifact = place / f"{encoding}.safetensors"
    commands: list[list[object]] = [
        ["fit", "uniform", place / "trace", "--codec", "topk", "--set", "density=0.1", "--out", artifact],
        ["inspect", artifact],
        ["fit", "--help"],
    ]
    if encoding == "ascii":
        commands += [
            ["evaluate", place / "trace", artifact, "--workers", 1],
            ["predict", artifact, "--nodes", 4, "--compute-seconds", 0.1],
            ["trace", "check", place / "trace", "--json"],
        ]
    for words in commands:
        code, out, err = run(monkeypatch, encoding, *words)
        assert (code, bool(out)) == (0, True), (words, err)
    code, out, err = run(monkeypatch, encoding, "inspect", place / "缺.safetensors")
    assert (code, out) == (2, "")
    assert err.startswith("gradlab: no artifact at ")
    name = "tête→β".encode(encoding, "backslashreplace").decode(encoding)
    assert name in run(monkeypatch, encoding, "trace", "info", place / "trace")[1]


@pytest.mark.thorough  # a start of Python; streams of ASCII are tried above
def test_a_process_of_the_c_locale_ends_well(place: Path) -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "gradlab.cli.main", "trace", "info", str(place / "trace")]
    done = subprocess.run(command, env=environment, capture_output=True, check=False, cwd=place)
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"t\xeate\u2192\u03b2" in done.stdout


@pytest.mark.parametrize(
    ("words", "both"), [(["--help"], False), (["trace", "info"], False), (["trace", "info"], True)]
)
def test_a_reader_that_stops_ends_a_command_as_the_signal_does(place: Path, words: list[str], both: bool) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [warm_python.python(), "-m", "gradlab.cli.main", *words, *([str(place / "trace")] if words[1:] else [])]
    done = subprocess.run(command, stdout=write, stderr=write if both else subprocess.PIPE, check=False)
    os.close(write)
    assert done.returncode == BROKEN_PIPE
    assert not done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
def test_a_full_disk_under_the_output_is_one_line() -> None:
    with open("/dev/full", "wb") as full:
        command = [warm_python.python(), "-m", "gradlab.cli.main", "--help"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (2, b"gradlab: input or output: No space left on device\n")


def test_columns_are_measured_as_they_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), "ascii", "strict")
    monkeypatch.setattr(sys, "stdout", out)
    print_table(Table("‖a‖", ["µs", "λ"], [["卷", "1"], ["name", "2"]]))
    assert len({len(line.rstrip()) for line in written(out, "ascii").splitlines()[1:]}) == 1


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("forced", [False, True])
def test_a_table_is_no_markup_and_loses_no_digit(monkeypatch: pytest.MonkeyPatch, forced: bool) -> None:
    """On a terminal of 20 columns, and in a log whose colours are forced (as in GitHub's actions)."""
    out = (io.TextIOWrapper if forced else Terminal)(io.BytesIO(), "utf-8", "strict")
    monkeypatch.setattr(sys, "stdout", out)
    for name, value in {"COLUMNS": "20", "TERM": "xterm", **({"FORCE_COLOR": "1"} if forced else {})}.items():
        monkeypatch.setenv(name, value)
    numbers = ["1.60 kB", "2\u202f400\u202f000", "75.7 %", "1.04 ms (985 µs to 1.32 ms)", "-0.123456789012345"]
    print_table(Table("runs[/b]/[bold]plan", ["[red]w", *"abcde"], [["[/x]" + "y" * 40, *numbers]]))
    shown = re.sub("\x1b\\[[0-9;]*m", "", written(out, "utf-8"))
    assert all(number in shown for number in [*numbers[:3], numbers[4], "985"])
    assert all(text in shown for text in ("runs[/b]/[bold]plan", "[red]w", "[/x]yyyyyyyy"))
    assert shown.count("y") == 40


def test_numpys_warnings_are_no_lines(place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    artifact = tmp_path / "plan.safetensors"
    for words in (
        ["fit", "uniform", place / "odd", "--codec", "topk", "--set", "density=0.1", "--out", artifact],
        ["evaluate", place / "odd", artifact, "qsgd", "powersgd", "--workers", 1],
        ["fit", "signs", place / "odd", "--out", tmp_path / "signs.safetensors"],
    ):
        _, _, err = run(monkeypatch, "utf-8", *words)
        assert "encountered" not in err
        assert "RuntimeWarning" not in err


def test_glyphs_that_a_font_lacks_are_one_warning() -> None:
    from gradlab.analysis.figures.style import drawing, panels, render

    def draw() -> None:
        with drawing():
            figure, axes = panels(2, 2)
            axes[0].set_title("卷积.重量")
            axes[1].set_title("重🦊")
            render(figure, "names")

    with pytest.warns(UserWarning, match="figures: the font DejaVu Sans lacks characters of some names") as seen:
        draw()
    assert len(seen) == 1
