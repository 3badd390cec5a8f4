"""What a run shows of itself: chrome trace, report, table, numbers for a logger."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradlab.analysis.figures.drawn import draw
from gradlab.analysis.figures.style import drawing, render
from gradlab.analysis.questions.timeline import timelines_chart
from gradlab.chrome_trace import LANES, read_step
from gradlab.errors import GradlabError
from gradlab.executor import PlanRun
from gradlab.layout import Layer
from gradlab.plan import Group, Plan
from gradlab.runtime.engine.statistics import Place, StepRecord
from gradlab.runtime.run_report import scalars, summarize_run, table
from gradlab.runtime.timeline import Timeline
from support.process_pool import ProcessPool

# Bases are drawn at random: compression from the first iteration on, with nothing fitted.
RING = {"ratio": 4.0, "complement": 1.0, "slice_size": 12, "whitening": False, "ring": True, "warmup_steps": 0}


def test_one_step_is_seen_whole(pool: ProcessPool) -> None:
    for rank, seen in enumerate(pool.run("jobs.ddp_tasks:chrome_trace", 2)):
        spans = [event for event in seen["events"] if event["ph"] == "X"]
        assert {event["pid"] for event in seen["events"]} == {rank}
        assert {event["args"]["step"] for event in spans} == {4}
        by_row = {LANES[min(event["tid"], 3)] for event in spans}
        assert by_row == set(LANES)
        assert sum("ready" in event["name"] for event in spans) == seen["buckets"]
        rounds = [event for event in spans if event["tid"] >= LANES.index("network")]
        assert {event["name"] for event in rounds} == {"all-reduce"}
        encodes = [event for event in spans if event["name"].startswith("encode")]
        waits = [event["ts"] for event in spans if event["name"] == "wait"]
        # One under the other: what is encoded after a collective began, and before one is waited for.
        assert any(r["ts"] < e["ts"] and not any(r["ts"] < w < e["ts"] for w in waits) for r in rounds for e in encodes)
        json.dumps(seen["events"], allow_nan=False)


@pytest.mark.parametrize(("codec", "settings"), [("qsgd", {"bits": 4}), ("identity", {})])
def test_a_ring_prepares_its_segments_while_others_travel(
    pool: ProcessPool, codec: str, settings: dict[str, object]
) -> None:
    """Algorithm 1, lines 5 and 6: the download of one and the compression of the next at the same time."""
    arguments = {"codec": codec, "settings": {**settings, "ring": True}}
    for seen in pool.run("jobs.ddp_tasks:chrome_trace", 3, **arguments):
        spans = [event for event in seen["events"] if event["ph"] == "X"]
        hops = [event for event in spans if event["name"] == "ring"]
        prepared = [event for event in spans if event["name"] == "prepare a ring's segment"]
        assert len(hops) % (2 * (3 - 1)) == 0 < len(hops)
        inside = [
            p for p in prepared if any(h["ts"] <= p["ts"] and p["ts"] + p["dur"] <= h["ts"] + h["dur"] for h in hops)
        ]
        assert len(inside) == len(prepared) * 2 / 3  # all but the first segment of each ring


def test_a_trace_is_read_again_and_drawn(pool: ProcessPool, tmp_path: Path) -> None:
    """Hidden is what of the network lies under computing or coding, counted here microsecond by microsecond."""
    file = tmp_path / "spans.json"
    seen = pool.run("jobs.ddp_tasks:chrome_trace", 3, codec="gradiveq", settings=RING)
    other = {"ph": "X", "pid": 7, "tid": 0, "name": "another program's", "ts": 0, "dur": 1}
    file.write_text(json.dumps([other, *(event for rank in seen for event in rank["events"])]))
    for rank in range(3):
        step = read_step(file, rank)
        assert (step.step, step.rank) == (4, rank)
        events = [e for e in seen[rank]["events"] if e["ph"] == "X"]
        first = min(e["ts"] for e in events)

        def during(rows: Iterable[int], events: list[dict[str, Any]] = events, first: float = first) -> np.ndarray:
            busy = np.zeros(10_000_000, bool)
            for e in events:
                if e["tid"] in rows:
                    busy[round(e["ts"] - first) : round(e["ts"] - first + e["dur"])] = True
            return busy

        times, slack = step.times, 2e-6 * len(events)
        network = during(range(3, 99))
        assert times.network_seconds == pytest.approx(network.sum() / 1e6, abs=slack)
        assert times.hidden_seconds == pytest.approx((network & during((0, 1))).sum() / 1e6, abs=slack)
        assert times.hidden_seconds + times.exposed_seconds == pytest.approx(times.network_seconds)
        assert times.seconds == pytest.approx((max(e["ts"] + e["dur"] for e in events) - first) / 1e6, abs=slack)
    with drawing():
        figure = draw(timelines_chart({"one": read_step(file, 0), "two": read_step(file, 1)}))
        assert [panel.get_title("left").split(":")[0] for panel in figure.axes] == ["one", "two"]
        legend = {text.get_text() for text in figure.legends[0].get_texts()}
        assert {"backward", "encode", "decode", "a ring's segment", "network"} <= legend
        assert set(render(figure, "timeline")) == {"svg", "pdf"}


@pytest.mark.parametrize(
    ("content", "rank", "step", "message"),
    [
        ("{", 0, None, "spans.json is not JSON: expected a chrome trace"),
        ('{"events": []}', 0, None, "spans.json: not a chrome trace"),
        ("[3]", 0, None, "spans.json: not a chrome trace"),
        ("[" * 100_000, 0, None, "more than 25000 values: expected a chrome trace"),
        ("[]", 0, None, "no spans of gradlab's engine"),
        (None, 1, None, r"rank 1 is not in it, there are \[0\]"),
        (None, 0, 5, r"iteration 5 of rank 0 is not in it, there are \[3\]"),
        ("nan", 0, None, "not a chrome trace"),
    ],
)
def test_files_that_hold_no_such_iteration(
    tmp_path: Path, content: str | None, rank: int, step: int | None, message: str
) -> None:
    timeline = Timeline([3])
    timeline.begin(3)
    timeline.add("wait", "wait", 1.0, 2.0)
    sound = json.dumps({"traceEvents": timeline.events(0)})
    file = tmp_path / "spans.json"
    text = content if content not in (None, "nan") else sound
    file.write_text(text.replace('"dur": ', '"dur": NaN, "was": ') if content == "nan" else text)
    with pytest.raises(GradlabError, match=message):
        read_step(file, rank, step)


def test_report_table_and_scalars_agree(pool: ProcessPool) -> None:
    for seen in pool.run("jobs.ddp_tasks:chrome_trace", 2):
        report, scalars = seen["report"], seen["scalars"]
        assert seen["errors"] == [True, False] * 3
        assert [row["group"] for row in report["groups"]] == ["0.weight", "3.weight", "6.weight", "8.weight"][
            -len(report["groups"]) :
        ]
        compressed = sum(row["payload_bytes_per_step"] for row in report["groups"])
        assert 0 < compressed < report["payload_bytes_per_step"] == scalars["gradlab/payload_bytes"]
        assert {row["codec"] for row in report["groups"]} == {"powersgd+error_feedback"}
        for row in report["groups"]:
            assert row["encode_seconds"] > 0 < row["decode_seconds"]
            assert 0 < row["relative_error"] < 1
            assert row["residual_norm"] > 0
            assert row["group"] in seen["table"]
            assert f"gradlab/relative_error/{row['group']}" in scalars
        assert report["encode_seconds"] + report["decode_seconds"] <= report["compress_seconds"]
        assert all(type(value) is float for value in scalars.values())
        assert scalars["gradlab/compression_ratio"] == report["compression_ratio"]
        assert scalars["gradlab/ratio_to_16_bits"] == report["ratio_to_16_bits"]


def test_a_report_says_the_same_typed_and_as_json() -> None:
    layer, place = Layer("a", (4,), "vector"), Place(1, 2, lambda _: 8.0, 16, 8)
    plan = Plan((layer,), (Group("a", ("a",), "topk", {"density": 0.5}),))
    step = StepRecord(
        0,
        True,
        payload_bytes=8,
        wire_bytes=8,
        errors={"a": (math.inf, 1.0)},
        group_payload_bytes={"a": 8},
        group_seconds={"a": (1, 2)},
    )
    report = summarize_run(PlanRun(plan, 1, 2), [step], place, None)
    written = report.to_json()
    json.dumps(written, allow_nan=False)
    assert report.saving.ratio == written["compression_ratio"] == 2.0
    assert report.saving.ratio_to_16_bits == written["ratio_to_16_bits"] == 1.0
    assert "2.00x (1.00x vs 16 bits)" in table(report)
    assert report.summary.means is not None
    assert report.summary.means.relative_error_by_layer == {"a": math.inf}
    assert written["relative_error_by_layer"] == {"a": None}
    assert written["groups"] == [row.to_json() for row in report.groups]
    bare = summarize_run(PlanRun(plan, 1, 2), [], place, None).to_json()
    assert (bare["steps"], bare["compression_ratio"], bare["ratio_to_16_bits"]) == (0, None, None)
    assert bare["groups"] == [{"group": "a", "codec": "topk", "layers": ["a"]}]
    assert not {"wait_seconds", "payload_bytes_per_step"} & set(bare)


def test_nothing_is_kept_of_other_steps() -> None:
    timeline = Timeline([3])
    for step in range(5):
        timeline.begin(step)
        timeline.add("wait", "wait", step, step + 0.5)
    assert [span.step for span in timeline.spans] == [3]


def test_collectives_that_travel_at_once_get_rows_of_their_own() -> None:
    timeline = Timeline([0])
    timeline.begin(0)
    for start, stop in ((0, 2), (1, 3), (2, 4), (5, 6)):
        timeline.add("network", "all-reduce", start, stop)
    rows = [event["tid"] - LANES.index("network") for event in timeline.events(0) if event["ph"] == "X"]
    assert rows == [0, 1, 0, 0]


def test_scalars_before_the_first_step() -> None:
    assert scalars([], Place(0, 2, lambda _: 8.0, 16, 8)) == {}
