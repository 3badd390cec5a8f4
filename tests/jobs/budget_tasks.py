"""A run with two large layers, recorded with and without a budget: by real ranks, and by emulated ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradlab.capture import EmulatedNodes, TraceRecorder

RANKS = 2
STEPS = 3
BUDGET = 3_000_000


class Network(nn.Module):
    """A convolution and a linear layer of more than 65,536 elements each, and smaller ones."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(32, 256, 3)
        self.wide = nn.Linear(256, 512)
        self.last = nn.Linear(512, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.last(self.wide(self.convolution(images).flatten(1)).relu())


def _model() -> Network:
    torch.manual_seed(1)
    return Network()


def _batches(rank: int, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        yield torch.randn(2, 32, 3, 3, generator=generator), torch.randint(3, (2,), generator=generator)


def by_ranks(group: dist.ProcessGroup, trace: str, **settings: Any) -> str:
    """Record with DDP; return what the recorder says of its size."""
    model = DistributedDataParallel(_model(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TraceRecorder(model, trace, expected_steps=STEPS, **settings) as recorder:
        for images, labels in _batches(group.rank(), STEPS):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    return str(recorder.size)


def by_emulation(trace: Path, steps: int = STEPS, **settings: Any) -> None:
    """Record the same with emulated nodes."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [_batches(rank, steps) for rank in range(RANKS)]
    with EmulatedNodes(model, trace, RANKS, expected_steps=steps, **settings) as nodes:
        for micro_batches in zip(*batches, strict=True):
            optimizer.zero_grad()
            for rank, (images, labels) in enumerate(micro_batches):
                with nodes.node(rank):
                    nn.functional.cross_entropy(model(images), labels).backward()
            nodes.average()
            optimizer.step()
