"""Predicted step times beside measured ones, from the lines of a measurement over a rate-limited network.

Input: JSON lines. A measured step: {"ranks", "rate", "hook", "step_s", "compute_s"}; hook: "none" for plain DDP, else
MODULE:NAME, where NAME says which plan of `PLANS` it was. An all-reduce measured on such a link, for calibration:
{"raw_mb", "ranks", "rate", "all_reduce_s"}. What the engine measured of a codec in a step, as a run's report
has it: {"compress", "ranks", "hook"}; without it codecs are timed here. The model is a residual network for CIFAR.

    python benchmarks/predicted_steps.py benchmarks/results/predicted-steps.jsonl --cores 2 --median
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from gradlab.analysis.forecast import Network, forecast
from gradlab.analysis.forecast.calibration import Observation, calibrate_link
from gradlab.analysis.forecast.link import Link, parse_bandwidth
from gradlab.analysis.forecast.profile import CodecTime, Profile
from gradlab.layout import Layer
from gradlab.plan import Plan

PLANS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "cast16": ("cast", {"dtype": "float16"}),
    "int8": ("block_scaled", {"dtype": "int8"}),
    "powersgd4": ("powersgd", {"rank": 4}),
    "topk1": ("topk", {"density": 0.01}),
}


def residual_layers(widths: tuple[int, ...], blocks: int, classes: int = 10) -> tuple[Layer, ...]:
    """Parameters of a CIFAR-style residual network, in its order."""
    layers = [Layer("0.weight", (widths[0], 3, 3, 3), "convolution"), *_norm("1", widths[0])]
    channels = widths[0]
    for stage, width in enumerate(widths):
        for block in range(blocks):
            name = f"{stage}.{block}"
            layers.append(Layer(f"{name}.conv1.weight", (width, channels, 3, 3), "convolution"))
            layers += _norm(f"{name}.bn1", width)
            layers.append(Layer(f"{name}.conv2.weight", (width, width, 3, 3), "convolution"))
            layers += _norm(f"{name}.bn2", width)
            if channels != width:
                layers.append(Layer(f"{name}.skip.0.weight", (width, channels, 1, 1), "convolution"))
                layers += _norm(f"{name}.skip.1", width)
            channels = width
    return (*layers, Layer("fc.weight", (classes, channels), "linear"), Layer("fc.bias", (classes,), "bias"))


def _norm(name: str, width: int) -> list[Layer]:
    return [Layer(f"{name}.weight", (width,), "normalization"), Layer(f"{name}.bias", (width,), "bias")]


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path)
    parser.add_argument("--cores", type=float, default=2.0, help="of the machine, shared by all ranks")
    parser.add_argument("--latency", type=float, default=2e-4)
    parser.add_argument("--bucket-cap-mb", type=float)
    parser.add_argument("--widths", default="64,128,256,512")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--median", action="store_true", help="compare with the median step, not the shortest")
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.measured.read_text().splitlines() if line.startswith("{")]
    widths = tuple(int(width) for width in arguments.widths.split(","))
    layers = residual_layers(widths, arguments.blocks)
    plans = {name: Plan.uniform(layers, codec, warmup_steps=0, **s) for name, (codec, s) in PLANS.items()}
    steps = [row for row in rows if "step_s" in row]
    print(f"{'ranks':>5} {'rate':>9} {'plan':>10} {'measured':>9} {'predicted':>9} {'off':>7}")
    errors: list[float] = []
    for ranks in sorted({row["ranks"] for row in steps}):
        seen = [
            Observation(ranks, int(1e6 * row["raw_mb"]), parse_bandwidth(row["rate"]), row["all_reduce_s"])
            for row in rows
            if "raw_mb" in row and row["ranks"] == ranks
        ]
        link = Link(1e9, arguments.latency)
        if seen:
            link = calibrate_link(link, seen).applied(link)
        here = [row for row in steps if row["ranks"] == ranks]
        for rate in dict.fromkeys(row["rate"] for row in here):
            at = Link(**{**link.__dict__, "bits_per_second": parse_bandwidth(rate)})
            measured = {row["hook"].split(":")[-1]: row for row in here if row["rate"] == rate}
            for name, row in measured.items():
                seconds = row["step_s" if arguments.median else "step_min_s"]
                compute = row["compute_s" if arguments.median else "compute_min_s"]
                plan = plans.get(name) or next(iter(plans.values()))
                timed = [r["compress"] for r in rows if "compress" in r and (r["ranks"], r["hook"]) == (ranks, name)]
                codec = CodecTime(median(timed), ranks, True, "the measured steps") if timed else None
                profile = Profile(compute, "measured", codec)
                network = Network([at], [ranks], profile, arguments.cores / ranks, arguments.bucket_cap_mb)
                pair = forecast(plan, network).nodes[0].links[0]
                predicted = (pair.dense if name == "none" else pair.compressed).seconds
                off = predicted / seconds - 1
                errors.append(abs(off))
                print(f"{ranks:>5} {rate:>9} {name:>10} {seconds:8.3f}s {predicted:8.3f}s {100 * off:+6.1f} %")
    within = sum(error <= 0.15 for error in errors)
    print(f"{within} of {len(errors)} within 15 %; mean {100 * sum(errors) / len(errors):.1f} %")


if __name__ == "__main__":
    main()
