"""FSDP2's reduce-scatter by a plan: what a rank sends to the owners of its node's shards is compressed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradlab.codec import Tensors
from gradlab.codec.measures import is_finite
from gradlab.codec.wrapper import resize
from gradlab.ddp.groups import part_of
from gradlab.ddp.sharded_units import Shard, Unit, other_parts
from gradlab.ddp.topology import Topology
from gradlab.errors import GradlabError
from gradlab.executor import PlanRun, RunSettings, Step
from gradlab.executor.reduce_scatter import measure_parts, one_way, reduce_scatter_dense, reduce_scatter_group
from gradlab.executor.rules import Finding
from gradlab.executor.watch import GroupMeasures, RankWatch
from gradlab.plan import FINITE_FLAG_BYTES, Plan
from gradlab.plan.shards import shard_plan
from gradlab.runtime import checkpoint
from gradlab.runtime.checks import check
from gradlab.runtime.engine.device import HostDevice
from gradlab.runtime.engine.driver import StepDriver
from gradlab.runtime.engine.options import RunOptions, Surroundings
from gradlab.runtime.engine.statistics import Place
from gradlab.runtime.network.communicator import Communicator
from gradlab.runtime.timeline import profiled


class Resumption(NamedTuple):
    """State of one shard's run to go on from: states by group, the next step's number, and learning rates by layer."""

    states: dict[str, Tensors]
    iteration: int
    learning_rates: dict[str, float]


class ShardReduction:
    """The reduce-scatters of one model's units.

    plan: plan of the padded shards, of one shape on all ranks of the node; `whole` is that of whole layers.
    runs: runs of the plan, one per shard of the node; their states are this rank's residuals of the shards.
    finite: whether this rank's gradients were finite in the step in progress.
    last: bytes of the last step on this rank, contributed and sent.
    measure_every: steps between those in which the rules look at residuals; 0: none.
    """

    def __init__(
        self, whole: Plan, plan: Plan, communicator: Communicator, settings: RunSettings, measure_every: int
    ) -> None:
        self.whole, self.plan, self.communicator = whole, plan, communicator
        self.mine, count = communicator.rank, communicator.world_size
        codecs = {group.name: plan.build(group, settings.device) for group in plan.compressed_groups}
        self.runs = [
            PlanRun(plan, self.mine, count if place == self.mine else 1, settings, codecs=codecs)
            for place in range(count)
        ]
        self.last = (0, 0)
        self._steps: list[Step] = []
        self.finite = True
        self._watch = RankWatch(plan, codecs, settings.plain_sgd)
        self._measure_every = measure_every
        self._measured: dict[str, GroupMeasures] = {}

    def report(self) -> dict[str, Any]:
        """Say what the last step's reduce-scatters took on this rank, and what the plan forecasts, in bytes: what it
        contributes to all shards' owners in a compressed step of float32."""
        of_shard = self.plan.payload_bytes(1)  # every part is gathered in one round, whatever the number of ranks
        forecast = len(self.runs) * (of_shard - FINITE_FLAG_BYTES * bool(self.plan.compressed_groups))
        return {"payload_bytes": self.last[0], "wire_bytes": self.last[1], "forecast_payload_bytes": forecast}

    def begin(self, rates: Mapping[str, float], scale: float) -> None:
        """Begin a step, with learning rates by layer name and the loss scaler's factor."""
        self._steps = [run.begin(rates, scale) for run in self.runs]
        self.finite, self._measured = True, {}

    def reduce(
        self, unit: Unit, output: torch.Tensor, flat: torch.Tensor, times: float, frozen: Mapping[str, Shard]
    ) -> None:
        """Reduce `flat` (ranks x elements,) into `output` (elements,): the mean of all ranks, times a number. frozen:
        shards without a gradient whose groups are complete with zeros."""
        rows = flat.view(len(self.runs), -1)
        self.finite = self.finite and is_finite(flat)
        zeros = {name: flat.new_zeros(shard.padded_shape) for name, shard in frozen.items()}
        parts = [unit.padded_gradients(row) | zeros for row in rows]
        own = self._steps[self.mine]
        complete = [step.add(part) for step, part in zip(self._steps, parts, strict=True)][self.mine]
        active = [one for one in complete if one in own.active]
        dense = [{name: one for name, one in part.items() if not own.is_active(name)} for part in parts]
        result = self._exchange(active, dense)
        for name, target in unit.padded_gradients(output).items():
            target.copy_(result[name] if times == 1 else result[name] * times)

    def _exchange(self, groups: list[str], dense: list[Tensors]) -> Tensors:
        """All of a unit's messages in one collective."""
        coroutines: list[Any] = [self._of_group(group) for group in groups]
        if dense[self.mine]:
            coroutines.append(reduce_scatter_dense(dense, self.mine))
        with profiled("encode"):
            asked = [next(coroutine) for coroutine in coroutines]
        answers = iter(self.communicator.issue([request for requests in asked for request in requests]).answers())
        result: Tensors = {}
        for coroutine, requests in zip(coroutines, asked, strict=True):
            try:
                with profiled("decode"):
                    coroutine.send(tuple(next(answers) for _ in requests))
            except StopIteration as stop:
                result |= stop.value
        return result

    def _of_group(self, group: str) -> Any:
        """One group's codec on all shards; its mean for this rank's."""
        done = yield from reduce_scatter_group(
            self.runs[self.mine].codecs[group],
            [step.batch(group) for step in self._steps],
            [run.states.get(group, {}) for run in self.runs],
            [replace(step.context, group=f"{group} to {place}") for place, step in enumerate(self._steps)],
            self.mine,
            self._steps[self.mine].context.training.loss_scale,
        )
        own = self._steps[self.mine]
        for step, result in zip(self._steps, done, strict=True):
            step.staged[group] = result.state
        if self._measure_every and self._compressed_steps % self._measure_every == 0:
            codec, parts = self.runs[self.mine].codecs[group], [step.batch(group) for step in self._steps]
            self._measured[group] = measure_parts(codec, done, parts, own.context.training.loss_scale)
        return done[self.mine].mean

    @property
    def _compressed_steps(self) -> int:
        return self.runs[self.mine].iteration - self.plan.schedule.warmup_steps

    def findings(self) -> list[Finding]:
        """Findings of the rules on this rank in the step in progress, all of whose gradients were finite."""
        own = self._steps[self.mine]
        found = self._watch.see(
            own.context.iteration, self._compressed_steps + 1, self._measured, own.context.training.learning_rate
        )
        return [replace(one, group=f"{one.group} in the reduce-scatter") for one in found]

    def end(self, finite: bool) -> None:
        """End the step. finite: whether all gradients and results of all ranks were."""
        for run, step in zip(self.runs, self._steps, strict=True):
            step.finite = finite
            run.end(step)
        self._steps = []
        self.last = self.communicator.take_counts()

    def state_dict(self) -> dict[str, Any]:
        """Collect this rank's residuals, one entry per shard of the node."""
        identity = {"plan": self.whole.digest, "shards": len(self.runs)}
        return {**identity, "parts": [checkpoint.save(run, {}) for run in self.runs]}

    def resumptions(self, saved: Sequence[Any], place: tuple[int, int, str] | None = None) -> list[Resumption]:
        """Check what `state_dict` gave, and work out how this rank goes on from it. Nothing is changed yet.

        saved: states of this rank; or, with `place`, of the same shards' rank on every old node, in their order.
        place: this rank's node, the number of nodes, and the policy for residuals.
        """
        for one in saved:
            checkpoint.compare(one, {"plan": self.whole.digest, "shards": len(self.runs)}, "inside nodes, ")
        parts = [one.get("parts") for one in saved]
        whole = (isinstance(of_rank, list) and len(of_rank) == len(self.runs) for of_rank in parts)
        if not all(whole) or not all(isinstance(part, Mapping) for of_rank in parts for part in of_rank):
            raise GradlabError(f"checkpoint: inside nodes, expected the states of {len(self.runs)} shards")
        found = [
            _resumption(run, of_shard, place) for run, of_shard in zip(self.runs, zip(*parts, strict=True), strict=True)
        ]
        if len({one.iteration for one in found}) > 1:
            raise GradlabError(f"checkpoint: inside nodes, iterations {[one.iteration for one in found]}, expected one")
        return found

    def resume(self, found: Sequence[Resumption], device: HostDevice) -> None:
        """Go on from `resumptions`, with the residuals on this device."""
        for run, one in zip(self.runs, found, strict=True):
            run.go_on_from(checkpoint.moved(run, one.states, device), one.iteration, dict(one.learning_rates))


