"""Orders of plans over windows of a run, against scipy and by hand; costs and waiting residuals by replay."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import strategies as st

from gradlab.analysis.replay import replay
from gradlab.analysis.replay.ranking import ranking_stability
from gradlab.analysis.replay.result import Replay, ReplayStep
from gradlab.plan import Plan, Wrap
from support.laws import law
from support.recorded import LAYERS, random_gradients, record


def steps(values: list[float | None], fitted_on: tuple[int, ...] = ()) -> Replay:
    """A replay whose updates have these cosines with the true mean."""
    cost = (1.0, 1, 1.0, 1, 0.0)
    made = tuple(ReplayStep(t, True, True, None, None, value, *cost) for t, value in enumerate(values))
    return Replay(made, 2, "", "", (), 1.0, 1.0, fitted_on=fitted_on)


def test_plans_that_change_places_halfway_are_seen() -> None:
    falling, rising = [0.9] * 8 + [0.1] * 3, [0.5] * 11
    stability = ranking_stability({"a": steps(falling), "b": steps(rising), "c": steps([0.0] * 11)})
    assert stability is not None
    assert stability.windows[0][0] == 0
    assert stability.windows[-1][1] == 10
    assert stability.ranks["a"] == [1, 1, 2]
    assert stability.whole == {"a": 1, "b": 2, "c": 3}
    assert stability.agreement == pytest.approx([1.0, 1.0, 0.5])
    assert stability.agreement_intervals == [None] * 3


def test_an_order_of_five_plans_has_an_interval() -> None:
    stability = ranking_stability({name: steps([0.1 * place] * 6) for place, name in enumerate("abcde")})
    assert stability is not None
    assert stability.agreement == pytest.approx([1.0, 1.0])
    for low, high in stability.agreement_intervals:
        assert 0 < low < 0.5
        assert high == 1.0


def test_iterations_that_a_plan_was_fitted_on_and_values_that_are_not_finite_do_not_rank() -> None:
    rising = [0.1 * t for t in range(20)]
    found = ranking_stability({"a": steps(rising, fitted_on=(0, 4)), "b": steps([math.inf] * 8 + rising[8:])})
    assert found is not None
    assert found.windows[0][0] == 8
    judged = ranking_stability({"a": steps(rising, fitted_on=(0, 4)), "b": steps(rising)})
    assert judged is not None
    assert judged.windows[0][0] == 5


def test_nothing_to_rank() -> None:
    assert ranking_stability({}) is None
    assert ranking_stability({"a": steps([0.1] * 20)}) is None
    assert ranking_stability({"a": steps([0.1] * 3), "b": steps([0.2] * 3)}) is None
    assert ranking_stability({"a": steps([None] * 20), "b": steps([0.2] * 20)}) is None


def test_replays_tell_costs_by_group_and_what_waits(tmp_path: Path) -> None:
    plain = Plan.uniform(LAYERS, "topk", density=0.1, wrappers=[], minimum_numel=1)
    fed = Plan.uniform(LAYERS, "topk", density=0.1, wrappers=[Wrap("error_feedback")], minimum_numel=1)
    with record(tmp_path / "t", random_gradients(0, 16, 2)) as trace:
        without, waiting = replay(trace, plain), replay(trace, fed)
    groups = waiting.group_costs
    assert set(groups) == {group.name for group in fed.compressed_groups}
    for step in waiting.steps:
        in_groups = sum(cost.payload_bytes for cost in step.costs.values())
        dense = 4 * sum(layer.numel for layer in LAYERS if layer.name not in groups) + 4
        assert step.payload_bytes_mean == pytest.approx(in_groups + dense)
        assert step.codec_seconds == pytest.approx(sum(cost.codec_seconds for cost in step.costs.values()))
    # Without feedback what is not sent is less than a gradient; with it more waits, at first more and more.
    assert max(step.unsent for step in without.steps) < 1
    assert waiting.steps[-1].unsent > 1 > waiting.steps[0].unsent
    assert waiting.summary().residual_growth > 1
    assert "layers" not in waiting.steps[0].to_json()
    assert without.to_json()["groups"][next(iter(groups))]["payload_bytes"] > 0


def residual_growth(unsent: list[float]) -> float | None:
    """Of a replay in which this much waits."""
    same = (True, True, 0.1, 0.1, 0.9, 1.0, 1, 1.0, 1, 0.0)
    return Replay(
        tuple(ReplayStep(t, *same, unsent=value) for t, value in enumerate(unsent)), 2, "", "", (), 1.0, 1.0
    ).residual_growth


@law(st.floats(0.1, 10), st.floats(0.01, 100), st.integers(2, 6))
def test_a_residual_has_settled_when_its_last_quarters_are_alike(level: float, before: float, quarter: int) -> None:
    """Whatever waited in the first half; and what waits in other units grows as much."""
    first = [before] * (2 * quarter)
    assert residual_growth(first + [level] * (2 * quarter)) == pytest.approx(1.0)
    assert residual_growth(first + [level] * quarter + [3 * level] * quarter) == pytest.approx(3.0)
    assert residual_growth(first[:3] + [level] * 4) is None
