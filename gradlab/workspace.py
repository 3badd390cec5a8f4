"""Memory for tensors as large as gradients. On the CPU fresh memory costs more than the arithmetic done in it.

(A sum of two vectors of 11 million floats: 24 ms into new memory, whose pages the system first has to provide and
zero, 4 ms into old.) Codecs take large results from their context's workspace; the engine gives back, after each
iteration, what no state holds on to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch


class Workspace:
    """Allocates new memory for every tensor."""

    def empty(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Allocate a contiguous tensor. Its values are undefined.

        Args:
            shape: in elements.
            like: a tensor of the dtype and device.

        Returns:
            The tensor.
        """
        return like.new_empty(tuple(shape))

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Allocate a contiguous tensor of the shape, dtype and device of another. Its values are undefined.

        Args:
            tensor: the other.

        Returns:
            The new tensor.
        """
        return self.empty(tensor.shape, tensor)

    def zeros_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Allocate a contiguous tensor of zeros, of the shape, dtype and device of another.

        Args:
            tensor: the other.

        Returns:
            The new tensor.
        """
        return self.empty_like(tensor).zero_()


class RecyclingWorkspace(Workspace):
    """Reuses memory that `recycle` takes back. For one thread.

    Small tensors get new memory, and so do tensors on a GPU, where the caching allocator reuses it.
    """

    _SMALLEST = 64 * 1024  # bytes

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._lent: list[torch.Tensor] = []

    def empty(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        numel = math.prod(shape)
        if like.device.type != "cpu" or numel * like.element_size() < self._SMALLEST:
            return super().empty(shape, like)
        free = self._free.get((numel, like.dtype))
        flat = free.pop() if free else like.new_empty(numel)
        self._lent.append(flat)
        return flat.view(tuple(shape))

    def recycle(self, held: Iterable[torch.Tensor]) -> None:
        """Take back all memory but that of the tensors still held.

        Memory of a held tensor is taken back by the first `recycle` at which it is not held any more.
        """
        kept = {tensor.untyped_storage().data_ptr() for tensor in held}
        lent, self._lent, self._free = self._lent, [], {}
        for flat in lent:
            if flat.untyped_storage().data_ptr() in kept:
                self._lent.append(flat)
            else:
                self._free.setdefault((flat.numel(), flat.dtype), []).append(flat)

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use or free for reuse."""
        return sum(flat.nbytes for flat in (*self._lent, *(t for free in self._free.values() for t in free)))
