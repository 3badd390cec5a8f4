"""LGC's figures 3, 4, 12, 13 and 14 in small: what nodes share, ways to become sparse, how autoencoders learn.

    python benchmarks lgc_figures --data cifar10.npz --rows rows.jsonl --traces FOLDER [--figures 12] [--nodes 4 16]
    python benchmarks lgc_figures --rows rows.jsonl --claim report/report.json
    python benchmarks lgc_figures --rows rows.jsonl --table --information fig12.svg --sparsification fig13.svg \\
        --reconstruction fig14.svg

Figure 4: a row per layer, from the report that `gradlab analyze TRACE --only between --out report` writes of ResNet-20,
`gradlab train cifar10 --data cifar10.npz --emulate 4 --batch-size 16 --steps 400 -s every=2 --seed 0 --capture TRACE`.
The others are of ResNet-8 on images halved to 16 x 16. Figures 3 and 12: for each number of emulated nodes (4, 16 and
22), which share a batch of about 128 images, every tenth of 400 iterations is recorded, and entropy and information are
measured of pairs of nodes as `gradlab analyze` does. Figure 13: 4 nodes of 16 images, 600 iterations, the largest 0.1 %
of every layer of 256 elements with error feedback: from the first iteration on ("fixed"), at a density that falls from
25 % in four stages over 200 iterations ("exponential", DGC's), or after 200 dense ones ("warm-up", LGC's). Figure 14:
for each number of emulated nodes of 4 images each 200 iterations are recorded (a gigabyte or more) after 50, 1 % of
every layer is selected, and the autoencoders learn on it, an iteration at a time, with Adam and values divided by their
layers' root mean squares: the ring's, and the server's with and without similarity loss. What is in --rows is not done
again.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import emulated
import torch
from lgc import DENSITY, FEEDBACK, RANKS, Setting, load, tasks
from matplotlib.figure import Figure
from rows import Row, add, has, read

from gradlab.analysis.figures.information import plot_information_of_nodes
from gradlab.analysis.figures.lgc import plot_reconstruction, plot_sparsification
from gradlab.analysis.figures.style import drawing
from gradlab.analysis.fit.lgc.learners import learner_of, reconstruction_errors
from gradlab.analysis.fit.lgc.selections import collect_selections
from gradlab.analysis.measure.between_ranks import CORRECTED, measure_between_ranks
from gradlab.analysis.measure.layer_places import AFTER_ADDITION
from gradlab.datasets import Data
from gradlab.layout import layers_of
from gradlab.plan import Group, Plan, Schedule, Wrap, lgc_plan
from gradlab.plan.lgc_recipe import GROUP
from gradlab.trace import Trace

STEPS, WARMUP, SPARSE = 600, 200, 0.001
START, RECORDED, BATCH = 50, 200, 4
SHARED_BATCH, EVERY, SPREAD = 128, 10, 40  # figures 3 and 12: images of all nodes, iterations between recorded ones
NODES = {12: (4, 16, 22), 14: (24, 32)}
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


def informed(nodes: int, setting: Setting, data: Data, folder: Path) -> dict[str, Any]:
    """What pairs of nodes share of four layers: the part of report.json's "between_nodes" that the figure takes."""
    place = folder / f"{nodes}-nodes-apart"
    batch = round(SHARED_BATCH / nodes)
    if not place.exists():
        recipe = replace(setting.task.recipe, batch_size=batch, steps=1000)
        emulated.record(
            replace(setting.task, recipe=recipe, ranks=nodes), data, place, 0, start=0, every=EVERY, count=SPREAD
        )
    with Trace(place) as trace:
        names = [layer.name for layer in trace.layers if len(layer.shape) > 1 and layer.numel >= 256]
        chosen = [names[round(at * (len(names) - 1) / 3)] for at in range(4)]
        measured = measure_between_ranks(trace, layers=chosen)
    shutil.rmtree(place)
    between, bins = measured.to_json(), str(measured.paper_bins)
    kept = ("name", "numel", "values", "iterations", "pairs", "mean_cosine")
    layers = [
        {key: layer[key] for key in kept}
        | {"histograms": {bins: layer["histograms"][bins]}, "estimators": {"copula": layer["estimators"]["copula"]}}
        for layer in json.loads(json.dumps(between["layers"]))
    ]
    return {"paper_bins": measured.paper_bins, "shift_iterations": measured.shift_iterations, "layers": layers}


def make(figure: int, of: Any, setting: Setting, data: Data, traces: Path) -> Any:
    """What is drawn of a strategy or of a number of nodes."""
    if figure == 13:
        return sparsified(of, setting, data)
    return (informed if figure == 12 else reconstructed)(of, setting, data, traces)


def draw(figure: int, rows: Sequence[Row]) -> Figure:
    """Draw rows of one figure, with what they were made with below."""
    found = {row["of"] if figure == 13 else f"{row['of']} nodes": row["found"] for row in rows}
    caption = "\n".join(dict.fromkeys(row["drawn_with"] for row in rows))
    if figure == 12:
        return plot_information_of_nodes(found, caption)
    return plot_sparsification(found, 20, caption) if figure == 13 else plot_reconstruction(found, caption=caption)


def information_table(rows: Sequence[Row]) -> str:
    """Tabulate figures 3 and 12: means over iterations, in bits per parameter."""
    lines = ["| nodes | layer | entropy | information | pair shuffled | pair shifted | copula beyond shifted pairs |"]
    lines += ["| ---: | --- | ---: | ---: | ---: | ---: | ---: |"]
    for row in rows:
        for layer in row["found"]["layers"]:
            histogram = layer["histograms"][str(row["found"]["paper_bins"])]
            names = ("entropy", "information", "shuffled", "shifted")
            bits = [f"{statistics.fmean(histogram[name]):.2f}" for name in names]
            excess = layer["estimators"]["copula"]["excess"]
            bits += [f"{excess['bits']:.4f} ({excess['low']:.4f} to {excess['high']:.4f})"]
            lines.append(f"| {row['of']} | {layer['name']} | " + " | ".join(bits) + " |")
    return "\n".join(lines)


