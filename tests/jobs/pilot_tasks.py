"""Tasks for real ranks: plans tried on a training, which then goes on as if nothing had been."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import gradlab
from gradlab.errors import GradlabError
from gradlab.layout import layers_of
from gradlab.plan import Plan
from gradlab.runtime import OuterStep
from jobs import fsdp_tasks, outer_tasks, tensor_parallel_tasks
from jobs.matrix_cells import node_group
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

    def __init__(self, group: dist.ProcessGroup, optimizer: str = "sgd", **options: Any) -> None:
        torch.manual_seed(dist.get_rank(group))
        random.seed(1)
        np.random.seed(2)  # noqa: NPY002
        self.model = DistributedDataParallel(Noisy(), process_group=group, **options)
        kinds = {
            "sgd": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
            "adam": functools.partial(torch.optim.AdamW, lr=1e-2),
            "zero": functools.partial(
                ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW, lr=1e-2, process_group=group
            ),
        }
        self.optimizer = kinds[optimizer](self.model.parameters())
        rates = {"max_lr": 0.1, "total_steps": STEPS, "cycle_momentum": optimizer != "zero"}
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, **rates)
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
        states = getattr(self.optimizer, "optim", self.optimizer).state
        held = [value.clone() for state in states.values() for value in state.values() if torch.is_tensor(value)]
        model = [value.clone() for value in self.model.state_dict().values()]
        return [*model, *held, torch.tensor(self.scaler.get_scale()), torch.rand(3)]


def goes_on(
    group: dist.ProcessGroup, optimizer: str, warm: int, left_early: bool = False, local_ranks: int = 1
) -> dict[str, Any]:
    """A run with a pilot after some steps and `identity` after it, beside the run without one.

    Between nodes of several ranks `identity` sums in another order than DDP, so that both runs have it.
    """
    inside = {"within": node_group(group, local_ranks)} if local_ranks > 1 else {}

    def compressed(run: Training) -> AbstractContextManager[Any]:
        plan = Plan.uniform(run.model, "identity", minimum_numel=1, minimum_dimensions=0)
        options = {"scaler": run.scaler, "process_group": SPARE.get(dist.get_world_size(group)), **inside}
        return gradlab.compress(run.model, plan, optimizer=run.optimizer, rules="ignore", **options)

    alone = Training(group, optimizer)
    stream = alone.batches()
    losses = [float(alone.step(next(stream)).detach()) for _ in range(warm)]
    with compressed(alone) if inside else nullcontext():
        losses += [float(alone.step(batch).detach()) for batch in stream]
    expected = alone.values()

    run = Training(group, optimizer)
    plans = {
        "signs": Plan.uniform(run.model, "sign"),
        "top-k": Plan.uniform(run.model, "topk", density=0.05, minimum_numel=1),
    }
    stream, found = run.batches(), []
    for _ in range(warm):
        found.append(float(run.step(next(stream)).detach()))
    others = {"scheduler": run.scheduler, "scaler": run.scaler, "longer": PILOT + 1, "max_loss": 1.0}
    pilot = gradlab.Pilot(run.model, run.optimizer, plans, steps=PILOT, **others, **inside)
    for given, batch in enumerate(pilot.over(stream)):
        pilot.record(run.step(batch))
        if left_early and given == 2 * PILOT + 3:
            break
    with compressed(run):
        found += [float(run.step(batch).detach()) for batch in pilot.batches]
    same = all(map(torch.equal, expected, run.values())) and found == losses
    result = {"same": same, "losses": (losses, found)}
    return result if left_early else {**result, "result": pilot.result.to_json()}


class Counting(nn.Module):
    """A model that changes in `forward` beyond buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls = nn.Linear(12, 4), 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.body(inputs) * (1 + 0.1 * self.calls)


BREAKS = 2 * PILOT + 3  # batches given out before: in the round of the plan


