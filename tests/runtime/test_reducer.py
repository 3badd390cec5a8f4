"""Layers that DDP's reducer lacks, or has beyond the model; uneven inputs; and copies of a model with a hook."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.laws import thorough
from support.process_pool import ProcessPool

LACKING = {"unfrozen bias": "0.bias", "adapter": "0.down, 0.up", "replaced": "2.weight, 2.bias", "swapped": "2.weight"}


def test_layers_that_came_after_ddp_are_refused_by_name(pool: ProcessPool, tmp_path: Path) -> None:
    for refusals in pool.run("jobs.reducer_tasks:changed_before", 2, folder=str(tmp_path)):
        assert "0.bias: unfrozen, added or replaced" in refusals.pop("not shown")[0]  # with the first step
        for name, messages in refusals.items():
            for message in messages:
                assert message.startswith(f"{LACKING[name]}: unfrozen, added or replaced after the DDP model was made")
                assert "then make the DDP model" in message
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("way", ["powersgd", "recorder", "at close", "error"])
def test_layers_that_come_in_training_are_told_of(pool: ProcessPool, tmp_path: Path, way: str) -> None:
    change = "adapter" if way == "recorder" else "unfrozen bias"
    first, second = pool.run(
        "jobs.reducer_tasks:changed_while_attached", 2, folder=str(tmp_path), change=change, way=way
    )
    assert f"{LACKING[change]}: unfrozen, added or replaced" in first
    assert ("step 1: " in first) == (way not in ("recorder", "at close"))
    assert (way == "error") == bool(second)


def test_layers_frozen_after_ddp_are_refused_unless_ddp_looks_for_unused_ones(
    pool: ProcessPool, tmp_path: Path
) -> None:
    """Thawed later, they are refused by compression, and a recorder tells of those that were to be recorded."""
    results = pool.run("jobs.reducer_tasks:frozen_after_ddp", 2, folder=str(tmp_path))
    for result in results:
        assert result["refused"].startswith("DDP waits for gradients of 0.weight, 0.bias: frozen")
        assert result["equal"]
        assert "0.weight was frozen when compression was attached" in result["thawed"]
    every, biases, none = results[0]["unrecorded"]
    assert "0.weight, 0.bias: frozen when the recording began and trained now" in every
    assert "0.weight" not in biases
    assert "0.bias: frozen" in biases
    assert not none


def test_a_layer_added_after_fully_shard_is_told_of(pool: ProcessPool, tmp_path: Path) -> None:
    by_rank = pool.run("jobs.reducer_tasks:added_under_fsdp", 4, folder=str(tmp_path))
    assert all("0.scale: unfrozen, added or replaced after fully_shard" in messages[0] for messages in by_rank)
    assert "0.scale: unfrozen, added or replaced after fully_shard" in by_rank[0][1]


def test_a_part_called_module_keeps_its_name(pool: ProcessPool, tmp_path: Path) -> None:
    for result in pool.run("jobs.reducer_tasks:a_module_called_module", 2, folder=str(tmp_path / "trace")):
        assert result["recorded"] == ["weight", "module.weight", "module.bias"]
        assert result["same"]
        assert result["measured"] == [["module.weight", "weight"], ["head.weight", "weight"]]


def test_a_recorder_averages_over_the_ranks_with_input_as_ddp_does(pool: ProcessPool, tmp_path: Path) -> None:
    for result in pool.run("jobs.reducer_tasks:uneven_inputs", 3, folder=str(tmp_path)):
        assert result["equal"]
        assert "join(divide_by_initial_world_size=False)" in result["refused"]


@pytest.mark.parametrize("way", ["compress", thorough("recorder"), thorough("local steps")])
def test_copies_are_those_of_plain_ddp(pool: ProcessPool, tmp_path: Path, way: str) -> None:
    pool.run("jobs.reducer_tasks:copies", 4, folder=str(tmp_path), way=way)
