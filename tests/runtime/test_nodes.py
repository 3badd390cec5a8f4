"""Between nodes of several ranks: who owns what, bytes, checkpoints, and what is refused."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradlab.executor.ownership import forecast_payload, share_out
from gradlab.layout import Layer
from gradlab.plan import FINITE_FLAG_BYTES, Group, Plan
from jobs.node_tasks import SHAPES
from support.laws import thorough
from support.process_pool import ProcessPool

CODECS: list[tuple[str, dict[str, Any]]] = [
    ("identity", {}),
    ("topk+powersgd", {"topk": {"density": 0.05}, "powersgd": {"rank": 2}}),
]


@given(
    st.lists(st.tuples(st.integers(1, 80), st.integers(1, 80)), min_size=1, max_size=30),
    st.integers(1, 6),
    st.integers(2, 4),
)
def test_every_element_has_one_owner(shapes: list[tuple[int, int]], local_ranks: int, nodes: int) -> None:
    layers = [Layer(f"layer{i}", shape, "linear") for i, shape in enumerate(shapes)]
    numel = {layer.name: layer.numel for layer in layers}
    plan = Plan(layers, tuple(Group(name, (name,), "topk") for name in numel if numel[name] >= 500))
    ownership = share_out(plan, local_ranks)
    for layer in layers:
        carried = [ownership.share(layer.name, one) for one in range(local_ranks)]
        assert [i for piece in carried for i in range(piece.start, piece.stop)] == list(range(layer.numel))
    grouped = [layer for group in plan.compressed_groups for layer in group.layers]
    for group in plan.compressed_groups:
        owner = ownership.groups[group.name]
        assert all(ownership.numel(layer, owner) == numel[layer] for layer in group.layers)
    loads = [sum(ownership.numel(layer.name, one) for layer in layers) for one in range(local_ranks)]
    # No rank carries more than an equal share and one more part.
    assert max(loads) <= sum(loads) / local_ranks + max(
        [layer.numel for layer in layers if layer.name in grouped or layer.numel < 1024 * local_ranks], default=0
    ) + len(layers)
    flags = FINITE_FLAG_BYTES * max(0, len(set(ownership.groups.values())) - 1)
    forecasts = [forecast_payload(plan, ownership, one, nodes) for one in range(local_ranks)]
    assert sum(forecasts) == pytest.approx(plan.payload_bytes(nodes) + flags)


def test_layers_of_one_shape_do_not_all_go_to_one_rank() -> None:
    """Of a transformer's four matrices, taken in turn, rank 2 of 4 would get every first one of the MLPs."""
    shapes = {"qkv": (192, 64), "out": (64, 64), "up": (256, 64), "down": (64, 256)}
    layers = [Layer(f"{i}.{name}", shape, "linear") for i in range(6) for name, shape in shapes.items()]
    ownership = share_out(Plan.uniform(layers, "topk", density=0.1), 4)
    loads = [sum(ownership.numel(layer.name, one) for layer in layers) for one in range(4)]
    assert max(loads) <= 1.1 * sum(loads) / 4


@pytest.mark.parametrize(("codec", "settings"), CODECS[:2])
def test_bytes_are_as_forecast(pool: ProcessPool, codec: str, settings: dict[str, Any]) -> None:
    ranks, local_ranks = 4, 2
    results = pool.run("jobs.node_tasks:bytes_of_steps", ranks, codec=codec, settings=settings, local_ranks=local_ranks)
    elements = sum(map(prod, SHAPES.values()))
    for rank, result in enumerate(results):
        assert result["payload"] == result["forecast"]
        assert result["nodes"] == {
            "node": rank // local_ranks,
            "nodes": ranks // local_ranks,
            "local_rank": rank % local_ranks,
            "local_ranks": local_ranks,
        }
        # To the others' owners what they carry, and to all others what this rank carries.
        own = result["dense"]
        assert result["inside"] == 4 * elements - own + (local_ranks - 1) * (own + 3)  # and three flags
        assert result["gradients"] == results[0]["gradients"]
    node = results[:local_ranks]
    assert sum(result["dense"] for result in node) == 4 * elements
    owners = sum(bool(result["groups"]) for result in node)
    assert sum(result["payload"] for result in node) == node[0]["of the plan"] + 4 * max(0, owners - 1)
    if codec == "identity":
        # A mean of 4 numbers in another order: 3 roundings of half a unit each, on either side.
        assert max(result["farthest"] for result in results) < 4e-7


def test_results_that_wait_to_be_spread_keep_their_memory(pool: ProcessPool) -> None:
    for same in pool.run("jobs.node_tasks:memory_is_not_reused_too_early", 4):
        assert same == [True] * 5


