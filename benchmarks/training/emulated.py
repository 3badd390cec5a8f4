"""Training on N nodes played in one process, under a plan in lockstep or recorded: what the campaigns share.

Every node has its own batch and batch statistics; node 0's statistics are kept. Plans run in lockstep, which is what
the engine computes, bit for bit.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gradlab.capture import EmulatedNodes
from gradlab.codec import Tensors
from gradlab.collectives import sum_in_rank_order
from gradlab.datasets.optimizer import build_optimizer, clip_gradients
from gradlab.datasets.recipe import Recipe, learning_rate_at
from gradlab.datasets.resnet import initialized
from gradlab.datasets.sampling import batches
from gradlab.datasets.workload import Workload
from gradlab.ddp.optimizers import HeldLayers
from gradlab.executor.lockstep_plan import LockstepPlan, StepResult
from gradlab.layout import layers_of
from gradlab.plan import Plan

Micro = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Task:
    """A workload with its recipe and its number of nodes. blocks: of a ResNet of 16, 32, ... channels on images halved
    to 16 x 16, under bfloat16 autocast, so that seeds by the dozen fit on a CPU; None: the workload as it is."""

    workload: Workload
    recipe: Recipe
    ranks: int = 4
    blocks: tuple[int, ...] | None = None
    autocast: bool = True

    def model(self, seed: int) -> nn.Module:
        if self.blocks is None:
            return self.workload.model(seed)
        widths = [16 * 2**stage for stage in range(len(self.blocks))]
        return initialized(3, widths, self.blocks, 10, seed).to(memory_format=torch.channels_last)

    def loss(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.blocks is None:
            return self.workload.loss(model(x), y)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            scores = model(self._images(x))
        return self.workload.loss(scores.float(), y)

    def score(self, model: nn.Module, data: Any, first: int | None = None) -> float:
        """The workload's metric on the (first) test samples."""
        x = data.test_x[:first] if self.blocks is None else self._images(data.test_x[:first])
        return self.workload.score(model, x, data.test_y[:first], batch_size=16 if self.blocks is None else 500)

    @torch.no_grad()
    def test_loss(self, model: nn.Module, data: Any) -> float:
        model.eval()
        loss = float(self.loss(model, data.test_x[:2000], data.test_y[:2000]))
        model.train()
        return loss

    def _images(self, x: torch.Tensor) -> torch.Tensor:
        return functional.avg_pool2d(x, 2).contiguous(memory_format=torch.channels_last)

    def micro_batches(self, data: Any, seed: int) -> Iterator[Micro]:
        size, steps = self.recipe.batch_size, self.recipe.steps
        orders = [batches(len(data.train_x), size, rank, self.ranks, seed, steps) for rank in range(self.ranks)]
        augment = [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(self.ranks)]
        for indices in zip(*orders, strict=True):
            yield [
                (self.workload.augment(data.train_x[batch], generator), data.train_y[batch])
                for batch, generator in zip(indices, augment, strict=True)
            ]


def node_gradients(task: Task, model: nn.Module, micro: Micro) -> tuple[list[Tensors], float]:
    """Each node's gradients by layer name, and the mean loss."""
    gradients, losses, kept = [], [], {}
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for x, y in micro:
        _set_buffers(model, before)
        model.zero_grad()
        loss = task.loss(model, x, y)
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append({name: p.grad.contiguous() for name, p in model.named_parameters() if p.grad is not None})
        kept = kept or {name: buffer.clone() for name, buffer in model.named_buffers()}
    _set_buffers(model, kept)
    return gradients, statistics.fmean(losses)


def _set_buffers(model: nn.Module, values: Tensors) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])


