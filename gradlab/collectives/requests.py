"""The collectives a codec may ask for, and their byte rules.

A codec is a coroutine: it yields a request (or a tuple of requests, which then travel together) and is sent the
answer (or a tuple of answers). It never touches torch.distributed, so the same lines run offline on a trace, N
coroutines stepped together by `run_lockstep`, and online on a process group, driven by `gradlab.runtime`.

Two sizes are counted from the tensors that pass, in bytes:
    payload  what a rank contributes, the figure papers divide by (only the root contributes to a broadcast)
    wire     what the rank's network interface sends under the collective's algorithm at N ranks
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch

from gradlab.collectives.ring import RingCode, ring_wire_bytes
from gradlab.errors import BadMessage, GradlabError

Result = TypeVar("Result")
LENGTH_BYTES = 4  # of a length that is told before a vector of varying length, int32
MOST_BYTES = 2**28  # of a vector of varying length, where a request does not say


@dataclass(frozen=True)
class Mean:
    """The mean over ranks of a floating-point tensor, same shape on every rank. Answer: a tensor of that shape.

    >>> from gradlab.collectives import Mean, run_lockstep
    >>> def exchange(value):
    ...     mean = yield Mean(torch.tensor([value]))
    ...     return mean.item()
    >>> [result.value for result in run_lockstep([exchange(1.0), exchange(3.0)])]
    [2.0, 2.0]
    """

    tensor: torch.Tensor


@dataclass(frozen=True)
class Sum:
    """The exact sum over ranks of a tensor of integers, same shape on every rank. Answer: a tensor of that shape.

    tensor: int8, uint8, int32 or int64, as process groups sum these. That sums fit is whoever asks' business.

    >>> from gradlab.collectives import Sum, run_lockstep
    >>> def exchange(value):
    ...     total = yield Sum(torch.tensor([value], dtype=torch.int32))
    ...     return total.item()
    >>> [result.value for result in run_lockstep([exchange(1), exchange(3)])]
    [4, 4]
    """

    tensor: torch.Tensor


@dataclass(frozen=True)
class Gather:
    """Every rank's tensor. Answer: a list of N tensors in rank order.

    tensor: this rank's.
    varying: whether the tensors are vectors whose lengths differ between ranks; lengths then travel too.
    lengths: lengths of all ranks' vectors, if every rank knows them already. Nothing is sent or padded for them.
    most: bytes of a vector of varying length at most. A longer one is refused before memory is taken for it.

    >>> from gradlab.collectives import Gather, run_lockstep
    >>> def exchange(value):
    ...     return (yield Gather(torch.tensor([value])))
    >>> run_lockstep([exchange(1), exchange(3)])[0].value
    [tensor([1]), tensor([3])]
    """

    tensor: torch.Tensor
    varying: bool = False
    lengths: tuple[int, ...] | None = None
    most: int = MOST_BYTES


@dataclass(frozen=True)
class Broadcast:
    """Rank `root`'s tensor. All ranks pass a tensor of one shape; only the root's values count. Answer: a tensor.

    >>> from gradlab.collectives import Broadcast, run_lockstep
    >>> def exchange(value):
    ...     return (yield Broadcast(torch.tensor([value]), root=1))
    >>> [result.value for result in run_lockstep([exchange(1), exchange(3)])]
    [tensor([3]), tensor([3])]
    """

    tensor: torch.Tensor
    root: int


class Parts(Sequence[torch.Tensor]):
    """A vector's parts for all ranks, which are cut off when one of them is read.

    N ranks of one process would cut N^2 parts. These requests are compared by lengths alone,
    and the whole vectors are read, see `Received`.

    >>> from gradlab.collectives import Parts
    >>> parts = Parts(torch.tensor([1.0, 2.0, 3.0]), (2, 1))
    >>> [part.tolist() for part in parts]
    [[1.0, 2.0], [3.0]]

    Attributes:
        whole: the vector.
        lengths: elements of each part. It takes no time to compare where ranks share the tuple.

    Args:
        whole: the vector.
        lengths: elements of each part.
        cut: returns the parts, vectors of these lengths; None: they follow one another in the vector.
    """

    def __init__(
        self, whole: torch.Tensor, lengths: tuple[int, ...], cut: Callable[[], Sequence[torch.Tensor]] | None = None
    ) -> None:
        self.whole, self.lengths = whole, lengths
        self._cut = cut

    def __getitem__(self, rank: Any) -> Any:
        return self._parts[rank]

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def _parts(self) -> Sequence[torch.Tensor]:
        return self.whole.split(list(self.lengths)) if self._cut is None else self._cut()


@dataclass(frozen=True)
class AllToAll:
    """One tensor for each rank. Answer: a sequence of N tensors, what each rank meant for this one.

    tensors: those at j go to rank j, and have the same shape on every rank (shapes may differ between destinations).
        `Parts` of a vector cost less where many ranks are in one process.
    varying: whether the tensors are vectors whose lengths differ between ranks, too; lengths then travel first.
    most: bytes of a vector of varying length at most, as for `Gather`.
    served: ranks to which vectors of varying length are sent, the same on all ranks; the others are told no lengths.
        None: all ranks.

    >>> from gradlab.collectives import AllToAll, run_lockstep
    >>> def exchange(rank):
    ...     return (yield AllToAll([torch.tensor([10 * rank + to]) for to in range(2)]))
    >>> [[part.item() for part in result.value] for result in run_lockstep([exchange(0), exchange(1)])]
    [[0, 10], [1, 11]]
    """

    tensors: Sequence[torch.Tensor]
    varying: bool = False
    most: int = MOST_BYTES
    served: frozenset[int] | None = None

    def tells(self, rank: int) -> bool:
        """Return whether a rank is told lengths."""
        return self.varying and (self.served is None or rank in self.served)

    @property
    def sizes(self) -> list[int]:
        """Bytes for each rank."""
        if isinstance(self.tensors, Parts):
            return [length * self.tensors.whole.element_size() for length in self.tensors.lengths]
        return [tensor.nbytes for tensor in self.tensors]


@dataclass(frozen=True)
class Ring:
    """A mean over ranks that is compressed, summed and decompressed segment by segment along a ring of the ranks.

    Answer: a list of N vectors, the segments' means, the same on every rank, bit for bit.
    """

    code: RingCode

    @property
    def sizes(self) -> list[int]:
        """Bytes of each segment's messages."""
        return [self.code.nbytes(segment) for segment in range(self.code.segments)]


