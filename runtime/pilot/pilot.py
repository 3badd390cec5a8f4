"""Try plans on a training: each from one snapshot, on the same batches with the same random numbers."""

from __future__ import annotations

import copy
import itertools
import math
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradlab.ddp.groups import group_like
from gradlab.ddp.optimizers import all_optimizers
from gradlab.ddp.wrapping import require_ddp
from gradlab.errors import GradlabError
from gradlab.plan import Plan, saving_of_sent
from gradlab.runtime.pilot.result import Outcome, PilotResult, outcome_of
from gradlab.runtime.pilot.snapshot import Snapshot, Stateful, draw_from, draws
from gradlab.runtime.pilot.switch import switched
from gradlab.runtime.state import CompressionState

DENSE, HALF = "plain DDP", "16 bits"
_LEAST_STEPS = 8  # that say something of a plan
_EARLY = 3  # a plan that is clearly too much after a third of the steps is not tried on
_NEVER = 2**31  # steps in a row that are not finite: such a plan is out, and training goes on


class Pilot:
    """Train some steps under each plan and under plain DDP, and then go back to where training was.

        pilot = gradlab.Pilot(ddp_model, optimizer, {"PowerSGD 4": first, "1 bit": second}, steps=60)
        for inputs, targets in pilot.over(batches):
            optimizer.zero_grad()
            loss = criterion(ddp_model(inputs), targets)
            loss.backward()
            optimizer.step()
            pilot.record(loss)
        print(pilot.result)
        state = gradlab.compress(ddp_model, pilot.plan, optimizer=optimizer)
        for inputs, targets in pilot.batches:  # those of the pilot again, then the others
            ...

    The first `steps` batches are kept, and given out once for plain DDP, once for 16 bits, which show how much of a
    difference is chance, and once for each plan. A plan that is clearly beyond `max_loss` after a third of the steps is
    tried no longer. Model, buffers, optimizers, random numbers and what else is named are put back before each. After
    the loop all is as it was before it, bit for bit, whatever the plans did; also if it was left early. All ranks do
    the same.

    >>> from gradlab import Pilot
    >>> ddp_model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 8))
    >>> optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
    >>> pilot = Pilot(ddp_model, optimizer, {"top-k": Plan.uniform(ddp_model, "topk", density=0.25)}, steps=8)
    >>> for batch in pilot.over(torch.randn(20, 4, 64)):
    ...     optimizer.zero_grad()
    ...     loss = ddp_model(batch).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     pilot.record(loss)
    >>> sorted(one.name for one in pilot.result.outcomes)
    ['16 bits', 'top-k']

    Args:
        ddp_model: the DistributedDataParallel model, without a communication hook.
        optimizer: one or several, all that train the model.
        plans: by a name of your choice.
        steps: batches that each plan trains on, 8 or more.
        scheduler: of learning rates, stepped in the loop.
        scaler: the torch.amp.GradScaler, if one is in use.
        extra: what else a step changes, with `state_dict` and `load_state_dict`: an averaged model, a metric.
        max_loss: share by which a plan's loss may be above that of plain DDP.
        evaluate: gives a validation loss, without a change of the model; called once for plain DDP and for each plan
            that was tried to the end. It counts as the training loss does.
        budget: the longest that the pilot may take, in seconds or as "90s", "5min" or "1h"; plans that come too late
            are not tried, and the result names them. None: as long as it takes.
        options: others of `gradlab.compress`.

    Raises:
        GradlabError: for a model that is not in DDP or has a hook, plans that are none or that begin to compress only
            after half of the steps, or too few steps.
    """

    def __init__(
        self,
        ddp_model: nn.Module,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        plans: Mapping[str, Plan],
        *,
        steps: int = 60,
        scheduler: Stateful | None = None,
        scaler: Any = None,
        extra: Iterable[Stateful] = (),
        max_loss: float = 0.01,
        evaluate: Callable[[], float | torch.Tensor] | None = None,
        budget: float | str | None = None,
        **options: Any,
    ) -> None:
        self._model = require_ddp(ddp_model, "Pilot")
        self._optimizers = all_optimizers(optimizer)
        self._plans = _checked(plans, self._model, steps)
        if steps < _LEAST_STEPS:
            raise GradlabError(f"steps = {steps!r}, expected {_LEAST_STEPS} or more: fewer say nothing of a plan")
        self._steps, self._max_loss = steps, max_loss
        self._evaluate, self._budget = evaluate, _seconds(budget)
        self._scaler, self._options = scaler, options
        self._others = [*(one for one in (scheduler, scaler) if one is not None), *extra]
        self._kept: list[tuple[Any, dict[str, Any]]] = []  # batches, with the generators' states after each came
        self._rest: Iterator[Any] = iter(())
        self._losses: list[torch.Tensor] = []
        self._by_plan: dict[str, list[float]] = {}
        self._validation: dict[str, float] = {}
        self._began: float | None = None
        self._late: list[str] = []
        self._result: PilotResult | None = None

    @property
    def result(self) -> PilotResult:
        """What came, once the loop over `over` has ended.

        Raises:
            GradlabError: before.
        """
        if self._result is None:
            raise GradlabError("the pilot has not ended: train on `for batch in pilot.over(batches)` first")
        return self._result

    @property
    def plan(self) -> Plan:
        """The plan that sends the fewest bytes of those that hold; of no compressed layer if there is none."""
        best = self.result.best
        return Plan(next(iter(self._plans.values())).layers, ()) if best is None else self._plans[best.name]

    @property
    def batches(self) -> Iterator[Any]:
        """The pilot's batches again, with their random numbers, and then the others. To be read once."""
        kept, self._kept = self._kept, []
        for batch, drawn in kept:
            draw_from(drawn)
            yield batch
        yield from self._rest

    def record(self, loss: float | torch.Tensor) -> None:
        """Note the loss of the batch at hand, on this rank. Once per batch.

        Args:
            loss: a number or a tensor of one element. It is not read before a plan's steps are over.
        """
        self._losses.append(torch.as_tensor(loss, dtype=torch.float64).detach())

    def over(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Give out batches to train on: the same ones for plain DDP, for 16 bits and for each plan.

        Args:
            batches: of this rank. Fewer than `steps` make a shorter pilot.

        Yields:
            Batches. Each is a copy, which training may change.

        Raises:
            GradlabError: for a second call, a model that is compressed, fewer than 8 batches, ranks with different
                numbers of them, or losses that were not recorded.
        """
        if self._began is not None:
            raise GradlabError("this pilot was used already; make another one")
        switch, self._rest = switched(self._model), iter(batches)
        group = group_like(self._model.process_group, None, next(self._model.parameters()).device)
        snapshot, self._began = Snapshot(self._model, self._optimizers, self._others), time.monotonic()
        try:
            for batch in itertools.islice(self._rest, self._steps):
                self._kept.append((batch, draws()))
                yield _copy_of(batch)
            longest = self._end_of(DENSE, len(self._kept))
            self._say(f"{len(self._plans)} plans, at most about {longest * (1 + len(self._plans)):.0f} s")
            for name, plan in self._plans.items():
                if longest > self._budget:
                    self._late.append(name)
                    continue
                snapshot.restore()
                options = {"non_finite_limit": _NEVER, "rules": "ignore", **self._options}
                options |= {"optimizer": self._optimizers, "scaler": self._scaler, "process_group": group}
                with CompressionState(plan, self._model, **options) as switch.state:
                    for number, (batch, drawn) in enumerate(self._kept, 1):
                        draw_from(drawn)
                        yield _copy_of(batch)
                        if number == len(self._kept) // _EARLY and self._is_too_much(name, number):
                            break
                    longest = self._end_of(name, number)
                self._say(self._outcome(name).line())
        finally:
            switch.state = None
            self._losses.clear()
            snapshot.restore()
        found = [self._outcome(name) for name in self._by_plan if name != DENSE]
        found.sort(key=lambda one: -(one.saving.ratio or 0.0))  # which is stable: ranks choose alike
        self._result = PilotResult(tuple(found), self._max_loss, tuple(self._late))

    def _is_too_much(self, name: str, steps: int) -> bool:
        """Whether a plan is clearly beyond the limit already."""
        self._by_plan[name] = self._averaged(name, steps)[0]
        return steps >= _LEAST_STEPS and name != HALF and not self._outcome(name).low <= self._max_loss

    def _end_of(self, name: str, steps: int) -> float:
        """Note what a plan ended with. Returns the seconds since the pilot began, of the slowest rank."""
        self._by_plan[name], longest = self._averaged(name, steps)
        self._losses.clear()
        if self._evaluate is not None and steps == len(self._kept):
            found = self._gathered(float(self._evaluate()))
            self._validation[name] = math.fsum(found) / len(found)
        return longest

    def _averaged(self, name: str, steps: int) -> tuple[list[float], float]:
        """Average a plan's losses so far over the ranks, by step; with the seconds since the pilot began."""
        own = [float(loss) for loss in self._losses]
        every = self._gathered((len(self._kept), own, self._elapsed))
        counts = [count for count, *_ in every]
        if min(counts) != max(counts):
            raise GradlabError(f"ranks have {counts} batches for a pilot, expected equal numbers")
        if counts[0] < _LEAST_STEPS:
            raise GradlabError(f"{counts[0]} batches for a pilot, expected {_LEAST_STEPS} or more")
        if any(len(losses) != steps for _, losses, _ in every):
            raise GradlabError(f"{name}: {len(own)} losses of {steps} batches; call pilot.record(loss) once per batch")
        by_step = zip(*(losses for _, losses, _ in every), strict=True)
        return [math.fsum(step) / len(every) for step in by_step], max(seconds for *_, seconds in every)

    def _gathered(self, own: Any) -> list[Any]:
        every: list[Any] = [None] * self._model.process_group.size()
        dist.all_gather_object(every, own, group=self._model.process_group)
        return every

    def _outcome(self, name: str) -> Outcome:
        losses = self._by_plan[name]
        saving = saving_of_sent(self._plans[name], self._model.process_group.size())
        found = outcome_of(name, losses, self._by_plan[DENSE][: len(losses)], saving)
        if name not in self._validation:
            return found
        dense = self._validation[DENSE]
        return replace(found, validation=(self._validation[name] - dense) / (abs(dense) or 1.0))

    def _say(self, line: str) -> None:
        if self._model.process_group.rank() == 0:
            print(f"gradlab pilot, {self._elapsed:.0f} s: {line}", file=sys.stderr, flush=True)

    @property
    def _elapsed(self) -> float:
        return 0.0 if self._began is None else time.monotonic() - self._began


def _seconds(budget: float | str | None) -> float:
    """Read a duration."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h)?", str(budget).strip())
    if budget is not None and not found:
        raise GradlabError(f"budget = {budget!r}, expected seconds, or a text such as '90s', '5min' or '1h'")
    return float(found[1]) * {"s": 1, "min": 60, "h": 3600}[found[2] or "s"] if found else math.inf


def _checked(plans: Mapping[str, Plan], model: nn.Module, steps: int) -> dict[str, Plan]:
    """Return the plans, with 16 bits before them."""
    if not isinstance(plans, Mapping) or not plans:
        raise GradlabError(f"plans is {type(plans).__name__}, expected a dict of plans by name")
    for name, plan in plans.items():
        if not isinstance(plan, Plan):
            raise GradlabError(f"plans[{name!r}] is {type(plan).__name__}, expected a Plan")
        if name in (DENSE, HALF):
            raise GradlabError(f"plans[{name!r}]: a pilot has one of that name; choose another name")
        if plan.schedule.warmup_steps > steps // 2:
            raise GradlabError(
                f"plans[{name!r}] compresses from step {plan.schedule.warmup_steps} on, and a pilot of {steps} steps "
                "would judge it by dense ones; give it warmup_steps=0, or the pilot more steps"
            )
    half = Plan.uniform(model, "cast", dtype="bfloat16", warmup_steps=0, minimum_dimensions=0, minimum_numel=1)
    return {HALF: half, **plans}


def _copy_of(batch: Any) -> Any:
    """Copy a batch, so that what training writes into it does not reach the next plan. What cannot be copied is not."""
    with suppress(Exception):
        return copy.deepcopy(batch)
    warnings.warn(
        f"gradlab: batches of {type(batch).__name__} cannot be copied; do not change them in training", stacklevel=3
    )
    return batch
