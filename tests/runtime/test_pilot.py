"""A pilot: plans tried on a training, which then goes on as if nothing had been."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from gradlab.runtime.pilot.result import outcome_of
from gradlab.saving import Saving
from support.process_pool import ProcessPool


@pytest.mark.parametrize(("optimizer", "warm"), [("sgd", 0), ("adam", 3)])
@pytest.mark.parametrize("left_early", [False, True])
def test_a_run_with_a_pilot_is_the_run_without(pool: ProcessPool, optimizer: str, warm: int, left_early: bool) -> None:
    """Bit for bit: losses, parameters, buffers, optimizer, loss scale, and random numbers, after `identity`."""
    task = {"optimizer": optimizer, "warm": warm, "left_early": left_early}
    first, second, *_ = pool.run("jobs.pilot_tasks:goes_on", 3 if warm else 2, **task)
    assert first["same"], first["losses"]
    assert second["same"], second["losses"]
    if not left_early:
        assert first["result"] == second["result"]
        assert [one["name"] for one in first["result"]["outcomes"]] == ["signs", "top-k", "16 bits"]


def test_what_breaks_a_pilot_is_told_and_all_is_put_back(pool: ProcessPool) -> None:
    for found in pool.run("jobs.pilot_tasks:bad_input", 2):
        assert found["short"] == "5 batches for a pilot, expected 8 or more"
        assert found["not recorded"] == "plain DDP: 0 losses of 8 batches; call pilot.record(loss) once per batch"
        assert found["back"]
        outcomes = {one["name"]: one for one in found["nan"]["outcomes"]}
        assert outcomes["top-k"]["excess"] is None
        assert found["nan"]["best"] == "16 bits"
        assert found["late"] == {"max_loss": 0.01, "best": None, "not_tried": ["16 bits", "top-k"], "outcomes": []}
        assert "compresses from step 5 on" in found["dense beginning"]
        assert found["used again"] == ["this pilot was used already; make another one"] * 2
        assert all("expected seconds" in error for error in found["budget"])


def test_an_excess_is_that_of_the_second_half_and_lies_in_its_interval() -> None:
    dense = [2.0] * 40
    saving = Saving(4.0, 2.0)
    found = outcome_of("a", [2.0] * 20 + [2.02 if step % 2 else 2.04 for step in range(20)], dense, saving)
    assert found.excess == pytest.approx(0.015)
    assert found.low <= found.excess <= found.high
    assert found.holds(found.high)
    assert not replace(found, validation=math.nan).holds(1.0)
    assert math.isnan(outcome_of("b", [math.inf] * 40, dense, saving).excess)