SUMMED = (torch.int8, torch.uint8, torch.int32, torch.int64)
#: One collective that a codec asks for.
Request = Mean | Sum | Gather | Broadcast | AllToAll | Ring
_KINDS = "Mean, Sum, Gather, Broadcast, AllToAll and Ring"
#: What a coroutine yields: one request, or several whose order does not matter. The answer has the same form.
Step = Request | tuple[Request, ...]
#: A generator that yields steps, is sent their answers, and returns a result of the given type.
Coroutine = Generator[Step, Any, Result]


def as_requests(step: Step) -> tuple[Request, ...]:
    """Turn the requests of a step into a tuple.

    >>> from gradlab.collectives import Mean, as_requests
    >>> len(as_requests(Mean(torch.ones(2)))), len(as_requests((Mean(torch.ones(2)), Mean(torch.ones(3)))))
    (1, 2)

    Args:
        step: requests that a coroutine yielded.

    Returns:
        The requests; none for an empty tuple.

    Raises:
        GradlabError: if it is neither a request nor a tuple of requests.
    """
    requests = step if isinstance(step, tuple) else (step,)
    for request in requests:
        if not isinstance(request, Request):
            raise GradlabError(f"a codec must yield one of {_KINDS}, not {type(request).__name__}")
    return requests


def answer_for(step: Step, answers: Sequence[Any]) -> Any:
    """Put answers into the form that the coroutine expects: one for a single request, a tuple for a tuple.

    >>> from gradlab.collectives import Mean, answer_for
    >>> answer_for(Mean(torch.ones(1)), ["one"]), answer_for((Mean(torch.ones(1)),), ["one"])
    ('one', ('one',))

    Args:
        step: requests that the coroutine yielded.
        answers: one per request.

    Returns:
        What to send to the coroutine.
    """
    return tuple(answers) if isinstance(step, tuple) else answers[0]


def resumed(coroutine: Coroutine[Any], step: Step, answers: Sequence[Any]) -> Step:
    """Hand a coroutine the answers to its step, and run it to the next one.

    An answer that is an error is raised in the coroutine: what a rank sent was refused before it was decoded.

    >>> from gradlab.collectives import Mean, resumed
    >>> def exchange():
    ...     mean = yield Mean(torch.ones(1))
    ...     yield Mean(2 * mean)
    >>> coroutine = exchange()
    >>> resumed(coroutine, next(coroutine), [torch.ones(1)])
    Mean(tensor=tensor([2.]))

    Args:
        coroutine: a codec's.
        step: requests that it yielded last.
        answers: one per request.

    Returns:
        What it yields next.
    """
    if refused := next((answer for answer in answers if isinstance(answer, BadMessage)), None):
        return coroutine.throw(refused)
    return coroutine.send(answer_for(step, answers))


