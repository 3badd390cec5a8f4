"""Abilities that a compressor may have beside its contract. Routes ask for them by name, and do without.

Five abilities have a default here. Others are speed: `compress_rows` and `add_rows` work on parts of one size together,
`compress_parts` gives all parts one step, `selected` with `messages_at` chooses from all parts together. `settled` is a
coroutine that measures a setting before an exchange.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from gradlab.layout import Layer

if TYPE_CHECKING:
    from gradlab.codec.compressor import Compressor

SomeCompressor = TypeVar("SomeCompressor", bound="Compressor")
Kind = int | str


def for_layers(codec: SomeCompressor, layers: Sequence[Layer]) -> SomeCompressor:
    """Return the compressor of a vector of these layers; a codec that knows where they end makes it once for each."""
    own = getattr(codec, "for_layers", None)
    return codec if own is None else own(layers)


def part_of(codec: SomeCompressor, start: int, stop: int) -> SomeCompressor:
    """Return the compressor of the shard vector[start:stop], whole blocks of the vector that this one compresses."""
    own = getattr(codec, "part", None)
    return codec if own is None else own(start, stop)


def kinds(codec: Compressor) -> tuple[Kind, ...]:
    """Return what each part of a payload holds, so that it can be cut where vectors are; nothing if it cannot.

    A number stands for packed codes of so many bits, `BYTES` for a byte per element. `OF_BLOCKS` is a number per block,
    `PAIRS_OF_BLOCKS` first one of each block and then another of each, `NOTHING` no number at all.
    """
    own = getattr(codec, "kinds", None)
    return () if own is None else own()


def position_bytes(codec: Compressor, numel: int) -> int:
    """Return how many of a vector's `compressed_bytes` name the elements whose values are sent."""
    own = getattr(codec, "position_bytes", None)
    return 0 if own is None else own(numel)


def average_into(
    codec: Compressor, out: torch.Tensor, payloads: Iterable[Sequence[torch.Tensor]], scale: float
) -> torch.Tensor:
    """Overwrite a vector (numel,) with scale times the sum of C(x) of several ranks, in their order, and return it."""
    if own := getattr(codec, "average_into", None):
        return own(out, payloads, scale)
    out.zero_()
    for payload in payloads:
        codec.add_decompressed(out, payload, scale)
    return out


def decompress(codec: Compressor, payload: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Decode a payload to C(x), a vector of the length and dtype of `like`."""
    return average_into(codec, torch.empty_like(like), [payload], 1.0)
