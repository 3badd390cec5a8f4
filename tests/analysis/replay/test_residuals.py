"""Costs by group, and waiting residuals, by replay."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import strategies as st

from gradlab.analysis.replay import replay
from gradlab.analysis.replay.result import Replay, ReplayStep
from gradlab.plan import Plan, Wrap
from support.laws import law
from support.recorded import LAYERS, random_gradients, record


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
