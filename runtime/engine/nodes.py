"""Drive a plan between nodes: gradients are averaged inside a node, exchanged by their owners, and spread inside.

Every part of a step (a bucket of DDP) takes three ways. An all-to-all inside the node brings each local rank all
addends of what it carries, which it sums in their order. Its groups' codecs run with the owners of the other nodes,
just as they would between ranks. When they have ended, their owners broadcast the results inside the node.

While one part's codecs wait for the slow network, the next part is averaged inside, and the results of earlier ones
are spread. Local ranks own different codecs, which end at different moments, so averages and results need an order that
all keep. On a CPU each has a group of its own: the hook starts the averages, the worker spreads results as soon as
codecs are through with a part, and both go by the parts' order. On a GPU, where collectives of two groups can wait for
each other, both have one group and one order: part p is averaged, its codecs begin, and the results of the part `LAG`
before it are spread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from gradlab.codec import Tensors
from gradlab.collectives import Request, mean_of_node
from gradlab.ddp.groups import part_of
from gradlab.ddp.topology import Topology
from gradlab.executor import PlanRun
from gradlab.executor.ownership import Ownership, forecast_payload, share_out
from gradlab.executor.ticks import InFlight
from gradlab.plan import Plan
from gradlab.runtime.engine.driver import Iteration, Part, StepDriver
from gradlab.runtime.engine.options import Surroundings
from gradlab.runtime.engine.statistics import Place, StepRecord
from gradlab.runtime.network.communicator import Communicator, Work

LAG = 2  # parts that come in before a complete one has to be spread: codecs of two rounds have ended by then


@dataclass(frozen=True)
class Addends:
    """A local rank's part of a sum, on its way.

    sizes: elements that each local rank carries.
    received: the addends of all local ranks, one after another, once `work` has ended.
    work: None: nothing travels.
    """

    sizes: list[int]
    received: torch.Tensor
    work: Work | None


@dataclass(eq=False)
class _Spread:
    """The way of one part.

    memory: this local rank's part of it, flat: addends' mean, then results.
    sizes: elements that each local rank carries.
    complete: whether all groups with a layer in it, of any owner, have begun; then with which part the last did.
    gathered: each local rank's part, once the collectives in `works` have ended.
    """

    part: Part
    memory: torch.Tensor
    sizes: list[int]
    complete: int | None = None
    gathered: list[torch.Tensor] = field(default_factory=list)
    works: list[dist.Work | None] = field(default_factory=list)


class NodeDriver(StepDriver):
    """A `StepDriver` between nodes, whose parts are averaged inside the node before, and spread after.

    The communicator joins the same local rank on all nodes, and the run is of the groups that this rank owns.

    everyone: communicator of the ranks of all nodes.
    inside: communicator of this rank's node, whose rank in it is its local rank.
    averaging: communicator of the node's averages; `inside` itself, if all collectives have to keep one order.
    ownership: owners of the plan's parts.
    """

    def __init__(
        self,
        run: PlanRun,
        communicator: Communicator,
        around: Surroundings,
        place: Place,
        *,
        everyone: Communicator,
        inside: Communicator,
        averaging: Communicator,
        ownership: Ownership,
    ) -> None:
        super().__init__(run, communicator, around, place, everyone, inside)
        self._inside, self._averaging, self._ownership = inside, averaging, ownership
        self._one_order = averaging is inside  # of averages and results
        self._numel = {layer.name: layer.numel for layer in run.plan.layers}
        self._group_of = {layer: group for group in run.plan.compressed_groups for layer in group.layers}
        self._spreads: list[_Spread] = []
        self._waiting: deque[_Spread] = deque()  # to be spread, in this order
        self._arrived: set[str] = set()  # layers

    @property
    def may_start(self) -> bool:
        """Whether `start` may be called for the next step's parts: always, unless all collectives have one order."""
        return self.ranks_compared and not self._one_order

    def start(self, part: Part) -> Addends:
        """Start to bring each local rank the addends of what it carries."""
        inside, ownership = self._averaging, self._ownership
        flat = {name: gradient.reshape(-1) for name, gradient in part.gradients.items()}
        carried = range(inside.world_size)
        sizes = [sum(ownership.numel(name, local_rank) for name in flat) for local_rank in carried]
        pieces = [flat[name][ownership.share(name, local_rank)] for local_rank in carried for name in flat]
        sent = self.around.workspace.empty((sum(sizes),), part.memory[0])
        if pieces:  # DDP's bucket may hold layers alone that were frozen after DDP was made
            torch.cat(pieces, out=sent)
        return Addends(sizes, *inside.all_to_all(sent, sizes))

    def begin(self) -> None:
        super().begin()
        self._spreads, self._waiting = [], deque()
        self._arrived = set()

    def add(self, part: Part) -> None:
        current = self._in_progress(part)
        with self._timed_inside(current):
            spread = self._average_inside(part)
        own = self._own_gradients(spread)
        super().add(Part(part.index, own, spread.memory if own else None, part.arrived, part.ready))
        self._spreads.append(spread)
        self._waiting.append(spread)
        self._arrived |= part.gradients.keys()
        self._note_complete(part.index)
        self._spread_early(current)
        while self._waiting and self._is_due(self._waiting[0], part.index):
            self._await_and_spread(current, self._waiting[0])

    def finish(self) -> StepRecord:
        current = self._in_progress(None)
        self._start_agreement(current)
        while self._waiting:
            self._await_and_spread(current, self._waiting[0])
        self.drain()
        with self._timed_inside(current):
            held = self._agree_beside(current)
            self._write(current, held)
        for communicator in {self._inside, self._averaging}:
            current.record.inside_wire_bytes += communicator.take_counts()[1]
        record = self._commit(current)
        for spread in self._spreads:
            spread.part.settle()
        self._spreads = []
        return record

    def abandon(self) -> list[Part]:
        super().abandon()
        parts = [spread.part for spread in self._spreads]
        self._spreads, self._waiting = [], deque()
        return parts

    def close(self) -> None:
        super().close()
        self._averaging.close()

    # --- inside the node ---

    def _average_inside(self, part: Part) -> _Spread:
        """Sum the addends of what this rank carries, in the order of local ranks, once they are there."""
        addends: Addends = part.started or self.start(part)
        part.started = None
        self._averaging.wait(addends.work)
        size = addends.sizes[self._inside.rank]
        rows = addends.received.view(len(addends.sizes), size)
        own = self.around.workspace.empty((size,), rows)
        return _Spread(part, mean_of_node(list(rows), own), addends.sizes)

    def _own_gradients(self, spread: _Spread) -> Tensors:
        """This local rank's share of a part: whole layers in their shape, pieces of others flat."""
        own, ownership, local_rank = {}, self._ownership, self._inside.rank
        names = [
            name
            for name in spread.part.gradients
            if ownership.numel(name, local_rank) or name in self.run.group_of  # an empty layer completes its group too
        ]
        pieces = spread.memory.split([ownership.numel(name, local_rank) for name in names])
        for name, piece in zip(names, pieces, strict=True):
            whole = piece.numel() == self._numel[name]
            own[name] = piece.view(spread.part.gradients[name].shape) if whole else piece
        return own

    def _note_complete(self, index: int) -> None:
        """Note which parts have all that will change them under way."""
        for spread in self._waiting:
            if spread.complete is None:
                groups = [self._group_of[name] for name in spread.part.gradients if name in self._group_of]
                if all(self._arrived.issuperset(group.layers) for group in groups):
                    spread.complete = index

    @staticmethod
    def _is_due(spread: _Spread, index: int) -> bool:
        return spread.complete is not None and spread.complete + LAG <= index

    def _issue(self, requests: Sequence[Request]) -> InFlight:
        in_flight = super()._issue(requests)
        self._spread_early(self._in_progress(None))
        return in_flight

    def _spread_early(self, current: Iteration) -> None:
        """Start to spread the results that are there."""
        while self._waiting and not self._one_order and self._is_through(current, self._waiting[0]):
            self._await_and_spread(current, self._waiting[0])

    @staticmethod
    def _is_through(current: Iteration, spread: _Spread) -> bool:
        """Whether a part's results are there."""
        last, mean = spread.complete, current.dense.get(spread.part.index)
        if last is None or (mean is not None and not mean.has_arrived):
            return False
        return not current.ticks.has(lambda running: running.part <= last)

    def _await_and_spread(self, current: Iteration, spread: _Spread) -> None:
        """Wait until the codecs are through with the first waiting part, and start to spread its results."""
        last = spread.part.index if spread.complete is None else spread.complete
        self._drain_part(current, spread.part.index, last)
        if self._waiting and self._waiting[0] is spread:  # it was not spread while others were waited for
            self._spread(current, self._waiting.popleft())

    def _spread(self, current: Iteration, spread: _Spread) -> None:
        """Start to bring a part's results to all local ranks."""
        with self._timed_inside(current):
            inside = self._inside
            for owner, size in enumerate(spread.sizes):
                mine = owner == inside.rank  # sent from where it is
                spread.gathered.append(spread.memory if mine else self.around.workspace.empty((size,), spread.memory))
                spread.works.append(inside.broadcast(spread.gathered[-1], owner))

    def _write(self, current: Iteration, held: frozenset[str]) -> None:
        """Put the results where the gradients were."""
        for spread in self._spreads:
            for work in spread.works:
                self._inside.wait(work)
            if current.step.finite:
                self._write_part(spread, held)
            else:
                for tensor in spread.part.memory:
                    tensor.fill_(torch.nan)

    def _write_part(self, spread: _Spread, held: frozenset[str]) -> None:
        ownership, gradients = self._ownership, spread.part.gradients
        pieces: dict[str, list[torch.Tensor]] = {name: [] for name in gradients}
        for local_rank, carried in enumerate(spread.gathered):
            sizes = [ownership.numel(name, local_rank) for name in gradients]
            for name, piece in zip(gradients, carried.split(sizes), strict=True):
                pieces[name].append(piece)
        for name, gradient in gradients.items():
            if name in held:
                gradient.zero_()
                continue
            parts = [piece for piece in pieces[name] if piece.numel()]
            if len(parts) > 1 and gradient.is_contiguous():
                torch.cat(parts, out=gradient.view(-1))
            elif parts:
                gradient.copy_((parts[0] if len(parts) == 1 else torch.cat(parts)).view(gradient.shape))

    @contextmanager
    def _timed_inside(self, current: Iteration) -> Iterator[None]:
        """Note the time spent on the node's own exchange, its waiting included."""
        began = time.perf_counter()
        yield
        current.record.inside_seconds += time.perf_counter() - began


