"""Outer steps in real ranks: against DiLoCo and its streaming form in plain formulas, resumed, and used wrongly."""

from __future__ import annotations

from typing import Any

import pytest

from support.elastic_workers import MISSING
from support.laws import thorough
from support.process_pool import ProcessPool

REPORTS = "jobs.report_tasks_frameworks"
ROUNDING = 2e-5  # of formulas that are written otherwise, over hundreds of AdamW steps
CODECS: dict[str, dict[str, Any]] = {"identity": {}, "topk": {"density": 0.1}, "block_scaled": {"dtype": "int4"}}


def test_every_step_and_plain_averaging_is_synchronous_sgd(pool: ProcessPool) -> None:
    assert max(pool.run("jobs.outer_tasks:synchronous", 3)) < ROUNDING


@pytest.mark.parametrize("ranks", [3, *(thorough(ranks) for ranks in (2, 4))])
def test_it_is_the_published_diloco(pool: ProcessPool, ranks: int) -> None:
    """8 outer steps of the whole model, uncompressed, against the plain formulas."""
    arguments = {"codec": "identity", "settings": {}, "every": 2, "fragments": 1, "delay": 0, "outer_steps": 8}
    for result in pool.run("jobs.outer_tasks:against_oracle", ranks, **arguments):
        assert result["farthest"] < ROUNDING
        assert result["changes"] == result["outer"] == 8


