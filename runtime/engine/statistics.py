"""Bytes, times and errors of a run per step, and their summary; a rank's place in the run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
import torch

from gradlab.codec.measures import LayerErrors, add_errors, relative
from gradlab.ddp.topology import Topology
from gradlab.jsonable import Jsonable
from gradlab.plan import Plan
from gradlab.runtime.network.communicator import Communicator
from gradlab.saving import Saving, bytes_in_16_bits

TIMES = (
    "compress_seconds",
    "encode_seconds",
    "decode_seconds",
    "communicate_seconds",
    "inside_seconds",
    "wait_seconds",
)


@dataclass(frozen=True)
class Place:
    """A rank's place and its bytes: all of the model's, or between nodes those of the part that it owns.

    forecast: the bytes that it contributes per compressed step, by the plan as it is now.
    dense_payload_bytes: bytes of its gradients, uncompressed.
    half_payload_bytes: bytes of them in plain 16-bit reduction.
    topology: its node and local rank; None where every rank stands for itself.
    sharded: whether the ranks of a node hold shards of every layer, and share out no whole ones.
    relay_below: bytes of an all-to-all's largest part below which it goes in two hops. 0: never.
    part: which part it holds of the layers that tensor parallelism has cut, and of how many; None: whole layers.
    """

    rank: int
    world_size: int
    forecast: Callable[[Plan], float]
    dense_payload_bytes: int
    half_payload_bytes: int
    topology: Topology | None = None
    sharded: bool = False
    relay_below: int = 0
    part: tuple[int, int] | None = None

    @classmethod
    def of(
        cls,
        everyone: Communicator,
        forecast: Callable[[Plan], float],
        carried: Mapping[str, tuple[torch.Tensor, int, int]],
        topology: Topology | None = None,
    ) -> Place:
        """Return the place of a rank that carries so many elements of each parameter's gradient, and bytes of each.

        forecast: as if gradients were float32. Dense layers travel in their own type.
        """
        dense = sum(size * count for _, count, size in carried.values())
        half = sum(bytes_in_16_bits(parameter, count) for parameter, count, _ in carried.values())

        def in_own_types(plan: Plan) -> float:
            own = [carried[layer.name] for layer in plan.dense_layers if layer.name in carried]
            return forecast(plan) - sum((4 - size) * count for _, count, size in own)

        return cls(everyone.rank, everyone.world_size, in_own_types, dense, half, topology)

    def identity(self, plan: Plan) -> dict[str, Any]:
        """Say for a checkpoint which rank of which run this is."""
        identity = {"plan": plan.digest, "rank": self.rank, "world_size": self.world_size, **self._part()}
        if (at := self.topology) is None:
            return identity
        ranks = "shards" if self.sharded else "local_ranks"  # the latter share out whole layers
        return {**identity, ranks: at.local_ranks, "node": at.node, "local_rank": at.local_rank}

    def _part(self) -> dict[str, int]:
        return {} if self.part is None else dict(zip(("part", "parts"), self.part, strict=True))

    @property
    def exchanging(self) -> int:
        """Number of ranks, or nodes, between which the plan exchanges."""
        return self.world_size if self.topology is None else len(self.topology.nodes)

    def saving(self, sent_bytes: float) -> Saving:
        """Compare the bytes that this rank sends in a step with a ring all-reduce between as many ranks, or nodes."""
        return Saving.of_sent(sent_bytes, self.dense_payload_bytes, self.exchanging, self.half_payload_bytes)

    def to_json(self) -> dict[str, Any]:
        """Write the rank's place; nodes, ranks of a node and parts count from 0."""
        written: dict[str, Any] = {"rank": self.rank, "world_size": self.world_size, **self._part()}
        if (at := self.topology) is not None:
            place = {"node": at.node, "nodes": len(at.nodes), "local_rank": at.local_rank}
            written["nodes"] = {**place, "local_ranks": at.local_ranks}
        return written


