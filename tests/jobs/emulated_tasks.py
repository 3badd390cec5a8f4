"""One training run in two ways: by ranks of the pool under real DDP, and by emulated nodes in one process."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradlab.capture import EmulatedNodes, TraceRecorder
from gradlab.collectives import sum_in_rank_order
from gradlab.errors import GradlabError

STEPS, SEED = 8, 5
LR = 0.1


class Everything(nn.Module):
    """Batch statistics, random draws, a buffer of its own, a tied and a frozen weight, a layer that one rank skips."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.drop = nn.Dropout(0.3)
        self.hidden = nn.Linear(6 * 16, 24)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.extra = nn.Linear(24, 24)
        self.again = nn.Linear(24, 24)
        self.again.weight = self.extra.weight
        self.last = nn.Linear(24, 10)
        self.register_buffer("largest", torch.ones(()))

    def forward(self, images: torch.Tensor, use_extra: bool = True) -> torch.Tensor:
        x = self.hidden(torch.relu(self.norm(self.first(images))).flatten(1))
        with torch.no_grad():
            self.largest.mul_(0.9).add_(0.1 * x.abs().max())
        x = self.frozen(self.drop(x / self.largest).relu())  # unlike BatchNorm's, this buffer reaches the gradients
        return self.last(self.again(self.extra(x).relu()) if use_extra else x)


def everything() -> Everything:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Everything()


def micro_batches(rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(STEPS):
        yield torch.randn(4, 1, 6, 6, generator=generator), torch.randint(10, (4,), generator=generator)


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], rank: int) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0], use_extra=rank != 1), batch[1])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=LR, momentum=0.9, weight_decay=1e-3)


def digest(model: nn.Module) -> str:
    """Of all parameters and buffers, bit for bit."""
    hashed = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        hashed.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return hashed.hexdigest()


def mean_in_rank_order(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in the one order that does not depend on the backend."""
    rows = [torch.empty_like(bucket.buffer()) for _ in range(group.size())]
    dist.all_gather(rows, bucket.buffer(), group=group)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(sum_in_rank_order(rows))
    return done


# DDP compares a hook's annotations with the types themselves, and this file keeps them as text.
mean_in_rank_order.__annotations__.clear()


def by_ranks(group: dist.ProcessGroup, trace: str, in_rank_order: bool) -> str:
    """This rank's part of a recorded DDP run; the digest of its model."""
    rank = dist.get_rank(group)
    model = DistributedDataParallel(everything(), process_group=group, bucket_cap_mb=0.005, find_unused_parameters=True)
    optimizer = optimizer_of(model)
    wrap = (group, mean_in_rank_order) if in_rank_order else None
    torch.manual_seed(SEED + rank)
    with TraceRecorder(model, trace, optimizer=optimizer, wrap=wrap) as recorder:
        for batch in micro_batches(rank):
            optimizer.zero_grad()
            loss = loss_of(model, batch, rank)
            loss.backward()
            recorder.annotate(loss=loss)
            optimizer.step()
    dist.barrier(group)
    return digest(model.module)


def by_emulation(trace: Path, world_size: int, **settings: Any) -> str:
    """The same run in this process; the digest of its model."""
    model = everything()
    optimizer = optimizer_of(model)
    with EmulatedNodes(model, trace, world_size, optimizer=optimizer, seed=SEED, **settings) as nodes:
        for batches in zip(*map(micro_batches, range(world_size)), strict=True):
            optimizer.zero_grad()
            for rank, batch in enumerate(batches):
                with nodes.node(rank):
                    loss = loss_of(model, batch, rank)
                    loss.backward()
                    nodes.annotate(loss=loss)
            nodes.average()
            optimizer.step()
    return digest(model)


def refused_in_ddp(group: dist.ProcessGroup, trace: str) -> list[str]:
    """What is said of a model in DDP, alone and inside of another."""
    wrapped = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    messages = []
    for model in (wrapped, nn.Sequential(wrapped)):
        try:
            EmulatedNodes(model, trace, 2)
            messages.append("accepted")
        except GradlabError as error:
            messages.append(str(error))
    return messages
