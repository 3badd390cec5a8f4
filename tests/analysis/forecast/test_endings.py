"""What trainings with like cosines ended at: nearest neighbours of a plan's own kind, in the calibration that ships."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import strategies as st

from gradlab.analysis.forecast.endings import Ending, calibration, ended_at
from gradlab.errors import GradlabError
from support.benchmark_modules import benchmark_modules
from support.laws import law

COSINES = st.floats(-1, 1)
ROWS = st.lists(st.tuples(COSINES, st.floats(-0.1, 2), st.booleans()), min_size=1, max_size=20)


def endings(rows: list[tuple[float, float, bool]]) -> list[Ending]:
    return [Ending("task", str(i), memory, {4: cosine}, excess) for i, (cosine, excess, memory) in enumerate(rows)]


@law(ROWS, COSINES, st.integers(1, 9), st.booleans())
def test_neighbours_are_the_nearest_in_angle_of_the_same_kind(
    rows: list[tuple[float, float, bool]], cosine: float, count: int, memory: bool
) -> None:
    own = [(value, excess) for value, excess, kind in rows if kind == memory]
    if not own:
        with pytest.raises(GradlabError, match="over 4 steps to compare with"):
            ended_at(cosine, 4, memory, endings(rows), count)
        return
    found = ended_at(cosine, 4, memory, endings(rows), count)
    by_distance = sorted(abs(math.acos(value) - math.acos(cosine)) for value, _ in own)
    reach = by_distance[min(count, len(own)) - 1]
    inside = [excess for value, excess in own if abs(math.acos(value) - math.acos(cosine)) <= reach]
    assert found.methods == min(count, len(own))
    assert min(inside) <= found.low <= found.middle <= found.high <= max(inside)
    assert abs(math.acos(found.least_cosine) - math.acos(cosine)) <= reach
    assert found.within(found.high)
    assert not found.within(found.high - 1e-9)


def test_a_run_that_diverged_counts_as_the_worst() -> None:
    found = ended_at(0.5, 4, False, endings([(0.5, 0.1, False), (0.5, math.inf, False)]))
    assert found.high == math.inf
    assert found.text == "10.0 % to without end above dense"


@pytest.mark.parametrize(
    ("excesses", "text"),
    [((0.02, 0.1), "2.0 % to 10.0 % above dense"), ((-0.01, 0.1), "1.0 % below to 10.0 % above dense")],
)
def test_ranges_in_prose(excesses: tuple[float, ...], text: str) -> None:
    assert ended_at(0.5, 4, False, endings([(0.5, excess, False) for excess in excesses])).text == text


def test_the_calibration_is_what_the_command_makes_of_the_stored_rows() -> None:
    with benchmark_modules("judgements") as modules:
        judgements = modules["judgements"]
        made = json.loads(judgements.written(judgements.endings(judgements.tasks())))
    kept = json.loads(judgements.ENDINGS.read_text())
    assert made == kept
    assert len(calibration()) == len(kept)


def test_both_kinds_can_be_looked_up_at_every_length_that_plans_are_judged_by() -> None:
    for length in (1, 4):
        for memory in (True, False):
            assert ended_at(0.8, length, memory).methods == 5
