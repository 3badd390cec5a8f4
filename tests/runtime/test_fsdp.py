"""Under FSDP2: real ranks that shard inside a node, and exchange shards between nodes by a plan."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from gradlab.ddp.sharded_units import only_ones
from gradlab.layout import Layer
from gradlab.plan import FEEDBACK, Group, Plan
from gradlab.plan.shards import shard_plan
from gradlab.runtime.checkpoint import same_shards, sealed
from jobs.fsdp_tasks import OPTIONS
from support.laws import law, thorough
from support.process_pool import ProcessPool

REPORTS = "jobs.report_tasks_frameworks"
BETWEEN: dict[str, Any] = {"codec": "several", "settings": {"of": "between"}}


# The campaign `nodes` holds each of FSDP's options by itself, here and below.
NOTHING = [
    "every pass reduced in 32 bits, gradients summed",
    thorough("taken over, nodes averaged with the last micro-batch"),
    "taken over, as torchtitan shards and sums",
    thorough("a loss in pieces"),
    "taken over, a loss in pieces by a part of a unit",
    thorough("taken over, gathered anew in other groups"),
    thorough("Muon"),
    thorough("parameters gathered as they are"),
]


@pytest.mark.parametrize("option", NOTHING)
def test_without_compression_it_is_native_hsdp(pool: ProcessPool, option: str) -> None:
    """Parameters, bit for bit. FSDP converts a unit's gradient, or adds it, as soon as the hook returns."""
    for result in pool.run("jobs.fsdp_tasks:against_native", 4, nodes=2, steps=2, option=option):
        assert result["same"]
        assert result["counted"] == result["forecast"]


