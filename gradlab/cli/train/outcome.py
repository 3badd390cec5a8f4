"""What the ranks of a run measured, and the run's report made of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from gradlab.capture import RecorderReport
from gradlab.codec.measures import LayerErrors, add_errors, relative
from gradlab.datasets.metric import ACCURACY, LogitMetric
from gradlab.runtime.engine.statistics import StepRecord


@dataclass
class RankOutcome:
    """One rank's measurements, per step. scores: (step, the workload's metric), kept by rank 0."""

    step_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    scores: list[tuple[int, float]] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    recorder: RecorderReport | None = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def run_report(ranks: Sequence[dict[str, Any]], dense_payload_bytes: int, metric: LogitMetric) -> dict[str, Any]:
    """The report of a run from every rank's `RankOutcome` as JSON.

    Times are medians over the compressed steps (all steps, if none was compressed), mean over ranks, in seconds:
    compute is the median step less the median wait for gradients; compress and communicate are the worker's and
    overlap with it.
    Errors are sqrt(sum ||asked - own||^2 / sum ||asked||^2) over ranks and compressed layers.
    """
    losses = [fmean(step) for step in zip(*(rank["losses"] for rank in ranks), strict=True)]
    scores = ranks[0]["scores"]
    tail = losses[-10:]
    report: dict[str, Any] = {
        "losses": losses,
        "final_loss": fmean(tail) if tail else None,
        "metric": metric.to_json(),
        "scores": scores,
        "final_score": scores[-1][1] if scores else None,
        "recorded": [rank["recorder"] for rank in ranks if rank["recorder"]],
    }
    if metric is ACCURACY:  # as the first version called them
        report |= {"accuracies": scores, "final_accuracy": report["final_score"]}
    records = [rank["records"] for rank in ranks]
    if not records[0]:
        return {**report, "step_seconds": fmean(median(rank["step_seconds"]) for rank in ranks)}
    return {**report, **_measured(ranks, records, dense_payload_bytes)}


def _measured(
    ranks: Sequence[dict[str, Any]], records: list[list[dict[str, Any]]], dense_payload_bytes: int
) -> dict[str, Any]:
    compressed = [i for i, record in enumerate(records[0]) if record["compressing"]]
    chosen = compressed or list(range(len(records[0])))
    payload = [fmean(row[i]["payload_bytes"] for i in chosen) for row in records]
    wire = [fmean(row[i]["wire_bytes"] for i in chosen) for row in records]
    steps = [[rank["step_seconds"][i] for i in chosen] for rank in ranks]
    waits = [[row[i]["wait_seconds"] for i in chosen] for row in records]
    every = [[record["payload_bytes"] for record in row] for row in records]
    return {
        "warmup_steps": chosen[0] if compressed else 0,
        "step_seconds": fmean(median(row) for row in steps),
        "time": {
            "compute": fmean(median(row) for row in steps) - fmean(median(row) for row in waits),
            "compress": fmean(median(row[i]["compress_seconds"] for i in chosen) for row in records),
            "communicate": fmean(median(row[i]["communicate_seconds"] for i in chosen) for row in records),
            "wait": fmean(median(row) for row in waits),
        },
        "payload_bytes_per_step": {"mean": fmean(payload), "max": max(payload)},
        "wire_bytes_per_step": {"mean": fmean(wire), "max": max(wire)},
        "compression_ratio": dense_payload_bytes / fmean(payload),
        "compression_ratio_whole_run": dense_payload_bytes / fmean(fmean(row) for row in every),
        "non_finite_steps": sum(not record["finite"] for record in records[0]),
        **_errors(records, compressed),
    }


def _errors(records: list[list[dict[str, Any]]], compressed: list[int]) -> dict[str, Any]:
    layers: LayerErrors = {}
    steps, values = [], []
    for i in compressed:
        here: LayerErrors = {}
        for row in records:
            add_errors(here, row[i]["errors"])
        add_errors(layers, here)
        steps.append(records[0][i]["step"])
        values.append(relative(*(sum(column) for column in zip(*here.values(), strict=True))))
    return {
        "errors": {"steps": steps, "relative": values},
        "layer_errors": {name: relative(*pair) for name, pair in layers.items()},
    }
