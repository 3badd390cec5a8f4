"""Serve codecs' requests on a process group: requests that stand at the same step become one collective per kind.

The order of collectives follows from the requests' kinds and shapes alone.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gradlab.collectives import (
    Request,
    all_gather_wire_bytes,
    all_reduce_wire_bytes,
    all_to_all_wire_bytes,
    broadcast_wire_bytes,
    by_fusion_key,
    check_request,
    payload_bytes,
    signature,
)
from gradlab.collectives.relay import grid
from gradlab.ddp.groups import Ranks, backends_of, destroy, names_of
from gradlab.errors import GradlabError
from gradlab.runtime.network.faults import CommunicationError
from gradlab.runtime.network.in_flight import InPlaceMean, fuse
from gradlab.runtime.network.relay import Relay
from gradlab.runtime.timeline import Timeline, profiled
from gradlab.workspace import Workspace

# torch 2.13 renames all_gather_into_tensor and warns of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


# Bytes of a message from which several are worth more processor time than one collective.
LEAST_BYTES = 128 * 2**10


class Messages:
    """Messages of this rank to others and of others to this one, on their way. Like `dist.Work`, for all of them.

    Gloo sends what the receiver has told that it waits for, and tells so on the one connection of the two ranks, behind
    whatever is being sent there. So all receives begin first. If sends did, as in Gloo's own all-to-all, the two
    directions of a connection take turns, and large messages use 0.6 of a link.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        name: str,
        received: Mapping[int, torch.Tensor],
        sent: Mapping[int, torch.Tensor],
        timeline: Timeline,
    ) -> None:
        """Start them: vectors to fill and vectors to send, by rank of the group. Empty ones are left out."""
        self._name, self._timeline, self._began = name, timeline, time.perf_counter()
        self._memory = (received, sent)  # alive until everything is there: the backend holds no tensor
        coming, going = ({rank: one for rank, one in by.items() if one.numel()} for by in (received, sent))
        if any(one.is_cuda for one in (*coming.values(), *going.values())):  # NCCL takes them as one
            operations = [dist.P2POp(dist.irecv, one, group=group, group_peer=rank) for rank, one in coming.items()]
            operations += [dist.P2POp(dist.isend, one, group=group, group_peer=rank) for rank, one in going.items()]
            self._works = dist.batch_isend_irecv(operations)
        else:
            works = [dist.irecv(one, group=group, group_src=rank) for rank, one in coming.items()]
            works += [dist.isend(one, group=group, group_dst=rank) for rank, one in going.items()]
            self._works = [work for work in works if work is not None]

    def wait(self) -> None:
        """Wait until all are there; raise if one of them failed."""
        for work in self._works:
            work.wait()
        # They have no future to tell when they were over, so that the span ends with the wait for them.
        nbytes = sum(message.nbytes for message in self._memory[1].values())
        self._timeline.add("network", self._name, self._began, time.perf_counter(), bytes=nbytes)

    def is_completed(self) -> bool:
        """Say whether all are there."""
        return all(work.is_completed() for work in self._works)


#: A collective on its way.
Work = dist.Work | Messages | Relay


@dataclass(frozen=True)
class Transfer:
    """A message on its way to the next rank of the ring, and one from the rank before.

    incoming: memory from which the backend can send: on a GPU, for Gloo, the host's.
    """

    incoming: torch.Tensor
    messages: Messages
    device: torch.device