def tried(
    run: Training,
    change: Callable[[Any, int], Any] = lambda batch, given: batch,
    optimizer: Any = None,
    batches: Iterable[Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """What a pilot of one plan ends with, and whether all is then as it was before. change: of the batches given."""
    run.scaler = torch.amp.GradScaler("cpu", enabled=False)
    plan = Plan.uniform(run.model, "topk", density=0.5, minimum_numel=1)
    options = {"plans": {"top-k": plan}, "longer": PILOT, "scheduler": run.scheduler, **options}
    pilot = gradlab.Pilot(run.model, optimizer or run.optimizer, steps=PILOT, **options)
    before, error, result = run.values()[:-2], "", {}
    try:
        for given, batch in enumerate(pilot.over(run.batches() if batches is None else batches)):
            pilot.record(run.step(change(batch, given)))
        result = {**pilot.result.to_json(), "text": str(pilot.result)}
    except (Exception, KeyboardInterrupt) as failed:
        error = f"{type(failed).__name__}: {failed}"
    after = run.values()[:-2]
    back = len(after) == len(before) and all(map(torch.equal, before, after))
    return {"back": back, "error": error, "result": result}


def bad_input(group: dist.ProcessGroup) -> dict[str, Any]:
    """What a pilot says of loops and models that are not as they should be."""
    rank, found = dist.get_rank(group), {}

    def at_break(act: Callable[[Any], Any]) -> Callable[[Any, int], Any]:
        return lambda batch, given: act(batch) if given == BREAKS else batch

    def spoil(batch: Any) -> Any:
        batch["inputs"].fill_(torch.nan)
        return batch

    def interrupt(batch: Any) -> Any:
        raise KeyboardInterrupt

    def fail(batch: Any) -> Any:
        if rank == 1:
            raise ValueError("a bad sample")
        return batch

    def of(count: int, run: Training) -> dict[str, Any]:
        return {"run": run, "batches": itertools.islice(run.batches(), count)}

    huge = {"inputs": torch.zeros(()).expand(2**40, 12)}
    found["short"] = tried(**of(5, Training(group)))
    found["uneven"] = tried(**of(8 - 3 * rank, Training(group)))
    found["reader"] = tried(Training(group), batches=[iter([1]), iter([2])])
    found["huge"] = tried(Training(group), batches=[huge if rank else [0]])
    found["nan"] = tried(Training(group), at_break(spoil))
    found["interrupted"] = tried(Training(group), at_break(interrupt))
    found["failed"] = tried(Training(group, broadcast_buffers=False), at_break(fail))
    found["late"] = tried(Training(group), budget="0s")
    run = Training(group)
    found["not stepped"] = tried(run, optimizer=torch.optim.Adam(run.model.parameters()))
    found["another steps"] = tried(*_in_two_parts(group))
    run = Training(group)
    run.model = DistributedDataParallel(Counting(), process_group=group)
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    found["counting"] = tried(run)
    return found


def _in_two_parts(group: dist.ProcessGroup) -> tuple[Training, Callable[[Any, int], Any]]:
    """A training whose second optimizer a pilot is not given."""
    run = Training(group)
    first, *rest = run.model.parameters()
    run.optimizer, other = (torch.optim.SGD(part, lr=0.1, momentum=0.9) for part in ([first], rest))

    def step(batch: Any, given: int) -> Any:
        if given:
            other.step()
        return batch

    return run, step


def misused(group: dist.ProcessGroup) -> dict[str, Any]:
    """What a pilot says of arguments and calls."""
    run = Training(group)
    late = {"late": Plan.uniform(run.model, "topk", density=0.5, minimum_numel=1, warmup_steps=5)}
    plans = {"signs": Plan.uniform(run.model, "sign")}
    make = functools.partial(gradlab.Pilot, run.model, run.optimizer)
    found = {"dense beginning": _refused(lambda: make(late, steps=8))}
    for name, value in (("budget", "soon"), ("budget", -1), ("steps", 7), ("longer", 59), ("keep", 0)):
        found[f"{name} {value}"] = _refused(lambda name=name, value=value: make(plans, **{name: value}))
    pilot = make(plans, steps=8, scheduler=run.scheduler, scaler=run.scaler)
    given = 0
    for given, batch in enumerate(pilot.over(run.batches()), 1):
        loss = run.step(batch)
        if given < 8:
            pilot.record(loss)
        else:
            break
    found["used again"] = [_refused(lambda: list(pilot.over([]))), _refused(lambda: next(iter(pilot.over([0]))))]
    run = Training(group)
    plans = {
        "more of top-k": Plan.uniform(run.model, "topk", density=0.4, minimum_numel=1),
        "top-k": Plan.uniform(run.model, "topk", density=0.2, minimum_numel=1),
    }
    found["enough"] = tried(run, plans=plans, keep=1, max_loss=10.0)["result"]
    run = Training(group)
    pilot = gradlab.Pilot(run.model, run.optimizer, plans, steps=8, longer=8)
    found["not recorded"] = _refused(lambda: [run.step(batch) for batch in pilot.over(run.batches())])
    return found


def _refused(attempt: Any) -> str:
    try:
        return str(attempt())
    except GradlabError as error:
        return str(error)


@dataclass
class Sharded:
    """A model under FSDP2 with its optimizer."""

    model: Any
    optimizer: torch.optim.Optimizer
    rank: int

    def step(self, words: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        scores = self.model(words).float()
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), words.roll(1, 1).flatten())
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def values(self) -> list[torch.Tensor]:
        held = [value for state in self.optimizer.state.values() for value in state.values()]
        self.model.reshard()
        local = [one.to_local() if isinstance(one, DTensor) else one for one in [*self.model.parameters(), *held]]
        return [one.detach().clone() for one in local]


def sharded_goes_on(group: dist.ProcessGroup, between: bool, parts: bool = False) -> dict[str, Any]:
    """FSDP2 with a pilot of its reduce-scatter, or of native HSDP's all-reduce between two nodes, and without.

    parts: whether tensor parallelism cuts layers in the nodes, whose ranks have the same batches.
    """
    mesh = tensor_parallel_tasks.mesh_of(group) if parts else fsdp_tasks.mesh_of(group, 2 if between else 1)
    rank = dist.get_rank(group) // (2 if parts else 1)

    def training() -> Sharded:
        model = tensor_parallel_tasks.cut(mesh, 30) if parts else fsdp_tasks.sharded(mesh if between else mesh["shard"])
        return Sharded(model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True), rank)

    def evaluate() -> torch.Tensor:  # which leaves parameters gathered
        with torch.no_grad():
            return run.model(batches[0]).float().square().mean()

    batches, warm = [fsdp_tasks.words_of(rank, step) for step in range(12)], 0 if between else 2
    alone, run = training(), training()
    losses = [float(alone.step(batch)) for batch in batches]
    stream = iter(batches)
    found = [float(run.step(next(stream))) for _ in range(warm)]
    plans = {"top-k": Plan.uniform(layers_of(run.model), "topk", density=0.1, minimum_numel=1)}
    where = {} if between else {"within": mesh["shard"]}
    pilot = gradlab.Pilot(
        run.model, run.optimizer, plans, steps=PILOT, longer=PILOT, evaluate=evaluate, max_loss=1.0, **where
    )
    for batch in pilot.over(stream):
        pilot.record(run.step(batch))
    found += [float(run.step(batch)) for batch in pilot.batches]
    same = found == losses and all(map(torch.equal, alone.values(), run.values()))
    return {"same": same, "losses": (losses, found), "result": pilot.result.to_json()}


