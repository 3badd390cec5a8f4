"""One collective for several requests: means of one dtype as one all-reduce, everything else as bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch

from gradlab.codec.batch import cut_like
from gradlab.collectives import (
    AllToAll,
    Broadcast,
    Gather,
    Mean,
    Ring,
    Sum,
    check_length,
    fusion_key,
    sum_in_rank_order,
)
from gradlab.collectives.requests import are_padded
from gradlab.errors import BadMessage, GradlabError

if TYPE_CHECKING:
    from gradlab.runtime.network.communicator import Communicator, Transfer, Work


_NEW_TENSORS_BEGIN = 64  # bytes: at multiples of it, on the CPU
_WORTH_A_CALL = 2**13  # elements of a vector, on average


def fuse(communicator: Communicator, requests: Sequence[Any]) -> Fused:
    """Start one collective for one or more requests of one fusion key."""
    return _FUSED[fusion_key(requests[0])[0]](communicator, requests)


class Fused(ABC):
    """One collective in flight, for several requests of one kind.

    It is no closure: the traceback of an error keeps a function and what that closes over, and with these the group
    that peers must see closed.
    """

    @abstractmethod
    def answers(self) -> list[Any]:
        """Wait for the collective; return one answer per request, in order."""


class InPlaceMean(Fused):
    """Mean of one flat floating-point buffer, in place.

    scaled: whether the buffer is multiplied by 1/N already.
    """

    def __init__(self, communicator: Communicator, buffer: torch.Tensor, scaled: bool = False) -> None:
        self._communicator, self._buffer = communicator, buffer
        self._received: torch.Tensor | None = None
        self._work: Work | None = None
        if communicator.deterministic and buffer.numel():
            self._scatter()
        elif buffer.numel():
            # Plain DDP multiplies by 1/N before it sums; dividing afterwards differs in the last bit at N = 3.
            average = communicator.averages and not scaled
            if not scaled and not average:
                buffer.mul_(1.0 / communicator.world_size)
            self._work = communicator.all_reduce(buffer, average)

    @property
    def has_arrived(self) -> bool:
        """Whether `answers` need not wait. False if that cannot be known."""
        return self._received is None and (self._work is None or self._work.is_completed())

    def _scatter(self) -> None:
        world_size = self._communicator.world_size
        chunk = -(-self._buffer.numel() // world_size)
        padded = torch.nn.functional.pad(self._buffer, (0, chunk * world_size - self._buffer.numel()))
        self._received, self._work = self._communicator.all_to_all(padded, [chunk] * world_size)

    def answers(self) -> list[Any]:
        self._communicator.wait(self._work)
        if self._received is not None:
            world_size = self._communicator.world_size
            total = sum_in_rank_order(list(self._received.view(world_size, -1)))
            gathered, work = self._communicator.all_gather(total)
            self._communicator.wait(work)
            self._buffer.copy_(gathered.view(-1)[: self._buffer.numel()])
        return [self._buffer]


class _FusedMean(InPlaceMean):
    """Several Means of one dtype as one."""

    def __init__(self, communicator: Communicator, requests: Sequence[Mean]) -> None:
        self._like = [request.tensor for request in requests]
        vectors = [tensor.reshape(-1) for tensor in self._like]
        if communicator.deterministic:
            super().__init__(communicator, _joined(vectors, communicator))
        else:
            super().__init__(communicator, _joined_and_scaled(vectors, communicator), scaled=True)

    def answers(self) -> list[Any]:
        (buffer,) = super().answers()
        return [_aligned(piece, self._communicator) for piece in cut_like(buffer, self._like)]


class _FusedSum(Fused):
    """Several Sums of one dtype as one. Sums of integers are the same in any order."""

    def __init__(self, communicator: Communicator, requests: Sequence[Sum]) -> None:
        self._communicator, self._like = communicator, [request.tensor for request in requests]
        self._buffer = _joined([tensor.reshape(-1) for tensor in self._like], communicator)
        self._work = communicator.all_reduce(self._buffer) if self._buffer.numel() else None

    def answers(self) -> list[Any]:
        self._communicator.wait(self._work)
        return [_aligned(piece, self._communicator) for piece in cut_like(self._buffer, self._like)]


class _FusedGather(Fused):
    """Several Gathers of equal sizes as one all-gather of bytes."""

    def __init__(self, communicator: Communicator, requests: Sequence[Gather]) -> None:
        self._communicator = communicator
        self._like = [request.tensor for request in requests]
        packed = _pack(self._like, communicator)
        self._rows, self._work = communicator.all_gather(packed)

    def answers(self) -> list[Any]:
        self._communicator.wait(self._work)
        by_rank = [_unpack(row, self._like, self._communicator) for row in self._rows]
        return [list(tensors) for tensors in zip(*by_rank, strict=True)]


class _VaryingGather(Fused):
    """Several Gathers of varying lengths: an all-gather of the lengths, then one of the bytes, see `are_padded`."""

    def __init__(self, communicator: Communicator, requests: Sequence[Gather]) -> None:
        self._communicator, self._requests = communicator, requests
        self._tensors = [request.tensor for request in requests]
        lengths = _lengths(self._tensors, self._tensors[0].device)
        self._lengths, self._work = communicator.all_gather(lengths)

    def answers(self) -> list[Any]:
        communicator = self._communicator
        communicator.wait(self._work)
        lengths, refused = _checked_lengths(self._requests, self._tensors, self._lengths.tolist())
        sizes = [tensor.element_size() for tensor in self._tensors]
        incoming = [sum(n * size for n, size in zip(row, sizes, strict=True)) for row in lengths]
        packed = _pack(self._tensors, communicator)
        rows: Sequence[torch.Tensor]
        if are_padded(incoming):
            rows = communicator.gather_bytes(torch.nn.functional.pad(packed, (0, max(incoming) - packed.numel())))
        else:
            rows = communicator.gather_parts(packed, incoming)
        by_rank = [
            _unpack(row, [tensor.new_empty(n) for tensor, n in zip(self._tensors, counts, strict=True)], communicator)
            for row, counts in zip(rows, lengths, strict=True)
        ]
        return [refused.get(at, list(tensors)) for at, tensors in enumerate(zip(*by_rank, strict=True))]


class _FusedBroadcast(Fused):
    """Several Broadcasts from one root as one of bytes."""

    def __init__(self, communicator: Communicator, requests: Sequence[Broadcast]) -> None:
        self._communicator = communicator
        self._like = [request.tensor for request in requests]
        self._packed = _pack(self._like, communicator)
        self._work = communicator.broadcast(self._packed, requests[0].root)

    def answers(self) -> list[Any]:
        self._communicator.wait(self._work)
        return _unpack(self._packed, self._like, self._communicator)


class _FusedAllToAll(Fused):
    """Several AllToAlls, and Gathers of lengths that all ranks know, as one all-to-all of bytes.

    Destination j's parts of all requests lie together. Gathered messages, which go to all destinations, come last.
    """

    def __init__(self, communicator: Communicator, requests: Sequence[AllToAll | Gather]) -> None:
        self._communicator = communicator
        ranks = range(communicator.world_size)
        for request in requests:
            _check_length(request, communicator.rank)
        packed = [_pack([_part_for(request, j) for request in requests], communicator) for j in ranks]
        self._like = [[_part_from(request, j, communicator.rank) for request in requests] for j in ranks]
        self._sizes = [sum(tensor.nbytes for tensor in like) for like in self._like]
        sizes = [part.numel() for part in packed]
        shared = sum(request.tensor.nbytes for request in requests if isinstance(request, Gather))
        self._out, self._work = communicator.all_to_all(_joined(packed, communicator), sizes, self._sizes, shared)

    def answers(self) -> list[Any]:
        self._communicator.wait(self._work)
        rows = zip(self._out.split(self._sizes), self._like, strict=True)
        by_rank = [_unpack(row, like, self._communicator) for row, like in rows]
        return [list(tensors) for tensors in zip(*by_rank, strict=True)]


class _VaryingAllToAll(Fused):
    """Several AllToAlls of varying lengths: an all-to-all of the lengths, then one of the bytes."""

    def __init__(self, communicator: Communicator, requests: Sequence[AllToAll]) -> None:
        self._communicator, self._requests = communicator, requests
        self._by_rank = list(zip(*(request.tensors for request in requests), strict=True))
        told = [[one.tells(rank) for one in requests] for rank in range(communicator.world_size)]
        self._told = told[communicator.rank]
        every = [
            tensor for parts, of_rank in zip(self._by_rank, told, strict=True) for tensor in compress(parts, of_rank)
        ]
        lengths = _lengths(every, requests[0].tensors[0].device)
        self._lengths, self._work = communicator.all_to_all(lengths, list(map(sum, told)))

    def answers(self) -> list[Any]:
        communicator = self._communicator
        communicator.wait(self._work)
        mine, told = self._by_rank[communicator.rank], iter(self._lengths.tolist())
        lengths = [[next(told) if one else 0 for one in self._told] for _ in self._by_rank]
        lengths, refused = _checked_lengths(self._requests, mine, lengths)
        like = [[tensor.new_empty(n) for tensor, n in zip(mine, row, strict=True)] for row in lengths]
        incoming = [sum(tensor.nbytes for tensor in tensors) for tensors in like]
        packed = [_pack(parts, communicator) for parts in self._by_rank]
        sizes = [part.numel() for part in packed]
        out, work = communicator.all_to_all(_joined(packed, communicator), sizes, incoming, None)
        communicator.wait(work)
        rows = zip(out.split(incoming), like, strict=True)
        by_rank = [_unpack(row, tensors, communicator) for row, tensors in rows]
        return [refused.get(at, list(tensors)) for at, tensors in enumerate(zip(*by_rank, strict=True))]


def _lengths(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the numbers of elements that receivers are told, int32 (tensors,)."""
    lengths = [tensor.numel() for tensor in tensors]
    if max(lengths, default=0) > torch.iinfo(torch.int32).max:
        raise GradlabError(f"a message of {max(lengths)} elements, expected less than 2^31: use smaller groups")
    return torch.tensor(lengths, dtype=torch.int32, device=device)


