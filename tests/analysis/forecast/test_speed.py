"""The report's first line: where which plan pays, and where not to compress; and the page that follows from it."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradlab.analysis.figures.chart import Chart, Mark, Panel, lines
from gradlab.analysis.forecast import Network
from gradlab.analysis.forecast.candidates import candidates, usual_plans
from gradlab.analysis.forecast.decide import COMPRESS, HALF, NOTHING
from gradlab.analysis.forecast.endings import MAX_LOSS
from gradlab.analysis.forecast.link import Link, spell_rate
from gradlab.analysis.forecast.network import NOT_MEASURED, CodecTime, Profile
from gradlab.analysis.forecast.speed import SpeedForecast, forecast_speed
from gradlab.analysis.replay import replay
from gradlab.analysis.report.examine import examine, replay_start
from gradlab.analysis.report.look import QUICK, Bounded, Look
from gradlab.analysis.report.page import inline_svg
from gradlab.analysis.report.trace_report import trace_sections, write_trace_report
from gradlab.errors import GradlabError
from gradlab.formatting import format_seconds
from gradlab.jsonable import plain
from gradlab.layout import Layer
from gradlab.plan import Plan
from support.recorded import random_gradients, record
from support.replayed import Replayed

LAYERS = (
    Layer("stem.weight", (16, 8, 3, 3), "convolution"),
    Layer("body.weight", (16, 16, 3, 3), "convolution"),
    Layer("head.weight", (10, 64), "linear"),
)
SLOW, FAST = Link(1e6, 1e-4), Link(1e12, 1e-6)
FEW = {name: candidates(LAYERS)[name] for name in ("16 bits", "blocks", "top-k")}  # searches are tested in test_search
COMPUTING = Profile(0.01, "as given")


def shown(page: Path, figure: str) -> list[dict[str, str]]:
    """Read the data of a report's figure: a row per value."""
    with (page.parent / "figures" / f"{figure}.csv").open() as file:
        return list(csv.DictReader(file))


def forecast_topk(
    cosine: float | None,
    nodes: tuple[int, ...] = (8,),
    profile: Profile = COMPUTING,
    **judged: Any,
) -> SpeedForecast:
    plans = {"top-k 1 %": Plan.uniform(LAYERS, "topk", density=0.01)}
    replayed = {"top-k 1 %": Replayed(cosine, **judged)}
    return forecast_speed(plans, replayed, Network([SLOW, FAST], nodes, profile))  # type: ignore[arg-type]


def test_the_verdict_says_what_to_take_on_each_link() -> None:
    forecast = forecast_topk(0.9999)
    slow, fast = forecast.configurations
    seconds = format_seconds(slow.seconds["top-k 1 %"])
    assert forecast.verdict.startswith(f"At 1 Mbit/s between 8 nodes take top-k 1 %: {seconds} a step instead of ")
    assert "in 9 of 10 trainings with a similar error (cosine 1.00)" in forecast.verdict
    assert " At 1 Tbit/s between 8 nodes do not compress: a step takes " in forecast.verdict
    assert [one.take for one in forecast.decisions] == [COMPRESS, NOTHING]
    assert (fast.fastest, fast.fastest_saves) == (None, 0.0)
    assert slow.fastest_saves == pytest.approx(1 - slow.seconds["top-k 1 %"] / slow.dense_seconds)
    assert slow.half_saves == pytest.approx(1 - slow.half_seconds / slow.dense_seconds)
    assert forecast.decisions[0].seconds == slow.seconds["top-k 1 %"]


def test_where_plain_16_bit_reduction_is_as_fast_it_is_taken() -> None:
    plans = {"16-bit floats": Plan.uniform(LAYERS, "cast")}
    forecast = forecast_speed(plans, {"16-bit floats": Replayed(1.0)}, Network([SLOW], (2,), COMPUTING))  # type: ignore[dict-item]
    assert forecast.configurations[0].no_faster_than_16_bits("16-bit floats")
    assert (forecast.decisions[0].take, forecast.decisions[0].refused) == (HALF, "")
    assert "take plain 16 bits: " in forecast.verdict


