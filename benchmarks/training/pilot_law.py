"""From a pilot's excess to that of the end: each figure on a task that the law did not see.

    python benchmarks pilot_law

Reads benchmarks/results/pilots.jsonl, which pilots.py makes. First table: of each task, Spearman's rank correlation of
pilots with ends (median over seeds and places), the median factor from a pilot to the end, and how many ends were in
the interval of the law of the other tasks, `gradlab.runtime.pilot.growth`.

Second table: what a rule finds that takes the plan with fewest bytes of those that it allows: in how many trainings
it finds one, how many of these ended within the limit, and their bytes over the least that would have (median).

Third table: the same by the place of training at which pilots begin.

Then what a race (`gradlab.runtime.pilot.result`) saves, and the law of all tasks, which gradlab ships.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from pilots import CONTROL, DIGEST, PLACES
from rows import Row, read

from gradlab.analysis.intervals import rank_correlation
from gradlab.runtime.pilot.growth import GROWTH, Growth, chance_of, fitted

LIMITS = (0.005, 0.01, 0.05)


@dataclass(frozen=True)
class Cell:
    """A plan in a run: pilot, end, bytes. run: task, seed and place; pilot: excess, its interval, and chance."""

    task: str
    run: str
    plan: str
    pilot: tuple[float, float, float, float]
    end: float
    payload: float
    raced: int


def controls(rows: Sequence[Row], steps: int) -> dict[str, tuple[float, float]]:
    """By run, how far chance takes the control in its pilot, and how far its end is from dense's."""
    found = {}
    for row in rows:
        if row["plan"] == CONTROL and (pilot := row["pilots"].get(str(steps))):
            found[_run(row)] = chance_of(pilot[1], pilot[2]), abs(row["end"])
    return found


def _run(row: Row) -> str:
    return f"{row['task']} {row['seed']} {row['place']}"


def cells(rows: Sequence[Row], steps: int = 60) -> list[Cell]:
    """The rows that have a pilot of so many steps, and trained on after it."""
    found, chances = [], controls(rows, steps)
    for row in rows:
        pilot = row["pilots"].get(str(steps))
        if pilot is not None and row["steps"] - row["begin"] > steps and row["plan"] != CONTROL:
            excess, low, high = (math.inf if one is None else one for one in pilot)
            end = math.inf if row["end"] is None else row["end"]
            values = (excess, low, high, chances[_run(row)][0])
            found.append(Cell(row["task"], _run(row), row["plan"], values, end, 1 / row["ratio"], row["raced"]))
    return found


def chance(rows: Sequence[Row]) -> float:
    """The factor from a control's pilot that nine of ten ends of the control are within."""
    return float(np.quantile([end / max(pilot, 1e-6) for pilot, end in controls(rows, 60).values()], 0.9))


def law_of(rows: Sequence[Row]) -> Growth:
    """The law of some rows. A pilot that is not finite tells nothing."""
    told = [one for one in cells(rows) if math.isfinite(one.pilot[0])]
    return fitted([one.pilot for one in told], [one.end for one in told], chance(rows))


def law_without(task: str, rows: Sequence[Row]) -> Growth:
    """The law of all tasks but one."""
    return law_of([row for row in rows if row["task"] != task])


