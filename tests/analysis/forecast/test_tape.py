"""What a report's page computes by its script, against what `gradlab predict` computes in Python."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from typing import Any

import pytest
import quickjs

from gradlab.analysis.forecast import Network, forecast
from gradlab.analysis.forecast.candidates import HALF_PLAN
from gradlab.analysis.forecast.decide import WORDS
from gradlab.analysis.forecast.endings import MAX_LOSS, ended_at, loss_limit_text
from gradlab.analysis.forecast.link import Link, spell_rate
from gradlab.analysis.forecast.local_steps import forecast_local_steps
from gradlab.analysis.forecast.network import Profile
from gradlab.analysis.forecast.plans import jobs
from gradlab.analysis.forecast.simulator import SHARDS, Node
from gradlab.analysis.forecast.speed import Judged, SpeedForecast, _configuration, forecast_speed
from gradlab.analysis.forecast.step_time import Job, compare
from gradlab.analysis.forecast.tape import forecast_tapes, job_tape
from gradlab.executor.ticks import SEGMENT_BYTES
from gradlab.formatting import format_percent, format_seconds
from gradlab.jsonable import plain
from gradlab.layout import Layer
from gradlab.plan import Plan

LAYERS = [
    *(Layer(f"matrix {n}", (200 + 37 * n, 150 + 11 * n), "linear") for n in range(6)),
    *(Layer(f"bias {n}", (40 + n,), "bias") for n in range(3)),
    Layer("large", (600, 500), "linear"),  # more than DDP's first bucket
]
# All kinds of requests: means, sums, gathers of equal, known and varying lengths, all-to-alls, broadcasts, rings.
PLANS: dict[str, dict[str, Any]] = {
    "powersgd": {"rank": 2},
    "topk": {"density": 0.01},
    "qsgd": {"bits": 4},
    "sign": {},
    "block_scaled": {"dtype": "int8"},
    "clt_k": {"density": 0.01},
    "threshold": {"density": 0.01},
    "intsgd": {},
    "ecsq": {"bits": 1.0},
    "identity": {"ring": True},
}
COMPUTE = 0.05
RATES, LATENCIES, COMPUTES = (1e7, 1e9, 1e11), (0.0, 1e-3), (0.004, 0.3)
NODES_OF = (None, Node(4, Link(1e11, 1e-5)), Node(8, Link(2e10, 1e-5, gather_factor=3.0)))


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    """Call functions of the page's script: `script(name, *arguments)`."""
    context = quickjs.Context()
    source = resources.files("gradlab.analysis.report").joinpath("scripts/forecast.js").read_text(encoding="utf-8")
    context.eval(source)

    def call(name: str, *arguments: Any) -> Any:
        given = ", ".join(json.dumps(plain(one)) for one in arguments)
        return json.loads(context.eval(f"JSON.stringify(gradlabForecast.{name}({given}))"))

    return call


def plan_of(codec: str) -> Plan:
    return Plan.uniform(LAYERS, codec, warmup_steps=0, **PLANS[codec])


def with_compute(job: Job, seconds: float) -> Job:
    def moved(buckets: Any) -> Any:
        return tuple(replace(one, ready_seconds=one.ready_seconds / COMPUTE * seconds) for one in buckets)

    return replace(job, compute_seconds=seconds, buckets=moved(job.buckets), dense_buckets=moved(job.dense_buckets))


def network_of(job: Job, link: Link, node: Node | None = None, cores: float = 2.0) -> dict[str, Any]:
    return {
        "compute": job.compute_seconds,
        "link": plain(link),
        "nodes": job.world_size,
        "cores": cores,
        "node": plain(node),
        "segmentBytes": SEGMENT_BYTES,
    }


@pytest.mark.parametrize("codec", PLANS)
def test_the_page_computes_what_predict_computes(script: Any, codec: str) -> None:
    """Over a grid of links, latencies, computing times, nodes, ranks per node, cores and algorithms: each codec takes
    other cells of it."""
    plan = plan_of(codec)
    for number, count in enumerate((1, 3, 8)):
        [timed] = jobs(plan, Network([Link(1e9)], [count], Profile(COMPUTE, "as given")), repeats=1)
        tape = job_tape(timed)
        grid = [*itertools.product(RATES, LATENCIES, COMPUTES, NODES_OF, (2.0, 1.0))]
        for rate, latency, seconds, node, cores in grid[(list(PLANS).index(codec) + 4 * number) % 13 :: 13]:
            link = Link(rate, latency, 0.06, 2e-10, 1e-5, 1.2)
            job, network = with_compute(timed, seconds), {}
            expected = compare(job, link, speed=min(1.0, max(1.0, cores) / 2), node=node)
            network = network_of(job, link, node, cores)
            mine, others = script("planStep", tape["buckets"], network), script("denseSteps", tape["dense"], network)
            for got, step in (
                (mine, expected.compressed),
                (others["dense"], expected.dense),
                (others["half"], expected.half),
            ):
                for name, value in dict(plain(step)).items():
                    assert got[name] == pytest.approx(value, rel=1e-4, abs=1e-5 * step.seconds), (name, network)
            assert others["way"] == expected.dense_way