@pytest.mark.parametrize(("cosine", "memory"), [(-0.2, False), (0.49, True), (0.51, False), (0.94, True), (0.96, True)])
def test_the_fastest_plan_is_named_with_its_range_whatever_its_cosine(cosine: float, memory: bool) -> None:
    forecast = forecast_topk(cosine, memory=memory, length=4 if memory else 1)
    slow = forecast.configurations[0]
    judged = forecast.judged["top-k 1 %"]
    assert slow.fastest == "top-k 1 %"
    assert (slow.closest == "top-k 1 %") == judged.within(MAX_LOSS)
    assert f"oss: {judged.text}." in forecast.verdict
    assert judged.ended is None or judged.text.startswith(f"{judged.ended.text} in 9 of 10 trainings")
    assert ("over 4 steps" in forecast.verdict) == memory


def test_a_plan_whose_like_trained_as_dense_is_taken_before_a_faster_one() -> None:
    plans = {"top-k 1 %": Plan.uniform(LAYERS, "topk", density=0.01), "int8": Plan.uniform(LAYERS, "block_scaled")}
    replayed = {"top-k 1 %": Replayed(0.1, 4, memory=True), "int8": Replayed(0.9999)}
    forecast = forecast_speed(plans, replayed, Network([SLOW], (2,), COMPUTING))  # type: ignore[arg-type]
    (slow,), (found,) = forecast.configurations, forecast.decisions
    assert (slow.fastest, slow.closest, found.plan) == ("top-k 1 %", "int8", "int8")
    assert found.refused.startswith(f"top-k 1 % would save {100 * slow.fastest_saves:.0f} %, at a larger loss: ")
    assert slow.closest_saves == pytest.approx(1 - slow.seconds["int8"] / slow.dense_seconds)


def test_a_plan_that_was_not_replayed_is_named_as_unknown() -> None:
    forecast = forecast_topk(None)
    assert forecast.judged["top-k 1 %"].ended is None
    assert "what its update keeps is not known" in forecast.verdict
    assert forecast.configurations[0].closest is None


def test_the_verdict_names_what_limits_the_recording_once() -> None:
    verdict = forecast_topk(0.9, caution="only 8 steps are judged").verdict
    assert verdict.endswith(" Preliminary: only 8 steps are judged.")


def test_without_computing_time_nothing_is_promised() -> None:
    forecast = forecast_topk(0.9, profile=NOT_MEASURED)
    assert forecast.to_json()["compute_seconds"] is None
    verdict = forecast.verdict
    assert verdict.startswith(
        "Whether compression pays cannot be told without the time of computing (--compute-seconds"
    )
    assert "at 1 Mbit/s between 8 nodes the exchange alone takes" in verdict


def test_speeds_in_prose() -> None:
    assert [spell_rate(rate) for rate in (1e9, 2.5e10, 2e8, 9600.0, 1e12, 12.0)] == [
        "1 Gbit/s", "25 Gbit/s", "200 Mbit/s", "9.6 kbit/s", "1 Tbit/s", "12 bit/s",
    ]  # fmt: skip
    assert spell_rate(math.inf) == "an unlimited speed"


def test_a_reports_forecasts_have_the_codec_times_of_its_replays(tmp_path: Path) -> None:
    """Replays and forecasts once had times of their own, of other tensors, threads and moments."""
    with record(tmp_path / "t", random_gradients(0, 6, 2, LAYERS), LAYERS) as trace:
        plans = {name: plan for name, plan in usual_plans(trace.layers).items() if name in ("int8", "top-k 1 %")}
        replays = {name: replay(trace, plan) for name, plan in plans.items()}
    speed = forecast_speed(plans, replays, Network([SLOW], [2], COMPUTING))
    for name, plan in plans.items():
        groups = {group.name for group in plan.compressed_groups}
        job = speed.forecasts[name].nodes[0].job
        exchanges = [exchange for bucket in job.buckets for exchange in bucket.exchanges if exchange.name in groups]
        codec = replays[name].summary().codec_seconds
        assert codec is not None
        assert sum(exchange.codec_seconds for exchange in exchanges) == pytest.approx(codec)
        assert any(
            "median of the replay's 6 compressed steps on 2 ranks" in line for line in speed.forecasts[name].remarks
        )
    measured = Profile(0.01, "as given", CodecTime(0.5, 2, True, "a run"))
    of_a_run = forecast_speed(plans, replays, Network([SLOW], [2], measured))
    assert all("(a run)" in forecast.remarks[0] for forecast in of_a_run.forecasts.values())


