"""TernGrad: every value becomes -s, 0 or s at random, without bias; s is the largest magnitude of its layer.

Wen, Xu, Yan, Wu, Wang, Chen, Li, "TernGrad: Ternary gradients to reduce communication in distributed deep learning",
NeurIPS 2017, section 3.1 (ternary gradients, scaler sharing) and 3.3 (layer-wise ternarizing, gradient clipping).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from gradlab.codec import About, Batch, Bytes, Context, Deferred, Exchanged, Guarantees, PlanDefaults, Tensors, Traits
from gradlab.codec.blocks import WHOLE
from gradlab.codec.blockwise import CACHED, BlockCompressor, Reduction
from gradlab.codec.routes import OF_BLOCKS, Kind
from gradlab.codec.settings import setting
from gradlab.codecs.qsgd import byte_bounds
from gradlab.coding.bits import Packer, cut, join, pack, packed_bytes, unpack
from gradlab.coding.random_bits import RandomBits
from gradlab.collectives import AllToAll, Coroutine, Gather
from gradlab.kernels import Form, Source
from gradlab.layout import Layer


class TernGrad(BlockCompressor):
    """C(g) = s sign(g) b, s = max|g|, b_i = 1 with probability |g_i| / s, else 0 (section 3.1), layer by layer.

    Without clipping C is unbiased, with E||C(g) - g||^2 = s ||g||_1 - ||g||^2 <= (sqrt(d) - 1) ||g||^2 for d elements.
    That is no contraction, so error feedback is off by default. The probability has 2^16 steps: the mean is right to
    2^-17 s.

    Clipping first cuts values beyond c standard deviations (c = 2.5), which makes s smaller and adds a small bias. The
    deviation is taken from zero, the mean of the paper's Gaussian model. Taken from the layer's own mean it would be
    zero for equal elements, and such a layer would always be clipped to nothing.

    With a shared scaler, s is the largest of all ranks' (section 3.1), and sums of ternary values are whole numbers
    below 2 N + 1. Every rank acts as the paper's server for one part of the vector: it adds that part up exactly and
    answers with the sums, ceil(log2(2 N + 1)) bits each. Only that width makes a rank receive more with N.

    >>> done = codecs.make("terngrad", clip=0.0).apply(torch.tensor([2.0, -2.0, 0.0, 2.0]))  # all or nothing is exact
    >>> done.decoded.tolist()
    [2.0, -2.0, 0.0, 2.0]
    >>> done
    Applied(6 bytes instead of 16, or 8 in 16 bits, relative error 0)
    """

    name = "terngrad"
    about = About(
        "quantization",
        "4 * blocks + 2 * ceil(n / 8)",
        "Wen et al., NeurIPS 2017",
        candidates=({},),
        defaults=PlanDefaults(error_feedback=False),
    )

    @dataclass(frozen=True)
    class Settings:
        clip: float = setting(
            2.5, least=0, unit="standard deviations", symbol="c", help="beyond which values are cut; 0: no clipping"
        )
        shared_scale: bool = setting(False, help="one s for all ranks")

    def block_of(self, layer: Layer) -> int:
        return WHOLE

    def guarantees(self, layers: Sequence[Layer]) -> Guarantees:
        if self.settings.clip:
            return Guarantees(homogeneous=True)
        omega = max([1, *(layer.numel for layer in layers)]) ** 0.5 - 1
        return Guarantees(unbiased=True, omega=omega, homogeneous=True)

    def compress(self, vector: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Return s of each layer, (layers,), float32, and codes 0, 1, 2 for -1, 0, 1, packed, uint8."""
        if (done := self.compressed_by_kernels(Source(vector), generator)) is not None:
            return done
        scales = self.scales(vector)
        return scales, self.ternary(vector, scales, generator)

    def compress_source(self, source: Source, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        scales = self._scales_of(source)
        return scales, self.encoded(source, scales, RandomBits(generator, scales.device))

    def _scales_of(self, source: Source) -> torch.Tensor:
        clip = self.settings.clip
        found = self.reduced_by_kernel(source, "clipped" if clip else "largest", clip or 1.0)
        assert found is not None
        return found

    def scales(self, vector: torch.Tensor) -> torch.Tensor:
        """Compute the layers' largest magnitudes after clipping, (layers,), float32."""
        if not vector.numel():
            return vector.new_empty(0, dtype=torch.float32)
        if self.by_kernels(vector):
            return self._scales_of(Source(vector))
        largest = self.largest_magnitudes(vector)
        if self.settings.clip:
            limits = self.reduced(vector, ROOT_MEAN_SQUARES).mul_(self.settings.clip)
            # NaN stays; where squares over- or underflow there is no limit.
            usable = limits.isfinite() & (limits > 0)
            largest = torch.where(usable & (limits < largest), limits, largest)
        return largest.float()

    def shared(
        self, vector: torch.Tensor, everyone: Sequence[torch.Tensor], generator: torch.Generator, rank: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest of all ranks' scales, (layers,), and a rank's codes, packed, under them."""
        if vector.numel() and self.by_kernels(vector):
            scales, own = torch.empty_like(everyone[rank]), everyone[rank]
            bits = RandomBits(generator, vector.device)
            return scales, self.encoded(Source(vector), scales, bits, others=own, every=everyone)
        scales = torch.stack(list(everyone)).amax(0)
        return scales, self.ternary(vector, scales, generator, everyone[rank])

    def ternary(
        self,
        vector: torch.Tensor,
        scales: torch.Tensor,
        generator: torch.Generator,
        own: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Draw sign(g) b + 1 with scales s (layers,), packed. A clipped value is at least s, so that b = 1. `own`,
        (layers,), are the largest magnitudes after this rank's clipping, if ranks share s."""
        bits = RandomBits(generator, vector.device)
        packer = Packer(vector.numel(), 2, vector.device)
        most = None if own is None else own.to(vector.dtype)
        divisors = scales.to(vector.dtype)
        divisors = divisors.masked_fill(divisors == 0, 1.0)
        scratch = self._scratch(vector)
        for start, stop in self.spans(vector):
            # floor(v + u) is 1 with probability v, or -1 with probability -v; u has 2^16 places in (0, 1).
            places, values = scratch[: stop - start], vector[start:stop]
            if most is not None:
                limits = self.scale(torch.ones_like(places), most, start)
                values = torch.minimum(torch.maximum(values, -limits, out=places), limits, out=places)
            self.divide(values, divisors, start, places).clamp_(-1.0, 1.0)
            places.add_(bits.sixteen(places).to(places.dtype), alpha=2.0**-16).add_(1.5 + 2.0**-17)
            packer.write(start, places.to(torch.int8).view(torch.uint8))  # cut off, and thus rounded down
        return packer.packed

    def form(self) -> Form:
        return Form("ternary", 2, 1.0, 1.0)

    def kinds(self) -> tuple[Kind, ...]:
        return (OF_BLOCKS, 2)

    def prepared(self, payload: Sequence[torch.Tensor], like: torch.Tensor, scale: float) -> Any:
        scales, packed = payload
        return packed, 2, 1, scales.to(like.dtype) * scale

    def fill(self, values: torch.Tensor, prepared: Any, start: int) -> torch.Tensor:
        packed, bits, zero, factors = prepared
        values.copy_(unpack(packed, bits, start, start + values.numel())).sub_(zero)
        return self.scale(values, factors, start)

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        if not self.settings.shared_scale:
            return (yield from super().exchange(grads, state, context))
        vector, ranks, codec = grads.vector, context.world_size, self.for_layers(grads.table)
        everyone = yield Gather(codec.scales(vector))
        scales, codes = codec.shared(vector, everyone, context.random.of_rank(), context.rank)
        bounds, bits = byte_bounds(vector.numel(), ranks), (2 * ranks).bit_length()
        received = yield AllToAll(tuple(cut(codes, 2, bounds)))
        sizes = [b - a for a, b in pairwise(bounds)]
        answer = _summed(received, sizes[context.rank], bits, codec.by_kernels(vector))
        total = join((yield Gather(answer, lengths=tuple(packed_bytes(size, bits) for size in sizes))), bits)

        def filled(packed: torch.Tensor, bits: int, zero: int, factor: float) -> Tensors:
            out = context.memory.like(vector)
            if codec.by_kernels(out):
                return grads.cut(codec.summed(out, [(scales, packed)], factor, form=Form("whole", bits, float(zero))))
            factors = scales.to(vector.dtype) * factor
            for start, stop in codec.spans(out):
                codec.fill(out[start:stop], (packed, bits, zero, factors), start)
            return grads.cut(out)

        mean = context.once(lambda: filled(total, bits, ranks, 1 / ranks))
        return Exchanged(mean, Deferred(grads, lambda: filled(codes, 2, 1, 1.0)))

    @cached_property
    def traits(self) -> Traits:
        return replace(super().traits, own_exchange=self.settings.shared_scale)

    def compressed_bytes(self, numel: int) -> int:
        return 4 * self.blocks.count(numel) + packed_bytes(numel, 2)

    def forecast(self, layers: Sequence[Layer], world_size: int, state: Tensors | None = None) -> Bytes:
        if not self.settings.shared_scale:
            return super().forecast(layers, world_size, state)
        numel = sum(layer.numel for layer in layers)
        scales, bits = 4 * self.for_layers(layers).blocks.count(numel), (2 * world_size).bit_length()
        sizes = [b - a for a, b in pairwise(byte_bounds(numel, world_size))]
        codes = sum(packed_bytes(size, 2) for size in sizes)
        payload = scales + codes + sum(packed_bytes(size, bits) for size in sizes) / world_size
        both = packed_bytes(numel, 2) + packed_bytes(numel, bits)
        return Bytes(payload, (world_size - 1) * (scales + both / world_size))


def _summed(parts: Sequence[torch.Tensor], numel: int, bits: int, by_kernels: bool) -> torch.Tensor:
    """Add up ranks' codes of a part (numel,), and pack the sums."""
    if by_kernels:
        from gradlab.kernels.codes import sum_codes

        return sum_codes(parts, numel, 2, bits)
    sums = parts[0].new_zeros(numel, dtype=torch.uint8 if bits <= 8 else torch.int64)
    for part in parts:
        sums += unpack(part, 2)[:numel]
    return pack(sums, bits)


def root_mean_squares(rows: torch.Tensor) -> torch.Tensor:
    """Compute the root mean square of each row, (m, n) -> (m,), from the row alone: numpy's order follows from n."""
    if rows.device.type != "cpu":
        return (torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64) / rows.shape[1] ** 0.5).to(rows.dtype)
    values, total = rows.numpy(), np.zeros(len(rows))
    scratch = np.empty((len(rows), min(CACHED, rows.shape[1])))  # in float32 squares would underflow
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, rows.shape[1], CACHED):
            piece = values[:, start : start + CACHED]
            total += np.square(piece, out=scratch[:, : piece.shape[1]], dtype=np.float64).sum(1)
    return torch.from_numpy(np.sqrt(total / rows.shape[1]).astype(values.dtype))


def root_mean_squares_of_blocks(vector: torch.Tensor, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Compute the root mean square of each block, for `BlockCompressor.reduced`: (n,), (m,), (m,) -> (m,)."""
    values = vector.numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.add.reduceat(np.square(values, dtype=np.float64), starts)
    return np.sqrt(squares / sizes).astype(values.dtype)


ROOT_MEAN_SQUARES = Reduction(root_mean_squares, root_mean_squares_of_blocks, "root mean square")
