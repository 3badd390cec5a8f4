"""Steps with an exchange after every H of them: the formulas, and what is written of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradlab.analysis.forecast import Network, forecast
from gradlab.analysis.forecast.link import Link
from gradlab.analysis.forecast.local_endings import ended_above
from gradlab.analysis.forecast.local_steps import CLOSE, LocalSteps, forecast_local_steps
from gradlab.analysis.forecast.network import CodecTime, Profile
from gradlab.artifact import Artifact
from gradlab.layout import Layer
from gradlab.plan import Plan
from support.command_line import Command

seconds = st.floats(1e-4, 1e3)


@given(seconds, seconds, seconds, seconds, seconds)
def test_break_even_is_the_least_number(
    compute: float, dense: float, compressed: float, exchange: float, dense_exchange: float
) -> None:
    one = LocalSteps(4, 1e9, compute, compute + dense, compute + compressed, exchange, dense_exchange)
    synchronous = compute + min(dense, compressed)
    tenth = (one.least(0.1), compute / 0.9)
    for least, limit in ((one.break_even, synchronous), (one.close, CLOSE * compute), tenth):
        assert one.seconds(least) <= limit * (1 + 1e-6)
        assert least == 1 or one.seconds(least - 1) > limit * (1 - 1e-6)
    for every in (1, 8, 30):
        assert one.seconds(every) == pytest.approx(compute + exchange / every)
        assert one.seconds(every, streaming=True) == pytest.approx(max(compute, exchange / every))
        busy = replace(one, work=exchange / 2, dense_work=dense_exchange / 3)
        assert busy.seconds(every) == one.seconds(every)
        beside = min(1, every * compute / exchange)
        busy_step = max(compute + beside * exchange / 2 / every, exchange / every)
        assert busy.seconds(every, streaming=True) == pytest.approx(busy_step)
        beside = min(1, every * compute / dense_exchange)
        dense_step = max(compute + beside * dense_exchange / 3 / every, dense_exchange / every)
        assert busy.seconds(every, streaming=True, dense=True) == pytest.approx(dense_step)
        assert one.seconds(every, dense=True) == one.uncompressed.seconds(every)
        assert one.uncompressed.seconds(every) == pytest.approx(compute + dense_exchange / every)
        assert one.waits(every) == pytest.approx(1 - compute / (compute + exchange / every))
    assert one.waits(0) == pytest.approx(compressed / (compute + compressed))
    assert one.uncompressed.compressed == one.dense


def test_predict_writes_what_it_prints(gradlab: Command, tmp_path: Path) -> None:
    plan = Plan.uniform([Layer("wide", (400, 500), "linear")], "block_scaled", dtype="int4")
    Artifact(plan).save(tmp_path / "plan.safetensors")
    words = ["predict", tmp_path / "plan.safetensors", "--nodes", "4,8", "--bandwidth", "50mbit"]
    words += ["--compute-seconds", "20ms", "--local-steps", "8,30"]
    code, text, _ = gradlab(*words)
    assert (code, text.count("local steps break even at H = ")) == (0, 2)
    assert f" {ended_above()[8]:.2f} " in text
    code, text, _ = gradlab(*words, "--json")
    result = json.loads(text)
    for one, node in zip(result["local_steps"], (4, 8), strict=True):
        assert (one["nodes"], one["bits_per_second"], one["compute"]) == (node, 5e7, 0.02)
        assert one["dense"] > one["dense_exchange"] > one["exchange"] > 0
        assert [step["local_steps"] for step in one["steps"]] == [8, 30]
        assert one["steps"][0]["seconds"] == pytest.approx(0.02 + one["exchange"] / 8)
    code, _, err = gradlab(*words[:-1], "8,x")
    wanted = "expected numbers from 1 with commas between them, such as 2,8,64"
    assert (code, err) == (2, f"gradlab: --local-steps '8,x': {wanted}\n")


@pytest.mark.parametrize(("cores", "lacking"), [(2.0, 0.0), (1.5, 0.5), (1.0, 1.0), (0.5, 1.0)])
def test_streaming_takes_processors_from_computing_as_far_as_cores_lack(cores: float, lacking: float) -> None:
    plan = Plan.uniform([Layer("wide", (400, 500), "linear")], "block_scaled", dtype="int4", warmup_steps=0)
    link = Link(1e8, 1e-4, host_seconds_per_byte=5e-8)
    codec = CodecTime(0.01, 4, True, "a run")  # of an exchange, as long as it takes on crowded cores
    network = Network([link], [4], Profile(0.02, "as given", codec), cores=cores)
    [one] = forecast_local_steps(plan, network, forecast(plan, network))
    sent = 2 * 3 / 4 * 4 * 400 * 500  # by a ring of four
    assert one.dense_work == pytest.approx(lacking * 5e-8 * sent)
    assert one.work == pytest.approx(
        lacking * (0.01 + 5e-8 * forecast(plan, network).nodes[0].links[0].compressed.wire_bytes)
    )


def test_a_plan_that_compresses_nothing_is_plain_averaging(gradlab: Command, tmp_path: Path) -> None:
    layers = (Layer("wide", (400, 500), "linear"),)
    plan, other = Plan(layers), Plan.uniform(layers, "block_scaled", warmup_steps=0)
    network = Network([Link(5e7, 1e-4)], [4, 8], Profile(0.02, "as given", CodecTime(0.01, 4, False, "a replay")))
    forecasts = forecast_local_steps(plan, network, forecast(plan, network, uncompressed=True))
    assert [one.uncompressed for one in forecasts] == forecasts
    assert forecasts == [one.uncompressed for one in forecast_local_steps(other, network, forecast(other, network))]
    Artifact(plan).save(tmp_path / "plan.safetensors")
    words = ["predict", tmp_path / "plan.safetensors", "--nodes", "4,8", "--bandwidth", "50mbit,unlimited"]
    words += ["--compute-seconds", "20ms"]
    code, text, _ = gradlab(*words, "--local-steps", "30", "--json")
    result = json.loads(text)
    assert (code, result["method"]) == (0, "uncompressed")
    slow, unlimited, *_ = result["local_steps"]
    assert slow["steps"][0]["seconds"] == forecasts[0].seconds(30)
    assert unlimited["bits_per_second"] == "unlimited"
    code, _, err = gradlab(*words)
    assert (code, err) == (2, "gradlab: this plan compresses nothing: its steps are those of plain DDP\n")