@pytest.mark.parametrize(("codec", "settings"), CODECS[1:2])
def test_results_do_not_depend_on_the_order_inside(pool: ProcessPool, codec: str, settings: dict[str, Any]) -> None:
    """On a GPU averages and results go by one order in one group, on a CPU by two."""
    for result in pool.run("jobs.node_tasks:gradients_by_order", 4, codec=codec, settings=settings):
        assert result["same"]
        assert result["orders"] == [2, 1]
        assert result["sent"][0] == result["sent"][1]


def test_a_resumed_run_is_the_run_that_went_on(pool: ProcessPool) -> None:
    for same in pool.run("jobs.node_tasks:resumed", 4, local_ranks=2):
        assert same == [True] * 3


@pytest.mark.parametrize(("before", "after"), [(2, 1), thorough(1, 2), thorough(2, 2)])
def test_another_number_of_local_ranks(pool: ProcessPool, before: int, after: int) -> None:
    """What was due between nodes is due between other nodes."""
    results = pool.run("jobs.node_tasks:redistributed", 4, before=before, after=after)
    for result in results:
        due = result["due"]
        assert due["drop"] == dict.fromkeys(due["before"], 0.0)
        for policy in ("split", "sum"):
            assert due[policy] == pytest.approx(due["before"], rel=1e-6)
        assert result["iterations"] == [5, 4]
        assert ("local_ranks is" in result["refusal"]) == (before != after)
    owned = [name for result in results for name in result["owned"]]
    assert sorted(owned) == sorted(["both", "wide"] * (4 // after))


def test_what_is_not_a_node_is_refused_at_construction(pool: ProcessPool) -> None:
    first, *others = pool.run("jobs.node_tasks:refused", 4)
    expected = {
        "a whole mesh": "within: a mesh of 2 dimensions, expected one of them, such as mesh['local']",
        "a word": "within = 'nodes' (str), expected a dimension of a DeviceMesh or a process group, 'node' or None",
        "a number": "within = '2' (int), expected",
        "on one rank only": "rank 0 has the node [0, 1], rank 1 has none; every rank needs the group of its own node",
        "one node": "all 4 ranks are on one node",
        "other sizes": "nodes of [3, 1] ranks, expected as many on each",
        "overlapping": "rank 0 has the node [0, 1, 2, 3], rank 1 has the node [0, 1]",
        "not in it": "rank 1: within: a process group that this rank is not in",
        "outside the model's group": "within has the ranks [2, 3], which are not in the model's process group [0, 1]",
        "refresh": "the plan has a refresh",
    }
    for name, words in expected.items():
        assert words in first[name], name
        assert name == "outside the model's group" or all(other[name] == first[name] for other in others), name


def test_torchrun_tells_the_default(pool: ProcessPool) -> None:
    results = pool.run("jobs.node_tasks:as_torchrun_says", 4, sizes=[2, 2])
    assert [(result["nodes"]["node"], result["nodes"]["local_rank"]) for result in results] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert all(result["flat"] is None and not result["warnings"] for result in results)
    for sizes in ([4], [1, 1, 1, 1]):
        for result in pool.run("jobs.node_tasks:as_torchrun_says", 4, sizes=sizes):
            assert (result["nodes"], result["warnings"]) == (None, [])
    first, *others = pool.run("jobs.node_tasks:as_torchrun_says", 4, sizes=[3, 1])
    assert first["nodes"] is None
    assert "machines have different numbers of ranks (1, 3)" in first["warnings"][0]
    assert not any(other["warnings"] for other in others)


@pytest.mark.parametrize("late", [0, 3])
def test_a_group_may_be_dropped_at_once_though_one_rank_is_late(pool: ProcessPool, late: int) -> None:
    assert pool.run("jobs.node_tasks:groups_dropped_at_once", 4, late=late) == [3] * 4


@pytest.mark.parametrize("level", ["warn", "error"])
def test_a_rule_is_told_once_of_all_ranks(pool: ProcessPool, level: str) -> None:
    first, *others = pool.run("jobs.node_tasks:told_once", 4, level=level)
    for result in (first, *others):
        assert result["found"] == ["non_finite"]
        assert bool(result["error"]) == (level == "error")
        assert result["nan"] is (True if level == "warn" else None)
    assert len(first["told"]) == (level == "warn")
    assert not any(other["told"] for other in others)


@pytest.mark.parametrize("local_ranks", [1, 2])
def test_dense_layers_are_forecast_in_their_own_type(pool: ProcessPool, local_ranks: int) -> None:
    for found in pool.run("jobs.node_tasks:bytes_in_16_bits", 4, local_ranks=local_ranks):
        assert all(counted == forecast for counted, forecast in found), found