def test_local_steps_are_predicts_too(script: Any) -> None:
    plan = plan_of("topk")
    for cores, rate in itertools.product((2.0, 1.0), (1e7, 1e9)):
        network = Network([Link(rate, 1e-4, 0.06, 2e-9)], [4], Profile(COMPUTE, "as given"), cores=cores)
        synchronous = forecast(plan, network)
        [local] = forecast_local_steps(plan, network, synchronous)
        # Codecs are timed anew for local steps: the page's exchange is that of the synchronous forecast.
        tape = job_tape(synchronous.nodes[0].job)
        of_page = network_of(synchronous.nodes[0].job, network.links[0], None, cores)
        for every, streaming in itertools.product((2, 30), (False, True)):
            times = script("stepTimes", {"topk": tape}, of_page, every, streaming)
            expected = local.seconds(every, streaming=streaming, dense=True)
            assert times["dense"] == pytest.approx(expected, rel=1e-6)
            assert times["plans"]["topk"] == pytest.approx(local.seconds(every, streaming=streaming), rel=0.2)


def test_16_bits_between_nodes_are_the_plan_that_carries_them(script: Any) -> None:
    """In the page as in a report: there PyTorch's hook would send every rank's gradients."""
    plans = {HALF_PLAN: Plan.uniform(LAYERS, "cast"), "topk": plan_of("topk")}
    for node in NODES_OF[:2]:
        network = Network([Link(1e8, 1e-4)], [4], Profile(COMPUTE, "as given"), node=node)
        found = forecast_speed(plans, {}, network)
        job = found.forecasts[HALF_PLAN].nodes[0].job
        tapes = {name: job_tape(one.nodes[0].job) for name, one in found.forecasts.items()}
        page = script("stepTimes", tapes, network_of(job, network.links[0], node))
        [place] = found.configurations
        assert page["half"] == pytest.approx(place.half_seconds, rel=1e-4)
        assert (place.half_seconds == place.seconds[HALF_PLAN]) == (node is not None)


def _judged(cosine: float, length: int) -> Judged:
    return Judged(cosine, length, False, ended_at(cosine, length, False))


def test_words_are_the_reports_own(script: Any) -> None:
    """The verdict of the page is the report's, for whatever network is chosen."""
    names = ("powersgd", "topk", "block_scaled")
    judged = {"powersgd": _judged(0.99, 1), "topk": _judged(0.4, 16), "block_scaled": Judged()}
    jobs_of = {}
    for name in names:
        [jobs_of[name]] = jobs(plan_of(name), Network([Link(1e9)], [8], Profile(COMPUTE, "as given")), repeats=1)
    words = {name: {"text": one.text, "allowed": one.within(MAX_LOSS)} for name, one in judged.items()}
    tapes = {name: job_tape(job) for name, job in jobs_of.items()}
    said = set()
    for rate, seconds in itertools.product((3e6, 1e8, 2e9, 1e12), (0.01, 0.4)):
        link, scaled = Link(rate, 1e-4), {name: with_compute(job, seconds) for name, job in jobs_of.items()}
        pairs = {name: compare(job, link) for name, job in scaled.items()}
        network = Network([link], [8], Profile(seconds, "as given"))
        expected = SpeedForecast(network, judged, {}, (_configuration(8, pairs, judged),)).verdict
        on = network_of(scaled["topk"], link)
        times = script("stepTimes", tapes, on)
        assert script("verdict", times, on, WORDS, words, loss_limit_text(MAX_LOSS)) == expected
        said.add(expected[:40])
    assert len(said) > 4


@pytest.mark.parametrize("value", [0.0, 3.2e-9, 4.56e-7, 1e-6, 9.996e-4, 0.0123, 0.9996, 1.5, 59.95, 119.0, 185.4])
def test_times_are_written_alike(script: Any, value: float) -> None:
    assert script("formatSeconds", value) == format_seconds(value)


@pytest.mark.parametrize("value", [0.0, 0.0004, 0.004, 0.123, 0.999, 1.0, -0.2])
def test_shares_are_written_alike(script: Any, value: float) -> None:
    assert script("formatPercent", value) == format_percent(value, 0)


@pytest.mark.parametrize("value", [500.0, 1e3, 9.996e5, 1e8, 2.5e9, 25e9, 1e13])
def test_rates_are_written_alike(script: Any, value: float) -> None:
    assert script("spellRate", value) == spell_rate(value)


def test_tapes_have_other_numbers_of_nodes() -> None:
    plans = {"topk": Plan.uniform(LAYERS[:2], "topk", warmup_steps=0, density=0.01)}
    network = Network([Link(1e9, 1e-4)], [6], Profile(COMPUTE, "as given"))
    known = {name: forecast(plan, network) for name, plan in plans.items()}
    tapes = forecast_tapes(plans, known)
    assert {name: list(of) for name, of in tapes["plans"].items()} == {name: [2, 4, 6, 8, 16, 32, 64] for name in plans}
    assert tapes["plans"]["topk"][6] == job_tape(known["topk"].nodes[0].job)
    json.dumps(tapes, allow_nan=False)
    unknown = forecast_tapes(plans, {"topk": forecast(plans["topk"], Network([Link(1e9)], [6]))})
    assert unknown is not None
    assert unknown["compute_seconds"] is None
    on_shards = replace(network, node=Node(2, Link(1e11, 1e-5), SHARDS))
    assert forecast_tapes(plans, {"topk": forecast(plans["topk"], on_shards)}) is None