def signature(request: Request) -> tuple[Any, ...]:
    """List what all ranks' requests must agree on: kind, root, dtype and shapes (not lengths that vary).

    >>> from gradlab.collectives import Mean, signature
    >>> signature(Mean(torch.ones(2, 3)))
    ('Mean', None, 'torch.float32', (2, 3))

    Args:
        request: one rank's.

    Returns:
        A tuple to compare.
    """
    if isinstance(request, AllToAll) and request.varying:
        served = None if request.served is None else tuple(sorted(request.served))
        return ("AllToAll", "varying", served, *((str(t.dtype), t.ndim) for t in request.tensors))
    if isinstance(request, AllToAll) and isinstance(request.tensors, Parts):
        return ("AllToAll", request.tensors.lengths, str(request.tensors.whole.dtype))
    if isinstance(request, AllToAll):
        return ("AllToAll", *((str(t.dtype), tuple(t.shape)) for t in request.tensors))
    if isinstance(request, Ring):
        return ("Ring", *request.sizes)
    tensor = request.tensor
    if isinstance(request, Gather) and request.varying:
        return ("Gather", "varying", str(tensor.dtype), tensor.ndim)
    if isinstance(request, Gather) and request.lengths is not None:
        return ("Gather", request.lengths, str(tensor.dtype), tensor.ndim)
    root = request.root if isinstance(request, Broadcast) else None
    return (type(request).__name__, root, str(tensor.dtype), tuple(tensor.shape))


def fusion_key(request: Request) -> tuple[Any, ...]:
    """Return the key of requests that travel together: those of one key and one step are one collective.

    >>> from gradlab.collectives import Mean, fusion_key
    >>> fusion_key(Mean(torch.ones(2))) == fusion_key(Mean(torch.ones(3, 4)))
    True

    Args:
        request: any request.

    Returns:
        A tuple to compare.
    """
    if isinstance(request, Mean | Sum):
        return (type(request), request.tensor.dtype)
    if isinstance(request, Gather):
        return ("varying",) if request.varying else (Gather,) if request.lengths is None else (AllToAll,)
    if isinstance(request, AllToAll) and request.varying:
        return ("varying parts",)
    return (Broadcast, request.root) if isinstance(request, Broadcast) else (type(request),)


def by_fusion_key(requests: Sequence[Request]) -> list[list[int]]:
    """Sort requests into those that travel together, in the order in which their collectives are issued.

    >>> from gradlab.collectives import Gather, Mean, by_fusion_key
    >>> by_fusion_key([Mean(torch.ones(2)), Gather(torch.ones(1)), Mean(torch.ones(3))])
    [[0, 2], [1]]

    Args:
        requests: requests of one step.

    Returns:
        Positions of the requests, collective by collective; in an all-to-all what goes to all ranks comes last.
    """
    alike: dict[tuple[Any, ...], list[int]] = {}
    for position, request in enumerate(requests):
        alike.setdefault(fusion_key(request), []).append(position)
    return [sorted(positions, key=lambda at: isinstance(requests[at], Gather)) for positions in alike.values()]


# --- byte rules ---------------------------------------------------------------------------------------------------


def payload_bytes(request: Request, rank: int) -> int:
    """Count the bytes that a rank contributes to a request.

    >>> from gradlab.collectives import Broadcast, Mean, payload_bytes
    >>> payload_bytes(Mean(torch.ones(10)), rank=0), payload_bytes(Broadcast(torch.ones(10), root=1), rank=0)
    (40, 0)

    Args:
        request: the rank's.
        rank: number of the rank, from 0.

    Returns:
        Bytes.
    """
    if isinstance(request, AllToAll | Ring):
        return sum(request.sizes)
    if isinstance(request, Broadcast) and request.root != rank:
        return 0
    return request.tensor.nbytes


def all_reduce_wire_bytes(nbytes: int, world_size: int) -> int:
    """Count the bytes that a rank sends in a ring all-reduce: 2 (N - 1) segments of ceil(nbytes / N).

    >>> from gradlab.collectives import all_reduce_wire_bytes
    >>> [all_reduce_wire_bytes(4000, world_size) for world_size in (2, 4, 8)]
    [4000, 6000, 7000]

    Args:
        nbytes: bytes of the tensor.
        world_size: number of ranks N.

    Returns:
        Bytes.
    """
    return 2 * (world_size - 1) * math.ceil(nbytes / world_size)


