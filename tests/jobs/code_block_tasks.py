"""Tasks for four ranks: run the Python blocks of a page, each with a model, an optimizer and batches around it."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradlab
import gradlab.capture
from gradlab.artifact import Artifact
from gradlab.plan import Plan

WIDTH, CLASSES = 64, 8
# Four ranks on processors, where a page has nodes of eight GPUs.
HERE = {'"cuda"': '"cpu"', "(nodes, 8)": "(nodes, 2)"}


class Network(nn.Module):
    """Two blocks and a head, with matrices that every codec takes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(inputs).relu())


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()


def recorded(group: dist.ProcessGroup, folder: str) -> None:
    """Record 40 timed steps of a network whose fits and replays take a second; LGC learns from what is between the
    first matrix and the last."""
    torch.manual_seed(0)
    layers = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64, bias=False), nn.ReLU(), nn.Linear(64, 10, bias=False)
    model = DistributedDataParallel(nn.Sequential(*layers), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with gradlab.capture.TraceRecorder(model, folder, optimizer=optimizer):
        for _ in range(40):
            targets = torch.randint(10, (16,), generator=generator)
            train_step(model, optimizer, torch.randn(16, 64, generator=generator), targets)


def surroundings() -> dict[str, Any]:
    """What a reader's script has already, by name: made anew for each block, as a model takes one hook."""
    torch.manual_seed(0)
    model = Network()
    ddp_model = DistributedDataParallel(model)
    inputs, targets = torch.randn(8, WIDTH), torch.randint(CLASSES, (8,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return {
        "torch": torch,
        "functools": functools,
        "gradlab": gradlab,
        "TraceRecorder": gradlab.capture.TraceRecorder,
        "init_device_mesh": init_device_mesh,
        "fully_shard": fully_shard,
        "nodes": 2,
        "model": model,
        "ddp_model": ddp_model,
        "optimizer": optimizer,
        "criterion": nn.CrossEntropyLoss(),
        "batches": [(inputs, targets)] * 3,
        "scaler": torch.amp.GradScaler("cpu"),
        "loss": nn.functional.cross_entropy(model(inputs), targets),
        "plan": Plan.uniform(model, "powersgd", rank=2),
        "train_step": train_step,
    }


def sharded(names: dict[str, Any]) -> None:
    """Shard the model by FSDP2, between two nodes of two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(Network(), mesh=mesh["shard"])
    bits = {number: Plan.uniform(Network(), "block_scaled", dtype=f"int{number}") for number in (4, 8)}
    optimizer = torch.optim.AdamW(model.parameters())
    names |= {"model": model, "mesh": mesh, "optimizer": optimizer}
    names |= {"plan": bits[8], "four_bits": bits[4], "eight_bits": bits[8]}


GIVEN: dict[str, Callable[[dict[str, Any]], None]] = {"a sharded model": sharded}


def run_blocks(group: dist.ProcessGroup, page: str, blocks: list[tuple[int, str, str]], folder: str) -> int:
    """Run blocks (first line, what is given, text) in order, with the names of those before; how many were run."""
    names: dict[str, Any] = {"__name__": "__main__"}
    os.chdir(folder)
    for line, given, text in blocks:
        if dist.get_rank(group) == 0:
            _files(Path(folder))
        dist.barrier(group)
        names |= surroundings()
        if given:
            GIVEN[given](names)
        for there, here in HERE.items():
            text = text.replace(there, here)
        exec(compile("\n" * (line - 1) + text, page, "exec"), names)
        for made in list(names.values()):
            if type(made).__module__.startswith("gradlab.") and hasattr(made, "close"):
                made.close()
        dist.barrier(group)
    return len(blocks)


def _files(folder: Path) -> None:
    """The artifact that pages name, and no recording from the block before."""
    shutil.rmtree(folder / "trace", ignore_errors=True)
    plan = Plan.uniform(Network(), "powersgd", rank=2)
    if not (folder / "plan.safetensors").exists():
        Artifact(plan).save(folder / "plan.safetensors")
