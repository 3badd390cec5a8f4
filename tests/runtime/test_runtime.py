"""The engine under real DDP: against plain DDP, PyTorch's own hook, lockstep, and defects."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gradlab.collectives import Mean
from gradlab.executor import PlanRun
from gradlab.layout import Layer
from gradlab.plan import Plan
from support.laws import thorough
from support.process_pool import ProcessPool
from support.small_disk import small_disk
from support.warm_python import python

PLAN = Plan.uniform([Layer("wide", (20, 30), "linear")], "topk", density=0.1)


def test_identity_plan_is_plain_ddp(pool: ProcessPool) -> None:
    """After 8 steps over three or more buckets the parameters are plain DDP's, bit for bit; no thread is left."""
    for result in pool.run("jobs.ddp_tasks:identity_equals_plain_ddp", 3, steps=8):
        assert result["equal"]
        assert result["buckets"] >= 3
        assert result["threads"] == []


@pytest.mark.parametrize("wrappers", [["error_feedback", "two_way"], thorough(["error_feedback"])])
def test_messages_whose_sizes_vary_give_all_ranks_the_same(pool: ProcessPool, wrappers: list[str]) -> None:
    """ecsq after 6 steps under AdamW; and after 1,000 with STEPS=1000 around it."""
    arguments = {"settings": {"bits": 0.3}, "wrappers": wrappers, "steps": int(os.environ.get("STEPS", "6"))}
    for result in pool.run("jobs.ddp_tasks:long_run", 3, codec="ecsq", adaptive=True, **arguments):
        assert result["agree"]
        assert result["finite"]


def test_warm_up_is_plain_ddp(pool: ProcessPool) -> None:
    for result in pool.run("jobs.ddp_tasks:warm_up_equals_plain_ddp", 2):
        assert result["equal"] == [True, False]
        dense, compressed = result["forecast"]
        assert result["payload"] == [dense] * 5 + [compressed]


def test_powersgd_over_several_buckets_on_gloo(pool: ProcessPool) -> None:
    """15 steps at 3 ranks over three or more buckets: no hang, and ranks agree bit for bit."""
    for result in pool.run("jobs.ddp_tasks:long_run", 3, codec="powersgd", steps=15, settings={"rank": 2}):
        assert result["agree"]
        assert result["finite"]
        assert result["buckets"] >= 3
        report = result["report"]
        assert report["iteration"] == 15
        assert report["payload_bytes_per_step"] == report["forecast_payload_bytes"]
        assert report["compression_ratio"] > 4
        assert (
            0 < min(report["relative_error_by_layer"].values()) <= max(report["relative_error_by_layer"].values()) < 1.5
        )


@pytest.mark.parametrize(("ranks", "rank"), [thorough(4, 2), (2, 4)])
def test_powersgd_equals_pytorchs_hook(pool: ProcessPool, ranks: int, rank: int) -> None:
    """On one bucket, given the same first Q, with warm start and error feedback: the same algorithm in float64.

    In float32, below 1e-5 at every step where the signal's rank is r. Where it is higher, feedback lets the unsent
    directions grow until they change places with the sent ones; there rounding is magnified, here from step 9 on.
    """
    arguments = {"rank": rank, "steps": 12}
    for differences in pool.run("jobs.ddp_tasks:against_torch_powersgd", ranks, dtype="float64", **arguments):
        assert max(differences) < 1e-12
    for differences in pool.run("jobs.ddp_tasks:against_torch_powersgd", ranks, dtype="float32", **arguments):
        assert max(differences if rank == 4 else differences[:9]) < 1e-5
        assert max(differences) < 1e-3


@pytest.mark.parametrize(("ranks", "below"), [(1, 0), (4, 0), (4, 2**40)])
def test_every_request_on_a_process_group(pool: ProcessPool, ranks: int, below: int) -> None:
    """All-to-alls with parts below so many bytes in two hops."""
    for result in pool.run("jobs.ddp_tasks:every_request", ranks, deterministic=True, relay_below=below):
        assert result["equal"]
        assert result["payload"][0] == result["payload"][1]
    for result in pool.run("jobs.ddp_tasks:every_request", ranks, deterministic=False, relay_below=below):
        assert result["payload"][0] == result["payload"][1]


