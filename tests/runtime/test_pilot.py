"""A pilot: plans tried on a training, which then goes on as if nothing had been."""

from __future__ import annotations

import json
import math
import subprocess
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradlab.errors import GradlabError
from gradlab.runtime.pilot.given import exchanges_in
from gradlab.runtime.pilot.kept import copied
from gradlab.runtime.pilot.result import Outcome, delay_of, in_order, is_decided, looks, may_hold, outcome_of
from gradlab.saving import Saving
from support.laws import thorough
from support.process_pool import ProcessPool
from support.warm_python import python

Point = namedtuple("Point", ["x", "y"])
_OWN = {"snapshot_bytes": 0}  # of each rank: ZeroRedundancyOptimizer shares its state out


@pytest.mark.parametrize(
    ("ranks", "task"),
    [
        thorough(2, {"optimizer": "sgd", "warm": 0}),
        thorough(2, {"optimizer": "zero", "warm": 2}),
        thorough(3, {"optimizer": "adam", "warm": 3, "left_early": True}),
        (2, {"optimizer": "adam", "warm": 3}),
        thorough(4, {"optimizer": "adam", "warm": 3, "local_ranks": 2}),
    ],
)
def test_a_run_with_a_pilot_is_the_run_without(pool: ProcessPool, ranks: int, task: dict[str, Any]) -> None:
    """Bit for bit: losses, parameters, buffers, optimizer, loss scale, and random numbers, after `identity`."""
    found = pool.run("jobs.pilot_tasks:goes_on", ranks, **task)
    assert all(one["same"] for one in found), found[0]["losses"]
    if "left_early" not in task:
        assert all(one["result"] | _OWN == found[0]["result"] | _OWN for one in found)
        outcomes = {one["name"]: one for one in found[0]["result"]["outcomes"]}
        assert list(outcomes) == ["signs", "top-k", "16 bits"]
        assert {one["steps"] for one in outcomes.values()} == {9}
        assert found[0]["result"]["unlike"] == 0


@pytest.mark.parametrize(("between", "parts"), [thorough(False, False), thorough(True, False), thorough(True, True)])
def test_a_sharded_run_with_a_pilot_is_the_run_without(pool: ProcessPool, between: bool, parts: bool) -> None:
    """Bit for bit, after the pilot without gradlab."""
    for found in pool.run("jobs.pilot_tasks:sharded_goes_on", 4, between=between, parts=parts):
        assert found["same"], found["losses"]
        assert [one["steps"] for one in found["result"]["outcomes"]] == [8, 8]
        assert found["result"]["unlike"] == 0
        assert found["result"]["outcomes"][0]["excess"] != 0


@pytest.mark.parametrize(("codec", "fragments", "delay"), [("topk", 2, 1)])
def test_local_steps_with_a_pilot_are_those_without(pool: ProcessPool, codec: str, fragments: int, delay: int) -> None:
    """Bit for bit, with what is on its way and the residuals of the outer step's own plan."""
    for found in pool.run("jobs.pilot_tasks:outer_goes_on", 2, codec=codec, fragments=fragments, delay=delay):
        assert found["same"], found["losses"]
        assert [one["steps"] for one in found["result"]["outcomes"]] == [8, 8]
        assert found["result"]["unlike"] == 0
        assert found["result"]["outcomes"][0]["excess"] != 0
        assert all(counted == forecast for counted, forecast in found["sent"])  # by the pilot's plan, afterwards
        assert found["by_it"]