def record(task: Task, data: Any, folder: Path, seed: int, *, start: int, every: int, count: int, **more: Any) -> None:
    """A dense run, until `count` iterations of all nodes' gradients are recorded, unless the folder is there; more:
    options of `EmulatedNodes`."""
    if folder.exists():
        return
    unfinished = folder.with_name(f".{folder.name}-{os.getpid()}")  # of a run that is killed no recording is taken
    model = task.model(seed)
    optimizer = build_optimizer(task.recipe, model.parameters())
    options = {"optimizer": optimizer, "start": start, "every": every, "max_steps": count, **more}
    with EmulatedNodes(model, unfinished, world_size=task.ranks, **options) as nodes:
        for step, micro in enumerate(islice(task.micro_batches(data, seed), start + every * (count - 1) + 1)):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(task.recipe, step)
            optimizer.zero_grad()
            for rank, (x, y) in enumerate(micro):
                with nodes.node(rank):
                    loss = task.loss(model, x, y)
                    loss.backward()
                    nodes.annotate(loss=loss)
            nodes.average()
            clip_gradients(task.recipe, model.parameters())
            optimizer.step()
    unfinished.rename(folder)


def train(
    task: Task,
    plan: Plan,
    data: Any,
    seed: int,
    stop: int | None = None,
    watch: Callable[[Tensors], None] | None = None,
    score_every: int | None = None,
) -> dict[str, Any]:
    """Train under a plan. A run whose loss is not finite ends there.

    Args:
        stop: end after so many iterations.
        watch: is given each iteration's averages.
        score_every: iterations between points of a curve of scores on the first 2000 test samples.

    Returns:
        score, curve; loss: mean of the last 50; test_loss: of 2000 test samples; payload, wire: bytes per iteration of
        the mean rank; ratio: of dense bytes to these, over all iterations; compressing_ratio: over those alone that the
        schedule compresses; last_ratio: over the last 50; most_payload, least_payload: in these, of the ranks that send
        most and least.
    """
    model = task.model(seed)
    optimizer = build_optimizer(task.recipe, model.parameters())
    lockstep = LockstepPlan(plan, task.ranks, HeldLayers(optimizer).plain_sgd())
    sent: list[tuple[list[float], list[float], bool]] = []
    losses, curve = [], []
    for step, micro in enumerate(islice(task.micro_batches(data, seed), stop)):
        result, loss = compressed_gradients(task, model, optimizer, lockstep, step, micro)
        if watch:
            watch({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        clip_gradients(task.recipe, model.parameters())
        optimizer.step()
        sent.append((list(result.payload), list(result.wire), result.compressing))
        losses.append(loss)
        if not math.isfinite(loss):
            break
        if score_every and (step + 1) % score_every == 0:
            curve.append((step + 1, task.score(model, data, 2000)))
    dense = 4 * sum(layer.numel for layer in layers_of(model))
    payloads = [statistics.fmean(payload) for payload, _, _ in sent]
    compressing = [mean for mean, one in zip(payloads, sent, strict=True) if one[2]] or [float(dense)]
    by_rank = [statistics.fmean(one) for one in zip(*(payload for payload, _, _ in sent[-50:]), strict=True)]
    return {
        "score": task.score(model, data),
        "curve": curve,
        "loss": statistics.fmean(losses[-50:]),
        "test_loss": task.test_loss(model, data),
        "most_payload": max(by_rank),
        "least_payload": min(by_rank),
        "ratio": dense / statistics.fmean(payloads),
        "compressing_ratio": dense / statistics.fmean(compressing),
        "last_ratio": dense / statistics.fmean(payloads[-50:]),
        "payload": statistics.fmean(payloads),
        "wire": statistics.fmean(statistics.fmean(wire) for _, wire, _ in sent),
    }


def compressed_gradients(
    task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, lockstep: LockstepPlan, step: int, micro: Micro
) -> tuple[StepResult, float]:
    """One iteration up to the optimizer's step: its rate is set and the plan's averages are in the gradients."""
    rate = learning_rate_at(task.recipe, step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    gradients, loss = node_gradients(task, model, micro)
    result = lockstep.step(step, gradients, dict.fromkeys(gradients[0], rate))
    means = {name: value for ranks in result.exchanged.values() for name, value in ranks[0].mean.items()}
    for name, parameter in model.named_parameters():
        mean = means.get(name)
        parameter.grad = mean if mean is not None else sum_in_rank_order([g[name] for g in gradients])
    return result, loss