def _checked_lengths(
    requests: Sequence[Gather | AllToAll], like: Sequence[torch.Tensor], lengths: Sequence[list[int]]
) -> tuple[list[list[int]], dict[int, BadMessage]]:
    """Bound the lengths that ranks announce before memory is taken: 0 for those refused, and errors by request."""
    refused: dict[int, BadMessage] = {}
    taken = [list(row) for row in lengths]
    for rank, row in enumerate(taken):
        for at, (request, tensor) in enumerate(zip(requests, like, strict=True)):
            if (wrong := check_length(request, row[at] * tensor.element_size(), rank)) is not None:
                refused.setdefault(at, wrong)
                row[at] = 0
    return taken, refused


def _check_length(request: AllToAll | Gather, rank: int) -> None:
    if isinstance(request, Gather) and request.lengths and request.lengths[rank] != request.tensor.numel():
        raise GradlabError(f"Gather of {request.tensor.numel()} elements, announced {request.lengths[rank]}")


def _part_for(request: AllToAll | Gather, destination: int) -> torch.Tensor:
    """The tensor of a request that a rank is sent."""
    return request.tensors[destination] if isinstance(request, AllToAll) else request.tensor


def _part_from(request: AllToAll | Gather, source: int, rank: int) -> torch.Tensor:
    """A tensor of the shape of what comes from a rank."""
    if isinstance(request, AllToAll):
        return request.tensors[rank]
    return request.tensor.new_empty((request.lengths or ())[source])