def _resumption(run: PlanRun, parts: Sequence[Any], place: tuple[int, int, str] | None) -> Resumption:
    """How a rank's run of one shard goes on from those of the same rank and shard on all old nodes."""
    checkpoint.require_together(parts, {}, "inside nodes, ")
    dealt = {
        group: kept[0] if place is None else resize(run.codecs[group], kept, *place)
        for group, (_, kept) in checkpoint.states_by_node(run, parts).items()
    }
    rates = {name: float(rate) for name, rate in parts[0]["learning_rates"].items()}
    return Resumption(dealt, parts[0]["iteration"], rates)


class UnitReduceScatter:
    """FSDP's stand-in for a unit's reduce-scatter: calls `take` with unit, output, input, and the mean's factor."""

    def __init__(self, take: Any, unit: Unit) -> None:
        self._take, self._unit = take, unit

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Give FSDP memory for input and output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce. FSDP asks for nothing asynchronous here."""
        if op == dist.ReduceOp.AVG:
            times = 1.0
        elif op == dist.ReduceOp.SUM:
            times = group.size()
        elif op == dist.ReduceOp.PREMUL_SUM:  # FSDP's way to sum and divide
            times = group.size() / (self._unit.divisor or 1.0)
        else:
            raise GradlabError(f"FSDP asks for a reduce-scatter with {op}, expected the mean or the sum")
        self._take(self._unit, output_tensor, input_tensor, times)


@dataclass(frozen=True)
class Levels:
    """Runs between nodes and inside them.

    whole: the plan between nodes as it was given, of whole layers.
    shards: the same of this rank's shards.
    inside: the plan of the reduce-scatters, of whole layers; None where they are not compressed.
    inside_shards: the same of the padded shards.
    parameters: the plan of the all-gathers, of whole layers; None where they are not compressed.
    """

    whole: Plan
    shards: Plan
    inside: Plan | None = None
    inside_shards: Plan | None = None
    parameters: Plan | None = None


def levels_of(
    units: Sequence[Unit],
    shards: Mapping[str, Shard],
    plans: tuple[Plan, Plan | None],
    topology: Topology,
    options: RunOptions,
) -> Levels:
    """Check the plans of whole layers, between nodes and inside them, and cut them for a rank's shards by layer."""
    plan, inside = plans
    pairs = [(shard.layer, shard.parameter) for shard in shards.values()]
    unit_of = {shard.layer.name: unit.name for unit in units for shard in unit.shards}
    check(plan, pairs, len(topology.nodes), options)
    between = shard_plan(plan, {name: shard.shape for name, shard in shards.items()}, unit_of)
    if inside is None:
        return Levels(plan, between)
    check(inside, pairs, topology.local_ranks, options)
    inside = one_way(inside)
    padded = {name: shard.padded_shape for name, shard in shards.items()}
    return Levels(plan, between, inside, shard_plan(inside, padded, unit_of))


