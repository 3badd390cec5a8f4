"""Top-k of the discrete cosine transform, chunk by chunk: what DeMo sends of its momentum.

Peng, Quesnelle, Kingma, "DeMo: Decoupled momentum optimization", 2024, section 3 and Algorithm 1; the sizes
of chunks, the mean over the ranks that sent a coefficient and the sign of the answer follow their published code.
Inside `error_feedback` with `carried` = beta it is DeMo.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from gradlab.codec import About, Compressor, Context, Exchanged, Guarantees, Tensors
from gradlab.codec.settings import setting
from gradlab.coding.bits import pack, packed_bytes, unpack
from gradlab.collectives import Coroutine
from gradlab.layout import Layer, matrix_shapes

AVERAGES = ("ranks", "senders")
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
    )
    candidates: ClassVar[tuple[Mapping[str, Any], ...]] = tuple({"count": count} for count in (1, 2, 4, 8, 16, 32, 64))

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
        self._tiles: list[Tiles] | None = None
        self.block = 2**62  # a chunk is no run of elements: it cannot be shared out

    def shapes_of(self, layers: Sequence[Layer]) -> list[tuple[int, ...]]:
        return matrix_shapes(layers)

    def for_layers(self, shapes: Sequence[Sequence[int]]) -> DCTTopK:
        codec = DCTTopK(self.settings)
        codec._tiles = [tiles(shape, self.settings.chunk) for shape in shapes]
        return codec

    def guarantees(self, layers: Sequence[Layer]) -> Guarantees:
        sizes = [h * w for _, h, _, w in (tiles(shape, self.settings.chunk) for shape in self.shapes_of(layers))]
        return Guarantees(delta=min([1.0, *(self._kept(size) / size for size in sizes if size)]))

    @property
    def gathered(self) -> bool:
        return not self.settings.sign

    def _kept(self, size: int) -> int:
        return min(self.settings.count, size)

    def _layout(self, numel: int) -> list[Tiles]:
        """Return the layers' chunks; a vector without layers, or a shard without elements, counts as one layer."""
        known = self._tiles is not None and numel == sum(math.prod(tile) for tile in self._tiles)
        return self._tiles if known and self._tiles is not None else [tiles((numel,), self.settings.chunk)]

    def compress(self, vector: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Return the coefficients sent, one vector, and their indices within the chunks, packed, uint8."""
        values, places = [vector.new_empty(0)], [torch.empty(0, dtype=torch.uint8, device=vector.device)]
        layout = self._layout(vector.numel())
        for part, tile in zip(vector.split([math.prod(tile) for tile in layout]), layout, strict=True):
            coefficients = transform(part, tile)
            size = coefficients.shape[1]
            if (kept := self._kept(size)) < size:
                chosen = coefficients.abs().topk(kept, sorted=False).indices
                coefficients = coefficients.gather(1, chosen)
                width = (size - 1).bit_length()
                places.append(pack(chosen.view(-1) if width > 8 else chosen.view(-1).to(torch.uint8), width))
            values.append(coefficients.reshape(-1))
        return torch.cat(values), torch.cat(places)

    def add_decompressed(self, total: torch.Tensor, payload: Sequence[torch.Tensor], scale: float) -> None:
        total += self.average_into(torch.empty_like(total), [payload], scale)

    def average_into(self, out: torch.Tensor, payloads: Iterable[Sequence[torch.Tensor]], scale: float) -> torch.Tensor:
        # The ranks' coefficients are added up, and their sum is transformed back once.
        layout, ranks = self._layout(out.numel()), [(values, places) for values, places in payloads]
        first = start = byte = 0
        for h_tiles, h, w_tiles, w in layout:
            chunks, size = h_tiles * w_tiles, h * w
            kept = self._kept(size)
            width = (size - 1).bit_length() if kept < size else 0
            stop, first_byte = first + chunks * kept, byte
            byte += packed_bytes(chunks * kept, width)
            summed, senders = out.new_zeros(chunks, size), out.new_zeros(chunks, size)
            for values, places in ranks:
                coefficients = values[first:stop].to(out.dtype).view(chunks, kept)
                if kept < size:
                    chosen = unpack(places[first_byte:byte], width)[: chunks * kept].to(torch.int64).view(chunks, kept)
                    summed.scatter_add_(1, chosen, coefficients)
                    senders.scatter_add_(1, chosen, torch.ones_like(coefficients))
                else:
                    summed += coefficients
                    senders += 1
            over = senders.clamp_(min=1).reciprocal_().mul_(scale * len(ranks))
            summed.mul_(over if self.settings.average == "senders" else scale)
            numel = chunks * size
            out[start : start + numel] = restore(summed, (h_tiles, h, w_tiles, w))
            first, start = stop, start + numel
        return out

    def exchange(self, grads: Tensors, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        done = yield from super().exchange(grads, state, context)
        if not self.settings.sign:
            return done
        # NaN has the sign 0.
        signs = context.alike(
            lambda: {name: torch.where(mean.isnan(), mean, mean.sign()) for name, mean in done.mean.items()}
        )
        return replace(done, mean=signs)

    def compressed_bytes(self, numel: int) -> int:
        values = sum(4 * h_tiles * w_tiles * self._kept(h * w) for h_tiles, h, w_tiles, w in self._layout(numel))
        return values + self.compressed_position_bytes(numel)

    def compressed_position_bytes(self, numel: int) -> int:
        total = 0
        for h_tiles, h, w_tiles, w in self._layout(numel):
            size, kept = h * w, self._kept(h * w)
            total += packed_bytes(h_tiles * w_tiles * kept, (size - 1).bit_length()) if kept < size else 0
        return total


def tiles(shape: Sequence[int], chunk: int) -> Tiles:
    """Return (chunks along n, h, chunks along m, w) of a layer seen as a matrix (n, m); a vector has n = 1."""
    n, m = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
    h, w = largest_divisor(n, chunk), largest_divisor(m, chunk)
    return n // h, h, m // w, w


@functools.lru_cache(maxsize=4096)
def largest_divisor(number: int, most: int) -> int:
    """Find the largest divisor of a number that is at most `most`; 1 for 0."""
    return max((d for d in range(1, min(number, most) + 1) if number % d == 0), default=1)


def transform(vector: torch.Tensor, tile: Tiles) -> torch.Tensor:
    """Compute the DCT-II of a layer's chunks: (numel,) -> (chunks, h w)."""
    y, h, x, w = tile
    chunks = vector.view(y, h, x, w).transpose(1, 2)  # (y, x, h, w)
    transformed = cosines(h, vector) @ chunks @ cosines(w, vector).T
    return transformed.reshape(y * x, h * w)


def restore(coefficients: torch.Tensor, tile: Tiles) -> torch.Tensor:
    """Invert `transform`: (chunks, h w) -> (numel,)."""
    y, h, x, w = tile
    chunks = cosines(h, coefficients).T @ coefficients.view(y, x, h, w) @ cosines(w, coefficients)
    return chunks.transpose(1, 2).reshape(-1)


def cosines(size: int, like: torch.Tensor) -> torch.Tensor:
    """Return the orthonormal DCT-II matrix, (n, n) with n = size.

    Row k is sqrt(2 / n) cos(pi k (2 i + 1) / (2 n)); row 0 is divided by sqrt 2.
    """
    return _cosines(size, like.dtype, like.device)


@functools.lru_cache(maxsize=256)
def _cosines(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    k, i = torch.meshgrid(
        torch.arange(size, dtype=torch.float64), torch.arange(size, dtype=torch.float64), indexing="ij"
    )
    matrix = (2 / size) ** 0.5 * torch.cos(torch.pi / size * k * (i + 0.5))
    matrix[0] /= 2**0.5
    return matrix.to(dtype).to(device)
