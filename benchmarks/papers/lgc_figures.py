"""LGC's figures 3, 4 and 12 in small: what nodes share.

    python benchmarks lgc_figures --data cifar10.npz --rows rows.jsonl --traces FOLDER [--nodes 4 16]
    python benchmarks lgc_figures --rows rows.jsonl --claim report/report.json
    python benchmarks lgc_figures --rows rows.jsonl --table --information fig12.svg

Figure 4: a row per layer, from the report that `gradlab analyze TRACE --only between --out report` writes of ResNet-20,
`gradlab train cifar10 --data cifar10.npz --emulate 4 --batch-size 16 --steps 400 -s every=2 --capture TRACE`.
Figures 3 and 12 are of ResNet-8 on images halved to 16 x 16: for each number of emulated nodes, which share a batch of
about 128 images, every tenth of 400 iterations is recorded, and entropy and information are measured of pairs of nodes
as `gradlab analyze` does. Rows in --rows are not made again.
"""

from __future__ import annotations

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
from lgc import Setting, load, tasks
from rows import Row, add, markdown, missing, options, read

from gradlab.analysis.chart import draw
from gradlab.analysis.figures.style import drawing
from gradlab.analysis.measure.between_ranks import AFTER_ADDITION, CORRECTED, measure_between_ranks
from gradlab.analysis.questions.between import over_iterations
from gradlab.datasets import Data
from gradlab.trace import Trace

SHARED_BATCH, EVERY, SPREAD = 128, 10, 40  # images of all nodes, iterations between recorded ones
NODES = (4, 16, 22)
DRAWN_WITH = "4 nodes of 16 images; ResNet-20, CIFAR-10, one seed; every second of 400 iterations"


def informed(nodes: int, setting: Setting, data: Data, folder: Path) -> dict[str, Any]:
    """Measure what pairs of nodes share of four layers, as report.json's "between_nodes" has it."""
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


def information_table(rows: Sequence[Row]) -> str:
    """Tabulate figures 3 and 12: means over iterations, in bits per parameter."""
    names, lines = ("entropy", "information", "shuffled", "shifted"), []
    for row in rows:
        for layer in row["found"]["layers"]:
            histogram = layer["histograms"][str(row["found"]["paper_bins"])]
            bits = [f"{statistics.fmean(histogram[name]):.2f}" for name in names]
            lines.append([row["of"], layer["name"], *bits, _excess(layer["estimators"]["copula"]["excess"], 4)])
    heads = ("entropy", "information", "pair shuffled", "pair shifted", "copula beyond shifted pairs")
    return markdown(("nodes", "layer", *heads), lines)


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
        row = {"figure": 4, "of": layer["name"], "drawn_with": DRAWN_WITH}
        rows.append(row | {"found": found | {"histograms": histograms, "excess": excess}})
    return rows


def claim_table(rows: Sequence[Row]) -> str:
    """Tabulate figure 4, a layer a line, and medians: the paper's bins, 1024, and the excess by each estimator."""
    heads = ("values", "log2", "information", "shuffled", "shifted", "1024 bins: share", "shuffled less")
    lines: list[list[object]] = []
    for row in rows:
        found = row["found"]
        paper, fewer = (found["histograms"][key] for key in (str(found["paper_bins"]), "1024"))
        cells = [f"{found['values']}", f"{math.log2(found['values']):.2f}"]
        cells += [f"{paper[name]:.2f}" for name in ("information", "shuffled", "shifted")]
        cells += [f"{100 * fewer['information'] / fewer['entropy']:.0f} %"]
        cells += [f"{fewer['information'] - fewer['shuffled']:.2f}"]
        added = " (+)" if AFTER_ADDITION in found["place"] else ""
        lines.append([row["of"] + added, *cells, *(_excess(found["excess"][name]) for name in CORRECTED)])
    medians = [statistics.median(row["found"]["excess"][name]["bits"] for row in rows) for name in CORRECTED]
    lines.append(["median", *[""] * len(heads), *(f"{bits:.3f}" for bits in medians)])
    return markdown(("layer", *heads, "copula", "nearest"), lines)


def _excess(found: Row, digits: int = 3) -> str:
    bits, low, high = ("" if found[key] is None else f"{found[key]:.{digits}f}" for key in ("bits", "low", "high"))
    return f"{bits} ({low} to {high})" if low else f"{bits} (no interval)"


def main() -> None:
    """See the module's text."""
    named = {"traces": Path, "nodes": list(NODES), "claim": Path, "information": Path, "table": False}
    chosen = options(__doc__, data=str, rows=Path, **named)
    torch.set_num_threads(1)
    if chosen.data:
        setting = tasks()["cifar10"]
        data = load("cifar10", setting, chosen.data)
        model = "ResNet-8, CIFAR-10 at 16 x 16, SGD at a rate that rises to 1.0 in 200 iterations, one seed"
        for key in missing(chosen.rows, ({"figure": 12, "of": nodes} for nodes in chosen.nodes)):
            images = f"{key['of']} nodes of {round(SHARED_BATCH / key['of'])} images"
            drawn_with = f"{images}; {model}; every {EVERY}th of {EVERY * SPREAD} iterations"
            found = informed(key["of"], setting, data, chosen.traces)
            add(chosen.rows, key | {"drawn_with": drawn_with, "found": found}, unshown=("found",))
    known = {row["of"]: row for row in claimed(chosen.claim)} if chosen.claim else {}
    for key in missing(chosen.rows, ({"figure": 4, "of": layer} for layer in known)):
        add(chosen.rows, known[key["of"]], unshown=("found",))
    shared, claim = ([row for row in read(chosen.rows) if row["figure"] == figure] for figure in (12, 4))
    if chosen.information:
        found = {f"{row['of']} nodes": row["found"] for row in shared}
        with drawing():
            caption = "\n".join(row["drawn_with"] for row in shared)
            draw(over_iterations(found, caption)).savefig(chosen.information)
    if chosen.table:
        print(information_table(shared))
        print(claim_table(claim))


if __name__ == "__main__":
    main()
