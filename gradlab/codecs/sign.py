"""Scaled signs, block by block: one bit per value and one float per block.

Zheng, Huang, Kwok, "Communication-efficient distributed blockwise momentum SGD with error-feedback", NeurIPS 2019,
section 3.2, eq. (1) and Proposition 1; Karimireddy et al., "Error feedback fixes SignSGD", ICML 2019. Without a scale:
Bernstein, Wang, Azizzadenesheli, Anandkumar, "signSGD", ICML 2018; inside `two_way` with its majority vote.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gradlab.codec import Compressor
from gradlab.codec_settings import require
from gradlab.codecs.qsgd import pieces
from gradlab.layout import Layer

SCALES = ("mean", "one")
ZEROS = ("positive", "random")
_WHOLE = 2**62  # elements of a block that has no end
_CACHED = 2**16  # elements worked on at a time


class Sign(Compressor):
    """C(v) = [||v_b||_1 / d_b sign(v_b)] over blocks b of d_b elements; eq. (1) where all is one block.

    delta-approximate with delta(v) = min_b ||v_b||_1^2 / (d_b ||v_b||_2^2) >= min_b 1 / d_b (Proposition 1):
    ||C(v) - v||^2 <= (1 - delta(v)) ||v||^2. A block that is zero comes back zero. In one that is not, a zero is sent
    with one of the signs; error feedback takes that back in the next iterations, so that the residual stays within
    the largest scale. Without a scale C(v) = sign(v), which is no contraction.
    """

    name = "sign"
    family = "quantization"
    wants_two_way = True

    @dataclass(frozen=True)
    class Settings:
        """block_size: elements that share a scale, the paper's d_b; None for the whole group: a tensor where each layer
        is a group of its own (the paper), the model (eq. 1) where all layers are in one;
        scale: "mean", of the magnitudes in a block, or "one" for signs alone;
        zeros: the sign of zero, "positive", or "random": a coin, for votes that may end in a tie.
        """

        block_size: int | None = None
        scale: str = "mean"
        zeros: str = "positive"

        def __post_init__(self) -> None:
            size = self.block_size
            require(size is None or size >= 1, "sign", "block_size", size, "elements, at least 1, or none")
            require(self.scale in SCALES, "sign", "scale", self.scale, f"one of {', '.join(SCALES)}")
            require(self.zeros in ZEROS, "sign", "zeros", self.zeros, f"one of {', '.join(ZEROS)}")

    def __init__(self, settings: Sign.Settings | None = None, learned: dict[str, torch.Tensor] | None = None) -> None:
        super().__init__(settings, learned)
        self.block = self.settings.block_size or _WHOLE

    def compress(self, vector: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Scales (number of blocks,), float32, none of them with scale "one"; signs (ceil(numel / 8),), uint8."""
        scales = [torch.empty(0, dtype=torch.float32, device=vector.device)]
        if self.settings.scale == "mean" and vector.numel():
            scales += [mean_magnitudes(rows) for rows in pieces(vector, min(self.block, vector.numel()))]
        if self.settings.zeros == "random":
            vector = _tossed(vector, generator)
        return torch.cat(scales), pack_signs(vector)

    def add_decompressed(self, total: torch.Tensor, payload: Sequence[torch.Tensor], scale: float) -> None:
        for start, values in self._pieces(payload, total, scale):
            total[start : start + len(values)] += values

    def decompress_into(self, out: torch.Tensor, payload: Sequence[torch.Tensor]) -> torch.Tensor:
        for start, values in self._pieces(payload, out, 1.0):
            out[start : start + len(values)] = values
        return out

    def _pieces(
        self, payload: Sequence[torch.Tensor], like: torch.Tensor, scale: float
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """scale * C(x) piece by piece: where each begins, and its values."""
        scales, packed = payload
        numel, size = like.numel(), self.block
        most = _CACHED if like.device.type == "cpu" else max(8, numel + -numel % 8)
        together = math.lcm(size, 8)  # whole blocks, in whole bytes
        if together <= most:
            most -= most % together
        factors = scales.to(like.dtype) * scale
        for start in range(0, numel, most):
            stop = min(numel, start + most)
            signs = unpack_signs(packed[start // 8 : -(-stop // 8)], like.dtype)[: stop - start]
            if self.settings.scale == "one":
                signs.mul_(scale)
            else:
                _scale_blocks(signs, factors, start, size)
            yield start, signs

    def payload_bytes(self, layers: Sequence[Layer], world_size: int) -> float:
        numel = sum(layer.numel for layer in layers)
        scales = -(-numel // self.block) if self.settings.scale == "mean" else 0
        return 4 * scales + -(-numel // 8)


def _scale_blocks(signs: torch.Tensor, factors: torch.Tensor, start: int, size: int) -> None:
    """Multiply, in place, what begins at element `start` of a vector by its blocks' factors."""
    first, offset = divmod(start, size)
    head = min(len(signs), size - offset) if offset else 0
    whole = head + (len(signs) - head) // size * size
    if head:
        signs[:head].mul_(factors[first])
        first += 1
    if whole > head:
        count = (whole - head) // size
        signs[head:whole].view(count, size).mul_(factors[first : first + count, None])
        first += count
    if whole < len(signs):
        signs[whole:].mul_(factors[first])


def mean_magnitudes(rows: torch.Tensor) -> torch.Tensor:
    """Mean of |x| over each row: (m, n) -> (m,), float32. It depends on the row alone, not on where it lies.

    torch's sums do depend on that, in the last bit; numpy's order follows from the length.
    """
    if rows.device.type != "cpu":
        return rows.abs().mean(1).float()
    values, total = rows.numpy(), np.zeros(len(rows))
    for start in range(0, values.shape[1], _CACHED):
        total += np.abs(values[:, start : start + _CACHED]).sum(1)
    return torch.from_numpy((total / values.shape[1]).astype(np.float32))


def pack_signs(vector: torch.Tensor) -> torch.Tensor:
    """Which elements of a vector (numel,) are negative: bit i % 8 of byte i // 8, (ceil(numel / 8),), uint8."""
    if vector.device.type != "cpu":
        negative = torch.nn.functional.pad(vector < 0, (0, -vector.numel() % 8)).view(-1, 8)
        return (negative * (1 << torch.arange(8, device=vector.device))).sum(1).to(torch.uint8)
    packed = np.empty(-(-vector.numel() // 8), np.uint8)
    for start, part in zip(range(0, vector.numel(), _CACHED), vector.split(_CACHED), strict=False):
        bits = np.packbits(part.numpy() < 0, bitorder="little")
        packed[start // 8 : start // 8 + len(bits)] = bits
    return torch.from_numpy(packed)


def unpack_signs(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `pack_signs`: 1 and -1, (8 * bytes,)."""
    if packed.device.type != "cpu":
        bits = packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1
        return 1 - 2 * bits.reshape(-1).to(dtype)
    signs = torch.empty(len(packed), 8, dtype=dtype)
    np.take(_SIGNS[dtype], packed.numpy(), axis=0, out=signs.numpy(), mode="clip")
    return signs.view(-1)


# The eight signs that a byte stands for: (256, 8).
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_SIGNS: dict[torch.dtype, Any] = {
    torch.float32: 1 - 2 * _BITS.astype(np.float32),
    torch.float64: 1 - 2 * _BITS.astype(np.float64),
}


def _tossed(vector: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The vector with coins in the place of zeros: 1 or -1."""
    zero = vector == 0
    if not bool(zero.any()):
        return vector
    coins = torch.randint(0, 2, vector.shape, generator=generator).to(vector)
    return torch.where(zero, 1 - 2 * coins, vector)
