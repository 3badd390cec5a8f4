"""Codecs' times on another processor follow from what was timed there."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from gradlab import codecs
from gradlab.analysis.forecast import Network, forecast
from gradlab.analysis.forecast.diagnosis import read_processor
from gradlab.analysis.forecast.link import Link
from gradlab.analysis.forecast.network import Profile
from gradlab.analysis.forecast.processors import CPU, Processor, copy_speed, exchange_seconds, timed
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan import Plan
from support.laws import law

SLOW = Processor("slow", False, 1e9, {"sign": (1.0, 2.0), "topk": (1e-3, 1.0), "powersgd": (1e-3, 1.0)})
LAYERS = [Layer(f"w{at}", (200, 300), "linear") for at in range(12)]


@law(st.floats(1e-6, 1), st.floats(0, 10))
def test_times_of_the_timed_layers_come_out_as_they_were(fixed: float, slope: float) -> None:
    small, large = exchange_seconds("sign", CPU, False)
    there = replace(SLOW, exchanges={"sign": (fixed, fixed + slope * (large - small))})
    for here, expected in zip((small, large), there.exchanges["sign"], strict=True):
        assert there.seconds("sign", here) == pytest.approx(expected, rel=1e-6)
    assert there.seconds("sign", 3 * large) >= there.seconds("sign", large)


def test_a_codec_that_was_not_timed_takes_the_median_of_the_others() -> None:
    here = sum(exchange_seconds("qsgd", CPU, False)) / 2
    assert SLOW.seconds("qsgd", here) == sorted(SLOW.seconds(name, here) for name in SLOW.exchanges)[1]


def test_a_forecast_takes_the_processors_times_and_a_gpus_groups() -> None:
    """A thousand times as fast as here, with a launch's cost a group: what is left is that cost for each group."""
    plan, profile = Plan.uniform(LAYERS, "topk", group_bytes=0), Profile(0.1, "as given")
    here = {name: exchange_seconds(name, CPU, True) for name in ("topk",)}
    gpu = Processor("gpu", True, 1e18, {name: (1e-3, 1e-3 + (b - a) / 1e6) for name, (a, b) in here.items()})
    network = Network([Link(1e9)], [4], profile, processor=gpu)
    [found] = forecast(plan, network).nodes
    assert found.job.codec_seconds == pytest.approx(1e-3, rel=0.01)
    assert found.job.engine_seconds < 1e-6
    cpu = replace(gpu, accelerator=False)
    [apart] = forecast(plan, replace(network, processor=cpu)).nodes
    assert apart.job.codec_seconds > 10e-3  # twelve groups
    assert found.links[0].compressed.seconds < apart.links[0].compressed.seconds
    crowded = [replace(network, cores=0.5, processor=one) for one in (gpu, cpu)]
    assert [(one.speed, one.crowding) for one in (network, *crowded)] == [(0.5, 1.0), (0.5, 1.0), (0.5, 2.0)]
    assert replace(network, processor=cpu).speed == 1.0


def test_every_codec_that_needs_no_fit_is_timed() -> None:
    found = timed(CPU)
    assert (found.name, found.accelerator, found.copy_bytes_per_second) == ("cpu", False, copy_speed(CPU))
    assert set(codecs.names()) - set(found.exchanges) == {"identity"}
    assert all(0 < seconds < 10 for pair in found.exchanges.values() for seconds in pair)
    assert Processor(**json.loads(json.dumps(found.to_json()))).exchanges.keys() == found.exchanges.keys()


@pytest.mark.parametrize(
    "wrong",
    [
        {"exchanges": {}},
        {"exchanges": []},
        {"exchanges": {"topk": [1.0]}},
        {"exchanges": {"topk": [1.0, math.inf]}},
        {"exchanges": {"topk": [0.0, 1.0]}},
        {"exchanges": {"nobody's": [1.0, 1.0]}},
        {"copy_bytes_per_second": -1},
        {"copy_bytes_per_second": "fast"},
        {"name": None, "exchanges": {"topk": ["a", "b"]}},
    ],
)
def test_a_file_with_an_impossible_processor_is_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "link.json"
    sound = SLOW.to_json()
    path.write_text(json.dumps({"processor": sound}))
    assert read_processor(path) == replace(SLOW, exchanges=dict(SLOW.exchanges))
    path.write_text(json.dumps({"link": {}}))
    assert read_processor(path) is None
    path.write_text(json.dumps({"processor": {**sound, **wrong}}))
    with pytest.raises(GradlabError, match=r"link\.json: its processor has no times of codecs"):
        read_processor(path)
