"""An iteration is an optimizer step: what is exchanged and dropped leaves no trace, what adds up goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.process_pool import ProcessPool

STEPS = 6


@pytest.mark.parametrize(
    ("loop", "options"),
    [
        ("bad batches", {"codec": "powersgd", "optimizer": "adamw", "zeros": True, "warmup": 0}),
        ("adversary", {"codec": "qsgd", "view": True}),
    ],
)
def test_passes_whose_gradients_are_dropped_leave_no_trace(pool: ProcessPool, loop: str, options: Any) -> None:
    """Bit for bit, parameters and states are those of a run without these passes."""
    for result in pool.run("jobs.step_tasks:dropped", 2, loop=loop, **options):
        assert result["equal"]
        assert result["iterations"] == [STEPS, STEPS]
        assert result["missing"] < 1e-6
        assert "synchronised backward passes whose gradients were dropped" in result["found"][0]
        assert not result["found without them"]


def test_synchronised_passes_that_add_up_are_one_iteration(pool: ProcessPool) -> None:
    for result in pool.run("jobs.step_tasks:synchronised", 2, codec="powersgd", optimizer="adamw", zeros=True):
        assert result["iteration"] == 2 * STEPS
        assert result["missing"] < 1e-6
        [(rule, value, seen, remedy)] = result["found"]
        assert (rule, value) == ("several_backwards", 3)
        assert seen.startswith("3 synchronised backward passes for one optimizer step")
        assert "no_sync()" in remedy
        assert len(result["told"]) == (result["rank"] == 0)


def test_steps_that_a_loss_scaler_skips_are_iterations_and_no_rule_fires(pool: ProcessPool) -> None:
    for result in pool.run("jobs.step_tasks:skipped", 2):
        assert result == {"iteration": 6, "found": []}


def test_ranks_without_input_left_count_as_the_others_do(pool: ProcessPool) -> None:
    assert pool.run("jobs.step_tasks:joined", 2) == [[6, 6], [6, 6]]


def test_an_optimizer_is_copied_as_ever_and_has_no_hook_left(pool: ProcessPool) -> None:
    for result in pool.run("jobs.step_tasks:hooks", 2):
        assert result == {"alike": True, "attached": [1, 1], "closed": [0, 0]}


def test_a_step_whose_closure_has_the_backward_pass(pool: ProcessPool) -> None:
    for result in pool.run("jobs.step_tasks:closures", 2):
        assert result == {"iteration": STEPS, "saved": STEPS, "exact": True}


@pytest.mark.parametrize("loop", ["first of two synchronised", "inside"])  # the campaign `reports` has more
def test_a_step_that_applies_what_ranks_did_not_average_is_told(pool: ProcessPool, tmp_path: Path, loop: str) -> None:
    """By compression and by a recorder, which change nothing of plain DDP's training."""
    first, second = pool.run("jobs.report_tasks_training:looped", 2, loop=loop, folder=str(tmp_path))
    assert second["drift"] > 1e-4
    assert second["recorded"]["equal"]
    for result in (first, second):
        assert result["compressed"]["rules"] == ([] if loop == "inside" else ["local_gradients"])
    rule = "(rule hook_not_reached)" if loop == "inside" else "(rule local_gradients)"
    assert rule in first["compressed"]["said"]
    what = (
        "nothing was recorded" if loop == "inside" else "so that ranks drift apart, and the trace holds none of these"
    )
    assert what in first["recorded"]["said"]
    assert second["compressed"]["said"] == second["recorded"]["said"] == ""


def test_a_complex_layer_left_out_is_averaged_as_ever(pool: ProcessPool, tmp_path: Path) -> None:
    for result in pool.run(
        "jobs.report_tasks_training:looped", 2, loop="complex", folder=str(tmp_path), layers="real*", least=300
    ):
        assert (result["drift"], result["recorded"]["said"], result["compressed"]["rules"]) == (0.0, "", [])
        assert result["compressed"]["difference"] < 1e-6


def test_a_recording_keeps_optimizer_steps(pool: ProcessPool, tmp_path: Path) -> None:
    results = pool.run("jobs.step_tasks:recorded", 2, folder=str(tmp_path / "trace"), passes=3, every=2)
    for rank, result in enumerate(results):
        assert result["steps"] == [[0, 0, 1, 2, 2, 3]] * 2
        [remark] = result["remarks"]
        assert remark.startswith("10 synchronised backward passes for 3 optimizer steps")
        assert "no_sync()" in remark
        assert len(result["told"]) == (rank == 0)


def test_shards_follow_optimizer_steps_too(pool: ProcessPool) -> None:
    """Between nodes, and in their reduce-scatters."""
    for result in pool.run("jobs.step_tasks:under_fsdp", 4):
        assert result["equal"]
        assert result["iterations"] == [4, 5]
        dropped, several = result["found"]
        assert "2 synchronised backward passes whose gradients were dropped" in dropped[0]
        assert several == ["2 synchronised backward passes for one optimizer step"]
