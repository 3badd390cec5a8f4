"""Run a plan over given gradients, all ranks in this process: the same steps as online, driven by `run_lockstep`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from gradlab.codec import Codec, Exchanged, Tensors
from gradlab.collectives import (
    Coroutine,
    LockstepResult,
    Mean,
    payload_bytes,
    run_lockstep,
    wire_bytes,
)
from gradlab.collectives.lockstep import answered, sent_on
from gradlab.executor import rules
from gradlab.executor.rules import Finding
from gradlab.executor.step import PlanRun, RunSettings, Step
from gradlab.executor.watch import GroupMeasures, RankWatch, gradient_norms, measure, residual_norms
from gradlab.plan import FINITE_FLAG_BYTES, Group, Plan
from gradlab.plan.refresh import ROOT

Result = TypeVar("Result")


@dataclass(frozen=True)
class GroupCost:
    """The cost of one group in one step, means over ranks.

    payload_bytes, wire_bytes: bytes contributed and bytes sent.
    codec_seconds: processor seconds in its codec's code, of this process: other work on the machine is not counted.
    codec_wall_seconds: the clock's in the same code. On one thread they are longer only by what the processor was kept
        from it.
    """

    payload_bytes: float
    wire_bytes: float
    codec_seconds: float
    codec_wall_seconds: float


@dataclass(frozen=True)
class StepResult:
    """One step of a plan on N ranks.

    compressing: whether the schedule compresses in this iteration.
    finite: whether all gradients on all ranks were finite, and the results.
    exchanged: results by group name, one per rank. It is empty in a dense step. The mean of a held layer is zero.
    payload, wire: bytes by rank, dense layers and the ranks' agreement included.
    codec_seconds, codec_wall_seconds: times in the codecs' own code, mean over ranks, see `GroupCost`.
    costs: seconds and bytes by group name.
    held: names of the layers without a gradient on any rank, whose states stay as they are.
    learning_rate: rates by layer name, as far as it was known.
    """

    iteration: int
    compressing: bool
    finite: bool
    exchanged: Mapping[str, Sequence[Exchanged]]
    payload: tuple[int, ...]
    wire: tuple[int, ...]
    codec_seconds: float
    codec_wall_seconds: float
    costs: Mapping[str, GroupCost]
    held: frozenset[str] = frozenset()
    learning_rate: Mapping[str, float] = field(default_factory=dict)


class LockstepPlan:
    """A plan's runs on all ranks, carried from step to step.

    Attributes:
        runs: one `PlanRun` per rank.
        remarks: sentences on what happened in the steps so far, such as a refresh that failed.

    Args:
        plain_sgd: whether the run's optimizer is SGD without momentum (see `Context`).
        only: names of the groups to run; None: all. Bytes of layers of no group are counted where the first group is.
        hold_unused: whether a layer whose gradient is zero on all ranks is held, as the engine holds it under
            find_unused_parameters and static_graph.
    """

    def __init__(
        self,
        plan: Plan,
        world_size: int,
        plain_sgd: bool = False,
        only: Collection[str] | None = None,
        hold_unused: bool = False,
    ) -> None:
        self.world_size = world_size
        # A plan of identity groups alone needs no agreement; its groups run, so that the reference is measured too.
        groups = plan.compressed_groups or plan.groups
        chosen = [group.name for group in groups if only is None or group.name in only]
        self._agrees = bool(plan.compressed_groups)
        self._elsewhere = frozenset(name for group in groups if group.name not in chosen for name in group.layers)
        self._counts_rest = only is None or groups[0].name in chosen
        codecs = {group.name: plan.build(group) for group in groups if group.name in chosen}
        settings = RunSettings(plain_sgd, hold_unused)
        self.runs = [PlanRun(plan, rank, world_size, settings, codecs=codecs) for rank in range(world_size)]
        self.remarks: list[str] = []

    @property
    def plan(self) -> Plan:
        """The plan as it is now: a refresh may have changed its settings."""
        return self.runs[ROOT].plan

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups that are run."""
        return tuple(self.runs[ROOT].groups.values())

    @property
    def codecs(self) -> Mapping[str, Codec]:
        """The codecs by group name."""
        return self.runs[ROOT].codecs

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers of the groups that are run."""
        return tuple(self.runs[ROOT].group_of)

    @property
    def states(self) -> list[dict[str, Tensors]]:
        """The codecs' states by rank and group name. They are replaced after a step that was finite on every rank."""
        return [run.states for run in self.runs]

    @states.setter
    def states(self, states: Sequence[dict[str, Tensors]]) -> None:
        for run, of_rank in zip(self.runs, states, strict=True):
            run.states = of_rank

    @property
    def partial(self) -> bool:
        """Whether groups of the plan are left out."""
        return bool(self._elsewhere)

    @property
    def stateful(self) -> bool:
        """Whether earlier steps change what the next one does. It is known after the first step."""
        return self.plan.refresh is not None or any(state for rank in self.states for state in rank.values())

    def step(
        self,
        iteration: int,
        gradients: Sequence[Tensors],
        learning_rate: Mapping[str, float] | None = None,
        loss_scale: float = 1.0,
        parameters: Tensors | None = None,
        finite: bool = True,
    ) -> StepResult:
        """Run one iteration."""
        bill = _Bill(self.world_size)
        for run in self.runs:
            run.iteration = iteration
        self._refresh(bill)
        steps = [run.begin(learning_rate, loss_scale, parameters, scaled=False) for run in self.runs]
        for step, own in zip(steps, gradients, strict=True):
            step.finite = finite
            step.add(own)
        self._bill_uncompressed(bill, steps[ROOT])
        exchanged: dict[str, list[Exchanged]] = {}
        costs: dict[str, GroupCost] = {}
        for group in self.groups:
            if group.name in steps[ROOT].active:
                exchanged[group.name], costs[group.name] = self._exchange(group.name, steps, bill)
        if steps[ROOT].active:
            self._agree(steps, bill)
        self._end(steps, [mean for ranks in exchanged.values() for mean in ranks[ROOT].mean.values()])
        agreed = steps[ROOT]
        compressing = self.plan.schedule.compresses(iteration)
        return StepResult(
            iteration,
            compressing,
            agreed.finite if agreed.active else finite and all_finite(gradients),
            {name: _without(agreed.held, ranks) for name, ranks in exchanged.items()} if compressing else {},
            tuple(bill.payload),
            tuple(bill.wire),
            sum(cost.codec_seconds for cost in costs.values()),
            sum(cost.codec_wall_seconds for cost in costs.values()),
            costs,
            agreed.held,
            agreed.context.training.learning_rate,
        )

    def _refresh(self, bill: _Bill) -> None:
        results = run_lockstep([run.refresh() for run in self.runs])
        bill.add(results)
        if why := results[ROOT].value:
            iteration = self.runs[ROOT].iteration
            self.remarks.append(f"At iteration {iteration} no plan could be chosen, the last one stays: {why}")

    def _exchange(self, group: str, steps: Sequence[Step], bill: _Bill) -> tuple[list[Exchanged], GroupCost]:
        spent, shared = Spent(), Shared(len(steps))
        results = run_lockstep([timed(step.exchange(group, shared.of_a_rank()), spent) for step in steps])
        # In a run every rank computes that for itself.
        spent.seconds += (len(steps) - 1) * shared.seconds
        spent.wall_seconds += (len(steps) - 1) * shared.wall_seconds
        bill.add(results)
        return [result.value for result in results], _cost(results, spent)

    def _agree(self, steps: Sequence[Step], bill: _Bill) -> None:
        """Let the ranks agree. If a part of a plan is run, only the flags of its own layers are counted."""
        [result, *_] = run_lockstep([step.agree() for step in steps])
        if self._agrees:
            bill.add_mean(result.payload_bytes - (0 if self._counts_rest else FINITE_FLAG_BYTES))

    def _end(self, steps: Sequence[Step], results: Sequence[torch.Tensor]) -> None:
        """End the step on all ranks. The root's means are the same on every rank, so that they are checked once."""
        self.runs[ROOT].end(steps[ROOT], results)
        for run, step in zip(self.runs, steps, strict=True):
            if run is not self.runs[ROOT]:
                step.finite = steps[ROOT].finite
                run.end(step)

    def _bill_uncompressed(self, bill: _Bill, step: Step) -> None:
        """Count all other layers, as one all-reduce."""
        if self._counts_rest:
            elsewhere = self._elsewhere if step.compressing else frozenset[str]()
            rest = (x for x in self.plan.layers if not step.is_active(x.name) and x.name not in elsewhere)
            bill.add_mean(4 * sum(layer.numel for layer in rest))


