"""Search each family's settings by replay for the limit: the last one whose replay is within the allowed loss.

Bytes fall and errors grow along a family's settings, so that bisection finds the limit in about log2 of their number
of replays. A replay measures, and a measured curve need not be monotone: where a setting that sends fewer bytes has
the smaller error, the settings before the limit are replayed too, and the limit is put before the first that fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from gradlab.analysis.forecast.candidates import Candidate, Family
from gradlab.analysis.forecast.speed import Judged
from gradlab.analysis.replay import replay_plans
from gradlab.analysis.replay.result import Replay
from gradlab.errors import GradlabError
from gradlab.formatting import format_counted, format_seconds
from gradlab.progress import Progress

if TYPE_CHECKING:
    from gradlab.trace import Trace

#: Steps of a search's replays: the fewest that plans with feedback are judged by.
SEARCH_STEPS = 8
#: Replays of one search, at most.
MOST_REPLAYS = 48
_RISE = 0.9  # an error below this share of an earlier setting's is more than chance


@dataclass(frozen=True)
class Measured:
    """A replayed setting: whether it is within the limit, and its error, 1 minus the cosine."""

    within: bool
    error: float


def bracket(known: Mapping[int, Measured], count: int) -> tuple[int, int]:
    """Return the last position within the limit before the first outside (or -1), and that first one (or `count`)."""
    outside = min((place for place, one in known.items() if not one.within), default=count)
    return max((place for place in known if place < outside), default=-1), outside


def next_place(known: Mapping[int, Measured], count: int, start: int) -> int | None:
    """Choose the setting to replay next.

    >>> from gradlab.analysis.forecast.search import Measured, next_place
    >>> next_place({}, 9, 4), next_place({4: Measured(True, 0.01)}, 9, 4)
    (4, 6)
    None: the limit and its neighbour are known.
    """
    if not known:
        return start
    low, high = bracket(known, count)
    if high - low > 1:
        return (low + high) // 2
    if _rises(known):
        return max((place for place in range(low) if place not in known), default=None)
    return None


def _rises(known: Mapping[int, Measured]) -> bool:
    """Whether a setting that sends less has a clearly smaller error than one before it."""
    errors = [known[place].error for place in sorted(known)]
    return any(later < _RISE * earlier for earlier, later in pairwise(errors))


@dataclass
class Searched:
    """The replays of a search, by family and position, and its warnings."""

    families: Mapping[str, Family]
    max_loss: float
    replays: dict[str, dict[int, Replay]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def known(self, family: str) -> dict[int, Measured]:
        """Judge a family's replays, by position."""
        return {place: measured(replay, self.max_loss) for place, replay in self.replays.get(family, {}).items()}

    def limit(self, family: str) -> int | None:
        """Position of the last setting within the limit, or of the one that sends most of those measured."""
        known = self.known(family)
        low, _ = bracket(known, len(self.families[family].candidates))
        return min(known, default=None) if low < 0 else low

    def candidate(self, family: str, place: int) -> Candidate:
        """One of the settings."""
        return self.families[family].candidates[place]

    @property
    def count(self) -> int:
        """Number of replays."""
        return sum(map(len, self.replays.values()))


def measured(replay: Replay, max_loss: float) -> Measured:
    """Judge a replay. Without a cosine its error counts as 1."""
    judged = Judged.of(replay)
    return Measured(judged.within(max_loss), 1.0 if judged.cosine is None else 1.0 - judged.cosine)


def search(
    trace: Trace,
    families: Mapping[str, Family],
    *,
    max_loss: float,
    seconds: float,
    steps: int = SEARCH_STEPS,
    nodes: int | None = None,
    workers: int = 1,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Searched:
    """Bisect each family's settings by replays of the last steps of a trace.
    The result depends on the trace alone, unless `seconds` run out, which a remark says.
    """
    found = Searched(dict(families), max_loss)
    began, start = clock(), max(0, len(trace.steps) - steps)
    while places := _round(found):
        if found.count and (clock() - began >= seconds or found.count + len(places) > MOST_REPLAYS):
            found.remarks.append(_stopped(found, places, clock() - began))
            break
        plans = {family: found.candidate(family, place).plan for family, place in places.items()}
        replays = replay_plans(trace, plans, start=start, nodes=nodes, workers=workers, progress=progress)
        for family, result in replays.items():
            if isinstance(result, GradlabError):
                found.remarks.append(f"{found.candidate(family, places[family]).name}: {result}")
                found.families = {name: one for name, one in found.families.items() if name != family}
                found.replays.pop(family, None)
            else:
                found.replays.setdefault(family, {})[places[family]] = result
    return found


def _round(found: Searched) -> dict[str, int]:
    """The setting that each family replays next; families that are done are left out."""
    places = {
        name: next_place(found.known(name), len(family.candidates), family.start)
        for name, family in found.families.items()
    }
    return {name: place for name, place in places.items() if place is not None}


def _stopped(found: Searched, places: Mapping[str, int], seconds: float) -> str:
    return (
        f"The search for settings stopped after {format_counted(found.count, 'replay')} in {format_seconds(seconds)}: "
        f"settings of {', '.join(places)} between those replayed were not tried."
    )
