"""Fig. 2 of dist-EF-blockSGDM in a short form: its methods beside SGD(M), signSGD and signum.

    python benchmarks sign_methods --data cifar10.npz --out results.jsonl [--batch 8 32] [--seeds 0 1 2]
                                      [--methods SGD dist-EF-blockSGD] [--steps 800] [--schedule cosine]
    python benchmarks sign_methods --out results.jsonl --table --figure curves.svg

The training is that of accuracy.py (CIFAR-10 at 16 x 16, ResNet-8, bfloat16 autocast, ranks in lockstep), with a cosine
or a constant learning rate (the paper's is constant for its first 100 epochs), and without momentum in the optimizer:
plans bring it along. Curves are of 2000 test images, final accuracies of all. One grid of learning rates serves all
methods: all of it is tried for `--probe` iterations, the two with the smallest training loss are trained in full on the
first seed, and the one of these with the smaller training loss on all other seeds; test images decide nothing. One line
of JSON per run is added to `--out`; a run that is there is not done again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accuracy import WORKLOAD, paired, train
from matplotlib.figure import Figure
from rows import Row, add, finite, options, read

from gradlab.analysis.figures.style import drawing, method_colors, panels, render
from gradlab.datasets.resnet import initialized
from gradlab.layout import layers_of
from gradlab.plan import method_plan
from gradlab.plan.recipes import SIGN_METHODS

GRID = (3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003)
MOMENTUM, RANKS = 0.9, 4
POINTS = 16  # of a curve
# What a method is held against, seed by seed: its form with one scale for the whole model, and dense training.
PAIRS = (
    ("dist-EF-blockSGD", "dist-EF-SGD"),
    ("dist-EF-blockSGDM", "dist-EF-SGDM"),
    ("dist-EF-blockSGD", "SGD"),
    ("dist-EF-blockSGDM", "SGDM"),
)


class Campaign:
    """Runs, and the file that remembers them."""

    def __init__(self, out: Path, data: Any, schedule: Any) -> None:
        self.out, self.data, self.schedule, self.rows = out, data, schedule, read(out)

    def run(self, method: str, batch: int, steps: int, rate: float, seed: int, points: int = POINTS) -> Row:
        """One training run, or what is known of it. points: of its curve, 0 for none."""
        identity = {"method": method, "batch": batch, "steps": steps, "rate": rate, "seed": seed, "ranks": RANKS}
        identity["schedule"] = self.schedule
        if known := next((row for row in self.rows if identity.items() <= row.items()), None):
            return known
        recipe = replace(
            WORKLOAD.recipe,
            learning_rate=rate,
            batch_size=batch,
            steps=steps,
            schedule=self.schedule,
            momentum=0.0,
            nesterov=False,
            warmup_steps=0,
        )
        layers = layers_of(initialized(3, (16, 32, 64), (1, 1, 1), 10, seed))
        plan = method_plan(layers, method, momentum=MOMENTUM, seed=seed)
        row = identity | train(plan, self.data, recipe, RANKS, seed, score_every=steps // points if points else None)
        row["loss"] = finite(row["loss"])
        self.rows.append(row)
        add(self.out, row, unshown=("curve",))
        return row

    def compare(self, method: str, batch: int, steps: int, probe: int, seeds: Sequence[int]) -> None:
        """Find a method's rate on the first seed, then train it on all."""
        first, *others = seeds
        tried = sorted((self.run(method, batch, probe, rate, first, points=0) for rate in GRID), key=training_loss)
        full = [self.run(method, batch, steps, row["rate"], first) for row in tried[:2]]
        best = min(full, key=training_loss)["rate"]
        for seed in others:
            self.run(method, batch, steps, best, seed)


def training_loss(row: Row) -> float:
    return math.inf if row["loss"] is None else row["loss"]


def final_rows(rows: Sequence[Row]) -> dict[tuple[int, str], list[Row]]:
    """By batch size and method: the full runs at the rate that was chosen."""
    steps = max(row["steps"] for row in rows)
    final = {}
    for key in dict.fromkeys((row["batch"], row["method"]) for row in rows):
        full = [row for row in rows if (row["batch"], row["method"]) == key and row["steps"] == steps]
        if full:
            first = min(row["seed"] for row in full)
            best = min((row for row in full if row["seed"] == first), key=training_loss)["rate"]
            final[key] = [row for row in full if row["rate"] == best]
    return final


