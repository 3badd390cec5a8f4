"""Time per rank of a replayed step, for 8 to 1,024 ranks in one process: what all ranks share is computed once.

    python benchmarks lockstep_ranks [--ranks 8 64 256 1024] [--codecs topk sign] [--rows ROWS.jsonl]
    python benchmarks lockstep_ranks --rows ROWS.jsonl --table

A model of twelve convolutions, 1.0 million parameters; each rank has gradients of its own. A figure is the median step
after the first, in milliseconds per rank, on one thread.
"""

from __future__ import annotations

import resource
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rows import Row, add, grouped, markdown, missing, options, read

from gradlab.executor.lockstep_plan import LockstepPlan
from gradlab.layout import Layer
from gradlab.plan import Plan

LAYERS = [Layer(f"convolution{at:02d}", (96, 96, 3, 3), "convolution") for at in range(12)]
STEPS = 3
CODECS: dict[str, dict[str, Any]] = {
    "topk": {"density": 0.01},
    "clt_k": {"density": 0.01},
    "sign": {},
    "powersgd": {"rank": 1},
    "block_scaled": {},
    "qsgd": {},
    "identity": {},
}


def measured(codec: str, ranks: int) -> Row:
    """Replay some steps of a plan."""
    plan = Plan.uniform(LAYERS, codec, **CODECS[codec])
    lockstep = LockstepPlan(plan, ranks)
    generator = torch.Generator().manual_seed(0)
    gradients = [{x.name: torch.randn(x.shape, generator=generator) for x in LAYERS} for _ in range(ranks)]
    seconds = []
    for step in range(STEPS + 1):
        began = time.perf_counter()
        lockstep.step(step, gradients)
        seconds.append(time.perf_counter() - began)
    return {
        "codec": codec,
        "ranks": ranks,
        "milliseconds": 1e3 * statistics.median(seconds[1:]) / ranks,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def table(rows: list[Row]) -> str:
    """Lay out milliseconds per rank, a line per codec."""
    ranks, lines = sorted({row["ranks"] for row in rows}), []
    for codec, here in grouped(rows, lambda row: row["codec"]).items():
        times = {row["ranks"]: row["milliseconds"] for row in here}
        cells = [f"{times[count]:.1f} ms" if count in times else "" for count in ranks]
        lines.append([codec, *cells, f"{times[max(times)] / times[min(times)]:.2f}"])
    return markdown(("codec", *(f"N = {count:,}" for count in ranks), "most over fewest"), lines)


def main() -> None:
    """Measure what is not kept yet, and print the table."""
    chosen = options(__doc__, ranks=[8, 64, 256, 1024], codecs=list(CODECS), rows=Path, table=False)
    torch.set_num_threads(1)
    keys = ({"codec": codec, "ranks": ranks} for codec in chosen.codecs for ranks in chosen.ranks)
    for key in () if chosen.table else missing(chosen.rows, keys):
        add(chosen.rows, measured(**key))
    print(table(read(chosen.rows)))


if __name__ == "__main__":
    main()
