"""Which figure of a replay tells how training ends? Candidates beside each other, each calibrated on other tasks.

    python benchmarks/judgements.py [--write]

Reads the rows of methods.py (CIFAR-10 with ResNet-8, Fashion-MNIST with two convolutions and a hidden layer) and of
text_chars.py (nanoGPT's Shakespeare) in benchmarks/results: methods that were replayed on a recording of another run,
and then trained with. Left out are dense training, the controls, and on text the methods that bring their own momentum,
which is another optimizer there.

First tables: Spearman's rank correlation of each candidate with the final loss, with its 95 % interval by Bonett and
Wright (`rank_correlation`): of all methods, of those that apply gradients of earlier steps ("memory": feedback,
momentum in the plan), and of the others. Candidates are cosines and errors of sums over windows of W steps. "by kind"
is the middle loss of the neighbours of a method's own kind on the OTHER tasks, by the cosine over W steps of those with
memory and over one step of the others: the only figure here that compares both kinds on one scale.

Second table: what a rule proposes. Of 7 methods drawn at random from a task, a rule proposes the one that sends fewest
bytes among those that it accepts. Counted is how often the loss ends within noise (3 %) of the best of the 7, and how
many times more bytes are sent than by the smallest method within noise. The calibrated rules accept methods whose
neighbours on the OTHER tasks ended within noise of dense: the middle one, or all.

--write writes the calibration that reports look up into analysis/forecast/endings.json.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from methods import joined, mean_loss
from rows import Row, read
from text_chars import METHODS as TEXT_METHODS
from text_chars import outcome

from gradlab.analysis.forecast.endings import Ending, EndingRange, ended_at
from gradlab.analysis.intervals import RankCorrelation, rank_correlation
from gradlab.metric import RELATIVE_NOISE

RESULTS = Path(__file__).parent / "results"
ENDINGS = Path(__file__).parents[1] / "analysis" / "forecast" / "endings.json"
LENGTHS = (1, 4, 16)  # that all tasks' replays hold
DRAWN, DRAWS = 7, 2000


@dataclass(frozen=True)
class Trained:
    """A method that was replayed and trained: figures by candidate (more is better), loss over dense minus 1, bytes."""

    method: str
    memory: bool
    cosines: Mapping[int, float]
    figures: Mapping[str, float]
    excess: float
    payload: float


def figures_of(row: Row) -> dict[str, float]:
    """Every candidate judgement of a replay's row, signed so that more is better."""
    windows = {one["length"]: one for one in row["windows"]}
    found = {f"cosine, {_steps(length)}": one["cosine"] for length, one in windows.items()}
    found |= {f"error, {_steps(length)}": -one["aggregate_error"] for length, one in windows.items()}
    found["error of a rank"] = -row["contribution_error"]
    return found


def trained(name: str, row: Row, excess: float) -> Trained:
    """A method of its replay's row and its loss over dense, minus 1."""
    cosines = {one["length"]: one["cosine"] for one in row["windows"]}
    return Trained(name, row["memory"], cosines, figures_of(row), excess, row["payload"])


def _steps(length: int) -> str:
    return f"{length} step{'s' * (length > 1)}"


def images(name: str) -> list[Trained]:
    """The methods of docs/comparison.md, on a task of methods.py."""
    pairs = joined(read(RESULTS / f"{name}-replay.jsonl"), read(RESULTS / f"{name}-training.jsonl"))
    dense = mean_loss(pairs["dense"][1])
    return [
        trained(name, row, mean_loss(runs) / dense - 1)
        for name, (row, runs) in pairs.items()
        if name not in ("dense", "frozen") and "windows" in row
    ]


def text(mode: str, steps: int) -> list[Trained]:
    """The methods of docs/text.md in one mode, trained for so many iterations."""
    rows = [row for row in read(RESULTS / "text-chars.jsonl") if row.get("mode") == mode]
    runs: dict[str, list[Row]] = {}
    for row in rows:
        if row["kind"] == "training" and row["steps"] == steps:
            runs.setdefault(row["method"], []).append(row)
    replayed = {row["method"]: row for row in rows if row["kind"] == "replay" and "windows" in row}
    dense = outcome(runs["dense"])
    return [
        trained(name, replayed[name], outcome(some) / dense - 1)
        for name, some in runs.items()
        if name in replayed and name != "dense" and TEXT_METHODS[name].momentum
    ]


def tasks() -> dict[str, list[Trained]]:
    """All tasks that have replays with windows, by name."""
    found = {
        "CIFAR-10": images("methods"),
        "Fashion-MNIST": images("fashion"),
        "text, shared": text("shared", 2000),
        "text, own": text("own", 2000),
    }
    return {name: methods for name, methods in found.items() if len(methods) > 3}


ByTask = Mapping[str, Sequence[Trained]]


def endings(by_task: ByTask) -> list[Ending]:
    """All methods of some tasks, as reports look them up."""
    return [
        Ending(task, one.method, one.memory, one.cosines, one.excess) for task, some in by_task.items() for one in some
    ]


def by_kind(method: Trained, known: Sequence[Ending], length: int) -> EndingRange:
    """What the neighbours of a method's own kind ended at."""
    steps = length if method.memory else 1
    return ended_at(method.cosines[steps], steps, method.memory, known)


