"""Sparsifiers: compressors that send some elements as they are, and where they stand."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import torch

from gradlab.codec import Compressor
from gradlab.codec_settings import require
from gradlab.indices import CODINGS, decode, encode, in_order, index_bytes, varies

_SAMPLE = 16384  # values looked at before the threshold is chosen
_PIECE = 2**18  # values looked at together


class Sparsifier(Compressor):
    """A choice of positions that every rank makes for itself, so that values and positions are gathered.

    The settings of each have `index_coding`, how positions travel: see `gradlab.indices`.
    """

    family = "sparsification"
    selects = True

    @property
    def varying(self) -> bool:
        return varies(self.settings.index_coding)

    @abstractmethod
    def select(self, vector: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Positions (count,), int64, of what is sent of a vector (numel,)."""

    def compress(self, vector: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Values (count,) and their encoded positions, uint8."""
        positions, coding = self.select(vector, generator), self.settings.index_coding
        if in_order(coding, len(positions), vector.numel()):
            positions = positions.sort().values
        return vector[positions], encode(positions, vector.numel(), coding)

    def add_decompressed(self, total: torch.Tensor, payload: Sequence[torch.Tensor], scale: float) -> None:
        values, encoded = payload
        positions = decode(encoded, len(values), total.numel(), self.settings.index_coding)
        total.index_add_(0, positions, values if scale == 1.0 else values * scale)

    def compressed_bytes(self, numel: int) -> int:
        """Bytes of ceil(density * numel) values with their positions; where those vary, of random positions."""
        count = count_of(self.settings.density, numel)
        return 4 * count + index_bytes(self.settings.index_coding, count, numel)


def require_density(density: float, codec: str) -> None:
    """Raises GradlabError for a share of elements that is none."""
    require(0 < density <= 1, codec, "density", density, "a share in (0, 1]")


def require_coding(coding: str, codec: str, known: Sequence[str] = CODINGS) -> None:
    """Raises GradlabError for an unknown `index_coding`."""
    require(coding in known, codec, "index_coding", coding, f"one of {', '.join(known)}")


def count_of(density: float, numel: int) -> int:
    """k = ceil(density * numel), at least one of those there are."""
    return min(numel, max(1, math.ceil(round(density * numel, 9))))


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
    candidates = at_least(vector, threshold)
    if len(candidates) < count:  # the sample did not stand for the rest
        return vector.abs().topk(count, sorted=False).indices
    return candidates[vector[candidates].abs().topk(count, sorted=False).indices]


def at_least(vector: torch.Tensor, threshold: torch.Tensor | float) -> torch.Tensor:
    """Positions, ascending, whose magnitude reaches a threshold, and of NaN.

    Piece by piece, so that what is in between stays in the cache.
    """
    piece = _PIECE if vector.device.type == "cpu" else max(1, vector.numel())
    pieces = vector.split(piece)
    return torch.cat(
        [(part.abs() < threshold).logical_not_().nonzero().view(-1) + i * piece for i, part in enumerate(pieces)]
    )
