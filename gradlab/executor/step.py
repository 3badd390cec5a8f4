"""A step of a plan: which groups act, the context they get, and which new states are kept.

A `PlanRun` is what lasts from step to step on one rank; a `Step` is one iteration. Neither knows of a process group, a
thread, DDP or a trace. They yield requests, as codecs do, and whoever drives them serves these: the lockstep executor
(`LockstepPlan`), DDP's engine, or a hook that has finished when it returns (`gradlab.runtime.Exchange`). A driver

    failure = yield from run.refresh()                  adopts settings that were chosen anew, if any are due
    step = run.begin(learning_rates, loss_scale)
    complete = step.add(gradients)                      as they arrive, at once or in parts
    done = yield from step.exchange(group)              for every group that is complete; the driver applies done.mean
    yield from step.agree()                             all ranks learn whether gradients were finite
    run.end(step, results)                              commits the states, or leaves them as they were

New states count if the gradients were finite on all ranks, and the results are. A layer whose gradient is zero on
every rank is held where `hold_unused` says so: it keeps its state and its learning rate, and gets no gradient, because
DDP throws away what a hook returns for a parameter that no rank used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from gradlab.codec import Batch, Codec, Context, Exchanged, Memory, Table, Tensors, Training, alone, exchange_group
from gradlab.codec.measures import all_finite, is_finite, largest_magnitudes
from gradlab.codec.wrapper import acts_when_dense, adopted, entries_of, in_own_memory
from gradlab.codecs.identity import Identity
from gradlab.collectives import Coroutine, Mean
from gradlab.errors import GradlabError
from gradlab.executor.open_step import OpenStep
from gradlab.plan import Group, Plan
from gradlab.workspace import Workspace

if TYPE_CHECKING:
    from gradlab.plan.replanning import Replanner

_DENSE = Identity()


@dataclass(frozen=True)
class RunSettings:
    """The training that a plan runs in, as far as a step depends on it.

    Attributes:
        plain_sgd: whether the optimizer is SGD without momentum of its own (see `Context`).
        hold_unused: whether a layer without a gradient on any rank is held.
        replan_beside: whether a refresh measures in a thread while training goes on, or when its choice is due.
        device: device of the codecs' tensors.
    """

    plain_sgd: bool = False
    hold_unused: bool = False
    replan_beside: bool = False
    device: torch.device | str = "cpu"


class PlanRun:
    """One rank's run of a plan.

    Attributes:
        plan: the present plan; a refresh may have changed its settings.
        groups: groups whose codecs run, by name.
        tables: layers by group name.
        codecs: codecs by group name.
        states: each codec's state, by group name, after the last committed step.
        iteration: the next step's, from 0.
        overflowed: whether gradients of the last step were finite on all ranks, and results were not.
        learning_rates: last rate of a committed step that was not zero, by layer name: the unit of residuals.
        open_step: exchanges since the last optimizer step, if these are known.
        seen: names of the groups whose gradients have been compared with the plan's shapes.

    Args:
        plan: the plan.
        rank: this process's, from 0.
        world_size: number of ranks.
        settings: None for `RunSettings()`.
        codecs: codecs built for this plan, by name of the groups to run; None: built here, of all groups that
            are not plainly dense.
        workspace: source of the codecs' memory; None: their own.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        world_size: int,
        settings: RunSettings | None = None,
        *,
        codecs: Mapping[str, Codec] | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        self.plan = plan
        self.rank, self.world_size = rank, world_size
        self.settings = settings or RunSettings()
        self.workspace = Workspace() if workspace is None else workspace
        beside = self.settings.replan_beside
        self.replanner: Replanner | None = None
        if plan.refresh is not None:
            from gradlab.plan.replanning import Replanner

            self.replanner = Replanner(plan, rank, world_size, beside=beside)
        chosen = plan.compressed_groups if codecs is None else [group for group in plan.groups if group.name in codecs]
        self.groups: dict[str, Group] = {group.name: group for group in chosen}
        self.tables = {group.name: Table.of(plan.members(group)) for group in chosen}
        self.group_of = {layer: group.name for group in chosen for layer in group.layers}
        if codecs is None:
            codecs = {group.name: plan.build(group, self.settings.device) for group in chosen}
        self.codecs: dict[str, Codec] = dict(codecs)
        self.states: dict[str, Tensors] = {}
        self.iteration = 0
        self.overflowed = False
        self.learning_rates: dict[str, float] = {}
        self.open_step = OpenStep()
        self.seen: set[str] = set()
        self._fresh_from = 0  # the first iteration that a refresh has not seen

    @property
    def compresses(self) -> bool:
        """Whether the schedule compresses in the next step."""
        return bool(self.groups) and self.plan.schedule.compresses(self.iteration)

    @property
    def active(self) -> frozenset[str]:
        """The groups whose codecs run in the next step: all, or those that work while the schedule is dense too."""
        if self.compresses:
            return frozenset(self.groups)
        return frozenset(
            name for name in self.groups if acts_when_dense(self.codecs[name], self.states.get(name, {}))
        )  # fmt: skip

    def refresh(self) -> Coroutine[str]:
        """Adopt settings that were chosen anew, if any are due; return on the root why none could be."""
        request = self.replanner.message(self.iteration) if self.replanner is not None and self.fresh else None
        if self.replanner is None or request is None:
            return ""
        message = yield replace(request, tensor=request.tensor.to(self.settings.device))
        self.adopt(self.replanner.adopt(message))
        return self.replanner.failure

    def adopt(self, plan: Plan) -> None:
        """Continue with other settings of the same groups. The codecs' states are carried over."""
        for group in plan.groups:
            if group.name in self.groups and group != self.groups[group.name]:
                new = plan.build(group, self.settings.device)
                self.codecs[group.name], self.groups[group.name] = new, group
                kept = new.kept(plan.members(group), self.rank, self.world_size, group.name)
                if group.name in self.states:
                    self.states[group.name] = adopted(new, kept, self.states[group.name])
                if group.name in self.open_step.states:
                    before, rates = self.open_step.states[group.name]
                    self.open_step.states[group.name] = adopted(new, kept, before), rates
        self.plan = plan

    def begin(
        self,
        learning_rates: Mapping[str, float] | None = None,
        loss_scale: float = 1.0,
        parameters: Mapping[str, torch.Tensor] | None = None,
        *,
        scaled: bool = True,
    ) -> Step:
        """Begin the step of `iteration`. Rates and parameters are by layer name, as far as they are known. `scaled`:
        the loss scale is on the gradients."""
        rates, start = dict(learning_rates or {}), self.plan.schedule.warmup_steps
        plain, before = self.settings.plain_sgd, {**rates, **self.learning_rates}
        context = Context(
            rank=self.rank,
            world_size=self.world_size,
            iteration=self.iteration,
            repeat=self.open_step.repeats,
            seed=self.plan.seed,
            training=Training(rates, before, plain, loss_scale, start, {} if parameters is None else parameters),
            memory=Memory(self.workspace),
            dense=not self.compresses,
        )
        return Step(self, context, loss_scale if scaled else 1.0)

    def end(self, step: Step, results: Iterable[torch.Tensor] = ()) -> None:
        """End a step that all ranks have agreed on: commit its states, if everything was finite. `results` are the
        step's means: finite gradients may overflow there."""
        if step.active:
            given = step.finite
            step.finite = step.finite and all_finite(results)
            self.overflowed = given and not step.finite
        if step.finite:
            self.open_step.add(self.iteration, step.staged, self.states, self.learning_rates)
            if step.active:
                self._commit(step)
        if self.replanner is not None and self.fresh:
            self.replanner.end(self.iteration, step.context.training.learning_rate)
        self.iteration += 1
        self._fresh_from = max(self._fresh_from, self.iteration)

    @property
    def fresh(self) -> bool:
        """Whether the next step is no second exchange of an iteration, which a refresh must not count again."""
        return not self.open_step.followed or self.iteration >= self._fresh_from

    def go_on(self, dropped: Collection[str] = ()) -> None:
        """Begin another exchange of the optimizer step that is open, before `begin`. Groups whose results were dropped
        go back to their states before that step."""
        for name in dropped:
            state, rates = self.open_step.states.pop(name)
            self.states[name] = state
            layers = self.groups[name].layers
            kept = {layer: rate for layer, rate in self.learning_rates.items() if layer not in layers}
            self.learning_rates = kept | {layer: rates[layer] for layer in layers if layer in rates}
        if self.open_step.repeats:
            self.iteration = self.open_step.iteration

    def applied(self, groups: Collection[str] | None = None) -> None:
        """Note an optimizer step, between two exchanges: it closes the open step, which was one iteration. `groups` are
        those whose parameters the optimizer holds; None: all."""
        if self.open_step.exchanges:
            self.iteration = self.open_step.iteration + 1 - self.open_step.taken_back
        self.open_step.seen, self.open_step.taken_back = True, 0
        self.open_step.forget(groups)

    @property
    def since_step(self) -> tuple[dict[str, Tensors], int]:
        """The states and the iteration after the last optimizer step, as a checkpoint has them.

        Gradients are in no checkpoint. Exchanges since that step are therefore never applied after a resume.
        """
        if not self.open_step.seen:
            return self.states, self.iteration
        before = {name: state for name, (state, _) in self.open_step.states.items()}
        return {**self.states, **before}, self.open_step.iteration if self.open_step.exchanges else self.iteration

    def go_on_from(self, states: dict[str, Tensors], iteration: int, learning_rates: dict[str, float]) -> None:
        """Continue from a checkpoint: states by group, the next step's number, and learning rates by layer."""
        self.states, self.iteration, self.learning_rates = states, iteration, learning_rates
        self.open_step.forget()
        self._fresh_from = iteration

    def _commit(self, step: Step) -> None:
        for layer in step.held:
            name = self.group_of.get(layer, "")
            if name not in step.staged:
                continue
            shared = {what for what, rule in entries_of(self.codecs[name]).items() if rule.of_group}
            step.staged[name] = _held_back(layer, step.staged[name], self.states.get(name, {}), shared)
        self.states.update(step.staged)
        rates = step.context.training.learning_rate
        moved = {layer: rate for layer, rate in rates.items() if rate and layer not in step.held}
        self.learning_rates = {**self.learning_rates, **moved}  # a new dict: an open step keeps the old one


