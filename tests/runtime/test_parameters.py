"""FSDP2's all-gathers by a plan: two nodes of two real ranks, whose parameters travel quantized."""

from __future__ import annotations

from typing import Any

import pytest

from gradlab import codecs
from gradlab.plan import Plan
from jobs.fsdp_tasks import Network
from support.laws import thorough
from support.process_pool import ProcessPool


@pytest.mark.parametrize(
    ("codec", "settings"),
    [
        ("block_scaled", {"dtype": "int8"}),
        thorough("block_scaled", {"dtype": "float8_e4m3fn", "block_size": 32}),
        thorough("block_scaled", {"dtype": "nvfp4"}),
    ],
)
def test_all_ranks_compute_with_what_each_shard_decodes_to(
    pool: ProcessPool, codec: str, settings: dict[str, Any]
) -> None:
    for result in pool.run("jobs.parameter_tasks:decoded", 4, codec=codec, settings=settings):
        assert not result["wrong"]
        assert result["agree"]
        assert len(result["changed"]) == 7  # matrices of three blocks, and the head


@pytest.mark.thorough
def test_rotated_parameters_come_back(pool: ProcessPool) -> None:
    for result in pool.run("jobs.parameter_tasks:decoded", 4, codec="block_scaled", settings={}, rotated=True):
        assert not result["wrong"]
        assert result["agree"]


@pytest.mark.parametrize(
    ("parameters", "shard", "gathers"),
    [
        ("int8", {}, 2),
        thorough("int4", {"reshard_after_forward": False}, 1),
        thorough("mxfp8", {"mp_policy": "16 bits"}, 2),
        thorough("int8", {"reshard_after_forward": False, "mp_policy": "16 bits"}, 1),
    ],
)
def test_bytes_are_as_forecast_and_evaluation_is_exact(
    pool: ProcessPool, parameters: str, shard: dict[str, Any], gathers: int
) -> None:
    """The root keeps its parameters from forward to backward, as FSDP has it."""
    for result in pool.run("jobs.parameter_tasks:trained", 4, parameters=parameters, shard=shard):
        assert result["payload_bytes"] == result["forecast_payload_bytes"] == result["wire_bytes"]
        assert result["payload_bytes"] < gathers * result["dense"] / (1 if "mp_policy" in shard else 2)
        assert (result["evaluated"] and result["after"]) or "mp_policy" in shard


@pytest.mark.parametrize(
    ("settings", "around"),
    [
        thorough({"dtype": "int8", "stochastic": True}, []),
        ({"dtype": "int4"}, ["ef21", "hadamard"]),
        thorough({"dtype": "mxfp4"}, ["ef21"]),
    ],
)
def test_a_resumed_run_is_the_one_that_went_on(pool: ProcessPool, settings: dict[str, Any], around: list[str]) -> None:
    assert all(map(all, pool.run("jobs.parameter_tasks:resumed", 4, settings=settings, around=around)))


def test_ranks_hold_the_sums_of_differences_and_gather_them_once_a_step(pool: ProcessPool) -> None:
    for result in pool.run("jobs.parameter_tasks:differences", 4):
        assert all(result["same"])
        first, second, *rest = result["payloads"]
        assert first > second  # the first values travel as they are
        assert rest == [second, second]
        assert result["changed"]


def test_three_kinds_of_traffic_together(pool: ProcessPool) -> None:
    for result in pool.run("jobs.parameter_tasks:in_two_levels", 4):
        assert result["agree"]
        for kind in ("inside", "parameters"):
            assert result[kind]["payload_bytes"] == result[kind]["forecast_payload_bytes"] > 0


@pytest.mark.thorough
def test_what_fsdp_may_do_beside_changes_nothing(pool: ProcessPool) -> None:
    for result in pool.run("jobs.parameter_tasks:beside", 4):
        assert all(result.values()), result


def test_what_does_not_fit_is_refused(pool: ProcessPool) -> None:
    expected = {
        "a selection": "parameters: topk (embedding.weight to head.weight) does not send every value",
        "feedback": "is for gradients; a plan of parameters takes ef21 and hadamard",
        "a codec's name": "'block_scaled' is a codec, expected a Plan or the path of an artifact",
        "no format": "int7",
        "other shapes": "parameters: the plan is of another model: ~ embedding.weight: expected shape [30, 23]",
        "an all-gather already": "module blocks.1 has an all-gather of its own already",
        "replaced": "module blocks.0 has another all-gather now than the one that compress_fsdp set",
    }
    for messages in pool.run("jobs.parameter_tasks:refused", 4):
        assert messages.keys() == expected.keys()
        for name, words in expected.items():
            assert words in messages[name], (name, messages[name])


def test_a_plan_of_parameters_leaves_embeddings_exact_and_keeps_no_errors() -> None:
    plan = Plan.uniform(Network(), "block_scaled", dtype="int4", exchanges="parameters")
    named = {name for group in plan.groups for name in group.layers}
    assert "embedding.weight" not in named
    assert {"head.weight", "blocks.0.up.weight"} <= named
    assert all(not group.wrappers for group in plan.groups)
    assert codecs.make("block_scaled", dtype="int4").about.defaults.error_feedback
