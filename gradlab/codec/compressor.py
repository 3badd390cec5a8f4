"""The contract of codecs whose compression each rank computes alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

import torch

from gradlab.codec.contract import Codec, Context, Deferred, Exchanged, Tensors, concatenate, separate
from gradlab.codec.sparsifier import count_of
from gradlab.coding.positions import decode, encode, in_order, index_bytes, varies
from gradlab.collectives import Coroutine, Gather
from gradlab.layout import Layer


class Compressor(Codec):
    """A codec whose C(x) each rank computes from its own gradient alone.

    All ranks' payloads are gathered, decoded and averaged. The sizes of a payload depend on the length of the vector
    alone, unless the codec is `varying`.
    """

    block: int = 1  # elements that must stay together when a vector is cut into shards

    @property
    def gathered(self) -> bool:
        """Whether `exchange` gathers payloads as this class does. If not, `two_way` cannot take its place."""
        return True

    def for_layers(self, shapes: Sequence[Sequence[int]]) -> Compressor:
        """Return the compressor of a vector that concatenates layers of these shapes."""
        return self

    def shapes_of(self, layers: Sequence[Layer]) -> list[tuple[int, ...]]:
        """Return the shapes that `for_layers` takes for layers: each layer's own."""
        return [layer.shape for layer in layers]

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

    @abstractmethod
    def compress(self, vector: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Compress a vector to the payload that travels.

        Args:
            vector: (numel,), which may be empty.
            generator: of this rank's own random numbers.

        Returns:
            The payload: one or more vectors.
        """

    @abstractmethod
    def compressed_bytes(self, numel: int) -> int:
        """Return the payload bytes of a float32 vector (numel,); an estimate if the codec is `varying`."""

    def payload_bytes(self, layers: Sequence[Layer], world_size: int) -> float:
        return self.for_layers(self.shapes_of(layers)).compressed_bytes(sum(layer.numel for layer in layers))

    def compressed_position_bytes(self, numel: int) -> int:
        """Return how many of `compressed_bytes` name the elements whose values are sent."""
        return 0

    def position_bytes(self, layers: Sequence[Layer], world_size: int) -> float:
        return self.for_layers(self.shapes_of(layers)).compressed_position_bytes(sum(layer.numel for layer in layers))

    @abstractmethod
    def add_decompressed(self, total: torch.Tensor, payload: Sequence[torch.Tensor], scale: float) -> None:
        """Add scale * C(x) to `total`, in place.

        total: (numel,), floating point.
        payload: as `compress` returned it.
        scale: the factor.
        """

    def decompress_into(self, out: torch.Tensor, payload: Sequence[torch.Tensor]) -> torch.Tensor:
        """Overwrite a vector (numel,) with C(x), and return it."""
        self.add_decompressed(out.zero_(), payload, 1.0)
        return out

    def add_all(self, total: torch.Tensor, payloads: Iterable[Sequence[torch.Tensor]], scale: float) -> None:
        """Add scale * C(x) of several ranks to `total` (numel,), in the order of the payloads, in place."""
        for payload in payloads:
            self.add_decompressed(total, payload, scale)

    def residual_into(self, out: torch.Tensor, vector: torch.Tensor, payload: Sequence[torch.Tensor]) -> torch.Tensor:
        """Overwrite `out` (numel,) with vector - C(vector), and return it."""
        self.add_decompressed(out.copy_(vector), payload, -1.0)
        return out

    def decompress(self, payload: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Decode a payload to C(x), a vector of the length and dtype of `like`."""
        return self.decompress_into(torch.empty_like(like), payload)

    def exchange(self, grads: Tensors, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        vector, codec = concatenate(grads), self.for_layers(self.shapes_of(self.layers_of(grads)))
        payload = codec.compress(vector, context.rank_generator())
        answers = yield tuple(Gather(part, varying=self.varying) for part in payload)
        mean = context.workspace.zeros_like(vector)
        codec.add_all(mean, zip(*answers, strict=True), 1.0 / context.world_size)

        def own() -> Tensors:
            return separate(codec.decompress_into(context.workspace.empty_like(vector), payload), grads)

        def error() -> Tensors:
            return separate(codec.residual_into(context.workspace.empty_like(vector), vector, payload), grads)

        return Exchanged(separate(mean, grads), Deferred(grads, own, error))


class Sparsifier(Compressor):
    """A codec by which every rank sends the values and positions of the elements that it selects.

    Its settings have `index_coding`, see `gradlab.coding.positions`, and `density`. A subclass without a density
    overrides `compressed_bytes`.
    """

    selects = True

    @property
    def varying(self) -> bool:
        return varies(self.settings.index_coding)

    @abstractmethod
    def select(self, vector: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return the positions (count,), int64, of the elements of a vector (numel,) that are sent."""

    def compress(self, vector: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Return the selected values (count,) and their encoded positions (bytes,), uint8."""
        positions, coding = self.select(vector, generator), self.settings.index_coding
        if in_order(coding, len(positions), vector.numel()):
            positions = positions.sort().values
        return vector[positions], encode(positions, vector.numel(), coding)

    def add_decompressed(self, total: torch.Tensor, payload: Sequence[torch.Tensor], scale: float) -> None:
        values, encoded = payload
        positions = decode(encoded, len(values), total.numel(), self.settings.index_coding)
        total.index_add_(0, positions, values if scale == 1.0 else values * scale)

    def compressed_bytes(self, numel: int) -> int:
        """Return the bytes of ceil(density * numel) values and their positions.

        If the size of the coding depends on the positions, random positions stand for them.
        """
        return 4 * count_of(self.settings.density, numel) + self.compressed_position_bytes(numel)

    def compressed_position_bytes(self, numel: int) -> int:
        return index_bytes(self.settings.index_coding, count_of(self.settings.density, numel), numel)
