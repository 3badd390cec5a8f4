"""Scaled signs, block by block: one bit per value and one float per block.

Zheng, Huang, Kwok, "Communication-efficient distributed blockwise momentum SGD with error-feedback", NeurIPS 2019,
section 3.2, eq. (1) and Proposition 1; Karimireddy et al., "Error feedback fixes SignSGD", ICML 2019. Without a scale:
Bernstein, Wang, Azizzadenesheli, Anandkumar, "signSGD", ICML 2018; inside `two_way` with its majority vote.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from gradlab.codec import About, Guarantees, PlanDefaults, Traits
from gradlab.codec.blocks import WHOLE, Blocks
from gradlab.codec.blockwise import CACHED, BlockCompressor, Reduction
from gradlab.codec.routes import NOTHING, OF_BLOCKS, Kind
from gradlab.codec.settings import setting
from gradlab.coding.bits import fold_by_torch, packed_bytes
from gradlab.kernels import Form, Source
from gradlab.layout import Layer

SCALES = ("mean", "one")
ZEROS = ("positive", "random")


class Sign(BlockCompressor):
    """C(v) = [||v_b||_1 / d_b sign(v_b)] over blocks b of d_b elements; eq. (1) where all is one block.

    delta-approximate with delta(v) = min_b ||v_b||_1^2 / (d_b ||v_b||_2^2) >= min_b 1 / d_b (Proposition 1):
    ||C(v) - v||^2 <= (1 - delta(v)) ||v||^2. Without a scale C(v) = sign(v), which is no contraction.

    A block of zeros is decoded to zeros. In any other block a zero is sent with one of the signs, and error feedback
    corrects that in the next iterations. At a constant learning rate the residual of a coordinate that is always zero
    stays within the largest scale.

    >>> done = codecs.make("sign").apply(torch.tensor([1.0, -3.0, 2.0, -2.0]))
    >>> done.decoded.tolist()
    [2.0, -2.0, 2.0, -2.0]
    >>> done
    Applied(5 bytes instead of 16, or 8 in 16 bits, relative error 0.333)
    """

    name = "sign"
    about = About(
        "quantization",
        "(4 * blocks if scale == 'mean' else 0) + ceil(n / 8)",
        "Zheng, Huang, Kwok, NeurIPS 2019; Bernstein et al., ICML 2018",
        candidates=({}, {"block_size": 4096}, {"block_size": 256}),
        defaults=PlanDefaults(two_way=True, minimum_dimensions=0, minimum_numel=1, group_bytes=4 * 2**20),
    )
    # The paper compresses every tensor, vectors too. Together, as each costs the same work beside its arithmetic.

    @dataclass(frozen=True)
    class Settings:
        block_size: int | None = setting(
            None,
            least=1,
            unit="elements",
            symbol="d_b",
            help="of a tensor that share a scale; None: the whole tensor, as in the paper's experiments",
        )
        across_layers: bool = setting(
            False,
            help="blocks continue across the layers of a group; with all layers in one group and no block_size "
            "that is eq. (1), the paper's non-block compressor",
        )
        scale: str = setting("mean", choices=SCALES, help='scale of a block: "mean" magnitude, or "one": just signs')
        zeros: str = setting(
            "positive", choices=ZEROS, help='the sign of zero; "random": a coin, for votes that may end in a tie'
        )

    def __init__(self, settings: Sign.Settings | None = None, learned: dict[str, torch.Tensor] | None = None) -> None:
        super().__init__(settings, learned)
        about = type(self).about
        defaults = replace(about.defaults, error_feedback=self.settings.scale == "mean")
        self.about = replace(about, defaults=defaults)
        # Without scales it may be cut anywhere, in whole bytes.
        self.blocks = Blocks(self.settings.block_size or (8 if self.settings.scale == "one" else WHOLE))

    @cached_property
    def traits(self) -> Traits:
        refuses = (
            'sign with scale = "one", whose message does not follow the size of its input: the residual is as large as '
            'the signs, however small gradients are. Set scale = "mean", or leave error feedback out'
        )
        return replace(super().traits, refuses_feedback=refuses if self.settings.scale == "one" else "")

    def guarantees(self, layers: Sequence[Layer]) -> Guarantees:
        if self.settings.scale == "one":
            return Guarantees()
        numel = sum(layer.numel for layer in layers)
        lengths = [numel] if self.settings.across_layers else [layer.numel for layer in layers]
        return Guarantees(delta=1 / max([1, *(min(length, self.settings.block_size or WHOLE) for length in lengths)]))

    def block_of(self, layer: Layer) -> int:
        return self.settings.block_size or WHOLE

    def for_layers(self, layers: Sequence[Layer]) -> Sign:
        if len(layers) == 1 or self.settings.across_layers or self.settings.scale == "one":
            return self
        return super().for_layers(layers)

    def compress(self, vector: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Return scales (blocks,), float32, none with scale = "one", and signs (ceil(numel / 8),), uint8."""
        if (done := self.compressed_by_kernels(Source(vector), generator)) is not None:
            return done
        scales = torch.empty(0, dtype=torch.float32, device=vector.device)
        coded = _tossed(vector, generator) if self.settings.zeros == "random" else vector
        if self.settings.scale == "mean" and vector.numel():
            scales = self.reduced(vector, MEAN_MAGNITUDES)
        return scales, pack_signs(coded)

    def compress_source(self, source: Source, generator: torch.Generator) -> tuple[torch.Tensor, ...] | None:
        coded = source
        if self.settings.zeros == "random":
            if source.addend is not None or source.left is not None:
                return None
            coded = Source(_tossed(source.vector, generator))
        if self.settings.scale == "mean":
            return self.reduced_and_encoded(source, MEAN_MAGNITUDES.kernel, coded)
        scales = source.vector.new_empty(0)
        return scales, self.encoded(coded, scales)

    def form(self) -> Form:
        return Form("sign", 1)

    def average_into(self, out: torch.Tensor, payloads: Iterable[Sequence[torch.Tensor]], scale: float) -> torch.Tensor:
        if self.settings.scale == "mean":
            return super().average_into(out, payloads, scale)
        # Signs are added up, which is exact in whole numbers, before scaling: a tie is zero for any number of ranks.
        return super().average_into(out, payloads, 1.0).mul_(scale)

    def kinds(self) -> tuple[Kind, ...]:
        return (OF_BLOCKS if self.settings.scale == "mean" else NOTHING, 1)

    def prepared(self, payload: Sequence[torch.Tensor], like: torch.Tensor, scale: float) -> Any:
        scales, packed = payload
        return packed, scale if self.settings.scale == "one" else scales.to(like.dtype) * scale

    def fill(self, values: torch.Tensor, prepared: Any, start: int) -> torch.Tensor:
        packed, factors = prepared
        stop = start + values.numel()
        packed = packed[start // 8 : -(-stop // 8)]
        if self.settings.scale == "one":
            return write_signs(values, packed, factors)
        first, last = self.blocks_of(start, stop)
        if first == last:
            return write_signs(values, packed, factors[first])
        return self.scale(write_signs(values, packed, 1.0), factors, start)

    def compressed_bytes(self, numel: int) -> int:
        return (4 * self.blocks.count(numel) if self.settings.scale == "mean" else 0) + packed_bytes(numel, 1)


def mean_magnitudes(rows: torch.Tensor) -> torch.Tensor:
    """Average |x| over each row: (m, n) -> (m,), float32. numpy's order of addition follows from the length; torch's
    sums depend on the address in the last bit."""
    if rows.device.type != "cpu":
        return (torch.linalg.vector_norm(rows, 1, 1, dtype=torch.float64) / rows.shape[1]).float()
    values, total = rows.numpy(), np.zeros(len(rows))
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, values.shape[1], CACHED):
            total += np.abs(values[:, start : start + CACHED]).sum(1)
    if not np.isfinite(total).all():  # a sum of finite numbers may be too large for float32, not their mean
        total = np.abs(values).sum(1, dtype=np.float64)
    return torch.from_numpy((total / values.shape[1]).astype(np.float32))


