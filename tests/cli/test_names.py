"""Layers of any name: nothing that a command prints or writes drives a terminal, turns text around, or breaks."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gradlab.layout import Layer
from support.command_line import Command
from support.recorded import random_gradients, record

NAMES = (
    r"$\frac{$",  # no formula
    # A terminal's title and its colour, from right to left, controls, markup.
    "x\x1b]0;owned\x07\x1b[31ma\u202etxt\u2066 a\0b\nc\r<script>alert(1)</script>[red]x[/red]",
    "n" * 10_000,
)
LAYERS = tuple(Layer(f"{name}.weight", (16, 24), "linear") for name in NAMES)
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("names") / "trace"
    record(path, random_gradients(0, 12, 2, LAYERS), LAYERS).close()
    return path


def shown(gradlab: Command, *words: object) -> str:
    """What a command prints; it must succeed."""
    code, out, err = gradlab(*words)
    assert code == 0, err
    assert not HIDDEN.search(out + err)
    assert max(map(len, (out + err).split()), default=0) < 1000
    return out


def test_commands_print_names_as_escapes(gradlab: Command, trace: Path, tmp_path: Path) -> None:
    listed = shown(gradlab, "trace", "info", trace)
    assert r"x\x1b]0;owned\x07" in listed
    assert "[red]x" in listed
    plan = tmp_path / "plan.safetensors"
    shown(gradlab, "trace", "check", trace)
    shown(gradlab, "fit", "uniform", trace, "--codec", "topk", "--out", plan)
    shown(gradlab, "inspect", plan)


def test_a_report_holds_names_as_text(gradlab: Command, trace: Path, tmp_path: Path) -> None:
    shown(gradlab, "analyze", trace, "--quick", "--only", "noise", "--out", tmp_path / "report")
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert not HIDDEN.search(page)
    assert "<script>alert" not in page
    figures = list((tmp_path / "report" / "figures").glob("*.svg"))
    assert figures
    for figure in figures:
        ElementTree.fromstring(figure.read_text(encoding="utf-8"))
        assert not HIDDEN.search(figure.read_text(encoding="utf-8"))
