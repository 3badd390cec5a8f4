"""The lockstep executor: the coroutines of all ranks in one process, stepped together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from gradlab.collectives.requests import (
    AllToAll,
    Broadcast,
    Coroutine,
    Gather,
    Mean,
    Parts,
    Request,
    Ring,
    Step,
    Sum,
    answer_for,
    as_requests,
    check_length,
    check_request,
    payload_bytes,
    signature,
    wire_bytes,
)
from gradlab.collectives.ring import pass_around
from gradlab.errors import BadMessage, GradlabError

Result = TypeVar("Result")


@dataclass(frozen=True)
class LockstepResult(Generic[Result]):
    """One rank's result.

    value: result of its coroutine.
    payload_bytes: bytes that it contributed.
    wire_bytes: bytes that its network interface sends for that.
    """

    value: Result
    payload_bytes: int
    wire_bytes: int


class Received(Sequence[torch.Tensor]):
    """Messages of all ranks to one of them in an all-to-all of `Parts`, all ranks in this process.

    Attributes:
        whole: the vectors that the ranks cut, in rank order.

    Args:
        sent: every rank's parts.
        rank: rank that gets the answer.
        results: results of `once`, one dict for all ranks.
    """

    def __init__(self, sent: Sequence[Parts], rank: int, results: dict[str, Any]) -> None:
        self._sent, self._rank, self._results = sent, rank, results

    def __getitem__(self, source: Any) -> Any:
        of_ranks = self._sent[source]
        return of_ranks[self._rank] if isinstance(of_ranks, Parts) else [parts[self._rank] for parts in of_ranks]

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def whole(self) -> list[torch.Tensor]:
        return [parts.whole for parts in self._sent]

    def once(self, compute: Callable[[], Result]) -> Result:
        """Compute what the ranks would have computed a part of each: the first one that asks computes it for all.

        Args:
            compute: the same on every rank. It takes as long as all ranks' own work together.

        Returns:
            One result for all ranks, which none of them may change.
        """
        if "once" not in self._results:
            self._results["once"] = compute()
        return self._results["once"]


def sum_in_rank_order(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Average N tensors of one shape: each times 1/N, added in rank order.

    Plain DDP also scales before it sums. The fixed order gives the same bits wherever the mean is computed.

    >>> from gradlab.collectives import sum_in_rank_order
    >>> sum_in_rank_order([torch.tensor([1.0]), torch.tensor([3.0])])
    tensor([2.])

    Args:
        tensors: one per rank.

    Returns:
        The mean, in the tensors' shape and dtype.
    """
    scale = 1.0 / len(tensors)
    total = tensors[0] * scale
    for tensor in tensors[1:]:
        total += tensor * scale
    return total


