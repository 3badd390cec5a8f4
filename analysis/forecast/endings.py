"""Final losses of trainings whose replays had an error like a plan's: the calibration of the verdict.

`endings.json` has a row for each plan that was replayed on a recording and then trained with: the cosines of its
replay, by length of the window, and how far above dense its loss ended, beyond what 16 bits differ from dense by.
`python benchmarks judgements --write` makes it of the rows in benchmarks/results. A plan is compared with trainings of
its own kind. The kinds are plans that apply gradients of earlier steps and plans that do not: a sum of the first kind's
updates comes right with time, in a sum of the second kind's all that is missing stays missing, so that one cosine means
different things.

The trainings of a kind are ordered by the angle of their cosine. A window of an eighth of them moves over them by half
its length, and tells of the angles in its middle. Its range holds nine tenths of its trainings, and is never narrower
than that of a smaller angle. In the first window it shrinks to nothing at a cosine of 1. So the range grows with the
error, and a limit that allows a plan allows every plan with a smaller error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from statistics import median
from typing import Any

from gradlab.formatting import format_percent
from gradlab.jsonable import Jsonable

_FEWEST, _WINDOWS = 12, 8  # trainings of a window at least; windows side by side at most
_LEAST_TASKS = 3  # that a window's trainings are of: fewer tell nothing of another task
_INSIDE = 0.9  # share of a window's trainings that its range holds, at least
#: By how much the final loss may be above dense training's where nothing else is asked for (--max-loss).
MAX_LOSS = 0.01


def loss_limit_text(max_loss: float) -> str:
    """Write an allowed relative loss: "at most 1 % worse loss (--max-loss)"."""
    return f"at most {100 * max_loss:g} % worse loss (--max-loss)"


@dataclass(frozen=True)
class Ending:
    """A method that was trained with: its loss over dense training's, minus 1 (infinite: it diverged), and its cosines.

    memory: whether it applies gradients of earlier steps.
    cosines: cosines of its replay, by number of steps that are summed over.
    """

    task: str
    method: str
    memory: bool
    cosines: Mapping[int, float]
    excess: float


@dataclass(frozen=True)
class EndingRange(Jsonable):
    """Losses over dense training's, minus 1, of trainings with an error like a plan's: nine tenths, low to high."""

    low: float
    middle: float
    high: float
    least_cosine: float
    most_cosine: float
    methods: int

    def within(self, max_loss: float) -> bool:
        """Whether nine tenths of them ended at most so far above dense: a share of dense training's loss."""
        return self.high <= max_loss

    @property
    def text(self) -> str:
        """The range in prose: "0.3 % below to 4.1 % above dense"."""
        if self.low < 0 <= self.high:
            return f"{_size(self.low)} below to {_size(self.high)} above dense"
        return f"{_size(self.low)} to {_size(self.high)} {'above' if self.high >= 0 else 'below'} dense"


def _size(excess: float) -> str:
    return format_percent(abs(excess), 1) if math.isfinite(excess) else "without end"


@cache
def calibration() -> tuple[Ending, ...]:
    """Read the methods that were replayed and trained with, in order of the file."""
    text = (resources.files("gradlab.analysis.forecast") / "endings.json").read_text("utf-8")
    return tuple(
        Ending(
            row["task"],
            row["method"],
            row["memory"],
            {int(length): cosine for length, cosine in row["cosines"].items()},
            math.inf if row["excess"] is None else row["excess"],
        )
        for row in json.loads(text)
    )


def ended_at(cosine: float, length: int, memory: bool, known: Sequence[Ending] | None = None) -> EndingRange | None:
    """Look up the final losses of trainings of the plan's kind with a similar cosine; None if these are too few."""
    bands = _shipped(length, memory) if known is None else _bands(known, length, memory)
    angle = _angle(cosine)
    if not angle:
        return _NOTHING
    if not bands or angle > bands[-1].most_angle:
        return None
    band = next(band for band in bands if angle <= band.most_angle)
    if band is not bands[0]:
        return band.range
    whole, share = band.range, angle / band.most_angle
    return replace(whole, low=share * whole.low, middle=share * whole.middle, high=share * whole.high)


