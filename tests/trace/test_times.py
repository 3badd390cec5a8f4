"""How long recorded steps took, against sums that are made up."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradlab.ddp.step_clock import StepClock
from gradlab.trace.schema import NOT_TIMED, STEP_DTYPE, TIMES
from gradlab.trace.times import recorded_times
from support.laws import law


def records(computing: list[float], waited: list[float], recording: float = 0.5, nbytes: int = 10**6) -> np.ndarray:
    """Records of one rank; its exchange begins a second before its last gradient."""
    made = np.zeros(len(computing), STEP_DTYPE)
    for row, (own, wait) in enumerate(zip(computing, waited, strict=True)):
        values = (own + wait + recording, wait, wait + 1, recording, nbytes)
        for name, value in zip(TIMES, values, strict=True):
            made[name][row] = value
    made["seconds"][0] = math.nan  # nothing came before
    return made


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0, 10)), min_size=4, max_size=9), st.floats(0.1, 10))
def test_the_rank_that_computes_longest_stands_for_the_step(steps: list[tuple[float, float]], slow: float) -> None:
    computing, waited = map(list, zip(*steps, strict=True))
    slower = [one + slow for one in computing]
    times = recorded_times([records(computing, waited), records(slower, waited)])
    assert times is not None
    assert times.computing == pytest.approx(np.median(slower[1:]))
    assert (times.waited, times.recording) == (pytest.approx(np.median(waited[1:])), pytest.approx(0.5))
    assert (times.ranks, times.steps) == (2, len(steps) - 1)


def test_a_link_is_as_fast_as_the_rank_finds_that_nobody_waits_for() -> None:
    ranks = [records([2.0] * 5, [wait] * 5) for wait in (3.0, 1.0, 4.0)]
    times = recorded_times(ranks)
    assert times is not None
    assert times.bits_per_second == pytest.approx(2 * 2 / 3 * 8e6 / 2)
    gathered = recorded_times(ranks, gathers=True)
    assert gathered is not None
    assert gathered.bits_per_second is None


def test_few_steps_and_steps_without_times_say_nothing() -> None:
    timed, untimed = records([1.0] * 5, [1.0] * 5), np.zeros(5, STEP_DTYPE)
    for name, nothing in zip(TIMES, NOT_TIMED, strict=True):
        untimed[name] = nothing
    assert recorded_times([timed[:3]]) is None
    assert recorded_times([timed, untimed]) is None


BUCKETS = st.lists(st.lists(st.sampled_from(["own", "blocked", "busy"]), max_size=3), min_size=1, max_size=4)


@law(BUCKETS, st.booleans(), examples=40)
def test_no_time_of_a_step_is_counted_twice(buckets: list[list[str]], waits: bool) -> None:
    """Also where the recorder's own work is blocked, and where averages are waited for between buckets."""
    clock = StepClock(torch.device("cpu"))
    clock.end()
    for number, before in enumerate(buckets):
        for what in before:
            with clock.own() if what == "own" else nullcontext():
                time.sleep(1e-3 * (what != "busy"))
                sum(range(10_000))
        clock.arrive(8, first=number == 0)
        with clock.waiting() if waits else nullcontext():
            time.sleep(1e-3)
    told = clock.end()()
    assert told.waited >= 1e-3 * (len(buckets) if waits else 1)
    assert told.waited + told.own <= told.seconds + 1e-6


def test_a_step_that_nobody_asks_for_leaves_nothing_behind() -> None:
    """Under join a rank without input runs the hook outside of a backward pass, as often as others train."""
    clock = StepClock(torch.device("cpu"))
    for _ in range(3):
        with clock.own():
            pass
        clock.arrive(4, first=True)
        clock.end_after_averages(lambda told: None)
    assert clock.end()().own == 0.0
