"""LGC's Tables IV and V in small: what an iteration of each phase takes and sends, with emulated nodes.

    python benchmarks/lgc_phases.py --data cifar10.npz --rows rows.jsonl [--nodes 4 16] [--traces FOLDER] [--table]
    python benchmarks/lgc_phases.py --rows rows.jsonl --table --figure phases.svg

ResNet-8 on images halved to 16 x 16, 16 images a node, one thread. A few iterations of each number of nodes are
recorded. On these, `gradlab.analysis.fit.lgc.phases` times selection, encoder, decoder and a step of the autoencoder's
training, and runs the three phases in lockstep: full gradients, the largest 1 % as they are while one rank learns, and
codes.
"computing" is a node's forward and backward pass. There is no network, so durations are without it; what a rank sends
in each phase stands beside them, and what all ranks send in a run of the paper's share of phases (Table IV's
"information"): of --iterations, 200 full, 300 top-k, the rest codes. What is in --rows is not done again.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

import emulated
import torch
from lgc import DENSITY, Setting, load, tasks
from rows import Row, add, has, read

from gradlab.analysis.figures.lgc import plot_phases
from gradlab.analysis.figures.style import drawing
from gradlab.analysis.fit.lgc.phases import PhaseTimes, Update, measure_phases
from gradlab.datasets import Data
from gradlab.trace import Trace

RECORDED, START = 8, 20
FULL, TOPK = 200, 300  # iterations, section VI-A
PATTERNS = ("ring", "server")
# Table V, ResNet-50 on ImageNet with 8 nodes: seconds of an iteration, full, top-k and compressed.
PAPER = {"ring": (1.0, 0.9, 0.4), "server": (1.0, 1.6, 0.6)}


def computing_seconds(setting: Setting, data: Data, nodes: int, repeats: int = 10) -> float:
    """Median seconds of one node's forward and backward pass."""
    task = replace(setting.task, ranks=nodes)
    model = task.model(0)
    [x, y], *_ = next(task.micro_batches(data, 0))
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        task.loss(model, x, y).backward()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def measured(nodes: int, setting: Setting, data: Data, folder: Path) -> list[Row]:
    """The rows of both patterns, on one recording, which is deleted."""
    place = folder / f"{nodes}-nodes-phases"
    emulated.record(replace(setting.task, ranks=nodes), data, place, 0, start=START, every=1, count=RECORDED)
    computing = computing_seconds(setting, data, nodes)
    rows = []
    for pattern in PATTERNS:
        with Trace(place) as trace:
            times = measure_phases(trace, pattern, density=DENSITY)
        rows.append({"nodes": nodes, "pattern": pattern, "computing": computing, "times": times.to_json()})
    shutil.rmtree(place)
    return rows


def times_of(row: Row) -> PhaseTimes:
    """The measurement in a row."""
    values = dict(row["times"])
    return PhaseTimes(**values | {name: Update(**values[name]) for name in ("full", "topk", "compressed")})


def table(rows: Sequence[Row], iterations: int) -> str:
    """Milliseconds of the parts; of each phase its duration and what a rank sends; and all ranks' bytes in a run."""
    head = "| nodes | | selection | encode | decode | learn | computing | full | top-k | code | "
    head += "sent, full / top-k / code, kB | in a run, MB | of dense | Table V, s |"
    lines = [head, "| ---: | --- |" + " ---: |" * 12]
    for row in rows:
        one, updates = times_of(row), [getattr(times_of(row), name) for name in ("full", "topk", "compressed")]
        parts = [one.selection, one.encode, one.decode, one.learn, row["computing"]]
        durations = [row["computing"] + update.codec_seconds + update.learning_seconds for update in updates]
        counts = (FULL, TOPK, iterations - FULL - TOPK)
        run = row["nodes"] * sum(count * update.payload_bytes for count, update in zip(counts, updates, strict=True))
        dense = row["nodes"] * iterations * one.full.payload_bytes
        cells = [f"{1e3 * seconds:.2f}" for seconds in (*parts, *durations)]
        cells += [" / ".join(f"{update.payload_bytes / 1e3:.2f}" for update in updates)]
        cells += [f"{run / 1e6:.0f}", f"1/{dense / run:.1f}", " / ".join(f"{s:g}" for s in PAPER[row["pattern"]])]
        lines.append(f"| {row['nodes']} | {row['pattern']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="cifar10.npz")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 16, 22])
    parser.add_argument(
        "--iterations", type=int, default=4500, help="of the run that Table IV's bytes are counted over"
    )
    parser.add_argument("--traces", type=Path, help="folder for recordings, which are deleted")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--figure", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.data:
        setting = tasks()["cifar10"]
        data, folder = load("cifar10", setting, chosen.data), chosen.traces or Path(mkdtemp())
        for nodes in chosen.nodes:
            if not has(read(chosen.rows), {"nodes": nodes}):
                for row in measured(nodes, setting, data, folder):
                    add(chosen.rows, row)
    rows = read(chosen.rows)
    if chosen.table:
        print(table(rows, chosen.iterations))
    if chosen.figure:
        caption = (
            f"ResNet-8, CIFAR-10 at 16 x 16, 16 images a node, {100 * DENSITY:g} % of every layer but the first, the "
            f"last and vectors, medians over iterations {START} to {START + RECORDED - 1}, one thread, no network. "
            "Learning is one rank's, for which the others wait."
        )
        named = {f"{row['pattern']}, {row['nodes']}": times_of(row) for row in rows}
        computing = statistics.fmean(row["computing"] for row in rows)
        with drawing():
            plot_phases(named, computing, caption).savefig(chosen.figure)


if __name__ == "__main__":
    main()
