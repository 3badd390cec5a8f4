"""Under torchrun: a small training with lines of gradlab, as `gradlab pilot` finds it.

piloted_job.py FOLDER [WAY]            FOLDER: of a trace that is there already. WAY: see `WAYS`
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradlab.capture import TraceRecorder
from gradlab.plan import Plan
from gradlab.runtime import CompressionState, OuterStep, compression_hook

EVERY = 2


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def recorded(model: nn.Module, trace: str) -> tuple[nn.Module, AbstractContextManager[Any], Callable[[], Any]]:
    """The recording lines."""
    ddp = DistributedDataParallel(model)
    return ddp, TraceRecorder(ddp, trace), lambda: None


def sharded(model: nn.Module, trace: str) -> tuple[nn.Module, AbstractContextManager[Any], Callable[[], Any]]:
    """The recording lines under FSDP2, of nodes with one rank each."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    return model, TraceRecorder(model, trace, between=mesh["replicate"]), lambda: None


def by_hand(model: nn.Module, trace: str) -> tuple[nn.Module, AbstractContextManager[Any], Callable[[], Any]]:
    """A state and its hook, which has gone on from a checkpoint."""
    ddp = DistributedDataParallel(model)
    state = CompressionState(Plan.uniform(model, "identity"), ddp)
    state.load_state_dict({"of": "another plan"})
    ddp.register_comm_hook(state, compression_hook)
    return ddp, state, lambda: None


def outer(model: nn.Module, trace: str) -> tuple[nn.Module, AbstractContextManager[Any], Callable[[], Any]]:
    """Local steps."""
    steps = OuterStep(Plan.uniform(model, "identity"), model, every=EVERY)
    return model, steps, steps.step


WAYS = {one.__name__: one for one in (recorded, sharded, by_hand, outer)}


def main() -> None:
    dist.init_process_group("gloo")
    way = WAYS[sys.argv[2] if sys.argv[2:] else "recorded"]
    model, gradlab, after = way(network(), sys.argv[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = Path(os.environ["GRADLAB_PILOT"]) / f"seen-{dist.get_rank()}"
    with gradlab, open(seen, "w", encoding="utf-8") as file:
        for _ in range(100):
            inputs = torch.randn(8, 16, generator=generator)
            loss = nn.functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1))
            print(float(loss), file=file, flush=True)
            optimizer.zero_grad()
            loss.backward()
            if isinstance(gradlab, TraceRecorder):
                gradlab.annotate(loss=loss)
            optimizer.step()
            after()
    (seen.parent / "went on").touch()


if __name__ == "__main__":
    main()
