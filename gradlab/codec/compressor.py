"""The contract of codecs whose compression each rank computes alone."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import torch

from gradlab.codec.batch import Batch, Table, Tensors
from gradlab.codec.context import Context
from gradlab.codec.contract import Bytes, Codec, Deferred, Exchanged, Traits
from gradlab.codec.each_layer import EachLayer
from gradlab.codec.kept import Kept
from gradlab.codec.settings import setting
from gradlab.codec.shards import Payload, Shard, Shards, average_of_ranks, averaged_in_shards, most_bytes
from gradlab.codec.sparsifier import count_of
from gradlab.coding.positions import decode, decode_all, encode, in_order, index_bytes, varies
from gradlab.collectives import Coroutine, Gather, ring_sends
from gradlab.layout import Layer

SomeCompressor = TypeVar("SomeCompressor", bound="Compressor")
SomeSparsifier = TypeVar("SomeSparsifier", bound="Sparsifier")
AGGREGATIONS = ("auto", "gather", "shards")
_FEWEST_FOR_SHARDS = 3  # ranks: 2 (N - 1) / N of a payload are then less than the N - 1 of a gather


def aggregation_setting() -> Any:
    """Make the settings field of how a quantizer's values are averaged, see `Compressor.sums_in_shards`."""
    return setting(
        "auto",
        choices=AGGREGATIONS,
        help='"gather": every rank is sent all ranks\' codes, (N - 1) n bytes of them. "shards": each rank is sent one '
        "shard of all ranks' codes, sums it in 32 bits, and sends the mean's codes to all, 2 (N - 1) / N n bytes; the "
        "mean is quantized once more, which makes its error 1.5 times as large at 4 ranks and 1.8 times at 8. "
        f'"auto": what sends less, from {_FEWEST_FOR_SHARDS} ranks on shards, where the codec is fine enough',
    )