class Communicator:
    """Issues fused collectives on one process group and counts their bytes.

    >>> from gradlab.collectives import Mean
    >>> from gradlab.runtime import Communicator
    >>> communicator = Communicator(torch.distributed.group.WORLD)
    >>> communicator.issue([Mean(torch.tensor([3.0]))]).answers(), communicator.payload_bytes
    ([tensor([3.])], 4)

    Attributes:
        group: the process group; None after `close`.
        names: what messages call its ranks: their numbers among all ranks of the job.
        payload_bytes, wire_bytes: since the last `take_counts`, in bytes.
        wait_seconds: time spent waiting for collectives so far.
        relay_below: bytes of an all-to-all's largest part below which it goes in two hops, the same on all ranks. 0:
            never.

    Args:
        group: the process group.
        deterministic: take means by all-to-all, a sum in rank order and all-gather, so that they equal those of
            `run_lockstep` bit for bit, instead of by the backend's all-reduce.
        check_requests: before each round compare all ranks' requests. It is a debugging aid and costs one small
            collective.
        owned: whether `close` destroys the group.
        averages: whether a buffer's mean in place is the backend's own average, as in FSDP, instead of plain DDP's.
        timeline: record of spans of time. None: no record.
        workspace: memory of messages. None: new memory each time.
        device: device of messages of its own. None: the CPU.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        deterministic: bool = False,
        check_requests: bool = False,
        *,
        owned: bool = False,
        averages: bool = False,
        timeline: Timeline | None = None,
        workspace: Workspace | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.group: dist.ProcessGroup | None = group
        self.rank, self.world_size, self.names = group.rank(), group.size(), names_of(group)
        self.deterministic = deterministic
        self.check_requests = check_requests
        self.payload_bytes = 0
        self.wire_bytes = 0
        self.wait_seconds = 0.0
        self.relay_below = 0
        self.device = device or torch.device("cpu")
        self._owned = owned
        self._backends = backends_of(group)
        self.averages = averages
        self.timeline = timeline or Timeline()
        self.workspace = workspace or Workspace()

    @property
    def ranks(self) -> Ranks:
        """The group's ranks, for plain JSON between steps; refused after `close`."""
        if self.group is None:
            raise CommunicationError("ranks could not be compared: the process group is closed")
        return Ranks(self.group, self.device)

    def close(self) -> None:
        """Let go of the group. Idempotent. Peers that wait for this rank in an owned one get an error."""
        group, self.group = self.group, None
        if self._owned:
            destroy(group)

    def issue(self, requests: Sequence[Request]) -> Round:
        """Start the collectives that serve requests of one step of this rank, without waiting for them."""
        for request in requests:
            check_request(request, self.world_size)
            self.payload_bytes += payload_bytes(request, self.rank)
        if self.check_requests:
            self._compare([signature(request) for request in requests])
        with profiled("send"):
            return Round(self, requests)

    def take_counts(self) -> tuple[int, int]:
        """Return the payload and the wire bytes since the last call."""
        counts = self.payload_bytes, self.wire_bytes
        self.payload_bytes = self.wire_bytes = 0
        return counts

    def mean_in_place(self, buffer: torch.Tensor) -> InPlaceMean:
        """Start replacing a flat buffer by its mean: unless deterministic, with exactly plain DDP's arithmetic."""
        self.payload_bytes += buffer.nbytes
        with profiled("send"):
            return InPlaceMean(self, buffer)

    def wait(self, work: Work | None) -> None:
        """Wait for a collective (None: for nothing), and note how long that took; a CommunicationError if it failed."""
        if work is not None:
            start = time.perf_counter()
            try:
                with profiled("wait"):
                    work.wait()
            except RuntimeError as error:
                raise CommunicationError(f"a collective failed: {error}") from error
            stop = time.perf_counter()
            self.wait_seconds += stop - start
            self.timeline.add("wait", "wait", start, stop)

    def all_reduce(self, buffer: torch.Tensor, average: bool = False) -> dist.Work | None:
        """Start summing a buffer over ranks, in place; with `average` the backend divides by their number."""
        self.wire_bytes += all_reduce_wire_bytes(buffer.nbytes, self.world_size)
        kind = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        return self._start("all-reduce", buffer.nbytes, dist.all_reduce, buffer, kind)

    def all_gather(self, message: torch.Tensor) -> tuple[torch.Tensor, dist.Work | None]:
        """Start gathering vectors (length,); return the tensor (N, length) for them, and what to wait for."""
        out = self.workspace.empty((self.world_size, message.numel()), message)
        self.wire_bytes += all_gather_wire_bytes(message.nbytes, self.world_size)
        return out, self._start("all-gather", message.nbytes, _all_gather, out.view(-1), message)

    def broadcast(self, buffer: torch.Tensor, root: int) -> dist.Work | None:
        """Start overwriting a buffer with the root's; return what to wait for."""
        self.wire_bytes += broadcast_wire_bytes(buffer.nbytes, self.rank, root, self.world_size)
        return self._start("broadcast", buffer.nbytes, partial(dist.broadcast, group_src=root), buffer)

    def all_to_all(
        self, parts: torch.Tensor, sizes: Sequence[int], incoming: Sequence[int] | None = None, shared: int | None = 0
    ) -> tuple[torch.Tensor, Work | None]:
        """Start sending `parts`, one after another, to ranks; return the vector to be filled, and what to wait for.

        sizes, incoming: elements for and from each rank. None: as many as `sizes` has for this rank.
        shared: elements at the end of each part that are the same for all ranks. The others' number depends on who is
            sent them alone. None: numbers vary, and no rank knows the largest.
        """
        incoming = [sizes[self.rank]] * self.world_size if incoming is None else list(incoming)
        out = self.workspace.empty((sum(incoming),), parts)
        for_one = [n - (shared or 0) for n in sizes]
        for_all = [n - for_one[self.rank] for n in incoming]
        # What varies is sent as if it were large, as all have to send alike.
        largest = sys.maxsize if shared is None else (max(for_one) + max(for_all)) * parts.element_size()
        relayed = 0 < largest < self.relay_below and self.sends(parts)
        rows = grid(self.world_size)[0] if relayed else 1
        self.wire_bytes += parts.element_size() * all_to_all_wire_bytes(for_one, self.rank, for_all, rows)
        if relayed:
            return out, Relay(self, out, parts, for_one, for_all)
        if largest >= LEAST_BYTES and parts.device.type == "cpu" and self.sends(parts):
            return out, self._send_parts(out, parts, incoming, sizes)
        # Left out only where no rank sends anything: one that neither sends nor is sent anything takes part.
        nbytes = parts.nbytes or out.nbytes or largest
        work = self._start("all-to-all", nbytes, dist.all_to_all_single, out, parts, incoming, list(sizes))
        return out, work

    def _send_parts(
        self, out: torch.Tensor, parts: torch.Tensor, incoming: Sequence[int], sizes: Sequence[int]
    ) -> Messages:
        """Start an all-to-all as messages between pairs, of which the first begins with the next rank."""
        received, sent = out.split(list(incoming)), parts.split(list(sizes))
        received[self.rank].copy_(sent[self.rank])
        before, after = (
            [(self.rank + step * i) % self.world_size for i in range(1, self.world_size)] for step in (-1, 1)
        )
        return self.send("all-to-all", {rank: received[rank] for rank in before}, {rank: sent[rank] for rank in after})

    def sends(self, message: torch.Tensor) -> bool:
        """Say whether the backend sends a tensor from where it is: Gloo's collectives do on a GPU, its messages not."""
        kind = message.device.type
        return f"{kind}:{'gloo' if kind == 'cpu' else 'nccl'}" in self._backends

    def send(self, name: str, received: Mapping[int, torch.Tensor], sent: Mapping[int, torch.Tensor]) -> Messages:
        """Start messages between this rank and others: vectors to fill, and vectors to send."""
        if self.group is None:
            raise CommunicationError(f"{name} could not start: the process group is closed")
        try:
            return Messages(self.group, name, received, sent, self.timeline)
        except RuntimeError as error:
            raise CommunicationError(f"{name} could not start: {error}") from error

    def pass_on(self, message: torch.Tensor, expected: int) -> Transfer:
        """Start sending (bytes,) uint8 to the next rank, and receiving `expected` bytes from the rank before."""
        device = message.device
        message = message if self.sends(message) else message.cpu()
        incoming = self.workspace.empty((expected,), message)
        self.wire_bytes += message.nbytes if self.world_size > 1 else 0
        if self.world_size > 1:
            after, before = ((self.rank + i) % self.world_size for i in (1, -1))
            messages = self.send("ring", {before: incoming}, {after: message})
        else:
            messages = self.send("ring", {}, {})
        return Transfer(incoming, messages, device)

    def arrived(self, transfer: Transfer) -> torch.Tensor:
        """Wait for both directions of a transfer; return the message that came in."""
        self.wait(transfer.messages)
        return transfer.incoming.to(transfer.device)

    @contextmanager
    def working(self, name: str) -> Iterator[None]:
        """Note the codec's work between two messages of a ring, while the context lasts."""
        began = time.perf_counter()
        yield
        self.timeline.add("encode and decode", name, began, time.perf_counter())

    def _start(self, name: str, nbytes: int, collective: Callable[..., Any], *tensors: Any) -> dist.Work | None:
        if nbytes == 0:  # on all ranks alike; an error on some backends
            return None
        if self.group is None:  # PyTorch would take the default group
            raise CommunicationError(f"{name} could not start: the process group is closed")
        try:
            work: dist.Work = collective(*tensors, group=self.group, async_op=True)
        except RuntimeError as error:
            raise CommunicationError(f"{name} could not start: {error}") from error
        self.timeline.watch(work, name, nbytes)
        return work

    def gather_bytes(self, message: torch.Tensor) -> list[torch.Tensor]:
        """Gather a message of one length from every rank, in rank order."""
        out, work = self.all_gather(message)
        self.wait(work)
        return list(out)

    def gather_parts(self, message: torch.Tensor, incoming: Sequence[int]) -> Sequence[torch.Tensor]:
        """Gather a message from every rank, in rank order; incoming: elements from each, which all ranks know. Those
        beyond what this rank announced are cut off."""
        own, ranks = message[: incoming[self.rank]], self.world_size
        out, work = self.all_to_all(own.repeat(ranks), [own.numel()] * ranks, incoming, own.numel())
        self.wait(work)
        return out.split(list(incoming))

    def _compare(self, signatures: Sequence[Any]) -> None:
        digest = hashlib.sha256(repr(signatures).encode()).digest()
        counted = self.wire_bytes
        theirs = self.gather_bytes(torch.tensor(list(digest), dtype=torch.uint8, device=self.device))
        self.wire_bytes = counted
        others = zip(self.names, theirs, strict=True)
        if different := [rank for rank, other in others if bytes(other.tolist()) != digest]:
            own = self.names[self.rank]
            raise GradlabError(f"ranks {different} ask for other collectives than rank {own}: {signatures}")


class Round:
    """The collectives in flight for one set of requests."""

    def __init__(self, communicator: Communicator, requests: Sequence[Request]) -> None:
        self._count = len(requests)
        self._fused = [
            (positions, fuse(communicator, [requests[p] for p in positions])) for positions in by_fusion_key(requests)
        ]

    def answers(self) -> list[Any]:
        """Wait for the collectives; return one answer per request, in order. No two tensors overlap."""
        answers: list[Any] = [None] * self._count
        for positions, fused in self._fused:
            for position, answer in zip(positions, fused.answers(), strict=True):
                answers[position] = answer
        return answers
