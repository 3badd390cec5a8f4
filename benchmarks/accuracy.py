"""Accuracy of compressed training: methods beside each other over seeds, N ranks played in one process.

    python benchmarks/accuracy.py --data cifar10.npz --out results.jsonl [--methods dense gradiveq] [--seeds 0 1 2]
                                  [--batch 16] [--ranks 4] [--steps 1000] [--warmup 50] [--learning-rate 0.1]

CIFAR-10, its images halved to 16 x 16, and ResNet-8 (one block a stage, 16, 32 and 64 channels: 75,290 parameters),
trained under bfloat16 autocast, so that seeds by the dozen fit on a CPU. Every rank has its own batch and
batch statistics; the plans run in lockstep, which is what the engine computes, bit for bit. The learning rate is the
one that dense training is given. A method starts compressing after `--warmup` dense iterations. One line of JSON per
run is added to `--out`, and a run that is there already is not done again; `--table` prints what is there: means,
and differences to dense paired by seed with 95 % t intervals.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import emulated
import torch
from rows import add, has, read
from scipy import stats

from gradlab.codec import Tensors
from gradlab.codec.wrapper import innermost
from gradlab.datasets import get
from gradlab.datasets.recipe import Recipe
from gradlab.layout import Layer, layers_of
from gradlab.plan import Plan

WORKLOAD = get("cifar10")
Layers = Sequence[Layer]
CONVOLUTIONS = ("convolution",)


@dataclass(frozen=True)
class Method:
    """What is trained: plan: for the model's layers; earlier: whether its bases come from another seed's run."""

    plan: Callable[[Layers], Plan]
    earlier: bool = False


def methods(warmup: int) -> dict[str, Method]:
    """What is compared, all at about the same bytes but dense, 4-bit QSGD and the faithful GradiVeQ."""

    def uniform(codec: str, **settings: Any) -> Method:
        return Method(lambda layers: Plan.uniform(layers, codec, warmup_steps=warmup, **settings))

    def gradiveq(earlier: bool = False, **settings: Any) -> Method:
        options = {"error_feedback": settings.get("complement", 0) > 0, "warmup_steps": warmup, "roles": CONVOLUTIONS}
        return Method(lambda layers: Plan.uniform(layers, "gradiveq", **options, **settings), earlier)

    pca: dict[str, Any] = {"ratio": 20, "pooled": 16, "whitening": False}
    half = {**pca, "complement": 0.5}
    return {
        "dense": Method(lambda layers: Plan(tuple(layers))),
        "qsgd 4 bit": uniform("qsgd", bits=4),
        "powersgd rank 2": uniform("powersgd", rank=2),
        "topk 2.5 %": uniform("topk", density=0.025),
        "gradiveq, faithful": gradiveq(),
        "random only": gradiveq(ratio=20, complement=1.0),
        "half, fitted once": gradiveq(**half, compressed_steps=0),
        "half, from an earlier run": gradiveq(**half, compressed_steps=0, earlier=True),
        "half, from decoded": gradiveq(**half, refresh="decoded", compressed_steps=200),
        "half, earlier and decoded": gradiveq(**half, refresh="decoded", compressed_steps=200, earlier=True),
        "pca only, refreshed": gradiveq(**pca),
    }


def fitted_earlier(plan: Plan, data: Any, recipe: Recipe, ranks: int, seed: int) -> Plan:
    """The plan with bases fitted on another seed's dense run: its averages in the iterations that would be sampled."""
    first, count = plan.schedule.warmup_steps, innermost(plan.build(plan.groups[0])).settings.sample_steps
    seen: list[Tensors] = []
    train(Plan(plan.layers), data, recipe, ranks, seed + 1000, stop=first + count, watch=seen.append)
    learned = {}
    for group in plan.groups:
        samples = {name: torch.stack([means[name] for means in seen[first:]]) for name in group.layers}
        learned[group.name] = innermost(plan.build(group)).fit(plan.members(group), samples).learned
    return replace(plan, learned=learned)


