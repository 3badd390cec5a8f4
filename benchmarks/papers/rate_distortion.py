"""Errors of single contributions over counted bits: every codec on several recordings, beside the least there can be.

    python benchmarks rate_distortion --recordings ResNet-8=trace1 nanoGPT=trace2 --rows rates.jsonl
    python benchmarks rate_distortion --rows rates.jsonl --table [--figure rates.svg]

Each codec at each of its candidate settings, as `Plan.uniform` has it but without feedback, so that every iteration is
judged for itself; top-k also in one group of all layers. Codecs that need a fit or learn while they run are left out.
Bits are those counted of what is compressed, per value of it, means over a recording's later half; the error is
||C(x) - x|| / ||x|| of a rank's compressed layers. The floor is the rate-distortion function of independent Gaussian
values with each value's own mean square over iterations and ranks, known to both sides. One line of JSON per codec and
setting, and per rate of the floor; what is there is not done again.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from rows import Row, add, has, read

from gradlab import codecs
from gradlab.analysis.figures.style import drawing, method_colors, panels, render
from gradlab.analysis.fit.lgc.fit import fit_lgc
from gradlab.analysis.measure.rate_distortion import distortion_at, mean_squares
from gradlab.analysis.replay import replay
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan import Plan
from gradlab.trace import Trace

RATES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)  # bits per value
LEFT_OUT = ("gradiveq", "identity", "lgc_ring", "lgc_server")
FLOOR = "floor"
MARKERS = "os^DvPX*<>ph"
ONE_GROUP = "topk, one group"


def plans(layers: Sequence[Layer]) -> Iterator[tuple[str, dict[str, Any], Plan]]:
    """Yield every codec's plans, with their names and settings, but those that these layers refuse."""
    whole: dict[str, Any] = {"group_bytes": 2**62}
    wanted = [(name, name, {}) for name in codecs.names() if name not in LEFT_OUT]
    for title, name, more in [*wanted, (ONE_GROUP, "topk", whole)]:
        for settings in codecs.get(name).about.candidates:
            try:
                yield title, dict(settings), Plan.uniform(layers, name, wrappers=(), **more, **settings)
            except GradlabError as error:
                print(f"{title} {settings}: {error}", flush=True)


def fitted_plans(trace: Trace) -> Iterator[tuple[str, dict[str, Any], Callable[[], Plan]]]:
    """Yield what makes the plans of codecs that are fitted on the first half: GradiVeQ's half, and LGC in a ring."""
    half = len(trace.steps) // 2
    common = {"complement": 0.5, "whitening": False, "pooled": 16, "sample_bits": 0}
    phases = {"sample_steps": half - 1, "compressed_steps": 0, "warmup_steps": 0}
    for ratio in (4.0, 8.0, 16.0, 32.0, 64.0, 128.0):
        settings = {"ratio": ratio, **common}
        yield (
            "gradiveq, half PCA",
            {"ratio": ratio},
            partial(Plan.uniform, trace.layers, "gradiveq", wrappers=(), **settings, **phases),
        )
    for density in (0.003, 0.01, 0.03):
        yield "lgc_ring", {"density": density}, partial(lgc, trace, density)


def lgc(trace: Trace, density: float) -> Plan:
    """Learn LGC's autoencoder, which takes the first 75 % of a recording; without feedback."""
    plan = fit_lgc(trace, "ring", settings={"density": density}).plan
    return replace(plan, groups=tuple(replace(group, wrappers=()) for group in plan.groups))


def compressed_layers(plan: Plan) -> list[str]:
    return [name for group in plan.compressed_groups for name in group.layers]


