"""What the ranks of a run measured, and the run's report made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from statistics import fmean, median
from typing import Any

from gradlab.capture import RecorderReport
from gradlab.cli.train.settings import TrainSettings
from gradlab.codec.measures import LayerErrors, add_errors, relative
from gradlab.datasets import Recipe
from gradlab.executor.rules import Finding
from gradlab.jsonable import plain
from gradlab.metric import Metric
from gradlab.plan import Plan
from gradlab.runtime.engine.statistics import StepRecord
from gradlab.saving import Saving

_USUAL: dict[str, Any] = {"emulated": False, "local_steps": 1}  # what a header leaves out


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


@dataclass(frozen=True)
class RunHeader:
    """What a run's report says before anything was measured. Sizes are bytes per rank and step.

    Attributes:
        name: of the run.
        workload: its id.
        emulated: whether one process played all ranks.
        world_size: number of ranks.
        steps: optimizer steps.
        batch_size: samples per rank and step.
        seed: of model, data order and augmentation.
        dense_payload_bytes: of all gradients, uncompressed.
        plan: its digest; None for a run without compression.
        forecast_payload_bytes: of a compressed step, by the plan.
        local_steps: of each rank between two exchanges. With more than one, times, bytes and errors are of outer steps.
    """

    name: str
    workload: str
    emulated: bool
    world_size: int
    steps: int
    batch_size: int
    seed: int
    dense_payload_bytes: int
    plan: str | None
    forecast_payload_bytes: float
    local_steps: int = 1

    def to_json(self) -> dict[str, Any]:
        """Write every field; `emulated` only where it holds, and `local_steps` where there are several."""
        return {name: value for name, value in asdict(self).items() if name not in _USUAL or value != _USUAL[name]}


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. The worker compresses and communicates, which overlaps with computing and waiting."""

    compute: float
    compress: float
    communicate: float
    wait: float


@dataclass(frozen=True)
class BytesPerStep:
    """The mean and the largest of the ranks' means over the compressed steps, in bytes."""

    mean: float
    max: float


@dataclass(frozen=True)
class StepErrors:
    """Relative contribution errors of all ranks and layers, by compressed step (iteration)."""

    steps: list[int]
    relative: list[float]


@dataclass(frozen=True)
class CompressionMeasures:
    """What was measured of a run with a plan.

    Attributes:
        warmup_steps: before the first compressed one.
        time: of a compressed step.
        payload_bytes_per_step: what a rank contributes.
        wire_bytes_per_step: what its network interface sends.
        compression_ratio: bytes that a ring all-reduce of the gradients sends over those sent, of the compressed steps.
        ratio_to_16_bits: the same, of that all-reduce in 16 bits.
        compression_ratio_whole_run, ratio_to_16_bits_whole_run: the same, of all steps.
        non_finite_steps: in which a rank's gradients were not finite.
        errors: by compressed step.
        layer_errors: relative contribution error by layer.
    """

    warmup_steps: int
    time: StepTime
    payload_bytes_per_step: BytesPerStep
    wire_bytes_per_step: BytesPerStep
    compression_ratio: float | None
    ratio_to_16_bits: float | None
    compression_ratio_whole_run: float | None
    ratio_to_16_bits_whole_run: float | None
    non_finite_steps: int
    errors: StepErrors
    layer_errors: dict[str, float]

    @property
    def saving(self) -> Saving:
        """Both ratios of the compressed steps."""
        return Saving(self.compression_ratio, self.ratio_to_16_bits)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CompressionMeasures:
        """Read what a report keeps of a run with a plan."""
        kept = {item.name: value[item.name] for item in fields(cls)}
        kept["time"] = StepTime(**kept["time"])
        kept["errors"] = StepErrors(**kept["errors"])
        for name in ("payload_bytes_per_step", "wire_bytes_per_step"):
            kept[name] = BytesPerStep(**kept[name])
        return cls(**kept)


