"""From a pilot's excess to that of the end: each figure on a task that the law did not see.

    python benchmarks pilot_law

Reads benchmarks/results/pilots.jsonl: 11 tasks trained densely; from a tenth, four tenths and three quarters of their
steps every plan trained on to the end on the same batches, the first steps as its pilot. The first table has how many
ends were in the interval of the law of the other tasks (`gradlab.runtime.pilot.growth`), the second what a rule finds
that takes the plan with fewest bytes of those that it allows: in how many trainings one, how many of these ended within
the limit, and their bytes over the least that would have (median). The last line is the law of all tasks, which gradlab
ships.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rows import Row, grouped, read

from gradlab.runtime.pilot.growth import Growth, chance_of

LIMITS, STEPS = (0.005, 0.01, 0.05), "60"  # of the excess; of a pilot
CONTROL = "16 bits"
OUTSIDE = 0.03  # share of the ends that a law is fitted on, above and below its intervals
RESULTS = Path(__file__).parents[1] / "results"
DIGEST = RESULTS / "pilots.jsonl"


@dataclass(frozen=True)
class Cell:
    """A plan in a run: pilot, end, bytes. run: task, seed and place; pilot: excess, its interval, and chance."""

    task: str
    run: str
    pilot: tuple[float, float, float, float]
    end: float
    payload: float


def run_of(row: Row) -> str:
    return f"{row['task']} {row['seed']} {row['place']}"


def controls(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """By run, how far chance takes the control in its pilot, and how far its end is from dense's."""
    known = [row for row in rows if row["plan"] == CONTROL and row["pilots"].get(STEPS)]
    return {run_of(row): (chance_of(*row["pilots"][STEPS][1:]), abs(row["end"])) for row in known}


def cells(rows: Sequence[Row]) -> list[Cell]:
    found, chances = [], controls(rows)
    for row in rows:
        pilot = row["pilots"].get(STEPS)
        if pilot is not None and row["steps"] - row["begin"] > int(STEPS) and row["plan"] != CONTROL:
            excess, low, high = (math.inf if one is None else one for one in pilot)
            end = math.inf if row["end"] is None else row["end"]
            values = (excess, low, high, chances[run_of(row)][0])
            found.append(Cell(row["task"], run_of(row), values, end, 1 / row["ratio"]))
    return found


def law_of(rows: Sequence[Row]) -> Growth:
    """The law of some rows. A pilot that is not finite says nothing; chance: within it are nine of ten controls."""
    known = [one for one in cells(rows) if math.isfinite(one.pilot[0])]
    chance = np.quantile([end / max(pilot, 1e-6) for pilot, end in controls(rows).values()], 0.9)
    return fitted([one.pilot for one in known], [one.end for one in known], float(chance))


def fitted(pilots: Sequence[tuple[float, float, float, float]], ends: Sequence[float], chance: float) -> Growth:
    """Fit the factors, so that of these ends 94 % are in their intervals, which held nine tenths of other tasks.

    pilots: excess, its interval and the pilot's chance of each, as `Growth.end` takes them.
    ends: excess at the end, infinite where training diverged.
    """
    excess, low, high, apart = np.asarray(pilots, dtype=np.float64).T
    end, besides = np.asarray(ends, dtype=np.float64), chance * apart
    grown = np.where(end <= besides, 0.0, (end - besides) / np.maximum(high, 1e-12))
    told, known = low > 0, excess > besides
    shrunk = np.maximum(0.0, end[told] + besides[told]) / low[told]
    middle = float(np.median(end[known] / excess[known]))
    return Growth(_quantile(shrunk, OUTSIDE), middle, _quantile(grown, 1 - OUTSIDE), chance)


def _quantile(values: np.ndarray, share: float) -> float:
    """Return the value that a further one is below with this probability, if it is like these (split conformal)."""
    ordered = np.sort(values)
    at = math.ceil((len(ordered) + 1) * share) - 1 if share > 0.5 else math.floor((len(ordered) + 1) * share) - 1
    return float(ordered[min(max(at, 0), len(ordered) - 1)])


def law_without(task: str, rows: Sequence[Row]) -> Growth:
    return law_of([row for row in rows if row["task"] != task])


RULES: Mapping[str, Callable[[Cell, Growth, float], bool]] = {
    "pilot's excess": lambda one, law, limit: one.pilot[0] <= limit,
    "interval of the end": lambda one, law, limit: law.end(*one.pilot).high <= limit,
}


def tables(rows: Sequence[Row]) -> str:
    """Both tables: a line per task and one of all, then a line per limit and rule."""
    every = cells(rows)
    laws = {task: law_without(task, rows) for task in {one.task for one in every}}
    lines = ["task         cells  in the interval  above it"]
    for task, here in {**grouped(every, lambda one: one.task), "all": every}.items():
        ends = [(one.end, laws[one.task].end(*one.pilot)) for one in here]
        inside = sum(end.low <= came <= end.high for came, end in ends)
        above = sum(came > end.high for came, end in ends)
        lines.append(f"{task:12s} {len(here):5d}  {_share(inside, len(here)):>15s}  {_share(above, len(here)):>8s}")
    lines += ["", "limit   rule                      finds a plan  it held  bytes to least"]
    runs = list(grouped(every, lambda one: one.run).values())
    for limit in LIMITS:
        for name, allows in RULES.items():
            choices = [_choice(run, laws[run[0].task], allows, limit) for run in runs]
            made = [one for one in choices if one is not None]
            held = [bytes_to_least for held, bytes_to_least in made if held]
            lines.append(
                f"{100 * limit:<5g} %  {name:24s} {_share(len(made), len(runs)):>13s}  "
                f"{_share(len(held), len(made)):>7s}  {statistics.median(held):>14.2f}"
            )
    return "\n".join(lines)


def _share(count: int, of: int) -> str:
    return f"{100 * count / of:.0f} %"


def _choice(
    run: Sequence[Cell], law: Growth, allows: Callable[[Cell, Growth, float], bool], limit: float
) -> tuple[bool, float] | None:
    """Whether what a rule takes held, and its bytes over the least that would have; None: it takes nothing."""
    allowed = [one for one in run if allows(one, law, limit)]
    held = [one.payload for one in run if one.end <= limit]
    if not allowed:
        return None
    taken = min(allowed, key=lambda one: one.payload)
    return taken.end <= limit, taken.payload / min(held) if held else math.nan


def main() -> None:
    kept = read(DIGEST)
    print(f"{tables(kept)}\n\n{law_of(kept)}")