def test_what_breaks_a_pilot_is_told_and_all_is_put_back(pool: ProcessPool) -> None:
    ends = {
        "short": "GradlabError: 5 batches for a pilot, expected 8 or more",
        "uneven": "GradlabError: rank 1 has 5 batches for a pilot, and rank 0 has more; give all ranks as many",
        "reader": "GradlabError: a batch is a list_iterator, which can be read once only; give a list or a tensor",
        "huge": "GradlabError: rank 1: 8 batches of 52.8 TB are kept in memory, and cpu has ",
        "interrupted": "KeyboardInterrupt: ",
        "not stepped": "GradlabError: Adam took no step on 8 batches; give the pilot the optimizer that trains the ",
        "another steps": "GradlabError: SGD steps body.0.bias, and was not given to the pilot, which would not put ",
    }
    by_rank = pool.run("jobs.pilot_tasks:bad_input", 2)
    for found in by_rank:
        assert {name: found[name]["error"][: len(end)] for name, end in ends.items()} == ends
        others = {"not stepped", "another steps"}  # which are not given
        assert [name for name, one in found.items() if not one["back"] and name not in others] == []
        outcomes = {one["name"]: one for one in found["nan"]["result"]["outcomes"]}
        assert outcomes["top-k"]["excess"] is None
        assert found["nan"]["result"]["best"] == "16 bits"
        late = found["late"]["result"]
        assert (late["best"], late["not_tried"], late["outcomes"]) == (None, ["16 bits", "top-k"], [])
        assert found["counting"]["result"]["unlike"] > 0.1
        assert "that this pilot does not put back" in found["counting"]["result"]["text"]
    assert by_rank[1]["failed"]["error"] == "ValueError: a bad sample"
    assert "another rank failed" in by_rank[0]["failed"]["error"]


def test_a_pilot_refuses_what_makes_none(pool: ProcessPool) -> None:
    for found in pool.run("jobs.pilot_tasks:misused", 2):
        assert "compresses from step 5 on" in found["dense beginning"]
        assert found["budget soon"] == "budget = 'soon', expected seconds, or a text such as '90s', '5min' or '1h'"
        assert found["budget -1"].startswith("budget = -1, expected seconds")
        assert found["steps 7"] == "steps = 7, expected 8 or more: fewer say nothing of a plan"
        assert found["longer 59"] == "longer = 59, expected 60 or more, as steps"
        assert found["keep 0"] == "keep = 0, expected 1 or more"
        assert found["used again"] == ["this pilot was used already; make another one"] * 2
        assert [one["name"] for one in found["enough"]["outcomes"]] == ["top-k", "16 bits"]
        assert found["enough"]["not_needed"] == ["more of top-k"]
        assert found["not recorded"] == "dense: 0 losses of 8 batches; call pilot.record(loss) once per batch"


