"""The result of a replay: errors, bytes and time step by step, with a summary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from gradlab.analysis.replay.many_ranks import CosineAt, RankProducts, cosine_at
from gradlab.analysis.replay.windows import Window
from gradlab.codec.measures import LayerErrors, add_errors, relative
from gradlab.errors import GradlabError
from gradlab.executor.lockstep_plan import GroupCost
from gradlab.executor.rules import Finding, sentences
from gradlab.formatting import format_counted, format_percent
from gradlab.jsonable import Jsonable, plain
from gradlab.saving import Saving

# Steps of the windows that plans are judged by which apply gradients of earlier steps.
JUDGED_LENGTH = 4
# Judged steps below which a replay is said to be short.
_FEW = 32
# A recording that starts before so many times its own length is of the beginning of training.
_EARLY = 4


@dataclass(frozen=True)
class ReplayStep(Jsonable):
    """One iteration. Errors are None while the plan is dense and where a gradient was not finite.

    contribution_error: sqrt(sum ||x - C(x)||^2 / sum ||x||^2) over ranks and compressed layers, where x is the
    compressor input (the gradient, plus the residual under error feedback) and C(x) the decoded contribution;
    aggregate_error: ||mean - true mean|| / ||true mean|| of this step's gradients; cosine: between these two means;
    payload and wire bytes: per rank; codec_seconds, codec_wall_seconds: processor time and the clock's in the codecs'
    code, mean over ranks (`GroupCost`); unsent: residual norm over the gradients',
    sqrt(sum ||x - C(x)||^2 / sum ||gradient||^2); layers: the two sums of contribution_error, by layer; costs: by
    group; held: names of layers without a gradient on any rank, whose states stayed as they were.
    """

    iteration: int
    compressing: bool
    finite: bool
    contribution_error: float | None
    aggregate_error: float | None
    cosine: float | None
    payload_bytes_mean: float
    payload_bytes_max: int
    wire_bytes_mean: float
    wire_bytes_max: int
    codec_seconds: float
    unsent: float | None = None
    codec_wall_seconds: float = 0.0
    # Not written: `Replay` sums these over steps.
    layers: LayerErrors = field(default_factory=dict, metadata={"json": False})
    costs: Mapping[str, GroupCost] = field(default_factory=dict, metadata={"json": False})
    held: frozenset[str] = field(default=frozenset(), metadata={"json": False})


@dataclass(frozen=True)
class MedianErrors(Jsonable):
    """Medians over `steps` iterations of the errors and the cosine of `ReplayStep`; None where no step has them."""

    contribution_error: float | None
    aggregate_error: float | None
    cosine: float | None
    steps: int


@dataclass(frozen=True)
class WindowErrors(Jsonable):
    """Medians over windows of `length` successive compressed steps: of the applied means' sum with the true means'.

    windows: their number, at least 1. A single step is a window of 1.
    """

    length: int
    windows: int
    aggregate_error: float
    cosine: float


@dataclass(frozen=True)
class MeanAndMax(Jsonable):
    """Bytes per step: the mean over ranks and steps, and the most of a rank in a step."""

    mean: float
    max: int


@dataclass(frozen=True)
class ReplaySummary(MedianErrors):
    """Median errors over the judged steps; mean bytes and median seconds over all compressed steps.

    codec_seconds: processor seconds per step and rank; codec_seconds_range: the least and the most of a step;
    codec_wall_share: the clock's seconds in the codecs' code over the processor's, of all these steps: above 1 by what
    other work on the machine kept the processor from them. Every codec time of a report is one of these.

    steps, compressed_steps, judged_steps, held_steps: numbers of steps; nonfinite_steps: iterations; in_sample: medians
    over the steps that the plan was fitted on; compression_ratio: dense payload over payload; ratio_to_16_bits: the
    same, of the dense payload in 16 bits; windows: of every length that the judged steps hold once, the shortest first;
    memory: whether the plan applies gradients of earlier steps; judged_length, judged_cosine: what plans are judged by,
    see `Replay.judgement`; at_nodes: see `Replay.at_nodes`; caution: where the judged steps are few, or early; unsent:
    median; rules: what a run's rules (`gradlab.executor.rules`) would find in these gradients.
    """

    methods: tuple[str, ...]
    compressed_steps: int
    judged_steps: int
    held_steps: int
    nonfinite_steps: list[int]
    in_sample: MedianErrors | None
    payload_bytes_per_step: MeanAndMax
    wire_bytes_per_step: MeanAndMax
    dense_payload_bytes: float
    compression_ratio: float | None
    ratio_to_16_bits: float | None
    windows: tuple[WindowErrors, ...]
    memory: bool
    judged_length: int | None
    judged_cosine: float | None
    nodes: int | None
    at_nodes: CosineAt | None
    caution: str | None
    codec_seconds: float | None
    codec_seconds_range: tuple[float, float] | None
    codec_wall_share: float | None
    unsent: float | None
    residual_growth: float | None
    rules: tuple[Finding, ...]
    warnings: list[str]


@dataclass(frozen=True)
class Replay:
    """All steps of a replay.

    dense_payload_bytes, forecast_payload_bytes: per step, of the plan while dense and while compressing. fitted_on:
    iterations of this trace that the plan was fitted on; only later ones count as a prediction. windows: sums of
    several steps, see `gradlab.analysis.replay.windows`. memory: whether the plan applies gradients of earlier steps.
    nodes: number of ranks whose form of the plan was replayed, on `world_size` recorded ones. of_nodes: whether
    these are nodes' means. products: what they say of `nodes`, see `gradlab.analysis.replay.many_ranks`.
    """

    steps: tuple[ReplayStep, ...]
    world_size: int
    plan_digest: str
    trace_digest: str
    methods: tuple[str, ...]
    dense_payload_bytes: float
    forecast_payload_bytes: float
    remarks: tuple[str, ...] = ()
    fitted_on: tuple[int, ...] = ()
    rules: tuple[Finding, ...] = ()
    windows: tuple[Window, ...] = ()
    memory: bool = False
    nodes: int | None = None
    of_nodes: bool = False
    products: tuple[RankProducts, ...] = ()

    def held_out(self, provenance: Mapping[str, Any]) -> Replay:
        """The same replay, judged on iterations later than those that the plan was fitted on.

        provenance: metadata of the plan's artifact or fit. Without iterations, or of another trace, it changes nothing.

        Raises:
            GradlabError: if its "fitted_on" is not a list of iterations.
        """
        if provenance.get("trace") != self.trace_digest or "fitted_on" not in provenance:
            return self
        fitted = provenance["fitted_on"]
        if not isinstance(fitted, Sequence) or not all(type(step) is int for step in fitted):
            raise GradlabError(f"provenance: fitted_on = {str(fitted)[:80]}, expected a list of iterations")
        return replace(self, fitted_on=tuple(fitted))

    @property
    def compressed(self) -> tuple[ReplayStep, ...]:
        """The steps in which the codecs ran."""
        return tuple(step for step in self.steps if step.compressing)

    @property
    def judged(self) -> tuple[ReplayStep, ...]:
        """The compressed steps that count: all, or those after the last iteration that the plan was fitted on."""
        last = max(self.fitted_on, default=-1)
        return tuple(step for step in self.compressed if step.iteration > last)

    @property
    def in_sample(self) -> tuple[ReplayStep, ...]:
        """The compressed steps whose gradients the plan was fitted on."""
        fitted = set(self.fitted_on)
        return tuple(step for step in self.compressed if step.iteration in fitted)

    @property
    def window_errors(self) -> tuple[WindowErrors, ...]:
        """Errors and cosines of sums, by length of the window, over windows of judged steps alone."""
        last = max(self.fitted_on, default=-1)
        found: dict[int, list[tuple[float, float]]] = {}
        for step in self.judged:
            if step.aggregate_error is not None and step.cosine is not None:
                found.setdefault(1, []).append((step.aggregate_error, step.cosine))
        for window in self.windows:
            if window.first > last and window.error is not None and window.cosine is not None:
                found.setdefault(window.length, []).append((window.error, window.cosine))
        return tuple(
            WindowErrors(length, len(pairs), *(median(column) for column in zip(*pairs, strict=True)))
            for length, pairs in sorted(found.items())
        )

    @property
    def judgement(self) -> WindowErrors | None:
        """The errors that the plan is judged by: sums over windows if it applies gradients of earlier steps.

        The windows are of `JUDGED_LENGTH` steps, the length that went best with the loss on the tasks of
        docs/comparison.md, and there are two or more. Other plans are judged by single steps. None where no step has
        an error, or too few have one.
        """
        length, fewest = (JUDGED_LENGTH, 2) if self.memory else (1, 1)
        return next((one for one in self.window_errors if one.length == length and one.windows >= fewest), None)

    @property
    def at_nodes(self) -> CosineAt | None:
        """The cosine that plans are judged by, between `nodes` ranks, estimated from the recorded ones; None if these
        are as many, or too few."""
        last = max(self.fitted_on, default=-1)
        return cosine_at([window for window in self.products if window.first > last], self.nodes or self.world_size)

    @property
    def caution(self) -> str | None:
        """A caution about the judged steps: that they are few, or of the beginning of training."""
        steps = [step.iteration for step in self.judged]
        if not steps:
            return None
        first, last, count = steps[0], steps[-1], len(steps)
        span = f"iterations {first} to {last}"
        found = []
        if self.nodes not in (None, self.world_size):
            recorded = format_counted(self.world_size, f"recorded {'node' if self.of_nodes else 'rank'}")
            found.append(f"{recorded} stand for {self.nodes}")
        if count < _FEW:
            found.append(f"only {count} steps are judged ({span}), fewer than {_FEW}")
        if first < _EARLY * (last - first + 1):
            found.append(f"these steps are of the beginning of training ({span}), and errors grow later")
        return "; ".join(found) or None

    @property
    def layer_errors(self) -> dict[str, float]:
        """Contribution error by layer over the judged steps, energies summed."""
        total: LayerErrors = {}
        for step in self.judged:
            add_errors(total, step.layers)
        return {name: relative(*pair) for name, pair in total.items()}

    @property
    def group_costs(self) -> dict[str, GroupCost]:
        """The cost of a compressed step by group: mean bytes, median seconds."""
        by_group = {}
        for name in dict.fromkeys(name for step in self.compressed for name in step.costs):
            costs = [step.costs[name] for step in self.compressed if name in step.costs]
            by_group[name] = GroupCost(
                _mean(cost.payload_bytes for cost in costs),
                _mean(cost.wire_bytes for cost in costs),
                median(cost.codec_seconds for cost in costs),
                median(cost.codec_wall_seconds for cost in costs),
            )
        return by_group

    @property
    def residual_growth(self) -> float | None:
        """Median residual norm (`unsent`) of the last quarter of the compressed steps over that of the quarter before.

        Above 1 the residual still grows. None for fewer than 8 steps, or without a residual.
        """
        waiting = [step.unsent for step in self.compressed if step.unsent is not None]
        quarter = len(waiting) // 4
        if quarter < 2:
            return None
        before, last = median(waiting[-2 * quarter : -quarter]), median(waiting[-quarter:])
        return last / before if before > 0 else None

    @property
    def warnings(self) -> list[str]:
        """Limits of the figures' validity, one line each."""
        told = sentences(self.rules, self.world_size)
        return [*self._in_sample_warning(), *self._held_warning(), *self.remarks, *told]

    @property
    def held_steps(self) -> int:
        """Compressed steps in which some layer had no gradient on any rank, and was held."""
        return sum(bool(step.held) for step in self.compressed)

    def _held_warning(self) -> list[str]:
        if not self.held_steps:
            return []
        layers = sorted({layer for step in self.compressed for layer in step.held})
        which = layers[0] if len(layers) == 1 else f"{layers[0]} and {len(layers) - 1} more"
        return [
            f"In {self.held_steps} of {len(self.compressed)} compressed iterations a layer had no gradient on any rank "
            f"({which}): it was held, as DDP does it; no update was applied, and its state was kept."
        ]

    def _in_sample_warning(self) -> list[str]:
        if not self.in_sample:
            return []
        seen, later = median_errors(self.in_sample), median_errors(self.judged)
        line = (
            f"The plan was fitted on {len(self.in_sample)} of the compressed iterations; there, in-sample, the median "
            f"error is {format_percent(seen.contribution_error)} of a rank, "
            f"{format_percent(seen.aggregate_error)} of the mean. "
        )
        if not self.judged:
            return [line + "No later iteration was replayed: nothing is known about its error in training."]
        line += (
            f"Only the {len(self.judged)} later iterations are a prediction: "
            f"{format_percent(later.contribution_error)} of a rank, {format_percent(later.aggregate_error)} of "
            "the mean."
        )
        return [line]

    def summary(self) -> ReplaySummary:
        """The summary of all steps."""
        steps = self.compressed
        payload = _mean(step.payload_bytes_mean for step in steps)
        wire = _mean(step.wire_bytes_mean for step in steps)
        saving, judged = Saving.of_sent(wire, self.dense_payload_bytes, self.world_size), self.judgement
        return ReplaySummary(
            **{**vars(median_errors(self.judged)), "steps": len(self.steps)},
            methods=self.methods,
            compressed_steps=len(steps),
            judged_steps=len(self.judged),
            held_steps=self.held_steps,
            nonfinite_steps=[step.iteration for step in self.steps if not step.finite],
            in_sample=median_errors(self.in_sample) if self.in_sample else None,
            payload_bytes_per_step=MeanAndMax(payload, max(step.payload_bytes_max for step in steps)),
            wire_bytes_per_step=MeanAndMax(wire, max(step.wire_bytes_max for step in steps)),
            dense_payload_bytes=self.dense_payload_bytes,
            compression_ratio=saving.ratio,
            ratio_to_16_bits=saving.ratio_to_16_bits,
            windows=self.window_errors,
            memory=self.memory,
            judged_length=judged.length if judged else None,
            judged_cosine=judged.cosine if judged else None,
            nodes=self.nodes,
            at_nodes=self.at_nodes,
            caution=self.caution,
            codec_seconds=_median(step.codec_seconds for step in steps),
            codec_seconds_range=_range(step.codec_seconds for step in steps),
            codec_wall_share=_wall_share(steps),
            unsent=_median(step.unsent for step in steps),
            residual_growth=self.residual_growth,
            rules=self.rules,
            warnings=self.warnings,
        )

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain JSON; errors that are infinite (the compressor input was zero) become None."""
        parts = {
            "plan": self.plan_digest,
            "trace": self.trace_digest,
            "world_size": self.world_size,
            "forecast_payload_bytes": self.forecast_payload_bytes,
            "fitted_on": self.fitted_on,
            "summary": self.summary(),
            "layer_errors": self.layer_errors,
            "groups": self.group_costs,
            "windows": self.windows,
            "steps": self.steps,
        }
        return dict(plain(parts))


def median_errors(steps: Sequence[ReplayStep]) -> MedianErrors:
    """The medians of these steps."""
    return MedianErrors(
        _median(step.contribution_error for step in steps),
        _median(step.aggregate_error for step in steps),
        _median(step.cosine for step in steps),
        len(steps),
    )


def _mean(values: Iterable[float]) -> float:
    kept = list(values)
    return sum(kept) / len(kept)


def _median(values: Iterable[float | None]) -> float | None:
    kept = [value for value in values if value is not None]
    return median(kept) if kept else None


def _range(values: Iterable[float]) -> tuple[float, float] | None:
    known = list(values)
    return (min(known), max(known)) if known else None


def _wall_share(steps: Sequence[ReplayStep]) -> float | None:
    """The clock's seconds in the codecs' code over the processor's; None where no processor time was seen."""
    processor = sum(step.codec_seconds for step in steps)
    return sum(step.codec_wall_seconds for step in steps) / processor if processor > 0 else None