def run(method: Method, data: Any, recipe: Recipe, ranks: int, seed: int) -> dict[str, Any]:
    """Train once: accuracy, loss, and bytes."""
    plan = method.plan(layers_of(resnet8(recipe, ranks).model(seed)))
    if method.earlier:
        plan = fitted_earlier(plan, data, recipe, ranks, seed)
    return train(plan, data, recipe, ranks, seed)


def train(plan: Plan, data: Any, recipe: Recipe, ranks: int, seed: int, **options: Any) -> dict[str, Any]:
    """Train ResNet-8 under a plan; options: see `emulated.train`."""
    row = emulated.train(resnet8(recipe, ranks), plan, data, seed, **options)
    del row["compressing_ratio"]
    return {"accuracy": row.pop("score"), **row}


def resnet8(recipe: Recipe, ranks: int) -> emulated.Task:
    """One block a stage."""
    return emulated.Task(WORKLOAD, recipe, ranks, (1, 1, 1))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Per batch size and method: accuracy, loss, ratio to 32 and to 16 bits and sent bytes per iteration and rank over
    all phases, and the difference to dense paired by seed.
    """
    lines = [
        "batch  method                       n  accuracy   loss  ratio  vs 16 bits  wire kB  difference to dense (95 %)"
    ]
    for batch in sorted({row["batch"] for row in rows}):
        here = [row for row in rows if row["batch"] == batch]
        dense = {row["seed"]: row["accuracy"] for row in here if row["method"] == "dense"}
        for method in dict.fromkeys(row["method"] for row in here):
            runs = [row for row in here if row["method"] == method]
            mean = {key: statistics.fmean(row[key] for row in runs) for key in ("accuracy", "loss", "ratio", "wire")}
            pairs = [100 * (row["accuracy"] - dense[row["seed"]]) for row in runs if row["seed"] in dense]
            figures = (
                f"{100 * mean['accuracy']:6.2f} %  {mean['loss']:.3f}  {mean['ratio']:5.1f}  {mean['ratio'] / 2:10.1f}"
                f"  {mean['wire'] / 1e3:7.1f}"
            )
            lines.append(f"{batch:5d}  {method:27s} {len(runs):2d}  {figures}  {paired(pairs)}")
    return "\n".join(lines)


def paired(differences: Sequence[float]) -> str:
    """Mean of differences that are paired by seed, with its 95 % t interval; the difference itself for one seed."""
    if len(differences) < 2:
        return " ".join(f"{value:+.2f}" for value in differences)
    half = stats.t.ppf(0.975, len(differences) - 1) * statistics.stdev(differences) / len(differences) ** 0.5
    return f"{statistics.fmean(differences):+.2f} +- {half:.2f}"


def main() -> None:
    """Do the runs that are missing, one after another; or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--table", action="store_true")
    for name, default in (("--batch", 16), ("--ranks", 4), ("--steps", 1000), ("--warmup", 50)):
        parser.add_argument(name, type=int, default=default)
    options = parser.parse_args()
    rows = read(options.out)
    if options.table:
        print(table(rows))
        return
    torch.set_num_threads(1)
    data = WORKLOAD.load(options.data)
    known = methods(options.warmup)
    recipe = replace(
        WORKLOAD.recipe,
        learning_rate=options.learning_rate,
        batch_size=options.batch,
        steps=options.steps,
        schedule="cosine",
    )
    fixed = {k: getattr(options, k) for k in ("batch", "ranks", "steps", "warmup", "learning_rate")}
    for seed in options.seeds:
        for method in options.methods or list(known):
            key = {"method": method, "seed": seed, **fixed}
            if not has(rows, key):
                add(options.out, key | run(known[method], data, recipe, options.ranks, seed))


if __name__ == "__main__":
    main()
