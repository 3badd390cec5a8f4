"""One rule, several drivers: DDP's engine, the inline driver and the lockstep executor do the same, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradlab.analysis.replay import replay
from gradlab.plan import Plan
from gradlab.trace import Trace
from jobs.matrix_cells import OPTIONS
from support.process_pool import ProcessPool

ROWS = ["powersgd + feedback", "topk + correction", "qsgd + two-way", "topk + feedback", "sign + feedback"]
# Every DDP option whose arithmetic is the same in DDP and outside of it.
EXACT = [name for name, o in OPTIONS.items() if not (o.compiled or o.part or o.together > 1 or o.tolerance)]
EXACT.remove("mixed_precision")  # refused
CELLS = [(ROWS[position % len(ROWS)], option) for position, option in enumerate(EXACT)]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("row", "option"), CELLS)
def test_the_engine_does_what_lockstep_does(pool: ProcessPool, row: str, option: str, ranks: int) -> None:
    """Gradients, states, and the learning rates that residuals are kept in."""
    assert set(pool.run("jobs.matrix_cells:run_cell", ranks, row=row, option=option)) == {"passed"}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("codec", "wrapping"),
    [("topk", "feedback"), ("powersgd", "feedback, step-size ratio"), ("sign", "two-way under feedback")],
)
def test_the_inline_driver_does_what_lockstep_does(
    pool: ProcessPool, codec: str, wrapping: str, at_once: bool, ranks: int
) -> None:
    for found in pool.run("jobs.executor_tasks:inline", ranks, codec=codec, wrapping=wrapping, at_once=at_once):
        assert found["same"]
        assert found["same_states"]
        assert found["iteration"] == 6
        # The engine fuses dense layers into one mean; the forecast counts them so.
        assert found["payload"][0] == found["payload"][1]


@pytest.mark.parametrize("case", ["lgc_ring, by value", "lgc_server"])
def test_what_was_learned_is_used_alike(pool: ProcessPool, case: str) -> None:
    """A convolution's last bits depend on where its weights begin in memory."""
    for same in pool.run("jobs.executor_tasks:learned", 2, case=case):
        assert same == [True] * 6


def test_wrong_use_of_the_inline_driver_is_named(pool: ProcessPool) -> None:
    for said in pool.run("jobs.executor_tasks:refused", 2):
        assert "tall [200, 18]: expected, not in the model" in said["other parameters"]
        assert "ranks disagree about segment_bytes" in said["options differ"]
        assert "'deep'" in said["unknown layer"]
        assert "gradient of conv: shape [1, 8, 3, 3], expected a dense [16, 8, 3, 3]" in said["shape"]
        assert "group tall: only some of its layers had gradients" in said["only some"]
        assert "before the step had begun" in said["finish first"]
        assert "closed" in said["closed"]
        assert "stopped earlier" in said["after an error"]
        assert "fed by DDP's hook" in said["fed by DDP"]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("codec", "wrapping"), [("topk", "feedback"), ("powersgd", "feedback, step-size ratio")])
def test_a_replay_holds_what_the_run_holds(
    pool: ProcessPool, tmp_path: Path, codec: str, wrapping: str, ranks: int
) -> None:
    """A recording with a layer that no rank uses in some steps, replayed, is the compressed run."""
    folder = tmp_path / "trace"
    for found in pool.run("jobs.executor_tasks:recorded", ranks, folder=str(folder), codec=codec, wrapping=wrapping):
        assert found["same"]
        assert found["same_states"]
        held = [name for name in found["held"] if name]
        assert held == [["branch.weight"], ["branch.weight"]]
    with Trace(folder) as trace:
        layers = trace.layers
        result = replay(trace, Plan.uniform(layers, "topk", density=0.1))
    assert result.summary()["held_steps"] == 2
    assert "In 2 of 6 compressed iterations a layer had no gradient on any rank (branch.weight)" in result.warnings[0]
