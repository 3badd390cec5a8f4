"""Threads that run codecs of several groups at once, where a rank has cores to spare."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from gradlab.executor.ticks import Advancing, one_after_another

_MOST = 8  # codecs are bound by memory, which more threads do not make faster


class Cores:
    """Advances exchanges of different groups at once. What each computes does not depend on how many there are.

    Attributes:
        threads: at most at work at once.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def advance(self, turns: Sequence[tuple[Advancing, Sequence[Any] | None]]) -> None:
        """Advance several exchanges, and return when all of them stand at their next requests.

        Args:
            turns: exchanges, with the answers to their open requests; None to start.

        Raises:
            Exception: what the first of those that failed raised.
        """
        if self.threads == 1 or len(turns) < 2:
            one_after_another(turns)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="gradlab-codec")
        futures = [self._pool.submit(_advance, *turn) for turn in turns]
        errors = [future.exception() for future in futures]
        for error in filter(None, errors):
            raise error

    def close(self) -> None:
        """End the threads. Idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)


@torch.no_grad()
def _advance(exchange: Advancing, answers: Sequence[Any] | None) -> None:
    exchange.advance(answers)


def spare_cores() -> int:
    """Count the cores that this rank's share of the machine has beyond the threads that torch computes with.

    Returns:
        At least 1, the core of the engine itself, and at most 8.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    share = cores // max(1, int(ranks) if ranks.isdecimal() else 1)
    return min(_MOST, max(1, share - torch.get_num_threads()))
