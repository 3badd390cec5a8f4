"""Top-k sparsification: send the values of largest magnitude and their positions.

Aji & Heafield, "Sparse communication for distributed gradient descent" (Sparse GD), EMNLP 2017; with error feedback
Stich, Cordonnier, Jaggi, "Sparsified SGD with memory" (MEM-SGD), NeurIPS 2018.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradlab.codec import About, Codec, Context, Guarantees, Sparsifier
from gradlab.codec.sparsifier import (
    DENSITIES,
    across_layers_setting,
    coding_setting,
    count_of,
    density_setting,
    largest,
)
from gradlab.coding.positions import encode_rows
from gradlab.layout import Layer

_TOGETHER = 2**16  # elements up to which vectors are selected from in one call


class TopK(Sparsifier):
    """Send the k = ceil(density * numel) values of largest magnitude in the group's concatenated gradient.

    Every rank chooses its own positions, so values and positions are gathered: wire bytes grow with N - 1.
    delta-approximate with delta = k / numel: ||C(x) - x||^2 <= (1 - k / numel) ||x||^2.

    >>> done = codecs.make("topk", density=0.25).apply(torch.tensor([0.1, -3.0, 0.2, 0.0, 5.0, -0.3, 0.1, 0.0]))
    >>> done.decoded.tolist()
    [0.0, -3.0, 0.0, 0.0, 5.0, 0.0, 0.0, 0.0]
    >>> done
    Applied(9 bytes instead of 32, or 16 in 16 bits, relative error 0.0663)
    """

    name = "topk"
    exact = True
    about = About(
        "sparsification",
        "4 * k + index_bytes(k, n), k = ceil(density * n)",
        "Aji & Heafield, EMNLP 2017; Stich et al., NeurIPS 2018",
        candidates=DENSITIES,
    )

    @dataclass(frozen=True)
    class Settings:
        density: float = density_setting()
        index_coding: str = coding_setting()
        across_layers: bool = across_layers_setting()

    def guarantees(self, layers: Sequence[Layer]) -> Guarantees:
        together = [sum(layer.numel for layer in layers)]
        sizes = together if self.settings.across_layers else [layer.numel for layer in layers]
        return Guarantees(delta=min([1.0, *(self.count(size) / size for size in sizes if size)]))

    def count(self, numel: int) -> int:
        """Return k, the number of elements sent out of `numel`."""
        return count_of(self.settings.density, numel)

    @classmethod
    def squared_errors(
        cls, codecs: Sequence[Codec], layer: Layer, gradient: torch.Tensor, context: Context
    ) -> list[float]:
        """Sort once for all densities: an error is the sum of the squares that are not sent."""
        energies = gradient.reshape(-1).double().square_().sort().values
        left = torch.cat([energies.new_zeros(1), energies.cumsum_(0)])
        return [float(left[layer.numel - codec.count(layer.numel)]) for codec in codecs]  # type: ignore[attr-defined]

    def select(self, vector: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return largest(vector, self.count(vector.numel()))

    def compress_rows(self, rows: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """Compress vectors of one size (m, numel) as `compress` does each, in a few calls."""
        if self._each is not None and self._each.numel == rows.shape[1]:  # a share of each layer
            return [self.compress(row, torch.default_generator) for row in rows]
        count, coding = self.count(rows.shape[1]), self.settings.index_coding
        if rows.shape[1] > _TOGETHER:
            places = torch.stack([largest(row, count) for row in rows])
        else:
            places = rows.abs().topk(count, 1, sorted=False).indices.sort(1).values
        return list(zip(rows.gather(1, places), encode_rows(places, rows.shape[1], coding), strict=True))
