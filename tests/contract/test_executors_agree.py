"""One rule, several drivers: DDP's engine, the inline driver and the lockstep executor do the same, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradlab.analysis.replay import replay
from gradlab.plan import Plan
from gradlab.trace import Trace
from support.laws import thorough
from support.process_pool import ProcessPool

ROWS = ["powersgd + feedback", "topk + correction", "topk + feedback", "sign + feedback"]
# The campaign `matrix` holds every row under every option.
OPTIONS = ["find_unused, no_sync", "static_graph", "find_unused, overflow", "frozen mid-run"]


@pytest.mark.parametrize(("row", "option", "ranks"), [*zip(ROWS, OPTIONS, (2, 3, 3, 2), strict=True)])
def test_the_engine_does_what_lockstep_does(pool: ProcessPool, row: str, option: str, ranks: int) -> None:
    """Gradients, states, and the learning rates that residuals are kept in."""
    assert set(pool.run("jobs.matrix_cells:run_cell", ranks, row=row, option=option)) == {"passed"}


@pytest.mark.parametrize(
    ("row", "option"),
    [("topk + correction", "nodes of 2, find_unused"), thorough("qsgd + two-way", "nodes of 2, overflow")],
)
def test_nodes_do_what_lockstep_does_with_their_means(pool: ProcessPool, row: str, option: str) -> None:
    """Two nodes of two ranks: each rank's own groups, and the gradients of all."""
    assert set(pool.run("jobs.matrix_cells:run_cell", 4, row=row, option=option)) == {"passed"}


def test_the_inline_driver_does_what_lockstep_does(pool: ProcessPool) -> None:
    """Several codecs in one model, and a group of two layers that do not come together."""
    stacks = [
        ("powersgd", "feedback, step-size ratio"),
        ("sign", "two-way under feedback"),
        ("ecsq", "two-way under feedback"),
        ("identity", "Dion"),
    ]
    for result in pool.run("jobs.executor_tasks:inline", 3, stacks=stacks, at_once=False):
        assert result["same"]
        assert result["same_states"]
        assert result["iteration"] == 6
        # The engine fuses dense layers into one mean; the forecast counts them so.
        assert result["payload"][0] == result["payload"][1]


def test_wrong_use_of_the_inline_driver_is_named(pool: ProcessPool) -> None:
    for messages in pool.run("jobs.executor_tasks:refused", 2):
        assert "tall [200, 18]: expected, not in the model" in messages["other parameters"]
        assert "ranks disagree about segment_bytes" in messages["options differ"]
        assert "'deep'" in messages["unknown layer"]
        assert "gradient of conv: shape [1, 8, 3, 3], expected a dense [16, 8, 3, 3]" in messages["shape"]
        assert "no gradient of wide came in this step (2 missing)" in messages["only some"]
        assert "before the step had begun" in messages["finish first"]
        assert "closed" in messages["closed"]
        assert "stopped earlier" in messages["after an error"]
        assert "a new step began before the last one's" in messages["begin twice"]
        assert "a second gradient of conv in one step" in messages["add twice"]
        assert "step 0 is in progress; load a checkpoint between steps" in messages["load in a step"]
        assert "step 0 is in progress" in messages["load many in a step"]
        assert "fed by DDP's hook" in messages["fed by DDP"]
        assert messages["steps"] == "1"


@pytest.mark.parametrize(
    ("where", "kind", "reason"),
    [
        thorough("before the first step", "ArithmeticError", "step 0: ArithmeticError: the defect"),
        thorough("begin", "KeyError", "step 1: KeyError: 'lr'"),
        ("add", "GradlabError", "step 1: codec topk on wide: ArithmeticError: the defect"),
        thorough("finish", "GradlabError", "step 1: Exchange: no gradient of vector came in this step (1 missing)"),
        ("close", "GradlabError", "step 1: closed before the step had ended"),
    ],
)
def test_all_ranks_hear_why_one_failed(pool: ProcessPool, where: str, kind: str, reason: str) -> None:
    """The group is the caller's: it outlives the failure, and its timeout is what ends the others' wait."""
    failed, *others = pool.run("jobs.executor_tasks:one_rank_fails", 3, where=where)
    assert failed["kind"] == kind
    step = int(reason[5])
    assert failed["iteration"] == step
    for other in others:
        assert other["kind"] == "CommunicationError"
        assert other["iteration"] == step
        assert other["message"] == f"step {step}: another rank failed (rank 0: {reason})"


@pytest.mark.parametrize(
    ("codec", "wrapping", "ranks"), [("topk", "feedback", 3), thorough("powersgd", "feedback, step-size ratio", 2)]
)
def test_a_replay_holds_what_the_run_holds(
    pool: ProcessPool, tmp_path: Path, codec: str, wrapping: str, ranks: int
) -> None:
    """A recording with a layer that no rank uses in some steps, replayed, is the compressed run."""
    folder = tmp_path / "trace"
    for recorded in pool.run("jobs.executor_tasks:recorded", ranks, folder=str(folder), codec=codec, wrapping=wrapping):
        assert recorded["same"]
        assert recorded["same_states"]
        held = [name for name in recorded["held"] if name]
        assert held == [["branch.weight"], ["branch.weight"]]
    with Trace(folder) as trace:
        layers = trace.layers
        result = replay(trace, Plan.uniform(layers, "topk", density=0.1))
    assert result.summary().held_steps == 2
    assert "In 2 of 6 compressed iterations a layer had no gradient on any rank (branch.weight)" in result.warnings[0]
