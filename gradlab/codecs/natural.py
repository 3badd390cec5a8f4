"""Natural compression: round each value to one of the two powers of two beside it, at random and without bias.

Horvath, Ho, Horvath, Sahu, Canini, Richtarik, "Natural compression for distributed deep learning", MSML 2022,
Definition 1 and Theorem 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gradlab.codec import About, Guarantees, PlanDefaults
from gradlab.codec.blocks import Blocks
from gradlab.codec.blockwise import PiecewiseCompressor
from gradlab.codec.routes import BYTES, Kind, aggregation_setting
from gradlab.codecs.sign import pack_signs, write_signs
from gradlab.coding.bits import packed_bytes
from gradlab.coding.random_bits import RandomBits
from gradlab.kernels import Form, Source
from gradlab.layout import Layer

if TYPE_CHECKING:
    from gradlab.kernels.blocks import BlockTable

_EXPONENT = 0x7F800000  # of a float32: eight bits; below it 23 of the mantissa
_LARGEST = 0x7F000000  # 2^127, the largest power of two
_MAGNITUDE = 0x7FFFFFFF


class Natural(PiecewiseCompressor):
    """C(t) = sign(t) 2^a or sign(t) 2^(a+1), a = floor(log2 |t|), at random with E[C(t)] = t; C(0) = 0 (Definition 1).

    The mantissa of a float32 is the probability of the larger power. A number uniform in [0, 1) is added to the
    mantissa, and the rest of the mantissa is cut off. The exponent and the sign are sent, 9 bits.

    C is unbiased, with E||C(x) - x||^2 <= ||x||^2 / 8 (Theorem 1): the variance at t = 2^a (1 + m) is 4^a m (1 - m).
    The random number has 2^16 steps, so the mean is right to 2^-17 of a power of two. Both hold from 2^-126 to 2^127:
    smaller values become 0 or 2^-126, larger ones 2^127.

    Error feedback is off by default: an unbiased codec does not need it, though E||C(x) - x||^2 < ||x||^2 would allow
    it.

    >>> done = codecs.make("natural").apply(torch.tensor([1.0, -4.0, 0.5, 0.0]))  # powers of two are exact
    >>> done.decoded.tolist()
    [1.0, -4.0, 0.5, 0.0]
    >>> done
    Applied(5 bytes instead of 16, or 8 in 16 bits, relative error 0)
    """

    name = "natural"
    about = About(
        "quantization",
        "n + ceil(n / 8)",
        "Horvath et al., MSML 2022",
        candidates=({},),
        defaults=PlanDefaults(error_feedback=False),
    )
    blocks = Blocks(8)  # whole bytes of signs

    @dataclass(frozen=True)
    class Settings:
        aggregation: str = aggregation_setting()

    def guarantees(self, layers: Sequence[Layer]) -> Guarantees:
        return Guarantees(unbiased=True, omega=1 / 8)

    def compress(self, vector: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Return exponents (numel,), uint8, and signs (ceil(numel / 8),), uint8. Exponents have float32's bias; 255
        stands for a value that is not finite."""
        if (done := self.compressed_by_kernels(Source(vector), generator)) is not None:
            return done
        bits = RandomBits(generator, vector.device)
        tame = _is_tame(vector)
        exponents = torch.empty(vector.numel(), dtype=torch.uint8, device=vector.device)
        for start, stop in self.spans(vector):
            magnitudes = vector[start:stop].float().view(torch.int32).bitwise_and(_MAGNITUDE)
            # u in (0, 1) in 2^16 places, in the unit of a mantissa of 23 bits; 0 stays below the first exponent
            drawn = bits.sixteen(magnitudes).to(torch.int32)
            moved = torch.add(magnitudes, drawn, alpha=2**7, out=drawn).add_(2**22 + 2**6)
            if not tame:
                moved.clamp_(max=_LARGEST | 0x7FFFFF)
                moved = torch.where(magnitudes >= _EXPONENT, magnitudes, moved)
            exponents[start:stop] = moved.bitwise_right_shift_(23)
        return exponents, pack_signs(vector)

    def compress_source(self, source: Source, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        bits, numel = RandomBits(generator, source.vector.device), source.vector.numel()
        both = Form("natural", 9)  # in two planes, of eight bits and of one
        codes = self.encoded(source, source.vector[:0], bits, both)
        return codes[:numel], codes[len(codes) // 9 * 8 :]

    def form(self) -> Form:
        return Form("natural", 1)  # signs; exponents are the numbers

    def block_table(self, vector: torch.Tensor) -> BlockTable:
        from gradlab.kernels.blocks import table_of_elements

        return self.cached(("table", vector.numel(), vector.device), lambda: table_of_elements(vector))

    def kinds(self) -> tuple[Kind, ...]:
        return (BYTES, 1)

    def prepared(self, payload: Sequence[torch.Tensor], like: torch.Tensor, scale: float) -> Any:
        return (*payload, scale)

    def fill(self, values: torch.Tensor, prepared: Any, start: int) -> torch.Tensor:
        exponents, packed, scale = prepared
        write_signs(values, packed[start // 8 : -(-(start + values.numel()) // 8)], scale)
        powers = exponents[start : start + values.numel()].to(torch.int32).bitwise_left_shift_(23).view(torch.float32)
        return values.mul_(powers)

    def compressed_bytes(self, numel: int) -> int:
        return numel + packed_bytes(numel, 1)


def _is_tame(vector: torch.Tensor) -> bool:
    """Return whether all values are known to be finite, and none may be carried to infinity, without waiting for a
    GPU."""
    if vector.device.type != "cpu" or not vector.numel():
        return False
    least, greatest = map(float, torch.aminmax(vector))
    return max(-least, greatest) < 0.99 * 2.0**127