def shard_driver(
    units: Sequence[Unit],
    plan: Plan,
    mesh: tuple[dist.ProcessGroup, dist.ProcessGroup],
    topology: Topology,
    around: Surroundings,
    timeout: timedelta | None,
) -> StepDriver:
    """Make the driver of a plan of this rank's shards, between the ranks that hold the same ones (its mesh column)."""
    everyone, inside, between = (
        around.communicator(part_of(mesh, ranks, timeout, around.device.device), owned=True, averages=True)
        for ranks in ([rank for node in topology.nodes for rank in node], topology.inside, topology.between)
    )
    run = around.run(plan, topology.node, len(topology.nodes))

    def forecast(plan: Plan) -> float:
        grouped = {layer for group in plan.compressed_groups for layer in group.layers}
        whole = [unit for unit in units if grouped.isdisjoint(shard.layer.name for shard in unit.shards)]
        # A unit without a compressed layer is averaged as it lies, padding included; the order of units travels beside
        # the flag.
        flags = FINITE_FLAG_BYTES * bool(grouped)
        return plan.payload_bytes(len(topology.nodes)) + flags + sum(unit.padding for unit in whole)

    shards = [shard for unit in units for shard in unit.shards]
    carried = {one.layer.name: (one.parameter, one.numel, one.dtype.itemsize) for one in shards}  # as FSDP reduces it
    parts = other_parts(units)
    part = None if parts is None else (parts.rank(), parts.size())
    place = replace(Place.of(everyone, forecast, carried, topology), sharded=True, part=part)
    return StepDriver(run, between, around, place, everyone, inside)
