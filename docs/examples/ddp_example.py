"""Train a small network on scikit-learn's digits under DDP: plain, recorded, or compressed by a plan.

torchrun --standalone --nproc-per-node 2 ddp_example.py
torchrun --standalone --nproc-per-node 2 ddp_example.py --record trace
torchrun --standalone --nproc-per-node 2 ddp_example.py --compress plan.safetensors

Without `--compress` nothing is compressed, but for `--try-powersgd`, which needs no plan from a file.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradlab
import gradlab.capture

BATCH = 32  # images per rank


def batches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Images (32, 64) and their digits (32,), drawn by each rank for itself."""
    images, digits = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(digits)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        drawn = torch.randint(len(inputs), (BATCH,), generator=generator)
        yield inputs[drawn], targets[drawn]


def attached(arguments: argparse.Namespace, model: nn.Module, optimizer: Any) -> AbstractContextManager[Any]:
    """What goes around the loop: a recorder, a compression state, or nothing."""
    if arguments.record:
        return gradlab.capture.TraceRecorder(model, arguments.record, optimizer=optimizer)
    if arguments.compress:
        return gradlab.compress(model, arguments.compress, optimizer=optimizer)
    if arguments.try_powersgd:
        plan = gradlab.Plan.uniform(model, "powersgd", rank=4, warmup_steps=100)  # 100 dense steps come first
        return gradlab.compress(model, plan, optimizer=optimizer)
    return nullcontext()


def main() -> None:
    """Train, and print what the last steps ended at."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--record", metavar="FOLDER", help="record every rank's gradients here")
    way.add_argument("--compress", metavar="ARTIFACT", help="train with this plan")
    way.add_argument("--try-powersgd", action="store_true", help="train with PowerSGD of rank 4")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    losses, begun = [], time.perf_counter()
    with attached(arguments, model, optimizer) as state:
        for inputs, targets in batches(arguments.steps):
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            loss.backward()
            if arguments.record:
                state.annotate(loss=loss.detach())
            optimizer.step()
            losses.append(loss.item())
    seconds = (time.perf_counter() - begun) / arguments.steps
    if dist.get_rank() == 0:
        last = losses[-20:]
        print(f"loss {sum(last) / len(last):.3f}, {1000 * seconds:.1f} ms a step")
        if arguments.compress or arguments.try_powersgd:
            print(state.table())
    dist.barrier()
    time.sleep(0.1)  # Gloo's threads may ask for Python's lock after a collective: see "When a rank fails"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
