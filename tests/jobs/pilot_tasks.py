"""Tasks for real ranks: plans tried on a training, which then goes on as if nothing had been."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradlab
from gradlab.errors import GradlabError
from gradlab.plan import Plan
from support.pool_groups import SPARE

STEPS, PILOT = 14, 8


class Noisy(nn.Module):
    """Dropout, BatchNorm, and a draw of every generator that a network may use."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1  # another tensor each time
        return self.body(inputs) * (1 + 0.01 * random.random() + 0.01 * float(np.random.rand()))  # noqa: NPY002  as models do


class Training:
    """One with all that a step may change. Its loader draws from torch's own generator."""

    def __init__(self, group: dist.ProcessGroup, optimizer: str) -> None:
        torch.manual_seed(dist.get_rank(group))
        random.seed(1)
        np.random.seed(2)  # noqa: NPY002
        self.model = DistributedDataParallel(Noisy(), process_group=group)
        kinds = {"sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}), "adam": (torch.optim.AdamW, {"lr": 1e-2})}
        kind, settings = kinds[optimizer]
        self.optimizer = kind(self.model.parameters(), **settings)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.1, total_steps=STEPS)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)

    def batches(self) -> Any:
        for _ in range(STEPS):
            yield {"inputs": torch.randn(16, 12), "targets": [torch.randint(4, (16,))]}

    def step(self, batch: Any) -> torch.Tensor:
        batch["inputs"].mul_(0.5)  # training may write into a batch
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(batch["inputs"]), batch["targets"][0])
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        return loss

    def values(self) -> list[torch.Tensor]:
        held = [value for state in self.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
        model = [value.clone() for value in self.model.state_dict().values()]
        return [*model, *held, torch.tensor(self.scaler.get_scale()), torch.rand(3)]


def goes_on(group: dist.ProcessGroup, optimizer: str, warm: int, left_early: bool = False) -> dict[str, Any]:
    """A run with a pilot after some steps and `identity` after it, beside the run without one."""
    alone = Training(group, optimizer)
    losses = [float(alone.step(batch).detach()) for batch in alone.batches()]
    expected = alone.values()

    run = Training(group, optimizer)
    plans = {
        "top-k": Plan.uniform(run.model, "topk", density=0.05, minimum_numel=1),
        "signs": Plan.uniform(run.model, "sign"),
    }
    stream, found = run.batches(), []
    for _ in range(warm):
        found.append(float(run.step(next(stream)).detach()))
    pilot = gradlab.Pilot(run.model, run.optimizer, plans, steps=PILOT, scheduler=run.scheduler, scaler=run.scaler)
    for given, batch in enumerate(pilot.over(stream)):
        pilot.record(run.step(batch))
        if left_early and given == 2 * PILOT + 3:
            break
    plan = Plan.uniform(run.model, "identity", minimum_numel=1, minimum_dimensions=0)
    options = {"scaler": run.scaler, "process_group": SPARE.get(dist.get_world_size(group))}
    with gradlab.compress(run.model, plan, optimizer=run.optimizer, rules="ignore", **options):
        found += [float(run.step(batch).detach()) for batch in pilot.batches]
    same = all(map(torch.equal, expected, run.values())) and found == losses
    result = {"same": same, "losses": (losses, found)}
    return result if left_early else {**result, "result": pilot.result.to_json()}


def bad_input(group: dist.ProcessGroup) -> dict[str, Any]:
    """What a pilot says of plans that break, time that is over, and loops that are not as they should be."""
    found: dict[str, Any] = {}

    def tried(batches: int = 10, recorded: bool = True, break_in: str = "", **options: Any) -> Any:
        run = Training(group, "sgd")
        plans = {"top-k": Plan.uniform(run.model, "topk", density=0.5, minimum_numel=1)}
        pilot = gradlab.Pilot(run.model, run.optimizer, plans, steps=PILOT, scheduler=run.scheduler, **options)
        before = run.values()[:-1]
        try:
            for given, batch in enumerate(pilot.over(itertools.islice(run.batches(), batches))):
                run.scaler = torch.amp.GradScaler("cpu", enabled=False)
                loss = run.step(batch)
                if recorded:
                    pilot.record(torch.tensor(torch.nan) if break_in == "top-k" and given > 2 * PILOT else loss)
        except GradlabError as error:
            found["back"] = all(map(torch.equal, before[:-1], run.values()[:-2]))
            return str(error)
        return pilot.result.to_json()

    found["short"] = tried(batches=5)
    found["not recorded"] = tried(recorded=False)
    found["nan"] = tried(break_in="top-k")
    found["late"] = tried(budget="0s")
    run = Training(group, "sgd")
    late = {"late": Plan.uniform(run.model, "topk", density=0.5, minimum_numel=1, warmup_steps=5)}
    found["dense beginning"] = _refused(functools.partial(gradlab.Pilot, run.model, run.optimizer, late, steps=8))
    plans = {"signs": Plan.uniform(run.model, "sign")}
    pilot = gradlab.Pilot(run.model, run.optimizer, plans, steps=8, scheduler=run.scheduler, scaler=run.scaler)
    for batch in pilot.over(run.batches()):
        pilot.record(run.step(batch))
    found["used again"] = [_refused(lambda: list(pilot.over([]))), _refused(lambda: next(iter(pilot.over([0]))))]
    found["budget"] = [_refused(functools.partial(tried, budget=wrong)) for wrong in ("soon", -1)]
    return found


def _refused(attempt: Any) -> str:
    try:
        return str(attempt())
    except GradlabError as error:
        return str(error)