class Compressor(Codec):
    """A codec whose C(x) each rank computes from its own gradient alone.

    All ranks' payloads are gathered, decoded and averaged, or shard by shard: see `sums_in_shards`. The sizes of a
    payload depend on the length of the vector alone, unless the codec is `varying`.
    """

    block: int = 1  # elements that must stay together when a vector is cut into shards

    def __init__(self, settings: Any = None, learned: Mapping[str, torch.Tensor] | None = None) -> None:
        super().__init__(settings, learned)
        self._shards: dict[tuple[Any, ...], Shards] = {}

    def kept(self, layers: Sequence[Layer], rank: int, world_size: int, group: str) -> Mapping[str, Kept]:
        return {}

    @property
    def gathered(self) -> bool:
        """Whether `exchange` gathers payloads as this class does. If not, `two_way` cannot take its place."""
        return getattr(self.settings, "aggregation", "gather") != "shards"

    @cached_property
    def traits(self) -> Traits:
        return replace(super().traits, frees_gradients=True)

    def sums_in_shards(self, world_size: int) -> bool:
        """Return whether the ranks average in two rounds: an all-to-all of shards, and a gather of their means.

        The mean is then C((1/N) sum_i C(x_i)), quantized twice. Codecs whose settings have no `aggregation` gather.
        """
        chosen = getattr(self.settings, "aggregation", "gather")
        auto = chosen == "auto" and world_size >= _FEWEST_FOR_SHARDS and not self.traits.coarse
        return chosen == "shards" or auto

    def for_layers(self: SomeCompressor, layers: Sequence[Layer]) -> SomeCompressor:
        """Return the compressor of a vector that concatenates these layers, made once for a `Table`."""
        return self

    def part(self, start: int, stop: int) -> Compressor:
        """Return the compressor of the shard vector[start:stop], whose ends `bounds` has chosen."""
        return self

    def blocks(self, numel: int) -> int:
        """Return how many pieces a vector (numel,) can be cut into."""
        return -(-numel // self.block)

    def bounds(self, numel: int, parts: int) -> list[int]:
        """Choose where to cut a vector (numel,) into shards of whole blocks, as equal as possible.

        Returns:
            Ascending positions 0, ..., numel, one more than there are parts.
        """
        blocks = self.blocks(numel)
        return [min(numel, self.block * (blocks * n // parts)) for n in range(parts + 1)]

    def shards(self, numel: int, world_size: int, name: str = "") -> Shards:
        """Return each rank's shard (start, stop) of a vector (numel,): whole blocks, or all of it on one rank.

        A vector of one block cannot be cut. Its rank follows from the group's name, so that groups have different ones.
        """
        if self.blocks(numel) > 1:
            return self._kept_shards((numel, world_size, "equal"), lambda: pairwise(self.bounds(numel, world_size)))
        return self.shards_on(zlib.crc32(name.encode()) % world_size, numel, world_size)

    def shards_on(self, root: int, numel: int, world_size: int) -> Shards:
        """Return each rank's shard (start, stop) of a vector (numel,) of which rank `root` has all."""

        at = (numel, world_size, root)
        return self._kept_shards(at, lambda: ((0 if rank == root else numel, numel) for rank in range(world_size)))

    def _kept_shards(self, key: tuple[Any, ...], of_ranks: Callable[[], Iterable[Shard]]) -> Shards:
        """Return the shards that all ranks of a process share, and all steps."""
        if key not in self._shards:
            self._shards[key] = Shards(self, of_ranks())
        return self._shards[key]

    def can_be_cut(self, bounds: Sequence[int]) -> bool:
        """Return whether a payload can be cut into those of parts of the vector, see `PiecewiseCompressor.cut`."""
        return False

    def cut(self, payload: Payload, bounds: Sequence[int]) -> list[Payload]:
        """Cut a payload into those of parts of the vector, if `can_be_cut`."""
        raise NotImplementedError(f"a payload of {self.name} cannot be cut")

    def join(self, payloads: Sequence[Payload]) -> Payload:
        """Invert `cut`."""
        raise NotImplementedError(f"payloads of {self.name} cannot be joined")

    @abstractmethod
    def compress(self, vector: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Compress a vector to the payload that travels.

        Args:
            vector: (numel,), which may be empty.
            generator: this rank's own random numbers.

        Returns:
            The payload: one or more vectors.
        """

    @abstractmethod
    def compressed_bytes(self, numel: int) -> int:
        """Return the payload bytes of a float32 vector (numel,); an estimate if the codec is `varying`."""

    def forecast(self, layers: Sequence[Layer], world_size: int, state: Tensors | None = None) -> Bytes:
        codec, numel = self.for_layers(layers), sum(layer.numel for layer in layers)
        positions = codec.compressed_position_bytes(numel)
        if not codec.sums_in_shards(world_size):
            payload = codec.compressed_bytes(numel)
            return Bytes(payload, payload * (world_size - 1), positions)
        shards = sum(codec.part(a, b).compressed_bytes(b - a) for a, b in codec.shards(numel, world_size))
        return Bytes(shards * (1 + 1 / world_size), shards * ring_sends(world_size), positions)

    def compressed_position_bytes(self, numel: int) -> int:
        """Return how many of `compressed_bytes` name the elements whose values are sent."""
        return 0

    @abstractmethod
    def add_decompressed(self, total: torch.Tensor, payload: Sequence[torch.Tensor], scale: float) -> None:
        """Add scale * C(x) to `total`, in place.

        total: (numel,), floating point.
        payload: the result of `compress`.
        scale: the factor.
        """

    def decompress_into(self, out: torch.Tensor, payload: Sequence[torch.Tensor]) -> torch.Tensor:
        """Overwrite a vector (numel,) with C(x), and return it."""
        self.add_decompressed(out.zero_(), payload, 1.0)
        return out

    def average_into(self, out: torch.Tensor, payloads: Iterable[Sequence[torch.Tensor]], scale: float) -> torch.Tensor:
        """Overwrite a vector (numel,) with scale times the sum of C(x) of several ranks, in their order; return it."""
        out.zero_()
        for payload in payloads:
            self.add_decompressed(out, payload, scale)
        return out

    def residual_into(self, out: torch.Tensor, vector: torch.Tensor, payload: Sequence[torch.Tensor]) -> torch.Tensor:
        """Overwrite `out` (numel,), which may be the vector itself, with vector - C(vector), and return it."""
        self.add_decompressed(out if out is vector else out.copy_(vector), payload, -1.0)
        return out

    def decompress(self, payload: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Decode a payload to C(x), a vector of the length and dtype of `like`."""
        return self.decompress_into(torch.empty_like(like), payload)

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        vector, codec = grads.vector, self.for_layers(grads.table)
        if codec.sums_in_shards(context.world_size) and not context.one_round:
            return (yield from averaged_in_shards(codec, vector, grads, context))
        payload = codec.compress(vector, context.random.of_rank())
        most = most_bytes(vector.numel())
        answers = yield tuple(Gather(part, varying=self.traits.varying, most=most) for part in payload)

        def mean() -> Tensors:
            total = context.memory.for_mean(vector, grads)
            average = average_of_ranks(codec, total, zip(*answers, strict=True), 1.0 / context.world_size)
            return grads.cut(average)

        own = Deferred(
            grads,
            lambda: grads.cut(codec.decompress_into(context.memory.like(vector), payload)),
            lambda: grads.cut(codec.residual_into(context.memory.over(vector), vector, payload)),
        )
        return Exchanged(context.once(mean), own)


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


class Sparsifier(Compressor):
    """A codec by which every rank sends the values and positions of the elements that it selects.

    Its settings have `index_coding`, see `gradlab.coding.positions`, and `density`. A subclass without a density
    overrides `compressed_bytes`.
    """

    def __init__(self, settings: Any = None, learned: Mapping[str, torch.Tensor] | None = None) -> None:
        super().__init__(settings, learned)
        self._each: EachLayer | None = None  # where a share of each layer of a group is selected
        self._sent: tuple[torch.Tensor, torch.Tensor] | None = None  # encoded positions, and what they are
        self._of_groups: dict[tuple[int, ...], Any] = {}

    def for_layers(self: SomeSparsifier, layers: Sequence[Layer]) -> SomeSparsifier:
        if len(layers) == 1 or getattr(self.settings, "across_layers", True):
            return self
        sizes = Table.of(layers).numels
        if sizes not in self._of_groups:
            relative = type(self)(self.settings)
            counts = [count_of(self.settings.density, size) for size in sizes]
            relative._each = EachLayer(sizes, counts, self.settings.index_coding)
            self._of_groups[sizes] = relative
        return self._of_groups[sizes]

    @cached_property
    def traits(self) -> Traits:
        return replace(super().traits, selects=True, varying=varies(self.settings.index_coding))

    @abstractmethod
    def select(self, vector: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return the positions (count,), int64, of the elements of a vector (numel,) that are sent."""

    def compress(self, vector: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Return the selected values (count,) and their encoded positions (bytes,), uint8."""
        if self._each is not None and self._each.numel == vector.numel():
            positions = self._each.largest(vector)
            encoded = self._each.encode(positions)
        else:
            positions, coding = self.select(vector, generator), self.settings.index_coding
            if in_order(coding, len(positions), vector.numel()):
                positions = positions.sort().values
            encoded = encode(positions, vector.numel(), coding)
        # On a GPU they may lie in a recorded graph's memory, which is used again.
        self._sent = (encoded, positions) if encoded.is_cpu else None
        return vector[positions], encoded

    def add_decompressed(self, total: torch.Tensor, payload: Sequence[torch.Tensor], scale: float) -> None:
        self._add(total, [payload], scale)

    def average_into(self, out: torch.Tensor, payloads: Iterable[Sequence[torch.Tensor]], scale: float) -> torch.Tensor:
        self._add(out.zero_(), list(payloads), scale)
        return out

    def _add(self, total: torch.Tensor, payloads: Sequence[Sequence[torch.Tensor]], scale: float) -> None:
        """Add scale * C(x) of several ranks, in their order."""
        for values, positions in zip(
            [values for values, _ in payloads], self._decoded(payloads, total.numel()), strict=True
        ):
            total.index_add_(0, positions, values if scale == 1.0 else values * scale)

    def compressed_bytes(self, numel: int) -> int:
        """Return the bytes of ceil(density * numel) values and their positions.

        If the size of the coding depends on the positions, random positions stand for them.
        """
        known = self._each is not None and self._each.numel == numel
        count = self._each.count if self._each is not None and known else count_of(self.settings.density, numel)
        return 4 * count + self.compressed_position_bytes(numel)

    def _decoded(self, payloads: Sequence[Sequence[torch.Tensor]], numel: int) -> list[torch.Tensor]:
        """Return the positions of each payload, those of as many values in one pass."""
        if self._sent is not None and len(payloads) == 1 and payloads[0][1] is self._sent[0]:
            (_, positions), self._sent = self._sent, None
            return [positions]
        if self._each is not None and self._each.numel == numel:
            return self._each.decode([encoded for _, encoded in payloads])
        coding, counts = self.settings.index_coding, {len(values) for values, _ in payloads}
        if len(counts) == 1:
            return decode_all([encoded for _, encoded in payloads], counts.pop(), numel, coding)
        return [decode(encoded, len(values), numel, coding) for values, encoded in payloads]

    def compressed_position_bytes(self, numel: int) -> int:
        if self._each is not None and self._each.numel == numel:
            return self._each.nbytes
        return index_bytes(self.settings.index_coding, count_of(self.settings.density, numel), numel)