@dataclass(frozen=True)
class RunMeasures:
    """The measured part of a run's report.

    Attributes:
        losses: of each step, mean over ranks.
        final_loss: mean of the last 10 steps; None if there was no step.
        metric: that the run is judged by.
        scores: (step, metric) while training.
        recorded: what recorders wrote, one per rank or one for all emulated nodes.
        step_seconds: median over the compressed steps (all steps, if none was compressed), mean over ranks.
        compression: None for a run without a plan.
    """

    losses: list[float]
    final_loss: float | None
    metric: Metric
    scores: list[tuple[int, float]]
    recorded: tuple[RecorderReport, ...]
    step_seconds: float
    compression: CompressionMeasures | None = None

    @property
    def final_score(self) -> float | None:
        """The metric after the last step; None if it was not measured."""
        return self.scores[-1][1] if self.scores else None

    def to_json(self) -> dict[str, Any]:
        """Write the measurements. Numbers that are not finite stay: they also travel from a rank to the launcher."""
        report = {
            "losses": self.losses,
            "final_loss": self.final_loss,
            "metric": self.metric.to_json(),
            "scores": self.scores,
            "final_score": self.final_score,
            "recorded": [asdict(recorder) for recorder in self.recorded],
        }
        if self.compression is None:
            return {**report, "step_seconds": self.step_seconds}
        measured = asdict(self.compression)
        return {
            **report,
            "warmup_steps": measured.pop("warmup_steps"),
            "step_seconds": self.step_seconds,
            **measured,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RunMeasures:
        """Read the measurements of a report."""
        return cls(
            losses=value["losses"],
            final_loss=value["final_loss"],
            metric=Metric(**value["metric"]),
            scores=value["scores"],
            recorded=tuple(RecorderReport(**recorder) for recorder in value["recorded"]),
            step_seconds=value["step_seconds"],
            compression=CompressionMeasures.from_json(value) if "time" in value else None,
        )


@dataclass(frozen=True)
class TrainReport:
    """The report of a run of the reference trainer.

    Attributes:
        header: what was set.
        measured: what was measured.
        residuals: what holds for the residuals under the optimizer; None if no plan keeps any.
        rules: what the rules that watch a compressed run found.
        chrome_trace: the spans of all ranks, as a chrome trace has them; None if none were asked for.
    """

    header: RunHeader
    measured: RunMeasures
    residuals: str | None = None
    rules: tuple[Finding, ...] = ()
    chrome_trace: list[dict[str, Any]] | None = None

    def to_json(self) -> dict[str, Any]:
        """Write the report: one level, as files and `gradlab train --json` have it."""
        return {
            **self.header.to_json(),
            **({"residuals": self.residuals, "rules": plain(self.rules)} if self.header.plan else {}),
            **({"chrome_trace": self.chrome_trace} if self.chrome_trace is not None else {}),
            **self.measured.to_json(),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TrainReport:
        """Read the report that rank 0 sent."""
        known = {item.name: value[item.name] for item in fields(RunHeader) if item.name not in _USUAL}
        header = RunHeader(**known, **{name: value.get(name, usual) for name, usual in _USUAL.items()})
        rules = tuple(map(Finding.from_json, value.get("rules", ())))
        return cls(header, RunMeasures.from_json(value), value.get("residuals"), rules, value.get("chrome_trace"))


def run_header(settings: TrainSettings, recipe: Recipe, dense_payload_bytes: int, plan: Plan | None) -> RunHeader:
    """Describe a run before anything is measured.

    Args:
        settings: of the run.
        recipe: the workload's, with the settings applied.
        dense_payload_bytes: of all gradients, uncompressed.
        plan: of the compression, if there is any.

    Returns:
        What was set. Sizes are bytes per rank and step.
    """
    return RunHeader(
        name=settings.name,
        workload=settings.workload,
        emulated=settings.emulate,
        world_size=settings.ranks,
        steps=recipe.steps,
        batch_size=recipe.batch_size,
        seed=settings.seed,
        dense_payload_bytes=dense_payload_bytes,
        plan=plan.digest if plan else None,
        forecast_payload_bytes=plan.payload_bytes(settings.ranks) if plan else dense_payload_bytes,
        local_steps=settings.local_steps,
    )


def run_report(ranks: Sequence[RankOutcome], dense_payload_bytes: int, metric: Metric) -> RunMeasures:
    """Summarise every rank's outcome.

    Times are medians over the compressed steps (all steps, if none was compressed), mean over ranks, in seconds.
    Compute is the median step less the median wait for gradients. Compress and communicate are the worker's and
    overlap with it.
    Errors are sqrt(sum ||x - c||^2 / sum ||x||^2) over ranks and compressed layers, of compressor inputs x and decoded
    contributions c.

    Args:
        ranks: outcomes in rank order.
        dense_payload_bytes: of all gradients, uncompressed.
        metric: that the run is judged by.

    Returns:
        The measured part of the run's report.
    """
    losses = [fmean(step) for step in zip(*(rank.losses for rank in ranks), strict=True)]
    tail = losses[-10:]
    chosen = _chosen_steps(ranks)
    return RunMeasures(
        losses=losses,
        final_loss=fmean(tail) if tail else None,
        metric=metric,
        scores=ranks[0].scores,
        recorded=tuple(rank.recorder for rank in ranks if rank.recorder),
        step_seconds=_median_step(ranks, chosen),
        compression=_measured(ranks, chosen, dense_payload_bytes) if ranks[0].records else None,
    )


def _chosen_steps(ranks: Sequence[RankOutcome]) -> list[int]:
    """The compressed steps; all of them, if none was compressed."""
    compressed = [i for i, record in enumerate(ranks[0].records) if record.compressing]
    return compressed or list(range(len(ranks[0].records or ranks[0].step_seconds)))


def _median_step(ranks: Sequence[RankOutcome], chosen: Sequence[int]) -> float:
    return fmean(median(rank.step_seconds[i] for i in chosen) for rank in ranks)


def _measured(ranks: Sequence[RankOutcome], chosen: Sequence[int], dense_payload_bytes: int) -> CompressionMeasures:
    records = [[rank.records[i] for i in chosen] for rank in ranks]
    compressed = records[0][0].compressing
    payload = [fmean(record.payload_bytes for record in row) for row in records]
    wire = [fmean(record.wire_bytes for record in row) for row in records]
    wait = fmean(median(record.wait_seconds for record in row) for row in records)
    errors, layer_errors = _errors(records if compressed else [])
    all_steps = fmean(fmean(record.wire_bytes for record in rank.records) for rank in ranks)
    saving, whole_run = (Saving.of_sent(sent, dense_payload_bytes, len(ranks)) for sent in (fmean(wire), all_steps))
    return CompressionMeasures(
        warmup_steps=chosen[0] if compressed else 0,
        time=StepTime(
            compute=_median_step(ranks, chosen) - wait,
            compress=fmean(median(record.compress_seconds for record in row) for row in records),
            communicate=fmean(median(record.communicate_seconds for record in row) for row in records),
            wait=wait,
        ),
        payload_bytes_per_step=BytesPerStep(fmean(payload), max(payload)),
        wire_bytes_per_step=BytesPerStep(fmean(wire), max(wire)),
        compression_ratio=saving.ratio,
        ratio_to_16_bits=saving.ratio_to_16_bits,
        compression_ratio_whole_run=whole_run.ratio,
        ratio_to_16_bits_whole_run=whole_run.ratio_to_16_bits,
        non_finite_steps=sum(not record.finite for record in ranks[0].records),
        errors=errors,
        layer_errors=layer_errors,
    )


def _errors(records: Sequence[Sequence[StepRecord]]) -> tuple[StepErrors, dict[str, float]]:
    """Errors by compressed step, and by layer. records: per rank, of the compressed steps."""
    layers: LayerErrors = {}
    steps, values = [], []
    for ranks in zip(*records, strict=True):
        here: LayerErrors = {}
        for record in ranks:
            add_errors(here, record.errors)
        add_errors(layers, here)
        steps.append(ranks[0].step)
        values.append(relative(*(sum(column) for column in zip(*here.values(), strict=True))))
    return StepErrors(steps, values), {name: relative(*pair) for name, pair in layers.items()}