def others_of(task: str, by_task: ByTask) -> list[Ending]:
    """The calibration without a task."""
    return endings({name: some for name, some in by_task.items() if name != task})


def correlations(methods: Sequence[Trained], others: Sequence[Ending]) -> dict[str, RankCorrelation]:
    """Spearman's rho with the loss, and its interval, by candidate that all methods have."""
    common = set.intersection(*(set(method.figures) for method in methods))
    predicted = {name: [-method.figures[name] for method in methods] for name in methods[0].figures if name in common}
    for length in LENGTHS if others else ():
        predicted[f"by kind, {_steps(length)}"] = [by_kind(method, others, length).middle for method in methods]
    ends = [method.excess for method in methods]
    return {name: rank_correlation(values, ends) for name, values in predicted.items()}


def correlation_table(by_task: ByTask) -> list[str]:
    """A line per candidate and kind of methods: on each task, rho and its interval."""
    kinds = {"all": (True, False), "memory": (True,), "no memory": (False,)}
    lines = []
    for kind, memory in kinds.items():
        chosen = {task: [one for one in some if one.memory in memory] for task, some in by_task.items()}
        found = {task: correlations(some, others_of(task, by_task)) for task, some in chosen.items()}
        heads = [f"{task} ({len(some)})" for task, some in chosen.items()]
        lines.append(f"{kind + ':':20s}" + "".join(f"  {head:>22s}" for head in heads))
        for name in dict.fromkeys(name for rows in found.values() for name in rows):
            cells = [_cell(rows[name]) if name in rows else "-" for rows in found.values()]
            lines.append(f"{name:20s}" + "".join(f"  {cell:>22s}" for cell in cells))
        lines.append("")
    return lines


def _cell(found: RankCorrelation) -> str:
    low, high = found.interval or (math.nan, math.nan)
    return f"{found.rho:+.2f} ({low:+.2f} to {high:+.2f})"


Accepts = Callable[[Trained], bool]


def rules(others: Sequence[Ending]) -> dict[str, Accepts]:
    """Rules by name; the calibrated ones have seen the other tasks alone."""

    def one_step(method: Trained, least: float) -> bool:
        return method.cosines[1] >= least

    def calibrated(method: Trained, length: int, strict: bool) -> bool:
        near = by_kind(method, others, length)
        return near.within(RELATIVE_NOISE) if strict else near.middle <= RELATIVE_NOISE

    chosen: dict[str, Accepts] = {
        "any": lambda method: True,
        "cosine of one step >= 0.5": partial(one_step, least=0.5),
        "cosine of one step >= 0.95": partial(one_step, least=0.95),
    }
    for length in LENGTHS if others else ():
        for strict in (False, True):
            name = f"{'all' if strict else 'middle one'} within noise, {_steps(length)}"
            chosen[name] = partial(calibrated, length=length, strict=strict)
    return chosen


def proposals(methods: Sequence[Trained], accepts: Accepts) -> tuple[float, float, float]:
    """What a rule proposes of methods drawn at random.

    Returns:
        The share of draws in which the proposal is within noise of the best of the draw, the share in which the rule
        accepts nothing, and the median over the others of its bytes over those of the smallest method within noise.
    """
    generator = np.random.default_rng(0)
    verdict = [accepts(method) for method in methods]
    good, none, more = 0, 0, []
    for _ in range(DRAWS):
        drawn = generator.choice(len(methods), size=min(DRAWN, len(methods)), replace=False)
        best = min(methods[i].excess for i in drawn)
        limit = (1 + best) * (1 + RELATIVE_NOISE) - 1
        accepted = [methods[i] for i in drawn if verdict[i]]
        if not accepted:
            none += 1
            continue
        proposed = min(accepted, key=lambda method: method.payload)
        good += proposed.excess <= limit
        more.append(proposed.payload / min(methods[i].payload for i in drawn if methods[i].excess <= limit))
    return good / DRAWS, none / DRAWS, statistics.median(more) if more else math.nan


def proposal_table(by_task: ByTask) -> list[str]:
    """A line per task and rule."""
    lines = [f"{'task':14s}  {'rule':32s}  {'within noise':>12s}  {'no proposal':>11s}  {'bytes to least':>14s}"]
    for task, methods in by_task.items():
        for name, accepts in rules(others_of(task, by_task)).items():
            good, none, more = proposals(methods, accepts)
            lines.append(f"{task:14s}  {name:32s}  {100 * good:10.0f} %  {100 * none:9.0f} %  {more:13.2f}x")
    return lines


def tables(by_task: ByTask) -> str:
    """Both tables, as text."""
    return "\n".join([*correlation_table(by_task), *proposal_table(by_task)])


def written(known: Sequence[Ending]) -> str:
    """The calibration in JSON, a line per method; the loss of a run that diverged is null."""
    rows = [
        {
            "task": one.task,
            "method": one.method,
            "memory": one.memory,
            "cosines": {str(length): round(cosine, 6) for length, cosine in one.cosines.items()},
            "excess": round(one.excess, 6) if math.isfinite(one.excess) else None,
        }
        for one in known
    ]
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


def main() -> None:
    """Print the tables; write the calibration where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write analysis/forecast/endings.json")
    options = parser.parse_args()
    by_task = tasks()
    print(tables(by_task))
    if options.write:
        ENDINGS.write_text(written(endings(by_task)))


if __name__ == "__main__":
    main()