class _FusedRing(Fused):
    """Several Rings as one, Algorithm 1 of GradiVeQ: a segment's messages of all of them lie together.

    While a message travels, this rank prepares its own part of it; while a sum travels, it decompresses the last one.
    """

    def __init__(self, communicator: Communicator, requests: Sequence[Ring]) -> None:
        self._communicator = communicator
        self._codes = [request.code for request in requests]
        self._rank, self._world_size = communicator.rank, communicator.world_size
        self._message = self._added(self._rank, None, self._prepared(self._rank))
        self._transfer = self._pass_on(self._rank)

    def answers(self) -> list[Any]:
        rank, last = self._rank, self._world_size - 1
        for i in range(1, self._world_size):
            own = self._prepared(rank - i)
            self._message = self._added(rank - i, self._communicator.arrived(self._transfer), own)
            self._transfer = self._pass_on(rank - i)
        # What this rank completed is the segment after its own; the next to arrive is its own.
        means: list[list[torch.Tensor]] = [[torch.empty(0)] * self._world_size for _ in self._codes]
        for i in range(self._world_size):
            segment = (rank + 1 - i) % self._world_size
            for code, mean, message in zip(self._codes, means, self._parts(segment, self._message), strict=True):
                mean[segment] = code.finish(segment, message)
            if i < last:
                self._message = self._communicator.arrived(self._transfer)
            if i < last - 1:
                self._transfer = self._pass_on(segment - 1)
        return means

    def _prepared(self, segment: int) -> list[torch.Tensor]:
        with self._communicator.working("prepare a ring's segment"):
            return [code.prepare(segment % self._world_size) for code in self._codes]

    def _added(self, segment: int, received: torch.Tensor | None, own: Sequence[torch.Tensor]) -> torch.Tensor:
        segment %= self._world_size
        parts = [None] * len(own) if received is None else self._parts(segment, received)
        with self._communicator.working("add a ring's segment"):
            messages = [code.add(segment, part, new) for code, part, new in zip(self._codes, parts, own, strict=True)]
        return messages[0] if len(messages) == 1 else torch.cat(messages)

    def _parts(self, segment: int, message: torch.Tensor) -> list[torch.Tensor]:
        return [_aligned_bytes(part) for part in message.split(self._sizes(segment))]

    def _sizes(self, segment: int) -> list[int]:
        return [code.nbytes(segment % self._world_size) for code in self._codes]

    def _pass_on(self, segment: int) -> Transfer:
        """Send the segment's message to the next rank, and begin to receive the one before it."""
        return self._communicator.pass_on(self._message, sum(self._sizes(segment - 1)))


