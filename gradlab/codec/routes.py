"""Routes: how the ranks' payloads become a mean.

A gather sends every rank all payloads. In shards, every rank averages one part of the vector, and sends it to all.
Compressed as a whole, a vector takes as many calls as one shard would. So its payload is cut where shards end, if the
codec can do that (`gradlab.codec.abilities.kinds`); else every shard is compressed by itself.

Every rank decodes what a gather or a broadcast brings, so that all refuse a bad message. A rank that is sent one alone,
as in an all-to-all, refuses it alone: the executor tells the others.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise, starmap
from typing import TYPE_CHECKING, Any

import torch

from gradlab.codec.abilities import Kind, average_into, kinds, part_of
from gradlab.codec.batch import Batch, Sums, Tensors
from gradlab.codec.context import Context
from gradlab.codec.exchanged import Deferred, Exchanged
from gradlab.codec.settings import setting
from gradlab.coding import bits
from gradlab.collectives import AllToAll, Coroutine, Gather, Parts, Received
from gradlab.errors import BadMessage, GradlabError

if TYPE_CHECKING:
    from gradlab.codec.compressor import Compressor
    from gradlab.kernels.selection import Places

Shard = tuple[int, int]
Payload = tuple[torch.Tensor, ...]
BYTES, OF_BLOCKS, PAIRS_OF_BLOCKS, NOTHING = "bytes", "numbers of blocks", "pairs of numbers of blocks", "nothing"
AGGREGATIONS = ("auto", "gather", "shards")
BOTH_WAYS_FROM = 5  # ranks: a gather of theirs sends more than means that come back, about as many times as fine
_FEWEST_FOR_SHARDS = 3  # ranks: 2 (N - 1) / N of a payload are then less than the N - 1 of a gather
_BYTES_A_VALUE, _BESIDE = 16, 2**16  # no honest message of varying size comes near


def aggregation_setting() -> Any:
    """Make the settings field of how a quantizer's values are averaged, see `sums_in_shards`."""
    return setting(
        "auto",
        choices=AGGREGATIONS,
        help='"gather": every rank is sent all ranks\' codes, (N - 1) n bytes of them. "shards": each rank is sent one '
        "shard of all ranks' codes, sums it in 32 bits, and sends the mean's codes to all, 2 (N - 1) / N n bytes; the "
        "mean is quantized once more, which makes its error 1.5 times as large at 4 ranks and 1.8 times at 8. "
        f'"auto": what sends less, from {_FEWEST_FOR_SHARDS} ranks on shards, where the codec is fine enough',
    )


def sums_in_shards(codec: Compressor, world_size: int) -> bool:
    """Return whether the ranks average in two rounds: an all-to-all of shards, and a gather of their means.

    The mean is then C((1/N) sum_i C(x_i)), quantized twice. Codecs whose settings have no `aggregation` gather.
    """
    chosen = getattr(codec.settings, "aggregation", "gather")
    auto = chosen == "auto" and world_size >= _FEWEST_FOR_SHARDS and not codec.traits.coarse
    return chosen == "shards" or auto


def average(codec: Compressor, grads: Batch, context: Context) -> Coroutine[Exchanged]:
    """Average C(x) of all ranks, by a gather or in shards. codec: the compressor of the group's layers."""
    if sums_in_shards(codec, context.world_size) and not context.one_round:
        return (yield from _averaged_in_shards(codec, grads, context))
    payload, vector, left = compressed(codec, grads, context.random.of_rank())
    most = most_bytes(vector.numel())
    answers = yield tuple(Gather(part, varying=codec.traits.varying, most=most) for part in payload)

    def mean() -> Tensors:
        total = context.memory.for_mean(vector, grads)
        return grads.cut(average_of_ranks(codec, total, zip(*answers, strict=True), 1.0 / context.world_size))

    own = Deferred(
        grads,
        lambda: grads.cut(average_into(codec, context.memory.like(vector), [payload], 1.0)),
        lambda: grads.cut(residual(codec, context.memory.copy(vector), payload) if left is None else left),
    )
    return Exchanged(context.once(mean), own)


