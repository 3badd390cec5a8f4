"""Work on parts that do not depend on one another, by as many threads as torch computes with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Part = TypeVar("Part")
Result = TypeVar("Result")


def each(function: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
    """Call a function for every part, and return the results in order.

    There are as many threads as `torch.get_num_threads()` says, and so OMP_NUM_THREADS. Where that is one, as under
    torchrun unless somebody sets it, the calling thread does it all.

    Args:
        function: spends its time in numpy, zlib or torch, which let other threads go on meanwhile.
        parts: what it is called for.

    Raises:
        Exception: what the function raised for the first part for which it did.
    """
    threads = min(torch.get_num_threads(), len(parts))
    if threads < 2:
        return [function(part) for part in parts]
    return list(_pool(torch.get_num_threads()).map(function, parts))


@functools.lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="gradlab-coding")
