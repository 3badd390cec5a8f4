"""Final losses by replays, each figure on a task that the calibration did not see.

    python benchmarks judgements [--write]

Reads plans that were replayed on a recording and then trained with, from benchmarks/results: the tasks of pilots.py,
whose plans begin at two places of the training, and those of methods.py (CIFAR-10 with ResNet-8, Fashion-MNIST with
convolutions) and text_chars.py (nanoGPT's Shakespeare). Left out are dense training, the controls, and on text the
methods that bring their own momentum, which is another optimizer there.

First table: of each task, how many ends of plans were at most the largest that is told without having seen the task,
and Spearman's rank correlation of the cosine with the end, by kind of plan.

Second table: what is proposed. A rule takes, of 7 plans drawn from a training, the allowed one with fewest
bytes. Counted are the draws in which it allows one, those of them in which that plan ended within the limit, and
its bytes over those of the smallest that did (median). "five nearest" is the rule that gradlab had: all of the five
trainings of its kind with the nearest cosines ended within the limit.

--write writes the calibration that reports look up into analysis/forecast/endings.json.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from methods import joined, mean_loss
from pilots import CONTROL
from rows import Row, read
from text_chars import METHODS as TEXT_METHODS
from text_chars import outcome

from gradlab.analysis.forecast.endings import Ending, ended_at
from gradlab.analysis.intervals import rank_correlation
from gradlab.analysis.replay.result import JUDGED_LENGTH

RESULTS = Path(__file__).parents[1] / "results"
ENDINGS = Path(__file__).parents[2] / "analysis" / "forecast" / "endings.json"
LIMITS, HALVES = (0.005, 0.01, 0.05), ("float16", "bfloat16")
DRAWN, DRAWS = 7, 400


@dataclass(frozen=True)
class Trained:
    """A plan that was replayed and trained with. run: the training that it is compared within; payload: bytes, in any
    unit."""

    run: str
    ending: Ending
    payload: float

    @property
    def judged(self) -> tuple[float, int, bool]:
        """Cosine, window and kind, as a report judges it."""
        length = JUDGED_LENGTH if self.ending.memory else 1
        return self.ending.cosines[length], length, self.ending.memory


def _trained(task: str, name: str, row: Row, excess: float) -> Trained:
    cosines = {one["length"]: one["cosine"] for one in row["windows"] if one["length"] in (1, JUDGED_LENGTH)}
    return Trained(task, Ending(task, name, row["memory"], cosines, excess), row["payload"])


def images(task: str, name: str) -> list[Trained]:
    """The methods of docs/comparison.md, on a task of methods.py."""
    pairs = joined(read(RESULTS / f"{name}-replay.jsonl"), read(RESULTS / f"{name}-training.jsonl"))
    dense = mean_loss(pairs["dense"][1])
    return [
        _trained(task, name, row, mean_loss(runs) / dense - 1)
        for name, (row, runs) in pairs.items()
        if name not in ("dense", "frozen") and "windows" in row
    ]


def text(task: str, mode: str, steps: int) -> list[Trained]:
    """The methods of docs/text.md in one mode, trained for so many iterations."""
    rows = [row for row in read(RESULTS / "text-chars.jsonl") if row.get("mode") == mode]
    runs: dict[str, list[Row]] = {}
    for row in rows:
        if row["kind"] == "training" and row["steps"] == steps:
            runs.setdefault(row["method"], []).append(row)
    replayed = {row["method"]: row for row in rows if row["kind"] == "replay" and "windows" in row}
    dense = outcome(runs["dense"])
    return [
        _trained(task, name, replayed[name], outcome(some) / dense - 1)
        for name, some in runs.items()
        if name in replayed and name != "dense" and TEXT_METHODS[name].momentum
    ]


def of_pilots(path: Path = RESULTS / "pilots.jsonl") -> list[Trained]:
    """The plans of pilots.py that were replayed. Their ends count beyond what 16 bits of the same run differ by."""
    rows = [row for row in read(path) if row["cosines"]]
    chance = {_run(row): abs(row["end"]) for row in rows if row["plan"] == CONTROL}
    found = []
    for row in rows:
        if row["plan"] != CONTROL:
            cosines = {int(length): cosine for length, cosine in row["cosines"].items()}
            excess = math.inf if row["end"] is None else beyond(row["end"], chance[_run(row)])
            ending = Ending(row["task"], row["plan"], row["memory"], cosines, excess)
            found.append(Trained(_run(row), ending, 1 / row["ratio"]))
    return found


def _run(row: Row) -> str:
    return f"{row['task']} {row['seed']} {row['place']}"


def beyond(excess: float, chance: float) -> float:
    """The part of an excess that is more than chance.

    >>> beyond(0.03, 0.01), beyond(0.005, 0.01), beyond(-0.03, 0.01)
    (0.02, 0.0, -0.02)
    """
    return math.copysign(max(0.0, abs(excess) - chance), excess)


def without_chance(some: Sequence[Trained]) -> list[Trained]:
    """Methods beyond what 16 bits, which are among them, differ from dense by."""
    chance = max(abs(one.ending.excess) for one in some if one.ending.method in HALVES)
    return [
        replace(one, ending=replace(one.ending, excess=beyond(one.ending.excess, chance)))
        for one in some
        if one.ending.method not in HALVES
    ]


def trained() -> list[Trained]:
    """All plans that a report can judge."""
    older = [images("ResNet-8", "methods"), images("convolutions", "fashion"), text("nanoGPT", "shared", 2000)]
    every = [*(one for some in older for one in without_chance(some)), *of_pilots()]
    return [one for one in every if (JUDGED_LENGTH if one.ending.memory else 1) in one.ending.cosines]


def endings(every: Sequence[Trained]) -> list[Ending]:
    """The trainings, as reports look them up."""
    return [one.ending for one in every]


def others(task: str, every: Sequence[Trained]) -> list[Ending]:
    """The calibration without a task."""
    return [one.ending for one in every if one.ending.task != task]


def held_table(every: Sequence[Trained]) -> list[str]:
    """A line per task: whether ends were within what is told without it, and how cosines order them."""
    lines = ["task          plans  told  at most the largest told  rho, feedback  rho, others"]
    total = [0, 0, 0]
    for task in dict.fromkeys(one.ending.task for one in every):
        here, known = [one for one in every if one.ending.task == task], others(task, every)
        told = [(one.ending.excess, found) for one in here if (found := ended_at(*one.judged, known)) is not None]
        within = sum(excess <= found.high for excess, found in told)
        total = [a + b for a, b in zip(total, (len(here), len(told), within), strict=True)]
        rho = [_rho([one for one in here if one.ending.memory == memory]) for memory in (True, False)]
        share = f"{100 * within / len(told):.0f} %" if told else "-"
        lines.append(f"{task:13s} {len(here):5d} {len(told):5d}  {share:>24s}  {rho[0]:>13s}  {rho[1]:>11s}")
    lines.append(f"{'all':13s} {total[0]:5d} {total[1]:5d}  {100 * total[2] / max(1, total[1]):22.0f} %")
    return lines


def _rho(some: Sequence[Trained]) -> str:
    """The median over a task's runs of the correlation between cosine and end."""
    runs: dict[str, list[Trained]] = {}
    for one in some:
        runs.setdefault(one.run, []).append(one)
    found = [
        rank_correlation([-one.judged[0] for one in run], [one.ending.excess for one in run]).rho
        for run in runs.values()
        if len(run) > 2
    ]
    return f"{statistics.median(found):+.2f}" if found else "-"