def compressed(
    codec: Compressor, grads: Batch, generator: torch.Generator
) -> tuple[Payload, torch.Tensor, torch.Tensor | None]:
    """Compress a group. Return the payload, the group's vector (numel,), and the compression error, if kernels wrote it
    along: over that vector. None: they did not."""
    from_source = getattr(codec, "compressed_by_kernels", None)
    if isinstance(grads, Sums) and from_source and (payload := from_source(grads.source, generator)) is not None:
        grads.vector = grads.memory
        return payload, grads.memory, grads.memory
    vector = grads.vector
    return codec.compress(vector, generator), vector, None


def residual(codec: Compressor, vector: torch.Tensor, payload: Payload) -> torch.Tensor:
    """Subtract what was sent of a vector from it, in place, and return it."""
    codec.add_decompressed(vector, payload, -1.0)
    return vector


def exchanged_at(
    positions: torch.Tensor,
    mean: torch.Tensor,
    own: torch.Tensor,
    vector: torch.Tensor,
    grads: Batch,
    context: Context,
) -> Exchanged:
    """Make the result of an exchange of values at positions that all ranks know.

    Args:
        positions: (count,), int64.
        mean: mean of all ranks' values there, (count,).
        own: this rank's decoded values there, (count,).
        vector: this rank's, (numel,).
        grads: gradients that `vector` concatenates.
        context: the exchange's.
    """

    def spread(values: torch.Tensor, out: torch.Tensor) -> Tensors:
        return grads.cut(out.zero_().index_copy_(0, positions, values))

    def error() -> Tensors:
        out = context.memory.copy(vector)
        return grads.cut(out.index_copy_(0, positions, out[positions] - own))

    average = context.once(lambda: spread(mean, context.memory.for_mean(vector, grads)))
    return Exchanged(average, Deferred(grads, lambda: spread(own, context.memory.like(vector)), error))


