"""Residuals under an optimizer with state of its own and a falling learning rate: kept as they are, or following it.

    python benchmarks/residual_rates.py --text book.txt --out runs.jsonl
    python benchmarks/residual_rates.py --out runs.jsonl --table

Under SGD without momentum residuals are multiplied by eta_(t-1) / eta_t (Zheng et al., NeurIPS 2019, Lemma 1). For
AdamW, and for SGD with momentum of its own, no such law is known, so it is measured: 4 emulated ranks (2 on text), a
cosine schedule to zero after a warm-up, each codec with error feedback (signs also with feedback at the server), once
with step_size_ratio and once without, from the same seeds. A run's loss is the mean of its last 50 iterations.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from emulated import Task, train
from rows import Row, add, has, read
from torch import nn

from gradlab.datasets import get
from gradlab.datasets.text import TextBytes
from gradlab.datasets.transformer import TransformerSize
from gradlab.plan import Plan, Wrap, method_plan
from gradlab.plan.recipes import METHODS

CODECS: dict[str, tuple[str, dict[str, Any], bool]] = {  # codec or method, settings, whether the server compresses too
    "signs both ways": ("sign", {}, True),
    "PowerSGD rank 1": ("PowerSGD", {"rank": 1}, False),
    "top-k 1 %": ("topk", {"density": 0.01}, False),
}


@dataclass(frozen=True)
class Perceptron(Task):
    """The bundled digits, with one hidden layer: a run takes seconds, so that seeds by the dozen fit on a CPU."""

    def model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def tasks(text: str | None) -> dict[str, tuple[Task, Any]]:
    """Tasks by name, each with its data."""
    digits = get("digits")
    recipe = replace(digits.recipe, batch_size=8, steps=300, warmup_steps=20)
    adamw = replace(recipe, optimizer="adamw", learning_rate=3e-3, weight_decay=0.01)
    data = digits.load()
    chosen: dict[str, tuple[Task, Any]] = {
        "digits, AdamW 0.003": (Perceptron(digits, adamw), data),
        "digits, AdamW 0.01": (Perceptron(digits, replace(adamw, learning_rate=1e-2)), data),
        "digits, AdamW 0.03": (Perceptron(digits, replace(adamw, learning_rate=3e-2)), data),
        "digits, SGD with momentum 0.9": (Perceptron(digits, recipe), data),
    }
    if text is not None:
        small = TextBytes(context=32)
        small.size = TransformerSize(vocabulary=256, context=32, width=48, layers=2, heads=4)
        recipe = replace(small.recipe, learning_rate=3e-3, batch_size=8, steps=300, warmup_steps=30)
        chosen["text, AdamW 0.003"] = (Task(small, recipe, ranks=2), small.load(text, test_limit=64))
    return chosen


def plan_of(model: torch.nn.Module, name: str, follows: bool) -> Plan:
    """The plan of a row of `CODECS` with error feedback, whose residuals follow the learning rate or do not."""
    ratio = {"step_size_ratio": follows}
    codec, settings, server = CODECS[name]
    if codec in METHODS:
        return method_plan(model, codec, wrapper_settings={"error_feedback": ratio}, **settings)
    around = [Wrap("error_feedback", ratio), *([Wrap("two_way", ratio)] if server else [])]
    return Plan.uniform(model, codec, wrappers=around, **settings)


def run(text: str | None, out: Path, seeds: Sequence[int], only: str = "") -> None:
    """Train all that `out` does not hold yet, of tasks whose names begin as `only` does."""
    rows = read(out)
    for seed in seeds:
        for task_name, (task, data) in tasks(text).items():
            if not task_name.startswith(only):
                continue
            for method in ("dense", *CODECS):
                for follows in (False,) if method == "dense" else (False, True):
                    key = {"task": task_name, "method": method, "follows": follows, "seed": seed}
                    if has(rows, key):
                        continue
                    model = task.model(seed)
                    plan = Plan.uniform(model, "identity") if method == "dense" else plan_of(model, method, follows)
                    done = train(task, plan, data, seed)
                    add(out, key | {name: done[name] for name in ("loss", "score", "residuals", "seconds")})


def table(rows: Sequence[Row]) -> str:
    """Mean losses over seeds, and the difference seed by seed: following less kept, with its standard error."""
    lines = ["task                           method           n  dense   kept    following  difference"]
    for task in dict.fromkeys(row["task"] for row in rows):
        loss = {(r["method"], r["follows"], r["seed"]): r["loss"] for r in rows if r["task"] == task}
        for method in dict.fromkeys(row["method"] for row in rows if row["method"] != "dense"):
            seeds = [seed for name, follows, seed in loss if (name, follows) == (method, True)]
            if not seeds:
                continue
            differences = [loss[method, True, seed] - loss[method, False, seed] for seed in seeds]
            error = statistics.stdev(differences) / math.sqrt(len(seeds)) if len(seeds) > 1 else math.nan
            dense, kept, following = (
                statistics.fmean(loss[name, follows, seed] for seed in seeds)
                for name, follows in (("dense", False), (method, False), (method, True))
            )
            lines.append(
                f"{task:30s} {method:16s} {len(seeds)}  {dense:.3f}   {kept:.3f}   {following:.3f}      "
                f"{statistics.fmean(differences):+.3f} +- {error:.3f}"
            )
    return "\n".join(lines)


def main() -> None:
    """Run, or print the table of what was run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", help="a text file, for the transformer")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--only", default="", help="tasks whose names begin so")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.table:
        run(arguments.text, arguments.out, range(arguments.seeds), arguments.only)
    print(table(read(arguments.out)))


if __name__ == "__main__":
    main()