def row_of(trace: Trace, plan: Plan) -> Row:
    """Replay a plan: its bits per compressed value, and its error."""
    steps = replay(trace, plan).compressed[len(trace.steps) // 2 :]
    compressed = set(compressed_layers(plan))
    dense = sum(4 * layer.numel for layer in trace.layers if layer.name not in compressed)
    numel = sum(layer.numel for layer in trace.layers if layer.name in compressed)
    return {
        "bits": 8 * (statistics.fmean(step.payload_bytes_mean for step in steps) - dense) / numel,
        "error": statistics.fmean(step.contribution_error or 0.0 for step in steps),
    }


def measure(title: str, trace: Trace, out: Path) -> None:
    """Append the rows of one recording that the file does not have yet: every codec's, and the floor's."""
    rows = read(out)
    for name, settings, plan in plans(trace.layers):
        key = {"recording": title, "codec": name, "settings": settings}
        if not has(rows, key):
            add(out, key | row_of(trace, plan))
    for name, settings, make in fitted_plans(trace):
        key = {"recording": title, "codec": name, "settings": settings}
        if not has(rows, key):
            try:
                add(out, key | row_of(trace, make()))
            except GradlabError as error:
                print(f"{name} {settings}: {error}", flush=True)
    names = compressed_layers(Plan.uniform(trace.layers, "ecsq"))
    variances = np.concatenate([mean_squares(trace, name, len(trace.steps) // 2) for name in names])
    for bits in RATES:
        key = {"recording": title, "codec": FLOOR, "bits": bits}
        if not has(rows, key):
            least = math.sqrt(distortion_at(variances, bits * len(variances)) / variances.sum())
            add(out, key | {"error": least, "values": len(variances)})


def at_rate(points: Sequence[tuple[float, float]], bits: float) -> float:
    """Read an error off between a codec's settings, or at the one of the most bits; infinite below the fewest bits."""
    rates, errors = zip(*sorted(points), strict=True)
    return math.inf if bits < 0.98 * rates[0] else float(np.interp(math.log(bits), np.log(rates), errors))


def table(rows: Sequence[Row]) -> str:
    """Lay out ecsq's errors by recording and rate, with the best of the others at as many bits, and the floor."""
    lines = ["| recording | bits per value | ecsq | floor | best of the others | second |", "|---|---|---|---|---|---|"]
    for recording in dict.fromkeys(row["recording"] for row in rows):
        here = [row for row in rows if row["recording"] == recording]
        floors = {row["bits"]: row["error"] for row in here if row["codec"] == FLOOR}
        lines_of: dict[str, list[tuple[float, float]]] = {}
        for row in here:
            lines_of.setdefault(row["codec"], []).append((row["bits"], row["error"]))
        for row in (row for row in here if row["codec"] == "ecsq"):
            others = sorted(
                (at_rate(points, row["bits"]), name) for name, points in lines_of.items() if name not in ("ecsq", FLOOR)
            )
            cells = [f"{error:.3f} {name}" if error < math.inf else "-" for error, name in others[:2]]
            floor = f"{at_rate(sorted(floors.items()), row['bits']):.3f}"
            lines.append(f"| {recording} | {row['bits']:.3f} | {row['error']:.3f} | {floor} | {' | '.join(cells)} |")
    return "\n".join(lines)


def figure(rows: Sequence[Row]) -> Figure:
    """Draw error over bits, a panel per recording and a line per codec."""
    recordings = list(dict.fromkeys(row["recording"] for row in rows))
    names = sorted({row["codec"] for row in rows} - {FLOOR})
    colors = method_colors(names)
    drawn, places = panels(len(recordings), 2, height=3.2)
    for panel, recording in zip(places, recordings, strict=True):
        for place, name in enumerate((*names, FLOOR)):
            mine = [row for row in rows if (row["recording"], row["codec"]) == (recording, name) and row["error"] < 1.5]
            points = sorted((row["bits"], row["error"]) for row in mine)
            style = {"color": "black", "linestyle": "--"} if name == FLOOR else {"color": colors[name]}
            width = 2.2 if name == "ecsq" else 1.0
            marker = MARKERS[place % len(MARKERS)]
            panel.plot(*zip(*points, strict=True), marker=marker, markersize=3, label=name, linewidth=width, **style)
        panel.set_xscale("log")
        panel.set_xlim(0.04, 9)
        panel.set_ylim(0, 1.2)
        panel.set_title(recording)
        panel.set_xlabel("counted bits per value")
        panel.set_ylabel("||C(x) - x|| / ||x||")
    drawn.legend(*places[0].get_legend_handles_labels(), loc="outside lower center", fontsize="x-small", ncols=6)
    return drawn


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", nargs="+", default=[], metavar="TITLE=TRACE")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for title, _, path in (one.partition("=") for one in options.recordings):
        measure(title, Trace(path), options.rows)
    if options.table:
        print(table(read(options.rows)))
    if options.figure:
        with drawing():
            options.figure.write_bytes(render(figure(read(options.rows)), "rate distortion")["svg"])


if __name__ == "__main__":
    main()
