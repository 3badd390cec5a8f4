"""Outer steps among workers that come and go: torchft says who takes part, and here follows what that means for a plan.

Before every exchange the workers ask torchft's manager for a quorum. If it is another one than before, torchft has
connected its members anew, and one that missed outer steps was given a living worker's state. Exchanges are then made
for the new ranks. Every worker keeps its residuals; those of the lost are lost, and a new worker begins without. State
that all ranks share, such as running tables and warm factors, comes with the parameters. If an exchange fails on the
way, states go back to those before it, and the workers that are left exchange the same pseudo-gradients again.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gradlab.codec.wrapper import applies_earlier_gradients
from gradlab.ddp.groups import Ranks
from gradlab.errors import GradlabError
from gradlab.runtime import checkpoint
from gradlab.runtime.network.faults import CommunicationError, let_go
from gradlab.runtime.outer.workers import CALLER, Workers, local_part
from gradlab.version import VERSION

if TYPE_CHECKING:
    from gradlab.runtime.exchange import Exchange
    from gradlab.runtime.outer.step import OuterStep

_ATTEMPTS = 20  # exchanges in a row that fail before a worker gives up


def check_with_manager(delay: int, ranks: Mapping[str, object]) -> None:
    """Refuse what a run with a manager cannot have: other workers by name, and exchanges beside the training."""
    if given := [name for name, one in ranks.items() if one not in (None, "model")]:
        raise GradlabError(
            f"{CALLER}: manager and {given[0]} at once; with a manager every worker is a job of its own, and its "
            "groups and timeouts are the manager's"
        )
    if delay:
        raise GradlabError(f"{CALLER}: manager and delay = {delay}, expected delay=0, as workers may go meanwhile")


class Members(Workers):
    """The workers of a manager's quorum. Each is a job of its own, all of whose ranks train one model.

    manager: torchft's.
    between: the group of the present quorum, which torchft has made; None before the first.
    exchanges: whether this rank exchanges, and none of its worker does that for it.
    """

    def __init__(self, manager: Any, device: torch.device, sharded: bool) -> None:
        try:
            from torchft.process_group import ManagedProcessGroup
        except ImportError as error:
            raise GradlabError(f"{CALLER}: a manager needs gradlab[torchft] ({error})") from None
        if not all(hasattr(manager, name) for name in ("start_quorum", "should_commit", "register_state_dict_fn")):
            raise GradlabError(f"{CALLER}: the manager is a {type(manager).__name__}, expected a torchft.Manager")
        if getattr(manager, "_use_async_quorum", False) or not getattr(manager, "_init_sync", True):
            raise GradlabError(f"{CALLER}: the manager has to be made with use_async_quorum=False and init_sync=True")
        self.manager, self.sharded, self._device = manager, sharded, device
        self._managed = ManagedProcessGroup(manager).parent
        self.inside = dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
        self.agreeing = () if self.inside is None else (self.inside,)
        self.exchanges = sharded or self.inside is None or self.inside.rank() == 0
        self.between, self._made, self.count = None, (), 0

    @property
    def identity(self) -> dict[str, Any]:
        return {"manager's": True}  # ranks and their number change

    @property
    def connected(self) -> dist.ProcessGroup:
        """The group that torchft has made last."""
        group = self._managed.parent
        assert isinstance(group, dist.ProcessGroup)
        return group

    def spread(self, tensors: Sequence[torch.Tensor]) -> None:
        """Leave tensors as they are: torchft gives all workers the first one's state."""

    def close(self) -> None:
        """Let go of the group, so that others who wait in it get an error at once."""
        self.between = None
        with suppress(Exception):
            self._managed.abort()


