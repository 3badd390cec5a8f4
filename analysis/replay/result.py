"""What a replay found, step by step, with its summary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from statistics import median
from typing import Any

from gradlab.codec.measures import LayerErrors, add_errors, relative
from gradlab.errors import GradlabError
from gradlab.executor.lockstep_plan import GroupCost
from gradlab.formatting import format_percent
from gradlab.jsonable import plain


@dataclass(frozen=True)
class ReplayStep:
    """One iteration. Errors are None while the plan is dense and where a gradient was not finite.

    contribution_error: sqrt(sum ||asked - own||^2 / sum ||asked||^2) over ranks and compressed layers, where asked is
    the gradient plus, under error feedback, the residual; aggregate_error: ||mean - true mean|| / ||true mean|| of this
    step's gradients; cosine: between these two; bytes per rank; codec_seconds: in the codecs' code, mean over ranks;
    unsent: sqrt(sum ||asked - own||^2 / sum ||gradient||^2), what waits under error feedback in gradients of this step;
    layers: the two sums of contribution_error, by layer; costs: by group; held: names of layers without a gradient on
    any rank, whose states stayed as they were.
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
    layers: LayerErrors = field(default_factory=dict)
    costs: Mapping[str, GroupCost] = field(default_factory=dict)
    held: frozenset[str] = frozenset()

    def to_json(self) -> dict[str, Any]:
        """The step as plain JSON, without its layers and groups: `Replay` sums them."""
        kept = [field.name for field in fields(self) if field.name not in ("layers", "costs", "held")]
        return {name: getattr(self, name) for name in kept}


@dataclass(frozen=True)
class Replay:
    """All steps of a replay.

    dense_payload_bytes, forecast_payload_bytes: per step, of the plan while dense and while compressing. fitted_on:
    iterations of this trace that the plan was fitted on; only later ones count as a prediction.
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

    def held_out(self, origin: Mapping[str, Any]) -> Replay:
        """The same replay, judged on iterations later than those that the plan was fitted on.

        origin: of the plan's artifact or fit. One that names no iterations, or another trace, changes nothing.

        Raises:
            GradlabError: for an origin whose "fitted_on" is not a list of iterations.
        """
        if origin.get("trace") != self.trace_digest or "fitted_on" not in origin:
            return self
        fitted = origin["fitted_on"]
        if not isinstance(fitted, Sequence) or not all(type(step) is int for step in fitted):
            raise GradlabError(f"origin: fitted_on = {str(fitted)[:80]}, expected a list of iterations")
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
    def layer_errors(self) -> dict[str, float]:
        """Contribution error by layer over the judged steps, energies summed."""
        total: LayerErrors = {}
        for step in self.judged:
            add_errors(total, step.layers)
        return {name: relative(*pair) for name, pair in total.items()}

    @property
    def group_costs(self) -> dict[str, GroupCost]:
        """What a compressed step takes by group: mean bytes, median seconds."""
        found = {}
        for name in dict.fromkeys(name for step in self.compressed for name in step.costs):
            costs = [step.costs[name] for step in self.compressed if name in step.costs]
            found[name] = GroupCost(
                _mean(cost.payload_bytes for cost in costs),
                _mean(cost.wire_bytes for cost in costs),
                median(cost.codec_seconds for cost in costs),
            )
        return found

    @property
    def residual_growth(self) -> float | None:
        """Median of `unsent` over the last quarter of the compressed steps over that of the quarter before it: above 1,
        what waits still grows. None for fewer than 8 steps, or if nothing waits."""
        waiting = [step.unsent for step in self.compressed if step.unsent is not None]
        quarter = len(waiting) // 4
        if quarter < 2:
            return None
        before, last = median(waiting[-2 * quarter : -quarter]), median(waiting[-quarter:])
        return last / before if before > 0 else None

    @property
    def warnings(self) -> list[str]:
        """What a reader must know before believing the figures, one line each."""
        return [*self._in_sample_warning(), *self._held_warning(), *self.remarks]

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
            f"({which}): it was held, as DDP does it; nothing was applied and what waits for it was kept."
        ]

    def _in_sample_warning(self) -> list[str]:
        if not self.in_sample:
            return []
        seen, later = median_errors(self.in_sample), median_errors(self.judged)
        line = (
            f"The plan was fitted on {len(self.in_sample)} of the compressed iterations; there, in-sample, the median "
            f"error is {format_percent(seen['contribution_error'])} of a rank, "
            f"{format_percent(seen['aggregate_error'])} of the mean. "
        )
        if not self.judged:
            return [line + "No later iteration was replayed: nothing is known about its error in training."]
        line += (
            f"Only the {len(self.judged)} later iterations are a prediction: "
            f"{format_percent(later['contribution_error'])} of a rank, {format_percent(later['aggregate_error'])} of "
            "the mean."
        )
        return [line]

    def summary(self) -> dict[str, Any]:
        """Plain JSON: median errors over the judged steps, and beside them over those fitted on ("in_sample", else
        None); mean bytes and median codec time over all compressed steps."""
        steps = self.compressed
        payload = _mean(step.payload_bytes_mean for step in steps)
        inside = self.in_sample
        return {
            "methods": list(self.methods),
            "steps": len(self.steps),
            "compressed_steps": len(steps),
            "judged_steps": len(self.judged),
            "held_steps": self.held_steps,
            "nonfinite_steps": [step.iteration for step in self.steps if not step.finite],
            **median_errors(self.judged),
            "in_sample": {"steps": len(inside), **median_errors(inside)} if inside else None,
            "payload_bytes_per_step": {"mean": payload, "max": max(step.payload_bytes_max for step in steps)},
            "wire_bytes_per_step": {
                "mean": _mean(step.wire_bytes_mean for step in steps),
                "max": max(step.wire_bytes_max for step in steps),
            },
            "dense_payload_bytes": self.dense_payload_bytes,
            "compression_ratio": self.dense_payload_bytes / payload if payload else None,
            "codec_seconds": _median(step.codec_seconds for step in steps),
            "unsent": _median(step.unsent for step in steps),
            "residual_growth": self.residual_growth,
            "warnings": self.warnings,
        }

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain JSON; errors that are infinite (something sent, nothing asked) become None."""
        found = {
            "plan": self.plan_digest,
            "trace": self.trace_digest,
            "world_size": self.world_size,
            "forecast_payload_bytes": self.forecast_payload_bytes,
            "fitted_on": list(self.fitted_on),
            "summary": self.summary(),
            "layer_errors": self.layer_errors,
            "groups": {name: asdict(cost) for name, cost in self.group_costs.items()},
            "steps": [step.to_json() for step in self.steps],
        }
        return dict(plain(found))


def median_errors(steps: Iterable[ReplayStep]) -> dict[str, float | None]:
    """Medians of a rank's error, the mean's error and the cosine; None where no step has them."""
    steps = list(steps)
    return {
        "contribution_error": _median(step.contribution_error for step in steps),
        "aggregate_error": _median(step.aggregate_error for step in steps),
        "cosine": _median(step.cosine for step in steps),
    }


def _mean(values: Iterable[float]) -> float:
    kept = list(values)
    return sum(kept) / len(kept)


def _median(values: Iterable[float | None]) -> float | None:
    kept = [value for value in values if value is not None]
    return median(kept) if kept else None