def test_a_rank_that_dies_leaves_the_others_with_an_error_and_the_snapshot(tmp_path: Path) -> None:
    job = Path(__file__).parents[1] / "jobs" / "pilot_dies.py"
    ranks = [
        subprocess.Popen([python(), str(job), str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    found = json.loads(ranks[0].communicate(timeout=60)[0])
    assert ranks[1].communicate(timeout=60)[0] == b""
    assert found["back"]
    assert "a collective failed" in found["error"]


def test_a_pilot_of_local_steps_has_as_many_exchanges_as_say_something() -> None:
    assert exchanges_in(60, 15) == 4
    with pytest.raises(GradlabError, match="steps = 60 are 2 outer steps, expected 4 or more: give steps=120"):
        exchanges_in(60, 30)


def test_an_excess_is_that_of_the_second_half_and_lies_in_its_interval() -> None:
    dense = [2.0] * 40
    saving = Saving(4.0, 2.0)
    found = outcome_of("a", [2.0] * 20 + [2.02 if step % 2 else 2.04 for step in range(20)], dense, saving)
    assert found.excess == pytest.approx(0.015)
    assert found.low <= found.excess <= found.high
    assert found.holds(found.end.high)
    assert not replace(found, validation=math.nan).holds(1.0)
    assert math.isnan(outcome_of("b", [math.inf] * 40, dense, saving).excess)


SAVINGS = {name: Saving(float(ratio), ratio / 2) for name, ratio in zip("abcdef", (16, 32, 8, 64, 4, 2), strict=True)}


def race(losses: dict[str, Any], dense: Any, steps: int, max_loss: float, keep: int) -> list[Outcome]:
    """Tell from whole trainings what a pilot would have found: outcomes of the plans that it would have tried."""
    longest, found = len(dense), list[Outcome]()
    for name in in_order(SAVINGS):
        if is_decided(found, longest, max_loss, keep):
            break
        for look in looks(steps, longest):
            outcome = outcome_of(name, losses[name][:look], dense[:look], SAVINGS[name])
            if not may_hold(outcome, max_loss):
                break
        found.append(outcome)
    return found


@given(
    st.integers(8, 40),
    st.integers(0, 40),
    st.integers(0, 2**32 - 1),
    st.integers(1, 6),
    st.sampled_from([0.001, 0.01, 0.1]),
)
def test_a_race_finds_the_first_plan_that_holds_of_those_that_always_might(
    steps: int, more: int, seed: int, keep: int, max_loss: float
) -> None:
    """Against all plans trained to the end and looked at everywhere; it trains no more than these."""
    draw, longest = np.random.default_rng(seed), steps + more
    dense = 2 + 0.1 * draw.standard_normal(longest)
    noise = max_loss * np.where(np.arange(longest) < steps // 2, 5.0, 1.0)  # which settles
    apart = {name: draw.choice([-1, 0, 1]) * max_loss + noise * draw.standard_normal(longest) for name in SAVINGS}
    losses = {name: dense * (1 + share) for name, share in apart.items()}
    at = {
        name: [outcome_of(name, losses[name][:look], dense[:look], SAVINGS[name]) for look in looks(steps, longest)]
        for name in SAVINGS
    }
    for one in (one for name in SAVINGS for one in at[name]):  # the interval decides, not its middle
        assert may_hold(one, max_loss) or one.end.low > max_loss
    might = [name for name in "dbacef" if all(one.end.low <= max_loss for one in at[name])]
    holding = [name for name in might if at[name][-1].holds(max_loss)]
    found = race(losses, dense, steps, max_loss, keep)
    whole = [one for one in found if one.steps == longest and one.end.low <= max_loss]
    assert [one.name for one in whole if one.holds(max_loss)] == holding[:keep]
    assert [one.name for one in found] == list("dbacef")[: len(found)]
    assert len(found) == 6 or len(holding) >= keep


@given(st.lists(st.floats(0.01, 1), min_size=16, max_size=60), st.integers(0, 8), st.floats(-3, 3))
def test_losses_of_dense_some_steps_earlier_lie_as_many_behind(falls: list[float], late: int, level: float) -> None:
    earlier = level - np.cumsum(falls)
    dense, losses = earlier[late:], earlier[: len(earlier) - late]
    delay = delay_of(losses, dense)
    if len(dense) >= 8 and late <= len(dense) // 2 and delay is not None:
        assert delay == pytest.approx(late, abs=1e-6)


def test_a_delay_is_told_where_dense_falls_and_reaches_as_far_back() -> None:
    falling = [5 - 0.1 * step for step in range(40)]
    assert delay_of([6.0] * 40, falling) == math.inf
    assert delay_of([1.0] * 40, falling) == 0
    assert delay_of(falling, [2 + 0.1 * (step % 2) for step in range(40)]) is None
    outcome = outcome_of("a", [loss + 0.2 for loss in falling], falling, Saving(4.0, 2.0))
    assert outcome.delay_steps == pytest.approx(2)
    assert ", as dense 2 steps earlier; expected at the end +10." in outcome.line()


def test_a_kept_batch_has_memory_of_its_own_and_no_more() -> None:
    """With the strides of the original; a tensor that stands in two places does so in the copy."""
    whole = torch.arange(60.0).reshape(6, 10)
    part, wide = whole[2:4, 1:9:2], torch.zeros(1).expand(5)
    batch = {"x": part, "y": [part, (wide, Point(part, 3))], "text": "a"}
    made = copied(batch)
    whole.zero_()
    assert torch.equal(made["x"], torch.tensor([[21.0, 23, 25, 27], [31, 33, 35, 37]]))
    assert made["x"].stride() == part.stride()
    assert made["x"].untyped_storage().nbytes() < whole.untyped_storage().nbytes()
    assert made["y"][0] is made["x"]
    assert made["y"][1][1] == Point(made["x"], 3)
    assert made["y"][1][0].untyped_storage().data_ptr() != wide.untyped_storage().data_ptr()
    with pytest.warns(UserWarning, match="batches of generator cannot be copied"):
        copied(number for number in [1])
