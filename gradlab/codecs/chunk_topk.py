"""Top-k of every chunk, in two bits a value and twelve a position: what SparseLoCo sends of pseudo-gradients.

A. Sarfi, B. Therien, J. Lidin, E. Belilovsky, "Communication efficient LLM pre-training with SparseLoCo",
arXiv:2508.15706, 2025: chunks of 4,096 values, of which 32, 64 or 128 are sent; at 64 a message is 146 times smaller
than 32 bits a value. Inside `error_feedback` with `carried` = 0.95, between workers that take local steps
(`gradlab.runtime.OuterStep` with an outer optimizer of plain SGD), it is SparseLoCo, but for two things. How values
become two bits is a choice of ours, a sign and one of two magnitudes. And the published code's chunks are blocks of a
matrix, 64 x 64 or the next smaller divisors, and of a vector 64 values; here a chunk is 4,096 consecutive values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradlab.codec import About, Compressor, Guarantees
from gradlab.codec.blocks import Blocks
from gradlab.codec.settings import setting
from gradlab.coding.bits import join, pack, packed_bytes, unpack
from gradlab.coding.positions import below
from gradlab.kernels import usable
from gradlab.layout import Layer

MOST_BY_KERNELS = 4096  # elements of a chunk


class ChunkTopK(Compressor):
    """Send the `count` largest magnitudes of every chunk of `chunk` values, and where in their chunk they are.

    The last chunk may be shorter; of it the same share is sent. Every rank chooses for itself, so messages are
    gathered. With `bits` a value becomes its sign and one of 2^(bits - 1) magnitudes, which travel with the message:
    the means of the magnitudes in bins of equal width, from the least to the largest that is sent.

    A bin of sent values v keeps (sum |v|)^2 / n_b >= ||v||^2 / n_b, so that ||C(x) - x||^2 <= (1 - delta) ||x||^2 with
    delta = count / chunk without `bits`, and a k-th of that with, k the values sent.

    >>> done = codecs.make("chunk_topk", chunk=4, count=1).apply(torch.tensor([0.0, 3, 1, 0, 2, 0, -8, 0]))
    >>> done.decoded.tolist()
    [0.0, 3.0, 0.0, 0.0, 0.0, 0.0, -8.0, 0.0]
    """

    name = "chunk_topk"
    about = About(
        "sparsification",
        "k * (bits + ceil(log2(chunk))) / 8 + 2 * 2^bits, k = ceil(count * n / chunk)",
        "Sarfi et al., 2025",
        candidates=tuple({"count": count} for count in (16, 32, 64, 128, 256)),
    )

    @dataclass(frozen=True)
    class Settings:
        chunk: int = setting(4096, least=2, most=2**20, unit="elements", help="that are chosen among")
        count: int = setting(64, least=1, unit="values", symbol="k", help="sent of each chunk")
        bits: int | None = setting(
            2, least=1, most=8, help="bits of a value that is sent, its sign among them; None: its 32"
        )

    def __init__(self, settings: Any = None, learned: Mapping[str, torch.Tensor] | None = None) -> None:
        super().__init__(settings, learned)
        self.blocks = Blocks(self.settings.chunk)

    def guarantees(self, layers: Sequence[Layer]) -> Guarantees:
        share, sent = min(1.0, self.settings.count / self.settings.chunk), self._sent(sum(one.numel for one in layers))
        return Guarantees(delta=share if self.settings.bits is None else share / max(1, sent))

    def _counts(self, numel: int) -> tuple[int, int, int, int]:
        """Whole chunks and what is sent of each; the elements left over and what is sent of them."""
        chunk, count = self.settings.chunk, min(self.settings.count, self.settings.chunk)
        left = numel % chunk
        return numel // chunk, count, left, math.ceil(count * left / chunk)

    @property
    def _width(self) -> int:
        """Bits of a position in its chunk."""
        return (self.settings.chunk - 1).bit_length()

    def _sent(self, numel: int) -> int:
        """How many values are sent of a vector."""
        chunks, count, _, of_left = self._counts(numel)
        return chunks * count + of_left

    def _positions(self, vector: torch.Tensor) -> torch.Tensor:
        """Positions within their chunks of what is sent, ascending in each: (k,), int64."""
        chunks, count, left, of_left = self._counts(vector.numel())
        magnitudes, whole = vector.abs(), chunks * self.settings.chunk
        of_chunks, rest = magnitudes[:whole].view(chunks, self.settings.chunk), magnitudes[whole:].view(1, left)
        chosen = (of_chunks.topk(count, sorted=False).indices, rest.topk(of_left, sorted=False).indices)
        return torch.cat([positions.sort().values.view(-1) for positions in chosen])

    def _starts(self, numel: int, device: torch.device) -> torch.Tensor:
        """Return the start of the chunk of every value that is sent: (k,), int64."""
        chunks, count, _, of_left = self._counts(numel)
        starts = torch.arange(chunks + 1, device=device) * self.settings.chunk
        return torch.cat([starts[:-1].repeat_interleave(count), starts[-1:].expand(of_left)])

    def compress(self, vector: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Return positions, packed, uint8, and values: packed codes, uint8, and their magnitudes, or float32."""
        if self._by_kernels(vector):
            from gradlab.kernels.selection import largest_of_chunks

            return largest_of_chunks(vector, *self._sizes(vector.numel()), self.settings.bits)
        within = self._positions(vector)
        values = vector.index_select(0, within + self._starts(vector.numel(), vector.device))
        places = pack(within if self._width > 8 else within.to(torch.uint8), self._width)
        if self.settings.bits is None:
            return places, values
        codes, magnitudes = quantized(values, 2 ** (self.settings.bits - 1))
        return places, pack(codes, self.settings.bits), magnitudes

    def add_decompressed(self, total: torch.Tensor, payload: Sequence[torch.Tensor], scale: float) -> None:
        self._add(total, [payload], scale, add=True)

    def average_into(self, out: torch.Tensor, payloads: Iterable[Sequence[torch.Tensor]], scale: float) -> torch.Tensor:
        self._add(out, list(payloads), scale, add=False)
        return out

    def _by_kernels(self, vector: torch.Tensor) -> bool:
        return usable(vector) and self.settings.chunk <= MOST_BY_KERNELS

    def _sizes(self, numel: int) -> tuple[int, int, int, int]:
        """Elements of a chunk, what is sent of it, and of the elements left over, and bits of a position."""
        _, count, _, of_left = self._counts(numel)
        return self.settings.chunk, count, of_left, self._width

    def _add(self, total: torch.Tensor, payloads: Sequence[Sequence[torch.Tensor]], scale: float, add: bool) -> None:
        """Add scale * C(x) of several ranks, in their order, or overwrite a vector with their sum."""
        if self._by_kernels(total):
            from gradlab.kernels.selection import add_chunks

            add_chunks(total, payloads, self._sizes(total.numel()), self.settings.bits, scale, add)
            return
        if not add:
            total.zero_()
        for payload in payloads:
            self.add_rows(total, [0], total.numel(), [payload], scale)

    def add_rows(
        self,
        total: torch.Tensor,
        starts: Sequence[int],
        size: int,
        payloads: Sequence[Sequence[torch.Tensor]],
        scale: float,
    ) -> None:
        """Add scale * C(x) of parts of a vector (numel,), which begin at `starts` and have one size, in place."""
        chunks, count, left, _ = self._counts(size)
        if not (sent := self._sent(size)):
            return
        columns = [list(column) for column in zip(*payloads, strict=True)]
        within = _unpacked(columns[0], self._width, sent)
        below(within[:, : chunks * count].reshape(-1), self.settings.chunk)
        below(within[:, chunks * count :].reshape(-1), left)
        if self.settings.bits is None:
            values = torch.stack(columns[1]).to(total.dtype)
        else:
            magnitudes = torch.stack(columns[2]).to(total.dtype)
            levels = torch.stack([magnitudes, -magnitudes], 2).flatten(1)
            values = levels.gather(1, _unpacked(columns[1], self.settings.bits, sent))
        begin = torch.tensor(starts, device=total.device).view(-1, 1)
        places = within + self._starts(size, total.device) + begin
        total.index_add_(0, places.view(-1), values.reshape(-1), alpha=scale)

    def compressed_bytes(self, numel: int) -> int:
        bits, sent = self.settings.bits, self._sent(numel)
        values = 4 * sent if bits is None or not sent else packed_bytes(sent, bits) + 2 * 2**bits
        return values + self.position_bytes(numel)

    def position_bytes(self, numel: int) -> int:
        return packed_bytes(self._sent(numel), self._width)


