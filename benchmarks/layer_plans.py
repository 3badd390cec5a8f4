"""Uniform plans against L-GreCo's at equal error: Tables 2 and 3 of its paper, in small.

    python benchmarks/layer_plans.py images --data cifar10.npz --record TRACE       # a dense run, 4 nodes
    python benchmarks/layer_plans.py images --trace TRACE --fit PLANS               # tables, plans, all planners
    python benchmarks/layer_plans.py images --data cifar10.npz --fit PLANS --train ROWS.jsonl [--seeds 0 1]
    python benchmarks/layer_plans.py images --train ROWS.jsonl --table

images: CIFAR-10 at 16 x 16, a ResNet-18 of a quarter of the width (700,000 parameters), 4 ranks with 16 images each,
SGD with momentum. words: WikiText-2 by words (8192 of them), the transformer of `gradlab.datasets`, 4 ranks with 8 rows
of 64, AdamW. 300 iterations, of which the first 50 are dense. QSGD 4 bit, top-k 1 % (words: 10 %), PowerSGD rank 4
(words: 32): uniform, and the smallest plan of the same total error. One line of JSON per run; what is there is not done
again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accuracy import halved
from torch import nn

from gradlab.analysis.lgreco import fit_lgreco
from gradlab.analysis.lockstep_plan import LockstepPlan
from gradlab.artifact import Artifact
from gradlab.capture import EmulatedNodes
from gradlab.collectives import sum_in_rank_order
from gradlab.datasets import get
from gradlab.datasets.optimizer import build_optimizer
from gradlab.datasets.recipe import Recipe, learning_rate_at
from gradlab.datasets.resnet import initialized
from gradlab.datasets.sampling import batches
from gradlab.datasets.workload import Workload
from gradlab.layout import layers_of
from gradlab.optimizers import is_plain_sgd
from gradlab.plan import Plan
from gradlab.trace import Trace

RANKS, STEPS, WARMUP = 4, 300, 50
FIRST, EVERY, RECORDED = 50, 4, 60  # of the recording: iterations 50, 54, ..., 286
Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A workload with its batch, and the reference settings of the paper's tables."""

    workload: Workload
    recipe: Recipe
    references: dict[str, dict[str, Any]]
    small_images: bool = False

    def model(self, seed: int) -> nn.Module:
        if self.small_images:
            return initialized(3, (16, 32, 64, 128), (2, 2, 2, 2), 10, seed).to(memory_format=torch.channels_last)
        return self.workload.model(seed)

    def inputs(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        found = self.workload.augment(x, generator)
        return halved(found) if self.small_images else found

    def loss(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not self.small_images:
            return self.workload.loss(model(x), y)
        with torch.autocast("cpu", torch.bfloat16):
            scores = model(x)
        return self.workload.loss(scores.float(), y)

    def score(self, model: nn.Module, data: Any) -> float:
        x = halved(data.test_x) if self.small_images else data.test_x
        return self.workload.score(model, x, data.test_y, batch_size=500 if self.small_images else 16)


IMAGES, WORDS = get("cifar10"), get("text_words")
TASKS = {
    "images": Task(
        IMAGES,
        replace(IMAGES.recipe, batch_size=16, steps=STEPS, schedule="cosine", learning_rate=0.05),
        {"qsgd": {"bits": 4}, "topk": {"density": 0.01}, "powersgd": {"rank": 4}},
        small_images=True,
    ),
    "words": Task(
        WORDS,
        replace(WORDS.recipe, batch_size=8, steps=STEPS),
        {"qsgd": {"bits": 4}, "topk": {"density": 0.1}, "powersgd": {"rank": 32}},
    ),
}


def micro_batches(task: Task, data: Any, seed: int) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Inputs and targets of each node, iteration by iteration."""
    recipe = task.recipe
    orders = [batches(len(data.train_x), recipe.batch_size, rank, RANKS, seed, recipe.steps) for rank in range(RANKS)]
    augment = [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(RANKS)]
    for indices in zip(*orders, strict=True):
        yield [
            (task.inputs(data.train_x[mine], generator), data.train_y[mine])
            for mine, generator in zip(indices, augment, strict=True)
        ]


def record(task: Task, data: Any, folder: Path, seed: int = 7) -> None:
    """A dense run of another seed than those that are trained, some iterations of all nodes' gradients."""
    model = task.model(seed)
    optimizer = build_optimizer(task.recipe, model.parameters())
    options = {"optimizer": optimizer, "start": FIRST, "every": EVERY, "max_steps": RECORDED}
    with EmulatedNodes(model, folder, world_size=RANKS, **options) as nodes:
        for step, micro in enumerate(micro_batches(task, data, seed)):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(task.recipe, step)
            optimizer.zero_grad()
            for rank, (x, y) in enumerate(micro):
                with nodes.node(rank):
                    loss = task.loss(model, x, y)
                    loss.backward()
                    nodes.annotate(loss=loss)
            nodes.average()
            optimizer.step()


def fit(task: Task, trace: Trace, folder: Path) -> None:
    """An artifact per codec, uniform and by layer."""
    folder.mkdir(exist_ok=True)
    for codec, reference in task.references.items():
        found = fit_lgreco(trace, codec, reference, warmup_steps=WARMUP)
        found.artifact().save(folder / f"{codec}-lgreco.safetensors", overwrite=True)
        uniform = Plan.uniform(trace.layers, codec, warmup_steps=WARMUP, **reference)
        Artifact(uniform).save(folder / f"{codec}-uniform.safetensors", overwrite=True)
        origin = found.origin
        dense = origin["dense_payload_bytes"]
        print(
            f"{codec:9s} uniform {dense / origin['uniform_payload_bytes']:6.1f}x  L-GreCo "
            f"{dense / origin['payload_bytes']:6.1f}x  gain {origin['gain']:.2f}  error where chosen, later: uniform "
            f"{_errors(origin, 'uniform')}, L-GreCo {_errors(origin, 'plan')}"
        )


def _errors(origin: dict[str, Any], which: str) -> str:
    found = origin["relative_error"][which]
    return f"{found['chosen_on']:.3f}, {found['held_out']:.3f}"


def train(task: Task, plan: Plan | None, data: Any, seed: int) -> Row:
    """Train under a plan, or dense, on emulated nodes: final loss (mean of 50), score, bytes per iteration."""
    model = task.model(seed)
    layers = layers_of(model)
    optimizer = build_optimizer(task.recipe, model.parameters())
    lockstep = LockstepPlan(plan or Plan(layers), RANKS, is_plain_sgd(optimizer))
    losses, payload, began = [], 0.0, time.perf_counter()
    for step, micro in enumerate(micro_batches(task, data, seed)):
        rate = learning_rate_at(task.recipe, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        gradients, loss = node_gradients(task, model, micro)
        result = lockstep.step(step, gradients, {layer.name: rate for layer in layers})
        means = {name: value for ranks in result.exchanged.values() for name, value in ranks[0].mean.items()}
        for name, parameter in model.named_parameters():
            parameter.grad = means[name] if name in means else sum_in_rank_order([g[name] for g in gradients])
        optimizer.step()
        losses.append(loss)
        payload += statistics.fmean(result.payload) if step >= WARMUP else 0.0
        if not math.isfinite(loss):
            break
    dense = 4 * sum(layer.numel for layer in layers)
    return {
        "loss": statistics.fmean(losses[-50:]),
        "score": task.score(model, data),
        "ratio": dense * (STEPS - WARMUP) / payload,
        "seconds": time.perf_counter() - began,
    }


def node_gradients(
    task: Task, model: nn.Module, micro: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[list[dict[str, torch.Tensor]], float]:
    """Each node's gradients, with its own batch statistics; node 0's are kept. And the mean loss."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    first: dict[str, torch.Tensor] = {}
    found, losses = [], []
    for x, y in micro:
        model.load_state_dict(before, strict=False)
        model.zero_grad()
        loss = task.loss(model, x, y)
        loss.backward()
        losses.append(float(loss.detach()))
        found.append({name: p.grad.contiguous() for name, p in model.named_parameters() if p.grad is not None})
        first = first or {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.load_state_dict(first, strict=False)
    return found, statistics.fmean(losses)


def train_all(task: Task, name: str, data: Any, plans: Path, out: Path, seeds: Sequence[int]) -> None:
    rows = read(out)
    chosen: list[tuple[str, Plan | None]] = [("dense", None)]
    for codec in task.references:
        for which in ("uniform", "lgreco"):
            chosen.append((f"{codec}-{which}", Artifact.load(plans / f"{codec}-{which}.safetensors").plan))
    for seed in seeds:
        for method, plan in chosen:
            about = {"task": name, "method": method, "seed": seed}
            if not any(about.items() <= row.items() for row in rows):
                row = about | train(task, plan, data, seed)
                with out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(json.dumps(row), flush=True)


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(rows: Sequence[Row]) -> str:
    """Ratio while compressing, final loss and score, each with its distance to dense and to uniform."""
    lines = ["task    method            n   ratio   loss           to dense  to uniform   score"]
    for task in dict.fromkeys(row["task"] for row in rows):
        here = [row for row in rows if row["task"] == task]
        mean = {m: _mean([row for row in here if row["method"] == m]) for m in dict.fromkeys(r["method"] for r in here)}
        for method, found in mean.items():
            uniform = mean.get(method.replace("lgreco", "uniform"), found)
            losses = ", ".join(f"{row['loss']:.3f}" for row in here if row["method"] == method)
            lines.append(
                f"{task:7s} {method:17s} {found['n']:.0f} {found['ratio']:7.1f}   {losses:14s}"
                f" {100 * (found['loss'] / mean['dense']['loss'] - 1):+6.2f} %"
                f"   {100 * (found['loss'] / uniform['loss'] - 1):+6.2f} %  {found['score']:8.3f}"
            )
    return "\n".join(lines)


def _mean(rows: Sequence[Row]) -> dict[str, float]:
    return {key: statistics.fmean(row[key] for row in rows) for key in ("loss", "score", "ratio")} | {"n": len(rows)}


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("--data", help="cifar10.npz, or the folder of WikiText-2")
    for name in ("record", "trace", "fit", "train"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--table", action="store_true")
    chosen = parser.parse_args()
    task = TASKS[chosen.task]
    torch.set_num_threads(1)
    data = task.workload.load(chosen.data, train_limit=20000, test_limit=2000) if chosen.data else None
    if chosen.record:
        record(task, data, chosen.record)
    if chosen.trace and chosen.fit:
        with Trace(chosen.trace) as trace:
            fit(task, trace, chosen.fit)
    if data is not None and chosen.train:
        train_all(task, chosen.task, data, chosen.fit, chosen.train, chosen.seeds)
    if chosen.table:
        print(table(read(chosen.train)))


if __name__ == "__main__":
    main()