class Step:
    """One iteration of a plan on one rank.

    Attributes:
        compressing: whether the schedule compresses.
        active: names of the groups whose codecs run.
        finite: whether gradients were finite on this rank; after `agree`, on all ranks.
        non_finite: names of this rank's layers whose gradients were not finite.
        held: names of the layers without a gradient on any rank, known after `agree`.
        noticed: whether some rank has something to tell the others, known after `agree` of a finite step.
        order: a whole number below 2^16 for the order in which gradients came, where ranks might differ in it; or None.
        mixed: whether ranks differ in it, known after `agree` on one of them at least.
        gradients: gradients that `add` took in, by layer name.
        staged: new states that are not yet committed, by group name.
    """

    def __init__(self, run: PlanRun, context: Context, scaled_by: float) -> None:
        self.compressing = run.compresses
        self.active = run.active
        self.context = context
        self.finite = True
        self.non_finite: tuple[str, ...] = ()
        self.held: frozenset[str] = frozenset()
        self.noticed = False
        self.order: int | None = None
        self.mixed = False
        self._left_out: frozenset[str] = frozenset()
        self.gradients: Tensors = {}
        self.staged: dict[str, Tensors] = {}
        self._run = run
        self._scaled_by = scaled_by
        self._empty: dict[str, bool] = {}  # by layer of an active group: whether its gradient is zero
        # Layers on a GPU with their largest magnitudes, which say both of it, once the GPU is waited for.
        self._unread: list[tuple[list[str], torch.Tensor]] = []
        self._looked_at: tuple[list[str], torch.Tensor] = [], torch.zeros(0)
        self._shares: torch.Tensor | None = None
        self._waiting = {name: len(run.groups[name].layers) for name in self.active}

    def add(self, gradients: Tensors, buffer: torch.Tensor | None = None) -> list[str]:
        """Take in gradients by layer; return the active groups that are complete now, in the layers' order. A `buffer`
        that holds all of them and nothing else is looked at once for finiteness."""
        self.gradients |= gradients
        if not self.active:
            return []
        self._look_at(gradients, buffer)
        if self._run.replanner is not None and self._run.fresh:
            self._run.replanner.add(gradients, self.context.iteration, self._scaled_by)
        group_of, active = self._run.group_of, self.active
        arrived = Counter([group for layer in gradients if (group := group_of.get(layer)) in active])
        for group, layers in arrived.items():
            self._waiting[group] -= layers
        return [group for group in arrived if not self._waiting[group]]

    def is_active(self, layer: str) -> bool:
        """Say whether the codec of a layer's group runs in this step."""
        return self._run.group_of.get(layer) in self.active

    def without_codec(self, gradients: Tensors) -> Tensors:
        """Return the gradients, by layer name, of layers that no codec works on in this step."""
        group_of, active = self._run.group_of, self.active
        return {name: gradient for name, gradient in gradients.items() if group_of.get(name) not in active}

    def batch(self, group: str) -> Batch:
        """Return the gradients of a complete group. The first time, they are compared with the plan's shapes, which
        codecs go by.
        """
        table, known = self._run.tables[group], self._run.seen
        batch = Batch({name: self.gradients[name] for name in table.names}, table)
        if group not in known:
            for layer, gradient in zip(table, batch.values(), strict=True):
                if tuple(gradient.shape) != layer.shape:
                    came = f"a gradient of shape {list(gradient.shape)} came"
                    raise GradlabError(f"group {group}: {came} for {layer.name}, expected {list(layer.shape)}")
            known.add(group)
        return batch

    def exchange(
        self, group: str, once: Callable[[Callable[[], Any]], Any] = alone, *, reuse: bool = False
    ) -> Coroutine[Exchanged]:
        """Run a complete group's codec, and stage its new state. `reuse`: nobody reads the gradients afterwards, so
        that the mean may be written in their memory."""
        given = self._run.codecs[group], self.batch(group), self._run.states.get(group, {})
        context = replace(self.context, group=group, once=once)
        done = yield from exchange_group(*given, context, scaled_by=self._scaled_by, reuse=reuse)
        self.staged[group] = done.state
        return done

    def average(self, gradients: Tensors) -> Coroutine[Exchanged]:
        """Average gradients of layers of no active group, uncompressed."""
        done = yield from exchange_group(_DENSE, gradients, {}, self.context, scaled_by=self._scaled_by)
        return done

    def leave_out(self, layers: Iterable[str]) -> Tensors:
        """Hold layers that have no gradient in this step, on any rank. Return those that have to come as zeros all the
        same, because other layers of their groups came."""
        self._left_out = frozenset(layers)
        empty: Tensors = {}
        for name in list(self._waiting):
            absent = self._left_out & set(self._run.groups[name].layers)
            if absent and self._waiting[name] == len(self._run.groups[name].layers):
                del self._waiting[name]
            else:
                shapes = {layer.name: layer.shape for layer in self._run.plan.members(self._run.groups[name])}
                empty |= {one: torch.zeros(shapes[one], device=self._run.settings.device) for one in sorted(absent)}
        return empty

    def require_whole(self) -> None:
        """Refuse a step in which layers of groups have no gradient."""
        if missing := sorted(name for name, left in self._waiting.items() if left):
            layers = self._run.groups[missing[0]].layers
            absent = [layer for layer in layers if layer not in self.gradients]
            raise GradlabError(
                f"group {missing[0]}: no gradient of {', '.join(absent[:3])} came in this step ({len(absent)} of "
                f"{len(layers)} layers missing); hand over all layers of a group, or make a plan of those that come"
            )

    def agree(self, device: torch.device | str = "cpu", *, notice: bool = False) -> Coroutine[None]:
        """Learn whether gradients were finite on every rank, and which layers have none on any. `notice`: this rank has
        something to tell the others."""
        yield from self.ask(device, notice=notice)
        self.learn()

    def ask(self, device: torch.device | str = "cpu", *, notice: bool = False) -> Coroutine[None]:
        """Exchange what `learn` reads, without waiting for a GPU."""
        self._looked_at = self._unread_of(device)
        flags = self._flags(device, notice, *self._looked_at)
        self._shares = yield Mean(flags if self.order is None else torch.cat([flags, flags.new_tensor([self.order])]))

    @property
    def least_share(self) -> float:
        """The share of finite ranks above which all are: N times 1/N is not quite 1 in float32."""
        return 1.0 - 0.5 / self._run.world_size

    def sound(self, results: torch.Tensor) -> torch.Tensor:
        """Say on the device, (), bool, whether gradients were finite on all ranks, and results are, after `ask`.

        results: the largest magnitudes of these, (n,).
        """
        assert self._shares is not None
        return (self._shares[0] > self.least_share) & results.isfinite().all()

    def learn(self) -> None:
        """Read what the ranks have told each other."""
        assert self._shares is not None
        (unread, magnitudes), shares = self._looked_at, self._shares.tolist()
        if self.order is not None:  # the least or the greatest is off by half at least, where not all are equal
            self.mixed = abs(shares.pop() - self.order) > 0.25 or self.mixed
        world_size = self._run.world_size
        self.finite = shares[0] > self.least_share
        self.noticed = shares[0] > 1.0 + 0.5 / world_size
        held = [*self._empty, *filter(self._is_asked, unread)]
        self.held = self._left_out | frozenset(
            layer for layer, share in zip(held, shares[1:], strict=True) if share < 0.5 / world_size
        )
        if not self.finite and unread:
            sound = magnitudes.isfinite().tolist()
            self.non_finite += tuple(name for name, one in zip(unread, sound, strict=True) if not one)

    def _unread_of(self, device: torch.device | str) -> tuple[list[str], torch.Tensor]:
        """List the layers that a GPU has looked at, and their largest magnitudes, (L,)."""
        names = [name for layers, _ in self._unread for name in layers]
        parts = [magnitudes.to(device) for _, magnitudes in self._unread]
        return names, torch.cat(parts) if parts else torch.zeros(0, device=device)

    def _is_asked(self, layer: str) -> bool:
        """Say whether the ranks agree on a layer's being without a gradient."""
        return self._run.settings.hold_unused and self.is_active(layer)

    def _flags(
        self, device: torch.device | str, notice: bool, unread: list[str], magnitudes: torch.Tensor
    ) -> torch.Tensor:
        """Return what this rank tells the others, without waiting for a GPU: (1 + layers asked for,), float32."""
        # One number says both: N ranks that are finite sum up to N at least, and to less with one that is not.
        infinite = -float(self._run.world_size)
        own = 1.0 + notice if self.finite else infinite
        flags = torch.tensor([own, *(float(not empty) for empty in self._empty.values())], device=device)
        if not unread:
            return flags
        flags[:1] = torch.where(magnitudes.isfinite().all(), flags[:1], infinite)
        if asked := [position for position, name in enumerate(unread) if self._is_asked(name)]:
            seen = magnitudes[asked] if len(asked) < len(unread) else magnitudes
            flags = torch.cat([flags, seen.ne(0).to(flags.dtype)])
        return flags

    def _look_at(self, gradients: Tensors, buffer: torch.Tensor | None) -> None:
        """Note what the ranks will have to agree on: finiteness, and layers without a gradient."""
        values = list(gradients.values())
        if values and values[0].device.type != "cpu":
            self._unread.append((list(gradients), largest_magnitudes(values)))
            return
        if not (all_finite(values) if buffer is None else is_finite(buffer)):
            bad = tuple(name for name, gradient in gradients.items() if not is_finite(gradient))
            self.finite = self.finite and not bad and buffer is None
            self.non_finite += bad
        if self._run.settings.hold_unused:
            self._empty |= {name: not bool(grad.any()) for name, grad in gradients.items() if self.is_active(name)}


def _held_back(layer: str, new: Tensors, before: Tensors, of_group: Collection[str]) -> Tensors:
    """Return a group's new state with one layer's entries as before, but for those of the whole group (`of_group`)."""

    def of_layer(key: str) -> bool:
        owner, _, what = key.rpartition("/")
        return owner == layer and what not in of_group

    kept = {key: in_own_memory(value) for key, value in before.items() if of_layer(key)}
    return {key: value for key, value in new.items() if not of_layer(key)} | kept