def test_everything_of_a_small_trace(tmp_path: Path) -> None:
    """One page per question, the verdict first, a page per layer; every figure as data; a few hundred kilobytes."""
    metadata = {"batch_size": 16}
    with record(tmp_path / "t", random_gradients(0, 12, 2, LAYERS), LAYERS, metadata=metadata) as trace:
        assert replay_start(trace) == 0
        parts = ["payoff", "between", "noise", "limits"]  # the others are tested where they are measured
        network, look = Network([SLOW], [2], Profile(1.0, "as given")), Look(layer_figures=1)
        examination = examine(trace, network=network, parts=parts, families=FEW, look=look)
        page = write_trace_report(trace, tmp_path / "r", examination)
    data, text = json.loads((page.parent / "report.json").read_text()), page.read_text()
    rows = {row["name"]: row for row in data["frontier"]}
    assert set(data["replays"]) == set(data["payoff"]["judged"]) <= set(rows)
    assert {row["family"] for row in rows.values()} == set(FEW)
    for name, seconds in data["payoff"]["places"][0]["seconds"].items():
        judged = data["payoff"]["judged"][name]
        assert (rows[name]["seconds"], rows[name]["cosine"]) == (seconds, judged["cosine"])
    drawn = [row for row in shown(page, "frontier") if row["series"] in FEW]
    assert [float(row["x"]) for row in drawn] == pytest.approx([row["seconds"] for row in data["frontier"]], rel=1e-5)
    assert data["brief"].startswith("At 1 Mbit/s between 2 nodes take ")
    assert data["payoff"]["places"][0].keys() == {
        "nodes", "bits_per_second", "dense_seconds", "dense_way", "half_seconds", "seconds", "fastest",
        "fastest_saves", "closest", "closest_saves",
    }  # fmt: skip
    assert [layer["place"] for layer in data["between_nodes"]["layers"]] == [["first"], [], ["last"]]
    # In report.json as in memory.
    assert data["payoff"] == json.loads(json.dumps(plain(examination.speed)))
    for name, judged in data["payoff"]["judged"].items():
        summary = data["replays"][name]["summary"]
        assert (judged["cosine"], judged["memory"]) == (summary["judged_cosine"], summary["memory"])
        assert judged["length"] == (4 if judged["memory"] else 1)
        assert judged["ended"]["low"] <= judged["ended"]["middle"] <= judged["ended"]["high"]
    assert data["verdict"].count("these steps are of the beginning of training (iterations 0 to 11)") == 1
    assert data["noise_scale"]["batch_size"] == 16
    assert {row["plan"] for row in data["limits"]["plans"]} <= set(data["replays"])
    asked = ["pay", "payoff", "which", "layer-matrix", "accuracy", "replays", "gradients"]
    anchors = [*asked, "between", "noise", "limits", "within", "layers", "layer-0", "layer-1", "layer-2"]
    positions = [text.index(f'<section id="{name}"') for name in anchors]
    assert positions == sorted(positions)
    assert text.index(data["brief"].split(",")[0]) < positions[0]
    assert len(text) < 2_500_000
    claimed = [float(row["x"]) for row in shown(page, "lgc_claim") if row["series"] == "information of the pair"]
    histograms = [layer["histograms"]["4294967296"] for layer in data["between_nodes"]["layers"]]
    assert claimed == pytest.approx([np.mean(histogram["information"]) for histogram in histograms], rel=1e-5)


def test_a_quick_look_says_what_it_left_out(tmp_path: Path) -> None:
    """Fewer iterations, no PDF, a figure of each section: the first warning and report.json say so."""
    with record(tmp_path / "t", random_gradients(0, 40, 2, LAYERS), LAYERS) as trace:
        assert replay_start(trace, QUICK) == 32
        few = {name: FEW[name] for name in ("16 bits", "blocks")}
        examination = examine(trace, look=QUICK, parts=["payoff", "noise", "signs"], families=few)
        page = write_trace_report(trace, tmp_path / "r", examination)
    data, text = json.loads((page.parent / "report.json").read_text()), page.read_text()
    assert data["warnings"][0] == (
        "A quick look: spectra of 32 of 40 iterations, plans at fewer settings, signs of up to 12 iterations. "
        "Leave --quick out to judge more steps and settings."
    )
    assert data["look"]["quick"] is True
    assert len(data["spectrum"]["steps"]) == 32
    files = {path.suffix for path in (page.parent / "figures").iterdir()}
    assert (files, ".pdf" in text) == ({".svg", ".csv"}, False)
    assert all(section.split("</section>")[0].count("<figure>") <= 1 for section in text.split("<section")[1:])


def test_iterations_of_a_look_follow_from_their_values() -> None:
    bound = Bounded(fewest=4, most=100, values=1000)
    assert [bound.iterations(values) for values in (0, 10, 50, 10**6)] == [100, 100, 20, 4]


