"""Tasks for real ranks: runs that tell of noise and of slow ranks while they go on."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradlab.layout import Layer
from gradlab.plan import Group, Plan, Wrap
from gradlab.runtime import CompressionState, Exchange, ScalarLog, compress_fsdp, compression_hook
from support.pool_groups import SPARE

STEPS, NUMEL = 50, 4096


def gaussian(rank: int, step: int, signal: float) -> torch.Tensor:
    """A gradient (NUMEL,) of squared signal so large and of noise 1, in the mean."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    noise = torch.randn(NUMEL, generator=draw) / NUMEL**0.5
    return noise + (signal / NUMEL) ** 0.5 * torch.randn(NUMEL, generator=torch.Generator().manual_seed(7))


def noise_scale(group: dist.ProcessGroup, codec: str, settings: dict[str, Any], wraps: list[str], signal: float) -> Any:
    """The scale that a run logs at its end."""
    plan = Plan(
        (Layer("a", (64, 64), "linear"),), (Group("a", ("a",), codec, settings, tuple(Wrap(one) for one in wraps)),)
    )
    parameters = [("a", torch.zeros(64, 64))]
    parameters[0][1].requires_grad_()
    with Exchange(plan, parameters, group, measure_every=1, rules="ignore") as run:
        for step in range(STEPS):
            run.step({"a": gaussian(dist.get_rank(group), step, signal).view(64, 64)})
        return run.scalars().get("gradlab/noise_scale")


class Slow(nn.Module):
    """A linear layer whose forward sleeps for so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.layer = seconds, nn.Linear(64, 32)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.layer(inputs)


def slow_node(group: dist.ProcessGroup, slow: int) -> float:
    """Train under FSDP2 with a rank that sleeps; return the slowest rank as all know it in the end."""
    rank = dist.get_rank(group)
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(Slow(0.1 * (rank == slow)), nn.Linear(32, 32))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    with compress_fsdp(model, Plan.uniform(model, "qsgd")) as state:
        for _ in range(16):
            model(torch.ones(8, 64)).square().sum().backward()
        dist.barrier(group)
        return state._driver.rank_times.numbers()["slowest_rank"]


def slow_rank(group: dist.ProcessGroup, slow: int, path: str) -> None:
    """Train with a rank that sleeps, and write the run's log, until it knows of the slowest rank."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    model = DistributedDataParallel(Slow(0.1 * (rank == slow)), process_group=group)
    plan = Plan.uniform(model, "qsgd")
    with CompressionState(plan, model, process_group=SPARE[ranks]) as state, ScalarLog(path) as log:
        model.register_comm_hook(state, compression_hook)
        for _ in range(16):  # 1.6 s: ranks are asked once a second
            model(torch.ones(8, 64)).square().sum().backward()
            log.add(state)
