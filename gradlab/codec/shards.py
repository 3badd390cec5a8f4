"""Averages in shards: every rank sums one part of a vector, and sends the mean of it to all.

Compressed as a whole, a vector takes as many calls as one shard would. So its payload is cut where shards end, if the
codec can do that (`PiecewiseCompressor.cut`); else every shard is compressed by itself.

Every rank decodes what a gather or a broadcast brings, so that all refuse a bad message. A rank that is sent one alone,
as in an all-to-all, refuses it alone: the executor tells the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise, starmap
from typing import TYPE_CHECKING, Any

import torch

from gradlab.codec.batch import Batch, Tensors
from gradlab.codec.context import Context
from gradlab.codec.contract import Deferred, Exchanged
from gradlab.collectives import AllToAll, Coroutine, Gather, Parts, Received
from gradlab.errors import BadMessage, GradlabError

if TYPE_CHECKING:
    from gradlab.codec.compressor import Compressor

Shard = tuple[int, int]
Payload = tuple[torch.Tensor, ...]
_BYTES_A_VALUE, _BESIDE = 16, 2**16  # no honest message of varying size comes near


class Shards(Sequence[Shard]):
    """Each rank's shard (start, stop) of a vector, in rank order. `Compressor.shards` keeps it, for all ranks and
    steps.

    bounds: N + 1 positions at which the vector is cut.
    whole: whether payloads of the whole vector can be cut there.
    occupied: the ranks whose shards are not empty.
    """

    def __init__(self, codec: Compressor, of_ranks: Iterable[Shard]) -> None:
        self._codec, self._of_ranks = codec, tuple(of_ranks)
        self._lengths: list[tuple[int, ...]] = []
        self.bounds = [0, *(stop for _, stop in self._of_ranks)]
        self.occupied = [rank for rank, (start, stop) in enumerate(self._of_ranks) if stop > start]
        self.whole = tuple(pairwise(self.bounds)) == self._of_ranks and codec.can_be_cut(self.bounds)

    def __getitem__(self, rank: Any) -> Any:
        return self._of_ranks[rank]

    def __len__(self) -> int:
        return len(self._of_ranks)

    def part(self, rank: int) -> Compressor:
        """Return the compressor of a rank's shard."""
        return self._codec.part(*self._of_ranks[rank])

    def cut(self, payload: Payload) -> list[Payload]:
        """Cut a payload of the whole vector into the shards' payloads."""
        return self._codec.cut(payload, self.bounds)

    def lengths(self, sent: Callable[[], Sequence[Payload]]) -> list[tuple[int, ...]]:
        """Return the elements of the shards' payloads, for each tensor of a payload, from those of any vector."""
        if not self._lengths:
            self._lengths = [tuple(map(len, column)) for column in zip(*sent(), strict=True)]
        return self._lengths


