"""Step over computing alone on limited links, of plain DDP, PyTorch's hooks and every codec here.

    python benchmarks link_table --netbench FOLDER --rows ROWS.jsonl [--settings 200mbit:4 100mbit:3]
        [--models resnet18 transformer] [--ways sign topk] [--rounds 3] [--steps 3]
    python benchmarks link_table --table --rows ROWS.jsonl

FOLDER holds `run.sh`, which starts N ranks of a training, each behind a network interface of its own whose rate it
sets, lets some ways take turns, and prints a row for each: the median step of the slowest rank, the same without any
exchange, bytes sent, and processor seconds by thread. It takes hooks by MODULE:FUNCTION; those of `PLANS` are functions
of this module. It needs root. The table has in parentheses the processor milliseconds of rank 0's codecs per step.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from rows import Row, add, markdown, options, read

from gradlab.plan import FEEDBACK, Wrap

SETTINGS = ("50mbit:4", "200mbit:4", "1gbit:4", "100mbit:3")
MODELS = ("resnet18", "transformer")
BOTH_WAYS = (*FEEDBACK, Wrap("two_way"))
PEERS = ("none", "fp16", "powersgd_r1@1000", "powersgd_r2@1000")
PLANS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "identity": ("identity", {}),
    "cast": ("cast", {}),
    "powersgd_1": ("powersgd", {"rank": 1}),
    "powersgd_2": ("powersgd", {"rank": 2}),
    "clt_k": ("clt_k", {"density": 0.01}),
    "gradiveq": ("gradiveq", {"ratio": 16.0, "complement": 1.0, "warmup_steps": 0}),
    "sign": ("sign", {}),
    "one_bit": ("one_bit", {}),
    "topk": ("topk", {"density": 0.01}),
    "sampled_threshold": ("sampled_threshold", {"density": 0.01}),
    "threshold": ("threshold", {"density": 0.01}),
    "random_k": ("random_k", {"density": 0.01}),
    "dct_topk": ("dct_topk", {}),
    "qsgd": ("qsgd", {"bits": 4}),
    "int8": ("block_scaled", {"dtype": "int8"}),
    "natural": ("natural", {}),
    "terngrad": ("terngrad", {}),
    "ecsq": ("ecsq", {"bits": 0.25}),
    "ecsq_both_ways": ("ecsq", {"bits": 0.25, "wrappers": BOTH_WAYS}),
    "ecsq_both_ways_groups": ("ecsq", {"bits": 0.25, "wrappers": BOTH_WAYS, "group_bytes": 8 * 2**20}),
    "lgc_ring": ("lgc_ring", {"training_steps": 2, "optimizer": "adam", "most_error": 1e9, "warmup_steps": 0}),
}
WAYS = (*PEERS, *PLANS)
AT_ONCE = 8  # ways that take turns: each holds a model on every rank
TITLES = {"none": "plain DDP", "fp16": "PyTorch fp16"} | {
    f"powersgd_r{rank}@1000": f"PyTorch PowerSGD {rank}, one bucket" for rank in (1, 2)
}


def _hook(name: str) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Make the function that gives the state and the hook of a uniform plan for a model that DDP has already."""

    def attach(model: Any, group: Any) -> tuple[Any, Any]:
        from torch.nn.parallel import DistributedDataParallel

        from gradlab.plan import Plan
        from gradlab.runtime import CompressionState, compression_hook

        # What is handed over is the model inside, as PyTorch's hooks need no more.
        [whole] = [x for x in gc.get_objects() if isinstance(x, DistributedDataParallel) and x.module is model]
        codec, settings = PLANS[name]
        return CompressionState(Plan.uniform(whole, codec, **settings), whole), compression_hook

    return attach


globals().update({name: _hook(name) for name in PLANS})


def measured(folder: Path, model: str, setting: str, chosen: argparse.Namespace) -> Iterator[Row]:
    rate, ranks = setting.split(":")
    for first in range(0, len(chosen.ways), AT_ONCE):
        ways = chosen.ways[first : first + AT_ONCE]
        peers = [way for way in ways if way in PEERS]
        command = ["bash", str(folder / "run.sh"), "--ranks", ranks, "--rate", rate, "--model", model]
        command += ["--rounds", str(chosen.rounds), "--steps", str(chosen.steps), "--batch", "8"]
        command += ["--timeout", "600", "--hook", ",".join(peers or ["powersgd_r1@1000"])]
        for way in ways:
            if way not in PEERS:
                command += ["--hook-from", f"{Path(__file__).stem}:{way}"]
        environment = {**os.environ, "PYTHON": sys.executable}
        run = subprocess.run(command, cwd=Path(__file__).parent, env=environment, stdout=subprocess.PIPE, text=True)
        for row in map(json.loads, run.stdout.splitlines()):
            row["hook"] = str(row.get("hook", "")).rpartition(":")[2]
            if row["hook"] in ways or "error" in row:
                yield row
        if run.returncode:
            raise SystemExit(f"{command[1]} ended with status {run.returncode}")


def table(rows: list[Row], model: str, settings: list[str]) -> None:
    kept = {(row["rate"], str(row["ranks"]), row["hook"]): row for row in rows if row.get("model") == model}
    columns = [tuple(one.split(":")) for one in settings if any(key[:2] == tuple(one.split(":")) for key in kept)]
    print(f"\n{model}: step over computing alone (milliseconds of the engine's thread)\n")
    alone = [next(row["compute_s"] for key, row in kept.items() if key[:2] == one) for one in columns]
    lines = [["computing alone, s", *(f"{seconds:.2f}" for seconds in alone)]]
    for way in WAYS:
        cells = [_cell(kept.get((rate, ranks, way))) for rate, ranks in columns]
        lines += [[TITLES.get(way, way), *cells]] if any(cells) else []
    print(markdown(("way", *(f"{rate}, {ranks} ranks" for rate, ranks in columns)), lines))


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if "error" in row:
        return "failed"
    engine = row["cpu_s"].get("gradlab-engine")
    return f"{row['step_s'] / row['compute_s']:.2f}" + (f" ({1e3 * engine:.0f})" if engine else "")


def main() -> None:
    named = {"settings": SETTINGS, "models": list(MODELS), "ways": list(WAYS), "table": False}
    chosen = options(__doc__, netbench=Path, rows=Path, **named, rounds=3, steps=3)
    if not chosen.table:
        if chosen.netbench is None or not (chosen.netbench / "run.sh").exists():
            raise SystemExit(f"--netbench {chosen.netbench}: expected a folder with run.sh")
        for model, setting in product(chosen.models, chosen.settings):
            for row in measured(chosen.netbench.resolve(), model, setting, chosen):
                add(chosen.rows, row, unshown=("cpu_s", "compute_cpu_s"))
    for model in chosen.models:
        table([row for row in read(chosen.rows) if "rate" in row], model, chosen.settings)
