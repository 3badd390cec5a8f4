"""Top-k by a threshold from a sample: the selection of Deep Gradient Compression.

Lin, Han, Mao, Wang, Dally, "Deep gradient compression: Reducing the communication bandwidth for distributed training"
(DGC), ICLR 2018, section 5 (sampling, hierarchical selection); the bounds and the number of adjustments
follow their code. Inside `momentum_correction` with `sparsity_warmup` it is DGC.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from gradlab.codec import About, Sparsifier, Traits
from gradlab.codec.sparsifier import (
    DENSITIES,
    across_layers_setting,
    at_least,
    coding_setting,
    count_of,
    density_setting,
    largest,
)
from gradlab.coding.random_bits import RandomBits

if TYPE_CHECKING:
    from gradlab.kernels.selection import Counted

_SAMPLED = 0.01  # share of elements in the sample
_LEAST = 16  # values of the sample that reach the threshold
_ENOUGH = 0.8  # share of k at which the threshold is no longer lowered
_LOWERED = 0.8  # the threshold's factor where it has left too few
_ADJUSTMENTS = 10


class SampledThreshold(Sparsifier):
    """Send about the k = ceil(density * numel) largest magnitudes: at most k, and mostly at least 0.8 k.

    The share `density` of a random sample reaches the threshold. If more than k elements of the layer do, the k largest
    are sent (hierarchical selection). If fewer than 0.8 k do, the threshold is lowered by a fifth, at most 10 times.

    The sample holds 1 % of the elements, and at least 16 / density. A layer of less than twice the sample is sorted
    instead, and so is each layer of a group. How many are sent depends on the gradient: message sizes vary. The
    elements sent are always the largest ones, so C is a contraction, but its delta depends on the sample.

    >>> done = codecs.make("sampled_threshold", density=0.5).apply(torch.tensor([0.1, -3.0, 0.2, 5.0]))
    >>> done.decoded.tolist()
    [0.0, -3.0, 0.0, 5.0]
    >>> done
    Applied(9 bytes instead of 16, or 8 in 16 bits, relative error 0.0383)
    """

    name = "sampled_threshold"
    about = About(
        "sparsification",
        "4 * k + index_bytes(k, n), 0.8 * density * n <= k <= density * n",
        "Lin et al., ICLR 2018",
        candidates=DENSITIES,
    )

    @dataclass(frozen=True)
    class Settings:
        density: float = density_setting(help="sent at most")
        index_coding: str = coding_setting()
        across_layers: bool = across_layers_setting()

    @cached_property
    def traits(self) -> Traits:
        return replace(super().traits, varying=True)

    def select(self, vector: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        count, top = count_of(self.settings.density, vector.numel()), self._top(vector, generator)
        if top is None:
            return largest(vector, count)
        threshold = top.min()
        candidates = at_least(vector, threshold)
        for _ in range(_ADJUSTMENTS):
            if len(candidates) >= _ENOUGH * count:
                break
            threshold = threshold * _LOWERED
            candidates = at_least(vector, threshold)
        return candidates if len(candidates) <= count else candidates[largest(vector[candidates], count)]

    def _top(self, vector: torch.Tensor, generator: torch.Generator) -> torch.Tensor | None:
        """Return the magnitudes in a sample that reach the threshold; None where all elements are sorted instead."""
        if (sample := self._sample(vector.numel())) is None:
            return None
        # At random: an even stride may follow the columns of a matrix.
        places = RandomBits(generator, vector.device).below(vector.numel(), sample[0])
        return vector[places].abs().topk(sample[1], sorted=False).values

    def _sample(self, numel: int) -> tuple[int, int] | None:
        """Return the elements of a sample, and how many of them reach the threshold; None where there is no sample."""
        density = self.settings.density
        wanted = max(math.ceil(_SAMPLED * numel), math.ceil(min(numel + 1, _LEAST / density)))
        return None if 2 * wanted > numel else (wanted, max(1, math.ceil(density * wanted)))

    def _counted(self, vector: torch.Tensor, generator: torch.Generator) -> tuple[int, Counted | None]:
        from gradlab.kernels.selection import levels_reached, places_of

        numel, device = vector.numel(), vector.device
        count, sample = count_of(self.settings.density, numel), self._sample(numel)
        if sample is None:
            return count, None
        rows = [(0, *sizes, *[0] * 7) for sizes in ((numel, count), sample)]
        places = self.cached(("sampled", numel, device), lambda: places_of(rows, device))
        nbytes, seed = self._places(vector, count)[1], RandomBits(generator, device).seed
        reached, [of_count, *of_levels] = levels_reached(vector, places, nbytes, seed, _ADJUSTMENTS + 1, _LOWERED)
        counts = reached.cpu().tolist()
        lowered = next((at for at, found in enumerate(counts) if found >= _ENOUGH * count), _ADJUSTMENTS)
        return (count, of_count) if counts[lowered] > count else (counts[lowered], of_levels[lowered])
