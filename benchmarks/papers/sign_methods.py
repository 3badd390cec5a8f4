"""Fig. 2 of dist-EF-blockSGDM in a short form: its methods beside SGD(M), signSGD and signum.

    python benchmarks sign_methods --data cifar10.npz --out ROWS.jsonl [--batch 8 32] [--seeds 0 1 2]
                                      [--methods SGD dist-EF-blockSGD] [--steps 800] [--probe 100] [--schedule cosine]
    python benchmarks sign_methods --out ROWS.jsonl --table [--figure curves.svg]

The training is accuracy.py's, with a cosine or a constant learning rate and without momentum in the optimizer: plans
bring it along. All rates of one grid are tried for --probe iterations. The two with the smallest training loss are
trained in full on the first seed, the better of these on all others. Curves are of 2000 test images. A row is a run;
one that is there is not done again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from accuracy import WORKLOAD, paired, train
from matplotlib.figure import Figure
from rows import Row, add, finite, grouped, options, read

from gradlab.analysis.figures.palette import method_colors
from gradlab.analysis.figures.style import drawing, panels, render
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


def training_loss(row: Row) -> float:
    return math.inf if row["loss"] is None else row["loss"]


def final_rows(rows: Sequence[Row]) -> dict[tuple[int, str], list[Row]]:
    """By batch size and method: the full runs at the rate that was chosen."""
    steps, final = max(row["steps"] for row in rows), {}
    full = [row for row in rows if row["steps"] == steps]
    for key, runs in grouped(full, lambda row: (row["batch"], row["method"])).items():
        first = min(row["seed"] for row in runs)
        best = min((row for row in runs if row["seed"] == first), key=training_loss)["rate"]
        final[key] = [row for row in runs if row["rate"] == best]
    return final


def table(rows: Sequence[Row]) -> str:
    lines = ["batch  steps  method             rate    n  accuracy            loss  payload kB"]
    final = final_rows(rows)
    for (batch, method), runs in sorted(final.items(), key=lambda item: item[0][0]):
        scores = [100 * row["accuracy"] for row in runs]
        spread = f"+- {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
        losses = statistics.fmean(training_loss(row) for row in runs)
        lines.append(
            f"{batch:5d}  {runs[0]['steps']:5d}  {method:17s}  {runs[0]['rate']:<6g} {len(runs):2d}  "
            f"{statistics.fmean(scores):6.2f} % {spread:9s}  {losses:6.3f}  {runs[0]['payload'] / 1e3:7.1f}"
        )
    return "\n".join([*lines, *differences(final)])


def differences(final: Mapping[tuple[int, str], Sequence[Row]]) -> list[str]:
    """Lines with the accuracy of one method less another's, in points, paired by seed, with a 95 % t interval."""
    lines = []
    for batch in sorted({batch for batch, _ in final}):
        for pair in PAIRS:
            here, there = ({row["seed"]: 100 * row["accuracy"] for row in final.get((batch, one), [])} for one in pair)
            if points := [here[seed] - there[seed] for seed in sorted(here.keys() & there.keys())]:
                by_seed = ", ".join(f"{value:+.2f}" for value in points)
                lines.append(f"{batch:5d}  {' less '.join(pair)}: {paired(points)} points (by seed {by_seed})")
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
        panel.plot(steps, mean, label=method, color=colors[row][method])
        panel.fill_between(steps, mean - deviation, mean + deviation, color=colors[row][method], alpha=0.2, linewidth=0)
    for place, panel in enumerate(axes):
        row, column = divmod(place, len(batches))
        panel.set_title(f"{batches[column]} images per rank, {'momentum 0.9' if row else 'no momentum'}")
        panel.set_xlabel("iteration" if row else "")
        panel.set_ylabel("" if column else "test accuracy (%)")
        if column == len(batches) - 1:
            panel.legend(loc="lower right")
    return drawn


def main() -> None:
    named = {"methods": list(SIGN_METHODS), "batch": [8, 32], "seeds": [0, 1, 2], "schedule": "cosine"}
    sizes = {"steps": 800, "probe": 100}
    chosen = options(__doc__, data=str, out=Path, table=False, figure=Path, **named, **sizes)
    rows = read(chosen.out)
    if chosen.table:
        print(table(rows))
    if chosen.figure:
        with drawing():
            chosen.figure.write_bytes(render(figure(rows), "sign methods")["svg"])
    if chosen.table or chosen.figure:
        return
    torch.set_num_threads(1)
    data = WORKLOAD.load(chosen.data)
    common = {"batch_size": 0, "schedule": chosen.schedule, "momentum": 0.0, "nesterov": False, "warmup_steps": 0}

    def run(method: str, batch: int, steps: int, rate: float, seed: int, points: int = POINTS) -> Row:
        """One training run, or what is known of it. points: of its curve, 0 for none."""
        identity = {"method": method, "batch": batch, "steps": steps, "rate": rate, "seed": seed, "ranks": RANKS}
        identity["schedule"] = chosen.schedule
        if known := next((row for row in rows if identity.items() <= row.items()), None):
            return known
        recipe = replace(WORKLOAD.recipe, **{**common, "learning_rate": rate, "batch_size": batch, "steps": steps})
        layers = layers_of(initialized(3, (16, 32, 64), (1, 1, 1), 10, seed))
        plan = method_plan(layers, method, momentum=MOMENTUM, seed=seed)
        row = identity | train(plan, data, recipe, RANKS, seed, score_every=steps // points if points else None)
        rows.append(row | {"loss": finite(row["loss"])})
        add(chosen.out, rows[-1], unshown=("curve",))
        return rows[-1]

    first, *others = chosen.seeds
    for batch in chosen.batch:
        for method in chosen.methods:
            tried = [run(method, batch, chosen.probe, rate, first, points=0) for rate in GRID]
            full = [
                run(method, batch, chosen.steps, row["rate"], first) for row in sorted(tried, key=training_loss)[:2]
            ]
            best = min(full, key=training_loss)["rate"]
            for seed in others:
                run(method, batch, chosen.steps, best, seed)