def ring_sends(world_size: int) -> float:
    """Return how many times a rank sends a byte in a ring all-reduce, 2 (N - 1) / N, without padding.

    >>> from gradlab.collectives import ring_sends
    >>> [ring_sends(world_size) for world_size in (1, 2, 4)]
    [0.0, 1.0, 1.5]

    Args:
        world_size: number of ranks N.

    Returns:
        Bytes sent per byte of the tensor.
    """
    return 2 * (world_size - 1) / world_size


def all_gather_wire_bytes(nbytes: int, world_size: int) -> int:
    """Count the bytes that a rank sends in an all-gather: every block travels N - 1 hops.

    >>> from gradlab.collectives import all_gather_wire_bytes
    >>> [all_gather_wire_bytes(4000, world_size) for world_size in (2, 4, 8)]
    [4000, 12000, 28000]

    Args:
        nbytes: bytes per rank, padding included.
        world_size: number of ranks N.

    Returns:
        Bytes.
    """
    return (world_size - 1) * nbytes


def broadcast_wire_bytes(nbytes: int, rank: int, root: int, world_size: int) -> int:
    """Count the bytes that a rank sends in Gloo's binomial-tree broadcast.

    In round i = 0, 1, ... each of the first 2^i ranks, counted from the root, sends all of it to the rank 2^i further.

    >>> from gradlab.collectives import broadcast_wire_bytes
    >>> [broadcast_wire_bytes(4000, rank, root=0, world_size=4) for rank in range(4)]
    [8000, 4000, 0, 0]

    Args:
        nbytes: bytes of the tensor.
        rank: rank whose bytes are counted.
        root: the rank that the tensor comes from.
        world_size: number of ranks N.

    Returns:
        Bytes.
    """
    relative = (rank - root) % world_size
    rounds = range(relative.bit_length(), (world_size - 1).bit_length())
    return nbytes * sum(relative + (1 << i) < world_size for i in rounds)


def all_to_all_wire_bytes(sizes: Sequence[int], rank: int, lengths: Sequence[int] | None = None, rows: int = 1) -> int:
    """Count the bytes that a rank sends in an all-to-all: sizes[j] to each other rank j, nothing to itself.

    In two hops (`gradlab.collectives.relay`) it sends its row what is for their columns, then its column the row's.

    >>> from gradlab.collectives import all_to_all_wire_bytes
    >>> all_to_all_wire_bytes([10, 20, 30], rank=1)
    40

    Args:
        sizes: bytes for each rank.
        rank: rank whose bytes are counted.
        lengths: bytes that each rank sends to every other, beside these. None: 0.
        rows: rows of the grid of two hops. 1: one hop.

    Returns:
        Bytes.
    """
    columns, lengths = len(sizes) // rows, lengths or [0] * len(sizes)
    row, column = divmod(rank, columns)
    in_column, in_row = sum(sizes[column::columns]), sum(lengths[row * columns :][:columns])
    first = sum(sizes) - in_column + (columns - 1) * lengths[rank]
    return first + columns * (in_column - sizes[rank]) + (rows - 1) * in_row


def wire_bytes(request: Request, rank: int, world_size: int, sizes: Sequence[int] | None = None) -> int:
    """Count the bytes that a rank sends for one request on its own, not fused with others.

    >>> from gradlab.collectives import Gather, Mean, wire_bytes
    >>> vector = torch.ones(100)
    >>> wire_bytes(Mean(vector), rank=0, world_size=4), wire_bytes(Gather(vector), rank=0, world_size=4)
    (600, 1200)

    Args:
        request: the rank's.
        rank: number of the rank, from 0.
        world_size: number of ranks N.
        sizes: all ranks' bytes in a varying gather, see `are_padded`. None: as many as this rank's. Each size that
            varies travels too, in 4 bytes.

    Returns:
        Bytes.
    """
    if isinstance(request, Mean | Sum):
        return all_reduce_wire_bytes(request.tensor.nbytes, world_size)
    if isinstance(request, Broadcast):
        return broadcast_wire_bytes(request.tensor.nbytes, rank, request.root, world_size)
    if isinstance(request, AllToAll):
        told = [LENGTH_BYTES * request.tells(to) for to in range(world_size)]
        return all_to_all_wire_bytes([size + own for size, own in zip(request.sizes, told, strict=True)], rank)
    if isinstance(request, Ring):
        return ring_wire_bytes(request.sizes, rank)
    if not request.varying:
        return all_gather_wire_bytes(request.tensor.nbytes, world_size)
    nbytes = max(sizes) if sizes is not None and are_padded(sizes) else request.tensor.nbytes
    return all_gather_wire_bytes(nbytes + LENGTH_BYTES, world_size)


