"""A group's gradients as one vector, and back, in one call for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch._utils import _unflatten_dense_tensors

#: Tensors by name: gradients or states by layer name, or what a codec learned.
Tensors = dict[str, torch.Tensor]


def concatenate(grads: Tensors) -> torch.Tensor:
    """Concatenate a group's gradients to one vector (sum of numel,).

    It is a view where the gradients lie one after another in memory, as those that `separate` cut do.

    >>> from gradlab.codec import concatenate
    >>> concatenate({"w": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([3.0])})
    tensor([1., 2., 3.])
    """
    pieces = list(grads.values())
    if len(pieces) == 1:
        return pieces[0].reshape(-1)
    joined = consecutive(pieces)
    return torch.cat([piece.reshape(-1) for piece in pieces]) if joined is None else joined


def consecutive(pieces: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the vector that tensors are consecutive parts of, or None."""
    if len(pieces) > 1 and pieces[1].data_ptr() != pieces[0].data_ptr() + pieces[0].nbytes and pieces[1].numel():
        return None  # as most are not
    if not all(map(torch.Tensor.numel, pieces)):
        pieces = [piece for piece in pieces if piece.numel()]  # what is empty lies nowhere
    if not pieces:
        return None
    first, addresses = pieces[0], list(map(torch.Tensor.data_ptr, pieces))
    *begins, end = accumulate([piece.nbytes for piece in pieces], initial=addresses[0])
    if addresses != begins or not all(map(torch.Tensor.is_contiguous, pieces)):
        return None
    memory = first.untyped_storage()
    # Memory of other tensors may follow by chance: then it ends before the last of these.
    if end > memory.data_ptr() + memory.nbytes() or len({piece.dtype for piece in pieces}) > 1:
        return None
    return first.as_strided(((end - addresses[0]) // first.element_size(),), (1,))


def separate(vector: torch.Tensor, like: Tensors) -> Tensors:
    """Cut a vector (sum of numel,) into views with the names and shapes of `like`: the inverse of `concatenate`.

    >>> from gradlab.codec import separate
    >>> separate(torch.tensor([1.0, 2.0, 3.0]), {"w": torch.empty(1, 2), "b": torch.empty(1)})
    {'w': tensor([[1., 2.]]), 'b': tensor([3.])}
    """
    return dict(zip(like, cut_like(vector, list(like.values())), strict=True))


def cut_like(vector: torch.Tensor, like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Cut a vector (sum of numel,) into views with the shapes of several tensors, in one call."""
    if all(map(torch.Tensor.numel, like)):
        return _unflatten_dense_tensors(vector, like)
    pieces = vector.split([one.numel() for one in like])  # the call forgets the shape of what is empty
    return [piece.view(one.shape) for piece, one in zip(pieces, like, strict=True)]


def stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack tensors of one shape (...) to (len(tensors), ...): a view where they lie at equal distances in memory.

    >>> from gradlab.codec.vectors import stacked
    >>> stacked([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])])
    tensor([[1., 2.],
            [3., 4.]])
    """
    view = evenly_spaced(tensors)
    return torch.stack(list(tensors)) if view is None else view


def evenly_spaced(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the tensor (len(tensors), ...) whose rows contiguous tensors of one shape and dtype are, or None."""
    first = tensors[0]
    if len(tensors) == 1:
        return first.unsqueeze(0)
    addresses = list(map(torch.Tensor.data_ptr, tensors))
    distance = addresses[1] - addresses[0]
    if distance < first.nbytes or distance % first.element_size():
        return None
    if addresses != list(range(addresses[0], addresses[0] + len(tensors) * distance, distance)):
        return None
    memory = first.untyped_storage()
    # They may lie so by chance in several memories: then that of the first ends before the last one does.
    if addresses[-1] + first.nbytes > memory.data_ptr() + memory.nbytes() or not all(
        map(torch.Tensor.is_contiguous, tensors)
    ):
        return None
    return first.as_strided((len(tensors), *first.shape), (distance // first.element_size(), *first.stride()))
