"""QSGD: round every element to one of a few levels, at random and without bias; one norm per bucket of elements.

Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD: Communication-efficient SGD via gradient quantization and encoding",
NeurIPS 2017, section 3.1; buckets, and the largest magnitude in place of the norm: section 4. All codes have
one width here; the paper shortens frequent ones (Elias). Two bits are TernGrad's (Wen et al., NeurIPS 2017).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from gradlab.codec import About, Batch, Bytes, Context, Exchanged, Guarantees, PlanDefaults, Tensors, Traits
from gradlab.codec.abilities import decompress
from gradlab.codec.blocks import Blocks
from gradlab.codec.blockwise import BlockCompressor, largest_of_rows
from gradlab.codec.routes import OF_BLOCKS, Kind, aggregation_setting
from gradlab.codec.settings import require, setting
from gradlab.coding.bits import Packer, packed_bytes, unpack
from gradlab.coding.random_bits import RandomBits
from gradlab.collectives import Coroutine, Ring
from gradlab.collectives.ring import RingCode, segment_bounds
from gradlab.kernels import Form, Source
from gradlab.layout import Layer

NORMS = ("max", "l2")
_FINE = 4  # bits from which on quantizing a mean once more costs little


class BucketQuantizer(BlockCompressor):
    """A quantizer of buckets: a norm for each, and a code of `bits` bits for each element over the norm."""

    def __init__(self, settings: Any = None, learned: Mapping[str, torch.Tensor] | None = None) -> None:
        super().__init__(settings, learned)
        self.blocks = Blocks(self.settings.bucket_size)
        self.levels = max(1, (1 << self.settings.bits - 1) - 1)  # beside zero

    def block_of(self, layer: Layer) -> int:
        return self.settings.bucket_size

    def compress(self, vector: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Return norms (buckets,), float32, and packed codes (ceil(numel / 8) * bits,), uint8."""
        if not vector.numel():
            return vector.new_empty(0, dtype=torch.float32), torch.empty(0, dtype=torch.uint8, device=vector.device)
        if (done := self.compressed_by_kernels(Source(vector), generator)) is not None:
            return done
        norms, bits = self.norms(vector), RandomBits(generator, vector.device)
        units = self.units(norms.to(vector.dtype))
        units = units.masked_fill(units == 0, 1.0)
        packer = Packer(vector.numel(), self.settings.bits, vector.device)
        scratch = self._scratch(vector)
        for start, stop in self.spans(vector):
            places = self.divide(vector[start:stop], units, start, scratch[: stop - start])
            packer.write(start, self.codes(places, bits.sixteen(places).to(places.dtype)))
        return norms, packer.packed

    def compress_source(self, source: Source, generator: torch.Generator) -> tuple[torch.Tensor, ...] | None:
        largest = self.settings.norm == "max"
        if largest and (done := self.encoded_in_one_pass(source, generator)) is not None:
            return done
        norms = self.reduced_by_kernel(source, "largest" if largest else "norm")
        if norms is None and source.addend is not None:
            return None
        norms = self.norms(source.vector) if norms is None else norms
        return norms, self.encoded(source, norms, RandomBits(generator, norms.device))

    def norms(self, vector: torch.Tensor) -> torch.Tensor:
        """Compute the norm of each bucket, (buckets,), float32."""
        if self.settings.norm == "max":
            return self.largest_magnitudes(vector).float()
        return torch.cat([norms_of_rows(rows) for rows in self.rows(vector)])

    def units(self, norms: torch.Tensor) -> torch.Tensor:
        """Return what the elements of each bucket are divided by, (buckets,)."""
        return norms

    @abstractmethod
    def codes(self, places: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        """Round places (n,), elements over their unit, at random: codes (n,), uint8.

        drawn: uniform in [-2^15, 2^15), whole numbers, (n,).
        """

    def kinds(self) -> tuple[Kind, ...]:
        return (OF_BLOCKS, self.settings.bits)

    def compressed_bytes(self, numel: int) -> int:
        return 4 * self.blocks.count(numel) + packed_bytes(numel, self.settings.bits)


class QSGD(BucketQuantizer):
    """C(x)_i = norm * sign(x_i) * level_i / s: level_i is |x_i| s / norm rounded up or down at random, E[C(x)] = x.

    s = 2^(bits - 1) - 1 levels beside zero: 1, 3, 7, 15, 31, 63, 127 for 2 to 8 bits. At 1 bit there is no zero: an
    element becomes norm or -norm, with probabilities that make it unbiased. Its variance, norm^2 - x_i^2, is bearable
    for the largest magnitude alone. Per bucket of n elements (Lemma 3.1)
        E||C(x) - x||^2 <= min(n / s^2, sqrt(n) / s) ||x||_2^2     l2; for max at most n / (4 s^2) max|x_i|^2.

    No error feedback by default: without bias, averaging over ranks and iterations removes the error. If the
    expected error exceeds ||x||^2, as for 512 Gaussian elements up to 2 bits with max and up to 4 with l2, feedback
    scales its input (`gradlab.codec.contraction`). If it is smaller, feedback sends later what was rounded away.

    A norm beyond float32 is infinite, so that the bucket comes back non-finite, as it does for NaN and infinity.

    >>> done = codecs.make("qsgd", bits=3).apply(torch.tensor([3.0, -1.0, 2.0, 0.0]))  # levels are exact
    >>> done.decoded.tolist()
    [3.0, -1.0, 2.0, 0.0]
    >>> done
    Applied(7 bytes instead of 16, or 8 in 16 bits, relative error 0)
    """

    name = "qsgd"
    about = About(
        "quantization",
        "4 * ceil(n / bucket_size) + bits * ceil(n / 8)",
        "Alistarh et al., NeurIPS 2017",
        candidates=tuple({"bits": bits} for bits in range(2, 9)),
        defaults=PlanDefaults(error_feedback=False),
    )

    @dataclass(frozen=True)
    class Settings:
        bits: int = setting(4, least=1, most=8, unit="bits", help="per element, its sign included")
        bucket_size: int = setting(512, least=1, unit="elements", symbol="d", help="that share one norm, a float32")
        norm: str = setting(
            "max",
            choices=NORMS,
            help='the largest magnitude, or "l2", the paper\'s, under which most elements are zero',
        )
        ring: bool = setting(
            False,
            help="sums travel along a ring of ranks, decompressed, added to and compressed again at every hop: the "
            "form GradiVeQ is compared with (its Fig. 2a). `own` is then the gradient",
        )
        aggregation: str = aggregation_setting()

        def __post_init__(self) -> None:
            require(self.bits > 1 or self.norm == "max", "qsgd", "norm", self.norm, "'max' at 1 bit")
            whole = self.aggregation == "auto" or not self.ring
            require(whole, "qsgd", "aggregation", self.aggregation, "'auto' along a ring, which is a third form")

    @property
    def _stride(self) -> int:
        """Steps of norm / s from one code to the next: at one bit two, from -norm to norm."""
        return 2 if self.settings.bits == 1 else 1

    def units(self, norms: torch.Tensor) -> torch.Tensor:
        return norms / self.levels * self._stride

    def codes(self, places: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        # u - 1/2, u in 2^16 places of (0, 1), moves a place: the whole part is the code, and the mean is right to 2^-16
        # of a step. What was carried past the last code comes back to it: there may be no bit for it.
        middle, last = 0.5 + self.levels / self._stride + 2.0**-17, 2 * self.levels // self._stride
        moved = places.add_(drawn, alpha=2.0**-16).add_(middle).clamp_(0.0, last + 0.5)
        return moved.to(torch.int16).to(torch.uint8)  # that conversion is the fast one

    def form(self) -> Form:
        return Form("levels", self.settings.bits, float(self.levels), float(self._stride))

    @cached_property
    def traits(self) -> Traits:
        # With fewer bits, or few values that are not zero, the mean's own error would be as large as the mean.
        coarse, traits = self.settings.bits < _FINE or self.settings.norm == "l2", super().traits
        return replace(traits, coarse=coarse, own_exchange=traits.own_exchange or self.settings.ring)

    def guarantees(self, layers: Sequence[Layer]) -> Guarantees:
        if self.settings.ring:
            return Guarantees()
        longest, s = max(1, min(self.settings.bucket_size, sum(layer.numel for layer in layers))), self.levels
        if self.settings.norm == "l2":
            omega = min(longest / s**2, longest**0.5 / s)
        else:  # at 1 bit sum (norm^2 - x_i^2), of which the largest element has none
            omega = longest - 1 if self.settings.bits == 1 else longest / (4 * s**2)
        return Guarantees(unbiased=True, omega=omega, homogeneous=True)

    def prepared(self, payload: Sequence[torch.Tensor], like: torch.Tensor, scale: float) -> Any:
        norms, packed = payload
        return packed, norms.to(like.dtype) / self.levels * scale

    def fill(self, values: torch.Tensor, prepared: Any, start: int) -> torch.Tensor:
        packed, steps = prepared
        values.copy_(unpack(packed, self.settings.bits, start, start + values.numel()))
        if self._stride > 1:
            values.mul_(self._stride)
        return self.scale(values.sub_(self.levels), steps, start)

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        if not self.settings.ring:
            return (yield from super().exchange(grads, state, context))
        vector = grads.vector
        segments = yield Ring(QuantizedRing(self, vector, context))
        return Exchanged(grads.cut(torch.cat(segments)), dict(grads))

    def forecast(self, layers: Sequence[Layer], world_size: int, state: Tensors | None = None) -> Bytes:
        if not self.settings.ring:
            return super().forecast(layers, world_size, state)
        edges = byte_bounds(sum(layer.numel for layer in layers), world_size)
        return Bytes.of_means(sum(self.compressed_bytes(b - a) for a, b in pairwise(edges)), world_size)


class QuantizedRing(RingCode):
    """Sums that every hop of the ring decompresses, adds to and quantizes again."""

    def __init__(self, quantizer: QSGD, vector: torch.Tensor, context: Context) -> None:
        self.segments = context.world_size
        self._quantizer, self._context = quantizer, context
        self._parts = [vector[a:b] for a, b in pairwise(byte_bounds(vector.numel(), self.segments))]

    def nbytes(self, segment: int) -> int:
        return self._quantizer.compressed_bytes(self._parts[segment].numel())

    def prepare(self, segment: int) -> torch.Tensor:
        return self._parts[segment]

    def add(self, segment: int, received: torch.Tensor | None, own: torch.Tensor) -> torch.Tensor:
        total = own if received is None else own + self._decompressed(segment, received)
        # A stream for each segment, because ranks come to them in different orders.
        norms, codes = self._quantizer.compress(total, self._context.random.of_rank("segment", segment))
        return torch.cat([norms.view(torch.uint8), codes])

    def finish(self, segment: int, message: torch.Tensor) -> torch.Tensor:
        return self._decompressed(segment, message).mul_(1.0 / self.segments)

    def _decompressed(self, segment: int, message: torch.Tensor) -> torch.Tensor:
        like = self._parts[segment]
        norms, codes = message.tensor_split([4 * -(-like.numel() // self._quantizer.settings.bucket_size)])
        return decompress(self._quantizer, (norms.view(torch.float32), codes), like)


def byte_bounds(numel: int, parts: int) -> list[int]:
    """Return the bounds of a vector's parts: multiples of 8, so that only the last one's packed codes are padded."""
    return [0, *(min(8 * last, numel) for _, last in segment_bounds(-(-numel // 8), parts))]


def norms_of_rows(rows: torch.Tensor) -> torch.Tensor:
    """Compute the Euclidean norm of each row: (m, n) -> (m,), float32. The bits are the same on every machine, unlike
    those of a library's sum. No square over- or underflows."""
    largest = largest_of_rows(rows)
    squares = sum_of_rows((rows / largest.masked_fill(largest == 0, 1.0)[:, None]).square_())
    # In float64: torch's float32 root (MKL's) is rounded differently on different processors.
    return (largest * squares.double().sqrt().to(largest.dtype)).float()


def sum_of_rows(rows: torch.Tensor) -> torch.Tensor:
    """Add up each row by halves, (m, n) -> (m,): the same bits on every machine. The rows are overwritten."""
    while (width := rows.shape[1]) > 1:
        half = (width + 1) // 2
        rows[:, : width - half] += rows[:, half:]
        rows = rows[:, :half]
    return rows[:, 0]