Allows = Callable[[Trained, float], bool]


def rules(known: Sequence[Ending]) -> dict[str, Allows]:
    """Rules by name, which have seen other tasks alone."""

    def nearest(one: Trained, limit: float, count: int = 5) -> bool:
        cosine, length, memory = one.judged
        among = [row for row in known if row.memory == memory and length in row.cosines]
        among.sort(key=lambda row: abs(_angle(row.cosines[length]) - _angle(cosine)))
        return all(row.excess <= limit for row in among[:count])

    def ranges(one: Trained, limit: float) -> bool:
        found = ended_at(*one.judged, known)
        return found is not None and found.within(limit)

    return {"any": lambda one, limit: True, "five nearest": nearest, "ranges": ranges}


def _angle(cosine: float) -> float:
    return math.acos(min(1.0, max(-1.0, cosine)))


def proposed(
    run: Sequence[Trained], allows: Callable[[Trained], bool], limit: float
) -> list[tuple[bool, float] | None]:
    """A rule's choice of plans drawn at random: whether it held, and its bytes over the least that would have."""
    generator, verdict = np.random.default_rng(0), [allows(one) for one in run]
    found: list[tuple[bool, float] | None] = []
    for _ in range(DRAWS):
        drawn = generator.choice(len(run), size=min(DRAWN, len(run)), replace=False)
        allowed = [run[i] for i in drawn if verdict[i]]
        if not allowed:
            found.append(None)
            continue
        taken = min(allowed, key=lambda one: one.payload)
        held = [run[i].payload for i in drawn if run[i].ending.excess <= limit]
        found.append((taken.ending.excess <= limit, taken.payload / min(held) if held else math.nan))
    return found


def proposal_table(every: Sequence[Trained]) -> list[str]:
    """A line per limit and rule, over all runs of all tasks that have enough plans."""
    runs: dict[str, list[Trained]] = {}
    for one in every:
        runs.setdefault(one.run, []).append(one)
    lines = ["limit   rule           allows a plan  it held  bytes to least"]
    by_task = {task: rules(others(task, every)) for task in {one.ending.task for one in every}}
    for limit in LIMITS:
        for name in next(iter(by_task.values())):
            draws = []
            for run in runs.values():
                if len(run) >= DRAWN:
                    rule = by_task[run[0].ending.task][name]
                    draws += proposed(run, partial(rule, limit=limit), limit)
            lines.append(_line(f"{100 * limit:g} %", name, draws))
    return lines


def _line(limit: str, name: str, draws: Sequence[tuple[bool, float] | None]) -> str:
    taken = [one for one in draws if one is not None]
    held = f"{100 * statistics.fmean(one[0] for one in taken):.0f} %" if taken else "-"
    more = [one[1] for one in taken if one[0]]
    least = f"{statistics.median(more):.2f}x" if more else "-"
    return f"{limit:7s} {name:14s} {100 * len(taken) / len(draws):11.0f} %  {held:>7s}  {least:>14s}"


def tables(every: Sequence[Trained]) -> str:
    """Both tables, as text."""
    return "\n".join([*held_table(every), "", *proposal_table(every)])


def written(known: Sequence[Ending]) -> str:
    """The calibration in JSON, a line per training; the loss of a run that diverged is null."""
    rows = [
        {
            "task": one.task,
            "method": one.method,
            "memory": one.memory,
            "cosines": {str(length): round(cosine, 6) for length, cosine in one.cosines.items()},
            "excess": round(one.excess, 5) if math.isfinite(one.excess) else None,
        }
        for one in known
    ]
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


def main() -> None:
    """Print the tables; write the calibration where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write analysis/forecast/endings.json")
    options = parser.parse_args()
    every = trained()
    print(tables(every))
    if options.write:
        ENDINGS.write_text(written(endings(every)))


if __name__ == "__main__":
    main()
