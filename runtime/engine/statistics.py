"""What the engine saw: bytes, times and errors per step, and their summary."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from gradlab.codec.measures import LayerErrors, add_errors, relative

TIMES = ("compress_seconds", "encode_seconds", "decode_seconds", "communicate_seconds", "wait_seconds")


@dataclass
class StepRecord:
    """One synchronised step on this rank.

    payload_bytes, wire_bytes: see gradlab.collectives. compress_seconds: codec work in the worker thread, of which
    encode_seconds up to the groups' first requests and decode_seconds after answers came. communicate_seconds: time
    the worker stood waiting for the network. wait_seconds: time from the last bucket's arrival, when backward has
    nothing left to compute, to the last result. finite: whether all ranks' gradients were, so that the states were
    committed; non_finite_layers: those of this rank that were not; loss_scale: as it was on the gradients.

    synchronise_seconds: time from the first bucket's arrival to the last result.

    On measured steps alone: errors, per layer ||asked - own||^2 and ||asked||^2; residual_norms, per layer;
    group_payload_bytes and group_seconds (encode, decode), per group; bucket_payload_bytes, by the number of the bucket
    that completed a group.
    """

    step: int
    compressing: bool
    payload_bytes: int = 0
    wire_bytes: int = 0
    compress_seconds: float = 0.0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    communicate_seconds: float = 0.0
    wait_seconds: float = 0.0
    synchronise_seconds: float = 0.0
    finite: bool = True
    loss_scale: float = 1.0
    non_finite_layers: tuple[str, ...] = ()
    errors: LayerErrors = field(default_factory=dict)
    residual_norms: dict[str, float] = field(default_factory=dict)
    group_payload_bytes: dict[str, int] = field(default_factory=dict)
    group_seconds: dict[str, tuple[float, float]] = field(default_factory=dict)
    bucket_payload_bytes: dict[int, int] = field(default_factory=dict)


class Statistics:
    """The last `history` steps of this rank."""

    def __init__(self, history: int) -> None:
        self.steps: deque[StepRecord] = deque(maxlen=history)

    def add(self, record: StepRecord) -> None:
        """Keep a step; the oldest goes when there are too many."""
        self.steps.append(record)

    def summary(self) -> dict[str, Any]:
        """Plain JSON: means per step over the compressed steps kept (over all steps, if none was compressed)."""
        steps = list(self.steps)  # at once: the worker may add one meanwhile
        chosen = [record for record in steps if record.compressing] or steps
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
            **{name: fmean(getattr(record, name) for record in chosen) for name in TIMES},
            "non_finite_steps": sum(not r.finite for r in chosen),
            "relative_error_by_layer": {name: relative(*pair) for name, pair in errors.items()},
        }
