"""Tell which rank is slow: each leaves the time of its steps in the process group's store, so that no collective is
needed. Ranks that wait for each other in a step all take as long; they differ in the time to their last gradient."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from statistics import median, median_low
from typing import Any

from gradlab.ddp.step_clock import Moment, Span, seconds_between

_EVERY = 1.0  # seconds from one message to the store to the next
_FEWEST, _RECENT = 3, 50  # steps that a time is the median of


class RankTimes:
    """This rank's view of all ranks' times.

    Args:
        store: a store that all ranks reach, or None.
        prefix: prefix of the run's keys, the same on all ranks.
        rank: this rank.
        names: what messages call all ranks, in their order.
    """

    def __init__(self, store: Any, prefix: str, rank: int, names: Sequence[int]) -> None:
        self._store, self._rank, self._names = store if len(names) > 1 else None, rank, names
        self._keys = [f"{prefix}/ready/{one}" for one in range(len(names))]
        self._told = -math.inf
        self._steps: deque[Span] = deque(maxlen=_RECENT)

    def tell(self, ended: Moment | None, ready: Moment | None) -> None:
        """Note the end of the step before and this rank's last gradient, and leave the median of the seconds between
        them for the others, once a second."""
        if self._store is None:
            return
        self._steps.append((ended, ready))
        now = time.monotonic()
        if now - self._told < _EVERY:
            return
        seconds = [one for one in (seconds_between(*step) for step in self._steps) if math.isfinite(one)]
        if len(seconds) >= _FEWEST:
            self._told = now
            with suppress(Exception):  # it is gone with the rank that holds it
                self._store.set(self._keys[self._rank], repr(median(seconds)))

    def numbers(self) -> dict[str, float]:
        """Return by name the slowest rank, its seconds to the last gradient, and those of the usual rank; empty before
        all ranks have told theirs."""
        with suppress(Exception):
            if self._store is not None and self._store.check(self._keys):
                return slowest([float(one) for one in self._store.multi_get(self._keys)], self._names)
        return {}


def slowest(seconds: Sequence[float], names: Sequence[int]) -> dict[str, float]:
    """Name the rank that takes longest. The faster one of two is the usual."""
    rank = max(range(len(seconds)), key=seconds.__getitem__)
    return {
        "slowest_rank": float(names[rank]),
        "slowest_rank_seconds": seconds[rank],
        "usual_rank_seconds": median_low(seconds),
    }
