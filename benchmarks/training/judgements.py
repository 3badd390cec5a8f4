"""The calibration that reports look up: final losses by replays, judged on each task by the others.

    python benchmarks judgements [--write]

Reads plans that were replayed on a recording and then trained with, from benchmarks/results: pilots.jsonl, whose plans
begin at places of the training, and the rows of methods.py and text_chars.py. Left out are dense training, the
controls, and on text the methods with their own momentum, which is another optimizer there. The table has, by task, how
many ends were at most the largest that is reported without having seen the task. --write writes
analysis/forecast/endings.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace

from methods import joined, mean_loss
from pilot_law import CONTROL, DIGEST, RESULTS, run_of
from rows import Row, finite, grouped, options, read
from text_chars import METHODS as TEXT_METHODS
from text_chars import outcome

from gradlab.analysis.forecast.endings import Ending, ended_at
from gradlab.analysis.replay.result import JUDGED_LENGTH

ENDINGS = RESULTS.parents[1] / "analysis" / "forecast" / "endings.json"
HALVES = ("float16", "bfloat16")


def _trained(task: str, name: str, row: Row, excess: float) -> Ending:
    cosines = {one["length"]: one["cosine"] for one in row["windows"] if one["length"] in (1, JUDGED_LENGTH)}
    return Ending(task, name, row["memory"], cosines, excess)


def images(task: str, name: str) -> list[Ending]:
    pairs = joined(read(RESULTS / f"{name}-replay.jsonl"), read(RESULTS / f"{name}-training.jsonl"))
    dense = mean_loss(pairs["dense"][1])
    known = {name: pair for name, pair in pairs.items() if name not in ("dense", "frozen") and "windows" in pair[0]}
    return [_trained(task, name, row, mean_loss(runs) / dense - 1) for name, (row, runs) in known.items()]


def text() -> list[Ending]:
    rows = [row for row in read(RESULTS / "text-chars.jsonl") if row.get("mode") == "shared"]
    runs = grouped((r for r in rows if r["kind"] == "training" and r["steps"] == 2000), lambda row: row["method"])
    replayed = {row["method"]: row for row in rows if row["kind"] == "replay" and "windows" in row}
    dense = outcome(runs["dense"])
    return [
        _trained("nanoGPT", name, replayed[name], outcome(some) / dense - 1)
        for name, some in runs.items()
        if name in replayed and name != "dense" and TEXT_METHODS[name].momentum
    ]


def of_pilots() -> list[Ending]:
    """The plans of pilots that were replayed. Their ends count beyond what 16 bits of the same run differ by."""
    rows = [row for row in read(DIGEST) if row["cosines"]]
    chance = {run_of(row): abs(row["end"]) for row in rows if row["plan"] == CONTROL}
    found = []
    for row in rows:
        if row["plan"] != CONTROL:
            cosines = {int(length): cosine for length, cosine in row["cosines"].items()}
            excess = math.inf if row["end"] is None else beyond(row["end"], chance[run_of(row)])
            found.append(Ending(row["task"], row["plan"], row["memory"], cosines, excess))
    return found


def beyond(excess: float, chance: float) -> float:
    """The part of an excess that is more than chance."""
    return math.copysign(max(0.0, abs(excess) - chance), excess)


def without_chance(some: Sequence[Ending]) -> list[Ending]:
    """Methods beyond what 16 bits, which are among them, differ from dense by."""
    chance = max(abs(one.excess) for one in some if one.method in HALVES)
    return [replace(one, excess=beyond(one.excess, chance)) for one in some if one.method not in HALVES]


def endings() -> list[Ending]:
    older = [images("ResNet-8", "methods"), images("convolutions", "fashion"), text()]
    every = [*(one for some in older for one in without_chance(some)), *of_pilots()]
    return [one for one in every if _length(one) in one.cosines]


def _length(one: Ending) -> int:
    return JUDGED_LENGTH if one.memory else 1


def table(every: Sequence[Ending]) -> str:
    """A line per task, and one of all: whether ends were within what is reported without the task."""
    counts = {}
    for task, here in grouped(every, lambda one: one.task).items():
        known = [one for one in every if one.task != task]
        found = [(one.excess, ended_at(one.cosines[_length(one)], _length(one), one.memory, known)) for one in here]
        reported = [excess <= end.high for excess, end in found if end is not None]
        counts[task] = len(here), len(reported), sum(reported)
    counts["all"] = tuple(map(sum, zip(*counts.values(), strict=True)))
    lines = [
        f"{title:13s} {plans:5d}  {reported:8d}  {100 * within / max(1, reported):26.0f} %"
        for title, (plans, reported, within) in counts.items()
    ]
    return "\n".join(["task          plans  reported  at most the largest reported", *lines])


def written(known: Sequence[Ending]) -> str:
    """The calibration in JSON, a line per training; the loss of a run that diverged is null."""
    rows = [
        asdict(one)
        | {"cosines": {str(length): round(cosine, 6) for length, cosine in one.cosines.items()}}
        | {"excess": finite(round(one.excess, 5) if math.isfinite(one.excess) else None)}
        for one in known
    ]
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


def main() -> None:
    chosen = options(__doc__, write=False)
    every = endings()
    print(table(every))
    if chosen.write:
        ENDINGS.write_text(written(every))