def node_driver(
    plan: Plan, group: dist.ProcessGroup, around: Surroundings, topology: Topology, *, owned: bool
) -> NodeDriver:
    """Make the driver of a plan's steps between nodes. A collective on the group, as nodes have groups of their own."""
    device = around.device.device
    everyone = around.communicator(group, owned=owned)
    inside, between = (
        around.communicator(part_of((group,), ranks, None, device), owned=True)
        for ranks in (topology.inside, topology.between)
    )
    averaging = inside
    if around.device.shares_stream:
        averaging = around.communicator(
            part_of((group,), topology.inside, None, device), deterministic=False, owned=True
        )
    ownership = share_out(plan, topology.local_ranks)
    mine = ownership.owned(topology.local_rank)
    codecs = {one.name: plan.build(one, device) for one in plan.compressed_groups if one.name in mine}
    run = around.run(plan, topology.node, len(topology.nodes), codecs)

    def forecast(plan: Plan) -> float:
        return forecast_payload(plan, ownership, topology.local_rank, len(topology.nodes))

    carried = {
        name: (one, ownership.numel(name, topology.local_rank), one.element_size())
        for name, one in around.parameters.items()
    }
    place = Place.of(everyone, forecast, carried, topology)
    communicators = {"everyone": everyone, "inside": inside, "averaging": averaging}
    return NodeDriver(run, between, around, place, ownership=ownership, **communicators)
