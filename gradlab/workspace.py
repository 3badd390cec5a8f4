"""Memory for tensors as large as gradients. On the CPU fresh memory costs more than the arithmetic done in it.

(A sum of two vectors of 11 million floats: 24 ms into new memory, whose pages the system first has to provide and
zero, 4 ms into old.) Codecs take large results from their context's workspace. Memory comes back when the last tensor
in it is gone: that of a group's mean and compressor input as soon as the mean is applied, so that the next group of
that size uses it.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Sequence

import torch


class Workspace:
    """Allocates new memory for every tensor."""

    def empty(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Allocate a contiguous tensor of the dtype and device of another. Its values are undefined."""
        return like.new_empty(tuple(shape))

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Allocate a contiguous tensor of the shape, dtype and device of another. Its values are undefined."""
        return self.empty(tensor.shape, tensor)

    def zeros_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Allocate a contiguous tensor of zeros, of the shape, dtype and device of another."""
        return self.empty_like(tensor).zero_()


class RecyclingWorkspace(Workspace):
    """Lends memory again once no tensor is in it any more. Several threads may use it. Small tensors get new memory,
    and so do those on a GPU: the caching allocator reuses it."""

    _SMALLEST = 2**20  # bytes, from which on new memory takes longer than the lending does

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._lent: dict[int, torch.Tensor] = {}  # by address
        self._used: set[int] = set()  # addresses of what was lent at the last `recycle` or since
        # What nobody uses any more, which is noticed in any thread, at any moment, also while the lock is held.
        self._returned: deque[torch.Tensor] = deque()
        self._lock = threading.Lock()

    def empty(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        numel = math.prod(shape)
        if numel * like.element_size() < self._SMALLEST or not like.is_cpu:
            return like.new_empty(tuple(shape))
        with self._lock:
            self._take_back()
            free = self._free.get((numel, like.dtype))
            flat = free.pop() if free else like.new_empty(numel)
            self._lent[flat.data_ptr()] = flat
            self._used.add(flat.data_ptr())
        return self._lend(flat).view(tuple(shape))

    def recycle(self) -> None:
        """End an iteration: give up the memory that it did not need."""
        with self._lock:
            self._take_back()
            free, self._free = self._free, {}
            for flat in (flat for of_size in free.values() for flat in of_size if flat.data_ptr() in self._used):
                self._set_free(flat)
            self._used = set(self._lent)

    def _lend(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the memory of another one, which comes back when all tensors in it are gone."""
        # Tensors share a storage, of which Python sees no end. A storage in an array's memory holds the array.
        memory = flat.view(torch.uint8).numpy()
        weakref.finalize(memory, self._returned.append, flat).atexit = False
        return torch.from_numpy(memory).view(flat.dtype)

    def _take_back(self) -> None:
        while self._returned:
            flat = self._returned.popleft()
            self._set_free(self._lent.pop(flat.data_ptr()))

    def _set_free(self, flat: torch.Tensor) -> None:
        self._free.setdefault((flat.numel(), flat.dtype), []).append(flat)

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use or free for reuse."""
        with self._lock:
            self._take_back()
            return sum(t.nbytes for t in (*self._lent.values(), *(t for free in self._free.values() for t in free)))
