"""The four questions of a report: short answers in the open, the rest beneath, and values under the pointer."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gradlab.analysis.figures.chart import Chart, Panel, lines, points, rule
from gradlab.analysis.figures.drawn import draw, pointing
from gradlab.analysis.figures.style import drawing, render
from gradlab.analysis.forecast import Network
from gradlab.analysis.forecast.link import Link
from gradlab.analysis.forecast.network import Profile
from gradlab.analysis.report.examine import examine
from gradlab.analysis.report.look import QUICK
from gradlab.analysis.report.page import identified
from gradlab.analysis.report.trace_report import write_trace_report
from gradlab.formatting import format_bytes, format_percent
from gradlab.layout import Layer
from gradlab.plan import Plan
from support.recorded import random_gradients, record

SCALES = ("xscale", "yscale")
LAYERS = (
    Layer("body.weight", (96, 80), "linear"),
    Layer("head.weight", (10, 96), "linear"),
    Layer("head.bias", (10,), "bias"),
)
PLANS = {
    "int8": Plan.uniform(LAYERS, "block_scaled", dtype="int8", warmup_steps=0, group_bytes=0),
    "top-k": Plan.uniform(LAYERS, "topk", density=0.01, warmup_steps=0, group_bytes=0),
    "signs": Plan.uniform(LAYERS, "sign", warmup_steps=0),
}


class Outline(HTMLParser):
    """Sections of a page: which are folded, and what stands in each."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.folded: dict[str, bool] = {}
        self.words: dict[str, str] = {}
        self._stack: list[tuple[str, str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag in ("section", "details"):
            known = dict(attrs)
            self._stack.append((tag, known.get("id") or ("open" if "open" in known else "shut")))
            if tag == "section":
                self.folded[known["id"]] = ("details", "shut") in self._stack

    def handle_endtag(self, tag: str) -> None:
        if tag in ("section", "details"):
            assert self._stack.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for tag, name in self._stack:
            if tag == "section":
                self.words[name] = f"{self.words.get(name, '')} {data.strip()}"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("questions")
    with record(folder / "trace", random_gradients(0, 12, 2, LAYERS), LAYERS) as trace:
        network = Network([Link(1e6), Link(1e12)], [4], Profile(0.02, "as given"))
        examination = examine(
            trace, plans=PLANS, network=network, parts=["payoff", "noise"], look=replace(QUICK, figures=0)
        )
        path = write_trace_report(trace, folder / "report", examination)
    return json.loads((path.parent / "report.json").read_text()), path.read_text()


def test_four_questions_stand_open_and_all_else_is_folded(report: tuple[dict[str, Any], str]) -> None:
    outline = Outline(report[1])
    assert [name for name, folded in outline.folded.items() if not folded] == ["pay", "which", "accuracy", "gradients"]
    assert {"payoff", "layer-matrix", "replays", "noise", "layers", "layer-0"} <= set(outline.folded)


def test_the_page_begins_in_short_and_says_all_beneath(report: tuple[dict[str, Any], str]) -> None:
    data, page = report
    assert len(data["brief"]) < len(data["verdict"])
    slow, fast = data["payoff"]["places"]
    # What is taken ends near dense training; what is faster and does not is named after it.
    assert data["brief"].startswith(f"At 1 Mbit/s between 4 nodes take {slow['closest']}: ")
    assert "the fastest with at most 1 % worse loss" in data["brief"]
    assert "Compress below about " in data["brief"]
    assert f" {slow['fastest']} would save" in data["brief"]
    assert slow["fastest"] != slow["closest"]
    assert fast["fastest"] is None
    assert "At 1 Tbit/s between 4 nodes do not compress." in data["brief"]
    assert page.count(data["brief"]) == 1
    words = " ".join(re.sub(r"<[^>]+>", " ", page).split())
    assert words.index(" ".join(data["brief"].split())) < words.index("Will it pay")
    assert " ".join(data["verdict"].split()) in " ".join(Outline(page).words["pay"].split())


def test_layers_stand_beside_plans(report: tuple[dict[str, Any], str]) -> None:
    """One row per layer, one column per plan, and the same numbers on the layer's own page, to which its name leads."""
    data, page = report
    matrix = page[page.index('id="layer-matrix"') : page.index('id="accuracy"')]
    error = data["replays"]["int8"]["layer_errors"]["body.weight"]
    payload = data["replays"]["top-k"]["groups"]["head.weight"]["payload_bytes"]
    heads = re.findall(r"<th scope=\"col\"[^>]*>([^<]*)</th>", matrix)
    assert heads[:4] == ["layer", "int8", "top-k", "signs"]
    rows = re.findall(r"<tr><th scope=\"row\">(.*?)</th>(.*?)</tr>", matrix)
    cells = {re.sub("<[^>]+>", "", name): re.findall(r">([^<]*)</td>", row) for name, row in reversed(rows)}
    assert cells["body.weight"][0] == format_percent(error)
    assert '<a href="#layer-0">body.weight</a>' in matrix
    assert format_bytes(payload) in matrix
    own = Outline(page).words["layer-0"]
    assert all(plan in own for plan in PLANS)
    assert format_percent(error) in own


def test_shades_follow_the_values(report: tuple[dict[str, Any], str]) -> None:
    data, page = report
    errors = {plan: replay["layer_errors"]["body.weight"] for plan, replay in data["replays"].items()}
    row = re.search(r"body\.weight</a></th>(.*?)</tr>", page[page.index('id="layer-matrix"') :])[1]
    shades = [int(found[1]) if (found := re.search(r"--shade:(\d+)", cell)) else 0 for cell in row.split("</td>")[:3]]
    ordered = sorted(PLANS, key=errors.__getitem__)
    assert sorted(PLANS, key=lambda plan: shades[list(PLANS).index(plan)]) == ordered
    assert all(0 <= shade <= 100 for shade in shades)


def test_the_end_says_how_to_cite_and_the_id_follows_from_the_data(report: tuple[dict[str, Any], str]) -> None:
    data, page = report
    assert f"To cite it: gradlab {data['gradlab']}, report {data['id']}" in page
    rest = {key: value for key, value in data.items() if key != "id"}
    assert identified(rest)["id"] == data["id"]
    assert identified({**rest, "brief": "another"})["id"] != data["id"]
    assert set(data["versions"]) == {"gradlab", "python", "torch", "numpy"}


def test_values_are_read_off_a_figure(tmp_path: Path) -> None:
    """A point's place in the SVG, turned back by the panel's axes as the page's script does, is the value drawn."""
    drawn = {"linear": ([0.0, 1.0, 2.5], [3.0, -1.0, 7.0]), "log": ([1e-3, 1.0, 5e4], [2.0, 200.0, 9e3])}
    panels = [
        Panel(
            [lines(x, y, label=f"{scale} <line>"), points(x, y), rule(1)],
            "step",
            look={"xscale": scale, "yscale": scale},
        )
        for scale, (x, y) in drawn.items()
    ]
    with drawing():
        figure = draw(chart := Chart(panels, columns=2))
        svg = render(figure, "read", ("svg",))["svg"].decode()
        described = pointing(chart, figure)
    for number, (panel, (scale, (x, y))) in enumerate(zip(described, drawn.items(), strict=True)):
        assert panel["series"] == {f"series-{number}-0": f"{scale} <line>", f"series-{number}-1": ""}
        group = re.search(rf'<g id="series-{number}-0">(.*?)</g>', svg, re.DOTALL)[1]
        places = [tuple(map(float, pair)) for pair in re.findall(r"[ML] (\S+) (\S+)", group)]
        left, top, right, bottom = panel["box"]
        read = [
            (value(panel["x"], (at - left) / (right - left)), value(panel["y"], (bottom - up) / (bottom - top)))
            for at, up in places
        ]
        for (got_x, got_y), wanted_x, wanted_y in zip(read, x, y, strict=True):
            assert got_x == pytest.approx(wanted_x, rel=1e-2, abs=1e-2 if scale == "linear" else 0)
            assert got_y == pytest.approx(wanted_y, rel=1e-2, abs=1e-2 if scale == "linear" else 0)


def value(axis: dict[str, Any], share: float) -> float:
    """The value at a share of an axis."""
    if axis["scale"] == "linear":
        return axis["low"] + share * (axis["high"] - axis["low"])
    low, high = math.log10(axis["low"]), math.log10(axis["high"])
    return 10 ** (low + share * (high - low))
