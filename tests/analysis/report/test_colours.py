"""Colours of the page by computation: contrast in the light and in the dark, and lines that the colour-blind tell."""

from __future__ import annotations

import itertools
import re
from importlib import resources

import numpy as np
import pytest

HERE = resources.files("gradlab.analysis.report")
PAGE = HERE.joinpath("base.css").read_text(encoding="utf-8")
SCRIPT = HERE.joinpath("scripts/playable.js").read_text(encoding="utf-8")
COLOURS = re.findall(r'"(#[0-9A-F]{6})"', re.search(r"const COLOURS = \[(.*?)\]", SCRIPT)[1])
DASHES = re.findall(r'"([^"]*)"', re.search(r"const DASHES = \[(.*?)\]", SCRIPT)[1])
# Machado, Oliveira, Fernandes 2009, severity 1, on linear RGB.
BLINDNESS = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
TO_XYZ = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
WHITE = np.array([0.95047, 1.0, 1.08883])


def schemes() -> dict[str, dict[str, str]]:
    """The page's colours by name, in the light and in the dark."""
    light, dark = re.findall(r":root \{(.*?)\}", PAGE, re.DOTALL)[:2]
    return {name: dict(re.findall(r"--([\w-]+): (#\w+)", text)) for name, text in (("light", light), ("dark", dark))}


def linear(colour: str) -> np.ndarray:
    """Linear RGB, from 0 to 1."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * one for one in colour[1:])
    values = np.array([int(digits[at : at + 2], 16) for at in (0, 2, 4)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """WCAG 2's contrast ratio."""
    high, low = sorted((float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (one, other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIELAB, D65."""
    share = np.array(TO_XYZ) @ np.clip(rgb, 0, 1) / WHITE
    root = np.where(share > 0.008856, np.cbrt(share), 7.787 * share + 16 / 116)
    return np.array([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_and_lines_stand_out(scheme: str) -> None:
    of = schemes()[scheme]
    for words, ground in itertools.product(("ink", "soft", "link"), ("paper", "panel", "warn-panel")):
        assert contrast(of[words], of[ground]) >= 4.5, (words, ground)
    for colour in (*COLOURS, of["accent"], of["warn"]):
        assert contrast(colour, of["paper"]) >= 3, colour


@pytest.mark.parametrize("blindness", BLINDNESS)
def test_the_colour_blind_tell_lines_apart(blindness: str) -> None:
    """By colour, 20 apart in CIELAB, or by dashes: of as many plans as a report replays."""
    lines = [(COLOURS[at % len(COLOURS)], DASHES[at % len(DASHES)]) for at in range(14)]
    seen = {colour: lab(np.array(BLINDNESS[blindness]) @ linear(colour)) for colour in COLOURS}
    for (one, dash), (other, other_dash) in itertools.combinations(lines, 2):
        assert dash != other_dash or np.linalg.norm(seen[one] - seen[other]) >= 20, (one, other, dash)
