"""Recording what travels between nodes: means of nodes under DDP, and gradients put together from FSDP2's shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gradlab.analysis.forecast.network import Profile
from gradlab.trace import Trace, check
from jobs.node_recording_tasks import STEPS, UNUSED_AT
from support.laws import thorough
from support.process_pool import ProcessPool


def assert_same(one: Trace, other: Trace) -> None:
    """Equal gradients, bit for bit, and the same layers without one."""
    assert (one.world_size, one.steps.tolist()) == (other.world_size, other.steps.tolist())
    assert [layer.name for layer in one.layers] == [layer.name for layer in other.layers]
    for rank in range(one.world_size):
        np.testing.assert_array_equal(one.scalars(rank)["unused"], other.scalars(rank)["unused"])
        for layer in one.layers:
            np.testing.assert_array_equal(one.read(layer.name, rank), other.read(layer.name, rank))


@pytest.mark.parametrize("nodes", [2, thorough(1)])
def test_means_of_nodes_are_those_of_the_ranks_recording(pool: ProcessPool, tmp_path: Path, nodes: int) -> None:
    """Bit for bit, and training is plain DDP's."""
    results = pool.run("jobs.node_recording_tasks:under_ddp", 4, nodes=nodes, folder=str(tmp_path))
    local_ranks = 4 // nodes
    for rank, result in enumerate(results):
        assert result["same"]
        assert result["written"] == [STEPS, STEPS if rank % local_ranks == 0 else 0]
    of_ranks = Trace(tmp_path / "ranks", average_ranks=local_ranks)
    of_nodes = Trace(tmp_path / "nodes")
    assert of_nodes.world_size == nodes
    assert not check(tmp_path / "nodes").problems
    assert_same(of_ranks, of_nodes)
    assert of_nodes.metadata["averaged_ranks"] == local_ranks


@pytest.mark.parametrize("divide", [thorough(None), 4.0])
def test_a_recording_under_fsdp_is_that_of_the_nodes_under_ddp(
    pool: ProcessPool, tmp_path: Path, divide: float | None
) -> None:
    """Bit for bit, with a block that a step leaves out; and training is native HSDP's."""
    for result in pool.run("jobs.node_recording_tasks:under_fsdp", 4, nodes=2, folder=str(tmp_path), divide=divide):
        assert result["same"]
    under_ddp, under_fsdp = Trace(tmp_path / "ddp"), Trace(tmp_path / "fsdp")
    assert under_fsdp.world_size == 2
    assert_same(under_ddp, under_fsdp)
    for trace in (under_ddp, under_fsdp):
        assert trace.times is not None
        assert (trace.times.seconds > trace.times.computing, trace.times.bits_per_second) == (True, None)
        assert (trace.of_nodes, Profile.as_recorded(trace.times).compute_source) == (True, "as recorded on 2 nodes")
    assert under_fsdp.scalars(0)["unused"].any(axis=1).tolist() == [step == UNUSED_AT for step in range(STEPS)]


def test_a_loss_in_pieces_makes_one_step_of_several_passes(pool: ProcessPool, tmp_path: Path) -> None:
    """For a recorder, and for a doctor; and gradients are native HSDP's, bit for bit."""
    results = pool.run("jobs.node_recording_tasks:of_pieces", 4, folder=str(tmp_path))
    assert all(result["same"] and result["seen"] == 2 for result in results)
    with Trace(tmp_path / "pieces") as trace:
        assert (trace.steps.tolist(), trace.world_size) == ([0, 1], 2)
        for layer in trace.layers:
            mean = (trace.read(layer.name, 0)[1] + trace.read(layer.name, 1)[1]).reshape(layer.shape) / 2
            np.testing.assert_allclose(mean, results[0]["gradients"][layer.name], rtol=1e-5, atol=1e-8)


def test_what_does_not_fit_is_refused_on_all_ranks(pool: ProcessPool, tmp_path: Path) -> None:
    expected = {
        "no between": "give between=mesh['replicate']",
        "wrap": "wrap is of a model in DDP",
        "native": "between is not the dimension of the model's mesh",
        "hooked": "has an all-reduce hook already",
        "between in DDP": "between is of a model under FSDP2",
        "whole group": "within = '3' (int)",
        "bare": "not in DDP",
    }
    results = pool.run("jobs.node_recording_tasks:refusals", 4, folder=str(tmp_path))
    for result in results:
        assert result == results[0]
        assert result["written"] == "False"
        for name, text in expected.items():
            assert text in result[name], name
