"""A group's gradients as one vector, and back, in one call for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch._utils import _unflatten_dense_tensors

Tensors = dict[str, torch.Tensor]


def concatenate(grads: Tensors) -> torch.Tensor:
    """Concatenate a group's gradients to one vector (sum of numel,).

    It is a view where the gradients lie one after another in memory, as those that `separate` cut do.
    """
    pieces = list(grads.values())
    if len(pieces) == 1:
        return pieces[0].reshape(-1)
    joined = consecutive(pieces)
    return torch.cat([piece.reshape(-1) for piece in pieces]) if joined is None else joined


def consecutive(pieces: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the vector that tensors are consecutive parts of, or None."""
    if not pieces:
        return None
    first = pieces[0]
    begin = address = first.data_ptr()
    for piece in pieces:
        if piece.data_ptr() != address or not piece.is_contiguous():
            return None
        address += piece.nbytes
    memory = first.untyped_storage()
    # Memory of other tensors may follow by chance: then it ends before the last of these.
    if address > memory.data_ptr() + memory.nbytes() or any(piece.dtype != first.dtype for piece in pieces):
        return None
    return first.as_strided(((address - begin) // first.element_size(),), (1,))


def separate(vector: torch.Tensor, like: Tensors) -> Tensors:
    """Cut a vector (sum of numel,) into views with the names and shapes of `like`: the inverse of `concatenate`."""
    return dict(zip(like, cut_like(vector, list(like.values())), strict=True))


def cut_like(vector: torch.Tensor, like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Cut a vector (sum of numel,) into views with the shapes of several tensors, in one call."""
    if all(one.numel() for one in like):
        return _unflatten_dense_tensors(vector, like)
    pieces = vector.split([one.numel() for one in like])  # the call forgets the shape of what is empty
    return [piece.view(one.shape) for piece, one in zip(pieces, like, strict=True)]


def spread(grads: Tensors, parts: int) -> Tensors:
    """Cut each gradient into equal pieces, as far as that goes: all first ones, then all second ones, and so on.

    Returns:
        Views under names of their own: the pieces (elements,) of contiguous gradients.
    """
    vectors = {name: grad.reshape(-1) for name, grad in grads.items()}
    return {
        f"{name}/{part}": vector[slice(*piece_of(len(vector), part, parts))]
        for part in range(parts)
        for name, vector in vectors.items()
    }


def piece_of(numel: int, part: int, parts: int) -> tuple[int, int]:
    """Return where a piece of a gradient (numel,) begins and ends, see `spread`."""
    return numel * part // parts, numel * (part + 1) // parts


def put_together(pieces: Mapping[str, torch.Tensor], like: Tensors, parts: int, out: torch.Tensor) -> Tensors:
    """Invert `spread`.

    pieces: of all gradients.
    like: the gradients that they are of.
    parts: pieces of each.
    out: memory for all of them (sum of numel,), of which they will be views.
    """
    return separate(torch.cat([pieces[f"{name}/{part}"] for name in like for part in range(parts)], out=out), like)
