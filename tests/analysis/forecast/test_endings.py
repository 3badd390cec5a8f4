"""What trainings with like errors ended at: a range that grows with the error, and holds on tasks that are left out."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import strategies as st

from gradlab.analysis.forecast.endings import Ending, calibration, ended_at, judgement_text, standing
from support.benchmark_modules import benchmark_modules
from support.laws import law

ROWS = st.lists(st.tuples(st.floats(-1, 1), st.floats(-0.1, 2), st.sampled_from("abcd")), min_size=40, max_size=120)


def endings(rows: list[tuple[float, float, str]], memory: bool = False) -> tuple[Ending, ...]:
    return tuple(Ending(task, str(i), memory, {4: cosine}, excess) for i, (cosine, excess, task) in enumerate(rows))


@law(ROWS, st.floats(-1, 1), st.floats(-1, 1), examples=40)
def test_a_smaller_error_never_has_a_worse_range_and_none_has_nothing(
    rows: list[tuple[float, float, str]], one: float, other: float
) -> None:
    known = endings(rows)
    nearer, farther = (ended_at(cosine, 4, False, known) for cosine in (max(one, other), min(one, other)))
    if farther is None:
        return
    assert nearer is not None
    assert farther.low <= nearer.low
    assert nearer.high <= farther.high
    assert nearer.low <= nearer.middle <= nearer.high
    exact = ended_at(1.0, 4, False, known)
    assert exact is not None
    assert exact.within(0.0)


@law(ROWS, examples=30)
def test_most_of_the_trainings_beyond_the_first_window_are_in_their_range(
    rows: list[tuple[float, float, str]],
) -> None:
    known = endings(rows)
    found = [(excess, ended_at(cosine, 4, False, known)) for cosine, excess, _ in rows]
    first = ended_at(1 - 1e-9, 4, False, known)
    least = -2.0 if first is None else first.least_cosine
    later = [(excess, one) for (excess, one), row in zip(found, rows, strict=True) if one and row[0] < least]
    inside = sum(one.low <= excess <= one.high for excess, one in later)
    assert inside >= 0.75 * len(later)  # nine tenths of each window, whose middle may hold all that are outside


def test_of_one_task_or_of_another_kind_or_farther_out_there_is_nothing_to_tell() -> None:
    rows = [(1 - i / 100, i / 100, "abc"[i % 3]) for i in range(60)]
    assert ended_at(0.9, 4, False, endings([(cosine, excess, "a") for cosine, excess, _ in rows])) is None
    assert ended_at(0.9, 4, True, endings(rows)) is None
    assert ended_at(0.2, 4, False, endings(rows)) is None
    assert "too few trainings with" in judgement_text(-1.0, 4, False)
    assert standing(None, None, True) > standing(0.5, 4, True)


def test_a_run_that_diverged_has_no_end() -> None:
    rows = [(0.5 + i / 1000, math.inf, "abc"[i % 3]) for i in range(60)]
    found = ended_at(0.5, 4, False, endings(rows))
    assert found is not None
    assert found.high == math.inf
    exact = ended_at(1.0, 4, False, endings(rows))
    assert exact is not None
    assert exact.high == 0.0


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [(0.02, 0.1, "2.0 % to 10.0 % above dense"), (-0.01, 0.1, "1.0 % below to 10.0 % above dense")],
)
def test_ranges_in_prose(low: float, high: float, text: str) -> None:
    rows = [(0.5, (low, high)[i % 2], "abc"[i % 3]) for i in range(24)]
    found = ended_at(0.5, 4, False, endings(rows) + endings([(0.9, 0.0, "abc"[i % 3]) for i in range(24)]))
    assert found is not None
    assert found.text == text.replace("2.0 % to", "0.0 % to" if low > 0 else "2.0 % to")


def test_the_calibration_is_what_the_command_makes_of_the_stored_rows() -> None:
    with benchmark_modules("judgements") as modules:
        judgements = modules["judgements"]
        made = json.loads(judgements.written(judgements.endings()))
    kept = json.loads(judgements.ENDINGS.read_text())
    assert made == kept
    assert len(calibration()) == len(kept)


@pytest.mark.parametrize(("length", "memory"), [(1, False), (4, True)])
def test_ranges_hold_on_tasks_that_they_did_not_see(length: int, memory: bool) -> None:
    """The promise: an end of a task that is left out is above its range at most once in ten."""
    known = calibration()
    above, told = 0, 0
    for task in {row.task for row in known}:
        others = tuple(row for row in known if row.task != task)
        for row in known:
            if row.task == task and row.memory == memory and length in row.cosines:
                found = ended_at(row.cosines[length], length, memory, others)
                told += found is not None
                above += found is not None and row.excess > found.high
    assert told > 40
    assert above <= 0.1 * told
