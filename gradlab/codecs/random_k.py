"""Random-k sparsification: the same random positions on every rank, drawn from a shared seed, so only values travel.

Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018, Definition 2.2 (rand_k); unbiased with a factor
numel / k: Wangni, Wang, Liu, Zhang, "Gradient sparsification", NeurIPS 2018.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from gradlab.codec import About, Batch, Bytes, Codec, Context, Exchanged, Guarantees, PlanDefaults, Tensors, Traits
from gradlab.codec.each_layer import EachLayer
from gradlab.codec.routes import exchanged_at, exchanged_by_kernels
from gradlab.codec.settings import setting
from gradlab.codec.sparsifier import count_of, density_setting, with_non_finite
from gradlab.collectives import Coroutine, Mean
from gradlab.kernels import usable
from gradlab.layout import Layer


class RandomK(Codec):
    """Average the values at k = ceil(density * numel) positions, drawn anew in every iteration without replacement.

    The codec is linear and takes one all-reduce: what a rank sends does not grow with N. In expectation over the draw
    it is delta-approximate with delta = k / numel: E||C(x) - x||^2 = (1 - k / numel) ||x||^2.

    With `unbiased`, values are multiplied by numel / k: E C(x) = x and E||C(x) - x||^2 = (numel / k - 1) ||x||^2. Error
    feedback is then off by default. At densities below 0.5, where C is no contraction, feedback divides the factor out
    again.

    NaN and infinity at a position that is not drawn are passed on all the same: all values of that rank are then NaN.

    >>> done = codecs.make("random_k", density=0.25).apply([torch.ones(8), torch.ones(8)])  # two ranks
    >>> sorted(done.decoded.tolist())
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    >>> done
    Applied(8 bytes instead of 32, or 16 in 16 bits, relative error 0.866)
    """

    name = "random_k"
    about = About(
        "sparsification",
        "4 * k, k = ceil(density * n)",
        "Stich et al., NeurIPS 2018; Wangni et al., NeurIPS 2018",
        candidates=tuple({"density": density} for density in (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)),
    )
    traits = Traits(selects=True, frees_gradients=True)

    @dataclass(frozen=True)
    class Settings:
        density: float = density_setting()
        unbiased: bool = setting(False, help="multiply values by numel / k")

    def __init__(self, settings: Any = None, learned: Mapping[str, torch.Tensor] | None = None) -> None:
        super().__init__(settings, learned)
        self.about = replace(type(self).about, defaults=PlanDefaults(error_feedback=not self.settings.unbiased))

    def guarantees(self, layers: Sequence[Layer]) -> Guarantees:
        share = self._share(layers)
        if self.settings.unbiased:
            return Guarantees(linear=True, unbiased=True, omega=1 / share - 1)
        return Guarantees(linear=True, delta=share)

    def _share(self, layers: Sequence[Layer]) -> float:
        numel = sum(layer.numel for layer in layers)
        return count_of(self.settings.density, numel) / numel if numel else 1.0

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        vector = grads.vector
        count = count_of(self.settings.density, vector.numel())
        positions = distinct(vector.numel(), count, context.random.shared())
        factor = vector.numel() / count if self.settings.unbiased and count else 1.0
        if count and usable(vector):
            return (yield from self._exchange_by_kernels(positions, factor, grads, context))
        positions = positions.to(vector.device, non_blocking=True)
        values = with_non_finite(vector[positions].mul_(factor), vector)
        mean = yield Mean(values)
        return exchanged_at(positions, mean, values, vector, grads, context)

    def _exchange_by_kernels(
        self, positions: torch.Tensor, factor: float, grads: Batch, context: Context
    ) -> Coroutine[Exchanged]:
        from gradlab.kernels.selection import values_at

        vector, sizes = grads.vector, (grads.vector.numel(), len(positions))
        known = self.cached(sizes, lambda: EachLayer(sizes[:1], sizes[1:], "raw"))
        encoded, places = known.encode(positions).to(vector.device, non_blocking=True), known.places(vector.device)
        values = values_at(vector, encoded, places, known.count)
        mean = yield Mean(values if factor == 1.0 else values.mul_(factor))
        return exchanged_by_kernels(encoded, places, mean, values, vector, grads, context)

    def forecast(self, layers: Sequence[Layer], world_size: int, state: Tensors | None = None) -> Bytes:
        return Bytes.of_means(4 * count_of(self.settings.density, sum(one.numel for one in layers)), world_size)


def distinct(numel: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """Draw `count` different numbers below numel, (count,) int64, ascending, from independent draws; every set is
    equally likely. All is on the CPU, so that every device gets the same numbers and no host waits for one."""
    if 2 * count > numel:
        return _others(numel, distinct(numel, numel - count, generator))
    drawn = torch.empty(0, dtype=torch.int64)
    while len(drawn) < count:
        more = torch.randint(numel, (count - len(drawn) + count // 4 + 8,), generator=generator)
        ascending = np.sort(torch.cat([drawn, more]).numpy())  # four times as fast as PyTorch
        drawn = torch.unique_consecutive(torch.from_numpy(ascending))
    if len(drawn) == count:
        return drawn
    dropped = torch.randperm(len(drawn), generator=generator)[: len(drawn) - count]
    return drawn[_others(len(drawn), dropped)]


def _others(numel: int, left_out: torch.Tensor) -> torch.Tensor:
    """List the numbers below numel that are not among some, ascending."""
    kept = torch.ones(numel, dtype=torch.bool)
    kept[left_out] = False
    return kept.nonzero().view(-1)
