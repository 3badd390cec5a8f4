"""FSDP2's shards of layers that tensor parallelism has cut, and stages of a pipeline: 4 ranks, or 8."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gradlab.analysis.gradients import step_gradients
from gradlab.trace import Trace
from jobs.tensor_parallel_tasks import backward, whole
from support.laws import thorough
from support.process_pool import ProcessPool

TASKS, STAGES = "jobs.tensor_parallel_tasks", "jobs.pipeline_tasks"


@pytest.fixture(params=[4, thorough(8)])
def ranks(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPool]:
    with ProcessPool(8, tmp_path_factory.mktemp("pool") / "log") as started:
        yield started


@pytest.fixture
def pool(ranks: int, request: pytest.FixtureRequest, pool: ProcessPool) -> ProcessPool:
    return pool if ranks == 4 else request.getfixturevalue("larger")


def test_without_compression_it_is_native_hsdp_and_codecs_train(pool: ProcessPool, ranks: int) -> None:
    for result in pool.run(f"{TASKS}:trained", ranks):
        assert result.pop("same")
        assert len(result) == 2
        for codec, found in result.items():
            assert all(found.values()), (codec, found)


def test_all_parts_take_a_step_or_none_does_and_each_has_a_state_of_its_own(pool: ProcessPool, ranks: int) -> None:
    for rank, result in enumerate(pool.run(f"{TASKS}:skipped", ranks)):
        assert result["part"] == [rank % 2, 2]
        assert result["called"] == [f"rank {rank}", [*range(rank % 2, ranks, 2)]]
        assert result["found"] == [[*range(1, ranks // 2, 2)] if rank % 2 else []]  # of node 0
        assert (result["finite"], result["all filled"]) == (False, True)
        assert result["unchanged"]
        assert result["entries"] == ranks
        assert "part" in result["refusal"]
        assert result["resumed"] == [True, True]


def test_a_recording_has_whole_layers_of_each_node(pool: ProcessPool, ranks: int, tmp_path: Path) -> None:
    """Training is bit for bit that without it, and the trace holds what the whole model's gradients would be."""
    assert all(pool.run(f"{TASKS}:recorded", ranks, folder=str(tmp_path / "trace")))
    shards = ranks // 4
    model = whole()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Trace(tmp_path / "trace") as trace:
        assert (trace.world_size, len(trace.layers), len(trace.steps)) == (2, 8, 3)
        for step in trace.iterate(0, 3):
            of_nodes = []
            for node, recorded in enumerate(step_gradients(step)):
                model.zero_grad()
                for shard in range(shards):
                    backward(model, 2 * (shards * node + shard), step.index)
                for name, parameter in model.named_parameters():
                    expected = parameter.grad / shards
                    torch.testing.assert_close(torch.from_numpy(recorded[name]), expected, rtol=1e-4, atol=1e-7)
                of_nodes.append([parameter.grad / shards for parameter in model.parameters()])
            for parameter, *both in zip(model.parameters(), *of_nodes, strict=True):
                parameter.grad = sum(both) / 2
            optimizer.step()


def test_unequal_parts_are_not_recorded(pool: ProcessPool, ranks: int, tmp_path: Path) -> None:
    said = "TraceRecorder: 0.weight of (25, 16) is cut into 2 unequal parts"
    assert pool.run(f"{TASKS}:refused", ranks, folder=str(tmp_path / "trace")) == [said] * ranks


def test_parameters_of_a_part_are_gathered_quantized(pool: ProcessPool, ranks: int) -> None:
    for result in pool.run(f"{TASKS}:quantized", ranks):
        assert all(found for what, found in result.items() if what != "decoded" or ranks == 8), result


@pytest.mark.parametrize("way", ["ddp", "sharded"])
def test_a_stage_of_a_pipeline_has_a_plan_and_a_state_of_its_own(pool: ProcessPool, ranks: int, way: str) -> None:
    results = pool.run(f"{STAGES}:trained", ranks, way=way)
    assert [result.pop("entry") for result in results] == [f"rank {rank}" for rank in range(ranks)]
    for result in results:
        assert all(result.values()), result


def test_plans_of_other_layers_and_two_stages_at_once_are_refused_on_a_stage(pool: ProcessPool, ranks: int) -> None:
    for of_the_whole, of_both in pool.run(f"{STAGES}:refused", ranks):
        assert "is for another model (8 differences)" in of_the_whole
        assert "fully_shard was called on parts of the model alone, and each has a backward pass of its own" in of_both
