"""Tasks of two stages of a pipeline: each stage in DDP on half of the ranks, or on 2 nodes x shards."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import gradlab
from gradlab.codec import hash_tensor
from gradlab.errors import GradlabError
from gradlab.layout import layers_of
from gradlab.plan import Plan

MICRO_BATCHES, STEPS = 4, 3


class Stage(nn.Module):
    """Two of a model's four blocks, under the names that they have in the whole model."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        blocks = (nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2))
        self.blocks = nn.ModuleDict({f"block{2 * number + i}": block for i, block in enumerate(blocks)})

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks.values():
            inputs = inputs + block(inputs)
        return inputs


class Run:
    """A rank's stage, its optimizer and its schedule, compressed by a plan or not."""

    def __init__(self, mesh: DeviceMesh, way: str) -> None:
        self.stage, self.model = mesh.get_local_rank("pipe"), Stage(mesh.get_local_rank("pipe"))
        self.wrapped: Any = self.model
        if way == "ddp":
            self.wrapped = DistributedDataParallel(self.model, process_group=mesh["data"].get_group())
        else:
            for module in (*self.model.blocks.values(), self.model):
                fully_shard(module, mesh=mesh["replicate", "shard"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.batch = mesh.get_rank() % (mesh.size() // 2)
        pipe = PipelineStage(self.wrapped, self.stage, 2, torch.device("cpu"), group=mesh["pipe"].get_group())
        self.schedule = Schedule1F1B(pipe, MICRO_BATCHES, loss_fn=lambda out, target: (out - target).square().mean())

    def compress(self, plan: Plan, **how: Any) -> Any:
        return gradlab.compress(self.wrapped, plan, optimizer=self.optimizer, **how)

    def step(self, number: int) -> float:
        seed = torch.Generator().manual_seed(100 * number + self.batch)
        inputs, losses = torch.randn(8, 16, generator=seed), list[torch.Tensor]()
        self.optimizer.zero_grad()
        if self.stage == 0:
            self.schedule.step(inputs)
        else:
            self.schedule.step(target=inputs.flip(1), losses=losses)
        self.optimizer.step()
        return sum(float(loss.detach()) for loss in losses)

    def own(self) -> list[torch.Tensor]:
        held = (one.data for one in self.model.parameters())
        return [one.to_local() if isinstance(one, DTensor) else one for one in held]


def mesh_of(group: dist.ProcessGroup, way: str) -> DeviceMesh:
    ranks = torch.tensor(dist.get_process_group_ranks(group))
    if way == "ddp":
        return DeviceMesh("cpu", ranks.view(2, -1), mesh_dim_names=("pipe", "data"))
    return DeviceMesh("cpu", ranks.view(2, 2, -1), mesh_dim_names=("pipe", "replicate", "shard"))


def four_bits(run: Run) -> Plan:
    return Plan.uniform(run.model, "block_scaled", dtype="int4", minimum_numel=1)


def trained(group: dist.ProcessGroup, way: str) -> dict[str, Any]:
    """Without compression beside the stage as it is; compressed, and again from the state of a middle step."""
    mesh = mesh_of(group, way)
    plain, identity, coded, again = (Run(mesh, way) for _ in range(4))
    state = identity.compress(Plan(layers_of(identity.model)))
    losses = [(plain.step(number), identity.step(number)) for number in range(STEPS)]
    same = all(map(torch.equal, plain.own(), identity.own())) and all(a == b for a, b in losses)
    state.close()
    with coded.compress(four_bits(coded)) as state:
        falls = [coded.step(0) for _ in range(STEPS)]
        saved, optimizer = state.stateful.state_dict(), copy.deepcopy(coded.optimizer.state_dict())
        held = [one.clone() for one in coded.own()]
        coded.step(0)
        record, forecast = state.statistics.steps[-1], state.report()["forecast_payload_bytes"]
        ended = _hashes(coded.own())
    with again.compress(four_bits(again)) as state:
        again.step(0)  # whatever it is, what is loaded takes its place
        state.stateful.load_state_dict(saved)
        again.optimizer.load_state_dict(optimizer)
        for one, kept in zip(again.own(), held, strict=True):
            one.copy_(kept)
        again.step(0)
        return {
            "same": same,
            "falls": coded.stage == 0 or falls[-1] < falls[0],
            "as forecast": record.payload_bytes == forecast,
            "resumed": _hashes(again.own()) == ended,
            "entry": next(iter(saved)),
        }


def refused(group: dist.ProcessGroup) -> list[str]:
    """A plan of the whole model on a stage, and both stages of a rank in one call."""
    mesh, told = mesh_of(group, "sharded"), []
    whole = nn.ModuleDict({"blocks": nn.ModuleDict({**Stage(0).blocks, **Stage(1).blocks})})
    run = Run(mesh, "sharded")
    both = nn.ModuleList([Stage(0), run.model])
    fully_shard(both[0], mesh=mesh["replicate", "shard"])
    for attempt in (
        lambda: run.compress(Plan.uniform(whole, "block_scaled", dtype="int4", minimum_numel=1)),
        lambda: (gradlab.compress(both, Plan(layers_of(both))), both[0](torch.ones(1, 16)), run.step(0)),
    ):
        try:
            attempt()
        except GradlabError as error:
            told.append(str(error))
    return told


def _hashes(tensors: list[torch.Tensor]) -> list[str]:
    return [hash_tensor(one) for one in tensors]
