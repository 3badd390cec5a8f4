"""What training ended at with plans whose replays had a similar cosine: the calibration of the verdict.

`endings.json` has a row for each method that was replayed on a recording and then trained with, on the tasks of
docs/comparison.md and docs/text.md: the cosines of its replay, by length of the window, and how far above dense its
loss ended. `benchmarks/judgements.py --write` makes it of the rows in benchmarks/results. Of a new plan the methods of
its own kind are looked up whose cosine lies next to its own. The kinds are plans that apply gradients of earlier steps
and plans that do not: a sum of the first kind's updates comes right with time, in a sum of the second kind's all that
is missing stays missing, so that one cosine means different things. The methods are few, on small tasks: their range is
an observation, no bound.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from statistics import median

from gradlab.errors import GradlabError
from gradlab.formatting import format_percent
from gradlab.jsonable import Jsonable

NEIGHBOURS = 5
#: By how much the final loss may be above dense training's where nothing else is asked for (--max-loss).
MAX_LOSS = 0.01


def loss_limit_text(max_loss: float) -> str:
    """Write an allowed loss as sentences that decide by it name it: "at most 1 % worse loss (--max-loss)".

    Args:
        max_loss: the final loss over dense training's, minus 1.
    """
    return f"at most {100 * max_loss:g} % worse loss (--max-loss)"


@dataclass(frozen=True)
class Ending:
    """A method that was trained with.

    memory: whether it applies gradients of earlier steps.
    cosines: of its replay, by number of steps that are summed over.
    excess: its loss over dense training's, minus 1; infinite if it diverged.
    """

    task: str
    method: str
    memory: bool
    cosines: Mapping[int, float]
    excess: float


@dataclass(frozen=True)
class EndingRange(Jsonable):
    """Losses over dense training's, minus 1, of the methods whose cosines are nearest to a plan's.

    low, middle, high: the least, the median and the largest; infinite if it diverged.
    least_cosine, most_cosine: of these methods.
    methods: their number.
    """

    low: float
    middle: float
    high: float
    least_cosine: float
    most_cosine: float
    methods: int

    def within(self, max_loss: float) -> bool:
        """Whether all of them ended at most so far above dense: a share of dense training's loss."""
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


def ended_at(
    cosine: float, length: int, memory: bool, known: Sequence[Ending] | None = None, neighbours: int = NEIGHBOURS
) -> EndingRange:
    """Look up the trainings of a plan's own kind whose replayed cosines lie nearest to its own.

    Nearness is that of angles, because cosines crowd at 1.

    Args:
        cosine: of a replay, as `Replay.judgement` has it.
        length: steps that are summed over.
        memory: whether the plan applies gradients of earlier steps.
        known: the trainings to look among. None: the calibration that comes with gradlab.
        neighbours: how many are looked up.

    Returns:
        The range of what they ended at.

    Raises:
        GradlabError: where there is no training of this kind with windows of this length.
    """
    near = nearest(cosine, length, memory, calibration() if known is None else known, neighbours)
    if not near:
        raise GradlabError(f"no training {'with' if memory else 'without'} memory over {length} steps to compare with")
    ends, cosines = [row.excess for row in near], [row.cosines[length] for row in near]
    return EndingRange(min(ends), median(ends), max(ends), min(cosines), max(cosines), len(near))


def nearest(
    cosine: float, length: int, memory: bool, known: Sequence[Ending], neighbours: int = NEIGHBOURS
) -> list[Ending]:
    """List the trainings of a plan's own kind whose cosines lie nearest to its own, the nearest first.

    Args:
        cosine, length, memory, neighbours: as `ended_at` takes them.
        known: the trainings to look among.

    Returns:
        At most so many; none where no training of this kind has windows of this length.
    """
    among = [row for row in known if row.memory == memory and length in row.cosines]
    # A stable order: of two that are as near, the one that stands first.
    return sorted(among, key=lambda row: abs(_angle(row.cosines[length]) - _angle(cosine)))[:neighbours]


def _angle(cosine: float) -> float:
    return math.acos(min(1.0, max(-1.0, cosine)))


def judgement_text(cosine: float, length: int, memory: bool) -> str:
    """Write a plan's judgement in prose: its cosine, and what trainings with similar cosines ended at.

    Args:
        cosine, length, memory: as `ended_at` takes them.

    Returns:
        Words that follow "plan X is fast;".
    """
    near = ended_at(cosine, length, memory)
    over = "" if length == 1 else f" summed over {length} steps"
    return (
        f"its update{over} has a cosine of {cosine:.2f} with the true mean as replayed, and the {near.methods} methods "
        f"nearest to that in our trainings ended {near.text} in loss"
    )
