"""Reports of FSDP2, local steps, Accelerate, the Trainer and Lightning: two real ranks each."""

from __future__ import annotations

from typing import Any

from campaigns.reported import Workplace, report

TASKS = "jobs.report_tasks_frameworks"


def ranks(work: Workplace, task: str, **arguments: Any) -> list[Any]:
    """What both ranks found."""
    return work.pool.run(f"{TASKS}:{task}", 2, **arguments)


def alike(work: Workplace, task: str, **arguments: Any) -> Any:
    """What both ranks found, which is the same."""
    first, second = ranks(work, task, **arguments)
    assert first == second, (first, second)
    return first


# --- FSDP2 ------------------------------------------------------------------------------------------------------------


@report("pytorch/pytorch#174862", "FSDP2 ranks whose forward passes use different modules end with other gradients")
def other_blocks(work: Workplace) -> str:
    """Two nodes leave out another block each, of one shape, under compress_fsdp."""
    told = alike(work, "other_blocks")
    assert "ranks used other modules in this step" in told, told
    return "mended: the same error on all ranks; before: one block's gradient averaged with another's, nothing said"


@report("pytorch/pytorch#176076", "tied weights in two FSDP2 units, sharded unevenly: the last rank never trains")
def tied(work: Workplace) -> str:
    """An embedding of 31 rows tied to the head, in one unit and in two."""
    found = alike(work, "tied")
    assert found["agree"]
    assert found["tied"]
    assert found["still"] == 0, found
    assert "shared with a parameter already managed by another FSDP group" in found["apart"], found
    return "held: in one unit all 31 rows move and ranks agree; two units are refused by torch 2.13"


@report("NVIDIA/cosmos-framework#161", "accumulation under FSDP2 that synchronises every micro-batch")
def put_off(work: Workplace) -> str:
    """set_requires_all_reduce(False) on micro-batches, which a mesh of one dimension ignores."""
    told = alike(work, "put_off")
    assert "accumulate with model.set_requires_gradient_sync(False)" in told, told
    return "held: refused in the first backward pass, with the call to use"


@report("pytorch/pytorch#118298", "only some FSDP2 modules synchronise their gradients in a micro-batch")
def partly_synchronised(work: Workplace) -> str:
    """One block put off in the first of two passes, beside plain passes."""
    away = max(found["away"] for found in ranks(work, "partly_synchronised"))
    assert away < 1e-6, away
    return f"held: sums of gradients differ by {away:.0e} of the largest"


@report("meta-pytorch/torchtune#2169", "which gradient clipping is right on sharded gradients")
def clipped(work: Workplace) -> str:
    """torch's clip_grad_norm_ after compress_fsdp, beside the mean gradient on one rank."""
    away = max(ranks(work, "clipped"))
    assert away < 1e-5, away
    return f"held: norms differ by {away:.0e}"


@report("huggingface/accelerate#3209", "an optimizer made before the model was sharded trains nothing")
def optimizer_of_before(work: Workplace) -> str:
    """An optimizer made before fully_shard, given to compress_fsdp."""
    told = alike(work, "optimizer_of_before")
    assert "the one that steps the model, made after fully_shard" in told["plain"], told
    assert "the optimizer holds 0 of 15 parameters" in told["rates"], told
    return "mended: warned with the remedy, refused where rates count; before: the warning did not name fully_shard"


@report("pytorch/pytorch#149205", "an FSDP2 model used before its optimizer is made: some parameters never move")
def used_before(work: Workplace) -> str:
    """A forward pass, then the optimizer, then compress_fsdp or OuterStep."""
    found = alike(work, "used_before")
    assert "holds 12 of 15 parameters (not embedding.weight, head.weight, head.bias)" in found["told"], found
    assert found["agree"]
    return "mended: attached, with the names of what the optimizer lacks; before: 'of no module that fully_shard ...'"


@report("pytorch/pytorch#132934", "FSDP2 with a scalar parameter fails in its own initialisation")
def small_shards(work: Workplace) -> str:
    """Parameters (1,), (1, 8) and without dimensions, in every group; shards of no elements."""
    for nodes in (1, 2):
        *wrong, scalar = alike(work, "small_shards", nodes=nodes)
        assert wrong == [], wrong
        assert "doesn't support scalar parameters" in scalar, scalar
    return "held: three codecs on shards of 0 and 1 elements, both levels; () is refused by torch, (0,) fails in it"


# --- OuterStep --------------------------------------------------------------------------------------------------------


@report("PrimeIntellect-ai/prime-diloco#13", "DiLoCo workers whose models were initialised differently")
def other_features(work: Workplace) -> str:
    """A seed per worker, with a frozen layer and random buffers; another width, another buffer."""
    found = alike(work, "other_features")
    assert found["differ"] == [], found
    assert found["other width"].startswith("rank 1: this plan is for another model"), found
    assert "ranks disagree about frozen layers and buffers" in found["other buffers"], found
    return "mended: all begin as the first worker's; before: frozen layers and buffers stayed each worker's own"


