"""A recording that is under way: what is shown of a trace's folder."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradlab.formatting import format_bytes, format_count, format_percent, format_seconds
from gradlab.jsonable import plain
from gradlab.trace.growing import GrowingTrace, RankProgress

_MOST_RANKS = 16  # that are listed
_RATE_SECONDS = 30.0  # that the rate of writing is a mean over
_SETTLING_SECONDS = 0.3  # after which a file that was half written is whole


class WatchedTrace:
    """How far a recording is, look by look."""

    def __init__(self, folder: Path) -> None:
        self.path, self._trace = folder, GrowingTrace(folder)
        self._looks: deque[tuple[float, int]] = deque()  # seconds of a clock that never jumps, and bytes
        self.look()
        if self._trace.unsettled:  # a file that may have been half written
            time.sleep(_SETTLING_SECONDS)
            self.look()

    @property
    def ended(self) -> bool:
        """Whether every rank has closed its recording."""
        return self._progress.closed

    def look(self) -> None:
        """Read how far it is."""
        self._progress = self._trace.look()
        now, nbytes = time.monotonic(), self._progress.nbytes
        if self._looks and nbytes < self._looks[-1][1]:  # another recording took its place
            self._looks.clear()
        self._looks.append((now, nbytes))
        while len(self._looks) > 2 and now - self._looks[1][0] > _RATE_SECONDS:
            self._looks.popleft()

    @property
    def bytes_per_second(self) -> float | None:
        """Mean of the last 30 seconds of watching; None: it was not watched for a second yet."""
        (began, before), (now, nbytes) = self._looks[0], self._looks[-1]
        return (nbytes - before) / (now - began) if now - began > 1 else None

    def to_json(self) -> dict[str, Any]:
        """How far it is, for scripts."""
        progress = self._progress
        names = "closed common_steps last_iteration most_steps nbytes budget written ranks problems"
        values = {name: plain(getattr(progress, name)) for name in names.split()}
        return {"world_size": progress.manifest.world_size, **values}

    def lines(self) -> list[str]:
        """How far the recording is, bytes and their rate, the budget, and steps that were lost."""
        progress, rate = self._progress, self.bytes_per_second
        ranks, there = progress.manifest.world_size, len(progress.ranks)
        most = "" if progress.most_steps is None else f" of at most {progress.most_steps}"
        begun = "" if there == ranks else f" ({there} began)"
        state = "closed" if progress.closed else "open"
        since = format_seconds(max(0.0, time.time() - progress.written))
        found = [
            f"{progress.common_steps}{most} steps on each of {ranks} ranks{begun}, {state}",
            f"written: {format_bytes(progress.nbytes)}, last {since} ago",
        ]
        if rate is not None and not progress.closed:
            found.append(f"rate: {format_bytes(rate)}/s")
        if progress.budget is not None:
            left = progress.budget - progress.nbytes
            share = format_percent(left / progress.budget, 0)
            found.append(f"budget: {format_bytes(progress.budget)}, {format_bytes(left)} left ({share})")
        if lost := sum(rank.steps_lost for rank in progress.ranks):
            found.append(f"lost: {format_count(lost)} steps over all ranks")
        return found if progress.closed else [*found, "after its run was killed, gradlab trace repair closes it"]

    def tables(self) -> list[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
        """Titles, columns and cells: the ranks."""
        columns = ("rank", "steps", "last iteration", "lost", "bytes", "state")
        return [("ranks", columns, rank_cells(self._progress.ranks))] if self._progress.ranks else []

    def remarks(self) -> tuple[str, Sequence[str]]:
        """Title and lines: problems."""
        return "problems:", self._progress.problems


def rank_cells(ranks: Sequence[RankProgress]) -> list[tuple[str, ...]]:
    """List the ranks; of many, those that are furthest behind."""
    listed = ranks if len(ranks) <= _MOST_RANKS else sorted(ranks, key=lambda rank: rank.steps)[:_MOST_RANKS]
    cells: list[tuple[str, ...]] = []
    for one in listed:
        last, state = "-" if one.last_iteration is None else str(one.last_iteration), "closed" if one.closed else "open"
        cells.append((str(one.rank), str(one.steps), last, str(one.steps_lost), format_bytes(one.nbytes), state))
    if len(ranks) > _MOST_RANKS:
        cells.append((f"and {len(ranks) - _MOST_RANKS} more", "", "", "", "", ""))
    return cells
