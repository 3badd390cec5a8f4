"""State counted before a run, beside the state of one."""

from __future__ import annotations

from typing import Any

import pytest

from gradlab.analysis.forecast import Network
from gradlab.analysis.forecast.state import state_of_rank
from gradlab.layout import Layer
from gradlab.plan import FEEDBACK, Group, Plan, Wrap, state_bytes
from gradlab.plan.plan import between
from gradlab.plan.state_bytes import with_buffers
from support.contract import SOME, keeps_what_was_counted, lockstep, plan_for
from support.prescribed import SHAPES, gradients, layers

FEW = {name: SHAPES[name] for name in SOME}
STACKS: list[tuple[str, dict[str, Any], tuple[Wrap, ...]]] = [
    ("topk", {}, (Wrap("momentum_correction"),)),
    ("topk", {}, (Wrap("error_feedback", {"buffer": "int8"}), Wrap("two_way"))),
    ("sign", {}, (Wrap("error_feedback"), Wrap("two_way", {"server": "rank"}))),
    ("qsgd", {"bits": 2, "norm": "l2"}, (Wrap("error_feedback"), Wrap("two_way"))),
    ("random_k", {"density": 0.1}, (Wrap("momentum"), Wrap("error_feedback"))),
    ("ecsq", {}, (Wrap("local_momentum", {"buffer": "bfloat16"}), Wrap("ef21"), Wrap("two_way", {"from_ranks": 3}))),
    ("ecsq", {}, (Wrap("error_feedback"), Wrap("two_way", {"from_ranks": 4}))),
    ("identity", {}, (Wrap("dion"),)),
    ("block_scaled", {}, (Wrap("weight_decay", {"form": "apart"}), Wrap("error_feedback"), Wrap("hadamard"))),
    ("sign", {}, (Wrap("onebit_adam"), Wrap("error_feedback", {"buffer": "bfloat16"}))),
]


def run(plan: Plan, steps: int) -> Any:
    """Run a plan on 3 ranks in lockstep."""
    return lockstep(plan, 3, steps, lambda rank, step: gradients(FEW, rank, step))


def test_bases_that_were_learned_are_no_state() -> None:
    """The contract suite holds all other codecs, as they are and under feedback."""
    plan = plan_for("gradiveq", "layer", True, shapes=FEW, steady=True)
    assert keeps_what_was_counted(plan, run(plan, 3))


@pytest.mark.parametrize(("codec", "settings", "wraps"), STACKS, ids=lambda value: str(value)[:60])
def test_stacks_of_wrappers(codec: str, settings: dict[str, Any], wraps: tuple[Wrap, ...]) -> None:
    groups = tuple(Group(one.name, (one.name,), codec, settings, wraps) for one in layers(FEW) if one.numel)
    plan = between(Plan(layers(FEW), groups), 3)
    assert keeps_what_was_counted(plan, run(plan, 3))


def test_70_billion_parameters_are_counted_and_residuals_in_16_bits_take_half() -> None:
    names = [f"{block}.{name}" for block in range(100) for name in ("up", "gate", "down")]
    matrices = [Layer(name, (8192, 28672), "linear") for name in names]
    plan = Plan.uniform(matrices, "topk", wrappers=FEEDBACK)
    values = 300 * 8192 * 28672
    assert state_bytes(plan, 64) == {"residual": 4 * values}
    assert state_bytes(with_buffers(plan, "bfloat16"), 64) == {"residual": 2 * values}
    assert state_bytes(plan, 64, groups={"7.up"}) == {"residual": 4 * 8192 * 28672}


def test_in_the_reduce_scatter_a_rank_keeps_residuals_of_all_shards_and_serves_nobody() -> None:
    plan = Plan.uniform([Layer("w", (1030, 64), "linear")], "block_scaled", dtype="int4")
    assert state_of_rank(plan, 8, Network(nodes=(8,), sharded=True)) == {"residual": 4 * 8 * 129 * 64}  # rows padded
    assert "server_residual" in state_of_rank(plan, 8, Network(nodes=(8,)))
