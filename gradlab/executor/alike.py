"""Compute once what all ranks of one process have in common."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class Shared:
    """Values that the ranks of one exchange compute alike, and the seconds these took of processors and of the clock.
    The n-th call of one rank is the n-th of every other: all run the same code."""

    def __init__(self, ranks: int) -> None:
        self.seconds = self.wall_seconds = 0.0
        self._ranks = ranks
        self._results: dict[int, tuple[object, int]] = {}  # by number of the call: the result, and who still wants it

    def of_a_rank(self) -> Callable[[Callable[[], Result]], Result]:
        """Make the function of one rank that computes what is alike, see `Context.once`."""
        number = -1

        def alike(compute: Callable[[], Result]) -> Result:
            nonlocal number
            number += 1
            return self._result(number, compute)

        return alike

    def _result(self, number: int, compute: Callable[[], Result]) -> Result:
        if number not in self._results:
            processor, wall = time.process_time(), time.perf_counter()
            self._results[number] = compute(), self._ranks
            self.seconds += time.process_time() - processor
            self.wall_seconds += time.perf_counter() - wall
        result, wanted = self._results[number]
        if wanted == 1:
            del self._results[number]
        else:
            self._results[number] = result, wanted - 1
        return result  # type: ignore[return-value]
