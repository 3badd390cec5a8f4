"""Small layers whose slices are coded together, as one layer of many slices with a basis for each layer's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradlab.codec import Tensors
from gradlab.layout import Layer
from gradlab.learning.slice_code import SliceCode

_UP_TO = 2**18  # elements of a layer that is copied beside alike ones; a larger one gains nothing


@dataclass(frozen=True)
class SlicedGradient:
    """One layer's gradient, cut into slices, and what its state says is to be done.

    name: the layer's.
    view: of the layer, see `slice_view`.
    vector: in GradiVeQ's order, (numel,).
    slices: its M slices of K elements, (M, K).
    tail: its elements that fill no slice.
    state: the layer's, without its name.
    mode, position: what the state's clock says.
    """

    name: str
    view: Layer
    vector: torch.Tensor
    slices: torch.Tensor
    tail: torch.Tensor
    state: Tensors
    mode: int
    position: int


def alike_batches(
    layers: Sequence[SlicedGradient], widths: Sequence[tuple[int, ...] | None]
) -> list[list[SlicedGradient]]:
    """Put together the small layers that are coded alike.

    Args:
        layers: of a group.
        widths: of each layer's code, as its bases have them; None: the layer stays alone.

    Returns:
        Batches of layers with slices, bases and positions in the cycle of the same shapes, in the order of their first.
    """
    batches: dict[Any, list[SlicedGradient]] = {}
    for one, width in zip(layers, widths, strict=True):
        key: Any = one.name
        if width is not None and one.vector.numel() <= _UP_TO:
            learned = [(name, one.state[name].shape) for name in ("basis", "mean") if name in one.state]
            key = (one.slices.shape, one.tail.shape, one.vector.dtype, one.position, width, *learned)
        batches.setdefault(key, []).append(one)
    return list(batches.values())


def stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join the tensors of alike layers along their first dimension."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def split_alike(slices: torch.Tensor, batch: Sequence[SlicedGradient]) -> list[torch.Tensor]:
    """Cut the slices of alike layers (L M, K) into those of each, (M, K)."""
    return [slices] if len(batch) == 1 else list(slices.split(len(batch[0].slices)))


class AlikeCodes:
    """The codes of batches of alike layers. The bases of a batch are joined once, and again when one is another."""

    def __init__(self) -> None:
        self._joined: dict[tuple[str, ...], tuple[list[torch.Tensor], torch.Tensor]] = {}

    def of(self, codes: Sequence[SliceCode], batch: Sequence[SlicedGradient]) -> SliceCode:
        """Return the code of the slices of alike layers from those of each, which have one basis."""
        if len(codes) == 1:
            return codes[0]
        bases, dimensions = [code.basis for code in codes], tuple(code.dimensions[0] for code in codes)
        return SliceCode(self.bases_of(bases, batch), dimensions, len(batch[0].slices))

    def bases_of(self, bases: list[torch.Tensor], batch: Sequence[SlicedGradient]) -> torch.Tensor:
        """Join the bases (B, K, d) of alike layers."""
        if len(bases) == 1:
            return bases[0]
        return self._together(tuple(one.name for one in batch), bases) if bases[0].numel() else _empty(bases)

    def _together(self, names: tuple[str, ...], bases: list[torch.Tensor]) -> torch.Tensor:
        known, joined = self._joined.get(names, ([], bases[0]))
        if len(known) != len(bases) or any(one is not before for one, before in zip(bases, known, strict=True)):
            joined = torch.cat(bases)
            self._joined[names] = bases, joined
        return joined


def _empty(bases: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join bases without columns."""
    return bases[0].expand(len(bases), -1, -1)
