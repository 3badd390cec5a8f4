"""Training with local steps, dense and compressed, beside synchronous training: losses, bytes, and predicted times.

    python benchmarks/local_steps_trained.py --data tinyshakespeare.txt --rows ROWS.jsonl [--ways sync int4]
        [--seeds 0 1] [--local-steps 8 30 100] [--steps 800] [--step-seconds 0.02]
    python benchmarks/local_steps_trained.py --rows ROWS.jsonl --table

nanoGPT's CPU configuration (`text_chars`: 804,096 parameters, AdamW), 4 workers of 3 sequences, emulated in one process
by the code of `gradlab train --emulate 4 --local-steps H`. "sync" averages gradients in every step. The others take H
local steps and DiLoCo's outer step (SGD of rate 0.7, Nesterov momentum 0.9), but "SparseLoCo", whose outer optimizer is
SGD of rate 1 without momentum. Bytes are what a worker sends per local step (payload). Times are of a local step, with
its share of the exchange, from `forecast_local_steps` for machines on which computing takes so many seconds a step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rows import Row, add, has, read

from gradlab.analysis.forecast import Network, forecast
from gradlab.analysis.forecast.link import Link, parse_bandwidth
from gradlab.analysis.forecast.local_steps import forecast_local_steps
from gradlab.analysis.forecast.profile import Profile
from gradlab.artifact import Artifact
from gradlab.cli.train.emulate import emulate
from gradlab.cli.train.local_steps import emulate_local_steps
from gradlab.cli.train.settings import TrainSettings
from gradlab.datasets import get
from gradlab.layout import Layer, layers_of
from gradlab.plan import Plan, method_plan

WORKERS, SEQUENCES = 4, 3
RATES = ("50mbit", "1gbit", "25gbit")
WAYS: dict[str, Any] = {
    "DiLoCo": None,
    "int8": lambda layers: Plan.uniform(layers, "block_scaled", dtype="int8"),
    "int4": lambda layers: Plan.uniform(layers, "block_scaled", dtype="int4"),
    "ecsq 0.5 bits": lambda layers: Plan.uniform(layers, "ecsq", bits=0.5),
    "top-k 3 %": lambda layers: Plan.uniform(layers, "topk", density=0.03),
    "signs": lambda layers: Plan.uniform(layers, "sign"),
    "PowerSGD 2": lambda layers: Plan.uniform(layers, "powersgd", rank=2),
    "SparseLoCo": lambda layers: method_plan(layers, "SparseLoCo"),
}
PLAIN_OUTER = {"outer_learning_rate": 1.0, "outer_momentum": 0.0}


def layers() -> tuple[Layer, ...]:
    """The model's."""
    return layers_of(get("text_chars").model(0))


def plan_of(way: str) -> Plan:
    """What is exchanged goes through it."""
    return WAYS[way](layers())


def trained(way: str, every: int, seed: int, options: argparse.Namespace) -> Row:
    """Train one cell."""
    settings = TrainSettings(
        "text_chars", str(options.data), WORKERS, options.steps, SEQUENCES, seed=seed, emulate=True, local_steps=every
    )
    with tempfile.TemporaryDirectory() as folder:
        if way == "sync":  # recorded once, as emulated nodes are there to be recorded
            report = emulate(replace(settings, capture=f"{folder}/trace", every=10**6))
        elif WAYS[way] is None:
            report = emulate_local_steps(settings)
        else:
            Artifact(plan_of(way)).save(f"{folder}/plan.safetensors")
            outer = PLAIN_OUTER if way == "SparseLoCo" else {}
            report = emulate_local_steps(replace(settings, artifact=f"{folder}/plan.safetensors", **outer))
    done = report.measured.compression
    payload = report.header.dense_payload_bytes if done is None else done.payload_bytes_per_step.mean
    times = predicted(way, every, options.step_seconds)
    return {
        "score": report.measured.final_score,
        "loss": report.measured.final_loss,
        "payload": payload,
        "times": times,
    }


def table(rows: list[Row]) -> None:
    """Print validation losses by way and H, bytes, and times."""
    print(f"| way | H | validation loss | bytes per step | {' | '.join(f'{rate}, ms a step' for rate in RATES)} |")
    print("|---" * (4 + len(RATES)) + "|")
    keys = dict.fromkeys((row["way"], row["every"]) for row in rows)
    for way, every in keys:
        here = sorted((row for row in rows if (row["way"], row["every"]) == (way, every)), key=lambda row: row["seed"])
        losses = ", ".join(f"{row['score']:.3f}" for row in here)
        payload = statistics.fmean(row["payload"] for row in here) / every
        times = " | ".join(f"{1e3 * seconds:.1f}" for seconds in here[0]["times"])
        print(f"| {way} | {every} | {losses} | {payload:,.0f} | {times} |")


def predicted(way: str, every: int, step_seconds: float) -> list[float]:
    """A step's forecast seconds on every link."""
    links = [Link(parse_bandwidth(rate), 1e-4, 0.06) for rate in RATES]
    network = Network(links, (WORKERS,), Profile(step_seconds, "given"))
    dense = way in ("sync", "DiLoCo")
    plan = plan_of("int8" if dense else way)  # whose uncompressed exchange is asked for
    synchronous = forecast(plan, network)
    if way == "sync":
        return [pair.dense.seconds for _, pair in synchronous.comparisons]
    return [one.seconds(every, dense=dense) for one in forecast_local_steps(plan, network, synchronous)]


def main() -> None:
    """Train what is not kept yet, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--ways", nargs="+", default=["sync", *WAYS], choices=["sync", *WAYS])
    parser.add_argument("--local-steps", nargs="+", type=int, default=[8, 30, 100])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--step-seconds", type=float, default=0.02)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if not options.table:
        for seed in options.seeds:
            for way in options.ways:
                for every in [1] if way == "sync" else options.local_steps:
                    key: Row = {"way": way, "every": every, "seed": seed, "steps": options.steps}
                    if not has(read(options.rows), key):
                        add(options.rows, key | trained(way, every, seed, options))
    table(read(options.rows))


if __name__ == "__main__":
    main()