@pytest.mark.parametrize(("fragments", "delay"), [thorough(3, 0), (2, 2)])
def test_fragments_in_turn_and_delayed(pool: ProcessPool, fragments: int, delay: int) -> None:
    """Streaming DiLoCo, uncompressed, against the plain formulas."""
    arguments = {"every": 6, "fragments": fragments, "delay": delay, "outer_steps": 4}
    for result in pool.run("jobs.outer_tasks:against_oracle", 3, codec="identity", settings={}, **arguments):
        assert result["farthest"] < ROUNDING
        # What the last steps sent is on its way still.
        assert result["outer"] == fragments * 4 - sum((f + 1) * 6 // fragments + delay > 6 for f in range(fragments))


@pytest.mark.parametrize(
    ("fragments", "delay", "rules"),
    [thorough(1, 0, "DiLoCo"), (3, 4, "MuLoCo"), thorough(3, 4, "DiLoCo"), thorough(2, 2, "Muon outside")],
)
def test_it_is_lockstep_bit_for_bit(pool: ProcessPool, fragments: int, delay: int, rules: str) -> None:
    """Compressed, in deterministic mode, with torch's own outer step. "MuLoCo": Muon for matrices in each worker."""
    numbers = {"every": 6, "fragments": fragments, "delay": delay, "outer_steps": 4, "rules": rules}
    for result in pool.run("jobs.outer_tasks:against_oracle", 3, codec="several", settings={}, exact=True, **numbers):
        assert result["farthest"] == 0.0


@pytest.mark.parametrize(
    ("fragments", "delay", "stop", "rules"),
    [thorough(2, 0, 12, "DiLoCo"), (3, 4, 14, "DiLoCo"), (2, 0, 14, "Muon outside")],
)
def test_resumed_is_never_stopped(pool: ProcessPool, fragments: int, delay: int, stop: int, rules: str) -> None:
    """Bit for bit, with fragments on their way too, and two optimizers inside and outside."""
    arguments = {"fragments": fragments, "delay": delay, "stop": stop, "steps": 22, "rules": rules}
    for result in pool.run("jobs.outer_tasks:resumed", 2, codec="several", settings={}, **arguments):
        assert (result["same"], result["same_state"]) == (True, True)
        assert bool(result["in_flight"]) == bool(delay)


@pytest.mark.parametrize(("codec", "delay"), [thorough("identity", 2), ("topk", 0)])
def test_a_worker_of_two_ranks_in_ddp(pool: ProcessPool, codec: str, delay: int) -> None:
    results = pool.run("jobs.outer_tasks:worker_of_two", 4, codec=codec, settings=CODECS[codec], delay=delay)
    assert [result["exchanges"] for result in results] == [[True, True], [False, False]] * 2
    for result in results:
        assert result["distance"] < (5e-3 if codec == "topk" else ROUNDING)
        assert (result["workers"], result["same_inside"]) == (2, True)


@pytest.mark.parametrize(("codec", "delay"), [("identity", 2), thorough("block_scaled", 2)])
def test_a_worker_of_two_ranks_under_fsdp2(pool: ProcessPool, codec: str, delay: int) -> None:
    """A shard of two rows or more is quantized for itself, so that compressed runs are alike, and no more."""
    for result in pool.run("jobs.outer_tasks:sharded_worker", 4, codec=codec, settings=CODECS[codec], delay=delay):
        assert result["distance"] < (0.3 if codec == "block_scaled" else ROUNDING)
        assert (result["workers"], result["changed"]) == (2, True)
        assert "outer_optimizer gave Muon, which needs whole matrices, and a rank holds shards" in result["said"]


@pytest.mark.parametrize(("codec", "delay"), [("topk", 2), ("identity", 0)])
def test_what_is_not_finite_takes_all_back(pool: ProcessPool, codec: str, delay: int) -> None:
    """Where no codec runs, too."""
    for result in pool.run("jobs.outer_tasks:not_finite", 2, codec=codec, settings=CODECS[codec], delay=delay):
        assert result["agree"]
        assert result["seen"][-1]
        assert len(result["said"]) == 1
        assert result["said"][0].startswith(f"OuterStep: at local step {6 + delay} what came of 0.weight")
        assert result["outer"] == (3 if delay == 0 else 2)


@pytest.mark.parametrize("residuals", [thorough("split"), "sum"])
def test_two_workers_become_four(pool: ProcessPool, residuals: str) -> None:
    for result in pool.run("jobs.outer_tasks:more_workers", 4, residuals=residuals):
        assert result == {"kept": True, "same_mean": True, "outer": 4, "workers": 4}


def test_a_model_of_sixteen_bits_has_common_parameters_of_thirty_two(pool: ProcessPool) -> None:
    """20 steps of 1e-3 times the mean 1.5; bfloat16 has no number between 1 and 1.0078."""
    for result in pool.run("jobs.outer_tasks:sixteen_bits", 2):
        assert result["dtype"] == "torch.float32"
        assert result["common"] == pytest.approx(1 + 20 * 1e-3 * 1.5, rel=1e-3)
        assert result["model"] == pytest.approx(result["common"], rel=2**-8)


def test_the_first_reason_stands(pool: ProcessPool) -> None:
    *others, last = pool.run("jobs.outer_tasks:left_before_it_failed", 3)
    assert last == "step 0: ValueError: no more data"
    assert others == [f"rank 2: {last}"] * 2


@pytest.mark.parametrize("delay", [thorough(0), 2])
def test_a_worker_that_leaves_is_named(pool: ProcessPool, delay: int) -> None:
    *others, last = pool.run("jobs.outer_tasks:lost", 4, delay=delay)
    assert (last["said"], last["step"]) == ("no more data", 5)
    for one in others:
        assert "another rank failed (rank 3: step" in one["said"]
        assert "ValueError: no more data" in one["said"]
        assert 5 <= one["step"] <= 6 + delay
        assert one["seconds"] < 20


def test_feedback_is_warned_of_under_outer_momentum_and_its_lack_without(pool: ProcessPool) -> None:
    """Of no wrappers, feedback, servers without and with it, and servers with it between more workers."""
    first, other = pool.run("jobs.outer_tasks:warned", 2)
    twice = ["0.weight: error feedback under an outer optimizer" in " ".join(said) for _, said in first]
    assert twice == [one for feedback in (False, True, False, True, False) for one in (False, feedback)]
    lost = ["topk" in " ".join(said) for _, said in first]
    assert lost == [one for kept in (False, True, False, False, False) for one in (not kept, False)]
    assert not any(said for _, said in other)
    for line in {line for momentum, said in first for line in said if momentum}:
        assert (
            "0.weight: error feedback under an outer optimizer with momentum = 0.9 is momentum twice; make the plan "
            in line
        )
        assert "exchanges='pseudo-gradients'" in line


def test_a_codecs_name_is_its_plan_for_pseudo_gradients(pool: ProcessPool) -> None:
    for result in pool.run("jobs.outer_tasks:by_name", 2):
        assert result == {"alike": True, "in ddp": True, "averaged": True}


def test_wrong_use_is_refused(pool: ProcessPool) -> None:
    for said in pool.run("jobs.outer_tasks:refused", 2):
        assert said["every"] == "OuterStep: every = 0, expected a whole number from 1"
        assert said["delay"] == "OuterStep: delay = 4, expected less than every = 4"
        assert said["mixing"] == "OuterStep: mixing = 1.0, expected a share from 0 to below 1"
        assert said["too many fragments"] == "OuterStep: 3 fragments in every = 2 steps, expected at most one each"
        assert "the plan has 8 groups and dense layers, which are not cut" in said["uncut"]
        assert "weight" in said["other plan"]
        assert said["no model"] == "OuterStep: the model is a list, expected a torch.nn.Module"
        assert "outer_optimizer gave a SGD of other parameters" in said["an optimizer"]
        assert said["other numbers"].startswith("ranks disagree about every: rank 1 has 5, rank 0 has 4")
        assert "DDP averages the gradients of all 2 ranks in every step" in said["in ddp"]
        assert "the option scaler is of steps that exchange gradients" in said["scaler"]
        assert said["manager and group"].startswith("OuterStep: manager and group at once; with a manager every worker")
        assert (
            said["manager and delay"]
            == "OuterStep: manager and delay = 2, expected delay=0, as workers may go meanwhile"
        )
        assert said["no manager"].startswith(
            "OuterStep: a manager needs gradlab[torchft] ("
            if MISSING
            else "OuterStep: the manager is a object, expected"
        )
        assert said["file"].startswith("rank 1: ")
        assert said["another H"] == "checkpoint: every is 5, this run has 4"
        assert "is damaged" in said["damaged"]
        assert said["no state"] == "checkpoint: a list, expected what state_dict gives"
        assert said["closed"] == "this OuterStep is closed; make a new one"


# --- what public reports found ----------------------------------------------------------------------------------------


def test_workers_begin_with_one_model(pool: ProcessPool) -> None:
    """Frozen layers and buffers of every kind too; models that differ are refused, and no rank waits."""
    for found in pool.run(f"{REPORTS}:other_features", 2):
        assert found["differ"] == []
        assert found["other width"].startswith("rank 1: this plan is for another model")
        assert found["other buffers"].startswith("ranks disagree about frozen layers and buffers: rank 1 has")


def test_micro_batches_that_are_taken_for_steps_are_told(pool: ProcessPool) -> None:
    for told in pool.run(f"{REPORTS}:micro_batches", 2):
        assert told["accumulated"].startswith("OuterStep: only 4 of the first 16 calls of step() came after")
        assert told["each"] == ""


def test_a_worker_that_ends_early_is_named(pool: ProcessPool) -> None:
    first, other = pool.run(f"{REPORTS}:leaves_early", 2, ddp=True)
    assert first["said"] == ""
    assert "another rank failed (rank 0: step 4: its run was closed)" in other["said"]


def test_small_layers_and_another_dtype_on_the_way(pool: ProcessPool) -> None:
    """Shapes (), (0,), (1,), (0, 5), and a model made bfloat16: workers agree, in 32 bits."""
    assert pool.run(f"{REPORTS}:small_layers_and_another_dtype", 2) == [[], []]
