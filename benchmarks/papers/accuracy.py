"""Accuracy of compressed training: methods beside each other over seeds, N ranks played in one process.

    python benchmarks accuracy --data cifar10.npz --out results.jsonl [--methods dense gradiveq] [--seeds 0 1 2]
                                  [--batch 16] [--ranks 4] [--steps 1000] [--warmup 50] [--learning-rate 0.1]

CIFAR-10, its images halved to 16 x 16, and ResNet-8 (one block a stage, 16, 32 and 64 channels: 75,290 parameters),
trained under bfloat16 autocast, so that seeds by the dozen fit on a CPU. Every rank has its own batch and
batch statistics; the plans run in lockstep, which is what the engine computes, bit for bit. The learning rate is the
one that dense training is given. A method starts compressing after `--warmup` dense iterations. One line of JSON per
run is added to `--out`, and a run that is there already is not done again; `--table` prints what is there: means,
and differences to dense paired by seed with 95 % t intervals. K / d is that of compressed iterations, over all slices:
a method's setting, or without random axes what follows from the bytes of the run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import emulated
import torch
from rows import add, missing, options, read
from scipy import stats

from gradlab.codec import Tensors
from gradlab.codec.wrapper import innermost
from gradlab.datasets import get
from gradlab.datasets.recipe import Recipe
from gradlab.layout import Layer, layers_of
from gradlab.plan import Plan, method_plan

WORKLOAD = get("cifar10")
Layers = Sequence[Layer]
CONVOLUTIONS = ("convolution",)


@dataclass(frozen=True)
class Method:
    """A method. plan: plan of the model's layers; earlier: whether its bases come from another seed's run."""

    plan: Callable[[Layers], Plan]
    earlier: bool = False


# Stored rows of random axes, which a complement was of before, and what has the same bytes now.
_HALVES = ("fitted once", "from an earlier run", "from decoded", "earlier and decoded")
OF_AXES = {"random only": "coordinates only", **{f"half, {how}": f"half coordinates, {how}" for how in _HALVES}}


def methods(warmup: int) -> dict[str, Method]:
    """Methods compared, all at about the same bytes but dense, 4-bit QSGD and the faithful GradiVeQ."""

    def named(name: str, **settings: Any) -> Method:
        return Method(lambda layers: method_plan(layers, name, warmup_steps=warmup, **settings))

    def gradiveq(earlier: bool = False, **settings: Any) -> Method:
        options = {"error_feedback": settings.get("complement", 0) > 0, "warmup_steps": warmup, "roles": CONVOLUTIONS}
        return Method(lambda layers: Plan.uniform(layers, "gradiveq", **options, **settings), earlier)

    pca: dict[str, Any] = {"ratio": 20, "pooled": 16, "whitening": False}
    half = {**pca, "complement": 0.5}
    return {
        "dense": Method(lambda layers: Plan(tuple(layers))),
        "QSGD 4 bits, max norm": named("QSGD, max norm", bits=4),
        "PowerSGD rank 2": named("PowerSGD", rank=2),
        "topk 2.5 %": Method(lambda layers: Plan.uniform(layers, "topk", warmup_steps=warmup, density=0.025)),
        "gradiveq, faithful": gradiveq(),
        "gradiveq, faithful, K/d = 8": gradiveq(ratio=8, slice_size=768),
        "coordinates only": gradiveq(ratio=20, complement=1.0),
        "half coordinates, fitted once": gradiveq(**half, compressed_steps=0),
        "half coordinates, from an earlier run": gradiveq(**half, compressed_steps=0, earlier=True),
        "half coordinates, from decoded": gradiveq(**half, refresh="decoded", compressed_steps=200),
        "half coordinates, earlier and decoded": gradiveq(
            **half, refresh="decoded", compressed_steps=200, earlier=True
        ),
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


def slice_ratio(method: Method, rows: Sequence[dict[str, Any]]) -> float | None:
    """K / d of a method's compressed iterations, over all slices; None: it is not GradiVeQ's.

    Without random axes it follows from the mean payload of runs, of which all but the codes is known: eq. (6) chooses
    d, and L_t samples of one slice have at most L_t - 1 axes, whatever K / d is asked for.
    """
    plan = method.plan(layers_of(resnet8(WORKLOAD.recipe, rows[0]["ranks"]).model(0)))
    codecs = [(group, innermost(plan.build(group))) for group in plan.groups if group.codec == "gradiveq"]
    if not codecs:
        return None
    settings, ranks, steps, warmup = codecs[0][1].settings, *(rows[0][key] for key in ("ranks", "steps", "warmup"))
    if settings.ratio is not None and settings.complement:
        return float(settings.ratio)
    cycle = settings.sample_steps + settings.compressed_steps
    sampled = sum(n % cycle < settings.sample_steps for n in range(steps - warmup))
    fits = sum(n % cycle == settings.sample_steps - 1 for n in range(steps - warmup))
    sliced = sum(layer.numel // codec.slice_size(layer) * codec.slice_size(layer) for layer, codec in _single(plan))
    dense = plan.payload_bytes(ranks, compressing=False)
    # Digests of new bases travel once per fit and layer.
    samples = sampled * plan.payload_bytes(ranks, states={}) + 40 * fits * len(codecs)
    free = plan.payload_bytes(ranks, states={}) - sum(
        codec.forecast([layer], ranks, {}).payload - 4 * (layer.numel % codec.slice_size(layer))
        for layer, codec in _single(plan)
    )
    total = steps * statistics.fmean(row["payload"] for row in rows) - warmup * dense - samples
    return sliced / ((total / (steps - warmup - sampled) - free) / 4)


def _single(plan: Plan) -> list[tuple[Layer, Any]]:
    """GradiVeQ's groups of one layer each: the layer and its codec."""
    groups = [group for group in plan.groups if group.codec == "gradiveq"]
    return [(plan.members(group)[0], innermost(plan.build(group))) for group in groups]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Per batch size and method: accuracy, loss, K / d, ratio to 32 and to 16 bits and sent bytes per iteration and
    rank over all phases, and the difference to dense training paired by seed.
    """
    lines = [
        "batch  method                          n  accuracy   loss   K/d  ratio  vs 16 bits  wire kB  "
        "difference to dense (95 %)"
    ]
    for batch in sorted({row["batch"] for row in rows}):
        here = [row for row in rows if row["batch"] == batch]
        dense = {row["seed"]: row["accuracy"] for row in here if row["method"] == "dense"}
        for method in dict.fromkeys(row["method"] for row in here):
            runs = [row for row in here if row["method"] == method]
            mean = {key: statistics.fmean(row[key] for row in runs) for key in ("accuracy", "loss", "ratio", "wire")}
            pairs = [100 * (row["accuracy"] - dense[row["seed"]]) for row in runs if row["seed"] in dense]
            known = methods(runs[0]["warmup"])
            now = OF_AXES.get(method, method)
            slices = slice_ratio(known[now], runs) if now in known else None
            figures = (
                f"{100 * mean['accuracy']:6.2f} %  {mean['loss']:.3f}  {'-' if slices is None else f'{slices:.1f}':>4s}"
                f"  {mean['ratio']:5.1f}  {mean['ratio'] / 2:10.1f}"
                f"  {mean['wire'] / 1e3:7.1f}"
            )
            lines.append(f"{batch:5d}  {method:30s} {len(runs):2d}  {figures}  {paired(pairs)}")
    return "\n".join(lines)


def paired(differences: Sequence[float]) -> str:
    """Mean of differences that are paired by seed, with its 95 % t interval; the difference itself for one seed."""
    if len(differences) < 2:
        return " ".join(f"{value:+.2f}" for value in differences)
    half = stats.t.ppf(0.975, len(differences) - 1) * statistics.stdev(differences) / len(differences) ** 0.5
    return f"{statistics.fmean(differences):+.2f} +- {half:.2f}"


def main() -> None:
    """Do the runs that are missing, one after another; or print the table."""
    sizes = {"batch": 16, "ranks": 4, "steps": 1000, "warmup": 50, "learning_rate": 0.1}
    chosen = options(__doc__, data=str, out=Path, methods=list(methods(0)), seeds=[0], table=False, **sizes)
    if chosen.table:
        print(table(read(chosen.out)))
        return
    torch.set_num_threads(1)
    data, known = WORKLOAD.load(chosen.data), methods(chosen.warmup)
    recipe = replace(
        WORKLOAD.recipe,
        learning_rate=chosen.learning_rate,
        batch_size=chosen.batch,
        steps=chosen.steps,
        schedule="cosine",
    )
    fixed = {name: getattr(chosen, name) for name in sizes}
    keys = ({"method": name, "seed": seed, **fixed} for seed in chosen.seeds for name in chosen.methods)
    for key in missing(chosen.out, keys):
        add(chosen.out, key | run(known[key["method"]], data, recipe, chosen.ranks, key["seed"]))


if __name__ == "__main__":
    main()
