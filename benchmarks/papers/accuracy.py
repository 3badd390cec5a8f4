"""Accuracy of compressed training: methods beside each other over seeds, N ranks played in one process.

    python benchmarks accuracy --data cifar10.npz --out ROWS.jsonl [--methods dense gradiveq] [--seeds 0 1 2]
                                  [--batch 16] [--ranks 4] [--steps 1000] [--warmup 50]
    python benchmarks accuracy --out ROWS.jsonl --table

CIFAR-10 halved to 16 x 16 and ResNet-8 (75,290 parameters) under bfloat16 autocast. A method starts compressing after
--warmup dense iterations, at dense training's learning rate. A row is a run; one that is there is not done again. The
table has means, differences to dense paired by seed with 95 % t intervals, and K / d of compressed iterations.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import emulated
import torch
from rows import Row, fill, options, read
from scipy import stats

from gradlab.codec import Tensors
from gradlab.codec.wrapper import innermost
from gradlab.datasets import get
from gradlab.datasets.recipe import Recipe
from gradlab.layout import Layer, layers_of
from gradlab.plan import Plan, method_plan

WORKLOAD = get("cifar10")
RATE = 0.1  # of learning
Layers = Sequence[Layer]


@dataclass(frozen=True)
class Method:
    """A method. plan: plan of the model's layers; earlier: whether its bases come from another seed's run."""

    plan: Callable[[Layers], Plan]
    earlier: bool = False


# Stored rows of random axes, which a complement was of before, and what has the same bytes now.
OF_AXES = {f"half, {how}": f"half coordinates, {how}" for how in ("fitted once", "from an earlier run", "from decoded")}


def methods(warmup: int) -> dict[str, Method]:
    """Methods compared, all at about the same bytes but dense, 4-bit QSGD and the faithful GradiVeQ."""

    def named(name: str, **settings: Any) -> Method:
        return Method(lambda layers: method_plan(layers, name, warmup_steps=warmup, **settings))

    def gradiveq(earlier: bool = False, **settings: Any) -> Method:
        options = {"error_feedback": settings.get("complement", 0) > 0, "warmup_steps": warmup}
        return Method(
            lambda layers: Plan.uniform(layers, "gradiveq", roles=("convolution",), **options, **settings), earlier
        )

    pca: dict[str, Any] = {"ratio": 20, "pooled": 16, "whitening": False}
    once = {**pca, "complement": 0.5, "compressed_steps": 0}
    decoded = {**once, "refresh": "decoded", "compressed_steps": 200}
    return {
        "dense": Method(lambda layers: Plan(tuple(layers))),
        "QSGD 4 bits, max norm": named("QSGD, max norm", bits=4),
        "PowerSGD rank 2": named("PowerSGD", rank=2),
        "topk 2.5 %": Method(lambda layers: Plan.uniform(layers, "topk", warmup_steps=warmup, density=0.025)),
        "gradiveq, faithful": gradiveq(),
        "gradiveq, faithful, K/d = 8": gradiveq(ratio=8, slice_size=768),
        "half coordinates, fitted once": gradiveq(**once),
        "half coordinates, from an earlier run": gradiveq(**once, earlier=True),
        "half coordinates, from decoded": gradiveq(**decoded),
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


def train(plan: Plan, data: Any, recipe: Recipe, ranks: int, seed: int, **options: Any) -> Row:
    """Train ResNet-8 under a plan; options: see `emulated.train`."""
    row = emulated.train(resnet8(recipe, ranks), plan, data, seed, **options)
    del row["compressing_ratio"]
    return {"accuracy": row.pop("score"), **row}


def resnet8(recipe: Recipe, ranks: int) -> emulated.Task:
    return emulated.Task(WORKLOAD, recipe, ranks, (1, 1, 1))


def slice_ratio(method: Method, rows: Sequence[Row]) -> float | None:
    """K / d of a method's compressed iterations, over all slices; None: it is not GradiVeQ's.

    Without a complement it follows from the mean payload of runs, of which all but the codes is known: eq. (6) chooses
    d, and L_t samples of one slice have at most L_t - 1 axes, whatever K / d is asked for.
    """
    plan = method.plan(layers_of(resnet8(WORKLOAD.recipe, 1).model(0)))
    codecs = [(plan.members(g)[0], innermost(plan.build(g))) for g in plan.groups if g.codec == "gradiveq"]
    if not codecs:
        return None
    settings, ranks, steps, warmup = codecs[0][1].settings, *(rows[0][key] for key in ("ranks", "steps", "warmup"))
    if settings.ratio is not None and settings.complement:
        return float(settings.ratio)
    cycle = settings.sample_steps + settings.compressed_steps
    sampled = sum(n % cycle < settings.sample_steps for n in range(steps - warmup))
    fits = sum(n % cycle == settings.sample_steps - 1 for n in range(steps - warmup))
    sliced = sum(layer.numel // codec.slice_size(layer) * codec.slice_size(layer) for layer, codec in codecs)
    first = plan.payload_bytes(ranks, states={})
    # Digests of new bases travel once per fit and layer.
    known = warmup * plan.payload_bytes(ranks, compressing=False) + sampled * first + 40 * fits * len(codecs)
    free = first - sum(
        codec.forecast([layer], ranks, {}).payload - 4 * (layer.numel % codec.slice_size(layer))
        for layer, codec in codecs
    )
    total = steps * statistics.fmean(row["payload"] for row in rows) - known
    return sliced / ((total / (steps - warmup - sampled) - free) / 4)


def table(rows: Sequence[Row]) -> str:
    """Per batch size and method; ratios to 32 and to 16 bits, and bytes per iteration and rank, are of all phases."""
    lines = [
        "batch  method                          n  accuracy   loss   K/d  ratio  vs 16 bits  wire kB  "
        "difference to dense (95 %)"
    ]
    dense = {(row["batch"], row["seed"]): row["accuracy"] for row in rows if row["method"] == "dense"}
    for batch, method in sorted(dict.fromkeys((row["batch"], row["method"]) for row in rows), key=lambda key: key[0]):
        runs = [row for row in rows if (row["batch"], row["method"]) == (batch, method)]
        mean = {key: statistics.fmean(row[key] for row in runs) for key in ("accuracy", "loss", "ratio", "wire")}
        pairs = [100 * (r["accuracy"] - dense[batch, r["seed"]]) for r in runs if (batch, r["seed"]) in dense]
        known = methods(runs[0]["warmup"]).get(OF_AXES.get(method, method))
        slices = slice_ratio(known, runs) if known else None
        lines.append(
            f"{batch:5d}  {method:30s} {len(runs):2d}  {100 * mean['accuracy']:6.2f} %  {mean['loss']:.3f}  "
            f"{'-' if slices is None else f'{slices:.1f}':>4s}  {mean['ratio']:5.1f}  {mean['ratio'] / 2:10.1f}  "
            f"{mean['wire'] / 1e3:7.1f}  {paired(pairs)}"
        )
    return "\n".join(lines)


def paired(differences: Sequence[float]) -> str:
    """Mean of differences that are paired by seed, with its 95 % t interval; the difference itself for one seed."""
    if len(differences) < 2:
        return " ".join(f"{value:+.2f}" for value in differences)
    half = stats.t.ppf(0.975, len(differences) - 1) * statistics.stdev(differences) / len(differences) ** 0.5
    return f"{statistics.fmean(differences):+.2f} +- {half:.2f}"


def main() -> None:
    sizes = {"batch": 16, "ranks": 4, "steps": 1000, "warmup": 50}
    chosen = options(__doc__, data=str, out=Path, methods=list(methods(0)), seeds=[0], table=False, **sizes)
    if chosen.table:
        print(table(read(chosen.out)))
        return
    torch.set_num_threads(1)
    data, known = WORKLOAD.load(chosen.data), methods(chosen.warmup)
    changed = {"learning_rate": RATE, "batch_size": chosen.batch, "steps": chosen.steps, "schedule": "cosine"}
    recipe = replace(WORKLOAD.recipe, **changed)

    def run(key: Row) -> Row:
        method, seed = known[key["method"]], key["seed"]
        plan = method.plan(layers_of(resnet8(recipe, chosen.ranks).model(seed)))
        if method.earlier:
            plan = fitted_earlier(plan, data, recipe, chosen.ranks, seed)
        return train(plan, data, recipe, chosen.ranks, seed)

    fixed = {name: getattr(chosen, name) for name in sizes} | {"learning_rate": RATE}
    keys = ({"method": name, "seed": seed, **fixed} for seed in chosen.seeds for name in chosen.methods)
    fill(chosen.out, keys, run)
