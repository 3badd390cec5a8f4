"""One call to compress; compiled models; and nothing trains past the hook in silence."""

from __future__ import annotations

from pathlib import Path

import pytest

import gradlab
from gradlab.errors import GradlabError
from gradlab.formatting import format_ratio
from gradlab.runtime import compress
from support.process_pool import ProcessPool


def test_the_call_is_at_the_front_door() -> None:
    assert gradlab.compress is compress


def test_one_call_is_the_two_steps_bit_for_bit(pool: ProcessPool, tmp_path: Path) -> None:
    for result in pool.run("jobs.attach_tasks:one_call_is_two_steps", 2, folder=str(tmp_path)):
        assert result["equal"] == [True, True]
        assert result["steps"] == 6
        assert result["ratio"] > 20
        assert result["ratio_to_16_bits"] == result["ratio"] / 2


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_a_report_sets_dense_gradients_beside_16_bits(pool: ProcessPool, bits: int) -> None:
    """Dense steps save nothing, and send as much more than 16 bits as the model's type is wider."""
    for result in pool.run("jobs.attach_tasks:dense_steps_of", 2, bits=bits):
        assert result["compression_ratio"] == 1.0
        assert result["ratio_to_16_bits"] == 16 / bits
        assert f", 1.00x ({format_ratio(16 / bits)} vs 16 bits)" in result["line"]


def test_groups_that_send_more_than_16_bits_are_warned_of_and_more_than_plain_ddp_refused(pool: ProcessPool) -> None:
    ranks = pool.run("jobs.attach_tasks:groups_that_send_too_much", 4)
    for rank, results in enumerate(ranks):
        assert results["0.1, None"] == results["0.9, ignore"] == {"found": [], "told": []}
        refused = results["0.9, None"]["found"]
        assert isinstance(refused, str)
        assert "those of plain DDP" in refused
        assert "two_way" in refused
        for case in ("0.4, None", "0.9, {'bytes_sent': 'warn'}"):
            ((rule, seen),) = results[case]["found"]
            assert (rule, "between 4 ranks weight would send" in seen) == ("bytes_sent", True)
            assert len(results[case]["told"]) == (rank == 0)


@pytest.mark.thorough  # as the campaign `matrix` has it
def test_compiled_models_train_as_the_model_itself_does(pool: ProcessPool) -> None:
    """torch.compile inside DDP, of a module in it, and around DDP: bit for bit, and compressed."""
    for results in pool.run("jobs.attach_tasks:compiled_models_train_compressed", 2):
        assert len(results) == 3
        for form, result in results.items():
            assert result["equal"], form
            assert result["ratio"] > 20, form


@pytest.mark.thorough
def test_a_compiled_model_is_recorded_as_the_model_itself_is(pool: ProcessPool, tmp_path: Path) -> None:
    assert pool.run("jobs.attach_tasks:a_compiled_model_is_recorded", 2, folder=str(tmp_path)) == [True, True]


def test_backward_passes_that_never_reach_the_hook_are_warned_of(pool: ProcessPool) -> None:
    """Once, on closing or when the state is dropped, on rank 0. The counting leaves nothing on the model."""
    first, second = pool.run("jobs.attach_tasks:unreached", 2)
    assert not any(second.values())
    for said in (first,):
        assert [said[name] for name in ("reached", "no backward pass", "then reached")] == [[], [], []]
        for name in ("not registered", "dropped"):
            (message,) = said[name]
            assert "call ddp_model.register_comm_hook(state, compression_hook)" in message
        assert said["not registered"][0].startswith("gradlab: 3 backward passes")
        (message,) = said["under no_sync"]
        assert "outside of it" in message
        assert "register" not in message
        (message,) = said["the bare module"]
        assert "call ddp_model(...), not the module inside it" in message
        assert "register" not in message


def test_the_counting_keeps_neither_model_nor_state_alive(pool: ProcessPool) -> None:
    assert pool.run("jobs.attach_tasks:a_state_is_dropped_with_its_model", 2) == [True, True]


def test_what_is_not_ddp_is_refused_by_its_name(pool: ProcessPool, tmp_path: Path) -> None:
    names = {
        "FSDP": ("in FSDP (FullyShardedDataParallel)", "wrap it in DistributedDataParallel instead"),
        "FSDP2": ("in FSDP2 (fully_shard)", "gradlab.runtime.compress_fsdp compresses between nodes there"),
        "a part in FSDP2": ("in FSDP2 (fully_shard)", "gradlab.runtime.compress_fsdp compresses between nodes there"),
        "DeepSpeed": ("in DeepSpeed (DeepSpeedEngine)", "instead of deepspeed.initialize"),
        "DataParallel": ("in DataParallel", "one process per device"),
        "bare": ("got a Sequential, not in DDP", "wrap it first"),
        "compiled and bare": ("got a Sequential, not in DDP", "wrap it first"),
        "around it": ("got a Holder, not in DDP", "give the DistributedDataParallel model in it, which is 'inner'"),
        "no module": ("got a list", "expected a DistributedDataParallel model"),
    }
    for said in pool.run("jobs.attach_tasks:refusals", 2, folder=str(tmp_path)):
        for name, (what, instead) in names.items():
            assert list(said[name]) == ["compress", "CompressionState", "TraceRecorder"]
            for way, message in said[name].items():
                if way == "compress" and "FSDP2" in name:
                    assert message.startswith("compress_fsdp: ")
                    continue
                assert message.startswith(f"{way}: ")
                if way == "TraceRecorder" and name == "a part in FSDP2":
                    assert "call it on the model itself, last" in message
                    continue
                assert what in message
                if way == "TraceRecorder" and name == "FSDP2":
                    assert "give between=mesh['replicate']" in message
                    continue
                assert instead in message
        assert "'topk' is a codec, expected a Plan or the path" in said["plan"]["topk"]
        assert "nowhere" in said["plan"]["nowhere"]


def test_another_class_of_the_same_name_is_named_with_its_module() -> None:
    with pytest.raises(GradlabError, match=r"compress: got a .*test_attach\.DistributedDataParallel"):
        compress(DistributedDataParallel(), "plan.safetensors")  # type: ignore[arg-type]


class DistributedDataParallel:
    """As Megatron and others call theirs."""
