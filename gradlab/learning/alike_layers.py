"""Small layers whose slices are coded together, as one layer of many slices with a basis for each layer's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gradlab.codec import Tensors
from gradlab.layout import Layer

#: Elements of a layer below which it is copied beside alike ones; a larger one gains nothing.
SMALL = 2**18


@dataclass(frozen=True)
class SlicedGradients:
    """Gradients of L layers of one shape and dtype, cut into slices, with their states.

    view: view of each layer, see `slice_view`.
    vectors: gradients in GradiVeQ's order, (L, numel).
    size: elements of a slice, K.
    states: state of each layer, without its name.
    mode, position: those of the states' clocks.
    """

    names: tuple[str, ...]
    view: Layer
    vectors: torch.Tensor
    size: int
    states: Sequence[Tensors]
    mode: int
    position: int

    @property
    def count(self) -> int:
        """Slices of a layer, M."""
        return self.vectors.shape[1] // self.size

    @property
    def slices(self) -> torch.Tensor:
        """The slices of all layers, (L M, K)."""
        return self.vectors[:, : self.count * self.size].reshape(len(self.names) * self.count, self.size)

    @property
    def tail(self) -> torch.Tensor:
        """The elements of all layers that fill no slice, (L (numel - M K),)."""
        return self.vectors[:, self.count * self.size :].reshape(-1)

    def of_each(self, slices: torch.Tensor) -> list[torch.Tensor]:
        """Cut slices of all layers, (L M, K), into those of each, (M, K)."""
        return [slices] if len(self.names) == 1 else list(slices.split(self.count))

    def joined(self, slices: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
        """Join slices (L M, K) and the elements that fill no slice to vectors (L, numel)."""
        vectors, layers = slices.reshape(len(self.names), self.count * self.size), len(self.names)
        return torch.cat([vectors, tail.view(layers, -1)], dim=1) if tail.numel() else vectors

    def some(self, places: Sequence[int], **other: Any) -> SlicedGradients:
        """Return some of the layers, in this order, with other values of their fields."""
        if list(places) == list(range(len(self.names))):
            return replace(self, **other)
        names, states = tuple(self.names[place] for place in places), [self.states[place] for place in places]
        vectors = self.vectors[places[0]].unsqueeze(0) if len(places) == 1 else self.vectors[list(places)]
        return replace(self, **({"names": names, "states": states, "vectors": vectors} | other))
