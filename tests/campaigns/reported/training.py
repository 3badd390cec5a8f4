"""Reports of training: hooks, compression, recorded gradients and the loops around them."""

from __future__ import annotations

import itertools
from typing import Any

from campaigns.reported import Workplace, report

TASKS = "jobs.report_tasks_training"


def _held(work: Workplace, loop: str, rules: tuple[str, ...] = (), steps: int = 4, **options: Any) -> str:
    """A loop that is right under plain DDP: recorded bit for bit, and compressed as it trains plainly."""
    for result in work.pool.run(f"{TASKS}:looped", 2, loop=loop, folder=str(work.folder), **options):
        recorded, compressed = result["recorded"], result["compressed"]
        assert (result["drift"], recorded["equal"], recorded["steps"]) == (0.0, True, steps), result
        assert (compressed["iteration"], tuple(compressed["rules"])) == (4, rules), result
        assert compressed["difference"] < 1e-6, result
    return f"held: recorded bit for bit ({steps} steps), compressed within {compressed['difference']:.0e} of plain DDP"


def _drifts(work: Workplace, loop: str, rule: str) -> str:
    """A loop in which ranks drift apart under plain DDP too: told by a rule and by the recorder."""
    first, second = work.pool.run(f"{TASKS}:looped", 2, loop=loop, folder=str(work.folder))
    assert second["drift"] > 1e-4, second
    assert second["recorded"]["equal"], second
    assert rule in first["compressed"]["rules"] or f"(rule {rule})" in first["compressed"]["said"], first
    assert "end each optimizer step with a forward pass of the DDP model" in first["recorded"]["said"], first
    before = f"nothing was said of ranks {second['drift']:.4f} apart"
    if rule == "hook_not_reached":
        return f"mended: a warning of the recorder beside rule {rule}; before: an empty trace, and {before}"
    return f"mended: rule {rule} and a warning of the recorder; before: {before}"


@report("modelscope/FunASR#3472", "gradients synchronised in the first micro-batch, and not in the one that steps")
def first_of_two(work: Workplace) -> str:
    """A synchronised pass, then one under no_sync, then the step."""
    return _drifts(work, "first of two synchronised", "local_gradients")


@report("pytorch/pytorch#47260", "several backward passes with retain_graph=True are not all averaged")
def retained_graph(work: Workplace) -> str:
    """Two losses of one forward pass, each with its own backward pass."""
    return _drifts(work, "retained", "local_gradients")


@report("pytorch/pytorch#47562", "wrong gradients with DDP and autograd.grad")
def gradient_penalty(work: Workplace) -> str:
    """A gradient penalty (double backward) through the DDP model."""
    return _held(work, "penalised")


@report("pytorch/pytorch#63740", "no reduction after autograd.grad and backward")
def gradient_penalty_in_a_static_graph(work: Workplace) -> str:
    """The same with static_graph=True, where DDP averages in the first step alone."""
    return _drifts(work, "penalised, static graph", "local_gradients")


@report("kohya-ss/sd-scripts#924", "the module was taken out of DDP, so each rank trained alone")
def module_inside(work: Workplace) -> str:
    """Training `ddp_model.module`."""
    return _drifts(work, "inside", "hook_not_reached")


@report("Lightning-AI/pytorch-lightning#20340", "a backbone that is unfrozen after some epochs is not trained alike")
def thawed_backbone(work: Workplace) -> str:
    """A layer frozen when recording and compression began, and trained later."""
    folder = str(work.folder)
    result = work.pool.run("jobs.reducer_tasks:frozen_after_ddp", 2, folder=folder)[0]
    assert "0.weight was frozen when compression was attached" in result["thawed"]
    assert "0.weight, 0.bias: frozen when the recording began" in result["unrecorded"][0]
    return "mended: the recorder names the layers that are missing in its trace; before: nothing. Compression refuses"


@report("davda54/sam#78", "no_sync around backward alone: the first pass of a sharpness-aware step is averaged")
def sharpness_aware(work: Workplace) -> str:
    """Two synchronised passes, of which the step applies the second: the first one's exchange is taken back."""
    return _held(work, "sharpness", ("several_backwards",), steps=8)


@report("pytorch/pytorch#69031", "parameters used in an earlier micro-batch alone are never averaged")
def other_part(work: Workplace) -> str:
    """Parts of a model that only the pass under no_sync uses, and on one rank each."""
    return _held(work, "other part last")


@report("allenai/longformer#63", "DDP, weight sharing and checkpoints: a variable is marked ready twice")
def tied_weights(work: Workplace) -> str:
    """An embedding tied to the head and a layer used twice, under reentrant checkpoints in a static graph."""
    return _held(work, "tied, checkpointed")


@report("pytorch/pytorch#175024", "two forward passes through BatchNorm before one backward pass")
def two_forwards(work: Workplace) -> str:
    """Two forward passes of a model with BatchNorm, one backward pass."""
    return _held(work, "two forwards")


@report("facebookresearch/fairscale#354", "zero_grad(set_to_none=True) takes gradients out of their buckets")
def zeroed_by_turns(work: Workplace) -> str:
    """Gradients as views of buckets, dropped and zeroed by turns, and clipped in place."""
    return _held(work, "zeroed by turns")


@report("pytorch/pytorch#158753", "DDP and complex parameters: the imaginary part of the gradient is lost")
def complex_layer(work: Workplace) -> str:
    """A complex layer beside real ones, left out of the plan and the recording."""
    came = _held(work, "complex", layers="real*", least=300)
    return f"{came.replace('held', 'mended')}; before: the recorder warned as if DDP did not average the complex layer"


@report("pytorch/pytorch#51427", "PowerSGD fails when it begins in iteration 1, as DDP makes its buckets anew")
def begins_with_new_buckets(work: Workplace) -> str:
    """PowerSGD after one dense step, with many buckets and with one."""
    apart, size = work.pool.run(f"{TASKS}:first_step_dense", 2)[0]
    assert apart == 0.0 < size
    return "held: the same parameters after 8 steps, bit for bit"


@report("deepspeedai/DeepSpeed#753", "1-bit Adam: the loss scale is halved for ever once compression begins")
def one_bit_adam(work: Workplace) -> str:
    """1-bit Adam under a GradScaler with overflows before and after the end of its warm-up."""
    result = work.pool.run(f"{TASKS}:one_bit_adam_under_a_scaler", 2)[0]
    scales, losses = result["scales"], result["losses"]
    skipped = sum(after < before for before, after in itertools.pairwise(scales))
    assert skipped > 6
    assert min(scales) == min(scales[:20]) == scales[-1], scales
    assert losses[-1] < losses[0] / 2, losses
    fell = f"the loss falls from {losses[0]:.0f} to {losses[-1]:.0f}"
    return f"held: {skipped} skipped steps, then a scale that stays; {fell}"


@report("pytorch/pytorch#69591", "DDP reduces all gradients where ZeroRedundancyOptimizer needs a shard")
def sharded_optimizer(work: Workplace) -> str:
    """A ZeroRedundancyOptimizer of SGD with momentum, under plans with and without momentum."""
    result = work.pool.run(f"{TASKS}:sharded_optimizer", 2)[1]
    assert "the optimizer has momentum = 0.9" in result["refused"]
    assert (result["drift"], result["iteration"], result["rules"]) == (0.0, 4, [])
    return "held: momentum in both is refused by its value; without, ranks stay equal bit for bit"
