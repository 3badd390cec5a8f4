"""LGC's figures 3, 4 and 12 in small: what nodes share.

    python benchmarks lgc_figures --data cifar10.npz --rows ROWS.jsonl --traces FOLDER [--nodes 4 16]
    python benchmarks lgc_figures --rows ROWS.jsonl --claim report/report.json
    python benchmarks lgc_figures --rows ROWS.jsonl --table [--information fig12.svg]

Figure 4: a row per layer, from the report that `gradlab analyze TRACE --only between --out report` writes of ResNet-20,
`gradlab train cifar10 --data cifar10.npz --emulate 4 --batch-size 16 --steps 400 -s every=2 --capture TRACE`.
Figures 3 and 12: a row per number of emulated nodes, which share a batch of about 128 images, ResNet-8 on images halved
to 16 x 16; every tenth of 400 iterations is measured as `gradlab analyze` does. Rows that are there are not made again.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import emulated
import torch
from lgc import Setting, load, tasks
from rows import Row, fill, markdown, options, read

from gradlab.analysis.figures.drawn import draw
from gradlab.analysis.figures.style import drawing
from gradlab.analysis.measure.between_ranks import CORRECTED, measure_between_ranks
from gradlab.analysis.questions.between import over_iterations
from gradlab.datasets import Data
from gradlab.trace import Trace

SHARED_BATCH, EVERY, SPREAD = 128, 10, 40  # images of all nodes, iterations between recorded ones
DRAWN_WITH = {
    12: "ResNet-8, CIFAR-10 at 16 x 16, SGD at a rate that rises to 1.0 in 200 iterations, one seed; every 10th of 400 "
    "iterations",
    4: "4 nodes of 16 images; ResNet-20, CIFAR-10, one seed; every second of 400 iterations",
}
BITS = ("entropy", "information", "shuffled", "shifted")


def informed(nodes: int, setting: Setting, data: Data, folder: Path) -> Row:
    """Measure what pairs of nodes share of four layers, as report.json's "between_nodes" has it."""
    place, batch = folder / f"{nodes}-nodes-apart", round(SHARED_BATCH / nodes)
    task = replace(setting.task, recipe=replace(setting.task.recipe, batch_size=batch, steps=1000), ranks=nodes)
    emulated.record(task, data, place, 0, start=0, every=EVERY, count=SPREAD)
    with Trace(place) as trace:
        names = [layer.name for layer in trace.layers if len(layer.shape) > 1 and layer.numel >= 256]
        measured = measure_between_ranks(trace, layers=[names[round(at * (len(names) - 1) / 3)] for at in range(4)])
    shutil.rmtree(place)
    bins, kept = str(measured.paper_bins), ("name", "numel", "values", "iterations", "pairs", "mean_cosine")
    layers = [
        {key: layer[key] for key in kept}
        | {"histograms": {bins: layer["histograms"][bins]}, "estimators": {"copula": layer["estimators"]["copula"]}}
        for layer in json.loads(json.dumps(measured.to_json()["layers"]))
    ]
    found = {"paper_bins": measured.paper_bins, "shift_iterations": measured.shift_iterations, "layers": layers}
    return {"drawn_with": f"{nodes} nodes of {batch} images; {DRAWN_WITH[12]}", "found": found}


def information_table(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        for layer in row["found"]["layers"]:
            histogram = layer["histograms"][str(row["found"]["paper_bins"])]
            bits = [f"{statistics.fmean(histogram[name]):.2f}" for name in BITS]
            lines.append([row["of"], layer["name"], *bits, _excess(layer["estimators"]["copula"]["excess"], 4)])
    heads = ("entropy", "information", "pair shuffled", "pair shifted", "copula beyond shifted pairs")
    return markdown(("nodes", "layer", *heads), lines)


def claimed(report: Path) -> dict[str, Row]:
    """By layer of a report what the claim's table shows, means over iterations, in bits per parameter."""
    between, rows = json.loads(report.read_text(encoding="utf-8"))["between_nodes"], {}
    for layer in between["layers"]:
        found = {"paper_bins": between["paper_bins"], "values": layer["values"], "place": layer["place"]}
        found["histograms"] = {
            bins: {name: statistics.fmean(one[name]) for name in BITS} for bins, one in layer["histograms"].items()
        }
        found["excess"] = {
            name: {key: one["excess"][key] for key in ("bits", "low", "high")}
            for name, one in layer["estimators"].items()
        }
        rows[layer["name"]] = {"drawn_with": DRAWN_WITH[4], "found": found}
    return rows


def claim_table(rows: Sequence[Row]) -> str:
    """Tabulate figure 4, a layer a line, and medians: the paper's bins, 1024, and the excess by each estimator."""
    heads = ("values", "log2", "information", "shuffled", "shifted", "1024 bins: share", "shuffled less")
    lines: list[list[object]] = []
    for row in rows:
        found = row["found"]
        paper, fewer = (found["histograms"][key] for key in (str(found["paper_bins"]), "1024"))
        cells = [f"{found['values']}", f"{math.log2(found['values']):.2f}"]
        cells += [f"{paper[name]:.2f}" for name in BITS[1:]]
        cells += [f"{100 * fewer['information'] / fewer['entropy']:.0f} %"]
        cells += [f"{fewer['information'] - fewer['shuffled']:.2f}"]
        lines.append([row["of"], *cells, *(_excess(found["excess"][name]) for name in CORRECTED)])
    medians = [statistics.median(row["found"]["excess"][name]["bits"] for row in rows) for name in CORRECTED]
    lines.append(["median", *[""] * len(heads), *(f"{bits:.3f}" for bits in medians)])
    return markdown(("layer", *heads, "copula", "nearest"), lines)


def _excess(found: Row, digits: int = 3) -> str:
    bits, low, high = ("" if found[key] is None else f"{found[key]:.{digits}f}" for key in ("bits", "low", "high"))
    return f"{bits} ({low} to {high})" if low else f"{bits} (no interval)"


def main() -> None:
    named = {"traces": Path, "nodes": [4, 16, 22], "claim": Path, "information": Path, "table": False}
    chosen = options(__doc__, data=str, rows=Path, **named)
    torch.set_num_threads(1)
    if chosen.data:
        setting = tasks()["cifar10"]
        data = load("cifar10", setting, chosen.data)
        keys = ({"figure": 12, "of": nodes} for nodes in chosen.nodes)
        fill(chosen.rows, keys, lambda key: informed(key["of"], setting, data, chosen.traces), ("found",))
    if chosen.claim:
        known = claimed(chosen.claim)
        fill(chosen.rows, ({"figure": 4, "of": layer} for layer in known), lambda key: known[key["of"]], ("found",))
    shared, claim = ([row for row in read(chosen.rows) if row["figure"] == figure] for figure in (12, 4))
    if chosen.information:
        found = {f"{row['of']} nodes": row["found"] for row in shared}
        with drawing():
            caption = "\n".join(row["drawn_with"] for row in shared)
            draw(over_iterations(found, caption)).savefig(chosen.information)
    if chosen.table:
        print(f"{information_table(shared)}\n{claim_table(claim)}")
