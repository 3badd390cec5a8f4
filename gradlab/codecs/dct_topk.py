"""Top-k of the discrete cosine transform, chunk by chunk: what DeMo sends of its momentum.

Peng, Quesnelle, Kingma, "DeMo: Decoupled momentum optimization", 2024, section 3 and Algorithm 1; the sizes
of chunks, the mean over the ranks that sent a coefficient and the sign of the answer follow their published code.
Inside `error_feedback` with `carried` = beta it is DeMo.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from gradlab.codec import About, Batch, Compressor, Context, Exchanged, Guarantees, Table, Tensors, Traits
from gradlab.codec.batch import stacks_apart
from gradlab.codec.blocks import WHOLE, Blocks
from gradlab.codec.settings import setting
from gradlab.coding.bits import pack, packed_bytes, unpack
from gradlab.coding.positions import below
from gradlab.collectives import Coroutine
from gradlab.kernels import usable
from gradlab.layout import Layer

if TYPE_CHECKING:
    from gradlab.kernels.dct import Chunks

AVERAGES = ("ranks", "senders")
MOST_BY_KERNELS = 64  # elements on a side of a chunk
Tiles = tuple[int, int, int, int]


class DCTTopK(Compressor):
    """Send the k largest magnitudes among each chunk's coefficients of the orthonormal DCT-II, and their indices.

    A layer (n, ...) is a matrix (n, m), cut into chunks of h x w: the largest divisors of n and m up to `chunk`. An
    expert stack has a matrix per expert. A vector is cut into chunks of w. Every rank chooses its own coefficients, so
    values and indices are gathered.

    The transform keeps norms, so C is delta-approximate: ||C(x) - x||^2 <= (1 - delta) ||x||^2, where delta is the
    smallest min(1, k / (h w)) of all layers.

    >>> done = codecs.make("dct_topk", count=1).apply(torch.ones(8, 8))  # one coefficient is all there is
    >>> round(done.relative_error, 6), done.payload_bytes
    (0.0, 10.0)
    """

    name = "dct_topk"
    about = About(
        "sparsification",
        "chunks of h * w elements: (4 * k + ceil(log2(h * w)) / 8 * k) each, k = min(count, h * w)",
        "Peng, Quesnelle, Kingma, 2024",
        candidates=tuple({"count": count} for count in (1, 2, 4, 8, 16, 32, 64)),
    )

    @dataclass(frozen=True)
    class Settings:
        chunk: int = setting(64, least=1, most=4096, unit="elements", symbol="s", help="on a side of a chunk at most")
        count: int = setting(32, least=1, unit="coefficients", symbol="k", help="sent of each chunk")
        average: str = setting(
            "ranks",
            choices=AVERAGES,
            help='a coefficient\'s mean over all ranks, or over its "senders" (published code)',
        )
        sign: bool = setting(False, help="apply the sign of the mean, not the mean")

    def __init__(self, settings: Any = None, learned: Mapping[str, torch.Tensor] | None = None) -> None:
        super().__init__(settings, learned)
        self._chunks: list[AlikeChunks] | None = None
        self.blocks = Blocks(WHOLE)  # a chunk is no run of elements: it cannot be shared out

    def for_layers(self, layers: Sequence[Layer]) -> DCTTopK:
        def made() -> DCTTopK:
            codec = DCTTopK(self.settings)
            codec._chunks = alike_chunks(self._tiles(table))
            return codec

        table = Table.of(layers)
        return self.cached(table, made)

    def _tiles(self, layers: Sequence[Layer]) -> list[tuple[int, int, int, int]]:
        return [tiles(layer.shape, self.settings.chunk) for layer in stacks_apart(Table.of(layers))]

    def guarantees(self, layers: Sequence[Layer]) -> Guarantees:
        sizes = [h * w for _, h, _, w in self._tiles(layers)]
        return Guarantees(delta=min([1.0, *(self._kept(size) / size for size in sizes if size)]))

    @cached_property
    def traits(self) -> Traits:
        return replace(super().traits, own_exchange=self.settings.sign)

    def _kept(self, size: int) -> int:
        return min(self.settings.count, size)

    def _layout(self, numel: int) -> list[AlikeChunks]:
        """Return the layers' chunks; a vector without layers, or a shard without elements, counts as one layer."""
        known = self._chunks is not None and numel == sum(alike.count * alike.size for alike in self._chunks)
        return (
            self._chunks if known and self._chunks is not None else alike_chunks([tiles((numel,), self.settings.chunk)])
        )

    def compress(self, vector: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Return the coefficients sent, one vector, and their indices within the chunks, packed, uint8."""
        if self._by_kernels(vector):
            from gradlab.kernels.dct import largest_coefficients

            nbytes = self.position_bytes(vector.numel())
            count = (self.compressed_bytes(vector.numel()) - nbytes) // 4
            return largest_coefficients(vector, self._places(vector), count, nbytes)
        values, places = [vector.new_empty(0)], [torch.empty(0, dtype=torch.uint8, device=vector.device)]
        for alike in self._layout(vector.numel()):
            coefficients = transform(alike.chunks_of(vector))
            if (kept := self._kept(alike.size)) < alike.size:
                chosen = coefficients.abs().topk(kept, sorted=False).indices
                coefficients = coefficients.gather(1, chosen)
                width = (alike.size - 1).bit_length()
                places.append(pack(chosen.view(-1) if width > 8 else chosen.view(-1).to(torch.uint8), width))
            values.append(coefficients.reshape(-1))
        return torch.cat(values), torch.cat(places)

    def add_decompressed(self, total: torch.Tensor, payload: Sequence[torch.Tensor], scale: float) -> None:
        if self._by_kernels(total):
            self._restore_by_kernels(total, [payload], scale, add=True)
        else:
            total += self.average_into(torch.empty_like(total), [payload], scale)

    def average_into(self, out: torch.Tensor, payloads: Iterable[Sequence[torch.Tensor]], scale: float) -> torch.Tensor:
        # The ranks' coefficients are added up, and their sum is transformed back once.
        ranks = [(values, places) for values, places in payloads]
        if self._by_kernels(out):
            self._restore_by_kernels(out, ranks, scale, add=False)
            return out
        first = byte = 0
        for alike in self._layout(out.numel()):
            size, kept = alike.size, self._kept(alike.size)
            width = (size - 1).bit_length() if kept < size else 0
            stop, first_byte = first + alike.count * kept, byte
            byte += packed_bytes(alike.count * kept, width)
            summed, senders = out.new_zeros(alike.count, size), out.new_zeros(alike.count, size)
            for values, places in ranks:
                coefficients = values[first:stop].to(out.dtype).view(alike.count, kept)
                if kept < size:
                    chosen = unpack(places[first_byte:byte], width)[: alike.count * kept]
                    chosen = below(chosen.to(torch.int64).view(alike.count, kept), size)
                    summed.scatter_add_(1, chosen, coefficients)
                    senders.scatter_add_(1, chosen, torch.ones_like(coefficients))
                else:
                    summed += coefficients
                    senders += 1
            over = senders.clamp_(min=1).reciprocal_().mul_(scale * len(ranks))
            summed.mul_(over if self.settings.average == "senders" else scale)
            alike.put(restore(summed, alike.h, alike.w), out)
            first = stop
        return out

    def _by_kernels(self, vector: torch.Tensor) -> bool:
        return usable(vector) and vector.numel() > 0 and self.settings.chunk <= MOST_BY_KERNELS

    def _restore_by_kernels(
        self, out: torch.Tensor, payloads: Sequence[Sequence[torch.Tensor]], scale: float, add: bool
    ) -> None:
        from gradlab.kernels.dct import restore_coefficients

        restore_coefficients(out, payloads, self._places(out), scale, add, self.settings.average == "senders")

    def _places(self, vector: torch.Tensor) -> Chunks:
        """Return what kernels read of a vector's chunks."""
        return self.cached((vector.numel(), vector.device), lambda: self._table(vector))

    def _table(self, like: torch.Tensor) -> Chunks:
        from gradlab.kernels.dct import chunks_of

        rows: list[tuple[int, ...]] = []
        counts: list[int] = []
        layout = self._layout(like.numel())
        sides = sorted({side for alike in layout for side in (alike.h, alike.w)})
        of_sides = {side: sum(before**2 for before in sides[:at]) for at, side in enumerate(sides)}
        first = byte = 0
        for alike in layout:
            kept, base = self._kept(alike.size), 0
            width = (alike.size - 1).bit_length() if kept < alike.size else 0
            coding = (alike.count * kept, width, of_sides[alike.h], of_sides[alike.w])
            for start, y, x in alike.layers:
                at = (start, x * alike.w, x, alike.h, alike.w, sum(counts), kept, first, byte, base)
                rows.append((*at, *coding))
                counts.append(y * x)
                base += y * x * kept
            first += alike.count * kept
            byte += packed_bytes(alike.count * kept, width)
        of_all = torch.cat([cosines(side, like).view(-1) for side in sides])
        return chunks_of(rows, counts, of_all, max(sides))

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        done = yield from super().exchange(grads, state, context)
        if not self.settings.sign:
            return done
        # NaN has the sign 0.
        signs = context.once(
            lambda: {name: torch.where(mean.isnan(), mean, mean.sign()) for name, mean in done.mean.items()}
        )
        return replace(done, mean=signs)

    def compressed_bytes(self, numel: int) -> int:
        values = sum(4 * alike.count * self._kept(alike.size) for alike in self._layout(numel))
        return values + self.position_bytes(numel)

    def position_bytes(self, numel: int) -> int:
        total = 0
        for alike in self._layout(numel):
            kept = self._kept(alike.size)
            total += packed_bytes(alike.count * kept, (alike.size - 1).bit_length()) if kept < alike.size else 0
        return total


@dataclass(frozen=True)
class AlikeChunks:
    """The chunks (h, w) of a vector's layers that are cut into chunks of this shape.

    layers: start of each layer (n, m) in the vector, and its numbers of chunks along n and m.
    """

    h: int
    w: int
    layers: tuple[tuple[int, int, int], ...]

    @property
    def size(self) -> int:
        """Elements of a chunk."""
        return self.h * self.w

    @property
    def count(self) -> int:
        """Number of chunks."""
        return sum(y * x for _, y, x in self.layers)

    def _views(self, vector: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield each layer as (y, x, h, w)."""
        for start, y, x in self.layers:
            yield vector[start : start + y * x * self.size].view(y, self.h, x, self.w).transpose(1, 2)

    def chunks_of(self, vector: torch.Tensor) -> torch.Tensor:
        """Cut the chunks out of a vector (numel,): (chunks, h, w), layer by layer, along n first and then along m."""
        every = [view.reshape(-1, self.h, self.w) for view in self._views(vector)]
        return every[0] if len(every) == 1 else torch.cat(every)

    def put(self, chunks: torch.Tensor, out: torch.Tensor) -> None:
        """Write chunks (chunks, h, w) to where they lie in a vector (numel,)."""
        views = list(self._views(out))
        parts = chunks.split([view.shape[0] * view.shape[1] for view in views])
        for view, part in zip(views, parts, strict=True):
            view.copy_(part.view(view.shape))


def alike_chunks(layers: Sequence[Tiles]) -> list[AlikeChunks]:
    """Put layers, one after another in a vector, together by the shape of their chunks."""
    found: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    start = 0
    for y, h, x, w in layers:
        found.setdefault((h, w), []).append((start, y, x))
        start += y * h * x * w
    return [AlikeChunks(h, w, tuple(members)) for (h, w), members in found.items()]


def tiles(shape: Sequence[int], chunk: int) -> Tiles:
    """Return (chunks along n, h, chunks along m, w) of a layer seen as a matrix (n, m); a vector has n = 1."""
    n, m = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
    h, w = largest_divisor(n, chunk), largest_divisor(m, chunk)
    return n // h, h, m // w, w


@functools.lru_cache(maxsize=4096)
def largest_divisor(number: int, most: int) -> int:
    """Find the largest divisor of a number that is at most `most`; 1 for 0."""
    return max((d for d in range(1, min(number, most) + 1) if number % d == 0), default=1)


def transform(chunks: torch.Tensor) -> torch.Tensor:
    """Compute the DCT-II of chunks: (m, h, w) -> (m, h w)."""
    _, h, w = chunks.shape
    return (cosines(h, chunks) @ chunks @ cosines(w, chunks).T).view(-1, h * w)


def restore(coefficients: torch.Tensor, h: int, w: int) -> torch.Tensor:
    """Invert `transform`: (m, h w) -> (m, h, w)."""
    return cosines(h, coefficients).T @ coefficients.view(-1, h, w) @ cosines(w, coefficients)


def cosines(size: int, like: torch.Tensor) -> torch.Tensor:
    """Return the orthonormal DCT-II matrix, (n, n) with n = size: row k is sqrt(2 / n) cos(pi k (2 i + 1) / (2 n)), and
    row 0 is divided by sqrt 2."""
    return _cosines(size, like.dtype, like.device)


@functools.lru_cache(maxsize=256)
def _cosines(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    k, i = torch.meshgrid(
        torch.arange(size, dtype=torch.float64), torch.arange(size, dtype=torch.float64), indexing="ij"
    )
    matrix = (2 / size) ** 0.5 * torch.cos(torch.pi / size * k * (i + 0.5))
    matrix[0] /= 2**0.5
    return matrix.to(dtype).to(device)