class Sharded:
    """A vector whose shards the ranks average: what each rank sends to every other, and how to decode a whole
    vector."""

    def __init__(self, codec: Compressor, vector: torch.Tensor, shards: Shards, context: Context) -> None:
        self._codec, self._vector, self._shards, self._context = codec, vector, shards, context
        generator = context.random.of_rank("shards")
        self._payload: Payload = ()
        if shards.whole:
            self._payload = codec.compress(vector, generator)
        else:
            self.sent = _compressed_apart(vector, shards, generator)

    @cached_property
    def sent(self) -> Sequence[Payload]:
        """Return the message to each rank. A whole payload is cut when it is needed: in one process it never is."""
        return self._shards.cut(self._payload)

    @property
    def _lengths(self) -> list[tuple[int, ...]]:
        return self._shards.lengths(lambda: self.sent)

    @property
    def codec(self) -> Compressor:
        """The compressor of this rank's shard."""
        return self._shards.part(self._context.rank)

    def average(self) -> Coroutine[torch.Tensor]:
        """Send every rank its shard, and average what comes for this rank's: (elements of the shard,)."""
        most = most_bytes(self._vector.numel())
        received = yield tuple(AllToAll(part, self._codec.traits.varying, most) for part in self._parts())
        start, stop = self._shards[self._context.rank]
        average = self._context.memory.like(self._vector[start:stop])
        if start == stop:
            return average
        if isinstance(received[0], Received):
            whole = received[0].once(lambda: self._average_of_whole([column.whole for column in received]))
            return average.copy_(whole[start:stop])
        return average_of_ranks(self.codec, average, zip(*received, strict=True), 1.0 / self._context.world_size)

    def _parts(self) -> list[Sequence[torch.Tensor]]:
        """Return the parts for each rank of each tensor of a payload."""
        if not self._shards.whole:
            return list(zip(*self.sent, strict=True))

        def column(at: int, lengths: tuple[int, ...]) -> Parts:
            return Parts(self._payload[at], lengths, lambda: [payload[at] for payload in self.sent])

        return list(starmap(column, enumerate(self._lengths)))

    def _average_of_whole(self, columns: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """Average the whole vector, in as many calls as one rank takes for its shard, and with the same bits."""
        out = self._context.memory.like(self._vector)
        return average_of_ranks(self._codec, out, zip(*columns, strict=True), 1.0 / self._context.world_size)

    def gathers(self, answer: Payload) -> tuple[Gather, ...]:
        """Request all ranks' answers. Unless sizes vary, each has the sizes of what was sent to its rank."""
        if self._codec.traits.varying:
            return tuple(Gather(part, varying=True, most=most_bytes(self._vector.numel())) for part in answer)
        return tuple(Gather(part, lengths=known) for part, known in zip(answer, self._lengths, strict=True))

    def mean(self, answers: Sequence[Payload], grads: Batch) -> Tensors:
        """Decode one answer per shard, by layer."""
        out = self._context.memory.for_mean(self._vector, grads)
        if self._shards.whole:
            return grads.cut(self._codec.decompress_into(out, self._codec.join(answers)))
        return grads.cut(self._decoded_into(out, answers))

    def own(self, grads: Batch) -> Deferred:
        """Return this rank's decoded contribution, by layer."""

        def decoded() -> Tensors:
            out = self._context.memory.like(self._vector)
            if self._shards.whole:
                return grads.cut(self._codec.decompress_into(out, self._payload))
            return grads.cut(self._decoded_into(out, self.sent))

        return Deferred(grads, decoded, lambda: grads.cut(self._residual()))

    def _decoded_into(self, out: torch.Tensor, payloads: Sequence[Payload]) -> torch.Tensor:
        for rank in self._shards.occupied:
            with sent_by(rank):
                self._shards.part(rank).decompress_into(out[slice(*self._shards[rank])], payloads[rank])
        return out

    def _residual(self) -> torch.Tensor:
        vector = self._vector
        out = self._context.memory.over(vector)
        if self._shards.whole:
            return self._codec.residual_into(out, vector, self._payload)
        for rank in self._shards.occupied:
            part = vector[slice(*self._shards[rank])]
            of_part = part if out is vector else out[slice(*self._shards[rank])]
            self._shards.part(rank).residual_into(of_part, part, self.sent[rank])
        return out


def averaged_in_shards(codec: Compressor, vector: torch.Tensor, grads: Batch, context: Context) -> Coroutine[Exchanged]:
    """Average in two rounds: an all-to-all of shards, and a gather of their means, quantized once more; there is no
    state."""
    sharded = Sharded(codec, vector, codec.shards(vector.numel(), context.world_size, context.group), context)
    average = yield from sharded.average()
    answer = sharded.codec.compress(average, context.random.of_rank("mean"))
    answers = yield sharded.gathers(answer)
    mean = context.once(lambda: sharded.mean(list(zip(*answers, strict=True)), grads))
    return Exchanged(mean, sharded.own(grads))


def _compressed_apart(vector: torch.Tensor, shards: Shards, generator: torch.Generator) -> list[Payload]:
    """Compress each shard by itself. Empty ones, which are most where one rank has it all, are compressed once."""
    sent: list[Payload] = []
    nothing: Payload | None = None
    for rank, (start, stop) in enumerate(shards):
        if start == stop and nothing is not None:
            sent.append(nothing)
            continue
        before = generator.get_state()
        sent.append(shards.part(rank).compress(vector[start:stop], generator))
        if start == stop and torch.equal(before, generator.get_state()):
            nothing = sent[-1]  # without a random number drawn for it, the next empty shard's payload is the same
    return sent


def most_bytes(numel: int) -> int:
    """Bound the bytes of a message of varying size about a vector (numel,)."""
    return _BYTES_A_VALUE * numel + _BESIDE


@contextmanager
def sent_by(rank: int) -> Iterator[None]:
    """Name the rank in the error that decoding its message raises."""
    try:
        yield
    except BadMessage:
        raise
    except GradlabError as wrong:
        raise BadMessage(f"what rank {rank} sent cannot be decoded: {wrong}") from wrong


def average_of_ranks(
    codec: Compressor, out: torch.Tensor, payloads: Iterable[Sequence[torch.Tensor]], scale: float
) -> torch.Tensor:
    """Decode and average payloads in rank order as `Compressor.average_into`; a refused one raises BadMessage with its
    rank."""
    every = list(payloads)
    try:
        return codec.average_into(out, every, scale)
    except GradlabError:
        for rank, payload in enumerate(every):  # apart, to see whose it was
            with sent_by(rank):
                codec.decompress_into(out, payload)
        raise
