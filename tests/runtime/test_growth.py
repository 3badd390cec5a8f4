"""From a pilot to the end: the law's interval holds what it was fitted on, and tasks that it did not see."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import strategies as st

from gradlab.runtime.pilot.growth import GROWTH, Growth, chance_of
from gradlab.runtime.pilot.result import outcome_of
from gradlab.saving import Saving
from support.benchmark_modules import benchmark_modules
from support.laws import law

EXCESS, WIDTH = st.floats(-0.05, 3), st.floats(0, 0.1)
CELLS = st.lists(st.tuples(st.floats(0.002, 3), WIDTH, st.floats(-0.05, 9)), min_size=40, max_size=80)


@law(EXCESS, WIDTH, EXCESS, WIDTH, WIDTH)
def test_a_worse_pilot_has_no_better_end(excess: float, width: float, more: float, wider: float, chance: float) -> None:
    one = GROWTH.end(excess, excess - width, excess + width)
    worse = GROWTH.end(excess + abs(more), excess - width, excess + width + wider + abs(more), chance)
    assert one.low <= one.middle <= one.high
    assert worse.low <= one.low
    assert worse.high >= one.high
    assert worse.middle >= one.middle


@pytest.fixture(scope="module")
def fitted() -> Iterator[Callable[..., Growth]]:
    with benchmark_modules("pilot_law") as modules:
        yield modules["pilot_law"].fitted


@law(CELLS)
def test_at_most_one_end_in_twenty_of_those_fitted_is_above(
    fitted: Callable[..., Growth], cells: list[tuple[float, float, float]]
) -> None:
    pilots = [(excess, 0.9 * excess - width, excess + width, 0.0) for excess, width, _ in cells]
    if not any(low > 0 for _, low, *_ in pilots):
        return
    found = fitted(pilots, [end for *_, end in cells], 0.0)
    above = sum(end > found.end(*pilot).high + 1e-9 for pilot, (*_, end) in zip(pilots, cells, strict=True))
    assert above <= 0.05 * len(cells)


def test_runs_that_diverged_are_above_all_others(fitted: Callable[..., Growth]) -> None:
    pilots = [(0.01, 0.009, 0.011, 0.0)] * 100
    assert fitted(pilots, [0.02] * 98 + [math.inf] * 2, 0.0).high == pytest.approx(0.02 / 0.011)
    assert fitted(pilots, [0.02] * 90 + [math.inf] * 10, 0.0).high == math.inf


def test_what_16_bits_differ_by_widens_what_is_expected() -> None:
    dense, saving = [2.0] * 40, Saving(4.0, 2.0)
    assert chance_of(-0.002, 0.001) == 0.002
    assert chance_of(math.nan, math.inf) == 0.0
    found = outcome_of("a", [2.0] * 40, dense, saving, chance=0.002)
    assert found.end.high == pytest.approx(GROWTH.chance * 0.002)
    assert found.holds(0.01)
    assert not found.holds(0.001)


def test_the_law_is_what_the_command_makes_of_the_stored_rows_and_holds_on_tasks_left_out() -> None:
    with benchmark_modules("pilot_law") as modules:
        benchmark = modules["pilot_law"]
        rows = benchmark.read(benchmark.DIGEST)
        every = benchmark.cells(rows)
        made = benchmark.law_of(rows)
        without = {task: benchmark.law_without(task, rows) for task in {one.task for one in every}}
        ends = [(one.end, without[one.task].end(*one.pilot)) for one in every]
    inside = [end.low <= came <= end.high for came, end in ends]
    above = [came > end.high for came, end in ends]
    assert np.allclose([made.low, made.middle, made.high, made.chance], _numbers(GROWTH), rtol=0.02)
    assert len({one.task for one in every}) >= 8
    assert np.mean(inside) >= 0.9
    assert np.mean(above) <= 0.1


def _numbers(law: Growth) -> list[float]:
    return [law.low, law.middle, law.high, law.chance]
