"""How many local steps, and which plan: the page of pseudo-gradients, and the sentence on recorded gradients."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradlab.analysis.forecast import Network
from gradlab.analysis.forecast.link import Link
from gradlab.analysis.forecast.local_endings import CODED, UNCOMPRESSED, ended_above, local_endings
from gradlab.analysis.forecast.local_speed import MOST_WAITING, NUMBERS, advise_local_steps
from gradlab.analysis.forecast.local_steps import forecast_local_steps
from gradlab.analysis.forecast.network import NOT_MEASURED, Profile
from gradlab.analysis.questions.pays import loss_chart
from gradlab.analysis.report.examine import examine
from gradlab.analysis.report.look import QUICK
from gradlab.analysis.report.trace_report import Examination, trace_sections, write_trace_report
from gradlab.artifact import Artifact
from gradlab.formatting import format_count, format_ratio
from gradlab.layout import Layer
from gradlab.plan import Plan
from gradlab.plan.optimizer_rules import layers_with_feedback
from support.command_line import Command
from support.recorded import random_gradients, record

RECORDED = 4
SLOW, FAST = Link(1e5, 1e-4), Link(1e12, 1e-6)
COMPUTING = Profile(0.2, "as given")
NO_FIGURES = replace(QUICK, figures=0)
LAYERS = (Layer("body.weight", (64, 64), "linear"), Layer("head.weight", (10, 64), "linear"))


def plans_of(layers: tuple[Layer, ...]) -> dict[str, Plan]:
    """One that loses next to nothing, and one that loses much."""
    few = Plan.uniform(layers, "topk", density=0.01, warmup_steps=0)
    return {"int8": Plan.uniform(layers, "block_scaled", dtype="int8", warmup_steps=0), "top-k 1 %": few}


@pytest.fixture(scope="module")
def pseudo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Examination, dict[str, Plan], dict[str, Any], str]:
    """What was measured of a small recording with local steps, its plans, report.json and report.html."""
    folder = tmp_path_factory.mktemp("local")
    metadata = {"local_steps": {"steps": RECORDED, "optimizer": "SGD"}}
    with record(folder / "trace", random_gradients(0, 3, 3, LAYERS), LAYERS, metadata=metadata) as trace:
        plans = plans_of(trace.model_layers)
        network = Network([SLOW, FAST], [4], COMPUTING)
        examination = examine(trace, plans=plans, network=network, parts=["payoff"], look=NO_FIGURES)
        page = write_trace_report(trace, folder / "report", examination)
    return examination, plans, json.loads((page.parent / "report.json").read_text()), page.read_text()


def test_numbers_are_those_of_the_forecast(pseudo: tuple[Examination, dict[str, Plan], dict[str, Any], str]) -> None:
    examination, plans, data, _ = pseudo
    written = data["local_steps"]
    assert (written["recorded"], written["numbers"]) == (RECORDED, sorted({*NUMBERS, RECORDED}))
    slow = written["places"][0]["plans"]
    assert list(slow) == [UNCOMPRESSED, *plans]
    for name, plan in plans.items():
        synchronous = examination.speed.forecasts[name]
        direct = forecast_local_steps(plan, synchronous.network, synchronous)[0]
        one, expected = slow[name], direct.to_json(written["numbers"])
        # Scans and shares of codec time are timed anew; on this link they are next to nothing.
        for key in ("compute", "dense", "compressed", "exchange", "dense_exchange"):
            assert one[key] == pytest.approx(expected[key], rel=0.05)
        assert one["close_to_computing_alone"] == pytest.approx(direct.close, rel=0.05, abs=1)
        assert one["least"] == pytest.approx(direct.least(MOST_WAITING), rel=0.05, abs=1)
        assert [step["seconds"] for step in one["steps"]] == pytest.approx(
            [step["seconds"] for step in expected["steps"]], rel=0.05
        )
        assert slow[UNCOMPRESSED]["exchange"] == direct.dense_exchange
        assert slow[UNCOMPRESSED]["compressed"] == direct.dense


def test_the_table_shows_ratios_to_computing(pseudo: tuple[Examination, dict[str, Plan], dict[str, Any], str]) -> None:
    examination, plans, data, text = pseudo
    known = {"spectrum": data["spectrum"], "fit": None, "replays": {}, "local_steps": examination.local_steps}
    pays = next(iter(trace_sections(known)))
    (section,) = (one for one in pays.parts if one.name == "local-steps")
    (table,) = section.tables
    assert table.columns[3:9] == ["every step", "H = 1", "H = 4 (recorded)", "H = 8", "H = 30", "H = 100"]
    assert len(table.rows) == 2 * (1 + len(plans))
    for row, times in zip(table.rows, examination.local_steps.configurations[0].plans.values(), strict=False):
        assert row[3] == format_ratio(times.compressed / times.compute)
        assert row[4:9] == [format_ratio(times.seconds(every) / times.compute) for every in (1, 4, 8, 30, 100)]
        assert row[9:] == [format_count(times.close), format_count(times.least(MOST_WAITING))]
    assert '<section id="local-steps"' in text
    assert section.answer in data["verdict"]


def test_losses_lie_over_the_time_that_their_steps_would_take(
    pseudo: tuple[Examination, dict[str, Plan], dict[str, Any], str],
) -> None:
    examination = pseudo[0]
    places = [one.plans[one.plan] for one in examination.local_steps.configurations]
    for place, panel in zip(places, loss_chart(places).panels, strict=True):
        drawn = {mark.label: mark for mark in panel.marks}
        for one in local_endings():
            if one.plan == UNCOMPRESSED:
                label = "every step" if one.every == 1 else f"H = {one.every}"
                for name, times in ((label, place.uncompressed), (f"{label}, plan", place)):
                    last = one.window * (len(one.course) - 0.5)
                    seconds = times.compressed if one.every == 1 else times.compute + times.exchange / one.every
                    assert drawn[name].x[-1] == pytest.approx(last * seconds)
                    assert drawn[name].y == one.course


def test_advice_flips_between_links(pseudo: tuple[Examination, dict[str, Plan], dict[str, Any], str]) -> None:
    examination, _, data, text = pseudo
    slow, fast = examination.local_steps.configurations
    assert (slow.plan, fast.plan, fast.local_steps) == ("int8", UNCOMPRESSED, 0)
    times = slow.plans["int8"]
    assert times.waits(slow.local_steps) <= MOST_WAITING < times.waits(slow.local_steps - 1)
    assert slow.plans["top-k 1 %"].least(MOST_WAITING) < slow.local_steps  # which loses too much
    verdict = data["verdict"]
    assert verdict.startswith(f"At 100 kbit/s between 4 nodes take H = {slow.local_steps} local steps, with int8: ")
    assert "; at 1 Tbit/s between 4 nodes take no local steps: synchronous training, uncompressed, waits" in verdict
    assert "known at the recorded H = 4 alone, and every local step costs accuracy of its own" in verdict
    assert verdict.count("Preliminary") == 1
    assert '<p class="answer">With an exchange in every step: at 100 kbit/s between 4 nodes' in text


def ordinary(folder: Path, link: Link, profile: Profile = COMPUTING) -> tuple[str, Examination]:
    """The verdict on recorded gradients, and what was measured."""
    with record(folder / "t", random_gradients(0, 6, 2, LAYERS), LAYERS) as trace:
        network = Network([link], [4], profile)
        examination = examine(trace, plans=plans_of(LAYERS), network=network, parts=["payoff"], look=NO_FIGURES)
        page = write_trace_report(trace, folder / "r", examination)
    assert ('<section id="local-steps"' in page.read_text()) == (examination.local_steps is not None)
    return json.loads((page.parent / "report.json").read_text())["verdict"], examination


def test_gradients_on_a_very_slow_link_name_local_steps(tmp_path: Path) -> None:
    verdict, examination = ordinary(tmp_path, Link(1e4, 1e-4))
    (only,) = examination.local_steps.configurations
    assert verdict.startswith("At 10 kbit/s between 4 nodes ")
    assert (
        "Where no plan brings waiting to 10 % of a step, local steps are the next thing to try: by forecast they bring "
        f"it there at 10 kbit/s between 4 nodes from H = {only.local_steps} on (int8). `EmulatedNodes` records"
        in verdict
    )
    direct = forecast_local_steps(
        plans_of(LAYERS)["int8"], examination.speed.network, examination.speed.forecasts["int8"]
    )
    assert only.local_steps == pytest.approx(direct[0].least(MOST_WAITING), rel=0.05)


@pytest.mark.parametrize(("link", "profile"), [(FAST, COMPUTING), (SLOW, NOT_MEASURED)])
def test_others_do_not(tmp_path: Path, link: Link, profile: Profile) -> None:
    verdict, examination = ordinary(tmp_path, link, profile)
    assert "local steps" not in verdict
    assert examination.local_steps is None


@pytest.mark.parametrize("steps", [0, -1, 10**12, True, 4.0, "4", None])
def test_a_number_that_is_none_is_not_believed(tmp_path: Path, steps: Any) -> None:
    metadata = {"local_steps": {"steps": steps, "optimizer": "SGD"}}
    with record(tmp_path / "t", random_gradients(0, 2, 2), metadata=metadata) as trace:
        assert (trace.local_step_count, trace.local_steps) == (None, "")


@pytest.mark.parametrize("link", [SLOW, Link(1e6, 1e-4), FAST])
@pytest.mark.parametrize("every", [None, 1, 30])
def test_as_few_local_steps_are_advised_as_waiting_allows(link: Link, every: int | None) -> None:
    best, plan = advise_local_steps(LAYERS, Network([link], [2], COMPUTING), every)
    times, dense = best.plans[best.plan], best.plans[UNCOMPRESSED]
    assert layers_with_feedback(plan) == ()
    assert bool(plan.groups) == (best.plan != UNCOMPRESSED)
    if every is None and best.local_steps:
        assert times.waits(best.local_steps) <= MOST_WAITING < dense.waits(0)
        assert best.local_steps == min(one.least(MOST_WAITING) for one in best.plans.values())
    elif every is None:
        assert (best.plan, dense.waits(0) <= MOST_WAITING) == (UNCOMPRESSED, True)
    else:
        assert best.local_steps == every
        assert (best.plan == UNCOMPRESSED) == (dense.waits(every) <= max(MOST_WAITING, best.plans[CODED].waits(every)))


def test_recommend_writes_the_plan_and_lines_of_local_steps(gradlab: Command, tmp_path: Path) -> None:
    with record(tmp_path / "t", random_gradients(0, 2, 2, LAYERS), LAYERS) as trace:
        told = ["--nodes", "2", "--compute-seconds", "20ms", "--out", str(tmp_path / "plan.safetensors")]
        ask = ["recommend", str(trace.path), *told, "--bandwidth"]
        code, seen, _ = gradlab(*ask, "100kbit", "--local-steps", "8")
        seen = " ".join(seen.split())
        assert code == 0
        assert seen.startswith("At 100 kbit/s between 2 nodes take H = 8 local steps, with ecsq, 0.5 bits: ")
        assert f'outer = OuterStep("{tmp_path / "plan.safetensors"}", model, every=8)' in seen
        plan = Artifact.load(tmp_path / "plan.safetensors").plan
        assert [group.codec for group in plan.groups] == ["ecsq"]
        assert "take no local steps" in " ".join(gradlab(*ask, "1000gbit", "--local-steps", "auto")[1].split())
        _, _, said = gradlab(*ask, "1mbit,1gbit", "--local-steps", "auto")
        assert "--local-steps: expected one link speed, and nodes of one rank" in said


def test_what_our_trainings_ended_at_is_that_of_the_page() -> None:
    page = (Path(__file__).parents[3] / "docs" / "local-steps.md").read_text()
    for every, nats in [*ended_above().items(), *ended_above(CODED).items()]:
        assert re.search(rf"H = {every}\b[^,.;]*\b{nats:.2f}\b", page), (every, nats)
