"""LGC's figures 13 and 14 in small: ways to become sparse, and how the autoencoders learn with many nodes.

    python benchmarks/lgc_figures.py --data cifar10.npz --rows rows.jsonl --traces FOLDER [--nodes 24 32]
    python benchmarks/lgc_figures.py --rows rows.jsonl --sparsification fig13.svg --reconstruction fig14.svg

ResNet-8 on images halved to 16 x 16. Figure 13: 4 nodes of 16 images, 600 iterations, the largest 0.1 % of every layer
of 256 elements with error feedback: from the first iteration on ("fixed"), at a density that falls from 25 % in four
stages over 200 iterations ("exponential", DGC's), or after 200 dense ones ("warm-up", LGC's). Figure 14: for each
number of emulated nodes of 4 images each 200 iterations are recorded (a gigabyte or more) after 50, 1 % of every layer
is selected, and the autoencoders learn on it, an iteration at a time, with Adam and values divided by their layers'
root mean squares: the ring's, and the server's with and without similarity loss. What is in --rows is not done again.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import emulated
import torch
from lgc import DENSITY, FEEDBACK, Setting, load, tasks
from rows import add, has, read

from gradlab.analysis.figures.lgc import plot_reconstruction, plot_sparsification
from gradlab.analysis.figures.style import drawing
from gradlab.analysis.fit.lgc.learners import learner_of, reconstruction_errors
from gradlab.analysis.fit.lgc.selections import collect_selections
from gradlab.datasets import Data
from gradlab.layout import layers_of
from gradlab.plan import Group, Plan, Schedule, Wrap, lgc_plan
from gradlab.plan.lgc_recipe import GROUP
from gradlab.trace import Trace

STEPS, WARMUP, SPARSE = 600, 200, 0.001
START, RECORDED, BATCH = 50, 200, 4
STRATEGIES = ("dense", "fixed", "exponential", "warm-up")
CODES: dict[str, tuple[str, dict[str, Any]]] = {
    "ring": ("ring", {}),
    "server, similarity 0.5": ("server", {"similarity": 0.5}),
    "server, no similarity": ("server", {"similarity": 0.0}),
}


def sparsified(strategy: str, setting: Setting, data: Data, seed: int = 0) -> list[float]:
    """The loss, means of 20 iterations."""
    task = replace(setting.task, recipe=replace(setting.task.recipe, steps=STEPS))
    layers = layers_of(task.model(seed))
    stages = (Wrap("sparsity_warmup", {"steps": WARMUP}),) if strategy == "exponential" else ()
    groups = tuple(
        Group(layer.name, (layer.name,), "topk", {"density": SPARSE}, (*stages, FEEDBACK))
        for layer in layers
        if layer.numel >= 256 and strategy != "dense"
    )
    plan = Plan(layers, groups, Schedule(WARMUP if strategy == "warm-up" else 0))
    return list(emulated.train(task, plan, data, seed)["losses"])


def reconstructed(nodes: int, setting: Setting, data: Data, folder: Path) -> dict[str, list[float]]:
    """Errors over iterations, by code."""
    place = folder / f"{nodes}-nodes"
    if not place.exists():
        recipe = replace(setting.task.recipe, batch_size=BATCH, steps=1000)
        task = replace(setting.task, recipe=recipe, ranks=nodes)
        emulated.record(task, data, place, 0, start=START, every=1, count=RECORDED)
    errors = {}
    for name, (pattern, settings) in CODES.items():
        values = {"density": DENSITY, "normalise": "layer", **settings}
        with Trace(place) as trace:
            plan = lgc_plan(trace.layers, pattern, warmup_steps=0, **values)
            selections = collect_selections(trace, plan)
        [group] = [group for group in plan.groups if group.name == GROUP]
        learner = learner_of(pattern, values, [layer.numel for layer in plan.members(group)], nodes)
        errors[name] = reconstruction_errors(learner, selections)
    shutil.rmtree(place)
    return errors


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="cifar10.npz")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--nodes", type=int, nargs="+", default=[24, 32])
    parser.add_argument("--sparsification", type=Path)
    parser.add_argument("--reconstruction", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.data:
        setting = tasks()["cifar10"]
        data = load("cifar10", setting, chosen.data)
        wanted = [{"figure": 13, "of": strategy} for strategy in STRATEGIES]
        wanted += [{"figure": 14, "of": nodes} for nodes in chosen.nodes if chosen.traces]
        for key in wanted:
            if not has(read(chosen.rows), key):
                of = key["of"]
                result = (
                    sparsified(str(of), setting, data)
                    if key["figure"] == 13
                    else reconstructed(int(of), setting, data, chosen.traces)
                )
                add(chosen.rows, key | {"found": result}, unshown=("found",))
    rows = read(chosen.rows)
    losses = {row["of"]: row["found"] for row in rows if row["figure"] == 13}
    errors = {f"{row['of']} nodes": row["found"] for row in rows if row["figure"] == 14}
    with drawing():
        if chosen.sparsification:
            plot_sparsification(losses, 20).savefig(chosen.sparsification)
        if chosen.reconstruction:
            plot_reconstruction(errors).savefig(chosen.reconstruction)


if __name__ == "__main__":
    main()
