"""Top-k sparsification: send the values of largest magnitude and where they stand.

Aji & Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017; with error feedback
Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradlab.codec import Compressor
from gradlab.codec_settings import require
from gradlab.errors import GradlabError
from gradlab.layout import Layer

# Positions travel as int32.
_LARGEST_GROUP = 2**31

_SAMPLE = 16384  # values looked at before the threshold is chosen
_PIECE = 2**18  # values looked at together


class TopK(Compressor):
    """The k = ceil(density * numel) largest magnitudes of the group's concatenated gradient.

    Every rank chooses its own positions, so values and indices are gathered: wire bytes grow with N - 1.
    delta-approximate with delta = k / numel: ||C(x) - x||^2 <= (1 - k / numel) ||x||^2.
    """

    name = "topk"
    family = "sparsification"

    @dataclass(frozen=True)
    class Settings:
        """density: share of elements sent, in (0, 1]; the papers' k / d."""

        density: float = 0.01

        def __post_init__(self) -> None:
            require(0 < self.density <= 1, "topk", "density", self.density, "a share in (0, 1]")

    def count(self, numel: int) -> int:
        """k, the number of elements sent out of `numel`."""
        return min(numel, max(1, math.ceil(round(self.settings.density * numel, 9))))

    def compress(self, vector: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Values (k,) and their positions (k,), int32."""
        indices = largest(vector, self.count(vector.numel()))
        return vector[indices], indices.to(torch.int32)

    def add_decompressed(self, total: torch.Tensor, payload: Sequence[torch.Tensor], scale: float) -> None:
        values, indices = payload
        total.index_add_(0, indices, values * scale)

    def check(self, layers: Sequence[Layer]) -> None:
        super().check(layers)
        numel = sum(layer.numel for layer in layers)
        if numel > _LARGEST_GROUP:
            raise GradlabError(f"codec topk: a group of {numel} elements, at most {_LARGEST_GROUP}: split the group")

    def payload_bytes(self, layers: Sequence[Layer], world_size: int) -> float:
        return 8 * self.count(sum(layer.numel for layer in layers))


def largest(vector: torch.Tensor, count: int) -> torch.Tensor:
    """Positions (count,) of the largest magnitudes of a vector, exactly, in no order; among equals any.

    A threshold from a sample, chosen low, leaves a few candidates to select from: 7 times faster on a million values.
    """
    stride = vector.numel() // _SAMPLE
    expected = count // max(1, stride)
    place = expected + 4 * math.isqrt(expected) + 8  # in the sample: low enough by four standard deviations
    if stride < 4 or 4 * place > _SAMPLE:
        return vector.abs().topk(count, sorted=False).indices
    threshold = vector[::stride].abs().topk(place, sorted=False).values.min()
    candidates = _at_least(vector, threshold)
    if len(candidates) < count:  # the sample did not stand for the rest
        return vector.abs().topk(count, sorted=False).indices
    return candidates[vector[candidates].abs().topk(count, sorted=False).indices]


def _at_least(vector: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """Positions whose magnitude reaches a threshold; piece by piece, so that what is in between stays in the cache."""
    piece = _PIECE if vector.device.type == "cpu" else vector.numel()
    pieces = vector.split(piece)
    return torch.cat([(part.abs() >= threshold).nonzero().view(-1) + i * piece for i, part in enumerate(pieces)])
