"""The contract of codecs whose compression each rank computes alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch

from gradlab.codec.abilities import for_layers, part_of, position_bytes
from gradlab.codec.batch import Batch, Table, Tensors
from gradlab.codec.blocks import Blocks
from gradlab.codec.context import Context
from gradlab.codec.contract import Bytes, Codec, Traits
from gradlab.codec.each_layer import EachLayer
from gradlab.codec.exchanged import Exchanged
from gradlab.codec.routes import average, shards_of, sums_in_shards
from gradlab.codec.sparsifier import count_of
from gradlab.coding.positions import chosen, decode, decode_all, encode, index_bytes, varies
from gradlab.collectives import Coroutine, ring_sends
from gradlab.errors import GradlabError
from gradlab.kernels import usable
from gradlab.layout import Layer

if TYPE_CHECKING:
    from gradlab.kernels.selection import Counted, Places

SomeSparsifier = TypeVar("SomeSparsifier", bound="Sparsifier")


class Compressor(Codec):
    """A codec whose C(x) each rank computes from its own gradient alone.

    `gradlab.codec.routes` averages all ranks' C(x), by a gather or in shards. The sizes of a payload depend on the
    length of the vector alone, unless the codec is `varying`. `gradlab.codec.abilities` says what it may do besides.
    """

    blocks = Blocks(1)  # that stay whole when a vector is cut into shards

    @cached_property
    def traits(self) -> Traits:
        own = getattr(self.settings, "aggregation", "gather") == "shards"
        return replace(super().traits, frees_gradients=True, own_exchange=own)

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
        codec, numel = for_layers(self, layers), sum(layer.numel for layer in layers)
        positions = position_bytes(codec, numel)
        if not sums_in_shards(codec, world_size):
            payload = codec.compressed_bytes(numel)
            return Bytes(payload, payload * (world_size - 1), positions)
        shards = sum(part_of(codec, a, b).compressed_bytes(b - a) for a, b in shards_of(codec, numel, world_size))
        return Bytes(shards * (1 + 1 / world_size), shards * ring_sends(world_size), positions)

    @abstractmethod
    def add_decompressed(self, total: torch.Tensor, payload: Sequence[torch.Tensor], scale: float) -> None:
        """Add scale * C(x) to `total`, in place.

        total: (numel,), floating point.
        payload: the result of `compress`.
        scale: the factor.
        """

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        return (yield from average(for_layers(self, grads.table), grads, context))


class Sparsifier(Compressor):
    """A codec by which every rank sends the values and positions of the elements that it selects.

    Its settings have `index_coding`, see `gradlab.coding.positions`, and `density`. A subclass without a density
    overrides `compressed_bytes`.
    """

    exact: ClassVar[bool] = False  # whether `select` returns the share `density` of largest magnitudes
    _each: EachLayer | None = None  # where a share of each layer of a group is selected
    _sent: tuple[torch.Tensor, torch.Tensor] | None = None  # encoded positions, and what they are

    def for_layers(self: SomeSparsifier, layers: Sequence[Layer]) -> SomeSparsifier:
        if len(layers) == 1 or getattr(self.settings, "across_layers", True):
            return self

        def made() -> SomeSparsifier:
            relative = type(self)(self.settings)
            counts = [count_of(self.settings.density, size) for size in sizes]
            relative._each = EachLayer(sizes, counts, self.settings.index_coding)
            return relative

        sizes = Table.of(layers).numels
        return self.cached(sizes, made)

    @cached_property
    def traits(self) -> Traits:
        return replace(super().traits, selects=True, varying=varies(self.settings.index_coding))

    @abstractmethod
    def select(self, vector: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return the positions (count,), int64, ascending, of the elements of a vector (numel,) that are sent."""

    def compress(self, vector: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Return the selected values (count,) and their encoded positions (bytes,), uint8."""
        numel, coding, each = vector.numel(), self.settings.index_coding, self._each_of(vector.numel())
        if self._by_kernels(vector):
            from gradlab.kernels.selection import largest_of_each

            count, above = (each.count, None) if each is not None else self._counted(vector, generator)
            if count is not None:
                places, nbytes, given = self._places(vector, count)
                return largest_of_each(vector, places, count, nbytes, given, above)
        if each is not None:
            positions = each.select(vector)
            encoded = each.encode(positions)
        else:
            positions = self.select(vector, generator)
            encoded = encode(positions, numel, coding)
        self._sent = encoded, positions
        return vector[positions], encoded

    def selected(self, vector: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return the positions (count,), int64, ascending, of what is sent of a whole vector (numel,) in parts. Shares
        of its own for each part would send small values of one in place of large ones of another."""
        each = self._each_of(vector.numel())
        return (self.select(vector, generator) if each is None else each.select(vector)).sort().values

    def messages_at(
        self, vector: torch.Tensor, positions: torch.Tensor, parts: Sequence[tuple[int, int]]
    ) -> list[tuple[torch.Tensor, ...]]:
        """Return the message of each part (start, stop): the values at those of the positions that lie in it."""
        starts = torch.tensor([start for start, _ in parts], device=vector.device)
        cuts = torch.searchsorted(positions, starts).tolist()[1:]
        places = zip(parts, positions.tensor_split(cuts), vector[positions].tensor_split(cuts), strict=True)
        coding = self.settings.index_coding
        return [(values, encode(chosen - start, stop - start, coding)) for (start, stop), chosen, values in places]

    def add_decompressed(self, total: torch.Tensor, payload: Sequence[torch.Tensor], scale: float) -> None:
        self._add(total, [payload], scale)

    def average_into(self, out: torch.Tensor, payloads: Iterable[Sequence[torch.Tensor]], scale: float) -> torch.Tensor:
        self._add(out, list(payloads), scale, add=False)
        return out

    def _by_kernels(self, vector: torch.Tensor) -> bool:
        return usable(vector) and vector.numel() > 0 and not varies(self.settings.index_coding)

    def _counted(self, vector: torch.Tensor, generator: torch.Generator) -> tuple[int | None, Counted | None]:
        """Return how many largest magnitudes of a vector kernels send, and what counted them; None if they cannot."""
        return count_of(self.settings.density, vector.numel()) if self.exact else None, None

    def _places(self, vector: torch.Tensor, count: int) -> tuple[Places, int, int]:
        """Return what kernels read of a message's layers, its bytes of positions, and the count or -1 for theirs."""
        numel, coding, device = vector.numel(), self.settings.index_coding, vector.device
        if (each := self._each_of(numel)) is not None:
            return each.places(device), each.nbytes, -1
        named = chosen(coding, count, numel)
        whole = self.cached(("whole", numel, named), lambda: EachLayer((numel,), (1,), named))
        return whole.places(device), index_bytes(coding, count, numel), count

    def _add_by_kernels(
        self, total: torch.Tensor, payloads: Sequence[Sequence[torch.Tensor]], scale: float, add: bool
    ) -> None:
        from gradlab.kernels.selection import add_selected

        numel, coding, each = total.numel(), self.settings.index_coding, self._each_of(total.numel())
        for _, of_coding in groupby(payloads, lambda one: chosen(coding, len(one[0]), numel)):
            part = list(of_coding)
            counts = [len(values) for values, _ in part]
            places, _, given = self._places(total, counts[0])
            for count, (_, encoded) in zip(counts, part, strict=True):
                nbytes = self._places(total, count)[1]
                if len(encoded) != nbytes or (each is not None and count != each.count):
                    raise GradlabError(f"positions: {len(encoded)} bytes for {count}, expected {nbytes}")
            add_selected(total, part, places, scale, add, given if len(set(counts)) == 1 else counts)
            add = True

    def add_rows(
        self,
        total: torch.Tensor,
        starts: Sequence[int],
        size: int,
        payloads: Sequence[Sequence[torch.Tensor]],
        scale: float,
    ) -> None:
        """Add scale * C(x) of parts of a vector (numel,), which begin at `starts` and have one size, in place."""
        positions = torch.cat(
            [start + of_part for start, of_part in zip(starts, self._decoded(payloads, size), strict=True)]
        )
        total.index_add_(0, positions, torch.cat([values for values, _ in payloads]), alpha=scale)

    def _add(
        self, total: torch.Tensor, payloads: Sequence[Sequence[torch.Tensor]], scale: float, add: bool = True
    ) -> None:
        """Add scale * C(x) of several ranks, in their order, or overwrite a vector with their sum."""
        if self._by_kernels(total):
            self._add_by_kernels(total, payloads, scale, add)
            return
        if not add:
            total.zero_()
        for values, positions in zip(
            [values for values, _ in payloads], self._decoded(payloads, total.numel()), strict=True
        ):
            total.index_add_(0, positions, values if scale == 1.0 else values * scale)

    def compressed_bytes(self, numel: int) -> int:
        """Return the bytes of ceil(density * numel) values and their positions.

        If the size of the coding depends on the positions, random positions stand for them.
        """
        each = self._each_of(numel)
        return 4 * (count_of(self.settings.density, numel) if each is None else each.count) + self.position_bytes(numel)

    def _decoded(self, payloads: Sequence[Sequence[torch.Tensor]], numel: int) -> list[torch.Tensor]:
        """Return the positions of each payload, those of as many values in one pass."""
        if self._sent is not None and len(payloads) == 1 and payloads[0][1] is self._sent[0]:
            (_, positions), self._sent = self._sent, None
            return [positions]
        if (each := self._each_of(numel)) is not None:
            return each.decode([encoded for _, encoded in payloads])
        coding, counts = self.settings.index_coding, {len(values) for values, _ in payloads}
        if len(counts) == 1:
            return decode_all([encoded for _, encoded in payloads], counts.pop(), numel, coding)
        return [decode(encoded, len(values), numel, coding) for values, encoded in payloads]

    def position_bytes(self, numel: int) -> int:
        if (each := self._each_of(numel)) is not None:
            return each.nbytes
        return index_bytes(self.settings.index_coding, count_of(self.settings.density, numel), numel)

    def _each_of(self, numel: int) -> EachLayer | None:
        """Return how each layer's share of a vector (numel,) is chosen; None of a part, and of a selection of all."""
        return self._each if self._each is not None and self._each.numel == numel else None