def mean_magnitudes_of_blocks(values: torch.Tensor, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Average |x| over each block, for `BlockCompressor.reduced`: (n,), (m,), (m,) -> (m,), float32."""
    magnitudes = values.abs().numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.add.reduceat(magnitudes, starts)
        if not np.isfinite(total).all():  # a sum of finite numbers may be too large for float32, not their mean
            total = np.add.reduceat(magnitudes, starts, dtype=np.float64)
        return (total / sizes).astype(np.float32)


MEAN_MAGNITUDES = Reduction(mean_magnitudes, mean_magnitudes_of_blocks, "mean magnitude")


def pack_signs(vector: torch.Tensor) -> torch.Tensor:
    """Pack which elements of a vector (numel,) are negative: bit i % 8 of byte i // 8, (ceil(numel / 8),), uint8."""
    if vector.device.type != "cpu":
        negative, rest = vector < 0, -vector.numel() % 8
        return fold_by_torch((torch.nn.functional.pad(negative, (0, rest)) if rest else negative).view(torch.uint8), 1)
    packed = np.empty(-(-vector.numel() // 8), np.uint8)
    for start, part in zip(range(0, vector.numel(), CACHED), vector.split(CACHED), strict=False):
        bits = np.packbits(part.numpy() < 0, bitorder="little")
        packed[start // 8 : start // 8 + len(bits)] = bits
    return torch.from_numpy(packed)


def write_signs(values: torch.Tensor, packed: torch.Tensor, factor: torch.Tensor | float) -> torch.Tensor:
    """Overwrite values (numel,) with factor or -factor, as `pack_signs` packed their signs, and return them. A factor
    on a GPU, (), is not waited for."""
    if values.device.type != "cpu":
        one = factor if isinstance(factor, torch.Tensor) else values.new_full((), factor)
        negative = packed[:, None].bitwise_and(_masks(packed.device)).view(-1)[: len(values)] != 0
        return torch.where(negative, -one, one, out=values)
    factor = float(factor)
    table = _SIGNS[values.dtype] if factor == 1 else _SIGNS[values.dtype] * factor
    whole = len(values) // 8
    np.take(table, packed[:whole].numpy(), axis=0, out=values[: 8 * whole].view(-1, 8).numpy(), mode="clip")
    if rest := len(values) - 8 * whole:
        values[8 * whole :] = torch.from_numpy(table[int(packed[whole]), :rest])
    return values


# The eight signs that a byte stands for: (256, 8).
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_SIGNS: dict[torch.dtype, Any] = {
    torch.float32: 1 - 2 * _BITS.astype(np.float32),
    torch.float64: 1 - 2 * _BITS.astype(np.float64),
}


@functools.cache
def _masks(device: torch.device) -> torch.Tensor:
    """The eight bits of a byte, (8,), uint8."""
    return torch.tensor([2**place for place in range(8)], dtype=torch.uint8, device=device)


def _tossed(vector: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Replace the zeros of a vector by 1 or -1 at random."""
    zero = vector == 0
    if not bool(zero.any()):
        return vector
    coins = torch.randint(0, 2, vector.shape, generator=generator).to(vector)
    return torch.where(zero, 1 - 2 * coins, vector)
