"""Answers of gradlab's commands on tasks: before a pilot, after it, and what came.

    python benchmarks promise --data FOLDER --rows FILE [--tasks ViT U-Net ...] [--limits 1% ...] [--table]

100 steps of each task of pilot_tasks.py are recorded on two ranks. `gradlab recommend` chooses a plan from the
recording, and `gradlab pilot` from trials of promise_job.py. Then the script trains densely and with both plans.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pilot_tasks import UNSEEN
from rows import Row, add, has, read

from gradlab.artifact import Artifact

NINE = ("ViT", "U-Net", "diffusion", "LSTM", "GPT", "tabular", *UNSEEN)
JOB = Path(__file__).parents[1]
GRADLAB = (sys.executable, "-m", "gradlab.cli.main")
NETWORK = ("--nodes", "2", "--bandwidth", "2mbit", "--compute-seconds", "20ms")
RECORDED = 100


def command(task: str, data: Path, *words: object) -> list[str]:
    """The user's own command."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*launch, str(JOB), "promise_job", task, "--data", str(data), *map(str, words)]


def run(words: list[str]) -> str:
    """Run a command, and return what it printed. Its errors are shown if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


class Trained:
    """Trainings of a task to the end, each plan once."""

    def __init__(self, task: str, data: Path, folder: Path) -> None:
        self._task, self._data, self._folder = task, data, folder
        self._ends: dict[str | None, float] = {}

    def end(self, artifact: Path | None) -> float:
        """Return the loss on batches that no step has. None: dense training."""
        plan = None if artifact is None else Artifact.load(artifact).plan.digest
        if plan not in self._ends:
            result = self._folder / "result.json"
            run(
                command(self._task, self._data, "--result", result, *(() if artifact is None else ("--plan", artifact)))
            )
            self._ends[plan] = float(json.loads(result.read_text())["loss"])
        return self._ends[plan]


def promises(task: str, data: Path, limits: Sequence[str]) -> Iterator[Row]:
    """Record, and for each limit recommend, try, and train."""
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept)
        trained, trace = Trained(task, data, folder), folder / "trace"
        run(command(task, data, "--record", trace, "--stop", RECORDED))
        for limit in limits:
            chosen = folder / limit
            chosen.mkdir()
            yield {
                "task": task,
                "limit": limit,
                **promised(command(task, data, "--record", trace), trace, chosen, trained),
            }


def promised(training: Sequence[str], trace: Path, folder: Path, trained: Trained) -> Row:
    """Recommend, try, and train."""
    before, after, limit = folder / "before.safetensors", folder / "after.safetensors", folder.name
    began = time.monotonic()
    words = [*GRADLAB, "recommend", str(trace), "--out", str(before), *NETWORK, "--max-loss", limit, "--json"]
    found = json.loads(run(words))
    row: Row = {"recommend_seconds": time.monotonic() - began, "before": found["plan"], "text": found["text"]}
    row["proposed"] = [(one["plan"], one["risk"]) for one in found["proposals"]]
    began = time.monotonic()
    to_try = [*([str(before)] if before.exists() else []), *found["artifacts_to_try"]]
    plans = [word for path in to_try for word in ("--plan", path)]
    words = [*GRADLAB, "pilot", str(trace), "--out", str(after), "--max-loss", limit, "--json", *plans]
    tried = json.loads(run([*words, "--", *training]))
    row |= {"pilot_seconds": time.monotonic() - began, "after": tried["best"], "outcomes": tried["outcomes"]}
    row["dense"] = dense = trained.end(None)
    for name, artifact in (("before", before), ("after", after)):
        row[f"{name}_end"] = trained.end(artifact) / dense - 1 if artifact.exists() else None
    return row


def table(rows: list[Row]) -> str:
    """A line per task."""
    lines = [
        "| task | limit | before the pilot | came | after the pilot | expected | came |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        best = next((one for one in row["outcomes"] if one["name"] == row["after"]), {})
        expected = f"{best['end_low']:+.1%} to {best['end_high']:+.1%}" if best.get("end_low") is not None else "-"
        came = [_percent(row[key]) for key in ("before_end", "after_end")]
        cells = [row["task"], row["limit"], row["before"], came[0], row["after"], expected, came[1]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _percent(value: Any) -> str:
    return "-" if value is None else f"{value:+.2%}"


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--tasks", nargs="*", default=list(NINE))
    parser.add_argument("--limits", nargs="*", default=["1%"])
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if not options.table:
        for task in options.tasks:
            done = read(options.rows)
            limits = [one for one in options.limits if not has(done, {"task": task, "limit": one})]
            for row in promises(task, options.data, limits) if limits else ():
                add(options.rows, row, ("outcomes",))
    print(table(read(options.rows)))


if __name__ == "__main__":
    main()
