"""NUQSGD: QSGD with levels that halve from one to the next, where small values are many.

A. Ramezani-Kebrya, F. Faghri, I. Markov, V. Aksenov, D. Alistarh, D. M. Roy, "NUQSGD: Provably communication-efficient
data-parallel SGD via nonuniform quantization", Journal of Machine Learning Research 22, 2021, section 3: levels 0,
2^-s, ..., 1/2, 1 of the norm, random rounding without bias. All codes have one width here; the paper shortens frequent
ones (Elias).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from gradlab.codec import About, Guarantees, PlanDefaults, Traits
from gradlab.codec.routes import aggregation_setting
from gradlab.codec.settings import setting
from gradlab.codecs.qsgd import NORMS, BucketQuantizer
from gradlab.coding.bits import unpack
from gradlab.kernels import Form
from gradlab.layout import Layer


class NUQSGD(BucketQuantizer):
    """C(x)_i = norm * sign(x_i) * l: l is the level above or below |x_i| / norm, at random, so that E C(x) = x.

    Levels are 0 and the 2^(bits - 1) - 1 powers of two from 2^-s to 1, s = 2^(bits - 1) - 2. Per bucket of n elements
        E||C(x) - x||^2 <= (1/8 + min(4^-s n / 4, 2^-s sqrt(n))) ||x||^2:
    between 2^a and 2^(a + 1) the variance is at most an eighth of the square, below 2^-s at most 4^-s / 4 of the
    norm's. The largest of `qsgd`'s uniform levels are nearer to each other: these are for gradients most of whose
    values are far below the norm. The published code and experiments take the l2 norm. The published code has no level
    at 0: its smallest two are 2^-s and -2^-s, between which it rounds small values.

    >>> done = codecs.make("nuqsgd", bits=3, norm="max").apply(torch.tensor([4.0, -2.0, 1.0, 0.0]))  # levels are exact
    >>> done.decoded.tolist()
    [4.0, -2.0, 1.0, 0.0]
    """

    name = "nuqsgd"
    about = About(
        "quantization",
        "4 * ceil(n / bucket_size) + bits * ceil(n / 8)",
        "Ramezani-Kebrya et al., JMLR 2021",
        candidates=tuple({"bits": bits} for bits in range(2, 6)),
        defaults=PlanDefaults(error_feedback=False),
    )

    @dataclass(frozen=True)
    class Settings:
        bits: int = setting(4, least=2, most=6, unit="bits", help="per element, its sign included")
        bucket_size: int = setting(512, least=1, unit="elements", symbol="d", help="that share one norm, a float32")
        norm: str = setting("l2", choices=NORMS, help='the paper\'s, or "max", the largest magnitude')
        aggregation: str = aggregation_setting()

    def guarantees(self, layers: Sequence[Layer]) -> Guarantees:
        longest = max(1, min(self.settings.bucket_size, sum(layer.numel for layer in layers)))
        least = 2.0 ** (1 - self.levels)
        omega = 1 / 8 + min(least**2 * longest / 4, least * longest**0.5)
        return Guarantees(unbiased=True, omega=omega, homogeneous=True)

    @cached_property
    def traits(self) -> Traits:
        # Most values of a mean are below the least level, as they are in QSGD's l2 form.
        return replace(super().traits, coarse=True)

    def codes(self, places: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        numbers = level_numbers(places.abs(), drawn.mul_(2.0**-16).add_(0.5 + 2.0**-17), self.levels)
        return torch.where(places < 0, self.levels - numbers, self.levels + numbers).byte()

    def form(self) -> Form:
        return Form("halving", self.settings.bits, self.levels)

    def prepared(self, payload: Sequence[torch.Tensor], like: torch.Tensor, scale: float) -> Any:
        norms, packed = payload
        above = torch.exp2(torch.arange(1 - self.levels, 1, device=like.device, dtype=like.dtype))
        return packed, norms.to(like.dtype) * scale, torch.cat([-above.flip(0), above.new_zeros(1), above])

    def fill(self, values: torch.Tensor, prepared: Any, start: int) -> torch.Tensor:
        packed, norms, levels = prepared
        codes = unpack(packed, self.settings.bits, start, start + values.numel()).to(torch.int64)
        return self.scale(torch.index_select(levels, 0, codes.clamp_(max=2 * self.levels), out=values), norms, start)


def level_numbers(places: torch.Tensor, chances: torch.Tensor, levels: int) -> torch.Tensor:
    """Round places (n,) in [0, 1] to levels 0, 2^(1 - levels), ..., 1/2, 1 at random, without bias, by chances (n,),
    uniform in (0, 1); return the level's number, (n,), int32. NaN becomes 0."""
    mantissas, exponents = torch.frexp(places)  # places = mantissas 2^exponents, mantissas in [1/2, 1)
    below = exponents + (levels - 1)
    small = (below < 1) | (places == 0)
    shares = torch.where(small, places * 2.0 ** (levels - 1), 2 * mantissas - 1)
    return (below.masked_fill(small, 0) + (shares > chances)).clamp_(0, levels)