def test_named_plans_of_another_model_are_an_error(tmp_path: Path) -> None:
    other = Plan.uniform((Layer("else.weight", (64, 64), "linear"),), "cast", warmup_steps=0)
    with (
        record(tmp_path / "t", random_gradients(0, 10, 2, LAYERS), LAYERS) as trace,
        pytest.raises(GradlabError, match=r"else\.weight"),
    ):
        examine(trace, plans={"other": other})


def test_ranks_that_see_the_same_data_get_a_report_that_says_so(tmp_path: Path) -> None:
    gradients = [[step[0], step[0]] for step in random_gradients(3, 12, 1, LAYERS)]
    with record(tmp_path / "t", gradients, LAYERS) as trace:
        examination = examine(trace, parts=["between", "noise"])
    data = {"fit": None, "replays": {}, "spectrum": examination.spectrum.to_json(), **plain(examination.measured)}
    (gradients,) = trace_sections(data)
    answers = {section.name: section.answer for section in gradients.parts}
    assert "All ranks computed the same gradient: check that each of them sees data of its own." in gradients.answer
    assert "its interval lies above 0 in" in answers["between"]


def test_a_layer_that_is_never_finite_is_left_out_and_named(tmp_path: Path) -> None:
    gradients = random_gradients(3, 12, 2, LAYERS)
    for step in gradients:
        step[0]["body.weight"][0] = np.nan
    with record(tmp_path / "t", gradients, LAYERS) as trace:
        examination = examine(trace, parts=["noise", "signs"])
    assert examination.remarks[0] == "Never finite on all ranks, and left out: body.weight."
    assert [layer.layer.name for layer in examination.spectrum.layers] == ["stem.weight", "head.weight"]


def test_a_fitted_plan_is_proposed_by_what_came_after_its_fit(tmp_path: Path) -> None:
    with record(tmp_path / "t", random_gradients(0, 40, 2, LAYERS), LAYERS) as trace:
        plan = Plan.uniform(LAYERS, "topk", density=0.5, warmup_steps=0)
        provenance = {"trace": trace.digest, "fitted_on": list(range(30))}
        examination = examine(trace, plans={"fit": plan}, provenances={"fit": provenance}, parts=["payoff"])
    assert [step.iteration for step in examination.replays["fit"].judged] == list(range(30, 40))


def test_a_plan_that_compresses_nothing_does_not_take_the_others_along(tmp_path: Path) -> None:
    plans = {"identity": Plan(LAYERS), "cast": Plan.uniform(LAYERS, "cast", warmup_steps=0)}
    with record(tmp_path / "t", random_gradients(0, 12, 2, LAYERS), LAYERS) as trace:
        examination = examine(trace, plans=plans, parts=["payoff"], network=Network([SLOW], [2]))
    assert set(examination.speed.forecasts) == {"cast"}


def test_a_trace_of_one_rank_says_what_it_cannot(tmp_path: Path) -> None:
    with record(tmp_path / "t", random_gradients(0, 12, 1, LAYERS), LAYERS) as trace:
        examination = examine(trace, parts=["between", "limits"])
    assert any("one rank" in line for line in examination.remarks)
    assert examination.measured["limits"].layers
    assert "between_nodes" not in examination.measured


# --- figures as data --------------------------------------------------------------------------------------------------


def test_a_chart_is_written_value_by_value() -> None:
    heat = Mark("heat", y=[[1.0, 2.0], [3.0, None]])
    bars = Mark("bars", [2.0], [0], "a, b", ends=([1.0],))
    chart = Chart([Panel([lines([1, 2], [0.1, 1 / 3], label="line"), bars], title="t"), Panel([heat])])
    assert chart.csv().splitlines()[1:] == [
        "t,line,1,0.1,,,",
        "t,line,2,0.333333,,,",
        't,"a, b",2,0,1,,',
        "2,,0,0,,,1",
        "2,,1,0,,,2",
        "2,,0,1,,,3",
        "2,,1,1,,,",
    ]


def test_places_lose_digits_and_words_do_not() -> None:
    svg = b'<svg><path d="M 1.23456 -0.98765 L 2 3.5"/><text x="4.56789">0.00123</text></svg>'
    assert inline_svg(svg, "f", "t").endswith('<path d="M 1.23 -0.99 L 2 3.5"/><text x="4.57">0.00123</text></svg>')