class _Bill:
    """Payload and wire bytes per rank of one step."""

    def __init__(self, world_size: int) -> None:
        self.payload, self.wire = [0] * world_size, [0] * world_size

    def add(self, results: Sequence[LockstepResult[Any]]) -> None:
        for rank, result in enumerate(results):
            self.payload[rank] += result.payload_bytes
            self.wire[rank] += result.wire_bytes

    def add_mean(self, nbytes: int) -> None:
        """Count a mean of so many bytes of float32."""
        request = Mean(torch.empty(nbytes // 4, dtype=torch.float32, device="meta"))
        for rank in range(len(self.wire)):
            self.payload[rank] += payload_bytes(request, rank)
            self.wire[rank] += wire_bytes(request, rank, len(self.wire))


def all_finite(gradients: Sequence[Tensors]) -> bool:
    """Return whether every element on every rank is finite, from one dict of gradients per rank."""
    return all(bool(gradient.isfinite().all()) for rank in gradients for gradient in rank.values())


@dataclass
class Spent:
    """Seconds that coroutines' own code has taken: the processor's, of all threads of this process, and the clock's."""

    seconds: float = 0.0
    wall_seconds: float = 0.0


def timed(coroutine: Coroutine[Result], spent: Spent) -> Coroutine[Result]:
    """Return a coroutine of the same requests and result that adds the seconds of its own code, without the
    executor's."""
    answer = None
    while True:
        processor, wall = time.process_time(), time.perf_counter()
        try:
            step = sent_on(coroutine, answer)
        except StopIteration as stop:
            return stop.value
        finally:
            spent.seconds += time.process_time() - processor
            spent.wall_seconds += time.perf_counter() - wall
        answer = yield from answered(step)


def _without(held: frozenset[str], ranks: Sequence[Exchanged]) -> list[Exchanged]:
    """Return the results by rank, with zero as the mean of held layers."""
    if not held & ranks[0].mean.keys():
        return list(ranks)
    zero = {name: torch.zeros_like(mean) for name, mean in ranks[0].mean.items() if name in held}
    return [replace(one, mean={**one.mean, **zero}) for one in ranks]


def _cost(results: Sequence[LockstepResult[Exchanged]], spent: Spent) -> GroupCost:
    ranks = len(results)
    payload, wire = (sum(getattr(r, name) for r in results) / ranks for name in ("payload_bytes", "wire_bytes"))
    return GroupCost(payload, wire, spent.seconds / ranks, spent.wall_seconds / ranks)


def learning_rates(plan: Plan, rate: float) -> dict[str, float]:
    """Return one learning rate for every layer, by name; empty where it is not known (NaN)."""
    return {} if math.isnan(rate) else {layer.name: rate for layer in plan.layers}


class Shared:
    """Values that the ranks of one exchange compute alike, and the seconds these took of processors and of the clock.
    The n-th call of one rank is the n-th of every other: all run the same code."""

    def __init__(self, ranks: int) -> None:
        self.seconds = self.wall_seconds = 0.0
        self._ranks = ranks
        self._results: dict[int, tuple[object, int]] = {}  # by number of the call: the result, and who still wants it

    def of_a_rank(self) -> Callable[[Callable[[], Result]], Result]:
        """Make the function of one rank that computes what is alike, see `Context.once`."""
        number = -1

        def alike(compute: Callable[[], Result]) -> Result:
            nonlocal number
            number += 1
            return self._result(number, compute)

        return alike

    def _result(self, number: int, compute: Callable[[], Result]) -> Result:
        if number not in self._results:
            processor, wall = time.process_time(), time.perf_counter()
            self._results[number] = compute(), self._ranks
            self.seconds += time.process_time() - processor
            self.wall_seconds += time.perf_counter() - wall
        result, wanted = self._results[number]
        if wanted == 1:
            del self._results[number]
        else:
            self._results[number] = result, wanted - 1
        return result  # type: ignore[return-value]


class LockstepWatch:
    """The steps of all ranks of a `LockstepPlan`, with the first finding of each rule and group and the ranks that saw
    it."""

    def __init__(self, lockstep: LockstepPlan) -> None:
        self.findings: tuple[Finding, ...] = ()
        self._lockstep = lockstep
        plain_sgd = lockstep.runs[0].settings.plain_sgd
        self._ranks = [RankWatch(lockstep.plan, lockstep.codecs, plain_sgd) for _ in lockstep.runs]
        self._steps = 0

    def see(
        self,
        done: StepResult,
        gradients: Sequence[Tensors],
        parameters: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Judge a step from each rank's gradients without the loss scale. To measure groups takes some passes over
        gradients."""
        self._steps += done.compressing
        if not done.finite:
            found = [self._non_finite(done.iteration, rank, own) for rank, own in enumerate(gradients)]
        elif done.compressing:
            found = [
                watch.see(
                    done.iteration, self._steps, self._measure(rank, done, own, parameters or {}), done.learning_rate
                )
                for rank, (watch, own) in enumerate(zip(self._ranks, gradients, strict=True))
            ]
        else:
            return
        known = {one.key for one in self.findings}
        self.findings += tuple(one for one in rules.merged(found) if one.key not in known)

    def _measure(
        self, rank: int, done: StepResult, gradients: Tensors, parameters: Mapping[str, torch.Tensor]
    ) -> dict[str, GroupMeasures]:
        measured = {}
        for name, ranks in done.exchanged.items():
            codec, own = self._lockstep.codecs[name], ranks[rank]
            measured[name] = measure(codec, own, residual_norms(own), gradient_norms(codec, gradients, own, parameters))
        return measured

    def _non_finite(self, iteration: int, rank: int, gradients: Tensors) -> list[Finding]:
        layers = [name for name, value in gradients.items() if not bool(value.isfinite().all())]
        run = self._lockstep.runs[rank]
        state = rules.spoiled(run.codecs, run.states) if self._lockstep.runs[0].overflowed else ""
        one = rules.non_finite(iteration, 1, False, layers, state)
        return [] if one is None else [one]