def are_padded(sizes: Sequence[int]) -> bool:
    """Return whether vectors of these bytes, one per rank, are gathered as if all were as long as the longest.

    Each is sent as it is instead if that would be more than twice as many bytes, because few ranks have any.

    >>> from gradlab.collectives.requests import are_padded
    >>> are_padded([90, 100, 80]), are_padded([0, 0, 100])
    (True, False)
    """
    return max(sizes) * len(sizes) <= 2 * sum(sizes)


# --- lockstep -----------------------------------------------------------------------------------------------------


def check_request(request: Request, world_size: int) -> None:
    """Refuse a request that no process group could serve.

    >>> from gradlab import GradlabError
    >>> from gradlab.collectives import Broadcast, check_request
    >>> try:
    ...     check_request(Broadcast(torch.ones(1), root=5), world_size=4)
    ... except GradlabError as error:
    ...     print(error)
    Broadcast from rank 5, but ranks are 0..3

    Raises:
        GradlabError: a Mean of integers, a Sum of anything else, a root or a number of tensors that does not fit the
            world size, parts whose lengths are not the vector's, a varying request of anything but vectors, or a gather
            of a length that is not among `lengths`.
    """
    if isinstance(request, Mean) and not request.tensor.is_floating_point():
        raise GradlabError(f"Mean needs a floating-point tensor, not {request.tensor.dtype}")
    if isinstance(request, Sum) and request.tensor.dtype not in SUMMED:
        raise GradlabError(f"Sum needs a tensor of integers (int8, uint8, int32, int64), not {request.tensor.dtype}")
    if isinstance(request, Broadcast) and not 0 <= request.root < world_size:
        raise GradlabError(f"Broadcast from rank {request.root}, but ranks are 0..{world_size - 1}")
    if isinstance(request, AllToAll):
        _check_all_to_all(request, world_size)
    if isinstance(request, Ring) and request.code.segments != world_size:
        raise GradlabError(f"Ring of {request.code.segments} segments at world size {world_size}")
    if isinstance(request, Gather):
        _check_gather(request, world_size)


def check_length(request: Gather | AllToAll, nbytes: int, rank: int) -> BadMessage | None:
    """Compare the length that a rank announces with what a request of varying length allows.

    >>> from gradlab.collectives import Gather, check_length
    >>> str(check_length(Gather(torch.ones(3), varying=True, most=100), 10**12, rank=1))
    'rank 1 announces a vector of 1000000000000 bytes, expected 0 to 100'

    Args:
        request: this rank's own.
        nbytes: bytes that the rank announces.
        rank: who does.

    Returns:
        The error that answers the request; None: all is well.
    """
    if 0 <= nbytes <= request.most:
        return None
    return BadMessage(f"rank {rank} announces a vector of {nbytes} bytes, expected 0 to {request.most}")


def _check_all_to_all(request: AllToAll, world_size: int) -> None:
    if len(request.tensors) != world_size:
        raise GradlabError(f"AllToAll of {len(request.tensors)} tensors at world size {world_size}")
    if isinstance(request.tensors, Parts) and sum(request.tensors.lengths) != request.tensors.whole.numel():
        together, numel = sum(request.tensors.lengths), request.tensors.whole.numel()
        raise GradlabError(f"AllToAll of a vector of {numel} elements: the lengths of its parts add up to {together}")
    if request.varying and (others := [list(tensor.shape) for tensor in request.tensors if tensor.ndim != 1]):
        raise GradlabError(f"a varying AllToAll takes vectors, not shape {others[0]}")
    if request.varying and (lost := [to for to, size in enumerate(request.sizes) if size and not request.tells(to)]):
        raise GradlabError(
            f"a varying AllToAll that serves ranks {sorted(request.served or ())} has a vector for {lost}"
        )


def _check_gather(request: Gather, world_size: int) -> None:
    lengths = request.lengths
    if (request.varying or lengths is not None) and request.tensor.ndim != 1:
        raise GradlabError(f"a varying Gather takes vectors, not shape {list(request.tensor.shape)}")
    if lengths is not None and (request.varying or len(lengths) != world_size):
        raise GradlabError(f"Gather of lengths {lengths} at world size {world_size}: expected one for each rank")
    if lengths is not None and request.tensor.numel() not in lengths:
        raise GradlabError(f"Gather of {request.tensor.numel()} elements, which is none of the lengths {lengths}")