@dataclass
class StepRecord:
    """One synchronised step on this rank. The last seven fields are filled on measured steps alone."""

    step: int  # iteration
    compressing: bool  # whether the schedule compresses
    payload_bytes: int = 0  # see gradlab.collectives
    wire_bytes: int = 0  # see gradlab.collectives
    inside_wire_bytes: int = 0  # sent inside the node, where nodes exchange what their ranks have averaged
    compress_seconds: float = 0.0  # all codec work in the worker thread
    encode_seconds: float = 0.0  # of it, up to the groups' first requests
    decode_seconds: float = 0.0  # of it, after answers came
    communicate_seconds: float = 0.0  # in which the worker waited for the network
    inside_seconds: float = 0.0  # for averaging and spreading inside the node, waiting included
    wait_seconds: float = 0.0  # from the last bucket's arrival, when backward is over, to the last result
    finite: bool = True  # whether all ranks' gradients were, so that the states were committed
    loss_scale: float = 1.0  # of the gradients
    non_finite_layers: tuple[str, ...] = ()  # of this rank
    errors: LayerErrors = field(default_factory=dict)  # by layer ||x - c||^2, ||x||^2: compressor input, contribution
    residual_norms: dict[str, float] = field(default_factory=dict)  # by layer
    gradient_norms: dict[str, float] = field(default_factory=dict)  # by layer that has a residual, without loss scale
    group_payload_bytes: dict[str, int] = field(default_factory=dict)  # by group
    group_seconds: dict[str, tuple[float, float]] = field(default_factory=dict)  # by group (encode, decode)
    bucket_payload_bytes: dict[int, int] = field(default_factory=dict)  # by number of the bucket that completed a group
    squares: Sequence[float] = ()  # (3,), see `noise_squares`, over groups that have them


@dataclass(frozen=True)
class StepMeans(Jsonable):
    """Means over several steps. Bytes and seconds are means per step on this rank; see `StepRecord`."""

    compressing: bool  # whether these are compressed steps
    payload_bytes_per_step: float
    wire_bytes_per_step: float
    inside_wire_bytes_per_step: float
    compress_seconds: float
    encode_seconds: float
    decode_seconds: float
    communicate_seconds: float
    inside_seconds: float
    wait_seconds: float
    non_finite_steps: int  # how many of the steps
    relative_error_by_layer: dict[str, float]  # sqrt(sum ||x - c||^2 / sum ||x||^2) over the finite measured steps


@dataclass(frozen=True)
class Summary:
    """How many steps were summarised, and their means; None if there was no step."""

    steps: int
    means: StepMeans | None = None

    def to_json(self) -> dict[str, Any]:
        """Write the number of steps and, beside it, their means."""
        return {"steps": self.steps, **(self.means.to_json() if self.means else {})}


class Statistics:
    """The last `history` steps of this rank."""

    def __init__(self, history: int) -> None:
        self.steps: deque[StepRecord] = deque(maxlen=history)


def noise_scale(squares: Sequence[Sequence[float]], ranks: int) -> float | None:
    """Estimate the gradient noise scale tr(Sigma) / ||G||^2 in batches of one rank, or node, over several steps.

    McCandlish et al. (2018), appendix A.1: means over 1 and N batches have squared norms ||G||^2 + tr(Sigma) / batches.
    The mean that is known was compressed, as were the contributions to it. Compression errors that ranks make each for
    themselves are one more noise of both, which leaves ||G||^2; then ||g||^2 of the gradient gives the noise without
    them. The mean's own errors, of a second rounding or of servers, count as signal.

    squares: `gradlab.executor.watch.noise_squares` of steps.

    Returns:
        The scale, infinity where no signal is found; None for one rank, or no step.
    """
    if ranks < 2 or not squares:
        return None
    gradient, contribution, mean = np.mean(squares, axis=0).tolist()
    signal = (ranks * mean - contribution) / (ranks - 1)
    return max(0.0, gradient - signal) / signal if signal > 0 else math.inf


def summarize_steps(steps: Sequence[StepRecord]) -> Summary:
    """Average one rank's compressed steps; all steps, if none was compressed."""
    chosen = [record for record in steps if record.compressing] or list(steps)
    if not chosen:
        return Summary(0)
    errors: LayerErrors = {}
    for record in chosen:
        add_errors(errors, record.errors if record.finite else {})
    means = StepMeans(
        compressing=chosen[0].compressing,
        payload_bytes_per_step=fmean(record.payload_bytes for record in chosen),
        wire_bytes_per_step=fmean(record.wire_bytes for record in chosen),
        inside_wire_bytes_per_step=fmean(record.inside_wire_bytes for record in chosen),
        non_finite_steps=sum(not record.finite for record in chosen),
        relative_error_by_layer={name: relative(*pair) for name, pair in errors.items()},
        **{name: fmean(getattr(record, name) for record in chosen) for name in TIMES},
    )
    return Summary(len(chosen), means)