def test_mixed_plan_with_a_group_over_several_buckets(pool: ProcessPool) -> None:
    for result in pool.run("jobs.ddp_tasks:mixed_groups", 3):
        assert result["equal"]
        assert result["errors"] == [[], *[["a", "b", "e"]] * 3]
        assert len(result["bytes"]) == 3
        assert all(by_bucket == whole for by_bucket, whole in result["bytes"])
        assert result["in_time"]


def test_codec_error_reaches_the_training_loop(pool: ProcessPool) -> None:
    for result in pool.run("jobs.ddp_tasks:codec_that_raises", 2):
        first, second, failing, after = result["messages"]
        assert first == second == ""
        for word in ("the defect", "ArithmeticError", "identity", "wide", "step 2"):
            assert word in failing
        assert "cast" not in failing  # DDP's own complaint about an exception where it expected a tensor
        assert after
        assert result["threads"] == []


def test_wrong_use_is_refused(pool: ProcessPool, tmp_path: Path) -> None:
    for messages in pool.run("jobs.ddp_tasks:refusals", 2, folder=str(tmp_path)):
        assert "DistributedDataParallel" in messages["bare"]
        assert "wide: expected shape [12, 30], the model has [12, 300]" in messages["other model"]
        assert "more [5, 5]: expected, not in the model" in messages["other model"]
        assert "ranks disagree about the plan" in messages["ranks differ"]
        assert "ranks disagree about segment_bytes" in messages["options differ"]
        differing = 'rank 1 has {"non_finite":"ignore"}, rank 0 has {"non_finite":"error"}'
        assert f"ranks disagree about rules: {differing}" in messages["rules differ"]
        assert "rank 1: no artifact at" in messages["one file missing"]
        assert "0.weight: an embedding with sparse=True" in messages["sparse"]
        assert "sparse=False" in messages["sparse"]
        assert "CompressionState" in messages["wrong state"]
        assert "does not have" in messages["foreign parameter"]
        assert "once" in messages["twice"]
        assert "has the communication hook compression_hook already" in messages["second state"]


def test_one_ranks_bad_option_is_named_by_all(pool: ProcessPool) -> None:
    for messages in pool.run("jobs.ddp_tasks:bad_options", 2):
        for option, message in messages.items():
            assert message.startswith("rank 1: ")
            assert option.split()[-1] in message
            assert "\n" not in message


SAID_OF_CHECKPOINTS = {
    "another entry": "group 'wide': 'wide/velocity' is nothing that its codec keeps",
    "a column less": "group 'wide': 'wide/q' has the shape [1, 299], expected [1 to 12, 300]",
    "many rows": "group 'wide': 'wide/q' has the shape [30, 300], expected [1 to 12, 300]",
    "no rows": "group 'wide': 'wide/q' has the shape [0, 300], expected [1 to 12, 300]",
    "damaged": "'wide::wide/residual' is damaged (its sha256 differs)",
    "missing": "'wide::wide/residual' is missing",
    "added": "'wide::wide/more' is not of it, as its checksums are without it",
    "rates": "what is no tensor is damaged (its sha256 differs)",
    "more": "what is no tensor is damaged (its sha256 differs)",
    "unsealed": "without checksums, expected what state_dict gives",
}


def test_a_damaged_checkpoint_is_refused_and_changes_nothing(pool: ProcessPool) -> None:
    for result in pool.run("jobs.ddp_tasks:bad_checkpoints", 2):
        assert result["unchanged"]
        for name, message in result["said"].items():
            assert "checkpoint" in message, name
            assert "\n" not in message
        assert {name: result["said"][name].removeprefix("checkpoint: ") for name in SAID_OF_CHECKPOINTS} == (
            SAID_OF_CHECKPOINTS
        )


def test_a_full_disk_costs_no_checkpoint(pool: ProcessPool, tmp_path: Path) -> None:
    """There is room for one rank's new state, not for both: neither replaces the old one."""
    with small_disk(tmp_path, 2**20) as disk:
        results = pool.run("jobs.ddp_tasks:checkpoints_on_a_full_disk", 2, disk=str(disk))
        for result in results:
            assert result["said"] == results[0]["said"]
            assert len(result["said"]) == 2
            assert all("No space left on device" in line and "\n" not in line for line in result["said"])
            assert (result["old"], result["before"], result["iteration"], result["problem"]) == (True, 2, 1, "")
        assert sorted(path.name for path in (disk / "run").iterdir()) == ["state_rank_0.pt", "state_rank_1.pt"]
        assert list((disk / "other").iterdir()) == []


