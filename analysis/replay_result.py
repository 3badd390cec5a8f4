"""What a replay found, step by step, with its summary."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from gradlab.analysis.plain import plain


@dataclass(frozen=True)
class ReplayStep:
    """One iteration. Errors are None while the plan is dense and where a gradient was not finite.

    contribution_error: sqrt(sum ||asked - own||^2 / sum ||asked||^2) over ranks and compressed layers, where asked is
    the gradient plus, under error feedback, the residual; aggregate_error: ||mean - true mean|| / ||true mean|| of this
    step's gradients; cosine: between these two; bytes per rank; codec_seconds: in the codecs' code, mean over ranks.
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


@dataclass(frozen=True)
class Replay:
    """All steps of a replay. layer_errors: contribution error by layer over all compressed steps (energies summed).

    dense_payload_bytes, forecast_payload_bytes: per step, of the plan while dense and while compressing.
    """

    steps: tuple[ReplayStep, ...]
    layer_errors: dict[str, float]
    world_size: int
    plan_digest: str
    trace_digest: str
    methods: tuple[str, ...]
    dense_payload_bytes: float
    forecast_payload_bytes: float
    warnings: tuple[str, ...] = field(default=())

    @property
    def compressed(self) -> tuple[ReplayStep, ...]:
        """The steps in which the codecs ran."""
        return tuple(step for step in self.steps if step.compressing)

    def summary(self) -> dict[str, Any]:
        """Medians of errors and codec time and means of bytes over the compressed steps, as plain JSON."""
        steps = self.compressed
        payload = _mean(step.payload_bytes_mean for step in steps)
        return {
            "methods": list(self.methods),
            "steps": len(self.steps),
            "compressed_steps": len(steps),
            "nonfinite_steps": [step.iteration for step in self.steps if not step.finite],
            "contribution_error": _median(step.contribution_error for step in steps),
            "aggregate_error": _median(step.aggregate_error for step in steps),
            "cosine": _median(step.cosine for step in steps),
            "payload_bytes_per_step": {"mean": payload, "max": max(step.payload_bytes_max for step in steps)},
            "wire_bytes_per_step": {
                "mean": _mean(step.wire_bytes_mean for step in steps),
                "max": max(step.wire_bytes_max for step in steps),
            },
            "dense_payload_bytes": self.dense_payload_bytes,
            "compression_ratio": self.dense_payload_bytes / payload if payload else None,
            "codec_seconds": _median(step.codec_seconds for step in steps),
            "warnings": list(self.warnings),
        }

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain JSON; errors that are infinite (something sent, nothing asked) become None."""
        found = {
            "plan": self.plan_digest,
            "trace": self.trace_digest,
            "world_size": self.world_size,
            "forecast_payload_bytes": self.forecast_payload_bytes,
            "summary": self.summary(),
            "layer_errors": self.layer_errors,
            "steps": [asdict(step) for step in self.steps],
        }
        return dict(plain(found))


def _mean(values: Iterable[float]) -> float:
    kept = list(values)
    return sum(kept) / len(kept)


def _median(values: Iterable[float | None]) -> float | None:
    kept = [value for value in values if value is not None]
    return median(kept) if kept else None
