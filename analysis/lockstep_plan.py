"""A plan run over given gradients, all ranks in this process: what the online engine does, step by step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from gradlab.codec import Context, Exchanged, Tensors, exchange_group
from gradlab.collectives import (
    Coroutine,
    LockstepResult,
    Mean,
    Request,
    payload_bytes,
    run_lockstep,
    wire_bytes,
)
from gradlab.plan import FINITE_FLAG_BYTES, Plan
from gradlab.replanning import ROOT, Replanner, adopted_state


@dataclass(frozen=True)
class GroupCost:
    """What one group took in one step, means over ranks: payload and wire bytes, seconds in its codec's code."""

    payload_bytes: float
    wire_bytes: float
    codec_seconds: float


@dataclass(frozen=True)
class StepResult:
    """One step of a plan on N ranks.

    exchanged: per group name, per rank; payload, wire: bytes per rank, dense layers and the finite flag included;
    codec_seconds: time in the codecs' own code, mean over ranks; finite: whether all gradients, on all ranks, and
    the results were; costs: by group name;
    compressing: whether the schedule compresses in this iteration.
    """

    iteration: int
    compressing: bool
    finite: bool
    exchanged: Mapping[str, Sequence[Exchanged]]
    payload: tuple[int, ...]
    wire: tuple[int, ...]
    codec_seconds: float
    costs: Mapping[str, GroupCost]


