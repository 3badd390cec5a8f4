"""What rounding the mean once more costs: errors of the applied mean by gather and in shards, on recorded gradients.

    python benchmarks/aggregation.py --trace TRACE --rows ROWS.jsonl [--ranks 3 4 8]
    python benchmarks/aggregation.py --data cifar10.npz --rows ROWS.jsonl [--ranks 4] [--steps 600] [--seeds 0 1 2]
    python benchmarks/aggregation.py --table --rows ROWS.jsonl

With images it trains instead: ResNet-8 of `accuracy.py`, in both forms, and dense; the loss is the mean of the last 50
iterations.

A quantizer's uniform plan is replayed over the recorded steps of the first N ranks, in both forms of `aggregation`. The
error is ||applied mean - true mean|| / ||true mean||, the median over steps; bytes are those that a rank's interface
sends in a step.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import accuracy
import torch
from rows import Row, add, has, read

from gradlab.executor.lockstep_plan import LockstepPlan
from gradlab.layout import layers_of
from gradlab.plan import Plan
from gradlab.trace import Trace

CODECS: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("block_scaled", {}),
    "float8 e4m3": ("block_scaled", {"dtype": "float8_e4m3fn"}),
    "int4": ("block_scaled", {"dtype": "int4"}),
    "int4, stochastic": ("block_scaled", {"dtype": "int4", "stochastic": True}),
    "QSGD 8 bits": ("qsgd", {"bits": 8}),
    "QSGD 4 bits": ("qsgd", {"bits": 4}),
    "QSGD 3 bits": ("qsgd", {"bits": 3}),
    "natural": ("natural", {}),
}
FORMS = ("gather", "shards")


def measured(trace: Trace, title: str, ranks: int, form: str) -> Row:
    """Replay one plan over all recorded steps, without residuals."""
    codec, settings = CODECS[title]
    plan = Plan.uniform(trace.layers, codec, aggregation=form, error_feedback=False, **settings)
    run, errors, sent = LockstepPlan(plan, ranks), [], 0
    for position, step in enumerate(trace.iterate()):
        gradients = [{name: torch.from_numpy(rows) for name, rows in own.items()} for own in step.gradients[:ranks]]
        done = run.step(position, gradients)
        errors.append(_error(done.exchanged, gradients))
        sent = max(done.wire)
    return {"codec": title, "ranks": ranks, "form": form, "error": statistics.median(errors), "wire_bytes": sent}


def _error(exchanged: Any, gradients: list[dict[str, torch.Tensor]]) -> float:
    wrong = norm = 0.0
    for group in exchanged.values():
        for layer, mean in group[0].mean.items():
            true = torch.stack([own[layer] for own in gradients]).double().mean(0)
            wrong += float((mean.double() - true).square().sum())
            norm += float(true.square().sum())
    return float((wrong / norm) ** 0.5)


TRAINED = ("int8", "QSGD 4 bits", "natural")


def trained(data: Any, title: str | None, ranks: int, form: str, seed: int, steps: int) -> Row:
    """Train under one plan, or dense without a title."""
    recipe = replace(accuracy.WORKLOAD.recipe, steps=steps, batch_size=16, learning_rate=0.1, schedule="cosine")
    layers = layers_of(accuracy.resnet8(recipe, ranks).model(seed))
    if title is None:
        plan = Plan(tuple(layers))
    else:
        codec, settings = CODECS[title]
        plan = Plan.uniform(layers, codec, aggregation=form, **settings)
    done = accuracy.train(plan, data, recipe, ranks, seed)
    return {"loss": done["loss"], "accuracy": done["accuracy"]}


def training_table(rows: list[Row]) -> None:
    """Print losses and accuracies, seed by seed."""
    seeds = sorted({row["seed"] for row in rows})
    kept = {(row["trained"], row["form"], row["seed"]): row for row in rows}
    print("| | loss: " + " | ".join(f"seed {seed}" for seed in seeds) + " | accuracy, mean |")
    print("|---" * (2 + len(seeds)) + "|")
    for title, form in dict.fromkeys((row["trained"], row["form"]) for row in rows):
        own = [kept[title, form, seed] for seed in seeds if (title, form, seed) in kept]
        name = f"{title}, {form}" if form else title
        cells = [f"{row['loss']:.3f}" for row in own]
        print(f"| {name} | " + " | ".join(cells) + f" | {statistics.fmean(row['accuracy'] for row in own):.1%} |")


def table(rows: list[Row]) -> None:
    """Print errors, and wire bytes over those of the gather."""
    if training := [row for row in rows if "trained" in row]:
        training_table(training)
        print()
    rows = [row for row in rows if "trained" not in row]
    if not rows:
        return
    kept = {(row["codec"], row["ranks"], row["form"]): row for row in rows}
    ranks = sorted({row["ranks"] for row in rows})
    heads = [f"N = {count}: gather | shards | bytes" for count in ranks]
    print("| | " + " | ".join(heads) + " |")
    print("|---" * (1 + 3 * len(ranks)) + "|")
    for codec in dict.fromkeys(row["codec"] for row in rows):
        cells = []
        for count in ranks:
            gather, shards = (kept[codec, count, form] for form in FORMS)
            cells += [f"{gather['error']:.4f}", f"{shards['error']:.4f}"]
            cells.append(f"{shards['wire_bytes'] / gather['wire_bytes']:.2f}")
        print(f"| {codec} | " + " | ".join(cells) + " |")


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[3, 4, 8])
    parser.add_argument("--data", type=Path, help="cifar10.npz")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.data:
        data = accuracy.WORKLOAD.load(options.data)
        for ranks, seed in itertools.product(options.ranks, options.seeds):
            for title, form in [(None, ""), *itertools.product(TRAINED, FORMS)]:
                key = {"trained": title or "dense", "form": form, "ranks": ranks, "seed": seed, "steps": options.steps}
                if not has(read(options.rows), key):
                    add(options.rows, key | trained(data, title, ranks, form, seed, options.steps))
    elif not options.table:
        with Trace(options.trace) as trace:
            for title in CODECS:
                for ranks in options.ranks:
                    for form in FORMS:
                        add(options.rows, measured(trace, title, ranks, form))
    table(read(options.rows))


if __name__ == "__main__":
    main()