class Rounds:
    """The outer steps of one worker, each with the workers that are alive. They are made and taken by all its ranks.

    manager: torchft's.

    Args:
        outer: worker's step.
        members: workers of the quorum.
        options: options of `Exchange`.
        kind: values that all workers have alike, by name, as plain JSON.
    """

    def __init__(self, outer: OuterStep, members: Members, options: Mapping[str, Any], kind: Mapping[str, Any]) -> None:
        if outer.plan.refresh is not None:
            raise GradlabError(f"{CALLER}: manager and a plan with a refresh, which needs the same workers throughout")
        self.manager = members.manager
        self._outer, self._members, self._options = outer, members, options
        self._kind = {"gradlab's version": VERSION, **kind}
        self._states: list[Any] = [None] * len(outer.fragments)  # of the exchanges, before the one in progress
        self._sending: int | None = None  # the fragment's number; None: this worker has come just now
        self._fresh = True  # this worker has trained nothing to send
        self._share = 1.0  # of the members, those that have trained something
        self._names: Counter[str] = Counter()
        self._why: object = None
        # Who comes is given the state of those who are there, whatever it has loaded.
        self.manager.load_state_dict({"step": 0, "batches_committed": 0})
        try:
            self.manager.register_state_dict_fn(CALLER, self._take_over, self._for_others)
        except AssertionError:
            raise GradlabError(f"{CALLER}: the manager serves another {CALLER} already; make one for each") from None

    def join(self) -> None:
        """Wait until the workers that are there take this one in, and take the outer step that they take."""
        self._round()

    def send(self, number: int) -> None:
        """Take the outer step of a fragment with those that are there. A worker that comes too late is given the state
        of those that did not wait for it, and then takes theirs."""
        self._sending = number
        self._round()

    def load(self, exchange: Exchange, saved: Mapping[str, Any]) -> None:
        """Continue an exchange from its `state_dict`, of any number of workers."""
        if all(saved.get(name) == exchange.identity[name] for name in ("rank", "world_size")):
            exchange.load_state_dict(saved)
            return
        checkpoint.require(saved, {"plan": exchange.identity["plan"]})
        self._go_on(exchange, {**saved, "states": checkpoint.states_of(exchange.run, saved)})

    # --- one outer step ---

    def _round(self) -> None:
        for number, fragment in enumerate(self._outer.fragments):
            if fragment.exchange is not None:
                self._states[number] = checkpoint.between_steps(fragment.exchange.run)
        for _ in range(_ATTEMPTS):
            if self._attempt():
                self._fresh = False
                return
        self._leave()
        raise CommunicationError(f"{CALLER}: {_ATTEMPTS} exchanges in a row did not come to an end: {self._why}")

    def _attempt(self) -> bool:
        """Exchange once with those that are there, and take the outer step if that counts; return whether it does."""
        self._start_quorum()
        arrival = self._exchanged()
        done = self._members.all_of(arrival is not None)
        if not self.manager.should_commit() or not done or arrival is None:
            self._undo(self._why or "another rank of this worker failed")
            return False
        means, finite = arrival
        if self._sending is not None:
            self._outer.apply(self._outer.fragments[self._sending], self._outer.arrival(means, finite))
        return True

    def _start_quorum(self) -> None:
        self._why = None
        try:
            self.manager.start_quorum()
        except GradlabError:  # what it was given does not fit
            self._leave()
            raise
        except Exception as error:
            self._leave()
            raise CommunicationError(
                f"{CALLER}: no quorum: too few workers are left, or the lighthouse is gone for longer than "
                f"quorum_timeout and quorum_retries of the manager ({_line(error)})"
            ) from None

    def _exchanged(self) -> tuple[dict[str, torch.Tensor], bool] | None:
        """Exchange what this worker has to send; None if that failed."""
        self._members.count = self.manager.num_participants()
        try:
            if (error := self.manager.errored()) is not None:
                raise CommunicationError(f"workers could not be connected: {_line(error.original_exception)}")
            return self._exchange()
        except (RuntimeError, AssertionError, CommunicationError) as error:
            let_go(error)
            self.manager.report_error(error)
            self._undo(error)
        except GradlabError:
            self._leave()
            raise
        return None

    def _exchange(self) -> tuple[dict[str, torch.Tensor], bool]:
        members = self._members
        if members.exchanges and (members.between is None or members.connected is not members.between):
            self._connect(members.connected)
        if self._sending is None:
            return {}, True  # all have come just now
        fragment = self._outer.fragments[self._sending]
        pseudo = self._outer.pseudo_gradients(fragment)
        if self._share < 1:  # those that have trained nothing send zeros, and do not count
            torch._foreach_mul_(list(pseudo.values()), 1 / self._share)
        finite = self._outer.average(fragment, pseudo)
        if members.between is not None:  # nobody takes the step unless all have what it takes
            dist.all_reduce(torch.ones(1, device=self._outer._device.device), group=members.between)
        return pseudo, finite

    # --- other members than before ---

    def _connect(self, group: dist.ProcessGroup) -> None:
        """Make the exchanges of the members that torchft has connected."""
        members, ranks = self._members, Ranks(group, self._outer._device.device)
        ranks.require_same(self._kind)
        name = str(getattr(self.manager, "_replica_id", None) or "")
        everyone = ranks.gather({"name": name, "sending": self._sending, "fresh": self._fresh})
        self._refuse_twice(name, everyone, ranks.rank)
        if len({one["sending"] for one in everyone}) > 1:
            raise CommunicationError("workers stand at different fragments")
        self._tell([one["name"] for one in everyone], ranks.rank)
        members.between = group
        self._share = sum(not one["fresh"] for one in everyone) / len(everyone) or 1.0
        for number, fragment in enumerate(self._outer.fragments):
            if fragment.exchange is not None:
                fragment.exchange.close()
            fragment.exchange = fragment.exchange_between(group, self._options)
            if self._states[number] is not None:
                self._go_on(fragment.exchange, self._states[number])

    def _go_on(self, exchange: Exchange, state: Mapping[str, Any]) -> None:
        checkpoint.take_over(exchange.run, state, self._outer._device)

    def _refuse_twice(self, name: str, everyone: Sequence[Mapping[str, Any]], rank: int) -> None:
        """Refuse a worker that is there already: the one that has come later, or the one of the higher rank."""
        twice = [at for at, one in enumerate(everyone) if name and one["name"] == name]
        if len(twice) > 1 and rank == max(twice, key=lambda at: (everyone[at]["fresh"], at)):
            raise GradlabError(f"{CALLER}: worker {name!r} is there already; give each manager a replica_id of its own")
        counts = Counter(one["name"] for one in everyone if one["name"])
        if double := [other for other, count in counts.items() if count > 1]:
            raise CommunicationError(f"worker {double[0]!r} is there twice")

    def _tell(self, names: Sequence[str], rank: int) -> None:
        """Say on one worker who has gone and who has come."""
        before, self._names = self._names, Counter(names)
        gone, came = before - self._names, self._names - before
        if rank == 0 and before and (gone or came):
            codecs = [
                one for state in self._outer.fragments if state.exchange for one in state.exchange.run.codecs.values()
            ]
            lost = gone and any(map(applies_earlier_gradients, codecs))
            warnings.warn(
                f"{CALLER}: at local step {self._outer.local_steps} "
                + " and ".join(f"{_named(who)} {what}" for who, what in ((gone, "gone"), (came, "come")) if who)
                + f": {len(names)} workers go on"
                + ("; the residuals of the lost are lost" if lost else ""),
                stacklevel=2,
            )

    # --- a worker's state, for others and from them ---

    def _for_others(self) -> dict[str, Any]:
        """Collect what a worker takes over that was not there. torchft asks while this one waits for a quorum."""
        outer, parts = self._outer, list[dict[str, Any]]()
        for fragment, state in zip(outer.fragments, self._states, strict=True):
            exchange = fragment.exchange
            known = None if state is None or exchange is None else checkpoint.for_others(exchange.run, state)
            parts.append({**fragment.common_state(), "exchange": known})
        beside = {name: local_part(one) for name, one in outer.beside().items()}
        numbers = {"kind": self._kind, "sending": self._sending, "local_steps": outer.local_steps}
        return {**numbers, "beside": beside, "parts": parts}

    @torch.no_grad()
    def _take_over(self, state: Mapping[str, Any]) -> None:
        """Go on from a living worker's state."""
        for name, mine in self._kind.items():
            if (theirs := state["kind"].get(name)) != mine:
                raise GradlabError(f"{CALLER}: this worker has {name} = {mine!r}, the run that it joins {theirs!r}")
        outer = self._outer
        for name, one in outer.beside().items():
            local_part(one).copy_(state["beside"][name])
        for fragment, part in zip(outer.fragments, state["parts"], strict=True):
            fragment.go_on_from(part)
            outer.put(fragment)
        self._states = [part["exchange"] for part in state["parts"]]
        outer.local_steps, self._sending, self._fresh = state["local_steps"], state["sending"], True

    # --- ends ---

    def _undo(self, why: object) -> None:
        """Let go of an exchange that does not count."""
        self._why = why
        for fragment in self._outer.fragments:
            if fragment.exchange is not None:
                fragment.exchange.close()
        self._members.close()

    def _leave(self) -> None:
        """Let the others go on without this worker."""
        self._undo(self._why)
        with suppress(Exception):
            self.manager.shutdown(wait=False)


def _named(who: Counter[str]) -> str:
    known = sorted(name for name in who.elements() if name)
    return ", ".join(known) if len(known) == who.total() else f"{who.total()} workers"


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
