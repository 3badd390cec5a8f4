"""Eight or four bits per value with one scale per block: int8, int4, and the two 8-bit floating-point formats.

int8: Dettmers, "8-bit approximations for parallelism in deep learning", ICLR 2016; blocks: Dettmers, Lewis, Shleifer,
Zettlemoyer, "8-bit optimizers via block-wise quantization", ICLR 2022; formats: Micikevicius et
al., "FP8 formats for deep learning", 2022. int4 with one fixed scale, inside `error_feedback` with `decay`, an int8
buffer and `reset_steps`: Xie, Lin, Toh, Zhou, "LoCo: Low-bit communication adaptor for large-scale model training",
IEEE TPAMI 2025, Algorithm 1.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from gradlab.codec import About, Guarantees, PlanDefaults, Traits
from gradlab.codec.blocks import Blocks
from gradlab.codec.blockwise import BlockCompressor
from gradlab.codec.routes import BYTES, OF_BLOCKS, Kind, aggregation_setting
from gradlab.codec.settings import setting
from gradlab.coding.bits import Packer, packed_bytes, unpack
from gradlab.coding.random_bits import RandomBits
from gradlab.layout import Layer

INTEGERS = {"int8": 8, "int4": 4}
FLOATS = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
# float32 numbers of this size are whole: what is added is rounded to the nearest one, or the even one of two, and then
# stands in the lowest bits.
_WHOLE_NUMBERS = 1.5 * 2.0**23
_MANTISSA = {"float8_e4m3fn": 3, "float8_e5m2": 2}  # bits
_FINEST = {"float8_e4m3fn": 2.0**-9, "float8_e5m2": 2.0**-16}  # steps, below the smallest normal number


class BlockScaled(BlockCompressor):
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
        candidates=tuple({"dtype": dtype} for dtype in (*INTEGERS, *FLOATS)),
    )

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
        aggregation: str = aggregation_setting()

    def __init__(self, settings: Any = None, learned: Mapping[str, torch.Tensor] | None = None) -> None:
        super().__init__(settings, learned)
        feedback = self.settings.dtype == "int4" and not self.settings.stochastic
        self.about = replace(type(self).about, defaults=PlanDefaults(error_feedback=feedback))
        self.blocks = Blocks(self._block)
        self.bits = INTEGERS.get(self.settings.dtype, 8)
        whole = self.settings.dtype in INTEGERS
        self.largest = float(2 ** (self.bits - 1) - 1) if whole else torch.finfo(FLOATS[self.settings.dtype]).max

    def block_of(self, layer: Layer) -> int:
        return self._block

    @property
    def _block(self) -> int:
        return self.settings.block_size if self.settings.scale is None else 8

    def for_layers(self, layers: Sequence[Layer]) -> BlockScaled:
        return self if len(layers) == 1 or self.settings.scale is not None else super().for_layers(layers)

    @cached_property
    def traits(self) -> Traits:
        # What four bits, or a scale made for single gradients, round to zero in every mean no residual brings back.
        nearest = self.bits == 4 and not self.settings.stochastic
        return replace(super().traits, coarse=nearest or self.settings.scale is not None)

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
        """Return scales (blocks,), float32, or (1,) if the scale is fixed, and codes, uint8."""
        bits = RandomBits(generator, vector.device) if self.settings.stochastic else None
        packer = Packer(vector.numel(), self.bits, vector.device)
        scales, scratch = self._scales(vector), self._scratch(vector)
        divisors = scales.masked_fill(scales == 0, 1.0).to(vector.dtype)
        quick, zero = self._rounds_in_a_sum(divisors), _WHOLE_NUMBERS + (8 if self.bits == 4 else 0)
        for start, stop in self.spans(vector):
            values, room = vector[start:stop], scratch[: stop - start]
            if quick:
                sums = self.divide_and_shift(values, divisors, start, zero, room)
                codes = sums.view(torch.int32).to(torch.int8)
            else:
                codes = self._codes(self._divided(values, divisors, start, room), bits)
            packer.write(start, codes.view(torch.uint8))
        return scales, packer.packed[: vector.numel()] if self.bits == 8 else packer.packed

    def _rounds_in_a_sum(self, divisors: torch.Tensor) -> bool:
        """Return whether values / divisors may be rounded by adding `_WHOLE_NUMBERS`, as none comes out too large."""
        chosen, dtype = self.settings, divisors.dtype
        plain = chosen.dtype in INTEGERS and chosen.scale is None and not chosen.stochastic and dtype == torch.float32
        # A scale below the normal numbers is far from what the largest value asks for. NaN is not above it either.
        on_cpu = divisors.device.type == "cpu" and divisors.numel() > 0
        return plain and on_cpu and divisors.min().item() >= torch.finfo(dtype).tiny

    def _scales(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the blocks' divisors, float32: (blocks,), or (1,); not finite for values that are not finite."""
        if not vector.numel():
            return vector.new_empty(0, dtype=torch.float32)
        if self.settings.scale is None:
            return self.largest_magnitudes(vector).float() / self.largest
        least, greatest = torch.aminmax(vector)
        # One says it all, and whether something was not finite.
        return ((least * 0 + greatest * 0).float() + 1 / self.settings.scale).view(1)

    def _divided(self, values: torch.Tensor, divisors: torch.Tensor, start: int, out: torch.Tensor) -> torch.Tensor:
        if self.settings.scale is None:
            return self.divide(values, divisors, start, out)
        return torch.div(values, divisors, out=out)

    def _codes(self, places: torch.Tensor, bits: RandomBits | None) -> torch.Tensor:
        """Convert values in the format's own unit to codes, int8. The values are overwritten."""
        if bits is not None:
            step = self._steps(places)
            places.div_(step).add_(bits.sixteen(places).to(places.dtype), alpha=2.0**-16).add_(0.5 + 2.0**-17)
            places.floor_().mul_(step)
        elif self.settings.dtype in INTEGERS:
            places.round_()
        if self.settings.dtype in FLOATS:
            ends = self.largest
            return places.clamp_(-ends, ends).float().to(FLOATS[self.settings.dtype]).view(torch.int8)
        places.clamp_(-self.largest - (self.settings.scale is not None), self.largest)
        return (places if self.bits == 8 else places.add_(8)).to(torch.int8)

    def _steps(self, places: torch.Tensor) -> torch.Tensor | float:
        """Return the distance between the format's values around each place."""
        dtype = self.settings.dtype
        if dtype in INTEGERS:
            return 1.0
        _, exponents = torch.frexp(places.float())  # |x| in [2^(e-1), 2^e)
        return torch.ldexp(torch.ones_like(places), exponents - 1 - _MANTISSA[dtype]).clamp_(min=_FINEST[dtype])

    def kinds(self) -> tuple[Kind, ...]:
        # A fixed scale also tells whether a value of a part was not finite.
        return (OF_BLOCKS, BYTES if self.bits == 8 else self.bits) if self.settings.scale is None else ()

    def prepared(self, payload: Sequence[torch.Tensor], like: torch.Tensor, scale: float) -> Any:
        scales, packed = payload
        factors = scales.to(like.dtype)
        return packed, factors if scale == 1.0 else factors * scale

    def fill(self, values: torch.Tensor, prepared: Any, start: int) -> torch.Tensor:
        packed, factors = prepared
        stop = start + values.numel()
        # Subtracted from bytes, which costs less than from floats.
        codes = packed[start:stop] if self.bits == 8 else unpack(packed, 4, start, stop).view(torch.int8).sub_(8)
        self._write_values(values, codes)
        return self.scale(values, factors, start) if self.settings.scale is None else values.mul_(factors)

    def _write_values(self, values: torch.Tensor, codes: torch.Tensor) -> None:
        """Overwrite values with those that codes stand for, in the format's own unit."""
        if self.settings.dtype in INTEGERS:
            values.copy_(codes.view(torch.int8))
        elif values.device.type != "cpu":
            values.copy_(codes.view(FLOATS[self.settings.dtype]))
        else:  # a look at a table is five times faster
            table = _values_of_codes(self.settings.dtype, values.dtype)
            np.take(table, codes.numpy(), out=values.numpy(), mode="clip")

    def compressed_bytes(self, numel: int) -> int:
        scales = self.blocks.count(numel) if self.settings.scale is None else min(1, numel)
        return 4 * scales + (numel if self.bits == 8 else packed_bytes(numel, self.bits))


@functools.cache
def _values_of_codes(name: str, dtype: torch.dtype) -> np.ndarray:
    """Tabulate the values of the 256 codes of a floating-point format."""
    return torch.arange(256, dtype=torch.uint8).view(FLOATS[name]).to(dtype).numpy()
