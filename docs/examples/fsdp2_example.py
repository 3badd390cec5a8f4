"""Train a model that FSDP2 shards inside two "nodes" of two ranks, all on this machine, compressed between them.

torchrun --standalone --nproc-per-node 4 fsdp2_example.py
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradlab
from gradlab.runtime import compress_fsdp

STEPS, BATCH = 100, 32  # optimizer steps; images per rank


def main() -> None:
    """Shard inside nodes, train compressed between them, and print what the first rank sent."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    # Of whole layers, so it is made before they are sharded; or the path of an artifact.
    plan = gradlab.Plan.uniform(model, "block_scaled", dtype="int8", warmup_steps=20)
    fully_shard(model, mesh=mesh["shard"])  # along one dimension: gradlab exchanges along the other
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    images, digits = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(digits)
    generator = torch.Generator().manual_seed(dist.get_rank())

    with compress_fsdp(model, plan, between=mesh["replicate"], optimizer=optimizer) as state:
        for _ in range(STEPS):
            drawn = torch.randint(len(inputs), (BATCH,), generator=generator)
            optimizer.zero_grad()
            loss = criterion(model(inputs[drawn]), targets[drawn])
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"loss {loss.item():.3f}")
            print(state.table())
    dist.barrier()
    time.sleep(0.1)  # Gloo's threads may ask for Python's lock after a collective: see "When a rank fails"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