def claimed(report: Path) -> list[Row]:
    """A row per layer of a report: what the claim's table shows, means over iterations, in bits per parameter."""
    between, rows = json.loads(report.read_text(encoding="utf-8"))["between_nodes"], []
    for layer in between["layers"]:
        histograms = {
            bins: {name: statistics.fmean(found[name]) for name in ("entropy", "information", "shuffled", "shifted")}
            for bins, found in layer["histograms"].items()
        }
        excess = {
            name: {key: one["excess"][key] for key in ("bits", "low", "high")}
            for name, one in layer["estimators"].items()
        }
        found = {"paper_bins": between["paper_bins"], "values": layer["values"], "place": layer["place"]}
        row = {"figure": 4, "of": layer["name"], "drawn_with": drawn_with(4, layer["name"])}
        rows.append(row | {"found": found | {"histograms": histograms, "excess": excess}})
    return rows


def claim_table(rows: Sequence[Row]) -> str:
    """Tabulate figure 4, a layer a line, and medians: the paper's bins, 1024, and the excess by each estimator."""
    lines = ["| layer | values | log2 | information | shuffled | shifted | 1024 bins: share | shuffled less |"]
    lines[0] += " copula | nearest |"
    lines += ["| --- |" + " ---: |" * 9]
    for row in rows:
        found = row["found"]
        paper, fewer = (found["histograms"][key] for key in (str(found["paper_bins"]), "1024"))
        cells = [f"{found['values']}", f"{math.log2(found['values']):.2f}"]
        cells += [f"{paper[name]:.2f}" for name in ("information", "shuffled", "shifted")]
        cells += [f"{100 * fewer['information'] / fewer['entropy']:.0f} %"]
        cells += [f"{fewer['information'] - fewer['shuffled']:.2f}"]
        cells += [_excess(found["excess"][name]) for name in CORRECTED]
        added = " (+)" if AFTER_ADDITION in found["place"] else ""
        lines.append(f"| {row['of']}{added} | " + " | ".join(cells) + " |")
    medians = [statistics.median(row["found"]["excess"][name]["bits"] for row in rows) for name in CORRECTED]
    lines.append("| median |" + " |" * 7 + "".join(f" {bits:.3f} |" for bits in medians))
    return "\n".join(lines)


def _excess(found: Row) -> str:
    known = found["low"] is not None
    return f"{found['bits']:.3f} " + (f"({found['low']:.3f} to {found['high']:.3f})" if known else "(no interval)")


def drawn_with(figure: int, of: Any) -> str:
    """What a figure's lines were made with, for its caption."""
    if figure == 4:
        return "4 nodes of 16 images; ResNet-20, CIFAR-10, one seed; every second of 400 iterations"
    model = "ResNet-8, CIFAR-10 at 16 x 16, SGD at a rate that rises to 1.0 in 200 iterations, one seed"
    if figure == 12:
        return (
            f"{of} nodes of {round(SHARED_BATCH / of)} images; {model}; every {EVERY}th of {EVERY * SPREAD} iterations"
        )
    if figure == 13:
        return f"{RANKS} nodes of 16 images; {model}; 0.1 % of every layer of 256 elements, top-k with error feedback"
    return (
        f"{of} nodes of {BATCH} images; {model}; {100 * DENSITY:g} % of every layer but the first, the last and "
        f"vectors, values divided by their layers' root mean squares; the autoencoders learn by Adam at 0.001 from "
        f"iterations {START} to {START + RECORDED - 1}, one by one; means of 10"
    )


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="cifar10.npz")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--traces", type=Path, help="folder for recordings, which are deleted; with --data")
    parser.add_argument("--figures", type=int, nargs="+", choices=(12, 13, 14), default=[12, 13, 14])
    parser.add_argument("--nodes", type=int, nargs="+", help="of figures 12 and 14, in place of the paper's")
    parser.add_argument("--claim", type=Path, help="report.json that figure 4's rows are taken from")
    parser.add_argument("--information", type=Path)
    parser.add_argument("--table", action="store_true", help="of figures 3, 4 and 12")
    parser.add_argument("--sparsification", type=Path)
    parser.add_argument("--reconstruction", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.data and chosen.traces is None and set(chosen.figures) != {13}:
        parser.error("--traces is needed, a folder for recordings")
    if chosen.data:
        setting = tasks()["cifar10"]
        data = load("cifar10", setting, chosen.data)
        for figure in chosen.figures:
            for of in STRATEGIES if figure == 13 else chosen.nodes or NODES[figure]:
                key = {"figure": figure, "of": of}
                if not has(read(chosen.rows), key):
                    result = make(figure, of, setting, data, chosen.traces)
                    add(chosen.rows, key | {"drawn_with": drawn_with(figure, of), "found": result}, unshown=("found",))
    for row in claimed(chosen.claim) if chosen.claim else []:
        if not has(read(chosen.rows), {"figure": 4, "of": row["of"]}):
            add(chosen.rows, row, unshown=("found",))
    rows = read(chosen.rows)
    with drawing():
        for figure, path in ((12, chosen.information), (13, chosen.sparsification), (14, chosen.reconstruction)):
            if path:
                draw(figure, [row for row in rows if row["figure"] == figure]).savefig(path)
    if chosen.table:
        print(information_table([row for row in rows if row["figure"] == 12]))
        print(claim_table([row for row in rows if row["figure"] == 4]))


if __name__ == "__main__":
    main()
