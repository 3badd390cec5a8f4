"""Tasks for real ranks: the cast codec beside PyTorch's own 16-bit hook."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from gradlab.plan import FEEDBACK, Plan
from gradlab.runtime import CompressionState, compression_hook
from support.contract import agree
from support.pool_groups import SPARE
from support.prescribed import Prescribed, gradients

SHAPES = {"conv": (16, 8, 3, 3), "wide": (24, 300), "vector": (65,)}


def against_torch_fp16(group: dist.ProcessGroup, steps: int) -> dict[str, Any]:
    """The largest difference of our mean from the hook's, in units of 2^-11 of the layer's largest magnitude."""
    theirs = DistributedDataParallel(Prescribed(SHAPES), process_group=group, bucket_cap_mb=0.01)
    ours = DistributedDataParallel(Prescribed(SHAPES), process_group=group, bucket_cap_mb=0.01)
    theirs.register_comm_hook(group, fp16_compress_hook)
    plan = Plan.uniform(ours, "cast", dtype="float16")
    names = [name for planned in plan.groups for name in planned.layers]
    equal, largest, together = True, 0.0, True
    with CompressionState(plan, ours, process_group=SPARE.get(dist.get_world_size(group))) as state:
        ours.register_comm_hook(state, compression_hook)
        for step in range(steps):
            for model in (theirs, ours):
                model.zero_grad()
                model(gradients(SHAPES, dist.get_rank(group), step)).backward()
            for name in names:
                hooks, mean = getattr(theirs.module, name).grad, getattr(ours.module, name).grad
                equal = equal and torch.equal(hooks, mean)
                largest = max(largest, float((hooks - mean).abs().max() / hooks.abs().max()) * 2**11)
            together = together and agree(torch.cat([p.grad.reshape(-1) for p in ours.parameters()]), group)
    return {"layers": len(names), "equal": equal, "largest": largest, "agree": together}


def overflow_on_the_way(group: dist.ProcessGroup) -> dict[str, Any]:
    """Gradients that are finite on every rank, and infinite in the 16 bits that rank 1 sends in the second step."""
    model, rank = Prescribed(SHAPES), dist.get_rank(group)
    model = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.01)
    plan = Plan.uniform(model, "cast", dtype="float16", wrappers=FEEDBACK)
    nan, unchanged = [], []
    with CompressionState(plan, model, process_group=SPARE.get(dist.get_world_size(group))) as state:
        model.register_comm_hook(state, compression_hook)
        for step in range(3):
            grads = gradients(SHAPES, rank, step)
            if (rank, step) == (1, 1):
                grads["conv"][3, 2, 1, 0] = 7e4
            before = state.state_dict()["states"]
            model.zero_grad()
            model(grads).backward()
            after = state.state_dict()["states"]
            flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
            nan.append([bool(flat.isnan().any()), bool(flat.isnan().all())])
            unchanged.append(before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in after))
        return {"nan": nan, "unchanged": unchanged, "finite": [record.finite for record in state.statistics.steps]}
