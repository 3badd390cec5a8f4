"""Uniform plans against L-GreCo's at equal error: Tables 2 and 3 of its paper, in small.

    python benchmarks layer_plans images --data cifar10.npz --record TRACE       # a dense run, 4 nodes
    python benchmarks layer_plans images --trace TRACE --fit PLANS               # each codec: uniform, and by layer
    python benchmarks layer_plans images --data cifar10.npz --fit PLANS --train ROWS.jsonl [--seeds 0 1]
    python benchmarks layer_plans images --train ROWS.jsonl --table

images: CIFAR-10 at 16 x 16, a ResNet-18 of a quarter of the width (700,000 parameters), 16 images a rank, SGD with
momentum. words: WikiText-2, the transformer of `gradlab.datasets`, 8 rows of 64 words a rank, AdamW. 4 ranks, 300
iterations of which 50 are dense. A row is a run; one that is there is not done again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accuracy import paired
from emulated import Task, record, train
from rows import Row, fill, grouped, mean, options, read

from gradlab.analysis.layer_plan.lgreco import fit_lgreco
from gradlab.artifact import Artifact
from gradlab.datasets import get
from gradlab.layout import layers_of
from gradlab.plan import Plan
from gradlab.trace import Trace

RANKS, STEPS, WARMUP = 4, 300, 50
METRIC = "squared-l2"
IMAGES, WORDS = get("cifar10"), get("text_words")
OF_IMAGES = {"batch_size": 16, "steps": STEPS, "schedule": "cosine", "learning_rate": 0.05}
TASKS = {
    "images": Task(IMAGES, replace(IMAGES.recipe, **OF_IMAGES), RANKS, (2, 2, 2, 2)),
    "words": Task(WORDS, replace(WORDS.recipe, batch_size=8, steps=STEPS), RANKS),
}
UNIFORM: dict[str, dict[str, dict[str, Any]]] = {
    "images": {"qsgd": {"bits": 4}, "topk": {"density": 0.01}, "powersgd": {"rank": 4}},
    "words": {"qsgd": {"bits": 4}, "topk": {"density": 0.1}, "powersgd": {"rank": 32}},
}


def fit(name: str, trace: Trace, folder: Path) -> None:
    """Artifacts of each codec: uniform, and the smallest plan of the same total error."""
    folder.mkdir(exist_ok=True)
    for codec, settings in UNIFORM[name].items():
        uniform = Plan.uniform(trace.layers, codec, warmup_steps=WARMUP, **settings)
        Artifact(uniform).save(folder / f"{codec}-uniform.safetensors", overwrite=True)
        fitted = fit_lgreco(trace, codec, settings, warmup_steps=WARMUP, metric=METRIC)
        fitted.artifact().save(folder / f"{codec}-{METRIC}.safetensors", overwrite=True)
        print(f"{codec:9s} gain {fitted.provenance.gain:.2f}, {fitted.provenance.relative_error}")


def table(rows: Sequence[Row]) -> str:
    lines = [
        "task    method            n   ratio  vs 16 bits   gain   loss           to dense  to uniform   score  "
        "to uniform 95 %"
    ]
    runs = grouped(rows, lambda row: (row["task"], row["method"]))
    for (task, method), here in runs.items():
        uniform = runs.get((task, f"{method.partition('-')[0]}-uniform"), here)
        ratio, loss = mean(here, "compressing_ratio"), mean(here, "loss")
        losses = ", ".join(f"{row['loss']:.3f}" for row in here)
        lines.append(
            f"{task:7s} {method:17s} {len(here)} {ratio:7.1f}  {ratio / 2:10.1f}"
            f"  {ratio / mean(uniform, 'compressing_ratio'):5.2f}   {losses:14s}"
            f" {100 * (loss / mean(runs[task, 'dense'], 'loss') - 1):+6.2f} %"
            f"   {100 * (loss / mean(uniform, 'loss') - 1):+6.2f} %  {mean(here, 'score'):8.3f}  "
            f"{paired(_score_differences(here, uniform) if METRIC in method else [])}"
        )
    return "\n".join(lines)


def _score_differences(here: Sequence[Row], uniform: Sequence[Row]) -> list[float]:
    """By seed: accuracy in points, or perplexity."""
    unit, known = 100 if here[0]["task"] == "images" else 1, {row["seed"]: row["score"] for row in uniform}
    return [unit * (row["score"] - known[row["seed"]]) for row in here if row["seed"] in known]


def main() -> None:
    named = {"data": str, "record": Path, "trace": Path, "fit": Path, "train": Path, "seeds": [0, 1]}
    chosen = options(__doc__, ("task", TASKS), **named, table=False)
    task = TASKS[chosen.task]
    torch.set_num_threads(1)
    data = task.workload.load(chosen.data, train_limit=20000, test_limit=2000) if chosen.data else None
    if chosen.record:
        record(task, data, chosen.record, 7, start=50, every=4, count=60)
    if chosen.trace and chosen.fit:
        with Trace(chosen.trace) as trace:
            fit(chosen.task, trace, chosen.fit)
    if data is not None and chosen.train:
        names = [f"{codec}-{which}" for codec in UNIFORM[chosen.task] for which in ("uniform", METRIC)]
        plans = {name: Artifact.load(chosen.fit / f"{name}.safetensors").plan for name in names}
        plans = {"dense": Plan(layers_of(task.model(0))), **plans}
        keys = ({"task": chosen.task, "method": name, "seed": seed} for seed in chosen.seeds for name in plans)
        fill(chosen.train, keys, lambda key: train(task, plans[key["method"]], data, key["seed"]))
    if chosen.table:
        print(table(read(chosen.train)))
