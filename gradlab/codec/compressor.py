"""The contract of a codec that one rank computes alone: gathered, decompressed, averaged."""

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
    """A codec C(x) that one rank computes alone, without what other ranks know: gathered, decompressed, averaged.

    The sizes of what `compress` returns depend on the length of the vector alone, unless it says that they are
    `varying`.
    """

    block: int = 1  # elements that must not be parted when a vector is cut into shards

    @property
    def gathered(self) -> bool:
        """Whether `exchange` is what stands here: compress, gather, decompress, average. A form of its own is not what
        `two_way` would do."""
        return True

    def for_layers(self, shapes: Sequence[Sequence[int]]) -> Compressor:
        """The compressor of a vector in which layers of these shapes follow each other."""
        return self

    def part(self, start: int, stop: int) -> Compressor:
        """The compressor of vector[start:stop], both of them among what `bounds` may give."""
        return self

    def blocks(self, numel: int) -> int:
        """How many pieces a vector can be cut into."""
        return -(-numel // self.block)

    def bounds(self, numel: int, parts: int) -> list[int]:
        """Where to cut a vector into shards of whole blocks, as equal as they can be: 0, ..., numel."""
        blocks = self.blocks(numel)
        return [min(numel, self.block * (blocks * n // parts)) for n in range(parts + 1)]

    @abstractmethod
    def compress(self, vector: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """What travels for a vector (numel,), as vectors; numel may be 0. generator: of this rank's own."""

    @abstractmethod
    def compressed_bytes(self, numel: int) -> int:
        """Bytes of what `compress` returns for a vector of so many elements, float32; an estimate where they vary."""

    def payload_bytes(self, layers: Sequence[Layer], world_size: int) -> float:
        return self.for_layers([layer.shape for layer in layers]).compressed_bytes(sum(layer.numel for layer in layers))

    @abstractmethod
    def add_decompressed(self, total: torch.Tensor, payload: Sequence[torch.Tensor], scale: float) -> None:
        """total += scale * C(x), in place. total: (numel,), floating point; payload: what `compress` returned."""

    def decompress_into(self, out: torch.Tensor, payload: Sequence[torch.Tensor]) -> torch.Tensor:
        """Overwrite a vector (numel,) with C(x); returns it."""
        self.add_decompressed(out.zero_(), payload, 1.0)
        return out

    def add_all(self, total: torch.Tensor, payloads: Iterable[Sequence[torch.Tensor]], scale: float) -> None:
        """Add several ranks' vectors, in their order."""
        for payload in payloads:
            self.add_decompressed(total, payload, scale)

    def residual_into(self, out: torch.Tensor, vector: torch.Tensor, payload: Sequence[torch.Tensor]) -> torch.Tensor:
        """Overwrite `out` with vector - C(vector), (numel,) each; returns it."""
        self.add_decompressed(out.copy_(vector), payload, -1.0)
        return out

    def decompress(self, payload: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """C(x), a vector of the length and dtype of `like`."""
        return self.decompress_into(torch.empty_like(like), payload)

    def exchange(self, grads: Tensors, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        vector, codec = concatenate(grads), self.for_layers([grad.shape for grad in grads.values()])
        payload = codec.compress(vector, context.rank_generator())
        answers = yield tuple(Gather(part, varying=self.varying) for part in payload)
        mean = context.workspace.zeros_like(vector)
        codec.add_all(mean, zip(*answers, strict=True), 1.0 / context.world_size)

        def own() -> Tensors:
            return separate(codec.decompress_into(context.workspace.empty_like(vector), payload), grads)

        def unsent() -> Tensors:
            return separate(codec.residual_into(context.workspace.empty_like(vector), vector, payload), grads)

        return Exchanged(separate(mean, grads), Deferred(grads, own, unsent))


class Sparsifier(Compressor):
    """A choice of positions that every rank makes for itself, so that values and positions are gathered.

    The settings of each have `index_coding`, how positions travel: see `gradlab.coding.positions`.
    """

    selects = True

    @property
    def varying(self) -> bool:
        return varies(self.settings.index_coding)

    @abstractmethod
    def select(self, vector: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Positions (count,), int64, of what is sent of a vector (numel,)."""

    def compress(self, vector: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Values (count,) and their encoded positions, uint8."""
        positions, coding = self.select(vector, generator), self.settings.index_coding
        if in_order(coding, len(positions), vector.numel()):
            positions = positions.sort().values
        return vector[positions], encode(positions, vector.numel(), coding)

    def add_decompressed(self, total: torch.Tensor, payload: Sequence[torch.Tensor], scale: float) -> None:
        values, encoded = payload
        positions = decode(encoded, len(values), total.numel(), self.settings.index_coding)
        total.index_add_(0, positions, values if scale == 1.0 else values * scale)

    def compressed_bytes(self, numel: int) -> int:
        """Bytes of ceil(density * numel) values with their positions; where those vary, of random positions."""
        count = count_of(self.settings.density, numel)
        return 4 * count + index_bytes(self.settings.index_coding, count, numel)
