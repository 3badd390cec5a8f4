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
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rows import Row, fill, grouped, markdown, options, read

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


def measured(key: Row) -> Row:
    ranks, generator = key["ranks"], torch.Generator().manual_seed(0)
    lockstep = LockstepPlan(Plan.uniform(LAYERS, key["codec"], **CODECS[key["codec"]]), ranks)
    gradients = [{x.name: torch.randn(x.shape, generator=generator) for x in LAYERS} for _ in range(ranks)]
    moments = [time.perf_counter()]
    for step in range(STEPS + 1):
        lockstep.step(step, gradients)
        moments.append(time.perf_counter())
    seconds = [ended - began for began, ended in pairwise(moments[1:])]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"milliseconds": 1e3 * statistics.median(seconds) / ranks, "peak_gib": peak}


def table(rows: list[Row]) -> str:
    ranks, lines = sorted({row["ranks"] for row in rows}), []
    for codec, here in grouped(rows, lambda row: row["codec"]).items():
        times = {row["ranks"]: row["milliseconds"] for row in here}
        cells = [f"{times[count]:.1f} ms" if count in times else "" for count in ranks]
        lines.append([codec, *cells, f"{times[max(times)] / times[min(times)]:.2f}"])
    return markdown(("codec", *(f"N = {count:,}" for count in ranks), "most over fewest"), lines)


def main() -> None:
    chosen = options(__doc__, ranks=[8, 64, 256, 1024], codecs=list(CODECS), rows=Path, table=False)
    torch.set_num_threads(1)
    keys = ({"codec": codec, "ranks": ranks} for codec in chosen.codecs for ranks in chosen.ranks)
    if not chosen.table:
        fill(chosen.rows, keys, measured)
    print(table(read(chosen.rows)))
