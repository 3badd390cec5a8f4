"""What the ranks of a run measured, and the run's report made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from gradlab.capture import RecorderReport
from gradlab.cli.train.settings import TrainSettings
from gradlab.codec.measures import LayerErrors, add_errors, relative
from gradlab.datasets import Recipe
from gradlab.datasets.metric import ACCURACY, LogitMetric
from gradlab.plan import Plan
from gradlab.runtime.engine.statistics import StepRecord


@dataclass
class RankOutcome:
    """One rank's measurements, per step.

    Attributes:
        step_seconds: time of each step.
        losses: of each step, on this rank's batch.
        scores: (step, the workload's metric), kept by rank 0.
        records: of each step, what the engine measured; empty for a run without compression.
        recorder: what a recorder wrote.
    """

    step_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    scores: list[tuple[int, float]] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    recorder: RecorderReport | None = None

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RankOutcome:
        """The outcome whose fields came from another rank as plain JSON."""
        recorder = value["recorder"]
        return cls(
            value["step_seconds"],
            value["losses"],
            value["scores"],
            [StepRecord(**record) for record in value["records"]],
            RecorderReport(**recorder) if recorder else None,
        )


def run_header(settings: TrainSettings, recipe: Recipe, dense_payload_bytes: int, plan: Plan | None) -> dict[str, Any]:
    """What a run's report says before anything was measured. Sizes are bytes per rank and step."""
    return {
        "name": settings.name,
        "workload": settings.workload,
        **({"emulated": True} if settings.emulate else {}),
        "world_size": settings.ranks,
        "steps": recipe.steps,
        "batch_size": recipe.batch_size,
        "seed": settings.seed,
        "dense_payload_bytes": dense_payload_bytes,
        "plan": plan.digest if plan else None,
        "forecast_payload_bytes": plan.payload_bytes(settings.ranks) if plan else dense_payload_bytes,
    }


def run_report(ranks: Sequence[RankOutcome], dense_payload_bytes: int, metric: LogitMetric) -> dict[str, Any]:
    """The measured part of a run's report, from every rank's outcome.

    Times are medians over the compressed steps (all steps, if none was compressed), mean over ranks, in seconds:
    compute is the median step less the median wait for gradients; compress and communicate are the worker's and
    overlap with it.
    Errors are sqrt(sum ||x - c||^2 / sum ||x||^2) over ranks and compressed layers, of compressor inputs x and decoded
    contributions c.
    """
    losses = [fmean(step) for step in zip(*(rank.losses for rank in ranks), strict=True)]
    scores = ranks[0].scores
    tail = losses[-10:]
    report: dict[str, Any] = {
        "losses": losses,
        "final_loss": fmean(tail) if tail else None,
        "metric": metric.to_json(),
        "scores": scores,
        "final_score": scores[-1][1] if scores else None,
        "recorded": [asdict(rank.recorder) for rank in ranks if rank.recorder],
    }
    if metric is ACCURACY:  # as the first version called them
        report |= {"accuracies": scores, "final_accuracy": report["final_score"]}
    if not ranks[0].records:
        return {**report, "step_seconds": fmean(median(rank.step_seconds) for rank in ranks)}
    return {**report, **_measured(ranks, dense_payload_bytes)}


def _measured(ranks: Sequence[RankOutcome], dense_payload_bytes: int) -> dict[str, Any]:
    compressed = [i for i, record in enumerate(ranks[0].records) if record.compressing]
    chosen = compressed or list(range(len(ranks[0].records)))
    records = [[rank.records[i] for i in chosen] for rank in ranks]
    payload = [fmean(record.payload_bytes for record in row) for row in records]
    wire = [fmean(record.wire_bytes for record in row) for row in records]
    step = fmean(median(rank.step_seconds[i] for i in chosen) for rank in ranks)
    wait = fmean(median(record.wait_seconds for record in row) for row in records)
    return {
        "warmup_steps": chosen[0] if compressed else 0,
        "step_seconds": step,
        "time": {
            "compute": step - wait,
            "compress": fmean(median(record.compress_seconds for record in row) for row in records),
            "communicate": fmean(median(record.communicate_seconds for record in row) for row in records),
            "wait": wait,
        },
        "payload_bytes_per_step": {"mean": fmean(payload), "max": max(payload)},
        "wire_bytes_per_step": {"mean": fmean(wire), "max": max(wire)},
        "compression_ratio": dense_payload_bytes / fmean(payload),
        "compression_ratio_whole_run": dense_payload_bytes
        / fmean(fmean(record.payload_bytes for record in rank.records) for rank in ranks),
        "non_finite_steps": sum(not record.finite for record in ranks[0].records),
        **_errors(records if compressed else []),
    }


def _errors(records: Sequence[Sequence[StepRecord]]) -> dict[str, Any]:
    """Errors by compressed step and by layer. records: per rank, of the compressed steps."""
    layers: LayerErrors = {}
    steps, values = [], []
    for ranks in zip(*records, strict=True):
        here: LayerErrors = {}
        for record in ranks:
            add_errors(here, record.errors)
        add_errors(layers, here)
        steps.append(ranks[0].step)
        values.append(relative(*(sum(column) for column in zip(*here.values(), strict=True))))
    return {
        "errors": {"steps": steps, "relative": values},
        "layer_errors": {name: relative(*pair) for name, pair in layers.items()},
    }
