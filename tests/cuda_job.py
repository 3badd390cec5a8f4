"""One or more ranks on CUDA and NCCL: every codec's gradients and states against the lockstep run on the CPU."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from contract import lockstep, plan_for
from prescribed import SHAPES, Prescribed, gradients
from torch.nn.parallel import DistributedDataParallel

from gradlab import codecs
from gradlab.runtime import CompressionState, compression_hook

STEPS = 4
DRAW = {"qsgd", "terngrad", "natural"}  # noise, on the device: on the CPU they would draw other values


def largest_difference(codec: str, device: torch.device) -> float:
    """Of the applied gradients from the CPU's, relative to each layer's largest value; over STEPS steps."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plan = plan_for(codec, "layer", feedback=True)
    reference = lockstep(plan, world_size, STEPS, lambda r, t: gradients(SHAPES, r, t))
    model = DistributedDataParallel(Prescribed(SHAPES).to(device), device_ids=[device.index], bucket_cap_mb=0.01)
    worst = 0.0
    with CompressionState(plan, model, deterministic=True, check_requests=True, trace_steps=(2,)) as state:
        model.register_comm_hook(state, compression_hook)
        for step in range(STEPS):
            if step == 2:
                state.load_state_dict(state.state_dict())
            model.zero_grad()
            grads = {name: grad.to(device) for name, grad in gradients(SHAPES, rank, step).items()}
            model(grads).backward()
            for results in reference[step].values():
                for name, expected in results[rank].value.mean.items():
                    got = getattr(model.module, name).grad.cpu()
                    scale = float(expected.abs().max()) if expected.numel() else 1.0
                    gap = float((got - expected).abs().max()) if expected.numel() else 0.0
                    worst = max(worst, gap / (scale or 1.0))
    return worst


def main() -> None:
    """Print one line of JSON from rank 0: the largest difference by codec."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("nccl", device_id=device)
    found = {name: largest_difference(name, device) for name in codecs.names() if name not in DRAW}
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(found) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
