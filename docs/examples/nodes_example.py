"""Train on two "nodes" of two ranks each, all on this machine: ranks of a node send together.

torchrun --standalone --nproc-per-node 4 nodes_example.py

On real machines torchrun says which ranks share a node, and `within` need not be given.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import gradlab

STEPS, BATCH = 100, 32  # optimizer steps; images per rank


def main() -> None:
    """Train compressed between nodes, and print what each rank of the first node sent."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    images, digits = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(digits)
    generator = torch.Generator().manual_seed(dist.get_rank())

    plan = gradlab.Plan.uniform(model, "powersgd", rank=4, warmup_steps=20)
    with gradlab.compress(model, plan, optimizer=optimizer, within=mesh["local"]) as state:
        for _ in range(STEPS):
            drawn = torch.randint(len(inputs), (BATCH,), generator=generator)
            optimizer.zero_grad()
            loss = criterion(model(inputs[drawn]), targets[drawn])
            loss.backward()
            optimizer.step()
        report = state.report()
    everyone: list[dict[str, object]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, report)
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.3f}")
        for row in everyone:
            print(
                "node {node}, local rank {local_rank}:".format(**row["nodes"]),  # type: ignore[arg-type]
                f"{row['payload_bytes_per_step']:.0f} bytes to the other node,",
                f"{row['inside_wire_bytes_per_step']:.0f} bytes inside its own",
            )
    dist.barrier()
    time.sleep(0.1)  # Gloo's threads may ask for Python's lock after a collective: see "When a rank fails"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