def outer_goes_on(group: dist.ProcessGroup, codec: str, fragments: int, delay: int) -> dict[str, Any]:
    """Local steps with a pilot after some of them, beside the run without: the outer step's plan has residuals."""
    rank, warm, every = dist.get_rank(group), 3, 2
    layers = layers_of(outer_tasks.network())

    def training() -> tuple[nn.Module, torch.optim.Optimizer, OuterStep]:
        model, plan = outer_tasks.network(), Plan.uniform(layers, codec, minimum_numel=1, group_bytes=1)
        options = {"every": every, "fragments": fragments, "delay": delay, "group": group, "rules": "ignore"}
        return model, outer_tasks.adamw(model), OuterStep(plan, model, **options)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, outer: OuterStep, batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        optimizer.step()
        outer.step()
        return loss.detach()

    batches = [outer_tasks.batch(rank, number) for number in range(15)]
    alone, run = training(), training()
    losses = [float(step(*alone, batch)) for batch in batches]
    stream = iter(batches)
    found = [float(step(*run, next(stream))) for _ in range(warm)]
    plans = {"top-k": Plan.uniform(layers, "topk", density=0.05, minimum_numel=1, group_bytes=1)}
    options = {"steps": PILOT, "longer": PILOT, "max_loss": 10.0, "outer": run[2]}
    pilot = gradlab.Pilot(run[0], run[1], plans, **options)
    for batch in pilot.over(stream):
        pilot.record(step(*run, batch))
    found += [float(step(*run, batch)) for batch in pilot.batches]
    values = [[*model.parameters(), *outer.fragments[0].parameters.values()] for model, _, outer in (alone, run)]
    digests = [outer.state_dict()["sha256"] for *_, outer in (alone, run)]
    same = found == losses and all(map(torch.equal, *values)) and digests[0] == digests[1]
    with run[2].exchanging_by(plans["top-k"]):
        for batch in batches[:every]:
            step(*run, batch)
        run[2].wait()
        exchanges = [one.exchange for one in run[2].fragments]
        sent = [(one.statistics.steps[-1].payload_bytes, one.run.plan.payload_bytes(2)) for one in exchanges]
        by_it = run[2].plan is plans["top-k"]
    for *_, outer in (alone, run):
        outer.close()
    return {"same": same, "losses": (losses, found), "result": pilot.result.to_json(), "sent": sent, "by_it": by_it}
