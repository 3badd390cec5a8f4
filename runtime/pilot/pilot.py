"""Try plans on a training: each from one snapshot, on the same batches with the same random numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gradlab.ddp.optimizers import all_optimizers
from gradlab.errors import GradlabError
from gradlab.plan import Plan, saving_of_sent
from gradlab.runtime.pilot.given import (
    DENSE,
    Together,
    checked_plans,
    control_of,
    exchanges_in,
    gradients_of,
    longest_of,
    seconds_of,
)
from gradlab.runtime.pilot.kept import KeptBatches
from gradlab.runtime.pilot.result import LEAST_STEPS, PilotResult, in_order, is_decided, looks, may_hold, unlike_line
from gradlab.runtime.pilot.scores import Scores
from gradlab.runtime.pilot.snapshot import Snapshot, Stateful, StepWatch

if TYPE_CHECKING:
    from gradlab.runtime.outer.step import OuterStep

_NEVER = 2**31  # steps in a row that are not finite: such a plan is out, and training goes on
_ROUNDS = 3  # the longest: dense, 16 bits, and one plan at the least


class Pilot:
    """Train some steps under each plan and without compression, and then go back to where training was.

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

    The first batches are kept, and given out once without compression (dense), once for 16 bits, and once for each
    plan, the one that sends the fewest bytes first. 16 bits (8 where a reduce-scatter is compressed) show how much of a
    difference is chance. A plan goes on as long as it may be within `max_loss`: after a third of the steps, after all,
    and after `longer`. Once `keep` plans have held to the end, those that send more are not tried. Model, buffers,
    optimizers, random numbers and what else is named are put back before each. After the loop all is as it was before
    it, bit for bit, whatever the plans did; also if it was left early or an error ended it. All ranks do the same.

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
        model: the DistributedDataParallel model, without a communication hook; or what `fully_shard` was called on.
        optimizer: one or several, all that train the model.
        plans: plans by names of your choice.
        steps: batches that each plan trains on unless it is clearly too much before, 8 or more.
        longer: batches that the plans train on which may hold until then. None: twice `steps`. `steps`: no longer ones.
        keep: plans that are to hold to the end before the others are left out.
        scheduler: learning rate scheduler, stepped in the loop.
        scaler: the torch.amp.GradScaler, if one is in use.
        extra: objects that a step changes too, with `state_dict` and `load_state_dict`: an averaged model, a metric.
        outer: the OuterStep whose `step` the loop calls; the plans are then tried on what it exchanges.
        max_loss: share by which a plan's loss may be above the dense one.
        evaluate: gives a validation loss, without a change of the model; called once for dense and for each plan that
            was tried to the end. It counts as the training loss does.
        budget: the longest that the pilot may take, in seconds or as "90s", "5min" or "1h"; plans that would come too
            late are not tried, and the result names them. None: as long as it takes.
        options: others of `gradlab.compress`, such as `within`, or of `compress_fsdp`, such as `between`.

    Raises:
        GradlabError: for a model that is in neither DDP nor FSDP2 or has a hook, plans that are none or that begin to
            compress only after half of the steps, or too few steps.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        plans: Mapping[str, Plan],
        *,
        steps: int = 60,
        longer: int | None = None,
        keep: int = 3,
        scheduler: Stateful | None = None,
        scaler: Any = None,
        extra: Iterable[Stateful] = (),
        outer: OuterStep | None = None,
        max_loss: float = 0.01,
        evaluate: Callable[[], float | torch.Tensor] | None = None,
        budget: float | str | None = None,
        **options: Any,
    ) -> None:
        self._steps, self._longest, self._keep = steps, longest_of(steps, longer, keep), keep
        self._gradients = gradients_of(model, outer, options)
        self._optimizers = all_optimizers(optimizer)
        self._control, control = control_of(self._gradients)
        exchanges = steps if outer is None else exchanges_in(steps, outer.every)
        self._plans = {self._control: control, **checked_plans(plans, self._control, exchanges)}
        self._max_loss, self._evaluate, self._budget = max_loss, evaluate, seconds_of(budget)
        self._scaler = scaler
        self._others = [*(one for one in (scheduler, scaler, outer) if one is not None), *extra]
        self._kept, self._rest = KeptBatches(), iter(())  # type: tuple[KeptBatches, Iterator[Any]]
        self._losses: list[torch.Tensor] = []
        self._scores = Scores(self._control)
        self._began = False
        self._per_step = 0.0  # seconds, of the dense round
        self._result: PilotResult | None = None

    @property
    def result(self) -> PilotResult:
        """The result, once the loop over `over` has ended.

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
        return Plan(self._gradients.layers, ()) if best is None else self._plans[best.name]

    @property
    def losses(self) -> dict[str, list[float]]:
        """The losses so far, mean over ranks by step: of the dense round ("dense"), of 16 bits, and of each plan."""
        return {name: list(losses) for name, losses in self._scores.losses.items()}

    @property
    def batches(self) -> Iterator[Any]:
        """The pilot's batches again, with their random numbers, and then the others. To be read once."""
        yield from self._kept.last()
        yield from self._rest

    def record(self, loss: float | torch.Tensor) -> None:
        """Note the loss of the batch at hand, on this rank. Once per batch.

        Args:
            loss: a number or a tensor of one element. It is not read before a plan's steps are over.
        """
        self._losses.append(torch.as_tensor(loss, dtype=torch.float64).detach())

    def over(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Give out batches to train on: the same ones without compression, for 16 bits and for each plan.

        Args:
            batches: batches of this rank. Fewer than are wanted make a shorter pilot.

        Yields:
            Batches, which training may change.

        Raises:
            GradlabError: for a second call, a model that is compressed, fewer than 8 batches, batches that memory does
                not hold, ranks with different numbers of them, losses that were not recorded, or another optimizer that
                steps the model.
        """
        if self._began:
            raise GradlabError("this pilot was used already; make another one")
        self._rest, self._began, began = iter(batches), True, time.monotonic()
        self._gradients.begin()
        self._together = Together(self._gradients.ranks, began)
        self._gradients.settle()
        snapshot = Snapshot(self._gradients.model, self._optimizers, self._others)
        watch = StepWatch(self._optimizers, self._gradients.names)
        not_tried: list[str] = []
        try:
            with self._gradients.under(None, **self._options):
                yield from self._dense(watch)
            names = self._order()
            while names and self._is_time_for(looks(self._steps, len(self._kept))[0]):
                self._put_back(snapshot)
                yield from self._round(name := names.pop(0))
                self._together.say(self._scores.outcome(name).line())
                if is_decided(self._scores.tried(control=False), len(self._kept), self._max_loss, self._keep):
                    break
            else:
                not_tried, names = names, []
        finally:
            watch.close()
            self._losses.clear()
            try:
                self._put_back(snapshot)
            finally:
                self._gradients.end()
        self._result = PilotResult(
            self._scores.tried(),
            self._max_loss,
            tuple(not_tried),
            tuple(names),
            seconds=self._together.seconds,
            snapshot_bytes=snapshot.nbytes,
            batch_bytes=self._kept.nbytes,
            unlike=self._scores.unlike,
        )

    def _dense(self, watch: StepWatch) -> Iterator[Any]:
        """Train without compression, and keep the batches."""
        for number in range(self._longest):
            batch = next(self._rest, self)
            has = batch is not self
            problem = self._kept.problem(batch, self._longest) if has and not number else None
            if not self._have_all(has, problem):
                break
            self._kept.add(batch)
            yield batch
            if len(self._kept) == self._steps and self._is_short_of_time():
                break
        self._end_of(DENSE, len(self._kept), watch.problem(len(self._kept)))
        self._per_step = self._together.seconds / len(self._kept)

    def _have_all(self, has: bool, problem: str | None) -> bool:
        """Say whether all ranks have another batch, and refuse that some have one and others none."""
        every = [one["has"] for one in self._together.gather({"has": has, "problem": problem})]
        if any(every) and not all(every):
            short, other = (self._together.names[every.index(one)] for one in (False, True))
            raise GradlabError(
                f"rank {short} has {len(self._kept)} batches for a pilot, and rank {other} has more; give all ranks as "
                "many"
            )
        return has

    def _is_short_of_time(self) -> bool:
        """Say whether `longer` rounds would take more than the budget."""
        self._together.gather({})
        return self._together.seconds / self._steps * self._longest * _ROUNDS > self._budget

    def _order(self) -> list[str]:
        """Return the plans as they are tried, and tell how long that takes."""
        after = looks(self._steps, len(self._kept))
        most = min(self._per_step * after[-1] * (1 + len(self._plans)), self._budget)
        self._together.say(
            f"{len(self._plans)} plans of {after[0]} to {after[-1]} steps, at most about {most:.0f} s in all"
        )
        savings = {name: saving_of_sent(plan, self._gradients.count) for name, plan in self._plans.items()}
        self._scores.savings = savings
        return [self._control, *(name for name in in_order(savings) if name != self._control)]

    def _round(self, name: str) -> Iterator[Any]:
        """Train under a plan, as long as it may hold and there is time."""
        after = looks(self._steps, len(self._kept))
        with self._gradients.under(self._plans[name], **self._options):
            for number, batch in enumerate(self._kept.again(), 1):
                yield batch
                if number in after[:-1] and not self._goes_on(name, number, after[after.index(number) + 1] - number):
                    break
            self._end_of(name, number)

    @property
    def _options(self) -> dict[str, Any]:
        found = {"optimizer": self._optimizers, "scaler": self._scaler}
        return {**found, "non_finite_limit": _NEVER, "rules": "ignore"}

    def _goes_on(self, name: str, steps: int, more: int) -> bool:
        """Say whether a plan is worth more steps."""
        self._note(name, steps)
        return self._is_time_for(more) and (
            name == self._control or may_hold(self._scores.outcome(name), self._max_loss)
        )

    def _is_time_for(self, steps: int) -> bool:
        return self._together.seconds + steps * self._per_step <= self._budget

    def _put_back(self, snapshot: Snapshot) -> None:
        try:
            self._gradients.settle()
        finally:  # a model that was left in the middle of a step may not settle
            snapshot.restore()

    def _end_of(self, name: str, steps: int, problem: str | None = None) -> None:
        """Note what a plan ended with."""
        self._note(name, steps, problem)
        self._losses.clear()
        if self._evaluate is not None and steps == len(self._kept):
            own = float(self._evaluate()).hex()
            self._scores.validate(name, [float.fromhex(one["loss"]) for one in self._together.gather({"loss": own})])

    def _note(self, name: str, steps: int, problem: str | None = None) -> None:
        """Gather a plan's losses so far, and note when that was."""
        own = [float(loss).hex() for loss in self._losses]
        if steps < LEAST_STEPS:
            problem = f"{steps} batches for a pilot, expected {LEAST_STEPS} or more"
        elif len(own) != steps:
            problem = f"{name}: {len(own)} losses of {steps} batches; call pilot.record(loss) once per batch"
        every = self._together.gather({"losses": own, "problem": problem})
        was_alike = not self._scores.unlike
        self._scores.note(name, [[float.fromhex(loss) for loss in one["losses"]] for one in every])
        if was_alike and self._scores.unlike:
            self._together.say(unlike_line(self._scores.unlike))
