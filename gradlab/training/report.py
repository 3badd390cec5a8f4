"""Measurements of the ranks of a run, and the run's report: plain JSON, as `gradlab train --out` writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from gradlab.capture import RecorderReport
from gradlab.codec.measures import LayerErrors, add_errors, relative
from gradlab.datasets import Recipe
from gradlab.metric import Metric
from gradlab.plan import Plan
from gradlab.runtime.engine.statistics import StepRecord
from gradlab.saving import Saving
from gradlab.training.settings import TrainSettings

Report = dict[str, Any]


@dataclass
class RankOutcome:
    """One rank's measurements per step: times, losses, scores (of rank 0), and what engine and recorder counted."""

    step_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    scores: list[tuple[int, float]] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    recorder: RecorderReport | None = None

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RankOutcome:
        """Read the fields that came from another rank."""
        records = [StepRecord(**record) for record in value["records"]]
        recorder = RecorderReport(**value["recorder"]) if value["recorder"] else None
        return cls(**{**value, "records": records, "recorder": recorder})


def header(settings: TrainSettings, recipe: Recipe, dense_payload_bytes: int, plan: Plan | None) -> Report:
    """Describe a run before anything is measured. Sizes are bytes per rank and step."""
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


def measured(ranks: Sequence[RankOutcome], dense_payload_bytes: int, metric: Metric) -> Report:
    """Summarise every rank's outcome. Numbers that are not finite stay.

    Times are medians over the compressed steps (all steps, if none was compressed), mean over ranks, in seconds.
    Compute is the median step less the median wait for gradients. Compress and communicate are the worker's and
    overlap with it.
    Errors are sqrt(sum ||x - c||^2 / sum ||x||^2) over ranks and compressed layers, of compressor inputs x and decoded
    contributions c.
    """
    losses = [fmean(step) for step in zip(*(rank.losses for rank in ranks), strict=True)]
    scores = ranks[0].scores
    compressed = [i for i, record in enumerate(ranks[0].records) if record.compressing]
    chosen = compressed or list(range(len(ranks[0].step_seconds)))
    report: Report = {
        "losses": losses,
        "final_loss": fmean(losses[-10:]) if losses else None,
        "metric": metric.to_json(),
        "scores": scores,
        "final_score": scores[-1][1] if scores else None,
        "recorded": [asdict(rank.recorder) for rank in ranks if rank.recorder],
        "step_seconds": fmean(median(rank.step_seconds[i] for i in chosen) for rank in ranks),
    }
    if not ranks[0].records:
        return report
    records = [[rank.records[i] for i in chosen] for rank in ranks]
    return {
        **report,
        "warmup_steps": compressed[0] if compressed else 0,
        "time": _times(records, report["step_seconds"]),
        **_bytes(ranks, records, dense_payload_bytes),
        "non_finite_steps": sum(not record.finite for record in ranks[0].records),
        **_errors(records if compressed else []),
    }


def _times(records: Sequence[Sequence[StepRecord]], step_seconds: float) -> dict[str, float]:
    compress, communicate, wait = (
        fmean(median(getattr(record, f"{part}_seconds") for record in row) for row in records)
        for part in ("compress", "communicate", "wait")
    )
    return {"compute": step_seconds - wait, "compress": compress, "communicate": communicate, "wait": wait}


def _bytes(
    ranks: Sequence[RankOutcome], records: Sequence[Sequence[StepRecord]], dense_payload_bytes: int
) -> dict[str, Any]:
    """Means over steps of payload and wire bytes, and both ratios, of the chosen records and of the whole run."""
    payload = [fmean(record.payload_bytes for record in row) for row in records]
    wire = [fmean(record.wire_bytes for record in row) for row in records]
    all_steps = fmean(fmean(record.wire_bytes for record in rank.records) for rank in ranks)
    saving, whole_run = (Saving.of_sent(sent, dense_payload_bytes, len(ranks)) for sent in (fmean(wire), all_steps))
    return {
        "payload_bytes_per_step": {"mean": fmean(payload), "max": max(payload)},
        "wire_bytes_per_step": {"mean": fmean(wire), "max": max(wire)},
        "compression_ratio": saving.ratio,
        "ratio_to_16_bits": saving.ratio_to_16_bits,
        "compression_ratio_whole_run": whole_run.ratio,
        "ratio_to_16_bits_whole_run": whole_run.ratio_to_16_bits,
    }


def _errors(records: Sequence[Sequence[StepRecord]]) -> dict[str, Any]:
    """Relative errors by compressed step, and by layer."""
    layers: LayerErrors = {}
    steps, values = [], []
    for ranks in zip(*records, strict=True):
        here: LayerErrors = {}
        for record in ranks:
            add_errors(here, record.errors)
        add_errors(layers, here)
        steps.append(ranks[0].step)
        values.append(relative(*(sum(column) for column in zip(*here.values(), strict=True))))
    by_layer = {name: relative(*pair) for name, pair in layers.items()}
    return {"errors": {"steps": steps, "relative": values}, "layer_errors": by_layer}