def exchanged_by_kernels(
    encoded: torch.Tensor,
    places: Places,
    mean: torch.Tensor,
    own: torch.Tensor,
    vector: torch.Tensor,
    grads: Batch,
    context: Context,
) -> Exchanged:
    """Do what `exchanged_at` does with coded positions, uint8."""
    from gradlab.kernels.selection import add_selected

    def spread(values: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> Tensors:
        add_selected(out, [(values, encoded)], places, scale, scale < 0)
        return grads.cut(out)

    average = context.once(lambda: spread(mean, context.memory.for_mean(vector, grads)))
    left = Deferred(
        grads,
        lambda: spread(own, context.memory.like(vector)),
        lambda: spread(own, context.memory.copy(vector), -1.0),
    )
    return Exchanged(average, left)


def shards_of(codec: Compressor, numel: int, world_size: int, group: str = "", most: int | None = None) -> Shards:
    """Return each rank's shard (start, stop) of a vector (numel,): whole blocks, or none where blocks are few.

    The ranks that serve then follow from the group's name, so that groups have different ones.

    most: number of shards at most; None: that of ranks.
    """
    parts = world_size if most is None else min(world_size, most)

    def made() -> tuple[Shard, ...]:
        bounds = codec.blocks.bounds(numel, parts) if codec.blocks.count(numel) > 1 else [0, numel]
        return tuple((start, stop) for start, stop in pairwise(bounds) if stop > start)

    cut = codec.cached((numel, parts, "cut"), made)
    first = zlib.crc32(group.encode()) % world_size if len(cut) < world_size else 0
    return codec.cached((numel, parts, world_size, first), lambda: Shards(codec, _dealt(cut, world_size, first)))


def _dealt(cut: Sequence[Shard], world_size: int, first: int) -> Iterator[Shard]:
    """Yield each rank's shard, of shards that lie as far apart as can be; first: the rank that serves a lone one."""
    of_rank = {(place * world_size + first) // len(cut): shard for place, shard in enumerate(cut)}
    end = 0
    for rank in range(world_size):
        start, end = of_rank.get(rank, (end, end))
        yield start, end


def shards_on(codec: Compressor, root: int, numel: int, world_size: int) -> Shards:
    """Return each rank's shard (start, stop) of a vector (numel,) of which rank `root` has all."""
    return codec.cached((numel, world_size, root, "one"), lambda: Shards(codec, _dealt([(0, numel)], world_size, root)))


def can_be_cut(codec: Compressor, bounds: Sequence[int]) -> bool:
    """Return whether payloads can be cut where vectors are cut, at these positions."""
    return bool(kinds(codec)) and not any(bound % 8 for bound in bounds[:-1])


def cut(codec: Compressor, payload: Payload, bounds: Sequence[int]) -> list[Payload]:
    """Cut a payload into those of parts of the vector, at ascending positions 0, ..., numel for which `can_be_cut`."""
    columns = [_cut(codec, part, kind, bounds) for part, kind in zip(payload, kinds(codec), strict=True)]
    return list(zip(*columns, strict=True))


def join(codec: Compressor, payloads: Sequence[Payload]) -> Payload:
    """Invert `cut`."""
    columns = zip(zip(*payloads, strict=True), kinds(codec), strict=True)
    return tuple(_join(parts, kind) for parts, kind in columns)


def _cut(codec: Compressor, column: torch.Tensor, kind: Kind, bounds: Sequence[int]) -> list[torch.Tensor]:
    if kind == BYTES:
        return list(column.split([b - a for a, b in pairwise(bounds)]))
    if kind == NOTHING:
        return [column for _ in bounds[1:]]
    if isinstance(kind, int):
        return bits.cut(column, kind, bounds)
    counts = [part_of(codec, a, b).blocks.count(b - a) if b > a else 0 for a, b in pairwise(bounds)]
    if kind == OF_BLOCKS:
        return list(column.split(counts))
    halves = [half.split(counts) for half in column.chunk(2)]
    return [torch.cat(pair) for pair in zip(*halves, strict=True)]


def _join(parts: Sequence[torch.Tensor], kind: Kind) -> torch.Tensor:
    if kind == NOTHING:
        return parts[0]
    if isinstance(kind, int):
        return bits.join(parts, kind)
    if kind == PAIRS_OF_BLOCKS:
        halves = zip(*(part.chunk(2) if len(part) else (part, part) for part in parts), strict=True)
        return torch.cat([number for half in halves for number in half])
    return torch.cat(list(parts))


class Shards(Sequence[Shard]):
    """Each rank's shard (start, stop) of a vector, in rank order. `shards_of` makes it once, for all ranks and steps.

    bounds: N + 1 positions at which the vector is cut.
    whole: whether payloads of the whole vector can be cut there.
    occupied, served: the ranks whose shards are not empty, in order and as a set.
    alike: the ranks whose shards have one size, for each size.
    """

    def __init__(self, codec: Compressor, of_ranks: Iterable[Shard]) -> None:
        self._codec, self._of_ranks = codec, tuple(of_ranks)
        self._lengths: list[tuple[int, ...]] = []
        self.bounds = [0, *(stop for _, stop in self._of_ranks)]
        self.occupied = [rank for rank, (start, stop) in enumerate(self._of_ranks) if stop > start]
        self.served = frozenset(self.occupied)
        of_size: dict[int, list[int]] = {}
        for rank, (start, stop) in enumerate(self._of_ranks):
            of_size.setdefault(stop - start, []).append(rank)
        self.alike = tuple(of_size.values())
        self.whole = tuple(pairwise(self.bounds)) == self._of_ranks and can_be_cut(codec, self.bounds)

    def __getitem__(self, rank: Any) -> Any:
        return self._of_ranks[rank]

    def __len__(self) -> int:
        return len(self._of_ranks)

    def part(self, rank: int) -> Compressor:
        """Return the compressor of a rank's shard."""
        return part_of(self._codec, *self._of_ranks[rank])

    def cut(self, payload: Payload) -> list[Payload]:
        """Cut a payload of the whole vector into the shards' payloads."""
        return cut(self._codec, payload, self.bounds)

    def lengths(self, sent: Callable[[], Sequence[Payload]]) -> list[tuple[int, ...]]:
        """Return the elements of the shards' payloads, for each tensor of a payload, from those of any vector."""
        if not self._lengths:
            self._lengths = [tuple(map(len, column)) for column in zip(*sent(), strict=True)]
        return self._lengths


class Shardwise:
    """Payloads of a vector's shards, one from each shard's rank: how to ask for all of them, and to decode them."""

    def __init__(self, codec: Compressor, vector: torch.Tensor, shards: Shards, context: Context) -> None:
        self._codec, self._vector, self._shards, self._context = codec, vector, shards, context

    @cached_property
    def sent(self) -> Sequence[Payload]:
        """Return a payload per shard, of the sizes that all payloads have."""
        return _compressed_apart(torch.zeros_like(self._vector), self._shards, self._context.random.of_rank("sizes"))

    @property
    def _lengths(self) -> list[tuple[int, ...]]:
        return self._shards.lengths(lambda: self.sent)

    @property
    def codec(self) -> Compressor:
        """The compressor of this rank's shard."""
        return self._shards.part(self._context.rank)

    def gathers(self, answer: Payload) -> tuple[Gather, ...]:
        """Request all ranks' answers. Unless sizes vary, each has the sizes of what was sent to its rank."""
        if self._codec.traits.varying:
            return tuple(Gather(part, varying=True, most=most_bytes(self._vector.numel())) for part in answer)
        return tuple(Gather(part, lengths=known) for part, known in zip(answer, self._lengths, strict=True))

    def mean(self, answers: Sequence[Payload], grads: Batch) -> Tensors:
        """Decode one answer per shard, by layer."""
        out = self._context.memory.for_mean(self._vector, grads)
        if self._shards.whole:
            return grads.cut(average_into(self._codec, out, [join(self._codec, answers)], 1.0))
        return grads.cut(self._decoded_into(out, answers))

    def _decoded_into(self, out: torch.Tensor, payloads: Sequence[Payload]) -> torch.Tensor:
        if self._add_together(out.zero_(), payloads, 1.0):
            return out
        for rank in self._shards.occupied:
            with sent_by(rank):
                average_into(self._shards.part(rank), out[slice(*self._shards[rank])], [payloads[rank]], 1.0)
        return out

    def _add_together(self, total: torch.Tensor, payloads: Sequence[Payload], scale: float) -> bool:
        """Add what all shards decode to, if the codec can in a few calls; return whether it can, and all are sound."""
        add_rows = getattr(self.codec, "add_rows", None)
        if add_rows is None:
            return False
        try:
            for ranks in self._shards.alike:
                starts = [self._shards[rank][0] for rank in ranks]
                size = self._shards[ranks[0]][1] - starts[0]
                add_rows(total, starts, size, [payloads[rank] for rank in ranks], scale)
        except GradlabError:  # whose it was, a loop over the ranks finds
            return False
        return True


class Sharded(Shardwise):
    """A vector whose shards the ranks average: what each rank sends to every other, and how to decode a whole
    vector. last, step: what a codec with one step for all shards takes from one iteration to the next."""

    def __init__(self, codec: Compressor, grads: Batch, shards: Shards, context: Context, last: float = 0.0) -> None:
        generator = context.random.of_rank("shards")
        compress_parts = getattr(codec, "compress_parts", None)
        selected = getattr(codec, "selected", None) if len(shards.occupied) > 1 else None
        whole = shards.whole and compress_parts is None and selected is None
        self._payload, vector, self._left = compressed(codec, grads, generator) if whole else ((), grads.vector, None)
        super().__init__(codec, vector, shards, context)
        self.step, self._varying = last, codec.traits.varying
        self._selected: torch.Tensor | None = None  # positions of what is sent, where all shards share a selection
        if compress_parts is not None:
            parts = [(shards.part(rank), shard) for rank, shard in enumerate(shards)]
            self.sent, self.step = compress_parts(vector, parts, last)
        elif selected is not None:
            self._selected = selected(vector, generator)
            self.sent = codec.messages_at(vector, self._selected, shards)  # type: ignore[attr-defined]
            self._varying = True
        elif not whole:
            self.sent = _compressed_apart(vector, shards, generator)

    @cached_property
    def sent(self) -> Sequence[Payload]:
        """Return the message to each rank. A whole payload is cut when it is needed: in one process it never is."""
        return self._shards.cut(self._payload)

    def average(self) -> Coroutine[torch.Tensor]:
        """Send every rank its shard, and average what comes for this rank's: (elements of the shard,)."""
        most = most_bytes(self._vector.numel())
        served = self._shards.served if self._varying else None
        received = yield tuple(AllToAll(part, self._varying, most, served) for part in self._parts())
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

    def own(self, grads: Batch) -> Deferred:
        """Return this rank's decoded contribution, by layer."""

        def decoded() -> Tensors:
            out = self._context.memory.like(self._vector)
            if (places := self._selected) is not None:
                return grads.cut(out.zero_().index_copy_(0, places, self._vector[places]))
            if self._shards.whole:
                return grads.cut(average_into(self._codec, out, [self._payload], 1.0))
            return grads.cut(self._decoded_into(out, self.sent))

        return Deferred(grads, decoded, lambda: grads.cut(self._residual()))

    def _residual(self) -> torch.Tensor:
        if self._left is not None:
            return self._left
        vector = self._context.memory.copy(self._vector)
        if self._selected is not None:
            sent = torch.cat([values for values, _ in self.sent])
            return vector.index_add_(0, self._selected, sent, alpha=-1.0)
        if self._shards.whole:
            return residual(self._codec, vector, self._payload)
        if not self._add_together(vector, self.sent, -1.0):
            for rank in self._shards.occupied:
                residual(self._shards.part(rank), vector[slice(*self._shards[rank])], self.sent[rank])
        return vector


def _averaged_in_shards(codec: Compressor, grads: Batch, context: Context) -> Coroutine[Exchanged]:
    """Average in two rounds: an all-to-all of shards, and a gather of their means, quantized once more; there is no
    state."""
    sharded = Sharded(codec, grads, shards_of(codec, grads.table.numel, context.world_size, context.group), context)
    average = yield from sharded.average()
    answer = sharded.codec.compress(average, context.random.of_rank("mean"))
    answers = yield sharded.gathers(answer)
    mean = context.once(lambda: sharded.mean(list(zip(*answers, strict=True)), grads))
    return Exchanged(mean, sharded.own(grads))


def _compressed_apart(vector: torch.Tensor, shards: Shards, generator: torch.Generator) -> list[Payload]:
    """Compress each shard by itself. Empty ones, which are most where one rank has it all, are compressed once."""
    if compress_rows := getattr(shards.part(0), "compress_rows", None):
        found: dict[int, Payload] = {}
        for ranks in shards.alike:
            rows = torch.stack([vector[slice(*shards[rank])] for rank in ranks])
            found |= zip(ranks, compress_rows(rows), strict=True)
        return [found[rank] for rank in range(len(shards))]
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
    """Decode and average payloads in rank order as `average_into`; a refused one raises BadMessage with its
    rank."""
    every = list(payloads)
    try:
        return average_into(codec, out, every, scale)
    except GradlabError:
        for rank, payload in enumerate(every):  # apart, to see whose it was
            with sent_by(rank):
                average_into(codec, out, [payload], 1.0)
        raise