def mean_of_node(tensors: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """Average the tensors of a node's ranks: their sum in the order of local ranks, times 1/L.

    It takes one pass per tensor and one more, as it is made of whole gradients. 16-bit tensors are summed in float32.

    >>> from gradlab.collectives import mean_of_node
    >>> mean_of_node([torch.tensor([1.0]), torch.tensor([3.0])])
    tensor([2.])

    Args:
        tensors: one per local rank.
        out: memory for the mean, of their shape and dtype; None: new memory.

    Returns:
        The mean, in the tensors' shape and dtype.
    """
    dtype, scale = tensors[0].dtype, 1.0 / len(tensors)
    if dtype.is_floating_point and dtype.itemsize == 2:
        mean = mean_of_node([tensor.float() for tensor in tensors]).to(dtype)
        return mean if out is None else out.copy_(mean)
    out = torch.empty_like(tensors[0]) if out is None else out
    if len(tensors) == 1:
        return out.copy_(tensors[0])
    torch.add(tensors[0], tensors[1], out=out)
    for tensor in tensors[2:]:
        out.add_(tensor)
    return out.mul_(scale)


def _answers(requests: Sequence[Request]) -> Iterator[Any]:
    """Yield the answer to one request, for each rank in turn. Ranks share tensors, which none of them may change."""
    first = requests[0]
    # Summed once, or N ranks would cost N^2 additions.
    mean = sum_in_rank_order([r.tensor for r in requests if isinstance(r, Mean)]) if isinstance(first, Mean) else None
    if isinstance(first, Ring):
        yield from pass_around([r.code for r in requests if isinstance(r, Ring)])
        return
    if isinstance(first, AllToAll):
        yield from _scattered([r.tensors for r in requests if isinstance(r, AllToAll)])
        return
    yield from [mean if isinstance(first, Mean) else _same_for_all(first, requests)] * len(requests)


def _scattered(sent: Sequence[Sequence[torch.Tensor]]) -> Iterator[Sequence[torch.Tensor]]:
    """Yield for each rank in turn what all ranks sent it."""
    parts, results = [tensors for tensors in sent if isinstance(tensors, Parts)], dict[str, Any]()
    for rank in range(len(sent)):
        yield Received(parts, rank, results) if parts else [tensors[rank] for tensors in sent]


def _same_for_all(first: Request, requests: Sequence[Request]) -> Any:
    """Return the answer of a sum, a gather or a broadcast."""
    if isinstance(first, Sum):
        total = first.tensor.clone()
        for request in requests[1:]:
            assert isinstance(request, Sum)
            total += request.tensor
        return total
    if isinstance(first, Gather):
        return [r.tensor.detach() for r in requests if isinstance(r, Gather)]
    assert isinstance(first, Broadcast)
    root = requests[first.root]
    assert isinstance(root, Broadcast)
    return root.tensor.detach()


def _serve(requests_by_rank: Sequence[tuple[Request, ...]], payload: list[int], wire: list[int]) -> list[list[Any]]:
    """Answer one step of all ranks, and count its bytes."""
    world_size = len(requests_by_rank)
    answers: list[list[Any]] = [[] for _ in range(world_size)]
    _require_alike(requests_by_rank)
    for requests in zip(*requests_by_rank, strict=True):
        _require_lengths(requests)
        check_request(requests[0], world_size)
        for rank, (answer, sizes) in enumerate(zip(_answers(requests), _sizes(requests), strict=True)):
            payload[rank] += sizes[0]
            wire[rank] += sizes[1]
            answers[rank].append(answer)
    return answers


def _require_alike(requests_by_rank: Sequence[tuple[Request, ...]]) -> None:
    first = [_shapes(request) for request in requests_by_rank[0]]
    for rank, requests in enumerate(requests_by_rank):
        if [_shapes(request) for request in requests] != first:
            own, theirs = ([signature(request) for request in asked] for asked in (requests_by_rank[0], requests))
            raise BadMessage(f"ranks ask for different collectives: rank 0 {own}, rank {rank} {theirs}")


def _require_lengths(requests: Sequence[Request]) -> None:
    """Refuse lengths that no process group would serve."""
    for rank, request in enumerate(requests):
        if isinstance(request, Gather) and request.lengths and request.lengths[rank] != request.tensor.numel():
            announced = request.lengths[rank]
            raise BadMessage(f"rank {rank} gives {request.tensor.numel()} elements to a Gather, announced {announced}")
        if isinstance(request, Gather | AllToAll) and request.varying:
            sizes = request.sizes if isinstance(request, AllToAll) else [request.tensor.nbytes]
            if (refused := check_length(request, max(sizes), rank)) is not None:
                raise refused


def _shapes(request: Request) -> Any:
    """Return what `signature` compares; of an all-to-all's N tensors on each of N ranks no more than their shapes."""
    if isinstance(request, AllToAll) and not request.varying and not isinstance(request.tensors, Parts):
        kinds = {tensor.dtype for tensor in request.tensors}
        return ("AllToAll", kinds, [tensor.shape for tensor in request.tensors])
    return signature(request)


def _sizes(requests: Sequence[Request]) -> Iterator[tuple[int, int]]:
    """Yield the payload and the wire bytes of one request, for each rank in turn."""
    if isinstance(requests[0], AllToAll) and not requests[0].varying:
        sizes = requests[0].sizes  # the same on all ranks
        total = sum(sizes)
        yield from ((total, total - own) for own in sizes)
        return
    payload = [payload_bytes(request, rank) for rank, request in enumerate(requests)]
    for rank, request in enumerate(requests):
        yield payload[rank], wire_bytes(request, rank, len(requests), payload)


def observed(coroutine: Coroutine[Result], seen: list[Request]) -> Coroutine[Result]:
    """Run a coroutine, and note its requests.

    >>> from gradlab.codec import mean_only
    >>> from gradlab.collectives import observed, run_lockstep
    >>> seen = []
    >>> results = run_lockstep([observed(mean_only({"w": torch.ones(2)}), seen)])
    >>> seen
    [Mean(tensor=tensor([1., 1.]))]

    Args:
        coroutine: coroutine to run.
        seen: the list that its requests are appended to.

    Returns:
        A coroutine with the same requests and the same result.
    """
    answer: Any = None
    while True:
        try:
            step = sent_on(coroutine, answer)
        except StopIteration as stop:
            return stop.value
        seen.extend(as_requests(step))
        answer = yield from answered(step)


def answered(step: Step) -> Coroutine[Any]:
    """Yield a step for another coroutine, and return its answer, or the error that was raised in its place."""
    try:
        return (yield step)
    except BadMessage as refused:
        return refused


def sent_on(coroutine: Coroutine[Any], answer: Any) -> Step:
    """Send a coroutine the result of `answered` (an error is raised in it), and return its next step."""
    return coroutine.throw(answer) if isinstance(answer, BadMessage) else coroutine.send(answer)


def together(coroutines: Sequence[Coroutine[Result]]) -> Coroutine[list[Result]]:
    """Run several coroutines of one rank as one: requests of the same step travel together.

    >>> from gradlab.codec import mean_only
    >>> from gradlab.collectives import run_lockstep, together
    >>> [result] = run_lockstep([together([mean_only({"a": torch.ones(2)}), mean_only({"b": torch.zeros(1)})])])
    >>> [exchanged.mean for exchanged in result.value]
    [{'a': tensor([1., 1.])}, {'b': tensor([0.])}]

    Args:
        coroutines: coroutines of one rank.

    Returns:
        What they returned, in their order.
    """
    results: dict[int, Result] = {}
    steps: dict[int, Step] = {}

    def advance(position: int, answer: Any) -> None:
        try:
            steps[position] = coroutines[position].send(answer)
        except StopIteration as stop:
            steps.pop(position, None)
            results[position] = stop.value

    for position in range(len(coroutines)):
        advance(position, None)
    while steps:
        open_requests = {position: as_requests(step) for position, step in steps.items()}
        answers = iter((yield tuple(request for requests in open_requests.values() for request in requests)))
        for position, requests in open_requests.items():
            advance(position, answer_for(steps[position], [next(answers) for _ in requests]))
    return [results[position] for position in range(len(coroutines))]


def run_lockstep(coroutines: Sequence[Coroutine[Result]]) -> list[LockstepResult[Result]]:
    """Run one coroutine per rank in this process, stepped together. Means are summed in rank order.

    >>> from gradlab.collectives import Mean, run_lockstep
    >>> def exchange(gradient):
    ...     return (yield Mean(gradient))
    >>> run_lockstep([exchange(torch.tensor([1.0])), exchange(torch.tensor([3.0]))])[0]
    LockstepResult(value=tensor([2.]), payload_bytes=4, wire_bytes=4)

    Args:
        coroutines: one per rank, in rank order.

    Returns:
        One result per rank, with its byte counts.

    Raises:
        GradlabError: if ranks ask for different collectives, or one finishes while another still asks.
    """
    if not coroutines:
        raise GradlabError("run_lockstep needs at least one coroutine")
    payload, wire = [0] * len(coroutines), [0] * len(coroutines)
    to_send: list[Any] = [None] * len(coroutines)
    while True:
        steps: list[Step] = []
        values: list[Result] = []
        for coroutine, answer in zip(coroutines, to_send, strict=True):
            try:
                steps.append(coroutine.send(answer))
            except StopIteration as stop:
                values.append(stop.value)
        if steps and values:
            raise GradlabError(f"{len(values)} ranks have finished while {len(steps)} still ask for a collective")
        if values:
            return [LockstepResult(*row) for row in zip(values, payload, wire, strict=True)]
        try:
            answers = _serve([as_requests(step) for step in steps], payload, wire)
        except BadMessage as refused:
            coroutines[0].throw(refused)  # which names the codec
            raise
        to_send = [answer_for(step, answer) for step, answer in zip(steps, answers, strict=True)]
