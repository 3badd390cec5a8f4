"""The part of a report that computes in the page: its data, and that the page is whole without it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
import quickjs

from gradlab.analysis.forecast import Network
from gradlab.analysis.forecast.link import Link
from gradlab.analysis.forecast.network import NOT_MEASURED, Profile
from gradlab.analysis.forecast.simulator import SHARDS, Node
from gradlab.analysis.report.examine import examine
from gradlab.analysis.report.look import QUICK
from gradlab.analysis.report.trace_report import Examination, playable_data, write_trace_report
from gradlab.layout import Layer
from gradlab.plan import Plan
from gradlab.trace import Trace
from support.recorded import random_gradients, record

LAYERS = (Layer("body.weight", (96, 80), "linear"), Layer("head.weight", (10, 96), "linear"))
HOSTILE = "</script><b>"
PLANS = {
    "int8": Plan.uniform(LAYERS, "block_scaled", dtype="int8", warmup_steps=0),
    HOSTILE: Plan.uniform(LAYERS, "topk", density=0.01, warmup_steps=0),
}
COMPUTING = Profile(0.02, "as given")
LINKS = (Link(1e6, 1e-4), Link(1e9, 1e-4))


class Scripts(HTMLParser):
    """The scripts of a page, as a browser finds their ends."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.tags: set[str] = set()
        self._inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self._inside = tag == "script"
        self.scripts += [""] * self._inside

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts[-1] += data


def examined(trace: Trace, profile: Profile, node: Node | None = None) -> Examination:
    network = Network(LINKS, [4], profile, node=node)
    return examine(trace, plans=PLANS, network=network, parts=["payoff"], look=QUICK, for_page=True)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trace]:
    with record(tmp_path_factory.mktemp("playable") / "t", random_gradients(0, 12, 2, LAYERS), LAYERS) as opened:
        yield opened


@pytest.fixture(scope="module")
def report(trace: Trace) -> tuple[dict[str, Any], Scripts, str]:
    """A report: report.json, its page's scripts, and the page."""
    path = write_trace_report(trace, trace.path.parent / "report", examined(trace, COMPUTING))
    page = path.read_text(encoding="utf-8")
    return json.loads((path.parent / "report.json").read_text()), Scripts(page), page


def test_the_pages_numbers_are_the_reports(report: tuple[dict[str, Any], Scripts, str]) -> None:
    data, page, _ = report
    tapes, *_, forecast, _ = page.scripts
    play, context = json.loads(tapes), quickjs.Context()
    context.eval(forecast)
    for place in data["payoff"]["places"]:
        link = {**play["link"], "bits_per_second": place["bits_per_second"]}
        network = {"compute": play["compute_seconds"], "link": link, "nodes": 4, "cores": play["cores"], "node": None}
        network["segmentBytes"] = play["segment_bytes"]
        at_four = {name: plan["tapes"]["4"] for name, plan in play["plans"].items()}
        call = f"JSON.stringify(gradlabForecast.stepTimes({json.dumps(at_four)}, {json.dumps(network)}))"
        times = json.loads(context.eval(call))
        assert times["dense"] == pytest.approx(place["dense_seconds"], rel=1e-4)
        assert times["half"] == pytest.approx(place["half_seconds"], rel=1e-4)
        assert times["plans"] == pytest.approx(place["seconds"], rel=1e-4)


def test_names_from_files_end_no_script(report: tuple[dict[str, Any], Scripts, str]) -> None:
    _, page, _ = report
    tapes, figures, *code = page.scripts
    assert "payoff" in json.loads(figures)
    assert set(json.loads(tapes)["plans"]) == set(PLANS)
    assert [text.split("\n")[1][:2] for text in code] == ["//"] * 5
    assert "b" not in page.tags


def test_the_page_needs_no_network_and_stands_without_script(report: tuple[dict[str, Any], Scripts, str]) -> None:
    _, _, page = report
    assert not re.findall(r"(?:src|href)=\"(?!#|figures/)[^\"]*\"", page)
    assert not re.findall(r"https?://(?!www\.w3\.org)", page)
    assert '<div id="play" hidden>' in page
    assert "Step times" in page
    assert len(page.encode()) < 3e6


def test_without_a_computing_time_the_page_asks_for_one(trace: Trace) -> None:
    data = playable_data(examined(trace, NOT_MEASURED), trace.path)
    assert data is not None
    assert data["compute_seconds"] is None


def test_plans_that_run_on_shards_are_not_played_with(trace: Trace) -> None:
    assert playable_data(examined(trace, COMPUTING, Node(2, Link(1e11, 1e-5), SHARDS)), trace.path) is None