class LockstepPlan:
    """The plan's groups with the states of all ranks, carried from step to step.

    plain_sgd: whether the run's optimizer is SGD without momentum (see `Context`); states: per rank, per group name,
    the codec's state; replaced after a step whose gradients are finite everywhere; remarks: what to know of the steps
    so far. only: names of the groups to run, None for all; the bytes of layers of no group are counted with the first.
    """

    def __init__(
        self, plan: Plan, world_size: int, plain_sgd: bool = False, only: Collection[str] | None = None
    ) -> None:
        self.plan = plan  # as it is now: a refresh may have changed its settings
        self.world_size = world_size
        self._replanner = Replanner(plan, ROOT, world_size, beside=False) if plan.refresh is not None else None
        self.plain_sgd = plain_sgd
        # A plan of identity groups alone sends no finite flag; its groups run, so that the reference is measured too.
        groups = plan.compressed_groups or plan.groups
        self.groups = tuple(group for group in groups if only is None or group.name in only)
        self._elsewhere = frozenset(name for group in groups if group not in self.groups for name in group.layers)
        self._counts_rest = only is None or groups[0] in self.groups
        self.codecs = {group.name: plan.build(group) for group in self.groups}
        self.states: list[dict[str, Tensors]] = [{} for _ in range(world_size)]
        self._learning_rates: dict[str, float] = {}  # the last of a committed step that was not zero
        self.layers = tuple(name for group in self.groups for name in group.layers)
        self.remarks: list[str] = []

    @property
    def partial(self) -> bool:
        """Whether groups of the plan are left out."""
        return bool(self._elsewhere)

    @property
    def stateful(self) -> bool:
        """Whether what happened in earlier steps changes what the next one does; known after the first step."""
        return self._replanner is not None or any(state for rank in self.states for state in rank.values())

    def step(
        self,
        iteration: int,
        gradients: Sequence[Tensors],
        learning_rate: Mapping[str, float] | None = None,
        loss_scale: float = 1.0,
        parameters: Tensors | None = None,
        finite: bool = True,
    ) -> StepResult:
        """Run one iteration. gradients: per rank, by layer name, without the loss scale that the run had; layers of
        no group may be left out. parameters: for weight decay, which is left out where they are not known. finite:
        whether gradients that are not given are."""
        told = self._refresh(iteration)
        compressing = self.plan.schedule.compresses(iteration)
        finite = finite and all_finite(gradients)
        exchanged: dict[str, list[Exchanged]] = {}
        costs: dict[str, GroupCost] = {}
        context = Context(
            0,
            self.world_size,
            iteration,
            seed=self.plan.seed,
            learning_rate=learning_rate or {},
            previous_learning_rate={**(learning_rate or {}), **self._learning_rates},
            loss_scale=loss_scale,
            start=self.plan.schedule.warmup_steps,
            plain_sgd=self.plain_sgd,
            parameters=parameters or {},
        )
        running = [group for group in self.groups if compressing or self._acts_when_dense(group.name)]
        payload, wire = self._uncompressed_bytes({name for group in running for name in group.layers}, compressing)
        for group in running:
            seconds = [0.0] * self.world_size
            results = self._run(group.name, group.layers, gradients, replace(context, group=group.name), seconds)
            exchanged[group.name] = [result.value for result in results]
            costs[group.name] = _cost(results, seconds)
            payload = [total + result.payload_bytes for total, result in zip(payload, results, strict=True)]
            wire = [total + result.wire_bytes for total, result in zip(wire, results, strict=True)]
        for request in told:
            payload = [total + payload_bytes(request, rank) for rank, total in enumerate(payload)]
            wire = [total + wire_bytes(request, rank, self.world_size) for rank, total in enumerate(wire)]
        self._accumulate(gradients[ROOT], iteration)
        finite = finite and all_finite([done.mean for ranks in exchanged.values() for done in ranks[:1]])
        if finite:
            self._learning_rates |= {layer: rate for layer, rate in (learning_rate or {}).items() if rate}
            for rank, states in enumerate(self.states):
                states |= {name: ranks[rank].state for name, ranks in exchanged.items()}
        mean_seconds = sum(cost.codec_seconds for cost in costs.values())
        shown = exchanged if compressing else {}
        return StepResult(iteration, compressing, finite, shown, tuple(payload), tuple(wire), mean_seconds, costs)

    def _refresh(self, iteration: int) -> list[Request]:
        """Take a new choice over, if it is time: what the root tells the others."""
        request = self._replanner.due(iteration) if self._replanner is not None else None
        if self._replanner is None or request is None:
            return []
        if self._replanner.failure:
            self.remarks.append(
                f"At iteration {iteration} no plan could be chosen, the last one stays: {self._replanner.failure}"
            )
        self.plan = self._replanner.adopt(request.tensor)
        before, self.groups = {group.name: group for group in self.groups}, self.plan.compressed_groups
        for group in self.groups:
            if group != before[group.name]:
                old, new = self.codecs[group.name], self.plan.build(group)
                self.codecs[group.name] = new
                for states in self.states:
                    if group.name in states:
                        states[group.name] = adopted_state(new, old, states[group.name])
        return [request]

    def _accumulate(self, gradients: Tensors, iteration: int) -> None:
        if self._replanner is not None:
            self._replanner.add({name: gradients[name] for name in self.layers}, iteration)
            self._replanner.end(iteration)

    def _acts_when_dense(self, group: str) -> bool:
        return self.codecs[group].acts_when_dense(self.states[0].get(group, {}))

    def _run(
        self,
        group: str,
        layers: Sequence[str],
        gradients: Sequence[Tensors],
        context: Context,
        seconds: list[float],
    ) -> list[LockstepResult[Exchanged]]:
        dense = not self.plan.schedule.compresses(context.iteration)
        coroutines = []
        for rank in range(self.world_size):
            mine = {name: gradients[rank][name] for name in layers}
            state = self.states[rank].get(group, {})
            here = replace(context, rank=rank)
            coroutine = exchange_group(self.codecs[group], mine, state, here, dense=dense)
            coroutines.append(timed(coroutine, _adder(seconds, rank)))
        return run_lockstep(coroutines)

    def _uncompressed_bytes(self, exchanged: set[str], compressing: bool) -> tuple[list[int], list[int]]:
        """Payload and wire bytes per rank of all other layers, as one all-reduce, and of the finite flag."""
        if not self._counts_rest:
            return [0] * self.world_size, [0] * self.world_size
        elsewhere = exchanged | self._elsewhere if compressing else exchanged
        payload, wire = self._bytes_of(
            4 * sum(layer.numel for layer in self.plan.layers if layer.name not in elsewhere)
        )
        if self.plan.compressed_groups and (compressing or exchanged):
            flag_payload, flag_wire = self._bytes_of(FINITE_FLAG_BYTES)
            payload = [a + b for a, b in zip(payload, flag_payload, strict=True)]
            wire = [a + b for a, b in zip(wire, flag_wire, strict=True)]
        return payload, wire

    def _bytes_of(self, nbytes: int) -> tuple[list[int], list[int]]:
        request = Mean(torch.empty(nbytes // 4, dtype=torch.float32, device="meta"))
        ranks = range(self.world_size)
        return [payload_bytes(request, rank) for rank in ranks], [
            wire_bytes(request, rank, self.world_size) for rank in ranks
        ]


def all_finite(gradients: Sequence[Tensors]) -> bool:
    """Whether every element on every rank is finite."""
    return all(bool(gradient.isfinite().all()) for rank in gradients for gradient in rank.values())


def timed(coroutine: Coroutine[Exchanged], spent: Callable[[float], None]) -> Coroutine[Exchanged]:
    """The same coroutine; the seconds that its own code takes, not the executor's, go to `spent`."""
    answer = None
    while True:
        began = time.perf_counter()
        try:
            step = coroutine.send(answer)
        except StopIteration as stop:
            return stop.value
        finally:
            spent(time.perf_counter() - began)
        answer = yield step


def _cost(results: Sequence[LockstepResult[Exchanged]], seconds: Sequence[float]) -> GroupCost:
    ranks = len(results)
    payload, wire = (sum(getattr(r, name) for r in results) / ranks for name in ("payload_bytes", "wire_bytes"))
    return GroupCost(payload, wire, sum(seconds) / ranks)


def _adder(totals: list[float], position: int) -> Callable[[float], None]:
    def add(value: float) -> None:
        totals[position] += value

    return add


def learning_rates(plan: Plan, rate: float) -> dict[str, float]:
    """One rate for every layer, as a context has it; nothing where the rate is not known."""
    return {} if math.isnan(rate) else {layer.name: rate for layer in plan.layers}
