"""Uniform plans against L-GreCo's at equal error: Tables 2 and 3 of its paper, in small.

    python benchmarks layer_plans images --data cifar10.npz --record TRACE       # a dense run, 4 nodes
    python benchmarks layer_plans images --trace TRACE --fit PLANS               # tables, plans, all planners
    python benchmarks layer_plans images --trace TRACE --fit PLANS --online      # plans that are chosen anew, too
    python benchmarks layer_plans images --data cifar10.npz --fit PLANS --train ROWS.jsonl [--seeds 0 1]
    python benchmarks layer_plans images --train ROWS.jsonl --table

images: CIFAR-10 at 16 x 16, a ResNet-18 of a quarter of the width (700,000 parameters), 4 ranks with 16 images each,
SGD with momentum. words: WikiText-2 by words (8192 of them), the transformer of `gradlab.datasets`, 4 ranks with 8 rows
of 64, AdamW. 300 iterations, of which the first 50 are dense. QSGD 4 bit, top-k 1 % (words: 10 %), PowerSGD rank 4
(words: 32): uniform, and the smallest plan of the same total error by either metric. One line of JSON per run; what is
there is not done again.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accuracy import paired
from emulated import Task, record, train
from rows import Row, add, missing, options, read

from gradlab.analysis.layer_plan.lgreco import fit_lgreco
from gradlab.analysis.layer_plan.provenance import WindowErrors
from gradlab.artifact import Artifact
from gradlab.datasets import get
from gradlab.layout import layers_of
from gradlab.plan import Plan
from gradlab.plan.refresh import METRICS
from gradlab.trace import Trace

RANKS, STEPS, WARMUP = 4, 300, 50
CHOSEN_EVERY = 50  # iterations, of plans that are chosen anew; Accordion's settings are half and twice the uniform one
FIRST, EVERY, RECORDED = 50, 4, 60  # of the recording: iterations 50, 54, ..., 286
IMAGES, WORDS = get("cifar10"), get("text_words")
IMAGE_RECIPE = replace(IMAGES.recipe, batch_size=16, steps=STEPS, schedule="cosine", learning_rate=0.05)
TASKS = {
    "images": Task(IMAGES, IMAGE_RECIPE, RANKS, (2, 2, 2, 2)),
    "words": Task(WORDS, replace(WORDS.recipe, batch_size=8, steps=STEPS), RANKS),
    "resnet8": Task(IMAGES, replace(IMAGE_RECIPE, learning_rate=0.1), RANKS, (1, 1, 1)),
}
ON_IMAGES: dict[str, dict[str, Any]] = {"qsgd": {"bits": 4}, "topk": {"density": 0.01}, "powersgd": {"rank": 4}}
ON_TEXT: dict[str, dict[str, Any]] = {"qsgd": {"bits": 4}, "topk": {"density": 0.1}, "powersgd": {"rank": 32}}
REFERENCES = {name: ON_IMAGES if task.workload is IMAGES else ON_TEXT for name, task in TASKS.items()}


def fit(name: str, trace: Trace, folder: Path) -> None:
    """Artifacts of each codec: uniform, and by layer by either metric."""
    folder.mkdir(exist_ok=True)
    for codec, reference in REFERENCES[name].items():
        uniform = Plan.uniform(trace.layers, codec, warmup_steps=WARMUP, **reference)
        Artifact(uniform).save(folder / f"{codec}-uniform.safetensors", overwrite=True)
        for metric in METRICS:
            fitted = fit_lgreco(trace, codec, reference, warmup_steps=WARMUP, metric=metric)
            fitted.artifact().save(folder / f"{codec}-{metric}.safetensors", overwrite=True)
            provenance = fitted.provenance
            dense = provenance.dense_payload_bytes
            print(
                f"{codec:9s} {metric:10s} uniform {dense / provenance.uniform_payload_bytes:6.1f}x  L-GreCo "
                f"{dense / provenance.payload_bytes:6.1f}x  gain {provenance.gain:.2f}  "
                f"error where chosen, later: uniform {_errors(provenance.relative_error.uniform)}, "
                f"L-GreCo {_errors(provenance.relative_error.plan)}"
            )


def fit_online(name: str, trace: Trace, folder: Path) -> None:
    """Artifacts of each codec whose plans are chosen anew while training: as they are, and after Accordion."""
    folder.mkdir(exist_ok=True)
    for codec, reference in REFERENCES[name].items():
        [value] = reference.values()
        for which, accordion in (("refresh", None), ("accordion", (value / 2, value * 2))):
            fitted = fit_lgreco(
                trace, codec, reference, warmup_steps=WARMUP, refresh_every=CHOSEN_EVERY, accordion=accordion
            )
            fitted.artifact().save(folder / f"{codec}-{which}.safetensors", overwrite=True)


def _errors(errors: WindowErrors) -> str:
    return f"{errors.chosen_on:.3f}, {errors.held_out:.3f}"


def train_all(name: str, data: Any, plans: Path, out: Path, seeds: Sequence[int]) -> None:
    """Dense, and every plan in the folder, seed by seed; what is in `out` is not done again."""
    task = TASKS[name]
    chosen = {"dense": Plan(layers_of(task.model(0)))}
    for codec in REFERENCES[name]:
        for which in ("uniform", *METRICS, "refresh", "accordion"):
            if (path := plans / f"{codec}-{which}.safetensors").exists():
                chosen[path.stem] = Artifact.load(path).plan
    for key in missing(out, ({"task": name, "method": method, "seed": seed} for seed in seeds for method in chosen)):
        add(out, key | train(task, chosen[key["method"]], data, key["seed"]))


def table(rows: Sequence[Row]) -> str:
    """Ratio while compressing; loss and its distance to dense and to uniform; score and its difference to uniform."""
    lines = [
        "task    method            n   ratio  vs 16 bits   gain   loss           to dense  to uniform   score  "
        "to uniform 95 %"
    ]
    for task in dict.fromkeys(row["task"] for row in rows):
        here = [row for row in rows if row["task"] == task]
        mean = {m: _mean([row for row in here if row["method"] == m]) for m in dict.fromkeys(r["method"] for r in here)}
        for method, averages in mean.items():
            uniform = mean.get(f"{method.partition('-')[0]}-uniform", averages)
            losses = ", ".join(f"{row['loss']:.3f}" for row in here if row["method"] == method)
            lines.append(
                f"{task:7s} {method:17s} {averages['n']:.0f} {averages['compressing_ratio']:7.1f}"
                f"  {averages['compressing_ratio'] / 2:10.1f}"
                f"  {averages['compressing_ratio'] / uniform['compressing_ratio']:5.2f}   {losses:14s}"
                f" {100 * (averages['loss'] / mean['dense']['loss'] - 1):+6.2f} %"
                f"   {100 * (averages['loss'] / uniform['loss'] - 1):+6.2f} %  {averages['score']:8.3f}  "
                f"{paired(_score_differences(here, method))}"
            )
    return "\n".join(lines)


def _score_differences(rows: Sequence[Row], method: str) -> list[float]:
    """The score less the uniform plan's of the same seed: accuracy in points, or perplexity."""
    unit = 100 if rows[0]["task"] == "images" else 1
    other = method.replace("lgreco", "uniform")
    here, uniform = ({row["seed"]: unit * row["score"] for row in rows if row["method"] == m} for m in (method, other))
    return [here[seed] - uniform[seed] for seed in here if seed in uniform and other != method]


def _mean(rows: Sequence[Row]) -> dict[str, float]:
    return {key: statistics.fmean(row[key] for row in rows) for key in ("loss", "score", "compressing_ratio")} | {
        "n": len(rows)
    }


def main() -> None:
    """See the module's text."""
    named = {"data": str, "record": Path, "trace": Path, "fit": Path, "train": Path, "seeds": [0, 1]}
    chosen = options(__doc__, ("task", TASKS), **named, table=False, online=False)
    task = TASKS[chosen.task]
    torch.set_num_threads(1)
    data = task.workload.load(chosen.data, train_limit=20000, test_limit=2000) if chosen.data else None
    if chosen.record:
        record(task, data, chosen.record, 7, start=FIRST, every=EVERY, count=RECORDED)
    if chosen.trace and chosen.fit:
        with Trace(chosen.trace) as trace:
            (fit_online if chosen.online else fit)(chosen.task, trace, chosen.fit)
    if data is not None and chosen.train:
        train_all(chosen.task, data, chosen.fit, chosen.train, chosen.seeds)
    if chosen.table:
        print(table(read(chosen.train)))


if __name__ == "__main__":
    main()