def _aligned_bytes(part: torch.Tensor) -> torch.Tensor:
    # A view with a wider dtype needs an offset that its element size divides, and what decodes it by a product of
    # matrices gives other last bits on memory that begins elsewhere than new tensors do.
    return part if part.storage_offset() % _NEW_TENSORS_BEGIN == 0 else part.clone()


def _joined(vectors: Sequence[torch.Tensor], communicator: Communicator) -> torch.Tensor:
    """Several vectors of one dtype, one after another, in memory of their own."""
    out = communicator.workspace.empty((sum(vector.numel() for vector in vectors),), vectors[0])
    return torch.cat(list(vectors), out=out)


def _joined_and_scaled(vectors: Sequence[torch.Tensor], communicator: Communicator) -> torch.Tensor:
    """The same, times 1/N: in one pass, or in two of fewer calls where vectors are small."""
    sizes = [vector.numel() for vector in vectors]
    out, share = communicator.workspace.empty((sum(sizes),), vectors[0]), 1.0 / communicator.world_size
    if sum(sizes) < _WORTH_A_CALL * len(sizes):
        return torch.cat(list(vectors), out=out).mul_(share)
    for vector, piece in zip(vectors, out.split(sizes), strict=True):
        torch.mul(vector, share, out=piece)
    return out


def _pack(tensors: Sequence[torch.Tensor], communicator: Communicator) -> torch.Tensor:
    """The bytes of several tensors, one after another: a uint8 vector."""
    return _joined([t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors], communicator)


def _unpack(packed: torch.Tensor, like: Sequence[torch.Tensor], communicator: Communicator) -> list[torch.Tensor]:
    """The inverse of `_pack`: tensors of the dtypes and shapes of `like`, which do not overlap."""
    sizes = [tensor.nbytes for tensor in like]
    pieces = packed[: sum(sizes)].split(sizes)  # what a varying gather was padded with stays behind
    return [
        _aligned(piece, communicator, t.element_size()).view(t.dtype).view(t.shape)
        for piece, t in zip(pieces, like, strict=True)
    ]


def _aligned(piece: torch.Tensor, communicator: Communicator, element_size: int = 1) -> torch.Tensor:
    """A piece of a message, as the next piece of code may take it."""
    # A view with a wider dtype needs an offset that its element size divides. And some kernels (convolutions) give
    # other last bits on memory that is not aligned: where those count, every answer begins as a new tensor does.
    boundary = _NEW_TENSORS_BEGIN if communicator.deterministic else element_size
    return piece if piece.storage_offset() * piece.element_size() % boundary == 0 else piece.clone()


_FUSED: dict[Any, Any] = {
    Mean: _FusedMean,
    Sum: _FusedSum,
    Gather: _FusedGather,
    "varying": _VaryingGather,
    Broadcast: _FusedBroadcast,
    AllToAll: _FusedAllToAll,
    "varying parts": _VaryingAllToAll,
    Ring: _FusedRing,
}
