"""How our own trainings with local steps went: the course of losses, and how far above synchronous training they ended.

`local_endings.json` has a row for each way, of nanoGPT's Shakespeare between four workers (docs/local-steps.md).
`python benchmarks local_steps_trained --write` makes it of the rows in benchmarks/results.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

UNCOMPRESSED, CODED = "uncompressed", "ecsq, 0.5 bits"


@dataclass(frozen=True)
class LocalEnding:
    """One way of training, mean of its seeds.

    plan: `UNCOMPRESSED` or `CODED`.
    every: local steps between two exchanges, H; 1: synchronous training.
    above: nats of validation loss above synchronous training at the end.
    window: steps, in each of which `course` has the mean loss of the workers' batches, in nats.
    """

    plan: str
    every: int
    above: float
    window: int
    course: tuple[float, ...]

    @property
    def middles(self) -> list[float]:
        """The steps in the middle of the course's windows."""
        return [self.window * (number + 0.5) for number in range(len(self.course))]


@cache
def local_endings() -> tuple[LocalEnding, ...]:
    """Read the trainings, by plan and H."""
    text = (resources.files("gradlab.analysis.forecast") / "local_endings.json").read_text("utf-8")
    return tuple(LocalEnding(**{**row, "course": tuple(row["course"])}) for row in json.loads(text))


def ended_above(plan: str = UNCOMPRESSED) -> Mapping[int, float]:
    """Return by H the nats of validation loss above synchronous training at which trainings ended."""
    return {one.every: one.above for one in local_endings() if one.plan == plan and one.every > 1}