def _unpacked(rows: Sequence[torch.Tensor], width: int, count: int) -> torch.Tensor:
    """Return the first `count` numbers of each of several packed vectors of equal length: (m, count)."""
    # Each stands for a multiple of 8 codes: those beyond `count` are zeros.
    return unpack(join(rows, width), width).view(len(rows), -1)[:, :count].to(torch.int64)


def quantized(values: torch.Tensor, bins: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort values (k,) into bins of equal width of their magnitudes: twice the bin's number, plus 1 for a negative one,
    (k,), uint8, and the mean magnitude of each bin, (bins,), float32, 0 of an empty one; no bins without values."""
    magnitudes = values.abs()
    if not values.numel():
        return values.to(torch.uint8), values.float()
    least, largest = magnitudes.aminmax()
    # Magnitudes that are all alike are in the first bin, and so is NaN.
    places = (magnitudes - least) / (largest - least).clamp_min(torch.finfo(values.dtype).tiny) * bins
    numbers = places.nan_to_num_(0.0).floor_().clamp_(0, bins - 1).to(torch.int64)
    return (2 * numbers + (values < 0)).to(torch.uint8), _means(magnitudes, numbers, bins).float()


def _means(values: torch.Tensor, numbers: torch.Tensor, bins: int) -> torch.Tensor:
    """Average the values of each bin, (bins,); 0 of an empty one. numbers: of each value's bin, (k,)."""
    if values.device.type == "cpu":
        sums = values.new_zeros(bins).index_add_(0, numbers, values)
        counts = values.new_zeros(bins).index_add_(0, numbers, torch.ones_like(values))
        return sums / counts.clamp_min(1.0)
    # Where threads add to the same bin the last bits change from run to run.
    inside = numbers == torch.arange(bins, device=values.device).unsqueeze(1)
    return torch.where(inside, values, 0.0).sum(1) / inside.sum(1).clamp_min(1)
