"""A recording that is under way: what is shown of a trace's folder."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradlab.cli.watch.view import Rows, Series, View, written
from gradlab.formatting import format_bytes, format_count, format_percent, format_seconds
from gradlab.jsonable import plain
from gradlab.trace import GrowingTrace, RankProgress, TraceProgress

_MOST_RANKS = 16  # that are listed
_RATE_SECONDS = 30.0  # that the rate of writing is a mean over
_SETTLING_SECONDS = 0.3  # after which a file that was half written is whole
_KEPT = 4096  # rates
_STATES = {
    "recording": "recording",
    "closed": "closed",
    "open": "open: killed (gradlab trace repair closes it), or recorded on another machine",
    "stopped": "stopped before it was closed (gradlab trace repair closes it)",
    "not begun": "not begun",
}


class WatchedTrace:
    """How far a recording is, look by look.

    Args:
        folder: of the trace.

    Raises:
        GradlabError: if it is no trace.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._trace = folder, GrowingTrace(folder)
        self._looks: deque[tuple[float, int]] = deque()  # seconds of a clock that never jumps, and bytes
        self._grown = (0.0, -1)  # the look at which there were more bytes than before
        self._rates: deque[tuple[int, float]] = deque(maxlen=_KEPT)  # last iteration, bytes per second
        self.look()

    @property
    def ended(self) -> bool:
        """Whether every rank has closed its recording."""
        return self._progress.state == "closed"

    def look(self) -> None:
        """Read how far it is."""
        self._progress = self._trace.look()
        now, nbytes = time.monotonic(), self._progress.nbytes
        if self._looks and nbytes < self._looks[-1][1]:  # another recording took its place
            self._looks.clear()
            self._grown = (0.0, -1)
        self._looks.append((now, nbytes))
        while len(self._looks) > 2 and now - self._looks[1][0] > _RATE_SECONDS:
            self._looks.popleft()
        self._note_rate(now, nbytes)

    def _note_rate(self, now: float, nbytes: int) -> None:
        """Keep the rate since the last look that found more: a recorder writes blocks of steps, not single ones."""
        seconds, before = self._grown
        if nbytes == before:
            return
        if before >= 0 and len(self._progress.iterations):
            self._rates.append((int(self._progress.iterations[-1]), (nbytes - before) / max(now - seconds, 1e-9)))
        self._grown = (now, nbytes)

    def settle(self) -> None:
        """Look again if a file could not be read: it may have been half written."""
        if self._trace.unsettled:
            time.sleep(_SETTLING_SECONDS)
            self.look()

    @property
    def bytes_per_second(self) -> float | None:
        """Of the last 30 seconds of watching; at first and at the end, the mean of the recording. None: not known."""
        (began, before), (now, nbytes) = self._looks[0], self._looks[-1]
        if now - began > 1 and not self.ended:
            return (nbytes - before) / (now - began)
        return self._progress.bytes_per_second

    def to_json(self) -> dict[str, Any]:
        """How far it is, for scripts."""
        progress = self._progress
        last = {"loss": last_of(progress.losses), "learning_rate": last_of(progress.learning_rates)}
        values: dict[str, Any] = {
            "state": progress.state,
            "world_size": progress.manifest.world_size,
            "common_steps": progress.common_steps,
            "most_steps": progress.most_steps,
            "last_iteration": int(progress.iterations[-1]) if len(progress.iterations) else None,
            "last": last,
            "nbytes": progress.nbytes,
            "bytes_per_second": self.bytes_per_second,
            "budget": progress.budget,
            "non_finite": progress.non_finite,
            "written": progress.written,
            "ranks": progress.ranks,
            "problems": progress.problems,
        }
        return {name: plain(value) for name, value in values.items()}

    def view(self) -> View:
        """What to show: how far it is, bytes, the loss, and every rank."""
        progress = self._progress
        series = [_series("loss", progress), _series("learning_rate", progress)]
        if self._rates:
            steps, rates = zip(*self._rates, strict=True)
            series.append(Series("bytes_per_second", steps, rates))
        return View(
            str(self._folder),
            head(progress),
            facts=facts(progress, self.bytes_per_second, time.time()),
            series=[one for one in series if one is not None],
            tables=[ranks_table(progress.ranks)] if progress.ranks else [],
            problems=progress.problems,
        )


def _series(name: str, progress: TraceProgress) -> Series | None:
    """What was annotated, by iteration; None if nothing was."""
    values = {"loss": progress.losses, "learning_rate": progress.learning_rates}[name]
    if np.isnan(values).all():
        return None
    finite = [float(value) if math.isfinite(value) else None for value in values]
    return Series(name, progress.iterations.tolist(), finite, drawn=name == "loss")


def head(progress: TraceProgress) -> str:
    """Say in one line how far a recording is."""
    ranks, there = progress.manifest.world_size, len(progress.ranks)
    most = "" if progress.most_steps is None else f" of at most {progress.most_steps}"
    begun = "" if there == ranks else f", of which {there} have begun"
    return f"{progress.common_steps}{most} steps on all {ranks} ranks{begun}, {_STATES[progress.state]}"


def facts(progress: TraceProgress, bytes_per_second: float | None, now: float) -> list[tuple[str, str]]:
    """Name what is known of a recording as a whole.

    Args:
        progress: how far it is.
        bytes_per_second: that it is written at; None: not known.
        now: seconds since 1970.
    """
    since = format_seconds(max(0.0, now - progress.written))
    found = [("written", f"{format_bytes(progress.nbytes)}, the last of it {since} ago")]
    if bytes_per_second is not None:
        found.append(("rate", written("bytes_per_second", bytes_per_second)))
    if progress.budget is not None:
        left = progress.budget - progress.nbytes
        share = format_percent(left / progress.budget, 0)
        found.append(("budget", f"{format_bytes(progress.budget)}, {format_bytes(left)} left ({share})"))
    if lost := sum(rank.steps_lost for rank in progress.ranks):
        found.append(("steps lost, of all ranks", format_count(lost)))
    if progress.non_finite:
        found.append(("elements that are not finite", format_count(progress.non_finite)))
    return found


def ranks_table(ranks: Sequence[RankProgress]) -> Rows:
    """List the ranks; of many, those that are furthest behind."""
    listed = list(ranks) if len(ranks) <= _MOST_RANKS else sorted(ranks, key=lambda rank: rank.steps)[:_MOST_RANKS]
    cells = [
        (
            str(rank.rank),
            str(rank.steps),
            "-" if rank.last_iteration is None else str(rank.last_iteration),
            str(rank.steps_lost),
            format_bytes(rank.nbytes),
            rank.state,
        )
        for rank in listed
    ]
    if len(ranks) > _MOST_RANKS:
        cells.append((f"and {len(ranks) - _MOST_RANKS} more", "", "", "", "", ""))
    return Rows("ranks", ("rank", "steps", "last iteration", "lost", "bytes", "state"), cells)


def last_of(values: np.ndarray) -> float | None:
    """Return the last value; None if there is none, or it is not finite."""
    return float(values[-1]) if len(values) and math.isfinite(values[-1]) else None
