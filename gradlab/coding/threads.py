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
    """Call a function for every part, and return the results in order, or raise the first part's error. Threads are
    `torch.get_num_threads()`: numpy, zlib and torch let others go on."""
    threads = min(torch.get_num_threads(), len(parts))
    if threads < 2:
        return [function(part) for part in parts]
    return list(_pool(torch.get_num_threads()).map(function, parts))


@functools.lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="gradlab-coding")
