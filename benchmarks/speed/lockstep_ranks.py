"""Time per rank of a replayed step, for 8 to 1,024 ranks in one process: what all ranks share is computed once.

    python benchmarks lockstep_ranks [--ranks 8 64 256 1024] [--codecs topk sign] [--rows ROWS.jsonl]
    python benchmarks lockstep_ranks --rows ROWS.jsonl --table

A model of twelve convolutions, 1.0 million parameters; each rank has gradients of its own. A figure is the median step
after the first, in milliseconds per rank, on one thread.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rows import Row, add, has, read

from gradlab.executor.lockstep_plan import LockstepPlan
from gradlab.layout import Layer
from gradlab.plan import Plan

LAYERS = [Layer(f"convolution{at:02d}", (96, 96, 3, 3), "convolution") for at in range(12)]
CODECS: dict[str, dict[str, Any]] = {
    "topk": {"density": 0.01},
    "clt_k": {"density": 0.01},
    "sign": {},
    "powersgd": {"rank": 1},
    "block_scaled": {},
    "qsgd": {},
    "identity": {},
}


def measured(codec: str, ranks: int, steps: int) -> Row:
    """Replay some steps of a plan."""
    plan = Plan.uniform(LAYERS, codec, **CODECS[codec])
    lockstep = LockstepPlan(plan, ranks)
    generator = torch.Generator().manual_seed(0)
    gradients = [{x.name: torch.randn(x.shape, generator=generator) for x in LAYERS} for _ in range(ranks)]
    seconds = []
    for step in range(steps + 1):
        began = time.perf_counter()
        lockstep.step(step, gradients)
        seconds.append(time.perf_counter() - began)
    return {
        "codec": codec,
        "ranks": ranks,
        "milliseconds": 1e3 * statistics.median(seconds[1:]) / ranks,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def table(rows: list[Row]) -> None:
    """Print the table."""
    ranks = sorted({row["ranks"] for row in rows})
    print("| codec | " + " | ".join(f"N = {count:,}" for count in ranks) + " | most over fewest |")
    print("|---" * (len(ranks) + 2) + "|")
    for codec in dict.fromkeys(row["codec"] for row in rows):
        times = {row["ranks"]: row["milliseconds"] for row in rows if row["codec"] == codec}
        cells = [f"{times[count]:.1f} ms" if count in times else "" for count in ranks]
        print(f"| {codec} | " + " | ".join(cells) + f" | {times[max(times)] / times[min(times)]:.2f} |")


def main() -> None:
    """Measure what is not kept yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--codecs", nargs="+", choices=list(CODECS), default=list(CODECS))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for codec in options.codecs if not options.table else ():
        for ranks in options.ranks:
            if not has(read(options.rows), {"codec": codec, "ranks": ranks}):
                add(options.rows, measured(codec, ranks, options.steps))
    table(read(options.rows))


if __name__ == "__main__":
    main()