@report("huggingface/diffusers#10553", "optimizer.step() called for every micro-batch under accumulation")
def micro_batches(work: Workplace) -> str:
    """OuterStep.step after every micro-batch, four to an optimizer step."""
    told = alike(work, "micro_batches")
    assert "only 4 of the first 16 calls of step() came after an optimizer step" in told["accumulated"], told
    assert told["each"] == "", told
    return "mended: a warning with the remedy; before: four times as many exchanges, nothing said"


@report("meta-pytorch/torchft#47", "workers that fail between syncs are noticed only at the end of a round")
def leaves_early(work: Workplace) -> str:
    """A worker with fewer batches ends its run as usual, under OuterStep and under DDP."""
    for ddp in (False, True):
        _, other = ranks(work, "leaves_early", ddp=ddp)
        assert "another rank failed (rank 0: step" in other["said"], other
        assert "its run was closed" in other["said"], other
        assert other["seconds"] < 20, other
    return "mended: the others' error says who ended, and at which step; before: 'Connection reset by peer'"


@report("meta-pytorch/torchft#233", "wrong sign of the pseudo-gradient, and a wrong mixture of local and global")
def mixed(work: Workplace) -> str:
    """A streaming step of one number on two workers, beside the formula."""
    assert max(ranks(work, "mixed")) == 0.0
    return "held: equal to 0.25 own + 0.75 common"


@report("pytorch/pytorch#74157", "post-local SGD averages parameters that have no gradient")
def unused_layer(work: Workplace) -> str:
    """A layer that no worker uses, under AdamW and outer momentum."""
    assert alike(work, "unused_layer")
    return "held: it stays bit for bit, and workers agree"


# --- Accelerate, the Trainer, Lightning -------------------------------------------------------------------------------


@report("huggingface/accelerate#1847", "the last batch of a loader ends an accumulation early")
def end_of_loader(work: Workplace) -> str:
    """Ten batches an epoch, accumulated by four."""
    found = alike(work, "accumulated", each=False)
    assert found == {"iteration": 6, "steps": 6, "agree": True, "rules": [], "told": False}, found
    return "held: 6 exchanges for 6 optimizer steps"


@report("huggingface/accelerate#2790", "sync_each_batch and the flag that also says when to step")
def every_batch(work: Workplace) -> str:
    """The same with sync_each_batch=True."""
    first, second = ranks(work, "accumulated", each=True)
    assert first["iteration"] == second["iteration"] == 6, (first, second)
    assert first["rules"] == second["rules"] == ["several_backwards"]
    assert first["told"]
    assert first["agree"]
    return "held since letter A: 6 iterations, and the rule several_backwards names no_sync"


@report("huggingface/accelerate#89", "memory between two trainings under one Accelerator: free_memory")
def prepared_again(work: Workplace) -> str:
    """A model is compressed, saved and freed, and then another one."""
    names = ["gradlab_0_rank_0.pt", "gradlab_0_rank_1.pt"]
    assert alike(work, "prepared_again", folder=str(work.folder)) == [names, names]
    return "mended: both checkpoints have their files; before: save_state ended in StopIteration"


@report("huggingface/accelerate#245", "two optimizers for two parts of a model, prepared together")
def two_optimizers(work: Workplace) -> str:
    """One optimizer per layer, both given and one of them."""
    found = alike(work, "two_optimizers_of_accelerate")
    assert found["rates"] == {"0.weight": 0.1, "1.weight": 0.01}, found
    assert "another optimizer" in found["one"], found
    return "held: residuals follow each one's rate; one of two is refused by name"


@report("mosaicml/composer#108", "fit again after training was interrupted ends in tracebacks")
def trains_again(work: Workplace) -> str:
    """trainer.train() again after an error, with each callback of the Hugging Face Trainer."""
    for kind, told in alike(work, "trains_again", folder=str(work.folder)).items():
        assert "with a framework, a new Trainer" in told, (kind, told)
    return "mended: all three callbacks name the remedy; before: two did not"


@report("Lightning-AI/pytorch-lightning#9237", "manual optimization with loss.backward() synchronises nothing")
def raw_backward(work: Workplace) -> str:
    """The same with CompressionCallback."""
    first, second = ranks(work, "manual", folder=str(work.folder), raw=True, static=False)
    assert first["iteration"] == second["iteration"] == 0
    assert "call self.manual_backward(loss), not loss.backward()" in first["told"], first
    return "mended: the warning at the end says which call; before: 'the model is gone'"


@report("Lightning-AI/pytorch-lightning#21251", "static_graph=True with manual optimization misses the first step")
def static_graph(work: Workplace) -> str:
    """Four steps of manual optimization under DDPStrategy(static_graph=True)."""
    found = alike(work, "manual", folder=str(work.folder), raw=False, static=True)
    assert found["iteration"] == 4, found
    assert found["agree"], found
    return "held: 4 exchanges, and ranks agree"
