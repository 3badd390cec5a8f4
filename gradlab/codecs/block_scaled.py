"""Eight or four bits per value with one scale per block: int8, int4, and the two 8-bit floating-point formats.

int8: Dettmers, "8-bit approximations for parallelism in deep learning", ICLR 2016; blocks: Dettmers, Lewis, Shleifer,
Zettlemoyer, "8-bit optimizers via block-wise quantization", ICLR 2022; formats: Micikevicius et
al., "FP8 formats for deep learning", 2022. int4 with one fixed scale, inside `error_feedback` with `decay`, an int8
buffer and `reset_steps`: Xie, Lin, Toh, Zhou, "LoCo: Low-bit communication adaptor for large-scale model training",
IEEE TPAMI 2025, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from gradlab.codec import About, Compressor, Guarantees, PlanDefaults
from gradlab.codec.blockwise import pieces
from gradlab.codec.settings import setting
from gradlab.coding.bits import pack, packed_bytes, unpack
from gradlab.coding.random_bits import on_device, sixteen_random_bits
from gradlab.layout import Layer

INTEGERS = {"int8": 8, "int4": 4}
FLOATS = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
_MANTISSA = {"float8_e4m3fn": 3, "float8_e5m2": 2}  # bits
_FINEST = {"float8_e4m3fn": 2.0**-9, "float8_e5m2": 2.0**-16}  # steps, below the smallest normal number


class BlockScaled(Compressor):
    """C(x) = s Q(x / s) for each block of n elements, where s maps the largest magnitude to the format's.

    Q rounds to the nearest value of the format, or with `stochastic` to one of the two neighbours at random, without
    bias. int8 has -127..127, int4 -7..7. float8_e4m3fn goes up to 448 with 3 bits of mantissa, float8_e5m2 up to
    57344 with 2 bits.

    The error of an integer is at most max|x| / (2 * 127) or / (2 * 7). That of a float is at most 2^-4 or 2^-3 of the
    value; floats underflow at 2^-9 / 448 or 2^-16 / 57344 of the largest.

    Rounded to the nearest, C is delta-approximate with delta >= 1 / n: no error is larger than its value, and the
    largest value has next to none. `guarantees` gives more, for blocks whose scale is a normal float32 number.

    With a fixed scale (LoCo's), C(x) = Q(s x) / s, cut off at the format's ends (-8 or 7, -128 or 127 for integers).
    Error feedback is off by default with 8 bits, and with stochastic rounding.

    >>> done = codecs.make("block_scaled", dtype="int4").apply(torch.tensor([-7.0, 0.4, 3.0, 1.6]))
    >>> done.decoded.tolist()
    [-7.0, 0.0, 3.0, 2.0]
    >>> done
    Applied(8 bytes instead of 16, or 8 in 16 bits, relative error 0.0726)
    """

    name = "block_scaled"
    about = About(
        "quantization",
        "4 * ceil(n / block_size) + (n if bits == 8 else bits * ceil(n / 8))",
        "Dettmers, ICLR 2016; Dettmers et al., ICLR 2022; Micikevicius et al., 2022; Xie et al., TPAMI 2025",
    )
    candidates: ClassVar[tuple[Mapping[str, Any], ...]] = tuple({"dtype": dtype} for dtype in (*INTEGERS, *FLOATS))

    @dataclass(frozen=True)
    class Settings:
        dtype: str = setting("int8", choices=(*INTEGERS, *FLOATS), help="format of the values that travel")
        block_size: int = setting(256, least=1, unit="elements", symbol="n", help="that share a scale, a float32")
        stochastic: bool = setting(False, help="round at random to one of the two neighbouring values, without bias")
        scale: float | None = setting(
            None,
            least=1e-30,
            most=1e30,  # its reciprocal is a float32 number
            symbol="s",
            help="LoCo's fixed scale, by which all values are multiplied; None: one per block",
        )

    def __init__(self, settings: Any = None, learned: Mapping[str, torch.Tensor] | None = None) -> None:
        super().__init__(settings, learned)
        self.defaults = PlanDefaults(error_feedback=self.settings.dtype == "int4" and not self.settings.stochastic)
        self.block = self.settings.block_size if self.settings.scale is None else 8
        self.bits = INTEGERS.get(self.settings.dtype, 8)
        whole = self.settings.dtype in INTEGERS
        self.largest = float(2 ** (self.bits - 1) - 1) if whole else torch.finfo(FLOATS[self.settings.dtype]).max

    def guarantees(self, layers: Sequence[Layer]) -> Guarantees:
        if self.settings.scale is not None:
            return Guarantees()
        if (
            self.settings.stochastic
        ):  # the variance between two neighbours is at most a quarter of their distance squared
            return Guarantees(unbiased=True, omega=self._error(layers, 0.5))
        delta = max(1 / self._longest(layers), 1 - self._error(layers, 0.5))
        return Guarantees(delta=delta * (1 - 1e-6))  # scales are rounded too

    def _longest(self, layers: Sequence[Layer]) -> int:
        return max(1, min(self.settings.block_size, sum(layer.numel for layer in layers)))

    def _error(self, layers: Sequence[Layer], part: float) -> float:
        """Bound ||C(x) - x||^2 / ||x||^2, if each error is at most `part` of the step around its value."""
        dtype, longest = self.settings.dtype, self._longest(layers)
        if dtype in INTEGERS:
            return longest * (part / self.largest) ** 2
        underflow = longest * (part * _FINEST[dtype] / self.largest) ** 2
        return (part * 2.0 ** -_MANTISSA[dtype]) ** 2 + underflow

    def compress(self, vector: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Return scales (ceil(numel / block_size),), float32, or (1,) if the scale is fixed, and codes, uint8."""
        generator = on_device(generator, vector.device)
        codes = torch.empty(vector.numel(), dtype=torch.uint8, device=vector.device)
        scales = [torch.empty(0, dtype=torch.float32, device=vector.device)]
        size = self.settings.block_size
        for rows, out in zip(pieces(vector, size), pieces(codes, size), strict=True):
            scale = self._scales(rows)
            out.copy_(self._codes(rows / scale.masked_fill(scale == 0, 1.0).to(rows.dtype)[:, None], generator))
            scales.append(scale)
        divisors = torch.cat(scales)
        if self.settings.scale is not None:  # one says it all, and whether something was not finite
            divisors = divisors.sum(0, keepdim=True) if not divisors.isfinite().all() else divisors[:1]
        return divisors, codes if self.bits == 8 else pack(codes, self.bits)

    def _scales(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the divisors of rows (m, n), (m,), float32; not finite for a row with a value that is not finite."""
        largest = torch.maximum(rows.amax(1), -rows.amin(1)).float()
        if self.settings.scale is None:
            return largest / self.largest
        fixed = torch.full_like(largest, 1 / self.settings.scale)
        return torch.where(largest.isfinite(), fixed, largest)

    def _codes(self, places: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Convert values in the format's own unit to codes, uint8. The values are overwritten."""
        if self.settings.stochastic:
            chance = sixteen_random_bits(places, generator).to(places.dtype).add_(2.0**15 + 0.5).mul_(2.0**-16)
            step = self._steps(places)
            places = places.div_(step).add_(chance).floor_().mul_(step)
        if self.settings.dtype in FLOATS:
            ends = self.largest
            return places.clamp_(-ends, ends).float().to(FLOATS[self.settings.dtype]).view(torch.uint8)
        least = -self.largest - (self.settings.scale is not None)
        whole = (places if self.settings.stochastic else places.round_()).clamp_(least, self.largest)
        return whole.to(torch.int8).view(torch.uint8) if self.bits == 8 else whole.add_(8).to(torch.uint8)

    def _steps(self, places: torch.Tensor) -> torch.Tensor | float:
        """Return the distance between the format's values around each place."""
        dtype = self.settings.dtype
        if dtype in INTEGERS:
            return 1.0
        _, exponents = torch.frexp(places.float())  # |x| in [2^(e-1), 2^e)
        return torch.ldexp(torch.ones_like(places), exponents - 1 - _MANTISSA[dtype]).clamp_(min=_FINEST[dtype])

    def add_decompressed(self, total: torch.Tensor, payload: Sequence[torch.Tensor], scale: float) -> None:
        scales, packed = payload
        codes = packed if self.bits == 8 else unpack(packed, self.bits)[: total.numel()]
        size, first = self.settings.block_size, 0
        for rows, code in zip(pieces(total, size), pieces(codes, size), strict=True):
            factors = scales[first : first + len(rows)] if self.settings.scale is None else scales
            rows.add_(self._values(code).to(total.dtype).mul_((factors.to(total.dtype) * scale)[:, None]))
            first += len(rows)

    def _values(self, codes: torch.Tensor) -> torch.Tensor:
        if self.settings.dtype in FLOATS:
            return codes.view(FLOATS[self.settings.dtype]).float()
        return codes.view(torch.int8) if self.bits == 8 else codes.view(torch.int8) - 8

    def compressed_bytes(self, numel: int) -> int:
        scales = -(-numel // self.settings.block_size) if self.settings.scale is None else min(1, numel)
        return 4 * scales + (numel if self.bits == 8 else packed_bytes(numel, self.bits))
