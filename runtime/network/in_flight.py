"""One collective for several requests: means of one dtype as one all-reduce, everything else as bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

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
from gradlab.errors import BadMessage, GradlabError

if TYPE_CHECKING:
    from gradlab.runtime.network.communicator import Communicator, Messages, Transfer


_NEW_TENSORS_BEGIN = 64  # bytes: at multiples of it, on the CPU
_WORTH_A_CALL = 2**13  # elements of a vector, on average


Answers = Callable[[], list[Any]]


def fuse(communicator: Communicator, requests: Sequence[Any]) -> Answers:
    """Start one collective for one or more requests of one fusion key; return what waits for it, and gives one answer
    per request, in order."""
    return _FUSED[fusion_key(requests[0])[0]](communicator, requests)


class InPlaceMean:
    """Mean of one flat floating-point buffer, in place.

    scaled: whether the buffer is multiplied by 1/N already.
    """

    def __init__(self, communicator: Communicator, buffer: torch.Tensor, scaled: bool = False) -> None:
        self._communicator, self._buffer = communicator, buffer
        self._received: torch.Tensor | None = None
        self._work: dist.Work | Messages | None = None
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

    def wait(self) -> torch.Tensor:
        """Wait for the mean, and return the buffer."""
        self._communicator.wait(self._work)
        if self._received is not None:
            world_size = self._communicator.world_size
            total = sum_in_rank_order(list(self._received.view(world_size, -1)))
            gathered, work = self._communicator.all_gather(total)
            self._communicator.wait(work)
            self._buffer.copy_(gathered.view(-1)[: self._buffer.numel()])
        return self._buffer


def _mean(communicator: Communicator, requests: Sequence[Mean]) -> Answers:
    """Several Means of one dtype as one."""
    like = [request.tensor for request in requests]
    vectors = [tensor.reshape(-1) for tensor in like]
    scaled = not communicator.deterministic
    mean = InPlaceMean(communicator, (_joined_and_scaled if scaled else _joined)(vectors, communicator), scaled)
    return lambda: [_aligned(piece, communicator) for piece in cut_like(mean.wait(), like)]


def _sum(communicator: Communicator, requests: Sequence[Sum]) -> Answers:
    """Several Sums of one dtype as one. Sums of integers are the same in any order."""
    like = [request.tensor for request in requests]
    buffer = _joined([tensor.reshape(-1) for tensor in like], communicator)
    work = communicator.all_reduce(buffer) if buffer.numel() else None

    def answers() -> list[Any]:
        communicator.wait(work)
        return [_aligned(piece, communicator) for piece in cut_like(buffer, like)]

    return answers


def _gather(communicator: Communicator, requests: Sequence[Gather]) -> Answers:
    """Several Gathers of equal sizes as one all-gather of bytes."""
    like = [request.tensor for request in requests]
    rows, work = communicator.all_gather(_pack(like, communicator))

    def answers() -> list[Any]:
        communicator.wait(work)
        return _by_request([_unpack(row, like, communicator) for row in rows])

    return answers


def _varying_gather(communicator: Communicator, requests: Sequence[Gather]) -> Answers:
    """Several Gathers of varying lengths: an all-gather of the lengths, then one of the bytes, padded."""
    tensors = [request.tensor for request in requests]
    sent = torch.tensor([tensor.numel() for tensor in tensors], device=tensors[0].device)
    announced, work = communicator.all_gather(sent)

    def answers() -> list[Any]:
        communicator.wait(work)
        lengths, refused = _checked_lengths(requests, tensors, announced.tolist())
        sizes = [tensor.element_size() for tensor in tensors]
        longest = max(sum(n * size for n, size in zip(row, sizes, strict=True)) for row in lengths)
        packed = _pack(tensors, communicator)
        rows = communicator.gather_bytes(torch.nn.functional.pad(packed, (0, longest - packed.numel())))
        like = [_empty(tensors, counts) for counts in lengths]
        return _by_request([_unpack(*pair, communicator) for pair in zip(rows, like, strict=True)], refused)

    return answers


def _broadcast(communicator: Communicator, requests: Sequence[Broadcast]) -> Answers:
    """Several Broadcasts from one root as one of bytes."""
    like = [request.tensor for request in requests]
    packed = _pack(like, communicator)
    work = communicator.broadcast(packed, requests[0].root)

    def answers() -> list[Any]:
        communicator.wait(work)
        return _unpack(packed, like, communicator)

    return answers


def _all_to_all(communicator: Communicator, requests: Sequence[AllToAll | Gather]) -> Answers:
    """Several AllToAlls, and Gathers of lengths that all ranks know, as one all-to-all of bytes.

    Destination j's parts of all requests lie together. A gathered message goes to all destinations.
    """
    ranks = range(communicator.world_size)
    for request in requests:
        _check_length(request, communicator.rank)
    packed = [_pack([_part_for(request, j) for request in requests], communicator) for j in ranks]
    like = [[_part_from(request, j, communicator.rank) for request in requests] for j in ranks]
    incoming = [sum(tensor.nbytes for tensor in of_rank) for of_rank in like]
    sizes = [part.numel() for part in packed]
    largest = sum(map(_largest, requests))
    out, work = communicator.all_to_all(_joined(packed, communicator), sizes, incoming, largest)

    def answers() -> list[Any]:
        communicator.wait(work)
        rows = zip(out.split(incoming), like, strict=True)
        return _by_request([_unpack(row, of_rank, communicator) for row, of_rank in rows])

    return answers


def _varying_all_to_all(communicator: Communicator, requests: Sequence[AllToAll]) -> Answers:
    """Several AllToAlls of varying lengths: an all-to-all of the lengths, then one of the bytes."""
    by_rank = list(zip(*(request.tensors for request in requests), strict=True))
    sent = [tensor.numel() for parts in by_rank for tensor in parts]
    announced, work = communicator.all_to_all(
        torch.tensor(sent, device=by_rank[0][0].device), [len(requests)] * communicator.world_size
    )

    def answers() -> list[Any]:
        communicator.wait(work)
        mine = by_rank[communicator.rank]
        lengths, refused = _checked_lengths(requests, mine, announced.view(communicator.world_size, -1).tolist())
        like = [_empty(mine, row) for row in lengths]
        incoming = [sum(tensor.nbytes for tensor in tensors) for tensors in like]
        packed = [_pack(parts, communicator) for parts in by_rank]
        # No rank knows the largest part of all, and all have to send alike: as if it were large.
        sizes = [part.numel() for part in packed]
        out, bytes_sent = communicator.all_to_all(_joined(packed, communicator), sizes, incoming, sys.maxsize)
        communicator.wait(bytes_sent)
        rows = zip(out.split(incoming), like, strict=True)
        return _by_request([_unpack(row, of_rank, communicator) for row, of_rank in rows], refused)

    return answers


def _empty(like: Sequence[torch.Tensor], lengths: Sequence[int]) -> list[torch.Tensor]:
    return [tensor.new_empty(length) for tensor, length in zip(like, lengths, strict=True)]


def _by_request(
    by_rank: Sequence[Sequence[torch.Tensor]], refused: Mapping[int, BadMessage] | None = None
) -> list[Any]:
    """Sort what came from each rank by request; in the place of a refused one stands its error."""
    answers: list[Any] = [list(tensors) for tensors in zip(*by_rank, strict=True)]
    for at, error in refused.items() if refused else ():
        answers[at] = error
    return answers


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


def _largest(request: AllToAll | Gather) -> int:
    """Bytes of the largest part that any rank sends another of a request, as all ranks know them."""
    if isinstance(request, AllToAll):
        return max(request.sizes)
    return max(request.lengths or ()) * request.tensor.element_size()


def _part_for(request: AllToAll | Gather, destination: int) -> torch.Tensor:
    """The tensor of a request that a rank is sent."""
    return request.tensors[destination] if isinstance(request, AllToAll) else request.tensor


def _part_from(request: AllToAll | Gather, source: int, rank: int) -> torch.Tensor:
    """A tensor of the shape of what comes from a rank."""
    if isinstance(request, AllToAll):
        return request.tensors[rank]
    return request.tensor.new_empty((request.lengths or ())[source])


class _Ring:
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
    Mean: _mean,
    Sum: _sum,
    Gather: _gather,
    "varying": _varying_gather,
    Broadcast: _broadcast,
    AllToAll: _all_to_all,
    "varying parts": _varying_all_to_all,
    Ring: lambda communicator, requests: _Ring(communicator, requests).answers,
}
