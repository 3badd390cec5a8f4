"""An outer step every few optimizer steps: DiLoCo, its streaming form, and both with any codec.

A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv:2311.08105; "Streaming
DiLoCo with overlapping communication", arXiv:2501.18512. Each worker takes H steps with its own optimizer (AdamW there)
from common parameters. How far it came, the common parameters minus its own, is its pseudo-gradient. The mean of all
workers' is the gradient of an outer optimizer, SGD with Nesterov momentum, which moves the common parameters; from
there each worker goes on. In the streaming form fragments of the model do so in turn, and what was exchanged is applied
tau steps after it was sent, so that training goes on meanwhile: a worker's parameters become alpha times its own plus
(1 - alpha) times the common ones.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradlab.codec import Tensors, separate
from gradlab.codec.measures import all_finite
from gradlab.ddp.copies import Uncopied
from gradlab.ddp.groups import group_or_world
from gradlab.ddp.model import without_compile
from gradlab.ddp.optimizer_steps import CallsBesideSteps
from gradlab.ddp.optimizers import all_optimizers, describe_optimizer, load_states, saved_states
from gradlab.errors import GradlabError
from gradlab.plan import Plan
from gradlab.plan.plan import check_model
from gradlab.plan.shards import cut_like, fragments_of
from gradlab.runtime import checkpoint
from gradlab.runtime.checks import agree_on, check_timeout, given_plan
from gradlab.runtime.engine.device import device_of
from gradlab.runtime.exchange import Exchange
from gradlab.runtime.network.faults import let_go
from gradlab.runtime.outer.membership import Members, Rounds, check_with_manager
from gradlab.runtime.outer.workers import CALLER, WorkerLayers, Workers, local_part, plan_of_rank
from gradlab.runtime.saved import RankState
from gradlab.trial import trial

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]]
# As in DiLoCo, section 3.1: what was best there. In one pass, which takes half the time.
NESTEROV: MakeOptimizer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True, fused=True)
_FORMAT = 1


@dataclass
class Arrival:
    """The mean of the workers' pseudo-gradients. means: by layer name; finite: whether all of them were."""

    means: Tensors
    finite: bool


@dataclass
class Fragment:
    """Layers that take their outer steps together.

    plan: plan of these layers.
    parameters: the common ones, by layer name.
    exchange: exchange with other workers; None if another rank of this worker does that.
    flight: exchange on its way, or arrived and not yet applied; None between.
    lands: the local step after which it is applied.
    """

    plan: Plan
    parameters: dict[str, nn.Parameter]
    optimizers: tuple[torch.optim.Optimizer, ...]
    exchange: Exchange | None
    flight: Future[Arrival] | None = None
    lands: int = 0
    steps: int = 0

    def exchange_between(self, group: dist.ProcessGroup, options: Any, plan: Plan | None = None) -> Exchange:
        """Make an exchange of its pseudo-gradients, by its plan or by another one."""
        how = {**options, "optimizer": self.optimizers, "exchanges": "pseudo-gradients"}
        return Exchange(plan or self.plan, self.parameters.items(), group, **how)

    def common_state(self) -> dict[str, Any]:
        """Return what all workers have alike: tensors that the next outer step writes to."""
        parameters = {name: one.detach() for name, one in self.parameters.items()}
        return {"steps": self.steps, "parameters": parameters, "optimizer": saved_states(self.optimizers)}

    @torch.no_grad()
    def go_on_from(self, saved: Mapping[str, Any]) -> None:
        """Take the common parameters, the outer optimizer's state and the number of outer steps from a saved one."""
        for name, common in self.parameters.items():
            kept = saved["parameters"].get(name)
            if not isinstance(kept, torch.Tensor) or kept.shape != common.shape:
                raise GradlabError(f"checkpoint: the common parameters of {name} are not there in their shape")
            common.copy_(kept)
        load_states(self.optimizers, copied(saved["optimizer"]))
        self.steps = saved["steps"]