@pytest.mark.parametrize("option", ["16 bits", thorough("default")])
def test_ranks_agree_and_bytes_are_as_forecast(pool: ProcessPool, option: str) -> None:
    """With a codec of each kind; dense layers travel in 16 bits where FSDP reduces in these."""
    for rank, result in enumerate(pool.run("jobs.fsdp_tasks:compressed", 4, nodes=2, option=option, **BETWEEN)):
        assert result["agree"]
        assert result["finite"]
        assert result["kept"]
        assert result["counted"] == result["forecast"]
        assert result["nodes"] == {"node": rank // 2, "nodes": 2, "local_rank": rank % 2, "local_ranks": 2}
        assert result["refused"] == "this Exchange is closed; make a new one"


@pytest.mark.parametrize("joined", [{}, {"joined": ["blocks.1.up.weight", "blocks.1.down.weight"]}])
def test_it_does_what_lockstep_does_with_the_nodes_shards(pool: ProcessPool, joined: dict[str, Any]) -> None:
    """Gradients and states, bit for bit, whatever FSDP does beside: layers of a group are frozen, too."""
    option, how = "all together", {**BETWEEN, "settings": {**BETWEEN["settings"], **joined}}
    for result in pool.run("jobs.fsdp_tasks:against_lockstep", 4, nodes=2, option=option, **how):
        assert result["same"] == [True] * 5
        assert result["states"] == [True] * 5
        assert result["finite"] == [step != OPTIONS[option].get("overflow_at") for step in range(5)]


@pytest.mark.parametrize("divide", [thorough(None), 1.0])
def test_a_compressed_reduce_scatter_does_what_lockstep_does(pool: ProcessPool, divide: float | None) -> None:
    """In two levels, with an exchange between nodes behind it; bit for bit, with residuals."""
    arguments = {"divide": divide, "nodes": 2, "codec": "several", "settings": {"of": "inside"}, "between": "topk"}
    for result in pool.run("jobs.fsdp_tasks:reduced", 4, **arguments):
        assert result["same"] == [True] * 3
        assert result["counted"] == result["forecast"]


def test_a_run_resumed_by_distributed_checkpoint_is_the_run_that_went_on(pool: ProcessPool, tmp_path: Path) -> None:
    """With Muon for matrices, and AdamW for the rest."""
    for result in pool.run("jobs.fsdp_tasks:resumed", 4, nodes=2, folder=str(tmp_path / "checkpoint"), levels=2):
        assert result == {"same": [True] * 2, "iterations": [4, 4]}


def test_four_nodes_become_two(pool: ProcessPool) -> None:
    for result in pool.run("jobs.fsdp_tasks:fewer_nodes", 4):
        before, *after = result["due"]
        assert after == pytest.approx([before] * 2, rel=1e-6)
        assert result["iteration"] == 4
        assert "load_state_dicts takes the checkpoints of all old ranks" in result["refusal"]


def test_residuals_of_the_reduce_scatter_go_on_at_fewer_nodes(pool: ProcessPool) -> None:
    """Four nodes of two shards become two: the mean over nodes of what waits, by local rank and shard."""
    expected = {
        "a changed bit": "is damaged (its sha256 differs)",
        "fewer shards": "inside nodes, expected the states of 2 shards",
        "no state": "inside nodes, expected the states of 2 shards",
        "no parts": "inside nodes, expected the states of 2 shards",
        "another plan": "inside nodes, plan is 'other'",
        "one level": "this run has a plan inside nodes",
        "a state is missing": "checkpoint of rank 1: other states than in that of rank 0",
        "several steps": "inside nodes, of rank 1: iteration is",
        "a node is missing": "checkpoints of ranks [0, 2, 3], expected those of ranks 0 to N - 1",
        "no list": "expected a list with the checkpoint of every old rank, not int",
        "a policy": "residuals = 'mean', expected one of",
        "alone": "load_state_dicts takes the checkpoints of all old ranks",
    }
    for result in pool.run("jobs.fsdp_tasks:fewer_nodes_inside", 4, nodes=2):
        due = result["due"]
        assert min(due["before"]) > 0
        assert due["drop"] == [0.0] * 4
        assert due["sum"] == pytest.approx(due["before"], rel=1e-6)
        assert due["split"] == pytest.approx(due["before"], rel=1e-6)
        assert result["iterations"] == [3] * 3
        assert result["refusals"].keys() == expected.keys()
        for name, words in expected.items():
            assert words in result["refusals"][name], name


def test_changes_that_would_let_nodes_drift_apart_are_refused(pool: ProcessPool) -> None:
    expected = {
        "unfreeze": "module blocks.1: parameters that were frozen when gradlab was attached have gradients now",
        "unfreeze_part": "module blocks.1: parameters that were frozen when gradlab was attached have gradients now",
        "put_off": "module blocks.1: set_requires_all_reduce(False) puts its gradients off, and others are exchanged",
        "assign": "its parameters were replaced, as load_state_dict(assign=True) does",
        "override": "module blocks.1 has another hook now than the one that compress_fsdp set",
        "add": "fully_shard was called on modules after compress_fsdp",
        "reenter": "checkpoint with use_reentrant=False",
    }
    for messages in pool.run("jobs.fsdp_tasks:changed", 4, nodes=2):
        assert messages.keys() == expected.keys()
        for name, words in expected.items():
            assert words in messages[name], name


def test_codecs_see_the_mean_where_fsdp_divides_after_the_hook(pool: ProcessPool) -> None:
    assert max(map(max, pool.run("jobs.fsdp_tasks:with_weight_decay", 4, nodes=2))) < 1e-5


@pytest.mark.parametrize("between", [True, False])
def test_rules_watch_the_reduce_scatter(pool: ProcessPool, between: bool) -> None:
    first, *others = pool.run("jobs.fsdp_tasks:rules_inside", 4, between=between)
    assert {rule for rule, _ in first["found"]} == {"residual_grows"}
    assert all(group.endswith("in the reduce-scatter") for _, group in first["found"])
    assert "in the reduce-scatter: the residual's norm is" in first["error"]
    assert all(other == first for other in others)


def test_checkpoints_of_many_nodes_are_in_their_order() -> None:
    """As numbers: as text node 10 would come before node 2."""
    saved = [sealed({"shards": 2, "node": rank // 2, "local_rank": rank % 2, "rank": rank}) for rank in range(24)]
    column = same_shards(saved, {"shards": 2, "local_rank": 1})
    assert [one["rank"] for one in column] == list(range(12))


def test_what_does_not_fit_is_refused_at_construction(pool: ProcessPool) -> None:
    expected = {
        "native HSDP, other ranks": "between is not the dimension of the model's mesh along which it is replicated",
        "native HSDP in part": "some modules are under native HSDP and others are not, expected one mesh",
        "no FSDP": "got a Network without a module that fully_shard was called on",
        "no model": "got a int, expected a model that fully_shard was called on",
        "the whole mesh": "between: a mesh of 2 dimensions, expected one of them, such as mesh['shard']",
        "a number": "between = '2' (int), expected a dimension of a DeviceMesh or a process group",
        "neither": "neither between nor within; mesh = init_device_mesh(",
        "no plan inside": "between and within: give inside= too",
        "a plan inside alone": "give within=mesh['shard'] too",
        "within other ranks": "within has the ranks [",
        "means on its way": "codec powersgd takes means over ranks on its way",
        "a wrapper": "wrapper two_way has no place in a reduce-scatter, only error_feedback, hadamard",
        "the shards' mesh": "are not rows and columns of one mesh",
        "columns that cross": "are not rows and columns of one mesh",
        "one node": "between has one rank",
        "other shapes": "embedding.weight: expected shape [30, 21], the model has [30, 23]",
        "other names": "old.embedding.weight",
        "no plan": "the plan is a NoneType, expected a Plan or the path of an artifact",
        "ranks disagree": "ranks disagree about segment_bytes: rank 1 has 1001, rank 0 has 1000",
        "an option": "measure_every = -1, expected a whole number from 0",
        "refresh": "the plan has a refresh",
        "a part": "embedding.weight and 10 other parameters are of no module that fully_shard was called on",
        "parts alone": "fully_shard was called on parts of the model alone, and each has a backward pass of its own",
        "several meshes": "modules are sharded along several meshes",
        "offloaded": "has its parameters offloaded to the CPU",
        "not made": "the model itself has its parameters on the meta device; make them first: model.to_empty(",
        "a hook already": "module blocks.1 has an all-reduce hook already",
        "a reduce-scatter already": "module blocks.1 has a reduce-scatter of its own already",
        "fits": "",
        "attached twice": "the model itself has an all-reduce hook already",
        "learned": "codec gradiveq cannot work on shards, as its learned tensors were fitted on whole layers; "
        "blocks.0.up.weight has the shape [43, 21]",
    }
    for messages in pool.run("jobs.fsdp_tasks:refused", 4):
        assert messages.keys() == expected.keys()
        for name, words in expected.items():
            assert words in messages[name], name
            assert bool(words) == bool(messages[name]), name


def test_a_parameter_without_a_gradient_is_told_of(pool: ProcessPool) -> None:
    for messages in pool.run("jobs.fsdp_tasks:unused", 4):
        assert "the model itself: a gradient of 315 elements, expected 645, of 3 parameters" in messages["not said"]
        assert "set_reduce_scatter_unused_params(True)" in messages["not said"]
        assert messages["said"] == ""
        assert "others of group joined have" in messages["a group in pieces"]
        assert messages["frozen inside"] == ""


def test_passes_of_one_optimizer_step_are_a_step(pool: ProcessPool) -> None:
    """A head that is called on its own has passes of its own; a batch may be skipped after them."""
    for counted in pool.run("jobs.fsdp_tasks:steps_of_passes", 4):
        whole = [[step, step] for step in range(1, 5)]
        assert counted.pop("head_and_body_apart") == [[1, 1], [1, 2], [3, 3], [3, 4]]
        assert counted == dict.fromkeys(["in_pieces", "head_behind", "batches_skipped"], whole)


@law(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 40))
def test_parameters_that_came_are_known_where_their_sizes_alone_have_the_sum(sizes: list[int], total: int) -> None:
    places = range(len(sizes))
    every = [of for count in places for of in combinations(places, count + 1) if sum(sizes[n] for n in of) == total]
    assert only_ones(sizes, total) == (every[0] if len(every) == 1 else None)


def test_groups_are_cut_where_units_end() -> None:
    shapes = {"a": (4, 6), "b": (5, 6), "c": (3, 6), "d": (2, 6)}
    layers = tuple(Layer(name, shape, "linear") for name, shape in shapes.items())
    groups = (Group("ab", ("a", "b"), "topk", {"density": 0.1}, FEEDBACK), Group("cd", ("c", "d"), "sign"))
    shards = {"a": (2, 6), "b": (3, 6), "c": (0, 6), "d": (1, 6)}
    plan = shard_plan(Plan(layers, groups), shards, {"a": "one", "b": "", "c": "one", "d": "one"})
    assert [(group.name, group.layers) for group in plan.groups] == [
        ("ab in one", ("a",)),
        ("ab in the rest", ("b",)),
        ("cd", ("d",)),
    ]
    assert [layer.shape for layer in plan.layers] == list(shards.values())


# --- what public reports found; the campaign `reports` has more ------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_that_use_other_modules_are_refused(pool: ProcessPool, nodes: int) -> None:
    """Blocks of one shape, of which some ranks leave out another: their gradients must not be averaged in silence."""
    for told in pool.run(f"{REPORTS}:other_blocks", 4, nodes=nodes):
        assert told.startswith("step 0: ranks used other modules in this step")


def test_two_optimizers_are_followed(pool: ProcessPool) -> None:
    for found in pool.run(f"{REPORTS}:two_optimizers", 4):
        assert found["rates"] == [0.1, 0.02]
        assert "another optimizer (SGD) trains embedding.weight, head.weight" in found["one"]


def test_another_dtype_while_attached_ends_in_an_error(pool: ProcessPool) -> None:
    """Torch's own, as without compression: no rank goes on."""
    assert all(pool.run(f"{REPORTS}:other_dtype", 4))
