"""Seconds from a finished recording to the decision: `gradlab recommend`, and a pilot of 12 plans in the loop.

    torchrun --nproc-per-node 2 benchmarks decision_time

A convolutional network of 1 M parameters learns made-up images under DDP, 32 on each rank.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradlab
from gradlab.analysis.forecast.candidates import usual_plans
from gradlab.capture import TraceRecorder
from gradlab.layout import layers_of
from gradlab.plan import Plan

RECORDED, BATCHES, WIDTH = 100, 200, 128
OTHERS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("PowerSGD rank 1", "powersgd", {"rank": 1}),
    ("QSGD 2 bits", "qsgd", {"bits": 2}),
    ("ecsq 0.25 bits", "ecsq", {"bits": 0.25}),
)
NETWORK = ("--nodes", "2", "--bandwidth", "20mbit", "--compute-seconds", "40ms")


def network() -> nn.Module:
    """Seven convolutions."""
    blocks = [
        layer for _ in range(6) for layer in (nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU())
    ]
    return nn.Sequential(
        nn.Conv2d(3, WIDTH, 5, 2, 2), nn.ReLU(), nn.MaxPool2d(2), *blocks, nn.Flatten(), nn.Linear(64 * WIDTH, 10)
    )


def main() -> None:
    """Record, and decide twice."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    teacher = torch.randn(48, 10)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randn(32, 3, 32, 32, generator=generator) for _ in range(BATCHES)]

    def labels_of(images: torch.Tensor) -> torch.Tensor:
        return (nn.functional.avg_pool2d(images, 8).flatten(1) @ teacher).argmax(1)

    def trained(images: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels_of(images))
        loss.backward()
        optimizer.step()
        return loss

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    trace = Path(folder[0]) / "trace"
    began = time.perf_counter()
    with TraceRecorder(model, trace, optimizer=optimizer):
        for images in batches[:RECORDED]:
            trained(images)
    recorded, recommended = time.perf_counter() - began, 0.0
    if dist.get_rank() == 0:
        words = [sys.executable, "-m", "gradlab.cli.main", "recommend", str(trace), *NETWORK, "--json"]
        began = time.perf_counter()
        found = subprocess.run([*words, "--out", f"{folder[0]}/plan"], capture_output=True, text=True, check=True)
        recommended = time.perf_counter() - began
        print(f"recommend: {json.loads(found.stdout)['plan']}", flush=True)
    dist.barrier()
    model = DistributedDataParallel(model.module)  # DDP takes one hook, and the recorder's stays on the first
    layers = layers_of(model)
    chosen = usual_plans(layers) | {name: Plan.uniform(layers, codec, **more) for name, codec, more in OTHERS}
    pilot = gradlab.Pilot(model, optimizer, chosen, steps=60)
    began = time.perf_counter()
    for images in pilot.over(batches):
        pilot.record(trained(images))
    seconds = time.perf_counter() - began
    if dist.get_rank() == 0:
        print(pilot.result)
        values = sum(parameter.numel() for parameter in model.parameters())
        print(f"{values / 1e6:.2f} M parameters, {RECORDED} recorded steps {recorded:.0f} s")
        print(f"recommend {recommended:.0f} s, pilot of {len(chosen)} plans {seconds:.0f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