class OuterStep(Uncopied):
    """Local steps between workers that exchange how far they came, through a plan.

        outer = OuterStep(plan, model, every=30)
        for batch in batches:
            loss_of(model, batch).backward()
            optimizer.step()
            outer.step()

    All ranks construct it together, and call `step` after every optimizer step. Workers begin with the first one's
    parameters, frozen ones too, and buffers. From there on buffers, such as a batch norm's, are each worker's own.

    Common parameters are kept in 32 bits where the model has 16.

    A worker may be several ranks that train one model: in DDP, whose first rank then exchanges and hands the result on,
    or sharded by FSDP2, where every rank exchanges its shards with those of its place in other workers.

    A step whose pseudo-gradients are not finite on some worker is not taken: all workers go back to the common
    parameters.

    >>> from gradlab.runtime import OuterStep
    >>> model = torch.nn.Linear(64, 32)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> with OuterStep(Plan.uniform(model, "qsgd"), model, every=2) as outer:
    ...     for step in range(4):
    ...         model(torch.ones(8, 64)).square().sum().backward()
    ...         optimizer.step()
    ...         moved = outer.step()
    >>> outer.local_steps, moved
    (4, True)

    Attributes:
        plan: plan as it was given.
        every: local steps between two outer steps of a fragment, H.
        delay: local steps between sending and applying, tau.
        local_steps: taken so far.
        fragments: the parts of the model.
        workers: the ranks.

    Args:
        plan: plan of the model's layers, the path of an artifact, or a codec's name, for
            `Plan.uniform(model, name, exchanges="pseudo-gradients")`, with the codec's usual error feedback where the
            outer optimizer has no momentum. Its schedule counts outer steps.
        model: plain, in DDP, or sharded by FSDP2.
        outer_optimizer: makes the outer optimizer of some parameters, or a list of several.
            None: SGD(lr=0.7, momentum=0.9, nesterov=True),
            DiLoCo's, and with Muon as the workers' own optimizer MuLoCo's (B. Therien et al., arXiv:2505.23725).
            `functools.partial(torch.optim.SGD, lr=1.0)` averages parameters.
        every: H, at least the number of fragments.
        fragments: number of parts of the model. They take their outer steps in turn, H / fragments local steps apart.
        delay: tau, below H. 0: a worker waits for the others in its outer step. Else a thread exchanges while
            training goes on.
        mixing: alpha, the share of its own parameters that a worker keeps when it applies what it sent `delay` steps
            before. Without effect without delay.
        manager: a torchft.Manager, made with use_async_quorum=False, where workers come and go. Each is a job of its
            own then, with the manager in every rank, and waits here until those that are there take it in.
        group: group of all ranks; None: the default one. Groups of gradlab's own are made from it.
        within: ranks of one worker: a process group, one dimension of a DeviceMesh, "node" for the
            machine as torchrun tells it, or None. "model": DDP's own group, if that has fewer ranks than `group`.
        timeout: timeout of the exchange; None: that of `group`.
        options: those of `Exchange` except optimizer, scaler, hold_unused and exchanges.

    Raises:
        GradlabError: for anything that does not fit, or differs between ranks.
    """

    def __init__(
        self,
        plan: Plan | str,
        model: object,
        outer_optimizer: MakeOptimizer | None = None,
        *,
        every: int = 30,
        fragments: int = 1,
        delay: int = 0,
        mixing: float = 0.5,
        manager: Any = None,
        group: dist.ProcessGroup | None = None,
        within: object = "model",
        timeout: timedelta | None = None,
        **options: Any,
    ) -> None:
        self.every, self.delay, self._mixing = every, delay, mixing
        self._check_numbers(fragments)
        check_timeout(timeout)
        self._trial = trial()
        self._held = WorkerLayers(model)
        self._device = device_of(self._held.device)
        if manager is None:
            inside = _group_of_model(model, group) if isinstance(within, str) and within == "model" else within
            self.workers = Workers(group, inside, self._device.device, timeout, self._held.sharded)
        else:
            check_with_manager(delay, {"group": group, "within": within, "timeout": timeout})
            self.workers = Members(manager, self._device.device, self._held.sharded)
        self.local_steps = 0
        held, beside = self._held.by_name, self.beside()
        self._together = partial(agree_on, self.workers.agreeing, self._device.device)

        make = NESTEROV if outer_optimizer is None else outer_optimizer

        def attempt() -> list[Plan]:
            chosen = plan if self._trial is None else self._trial.plan
            self.plan = given_plan(chosen, CALLER, model, lambda: _has_momentum(make))
            if forbidden := sorted({"optimizer", "scaler", "hold_unused", "exchanges"} & set(options)):
                raise GradlabError(f"{CALLER}: the option {forbidden[0]} is of steps that exchange gradients")
            return self._cut(self.plan, lambda one: fragments_of(one, fragments))

        kinds = {name: [*one.shape, str(one.dtype)] for name, one in beside.items()}
        numbers = {"every": every, "fragments": fragments, "delay": delay, "mixing": mixing}
        same = {"frozen layers and buffers": kinds, **numbers}
        parts = self._together(attempt, lambda _: {"the plan (sha256)": self.plan.digest, **same})
        with torch.no_grad():
            self.workers.spread([*(one.values for one in held.values()), *map(local_part, beside.values())])
        self.fragments = [self._fragment(one, make, options) for one in parts]
        self._counted: CallsBesideSteps | None = CallsBesideSteps(one.parameter for one in held.values())
        self._thread = ThreadPoolExecutor(1, "gradlab-outer") if delay else None
        self._finalizer = weakref.finalize(self, _end, self._thread, self.fragments, self.workers)
        self._rounds: Rounds | None = None
        if isinstance(self.workers, Members):
            outer = [type(one).__name__ for one in self.fragments[0].optimizers]
            kind = {"the plan (sha256)": self.plan.digest, "the outer optimizer": outer, **same}
            self._rounds = Rounds(self, self.workers, options, kind)
            self._rounds.join()
        if self._trial is not None:
            self._trial.count(self.workers.count)

    def _check_numbers(self, fragments: int) -> None:
        for name, value, least in (("every", self.every, 1), ("fragments", fragments, 1), ("delay", self.delay, 0)):
            if type(value) is not int or value < least:
                raise GradlabError(f"{CALLER}: {name} = {value!r}, expected a whole number from {least}")
        if fragments > self.every:
            raise GradlabError(
                f"{CALLER}: {fragments} fragments in every = {self.every} steps, expected at most one each"
            )
        if self.delay >= self.every:
            raise GradlabError(f"{CALLER}: delay = {self.delay}, expected less than every = {self.every}")
        if not isinstance(self._mixing, int | float) or not 0 <= self._mixing < 1:
            raise GradlabError(f"{CALLER}: mixing = {self._mixing!r}, expected a share from 0 to below 1")

    def _fragment(self, plan: Plan, make: MakeOptimizer, options: Mapping[str, Any]) -> Fragment:
        parameters = {layer.name: nn.Parameter(_common(self._held.by_name[layer.name].values)) for layer in plan.layers}
        optimizer = make(list(parameters.values())) if callable(make) else make
        optimizers: tuple[torch.optim.Optimizer, ...] = ()
        with suppress(GradlabError):  # what is none has no parameters
            optimizers = all_optimizers(optimizer)
        own = [parameter for one in optimizers for group in one.param_groups for parameter in group["params"]]
        if sorted(map(id, own)) != sorted(map(id, parameters.values())):
            came = type(optimizer).__name__
            raise GradlabError(
                f"{CALLER}: outer_optimizer gave a {came} of other parameters, expected what makes an optimizer of "
                "those it is given, such as functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)"
            )
        if self.workers.sharded and any("Muon" in type(one).__name__ for one in optimizers):
            raise GradlabError(
                f"{CALLER}: outer_optimizer gave Muon, which needs whole matrices, and a rank holds shards: take SGD"
            )
        fragment = Fragment(plan, parameters, optimizers, None)
        if self.workers.between is not None:
            fragment.exchange = fragment.exchange_between(self.workers.between, options)
        return fragment

    # --- steps ---

    def step(self) -> bool:
        """Count an optimizer step; send the fragment that is due, and apply one that was sent `delay` steps ago.

        Returns:
            Whether parameters were changed.

        Raises:
            CommunicationError: if another worker failed or was lost.
            GradlabError: after too many outer steps in a row that were not finite, and after `close`.
        """
        if not self._finalizer.alive:
            raise GradlabError(f"this {CALLER} is closed; make a new one")
        self.local_steps += 1
        if self._counted is not None and self._counted.after(CALLER):
            self._counted = None
        changed = False
        for number, fragment in enumerate(self.fragments):
            if fragment.flight is not None and fragment.lands == self.local_steps:
                self._land(fragment)
                changed = True
            # The last fragment is sent at every multiple of H.
            if (self.local_steps - (number + 1) * self.every // len(self.fragments)) % self.every == 0:
                if self._rounds is not None:
                    self._held.require_same()
                    self._rounds.send(number)
                    return True  # the number of local steps may be another one
                self._send(fragment)
                if not self.delay:
                    self._land(fragment)
                    changed = True
        if self._trial is not None and self.local_steps % self.every == 0:
            self._trial.end()
        return changed

    @torch.no_grad()
    def _send(self, fragment: Fragment) -> None:
        """Start exchanging a fragment's pseudo-gradients."""
        self._held.require_same()
        pseudo = self.pseudo_gradients(fragment)
        fragment.lands = self.local_steps + self.delay
        if self._thread is None:
            fragment.flight = _arrived(self._exchange(fragment, pseudo))
        else:
            fragment.flight = self._thread.submit(self._beside, fragment, pseudo, self._device.ready())

    @torch.no_grad()
    def pseudo_gradients(self, fragment: Fragment) -> Tensors:
        """The common parameters minus this worker's own, one after another where they have one dtype.

        Means are then written in their place.
        """
        common = {name: one.detach() for name, one in fragment.parameters.items()}
        own = {name: self._held.by_name[name].values for name in common}
        first, *others = common.values()
        if any(one.dtype != first.dtype for one in others):
            return {name: one - own[name] for name, one in common.items()}
        pseudo = separate(first.new_empty(sum(one.numel() for one in common.values())), common)
        for name, one in common.items():
            torch.sub(one, own[name], out=pseudo[name])
        return pseudo

    def _beside(self, fragment: Fragment, pseudo: Tensors, ready: Any) -> Arrival:
        """Exchange in the thread, on a GPU in a stream of its own."""
        try:
            with self._device.working():
                self._device.wait(ready) if ready is not None else None
                arrival = self._exchange(fragment, pseudo)
                self._device.synchronize()
        except BaseException as error:  # which may never be asked for
            let_go(error)
            raise
        return arrival

    def _exchange(self, fragment: Fragment, pseudo: Tensors) -> Arrival:
        """Replace pseudo-gradients by the workers' means."""
        return self.arrival(pseudo, self.average(fragment, pseudo))

    @torch.no_grad()
    def average(self, fragment: Fragment, pseudo: Tensors) -> bool:
        """Replace pseudo-gradients by the means of those workers whose rank this one exchanges with; return whether
        all were finite."""
        if fragment.exchange is None:
            return True
        run = fragment.exchange.run
        # Where a codec runs, the step itself looks at gradients and means.
        unseen = [means for name, means in pseudo.items() if run.group_of.get(name) not in run.active]
        return fragment.exchange.step(pseudo).finite and all_finite(unseen)

    @torch.no_grad()
    def arrival(self, means: Tensors, finite: bool) -> Arrival:
        """Give all of a worker's ranks what those that exchange have."""
        finite = self.workers.all_of(finite)
        self.workers.hand_on(list(means.values()))
        return Arrival(means, finite)

    def _land(self, fragment: Fragment) -> None:
        assert fragment.flight is not None
        self._held.require_same()
        arrival, fragment.flight = fragment.flight.result(), None
        self.apply(fragment, arrival)

    @torch.no_grad()
    def apply(self, fragment: Fragment, arrival: Arrival) -> None:
        """Take the outer step, and put the common parameters, or a mixture, into the model."""
        if arrival.finite:
            for name, common in fragment.parameters.items():
                common.grad = arrival.means[name]
            for optimizer in fragment.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            fragment.steps += 1
        else:
            warnings.warn(
                f"{CALLER}: at local step {self.local_steps} what came of {next(iter(fragment.parameters))} and what "
                "goes with it was not finite: all workers go back to the common parameters",
                stacklevel=4,
            )
        self.put(fragment, self._mixing if self.delay and arrival.finite else 0.0)

    @torch.no_grad()
    def put(self, fragment: Fragment, own: float = 0.0) -> None:
        """Put the common parameters into the model, and keep the share `own` of what is there."""
        for name, common in fragment.parameters.items():
            values = self._held.by_name[name].values
            if not own:
                values.copy_(common)
            elif values.dtype == common.dtype:
                torch.lerp(common.detach(), values, own, out=values)
            else:
                values.copy_(torch.lerp(common.detach(), values.to(common.dtype), own))

    @contextmanager
    def exchanging_by(self, plan: Plan, group: dist.ProcessGroup | None = None, **options: Any) -> Iterator[None]:
        """Exchange by another plan for a while: the one that a pilot has found. All ranks begin and end it together.

        Common parameters, outer optimizers and what is on its way stay. Residuals begin at zero.

        Args:
            plan: plan of the model's layers, none of whose groups has layers of several fragments.
            group: group of the same ranks as `workers.between`; None: that one.
            options: options of `Exchange`.

        Raises:
            GradlabError: for a plan that does not fit.
        """
        if self._rounds is not None:
            raise GradlabError(f"{CALLER}: another plan for a while needs the same workers throughout, and no manager")
        alike = partial(cut_like, fragments=[one.parameters for one in self.fragments])
        parts = self._together(lambda: self._cut(plan, alike))
        before, own, group = [one.exchange for one in self.fragments], self.plan, group or self.workers.between
        self.plan = plan
        try:
            with ExitStack() as exchanges:
                for fragment, part in zip(self.fragments, parts, strict=True):
                    if group is not None:
                        made = fragment.exchange_between(group, options, part)
                        fragment.exchange = exchanges.enter_context(made)
                yield
                self.wait()
        finally:
            for fragment, exchange in zip(self.fragments, before, strict=True):
                fragment.exchange = exchange
            self.plan = own

    def _cut(self, plan: Plan, cut: Callable[[Plan], list[Plan]]) -> list[Plan]:
        """Cut a plan of this model before it is of shards, whose groups may differ between ranks of a worker."""
        check_model(plan, [one.layer for one in self._held.by_name.values()])
        return [plan_of_rank(one, self._held) for one in cut(plan)]

    # --- what it holds ---

    @property
    def names(self) -> dict[torch.Tensor, str]:
        """Layer names by the model's own parameters."""
        return {one.parameter: name for name, one in self._held.by_name.items()}

    def beside(self) -> dict[str, torch.Tensor]:
        """Return what else the model computes with, by name: frozen parameters and buffers."""
        return self._held.beside()

    @property
    def outer_steps(self) -> int:
        """Outer steps that were taken, of all fragments together."""
        return sum(fragment.steps for fragment in self.fragments)

    def wait(self) -> None:
        """Wait until what was sent has arrived. It is applied when it is due."""
        for fragment in self.fragments:
            if fragment.flight is not None:
                fragment.flight.result()

    def state_dict(self) -> dict[str, Any]:
        """Collect this rank's state, with what is on its way: plain values and tensors. Waits for the exchange.

        Save it on every rank beside the model's and the inner optimizer's, which differ between workers too.

        Returns:
            The state, for `torch.save` and `torch.load` with weights_only.
        """
        self.wait()
        saved = {str(number): self._saved(fragment) for number, fragment in enumerate(self.fragments)}
        manager = {} if self._rounds is None else {"manager": self._rounds.manager.state_dict()}
        return checkpoint.sealed({**self._identity(), "local_steps": self.local_steps, "fragments": saved, **manager})

    @property
    def stateful(self) -> RankState:
        """This rank's state for `torch.distributed.checkpoint.save` and `load`, see `Exchange.stateful`."""
        return RankState(self)

    def _saved(self, fragment: Fragment) -> dict[str, Any]:
        flight = None if fragment.flight is None else fragment.flight.result()
        return {
            **copied(fragment.common_state()),
            "exchange": None if fragment.exchange is None else fragment.exchange.state_dict(),
            "lands": fragment.lands,
            "flight": None if flight is None else {"finite": flight.finite, "means": copied(flight.means)},
        }

    def _identity(self) -> dict[str, Any]:
        return {
            "outer format": _FORMAT,
            "plan": self.plan.digest,
            "every": self.every,
            "delay": self.delay,
            "parts": len(self.fragments),
            **self.workers.identity,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of the same plan, rank and world size. Every rank loads its own.

        Args:
            state: result of `state_dict`. The model's own parameters are the caller's to load.

        Raises:
            GradlabError: naming what differs.
        """
        self._check(state, self._identity())
        load = Exchange.load_state_dict if self._rounds is None else self._rounds.load
        self._continue([state], lambda exchange, saved: load(exchange, saved[0]))
        if self._rounds is not None:
            self._rounds.manager.load_state_dict(state["manager"])

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]], residuals: str) -> None:
        """Continue the run of N ranks on this run's M, of workers of one rank. Every rank loads those of all N.

        Args:
            states: the N ranks' state dicts, in rank order. They have the common parameters in common.
            residuals: use of residuals, see `Exchange.load_state_dicts`.

        Raises:
            GradlabError: for another plan, workers of several ranks, or checkpoints that are not those of one run.
        """
        mine = self._identity()
        for rank, state in enumerate(states):
            self._check(state, {**mine, "rank": rank, "world_size": len(states), "workers": len(states)})
        if self.workers.inside is not None or self._rounds is not None:
            raise GradlabError("checkpoint: workers of several ranks, or of a manager, cannot be made more or fewer")
        if len({state["local_steps"] for state in states}) > 1:
            raise GradlabError("checkpoints of different local steps, expected those of one moment")
        self._continue(states, lambda exchange, saved: exchange.load_state_dicts(saved, residuals))

    def _check(self, state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
        """Refuse a state of another run; a trial has another plan."""
        checkpoint.require(state, {k: v for k, v in identity.items() if k != "plan" or self._trial is None})

    @torch.no_grad()
    def _continue(self, states: Sequence[Mapping[str, Any]], load: Callable[[Exchange, list[Any]], None]) -> None:
        """Take what all ranks have from the first state, and what each exchange has by `load`."""
        for number, fragment in enumerate(self.fragments):
            everyone = [state["fragments"][str(number)] for state in states]
            if any((one["exchange"] is None) != (fragment.exchange is None) for one in everyone):
                raise GradlabError("checkpoint: of a rank that exchanged, and this one does not, or the reverse")
            if fragment.exchange is not None:
                load(fragment.exchange, [one["exchange"] for one in everyone])
            saved = everyone[0]
            fragment.go_on_from(saved)
            fragment.lands, flight = saved["lands"], saved["flight"]
            fragment.flight = None
            if flight is not None:
                means = {name: flight["means"][name].to(self._device.device) for name in fragment.parameters}
                fragment.flight = _arrived(Arrival(means, flight["finite"]))
        self.local_steps = states[0]["local_steps"]

    def report(self) -> dict[str, Any]:
        """Summarise the run as plain JSON: numbers of steps, and the exchange's report of every fragment."""
        reports = [one.exchange.report() for one in self.fragments if one.exchange is not None]
        return {
            "every": self.every,
            "delay": self.delay,
            "workers": self.workers.count,
            "local_steps": self.local_steps,
            "outer_steps": self.outer_steps,
            "fragments": reports,
        }

    def close(self) -> None:
        """End the run, once what is on its way has arrived. Closing twice does no harm."""
        if self._finalizer.alive:
            with suppress(Exception):  # who asks for its result is told; here it is not wanted any more
                self.wait()
        self._finalizer()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *traceback: object) -> None:
        if kind is None:
            self.close()
            return
        for fragment in self.fragments:  # other workers are told why, and none is waited for
            if fragment.exchange is not None:
                fragment.exchange.__exit__(kind, error, *traceback)
        self._finalizer()


def _group_of_model(model: object, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """DDP's own group, if it has fewer ranks than the group of all."""
    inner = without_compile(model)
    if not isinstance(inner, DistributedDataParallel) or not dist.is_initialized():
        return None
    own = inner.process_group
    if own.size() == group_or_world(group, CALLER).size() and own.size() > 1:
        raise GradlabError(
            f"{CALLER}: DDP averages the gradients of all {own.size()} ranks in every step, so that there are no "
            "workers; put the model into DDP with the process group of one worker, or into none"
        )
    return own


def _has_momentum(make: Any) -> bool:
    """Return whether the outer optimizers that it makes have momentum; True if none can be made of any parameter."""
    with suppress(Exception):
        settings = describe_optimizer(make([nn.Parameter(torch.zeros(2, 2))]))
        return settings is None or settings.momentum is not None
    return True


def _common(values: torch.Tensor) -> torch.Tensor:
    """Copy a layer's values, from 16 bits to 32, as outer steps may be smaller than these resolve."""
    wide = torch.float32 if values.dtype in (torch.bfloat16, torch.float16) else values.dtype
    return values.to(wide, copy=True, memory_format=torch.contiguous_format)


def _arrived(arrival: Arrival) -> Future[Arrival]:
    future: Future[Arrival] = Future()
    future.set_result(arrival)
    return future


def copied(value: Any) -> Any:
    """Copy plain values and tensors, so that what is kept has memory of its own."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: copied(one) for key, one in value.items()}
    return [copied(one) for one in value] if isinstance(value, list | tuple) else value


def _end(thread: ThreadPoolExecutor | None, fragments: Iterable[Fragment], workers: Workers) -> None:
    for fragment in fragments:
        if fragment.exchange is not None:
            fragment.exchange.close()
    workers.close()
    if thread is not None:
        thread.shutdown(wait=False, cancel_futures=True)
