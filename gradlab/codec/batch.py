"""A group's gradients: tensors by layer name, one vector, and the table of the layers."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch._utils import _unflatten_dense_tensors

from gradlab.kernels import Source
from gradlab.layout import Layer, layer_of
from gradlab.roles import STACKS

#: Tensors by name: gradients or states by layer name, or what a codec learned.
Tensors = dict[str, torch.Tensor]


class Table(tuple[Layer, ...]):
    """The layers of a group, in the order in which they lie in its vector.

    `Table.of` returns one object for equal layers, so that caches find it without comparing names.

    >>> from gradlab.codec import Table
    >>> table = Table.of([Layer("w", (2, 3)), Layer("b", (2,))])
    >>> table.numel, table.numels, table is Table.of([Layer("w", (2, 3)), Layer("b", (2,))])
    (8, (6, 2), True)
    """

    @staticmethod
    def of(layers: Iterable[Layer]) -> Table:
        """Return the table of layers, made once."""
        return layers if isinstance(layers, Table) else _table(tuple(layers))

    @staticmethod
    def of_shapes(shapes: Iterable[Sequence[int]]) -> Table:
        """Return the table of nameless layers of these shapes."""
        return Table.of(Layer("", tuple(shape)) for shape in shapes)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Table.of, (tuple(self),)  # hashes of names differ between processes

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the layers."""
        return tuple(layer.name for layer in self)

    @cached_property
    def by_name(self) -> dict[str, Layer]:
        """The layers by name."""
        return {layer.name: layer for layer in self}

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Number of elements of each layer."""
        return tuple(layer.numel for layer in self)

    @cached_property
    def numel(self) -> int:
        """Number of elements of the vector."""
        return sum(self.numels)


@functools.lru_cache(2**12)
def stacks_apart(table: Table) -> Table:
    """Return the table with each matrix (n, m) of an expert stack (B, n, m) as a layer of its own."""
    apart: list[Layer] = []
    for layer in table:
        stacked = layer.role in STACKS and len(layer.shape) > 2
        apart += [Layer(layer.name, layer.shape[1:])] * layer.shape[0] if stacked else [layer]
    return Table.of(apart)


@functools.lru_cache(2**12)
def _table(layers: tuple[Layer, ...]) -> Table:
    return Table(layers)


class Batch(dict[str, torch.Tensor]):
    """Tensors of a group's layers, by name. Treat it as read-only.

    >>> from gradlab.codec import Batch
    >>> batch = Batch.of({"w": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([3.0])})
    >>> batch.vector, batch.cut(2 * batch.vector)
    (tensor([1., 2., 3.]), {'w': tensor([[2., 4.]]), 'b': tensor([6.])})
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], table: Table | None = None) -> None:
        super().__init__(tensors)
        self._table = table

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], layers: Iterable[Layer] = ()) -> Batch:
        """Return a batch of tensors. layers: say the roles of those that are among them; others are "other"."""
        if isinstance(tensors, Batch):
            return tensors
        if not layers:
            return cls(tensors)
        roles = {layer.name: layer.role for layer in layers}
        return cls(tensors, _described(tensors, roles))

    @property
    def table(self) -> Table:
        """The layers. Their roles are "other" if nobody said them."""
        if self._table is None:
            self._table = _described(self, {})
        return self._table

    @property
    def vector(self) -> torch.Tensor:
        """All elements (numel,), as a view if the tensors lie one after another in memory, else as a copy."""
        return concatenate(self)

    def like(self, tensors: Mapping[str, torch.Tensor]) -> Batch:
        """Return other tensors of the same layers as a batch."""
        return Batch(tensors, self._table)

    def cut(self, vector: torch.Tensor) -> Tensors:
        """Cut a vector (numel,) into views with the layers' names and shapes."""
        return separate(vector, self)


class Sums(Batch):
    """Sums of gradients and residuals, vectors (numel,), in memory (numel,) of their own.

    Only `vector` computes them. A kernel that adds while it compresses takes `source` instead, and leaves compression
    errors in that memory. Nobody may read the layers' tensors before either.
    """

    def __init__(self, grads: Batch, gradient: torch.Tensor, residual: torch.Tensor, memory: torch.Tensor) -> None:
        super().__init__(separate(memory, grads), grads.table)
        self.source, self.memory = Source(gradient, residual, memory), memory
        self._residual = residual

    @cached_property
    def vector(self) -> torch.Tensor:
        return torch.add(self.source.vector, self._residual, out=self.memory)


def _described(tensors: Mapping[str, torch.Tensor], roles: Mapping[str, str]) -> Table:
    """Return the table of tensors by name, with these roles."""
    return Table.of(layer_of(name, one.shape, roles.get(name, "other")) for name, one in tensors.items())


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

    >>> from gradlab.codec.batch import stacked
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
