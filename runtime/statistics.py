"""What the engine saw: bytes, times and errors per step, and their summary."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from gradlab.codec import LayerErrors, add_errors, relative


@dataclass
class StepRecord:
    """One synchronised step on this rank.

    payload_bytes, wire_bytes: see gradlab.collectives. compress_seconds: codec work in the worker thread.
    communicate_seconds: time the worker stood waiting for the network. wait_seconds: time from the last bucket's
    arrival, when backward has nothing left to compute, to the last result. errors: per layer ||asked - own||^2 and
    ||asked||^2. finite: whether all ranks' gradients were, so that the states were committed.
    """

    step: int
    compressing: bool
    payload_bytes: int = 0
    wire_bytes: int = 0
    compress_seconds: float = 0.0
    communicate_seconds: float = 0.0
    wait_seconds: float = 0.0
    finite: bool = True
    errors: LayerErrors = field(default_factory=dict)


class Statistics:
    """The last `history` steps of this rank."""

    def __init__(self, history: int) -> None:
        self.steps: deque[StepRecord] = deque(maxlen=history)

    def add(self, record: StepRecord) -> None:
        """Keep a step; the oldest goes when there are too many."""
        self.steps.append(record)

    def summary(self) -> dict[str, Any]:
        """Plain JSON: means per step over the compressed steps kept (over all steps, if none was compressed)."""
        chosen = [record for record in self.steps if record.compressing] or list(self.steps)
        if not chosen:
            return {"steps": 0}
        errors: LayerErrors = {}
        for record in chosen:
            add_errors(errors, record.errors if record.finite else {})
        return {
            "steps": len(chosen),
            "compressing": chosen[0].compressing,
            "payload_bytes_per_step": fmean(r.payload_bytes for r in chosen),
            "wire_bytes_per_step": fmean(r.wire_bytes for r in chosen),
            "compress_seconds": fmean(r.compress_seconds for r in chosen),
            "communicate_seconds": fmean(r.communicate_seconds for r in chosen),
            "wait_seconds": fmean(r.wait_seconds for r in chosen),
            "non_finite_steps": sum(not r.finite for r in chosen),
            "relative_error_by_layer": {name: relative(*pair) for name, pair in errors.items()},
        }
