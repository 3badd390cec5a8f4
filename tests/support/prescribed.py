"""A model whose gradients are prescribed: the loss is sum(parameter * gradient), so backward gives exactly that."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from gradlab.layout import Layer

# Shapes that codecs meet: a convolution, matrices, a stack of them, vectors, a scalar, an empty layer, one element.
SHAPES: dict[str, tuple[int, ...]] = {
    "conv": (16, 8, 3, 3),
    "wide": (12, 300),
    "tall": (300, 7),
    "experts": (3, 14, 22),
    "transposed": (15, 20),
    "vector": (65,),
    "scalar": (),
    "empty": (0, 4),
    "one": (1, 1),
}


# Roles by name; all others are matrices and vectors of no known role.
ROLES = {"conv": "convolution", "experts": "experts", "transposed": "transposed_linear"}


class Prescribed(nn.Module):
    """Parameters of given names and shapes; `forward(gradients)` returns the loss with those gradients."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(tuple(shape), dtype=dtype)))

    def forward(self, gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([(p * gradients[name]).sum().float() for name, p in self.named_parameters()]).sum()


def layers(shapes: Mapping[str, Sequence[int]] = SHAPES) -> tuple[Layer, ...]:
    """The layers of `Prescribed(shapes)`; four-dimensional ones count as convolutions."""
    return tuple(
        Layer(name, tuple(shape), ROLES.get(name.rpartition("_")[2], "convolution" if len(shape) == 4 else "other"))
        for name, shape in shapes.items()
    )


def gradients(
    shapes: Mapping[str, Sequence[int]], rank: int, step: int, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Gradients of one rank at one step, the same wherever they are drawn: a part shared by all ranks, and noise."""
    drawn = _drawn(tuple((name, tuple(shape)) for name, shape in shapes.items()), rank, step, dtype)
    return {name: grad.clone() for name, grad in drawn.items()}


@functools.lru_cache(maxsize=256)
def _drawn(
    shapes: tuple[tuple[str, tuple[int, ...]], ...], rank: int, step: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Gradients to be copied: tests ask for the same ones again and again."""
    shared = torch.Generator().manual_seed(1000 + step)
    own = torch.Generator().manual_seed(1_000_000 * (rank + 1) + step)
    return {
        name: (torch.randn(shape, generator=shared) + torch.randn(shape, generator=own)).to(dtype)
        for name, shape in shapes
    }
