"""Steps with an exchange after every H of them: the formulas, and what is written of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradlab.analysis.forecast import Network, forecast
from gradlab.analysis.forecast.link import Link
from gradlab.analysis.forecast.local_steps import CLOSE, LocalSteps, forecast_local_steps
from gradlab.analysis.forecast.profile import CodecTime, Profile
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
        assert one.seconds(every, streaming=True) == max(compute, exchange / every)
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
    code, text, _ = gradlab(*words, "--json")
    result = json.loads(text)
    for one, node in zip(result["local_steps"], (4, 8), strict=True):
        assert (one["nodes"], one["bits_per_second"], one["compute"]) == (node, 5e7, 0.02)
        assert one["dense"] > one["dense_exchange"] > one["exchange"] > 0
        assert [step["local_steps"] for step in one["steps"]] == [8, 30]
        assert one["steps"][0]["seconds"] == pytest.approx(0.02 + one["exchange"] / 8)
    code, _, err = gradlab(*words[:-1], "8,x")
    assert (code, err) == (2, "gradlab: local steps 'x': expected whole numbers from 1, such as 8,30,100\n")


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
