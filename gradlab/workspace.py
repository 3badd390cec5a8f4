"""Memory for tensors as large as gradients. On the CPU fresh memory costs more than the arithmetic done in it.

(A sum of two vectors of 11 million floats: 24 ms into new memory, whose pages the system first has to provide and
zero, 4 ms into old.) Codecs take large results from their context's workspace. The engine gives back a group's mean and
compressor input as soon as the mean is applied, so that the next group of that size uses their memory, and after each
iteration all that no state holds on to.
"""

from __future__ import annotations

import math
import threading
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
    """Reuses memory that `recycle` takes back. Several threads may use it.

    Small tensors get new memory, and so do tensors on a GPU, where the caching allocator reuses it.
    """

    _SMALLEST = 64 * 1024  # bytes

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._lent: dict[int, torch.Tensor] = {}  # by address
        self._used: set[int] = set()  # addresses of what was lent since the last `recycle`
        self._lock = threading.Lock()

    def empty(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        numel = math.prod(shape)
        if like.device.type != "cpu" or numel * like.element_size() < self._SMALLEST:
            return super().empty(shape, like)
        with self._lock:
            free = self._free.get((numel, like.dtype))
            flat = free.pop() if free else like.new_empty(numel)
            self._lent[flat.data_ptr()] = flat
            self._used.add(flat.data_ptr())
        return flat.view(tuple(shape))

    def give_back(self, tensors: Iterable[torch.Tensor], held: Iterable[torch.Tensor]) -> None:
        """Take back memory before the next `recycle`.

        What `tensors` use a part of stays: the rest of it may be another group's, as in a message of several groups.

        Args:
            tensors: not used any more.
            held: tensors that may share their memory and are still used.
        """
        apart = {(tensor.data_ptr(), tensor.nbytes): tensor for tensor in tensors if tensor.is_contiguous()}
        given: dict[int, int] = {}  # bytes by address of the memory
        for tensor in apart.values():
            address = tensor.untyped_storage().data_ptr()
            given[address] = given.get(address, 0) + tensor.nbytes
        kept = {tensor.untyped_storage().data_ptr() for tensor in held}
        with self._lock:
            for address in given.keys() - kept:
                if address in self._lent and given[address] == self._lent[address].nbytes:
                    self._set_free(self._lent.pop(address))

    def recycle(self, held: Iterable[torch.Tensor]) -> None:
        """Take back all memory but that of the tensors still held, and give up what was not used since the last time.

        Memory of a held tensor is taken back by the first `recycle` at which it is not held any more.
        """
        kept = {tensor.untyped_storage().data_ptr() for tensor in held}
        with self._lock:
            free, self._free = self._free, {}
            for flat in (flat for of_size in free.values() for flat in of_size if flat.data_ptr() in self._used):
                self._set_free(flat)
            self._used.clear()
            for address in self._lent.keys() - kept:
                self._set_free(self._lent.pop(address))

    def _set_free(self, flat: torch.Tensor) -> None:
        self._free.setdefault((flat.numel(), flat.dtype), []).append(flat)

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use or free for reuse."""
        return sum(flat.nbytes for flat in (*self._lent.values(), *(t for free in self._free.values() for t in free)))