def table(rows: Sequence[Row]) -> str:
    """Per batch size and method: chosen rate, mean and deviation of accuracy, training loss, payload."""
    lines = ["batch  steps  method             rate    n  accuracy            loss  payload kB"]
    for (batch, method), runs in sorted(final_rows(rows).items(), key=lambda item: item[0][0]):
        scores = [100 * row["accuracy"] for row in runs]
        spread = f"+- {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
        losses = statistics.fmean(training_loss(row) for row in runs)
        lines.append(
            f"{batch:5d}  {runs[0]['steps']:5d}  {method:17s}  {runs[0]['rate']:<6g} {len(runs):2d}  "
            f"{statistics.fmean(scores):6.2f} % {spread:9s}  {losses:6.3f}  {runs[0]['payload'] / 1e3:7.1f}"
        )
    return "\n".join([*lines, *differences(final_rows(rows))])


def differences(final: Mapping[tuple[int, str], Sequence[Row]]) -> list[str]:
    """Lines with the accuracy of one method less another's, in points, paired by seed, with a 95 % t interval."""
    lines = []
    for batch in sorted({batch for batch, _ in final}):
        for one, other in PAIRS:
            here, there = (
                {row["seed"]: 100 * row["accuracy"] for row in final.get((batch, name), [])} for name in (one, other)
            )
            if points := [here[seed] - there[seed] for seed in sorted(here.keys() & there.keys())]:
                by_seed = ", ".join(f"{value:+.2f}" for value in points)
                lines.append(f"{batch:5d}  {one} less {other}: {paired(points)} points (by seed {by_seed})")
    return lines


def figure(rows: Sequence[Row]) -> Figure:
    """Accuracy by iteration, without and with momentum (rows) by batch size (columns): mean, and a deviation shaded."""
    final = final_rows(rows)
    batches = sorted({batch for batch, _ in final})
    drawn, axes = panels(2 * len(batches), len(batches), height=2.6, sharex=True, sharey=True)
    colors = [method_colors(k for k, m in SIGN_METHODS.items() if bool(m.momentum) is has) for has in (False, True)]
    for (batch, method), runs in final.items():
        row = int(SIGN_METHODS[method].momentum is not None)
        panel = axes[row * len(batches) + batches.index(batch)]
        steps = [step for step, _ in runs[0]["curve"]]
        curves = np.array([[100 * score for _, score in row["curve"]] for row in runs if row["loss"] is not None])
        mean, deviation = curves.mean(0), curves.std(0, ddof=1) if len(curves) > 1 else np.zeros(len(steps))
        color = colors[row][method]
        panel.plot(steps, mean, label=method, color=color)
        panel.fill_between(steps, mean - deviation, mean + deviation, color=color, alpha=0.2, linewidth=0)
    for place, panel in enumerate(axes):
        row, column = divmod(place, len(batches))
        panel.set_title(f"{batches[column]} images per rank, {'momentum 0.9' if row else 'no momentum'}")
        if column == len(batches) - 1:
            panel.legend(loc="lower right")
        if column == 0:
            panel.set_ylabel("test accuracy (%)")
        if row == 1:
            panel.set_xlabel("iteration")
    return drawn


def main() -> None:
    """Do the runs that are missing, one after another; or print and draw what there is."""
    named = {"methods": list(SIGN_METHODS), "batch": [8, 32], "seeds": [0, 1, 2], "schedule": "cosine"}
    sizes = {"steps": 800, "probe": 100}
    chosen = options(__doc__, data=str, out=Path, table=False, figure=Path, **named, **sizes)
    if chosen.table:
        print(table(read(chosen.out)))
    if chosen.figure:
        with drawing():
            chosen.figure.write_bytes(render(figure(read(chosen.out)), "sign methods")["svg"])
    if chosen.table or chosen.figure:
        return
    torch.set_num_threads(1)
    campaign = Campaign(chosen.out, WORKLOAD.load(chosen.data), chosen.schedule)
    for batch in chosen.batch:
        for method in chosen.methods:
            campaign.compare(method, batch, chosen.steps, chosen.probe, chosen.seeds)


if __name__ == "__main__":
    main()
