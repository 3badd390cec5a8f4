"""Predicted step times beside measured ones, from the lines of a measurement over a rate-limited network.

    python benchmarks predicted_steps [--rows FILE] --predict
    python benchmarks predicted_steps [--rows FILE] --table

The first adds to every step's row the forecast of its median, the second prints what is kept. Rows: a measured step of
ResNet-18 for CIFAR, {"ranks", "rate", "hook", "step_s", "compute_s"}, whose hook is "none" for plain DDP, else
MODULE:NAME of a plan of `PLANS`; an all-reduce on such a link, for calibration, {"raw_mb", "ranks", "rate",
"all_reduce_s"}; a codec's seconds in a step, {"compress", "ranks", "hook"}, without which codecs are timed here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from rows import Row, options, read

from gradlab.analysis.forecast import Network, forecast
from gradlab.analysis.forecast.calibration import Observation, calibrate_link
from gradlab.analysis.forecast.link import Link, parse_bandwidth
from gradlab.analysis.forecast.network import CodecTime, Profile
from gradlab.datasets import resnet
from gradlab.layout import layers_of
from gradlab.plan import Plan

ROWS = Path(__file__).parents[1] / "results" / "predicted-steps.jsonl"
CORES, LATENCY = 2.0, 2e-4  # of the machine, shared by all ranks; seconds
PLANS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "cast16": ("cast", {"dtype": "float16"}),
    "int8": ("block_scaled", {"dtype": "int8"}),
    "powersgd4": ("powersgd", {"rank": 4}),
    "topk1": ("topk", {"density": 0.01}),
}


def add_predictions(rows: Sequence[Row]) -> None:
    layers = layers_of(resnet.initialized(3, (64, 128, 256, 512), (2, 2, 2, 2), 10, seed=0))
    plans = {name: Plan.uniform(layers, codec, warmup_steps=0, **s) for name, (codec, s) in PLANS.items()}
    for row in (row for row in rows if "step_s" in row):
        ranks, name = row["ranks"], row["hook"].split(":")[-1]
        timed = [r["compress"] for r in rows if "compress" in r and (r["ranks"], r["hook"]) == (ranks, name)]
        codec = CodecTime(median(timed), ranks, True, "the measured steps") if timed else None
        profile = Profile(row["compute_s"], "measured", codec)
        link = replace(fitted_link(rows, ranks), bits_per_second=parse_bandwidth(row["rate"]))
        network = Network([link], [ranks], profile, CORES / ranks)
        pair = forecast(plans.get(name) or next(iter(plans.values())), network).nodes[0].links[0]
        row["predicted"] = round((pair.dense if name == "none" else pair.compressed).seconds, 4)


def fitted_link(rows: Sequence[Row], ranks: int) -> Link:
    """A link whose costs are fitted to the all-reduces that were timed at as many ranks, if any were."""
    seen = [
        Observation(ranks, int(1e6 * row["raw_mb"]), parse_bandwidth(row["rate"]), row["all_reduce_s"])
        for row in rows
        if "raw_mb" in row and row["ranks"] == ranks
    ]
    link = Link(1e9, LATENCY)
    return calibrate_link(link, seen).applied(link) if seen else link


def table(rows: Sequence[Row]) -> str:
    """One line per measured step with a forecast, and how many are within 15 %."""
    lines, errors = [f"{'ranks':>5} {'rate':>9} {'plan':>10} {'measured':>9} {'predicted':>9} {'off':>7}"], []
    for row in sorted((row for row in rows if "predicted" in row), key=lambda row: row["ranks"]):
        errors.append(row["predicted"] / row["step_s"] - 1)
        lines.append(
            f"{row['ranks']:>5} {row['rate']:>9} {row['hook'].split(':')[-1]:>10} {row['step_s']:8.3f}s "
            f"{row['predicted']:8.3f}s {100 * errors[-1]:+6.1f} %"
        )
    within = sum(abs(error) <= 0.15 for error in errors)
    mean = 100 * sum(map(abs, errors)) / max(1, len(errors))
    return "\n".join([*lines, f"{within} of {len(errors)} within 15 %; mean {mean:.1f} %"])


def main() -> None:
    chosen = options(__doc__, rows=ROWS, predict=False, table=False)
    rows = read(chosen.rows)
    if chosen.predict:
        add_predictions(rows)
        chosen.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(table(rows))