def may_end_within(max_loss: float, cosine: float, length: int, memory: bool) -> bool:
    """Whether a quarter of the trainings of the plan's kind with the most similar cosine ended within a limit."""
    bands, angle = _shipped(length, memory), _angle(cosine)
    found = next((band for band in bands if angle <= band.most_angle), bands[-1] if bands else None)
    return found is None or found.quarter <= max_loss


_NOTHING = EndingRange(0.0, 0.0, 0.0, 1.0, 1.0, 0)


@dataclass(frozen=True)
class _Band:
    """Angles up to `most_angle`, from that of the band before, and what a window of trainings around them ended at.

    quarter: a quarter of them ended at it or below.
    """

    most_angle: float
    range: EndingRange
    quarter: float


@cache
def _shipped(length: int, memory: bool) -> tuple[_Band, ...]:
    return _bands(calibration(), length, memory)


def _bands(known: Sequence[Ending], length: int, memory: bool) -> tuple[_Band, ...]:
    """Move a window over the trainings of a kind, up to the last place at which it has enough tasks."""
    among = sorted(
        (row for row in known if row.memory == memory and length in row.cosines),
        key=lambda row: _angle(row.cosines[length]),
    )
    angles = [_angle(row.cosines[length]) for row in among]
    width = max(_FEWEST, len(among) // _WINDOWS)
    bands, before = list[_Band](), _NOTHING
    for start in range(0, len(among) - width // 2, width // 2):
        last = start + width + width // 2 >= len(among)
        inside = among[start:] if last else among[start : start + width]
        if len({row.task for row in inside}) < _LEAST_TASKS:
            break
        before = _range_of(inside, length, before)
        quarter = sorted(row.excess for row in inside)[(len(inside) - 1) // 4]
        bands.append(_Band(angles[-1] if last else angles[start + 3 * width // 4 - 1], before, quarter))
        if last:
            break
    return tuple(bands)


def _range_of(rows: Sequence[Ending], length: int, before: EndingRange) -> EndingRange:
    """Return what nine tenths of a window's trainings ended at, no narrower than the window before."""
    ends, cosines = sorted(row.excess for row in rows), [row.cosines[length] for row in rows]
    outside = int((1 - _INSIDE) / 2 * len(ends))  # on each side
    return EndingRange(
        min(before.low, ends[outside]),
        max(before.middle, median(ends)),
        max(before.high, ends[-1 - outside]),
        min(cosines),
        max(cosines),
        len(rows),
    )


def _angle(cosine: float) -> float:
    return math.acos(min(1.0, max(-1.0, cosine)))


def judged_by(summary: Mapping[str, Any]) -> tuple[float | None, int | None, bool]:
    """Return what a replay's summary, as plain JSON, is judged by: cosine, length of the window, and kind."""
    return summary["judged_cosine"], summary["judged_length"], summary["memory"]


def standing(cosine: float | None, length: int | None, memory: bool) -> tuple[float, float]:
    """Return the sort key of plans, nearest to dense first: similar trainings' middle loss, minus the cosine."""
    if cosine is None or length is None:
        return math.inf, math.inf
    ended = ended_at(cosine, length, memory)
    return math.inf if ended is None else ended.middle, -cosine


def judgement_text(cosine: float | None, length: int | None, memory: bool, elsewhere: str = "") -> str:
    """Write a plan's judgement in prose: what trainings with a cosine like its own ended at. elsewhere: a remark on the
    cosine between other ranks than the recorded ones."""
    if cosine is None or length is None:
        return (
            "too few steps with an error were replayed to judge it" if memory else "what its update keeps is not known"
        )
    near = ended_at(cosine, length, memory)
    over = "" if length == 1 else f" over {length} steps"
    like = f"with a similar error (cosine {cosine:.2f}{over}{elsewhere})"
    return f"too few trainings {like} to tell" if near is None else f"{near.text} in 9 of 10 trainings {like}"
