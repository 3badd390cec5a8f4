"""Curves of settings, searched by replay: the answer of an exhaustive search, in few replays."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradlab.analysis.forecast import Network
from gradlab.analysis.forecast.candidates import candidates, usual_plans, without
from gradlab.analysis.forecast.frontier import GIVEN, Trial, try_plans
from gradlab.analysis.forecast.link import Link
from gradlab.analysis.forecast.network import Profile
from gradlab.analysis.forecast.search import SEARCH_STEPS, Measured, bracket, measured, next_place, search
from gradlab.analysis.replay import replay_plans
from gradlab.layout import Layer
from gradlab.plan import Plan
from gradlab.trace import Trace
from support.recorded import random_gradients, record

LAYERS = (Layer("body.weight", (48, 40), "linear"), Layer("head.weight", (10, 48), "linear"))
NETWORK = Network([Link(1e7, 1e-4)], (4,), Profile(0.01, "as given"))


def searched(curve: Sequence[Measured], start: int) -> dict[int, Measured]:
    known: dict[int, Measured] = {}
    while (place := next_place(known, len(curve), start)) is not None:
        assert place not in known
        known[place] = curve[place]
    return known


@given(st.integers(1, 20).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(0, n - 1))))
def test_a_monotone_curve_is_bisected(case: tuple[int, int, int]) -> None:
    count, inside, start = case
    known = searched([Measured(place < inside, 0.01 * place) for place in range(count)], start)
    assert bracket(known, count) == (inside - 1, inside)
    assert {place for place in (inside - 1, inside) if 0 <= place < count} <= set(known)  # and its riskier neighbour
    assert len(known) <= 1 + math.ceil(math.log2(count + 1))


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1)), min_size=1, max_size=9), st.data())
def test_a_curve_that_is_not_monotone_ends_at_the_safest_bracket(
    curve: list[tuple[bool, float]], data: st.DataObject
) -> None:
    """Where a smaller error was seen behind a larger one, every setting up to the limit was replayed and is within."""
    start = data.draw(st.integers(0, len(curve) - 1))
    known = searched([Measured(*one) for one in curve], start)
    limit, outside = bracket(known, len(curve))
    assert outside == limit + 1
    assert all(known[place].within for place in known if place <= limit)
    errors = [known[place].error for place in sorted(known)]
    if any(later < 0.9 * earlier for earlier, later in pairwise(errors)):
        oracle = next((place for place, (within, _) in enumerate(curve) if not within), len(curve)) - 1
        assert limit == oracle


def test_settings_of_a_family_send_ever_fewer_bytes() -> None:
    layers = (Layer("w", (512, 512), "linear"), Layer("b", (512,), "bias"))
    families = candidates(layers)
    names = [one.name for family in families.values() for one in family.candidates]
    assert len(set(names)) == len(names)
    half = families["16 bits"].candidates[0].plan.payload_bytes(2)
    for family in families.values():
        sent = [one.plan.payload_bytes(2) for one in family.candidates]
        assert sent == sorted(sent, reverse=True)
        assert len(sent) == 1 or sent[0] < half
    assert {"ecsq 1 bit", "PowerSGD rank 1", "QSGD 2 bits, max norm", "int4", "top-k 0.1 %"} <= set(names)
    starts = {family.candidates[family.start].name for family in families.values()}
    assert starts == set(usual_plans(layers))
    coarse = candidates(layers, coarse=True)
    assert {family.candidates[family.start].name for family in coarse.values()} == starts
    assert candidates((Layer("bias", (3,), "bias"),)).keys() <= families.keys()


def test_what_is_left_out_moves_no_start() -> None:
    families = candidates(LAYERS)
    curve = families["QSGD"]
    left = without(families, [curve.candidates[0].name, families["16 bits"].candidates[0].name])
    assert left["QSGD"].candidates[left["QSGD"].start] == curve.candidates[curve.start]
    assert "16 bits" not in left


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trace]:
    with record(tmp_path_factory.mktemp("search") / "trace", random_gradients(0, 20, 2, LAYERS), LAYERS) as opened:
        yield opened


def test_a_search_finds_what_replaying_every_setting_finds(trace: Trace) -> None:
    families = {name: one for name, one in candidates(LAYERS).items() if name in ("QSGD", "top-k")}
    plans = {one.name: one.plan for family in families.values() for one in family.candidates}
    replays = replay_plans(trace, plans, start=len(trace.steps) - SEARCH_STEPS)
    limits = set()
    for max_loss in (0.005, 0.3):
        found = search(trace, families, max_loss=max_loss, seconds=math.inf)
        assert (found.remarks, found.count < len(plans)) == ([], True)
        for name, family in families.items():
            every = [measured(replays[one.name], max_loss) for one in family.candidates]
            assert found.known(name) == {place: every[place] for place in found.known(name)}
            limit, _ = bracket(found.known(name), len(every))
            assert limit == next((place for place, one in enumerate(every) if not one.within), len(every)) - 1
            limits.add((name, limit))
    assert len(limits) > len(families)  # another loss, another limit


def test_a_search_that_runs_out_of_time_has_the_usual_settings_and_says_so(trace: Trace) -> None:
    families = {name: one for name, one in candidates(LAYERS).items() if name in ("QSGD", "top-k")}
    ticks = iter(range(0, 10**6, 10))
    found = search(trace, families, max_loss=0.01, seconds=5, clock=lambda: float(next(ticks)))
    assert {name: set(known) for name, known in found.replays.items()} == {
        name: {family.start} for name, family in families.items()
    }
    (line,) = found.remarks
    assert line.startswith("The search for settings stopped after 2 replays in ")
    assert "settings of QSGD, top-k between those replayed were not tried" in line


def test_searched_and_given_plans_stand_on_one_frontier(trace: Trace) -> None:
    families = {name: one for name, one in candidates(LAYERS).items() if name in ("QSGD", "1-bit SGD")}
    given_plans = {"mine": Plan.uniform(LAYERS, "topk", density=0.2)}
    fit = {"mine": {"trace": trace.digest, "fitted_on": list(range(10))}}
    tried = try_plans(trace, Trial(families, given_plans, NETWORK, 0.01, 2, math.inf, fit))
    assert tried.speed is not None
    assert set(tried.speed.judged) == set(tried.replays) >= {"mine"}
    rows = {row.name: row for row in tried.frontier}
    assert set(tried.replays) <= set(rows)
    assert (rows["mine"].family, rows["mine"].setting, rows["mine"].judged_steps) == (GIVEN, None, 10)
    for name, row in rows.items():
        assert row.judged_steps >= SEARCH_STEPS  # plans with feedback are never judged by fewer
        assert row.seconds is not None
        assert row.seconds > 0
        if name in tried.replays:
            assert row.seconds == tried.speed.configurations[0].seconds[name]
            assert row.within == tried.speed.judged[name].within(0.01)
    # What may be taken is replayed over all steps, the rest of a curve is searched by few.
    assert {row.judged_steps for row in tried.frontier if row.name in tried.replays and row.family != GIVEN} == {18}
    assert {row.judged_steps for row in tried.frontier if row.name not in tried.replays} == {SEARCH_STEPS}


def test_a_limit_that_more_steps_put_outside_the_loss_gives_way_to_the_setting_before_it(tmp_path: Path) -> None:
    """QSGD is exact at any number of bits where all values are as large, as in the last steps here."""
    gradients = random_gradients(0, 40, 2, LAYERS)
    for step in gradients[-SEARCH_STEPS:]:
        for rank in step:
            for name in rank:
                rank[name] = np.full_like(rank[name], 0.5)
    families = {"QSGD": candidates(LAYERS)["QSGD"]}
    names = [one.name for one in families["QSGD"].candidates]
    with record(tmp_path / "trace", gradients, LAYERS) as trace:
        tried = try_plans(trace, Trial(families, {}, NETWORK, 0.05, 2, math.inf))
    rows = {row.name: row for row in tried.frontier}
    assert not rows[names[-1]].within
    assert {name for name, row in rows.items() if row.judged_steps > SEARCH_STEPS} == set(names[-2:])