def by_run(every: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Cells by task, seed and place."""
    found: dict[str, list[Cell]] = {}
    for one in every:
        found.setdefault(one.run, []).append(one)
    return found


def law_table(rows: Sequence[Row]) -> list[str]:
    """A line per task: how pilots order ends, and how many ends are in the interval of a law that has not seen it."""
    every = cells(rows)
    lines = ["task         cells  rho, 20 steps  rho, 60 steps  end over pilot  in the interval  above it"]
    total = [0, 0, 0]
    for task in dict.fromkeys(one.task for one in every):
        here, law = [one for one in every if one.task == task], law_without(task, rows)
        ends = [(one.end, law.end(*one.pilot)) for one in here]
        inside = sum(end.low <= came <= end.high for came, end in ends)
        above = sum(came > end.high for came, end in ends)
        total = [a + b for a, b in zip(total, (len(here), inside, above), strict=True)]
        ratios = [one.end / one.pilot[0] for one in here if one.pilot[0] > 0.003]
        rho = [_rho([one for one in cells(rows, steps) if one.task == task]) for steps in (20, 60)]
        lines.append(
            f"{task:12s} {len(here):5d}  {rho[0]:>13s}  {rho[1]:>13s}  {_median(ratios):>14s}  "
            f"{_share(inside, len(here)):>15s}  {_share(above, len(here)):>8s}"
        )
    lines.append(f"{'all':12s} {total[0]:5d} {_share(total[1], total[0]):>63s}  {_share(total[2], total[0]):>8s}")
    return lines


def _median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f}" if values else "-"


def _share(count: int, of: int) -> str:
    return f"{100 * count / of:.0f} %"


def _rho(some: Sequence[Cell]) -> str:
    found = [
        rank_correlation([one.pilot[0] for one in run], [one.end for one in run]).rho
        for run in by_run(some).values()
        if len(run) > 5
    ]
    return f"{statistics.median(found):+.2f}" if found else "-"


def choice_table(rows: Sequence[Row]) -> list[str]:
    """A line per limit and rule: how often a plan is found, whether it ended within the limit, and its bytes."""
    every = cells(rows)
    runs = list(by_run(every).values())
    laws = {task: law_without(task, rows) for task in {one.task for one in every}}
    lines = ["limit   rule                      finds a plan  it held  bytes to least"]
    for limit in LIMITS:
        for name, allows in RULES.items():
            found = [_choice(run, laws[run[0].task], allows, limit) for run in runs]
            told = [one for one in found if one is not None]
            share = _share(sum(held for held, _ in told), len(told)) if told else "-"
            more = _median([bytes_to_least for held, bytes_to_least in told if held])
            lines.append(
                f"{100 * limit:<5g} %  {name:24s} {_share(len(told), len(runs)):>13s}  {share:>7s}  {more:>14s}"
            )
    return lines


def place_table(rows: Sequence[Row]) -> list[str]:
    """A line per limit and place of the pilot in training, for the rule that decides."""
    runs = list(by_run(cells(rows)).values())
    laws, allows = {run[0].task: law_without(run[0].task, rows) for run in runs}, RULES["interval of the end"]
    lines = ["limit   pilot begins  finds a plan  it held"]
    for limit in LIMITS:
        for place in PLACES:
            here = [run for run in runs if run[0].run.endswith(place)]
            told = [one for run in here if (one := _choice(run, laws[run[0].task], allows, limit)) is not None]
            held = _share(sum(held for held, _ in told), len(told)) if told else "-"
            lines.append(f"{100 * limit:<5g} %  {place:12s} {_share(len(told), len(here)):>13s}  {held:>7s}")
    return lines


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


RULES: Mapping[str, Callable[[Cell, Growth, float], bool]] = {
    "pilot's excess": lambda one, law, limit: one.pilot[0] <= limit,
    "pilot's interval": lambda one, law, limit: one.pilot[2] <= limit,
    "expected end": lambda one, law, limit: law.end(*one.pilot).middle <= limit,
    "interval of the end": lambda one, law, limit: law.end(*one.pilot).high <= limit,
}


def race_line(rows: Sequence[Row]) -> str:
    """In how many runs a race finds the plan that trying all plans to the end finds."""
    same, runs, steps = 0, 0, [0, 0]
    for run in by_run(cells(rows, 120)).values():
        full = [one for one in run if GROWTH.end(*one.pilot).high <= 0.01]
        won = [one for one in full if one.raced == 120]
        runs += 1
        steps = [steps[0] + sum(one.raced for one in run), steps[1] + 120 * len(run)]
        least = [min((one.payload, one.plan) for one in some) if some else None for some in (full, won)]
        same += least[0] == least[1]
    share = _share(steps[0], steps[1])
    return f"A race finds the plan of the whole pilot in {same} of {runs} runs, in {share} of its steps."


def main() -> None:
    """Print all."""
    rows = read(DIGEST)
    print(
        "\n".join(
            [*law_table(rows), "", *choice_table(rows), "", *place_table(rows), "", race_line(rows), str(law_of(rows))]
        )
    )


if __name__ == "__main__":
    main()