def test_ranks_that_continue_from_other_states_are_refused(pool: ProcessPool) -> None:
    for message in pool.run("jobs.ddp_tasks:states_that_differ", 2):
        assert "ranks disagree about which states there are" in message


def test_use_after_close_is_refused(pool: ProcessPool) -> None:
    for message in pool.run("jobs.ddp_tasks:use_after_close", 2):
        assert "this CompressionState is closed" in message


@pytest.mark.parametrize("world_size", [2, 3, 107, 1000])
@pytest.mark.parametrize("noticing", ["none", "one", "all"])
def test_finite_flag_survives_rounding(world_size: int, noticing: str) -> None:
    """N times 1/N is not 1 in float32 at many N. One rank that is not finite shows, whatever the others notice."""
    others = {"none": 0, "one": 1, "all": world_size - 1}[noticing]
    for finite in (True, False):
        step = PlanRun(PLAN, 0, world_size).begin()
        step.add({"wide": torch.full((20, 30), 0.0 if finite else torch.inf)})
        flag = step.agree()
        request = next(flag)
        assert isinstance(request, Mean)
        assert request.tensor.tolist() == [1.0 if finite else -float(world_size)]
        total = torch.zeros(1)
        for own in (request.tensor.item(), *(2.0 if rank < others else 1.0 for rank in range(world_size - 1))):
            total += torch.tensor([own]) * (1.0 / world_size)
        with pytest.raises(StopIteration):
            flag.send(total)
        assert step.finite is finite
        assert not finite or step.noticed is (others > 0)


def test_a_layer_without_a_gradient_is_held_where_no_rank_has_one(pool: ProcessPool) -> None:
    """Steps: all ranks have one, rank 0 has none, no rank has one, all again. Others go on in each of them."""
    for steps in pool.run("jobs.ddp_tasks:layers_without_gradients", 2):
        assert [step["first"] for step in steps] == [False, False, True, False]
        assert [step["second"] for step in steps] == [False] * 4
        assert [step["zero"] for step in steps] == [False, False, True, False]


def test_layers_that_ddp_skips(pool: ProcessPool) -> None:
    """They are no part of the plan; a plan for them is refused, and the others train as ever."""
    for result in pool.run("jobs.ddp_tasks:ignored_parameter", 2):
        assert "conv [16, 8, 3, 3]: expected, not in the model" in result["refused"]
        assert result["averaged"]


def test_state_survives_save_and_load(pool: ProcessPool) -> None:
    """A codec of each kind under feedback; the campaign `resume` holds all, in new processes."""
    stacks = [
        (codec, "feedback") for codec in ("topk", "ecsq", "qsgd", "clt_k", "intsgd", "powersgd", "gradiveq", "lgc_ring")
    ]
    for result in pool.run("jobs.ddp_tasks:save_and_load", 3, stacks=stacks):
        assert result["equal"]
        assert {f"matrix{n}::matrix{n}/residual" for n in range(len(stacks))} <= set(result["keys"])
        assert len(result["refused"]) == 5


@pytest.mark.thorough
def test_script_that_forgets_to_close_still_ends(tmp_path: Path) -> None:
    script = tmp_path / "forgetful.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from support.image_network import image_network\n"
        "from gradlab.plan import Plan\n"
        "from gradlab.runtime import CompressionState, compression_hook\n"
        "dist.init_process_group('gloo')\n"
        "model = torch.nn.parallel.DistributedDataParallel(image_network(), bucket_cap_mb=0.02)\n"
        "state = CompressionState(Plan.uniform(model, 'powersgd', rank=1), model)\n"
        "model.register_comm_hook(state, compression_hook)\n"
        "for _ in range(3):\n"
        "    model(torch.randn(4, 1, 8, 8)).sum().backward()\n"
        "sys.stdout.write(f'trained {state.report()[\"iteration\"]}\\n')\n"
    )
    # Ranks that start as a user's do: what is loaded in which order counts when an interpreter ends.
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    command = [python(), *launch, sys.executable, str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("trained 3") == 2
