"""Step time of our hook beside plain DDP and PyTorch's hooks: ratios, measured in turns in one run.

    torchrun --standalone --nproc-per-node 2 benchmarks/step_time.py [--steps 10] [--rounds 3] [--width 32]

Each method gets a model of its own with the same values; in every round each takes its turn, so that a slow spell of
the machine falls on all. The ratio is to plain DDP's median. "compute" is backward without any exchange (no_sync).
On one machine the link is memory: this shows what the engine costs, not what compression saves.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from gradlab.capture import TraceRecorder
from gradlab.plan import named_plan
from gradlab.runtime import CompressionState, compression_hook

Attach = Callable[[DistributedDataParallel], None]


def network(width: int) -> nn.Module:
    """A plain convolutional network whose wider layers hold most of the parameters, as a residual network's do."""
    torch.manual_seed(0)
    channels = [3, width, 2 * width, 4 * width, 8 * width]
    layers: list[nn.Module] = []
    for before, after in pairwise(channels):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.Conv2d(after, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], 10))


def ours(codec: str, measure_every: int = 0, **settings: Any) -> Attach:
    """Attach a codec's uniform plan, or a published method's."""

    def attach(model: DistributedDataParallel) -> None:
        state = CompressionState(named_plan(model, codec, **settings), model, measure_every=measure_every)
        model.register_comm_hook(state, compression_hook)

    return attach


METHODS: dict[str, Attach] = {
    "plain DDP": lambda model: None,
    "PyTorch allreduce_hook": lambda model: model.register_comm_hook(None, allreduce_hook),
    "PyTorch fp16 hook": lambda model: model.register_comm_hook(None, fp16_compress_hook),
    "identity": ours("identity"),
    "cast float16": ours("cast"),
    "QSGD 4 bits, max norm": ours("QSGD, max norm", bits=4),
    "PowerSGD rank 2": ours("PowerSGD", rank=2),
    "PowerSGD rank 2, measured at every step": ours("PowerSGD", 1, rank=2),
    "topk 1 %": ours("topk", density=0.01),
}


class Contestant:
    """One method's model and its timed step."""

    def __init__(self, attach: Attach, width: int, batch: int) -> None:
        self.model = DistributedDataParallel(network(width))
        attach(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.images, self.classes = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
        self.seconds: list[float] = []

    def step(self) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(self.images), self.classes).backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start)


def main() -> None:
    """Time all methods in turns and print one line of JSON each, from rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--steps", 10), ("--rounds", 3), ("--width", 32), ("--batch", 16)):
        parser.add_argument(name, type=int, default=default)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    trace = Path(tempfile.gettempdir()) / f"gradlab-step-time-{os.environ['MASTER_PORT']}"
    methods = {**METHODS, "recording": lambda model: TraceRecorder(model, trace, overwrite=True)}
    contestants = {name: Contestant(attach, options.width, options.batch) for name, attach in methods.items()}
    alone = Contestant(lambda model: None, options.width, options.batch)
    for contestant in contestants.values():
        for _ in range(3):
            contestant.step()
        contestant.seconds.clear()
    for _ in range(options.rounds):
        for contestant in contestants.values():
            for _ in range(options.steps):
                contestant.step()
        with alone.model.no_sync():
            for _ in range(options.steps):
                alone.step()
    if dist.get_rank() == 0:
        reference = statistics.median(contestants["plain DDP"].seconds)
        for name, contestant in {"compute": alone, **contestants}.items():
            seconds = statistics.median(contestant.seconds)
            print(json.dumps({"method": name, "seconds": round(seconds, 5), "ratio": round(seconds / reference, 3)}))
        shutil.rmtree(trace, ignore_errors=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
