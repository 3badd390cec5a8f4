"""Eight or four bits per value with one scale per block: int8, int4, and floating-point formats of 8 and 4 bits.

int8: Dettmers, "8-bit approximations for parallelism in deep learning", ICLR 2016; blocks: Dettmers, Lewis, Shleifer,
Zettlemoyer, "8-bit optimizers via block-wise quantization", ICLR 2022; formats: Micikevicius et
al., "FP8 formats for deep learning", 2022. mxfp8 and mxfp4: "OCP Microscaling formats specification 1.0", 2023; their
scales under `stochastic`: Mishra et al., "Recipes for pre-training LLMs with MXFP8", 2025. nvfp4: NVIDIA, "Pretraining
large language models with NVFP4", 2025, appendix C. int4 with one fixed scale, inside `error_feedback` with `decay`, an
int8 buffer and `reset_steps`: Xie, Lin, Toh, Zhou, "LoCo: Low-bit communication adaptor for large-scale model
training", IEEE TPAMI 2025, Algorithm 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from gradlab.codec import About, Guarantees, PlanDefaults, Traits
from gradlab.codec.blocks import WHOLE, Blocks
from gradlab.codec.blockwise import BlockCompressor
from gradlab.codec.routes import BYTES, OF_BLOCKS, Kind, aggregation_setting
from gradlab.codec.settings import require, setting
from gradlab.coding.bits import Packer, packed_bytes, unpack
from gradlab.coding.random_bits import RandomBits
from gradlab.kernels import Form, Source
from gradlab.layout import Layer

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Format(NamedTuple):
    """How the values of a block and its scale are written.

    bits, largest: width of a code, and the largest value.
    finest, relative: step below the smallest normal number, and step over the power of two below any other.
    element: floating-point dtype, E4M3 for E2M1 too; None for whole numbers.
    block: elements that share a scale; 0: as the settings say.
    scales: "float32", "e8m0": powers of two in one byte, or "e4m3": one byte each, and a float32 for the vector.
    """

    bits: int
    largest: float
    finest: float = 1.0
    relative: float = 0.0
    element: torch.dtype | None = None
    block: int = 0
    scales: str = "float32"


FORMATS = {
    "int8": Format(8, 127.0),
    "int4": Format(4, 7.0),
    "float8_e4m3fn": Format(8, 448.0, 2.0**-9, 2.0**-3, E4M3),
    "float8_e5m2": Format(8, 57344.0, 2.0**-16, 2.0**-2, E5M2),
    "mxfp8": Format(8, 448.0, 2.0**-9, 2.0**-3, E4M3, 32, "e8m0"),
    "mxfp8_e5m2": Format(8, 57344.0, 2.0**-16, 2.0**-2, E5M2, 32, "e8m0"),
    "mxfp4": Format(4, 6.0, 0.5, 0.5, E4M3, 32, "e8m0"),
    "nvfp4": Format(4, 6.0, 0.5, 0.5, E4M3, 16, "e4m3"),
}
# float32 numbers of this size are whole: what is added is rounded to the nearest one, or the even one of two, and then
# stands in the lowest bits.
_WHOLE_NUMBERS = 1.5 * 2.0**23
_EXPONENT = 0x7F800000  # bits of a float32


class BlockScaled(BlockCompressor):
    """C(x) = s Q(x / s) for each block of n elements, where s maps the largest magnitude to the format's.

    Q rounds to the nearest value of the format, or with `stochastic` to one of the two neighbours at random, without
    bias. int8 has -127..127, int4 -7..7. float8_e4m3fn goes up to 448 with 3 bits of mantissa, float8_e5m2 up to
    57344 with 2 bits. E2M1, the 4-bit values of mxfp4 and nvfp4, are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.

    mxfp8 (E4M3, or E5M2) and mxfp4 have a scale of one byte for every 32 elements: s = 2^(floor(log2 max|x|) - emax),
    2^emax being the format's largest power of two. Values beyond the format's end are cut off to it, by at most 1/8 or
    1/4. nvfp4 has one for every 16 elements: E4M3(max|x| / 6 t) t, with a float32 t = max|vector| / (6 * 448).
    With `stochastic` these scales are rounded up, so that nothing is cut off and there is no bias.

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
        candidates=tuple({"dtype": dtype} for dtype, form in FORMATS.items() if not form.block),
    )

    @dataclass(frozen=True)
    class Settings:
        dtype: str = setting("int8", choices=FORMATS, help="format of the values that travel, and of the scales")
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

        def __post_init__(self) -> None:
            if own := FORMATS.get(self.dtype, FORMATS["int8"]).block:
                expected = f"the default or {own}, as {self.dtype} has it"
                require(self.block_size in (256, own), "block_scaled", "block_size", self.block_size, expected)
                require(self.scale is None, "block_scaled", "scale", self.scale, f"None with {self.dtype}")

    def __init__(self, settings: Any = None, learned: Mapping[str, torch.Tensor] | None = None) -> None:
        super().__init__(settings, learned)
        self.format = FORMATS[self.settings.dtype]
        self.bits, self.largest = self.format.bits, self.format.largest
        feedback = self.bits == 4 and not self.settings.stochastic
        self.about = replace(type(self).about, defaults=PlanDefaults(error_feedback=feedback))
        self.blocks = Blocks(self._block)

    def block_of(self, layer: Layer) -> int:
        return self._block

    @property
    def _block(self) -> int:
        return self.format.block or (self.settings.block_size if self.settings.scale is None else 8)

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
        numel = max(1, sum(layer.numel for layer in layers))
        if self.settings.stochastic:
            return Guarantees(unbiased=True, omega=self._error(numel))
        least = 0.0 if self.format.block else 1 / min(self._block, numel)
        return Guarantees(delta=max(least, 1 - self._error(numel)) * (1 - 1e-6))  # scales are rounded too

    def _error(self, numel: int) -> float:
        """Bound ||C(x) - x||^2 / ||x||^2: each error is at most half the step around its value, and the variance
        between two neighbours at most a quarter of their distance squared."""
        form = self.format
        # What a block's largest value becomes at least, what it loses at the format's end, and values of blocks whose
        # scale is below E4M3's normal numbers.
        top = form.largest * {"float32": 1.0, "e8m0": 1 / 2, "e4m3": 8 / 9}[form.scales]
        cut = 1 / 8 if form.scales == "e8m0" and not self.settings.stochastic else 0.0
        lost = numel * (2.0**-6 / 448) ** 2 if form.scales == "e4m3" else 0.0
        return max(form.relative / 2, cut) ** 2 + min(self._block, numel) * (form.finest / 2 / top) ** 2 + lost

    def compress(self, vector: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Return scales (blocks,), float32, or (1,) if the scale is fixed, and codes, uint8.

        mxfp8 and mxfp4 have scales of one byte, uint8; so has nvfp4, after t, (1,), float32.
        """
        if (done := self.compressed_by_kernels(Source(vector), generator)) is not None:
            return done
        bits = RandomBits(generator, vector.device) if self.settings.stochastic else None
        numbers = self._scales(vector)
        scales = self._factors(numbers)
        packer, scratch = Packer(vector.numel(), self.bits, vector.device), self._scratch(vector)
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
        return *numbers, packer.packed[: vector.numel()] if self.bits == 8 else packer.packed

    def form(self) -> Form:
        if self.format.element is None:
            return Form("integer", self.bits, -self.largest - (self.settings.scale is not None), self.largest)
        scales = {"float32": 0.0, "e8m0": self._of_exponent, "e4m3": -1.0}[self.format.scales]
        return Form("minifloat", self.bits, -int(math.log2(self.format.relative)), self.largest, scales)

    @property
    def _of_exponent(self) -> float:
        """Magnitudes times this have the exponent of their block's scale."""
        return 2 / self.largest if self.settings.stochastic else 2.0 ** (1 - math.frexp(self.largest)[1])

    def compress_source(self, source: Source, generator: torch.Generator) -> tuple[torch.Tensor, ...] | None:
        if self.settings.scale is not None and source.addend is not None:
            return None  # whether a sum is finite, only its elements tell
        *numbers, codes = self._compressed(source, generator if self.settings.stochastic else None)
        return *numbers, codes[: source.vector.numel()] if self.bits == 8 else codes

    def _compressed(self, source: Source, generator: torch.Generator | None) -> tuple[torch.Tensor, ...]:
        over = self.largest if self.format.scales == "float32" else 1.0
        plain = self.settings.scale is None and self.format.scales != "e4m3"
        if plain and (done := self.encoded_in_one_pass(source, generator, over)) is not None:
            return done
        bits = None if generator is None else RandomBits(generator, source.vector.device)
        if self.settings.scale is not None:
            [numbers] = self._scales(source.vector)
            return numbers, self.encoded(source, numbers, bits)
        of_all, count = self.format.scales == "e4m3", self.blocks.count(source.vector.numel())
        found = self.reduced_by_kernel(source, "largest", over, tops=of_all)
        assert found is not None
        if not self.format.block:
            return found, self.encoded(source, found, bits)
        magnitudes, others = found[:count], found[count:] if of_all else None
        written = [torch.empty_like(magnitudes, dtype=torch.uint8)]
        if of_all:
            written.insert(0, found.new_empty(1))
        return *written, self.encoded(source, magnitudes, bits, others=others, written=written)

    @property
    def numbered(self) -> Blocks:
        return self.blocks if self.settings.scale is None else Blocks(WHOLE)

    def _rounds_in_a_sum(self, divisors: torch.Tensor) -> bool:
        """Return whether values / divisors may be rounded by adding `_WHOLE_NUMBERS`, as none comes out too large."""
        chosen, dtype = self.settings, divisors.dtype
        plain = self.format.element is None and chosen.scale is None and not chosen.stochastic
        # A scale below the normal numbers is far from what the largest value asks for. NaN is not above it either.
        on_cpu = dtype == torch.float32 and divisors.device.type == "cpu" and divisors.numel() > 0
        return plain and on_cpu and divisors.min().item() >= torch.finfo(dtype).tiny

    def _scales(self, vector: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what travels of the blocks' divisors: see `compress`. They are not finite for values that are not."""
        if not vector.numel():
            return self._coded(vector.new_empty(0, dtype=torch.float32))
        if self.settings.scale is None:
            return self._coded(self.largest_magnitudes(vector).float())
        least, greatest = torch.aminmax(vector)
        # One says it all, and whether something was not finite.
        return (((least * 0 + greatest * 0).float() + 1 / self.settings.scale).view(1),)

    def _coded(self, magnitudes: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Write the scales of blocks of these largest magnitudes, (blocks,)."""
        up = self.settings.stochastic
        if self.format.scales == "float32":
            return (magnitudes / self.largest,)
        if self.format.scales == "e8m0":  # the exponent's bits of a float32 are the byte
            return ((magnitudes * self._of_exponent).view(torch.int32).bitwise_right_shift(23).to(torch.uint8),)
        unit = magnitudes.amax(0, keepdim=True) / (448 * self.largest) if len(magnitudes) else magnitudes
        wanted = (magnitudes / (self.largest * unit.masked_fill(unit == 0, 1.0))).clamp_(max=448)
        nearest = wanted.to(E4M3)
        return unit, nearest.view(torch.uint8) + ((nearest.float() < wanted) & up)

    def _factors(self, numbers: Sequence[torch.Tensor]) -> torch.Tensor:
        """Read what `_scales` wrote: (blocks,), or (1,), float32."""
        if self.format.scales == "e8m0":
            exponents = numbers[0].to(torch.int32).bitwise_left_shift_(23)
            return exponents.masked_fill_(exponents == 0, 1 << 22).view(torch.float32)  # 2^-127
        return numbers[0] if len(numbers) == 1 else numbers[1].view(E4M3).float() * numbers[0]

    def _divided(self, values: torch.Tensor, divisors: torch.Tensor, start: int, out: torch.Tensor) -> torch.Tensor:
        if self.settings.scale is None:
            return self.divide(values, divisors, start, out)
        return torch.div(values, divisors, out=out)

    def _codes(self, places: torch.Tensor, bits: RandomBits | None) -> torch.Tensor:
        """Convert values in the format's own unit to codes, int8. The values are overwritten."""
        form, whole = self.format, self.format.element is None
        if bits is not None:
            step = self._steps(places)
            places.div_(step).add_(bits.sixteen(places).to(places.dtype), alpha=2.0**-16).add_(0.5 + 2.0**-17)
            places.floor_().mul_(step)
        elif whole:
            places.round_()
        elif form.bits == 4:
            step = self._steps(places)
            places.div_(step).round_().mul_(step)
        places.clamp_(-self.largest - (self.settings.scale is not None), self.largest)
        if whole:
            return (places if form.bits == 8 else places.add_(8)).to(torch.int8)
        if form.bits == 8:
            return places.float().to(form.element).view(torch.int8)
        # E2M1's codes are E4M3's, of values over 2^6, without two bits of exponent and two of mantissa.
        codes = places.mul_(2.0**-6).float().to(E4M3).view(torch.uint8)
        return (codes >> 2 & 7 | codes >> 4 & 8).view(torch.int8)

    def _steps(self, places: torch.Tensor) -> torch.Tensor | float:
        """Return the distance between the format's values around each place."""
        if self.format.element is None:
            return 1.0
        below = places.float().view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32)  # a power of two
        return below.mul_(self.format.relative).clamp_(min=self.format.finest)

    def kinds(self) -> tuple[Kind, ...]:
        # A fixed scale also tells whether a value of a part was not finite. nvfp4's float32 is of a whole vector.
        whole = self.settings.scale is not None or self.format.scales == "e4m3"
        return () if whole else (OF_BLOCKS, BYTES if self.bits == 8 else self.bits)

    def prepared(self, payload: Sequence[torch.Tensor], like: torch.Tensor, scale: float) -> Any:
        *numbers, packed = payload
        factors = self._factors(numbers).to(like.dtype)
        return packed, factors if scale == 1.0 else factors * scale

    def fill(self, values: torch.Tensor, prepared: Any, start: int) -> torch.Tensor:
        packed, factors = prepared
        stop = start + values.numel()
        codes = packed[start:stop] if self.bits == 8 else unpack(packed, 4, start, stop)
        self._write_values(values, codes)
        return self.scale(values, factors, start) if self.settings.scale is None else values.mul_(factors)

    def _write_values(self, values: torch.Tensor, codes: torch.Tensor) -> None:
        """Overwrite values with those that codes stand for, in the format's own unit."""
        if self.format.element is None:
            # Subtracted from bytes, which costs less than from floats.
            whole = codes.view(torch.int8)
            values.copy_(whole if self.bits == 8 else whole.sub_(8))
        elif values.device.type != "cpu":
            values.copy_(_values(self.format, codes))
        else:  # a look at a table is five times faster
            table = _values_of_codes(self.format, values.dtype)
            np.take(table, codes.numpy(), out=values.numpy(), mode="clip")

    def compressed_bytes(self, numel: int) -> int:
        scales, alone = self.blocks.count(numel), 4 * min(1, numel)
        of_blocks = {"float32": 4 * scales, "e8m0": scales, "e4m3": alone + scales}[self.format.scales]
        codes = numel if self.bits == 8 else packed_bytes(numel, self.bits)
        return codes + (of_blocks if self.settings.scale is None else alone)


def _values(form: Format, codes: torch.Tensor) -> torch.Tensor:
    """Return the values of codes, uint8, of a floating-point format."""
    if form.bits == 8 and form.element is not None:
        return codes.view(form.element)
    return ((codes & 7) << 2 | (codes & 8) << 4).view(E4M3).float() * 2.0**6


@functools.cache
def _values_of_codes(form: Format, dtype: torch.dtype) -> np.ndarray:
    """Tabulate the values of the codes of a floating-point format."""
    return _values(form, torch.arange(2**form.bits, dtype=torch.uint8)).to(dtype).numpy()
