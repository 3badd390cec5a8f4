"""Step over computing alone on limited links, of plain DDP, PyTorch's hooks and every codec here.

    python benchmarks link_table --netbench FOLDER --rows ROWS.jsonl [--settings 200mbit:4 100mbit:3]
        [--models resnet18 transformer] [--ways sign topk] [--rounds 3] [--steps 3]
    python benchmarks link_table --table --rows ROWS.jsonl [--parts 200mbit:4]

FOLDER holds `run.sh`, which starts N ranks of a training, each behind a network interface of its own, sets the
interfaces' rate, lets some ways take turns, and prints one line of JSON for each: the median step of the slowest rank,
the same without any exchange, bytes sent, and processor seconds by thread. It takes hooks by MODULE:FUNCTION; those of
this file's `WAYS` are functions of this module. It needs root.

"engine" is the processor time of the thread in which a plan's codecs run, rank 0, milliseconds per step.

Not among the ways by default: CODEC_ORDER, in which the engine's thread yields to the training's, or comes before it,
or waits until backward has ended.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rows import Row, add, read

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
ORDERS = ("yielding", "before", "after")
REORDERED = {f"{codec}_{order}": (codec, order) for codec in ("powersgd_1", "sign", "int8") for order in ORDERS}
TITLES = {"none": "plain DDP", "fp16": "PyTorch fp16"} | {
    f"powersgd_r{rank}@1000": f"PyTorch PowerSGD {rank}, one bucket" for rank in (1, 2)
}


def _reorder(engine: Any, order: str) -> None:
    """Let the engine's thread yield to the one that calls this, or come before it, or work after backward."""
    accept, training, kept = engine._accept, threading.get_native_id(), []

    def priority(thread: int, niceness: int) -> None:
        os.setpriority(os.PRIO_PROCESS, thread, niceness)

    def in_order(bucket: Any) -> None:
        if order == "yielding":
            priority(threading.get_native_id(), 10)
        elif order == "before":
            priority(training, 10)
        kept.append(bucket)
        if order == "after" and not bucket.is_last:
            return
        for one in kept:
            accept(one)
        kept.clear()
        if order == "before" and bucket.is_last:
            priority(training, 0)

    engine._accept = in_order


def _hook(name: str, order: str = "") -> Callable[[Any, Any], tuple[Any, Any]]:
    """Make the function that gives the state and the hook of a uniform plan for a model that DDP has already."""

    def attach(model: Any, group: Any) -> tuple[Any, Any]:
        from torch.nn.parallel import DistributedDataParallel

        from gradlab.plan import Plan
        from gradlab.runtime import CompressionState, compression_hook

        # What is handed over is the model inside, as PyTorch's hooks need no more.
        [whole] = [x for x in gc.get_objects() if isinstance(x, DistributedDataParallel) and x.module is model]
        codec, settings = PLANS[name]
        state = CompressionState(Plan.uniform(whole, codec, **settings), whole)
        if order:
            _reorder(state.engine, order)
        return state, compression_hook

    return attach


globals().update({name: _hook(name) for name in PLANS})
globals().update({name: _hook(*way) for name, way in REORDERED.items()})


def measured(folder: Path, model: str, setting: str, options: argparse.Namespace) -> Iterator[Row]:
    """Run one setting's ways in turns, some at once: each holds a model of its own on every rank."""
    rate, ranks = setting.split(":")
    for first in range(0, len(options.ways), options.at_once):
        ways = options.ways[first : first + options.at_once]
        peers = [way for way in ways if way in PEERS]
        command = ["bash", str(folder / "run.sh"), "--ranks", ranks, "--rate", rate, "--model", model]
        command += ["--rounds", str(options.rounds), "--steps", str(options.steps), "--batch", str(options.batch)]
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
    """Print one model's table: step over computing alone, and milliseconds of the engine's thread."""
    columns = [(setting, *setting.split(":")) for setting in settings]
    kept = {
        (row["rate"], str(row["ranks"]), row["hook"]): row
        for row in rows
        if row.get("model") == model and "rate" in row
    }
    columns = [one for one in columns if any(key[:2] == one[1:] for key in kept)]
    print(f"\n{model}: step over computing alone (milliseconds of the engine's thread)\n")
    print("| way | " + " | ".join(f"{rate}, {ranks} ranks" for _, rate, ranks in columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    alone = [next(row["compute_s"] for key, row in kept.items() if key[:2] == one[1:]) for one in columns]
    print("| computing alone, s | " + " | ".join(f"{seconds:.2f}" for seconds in alone) + " |")
    for way in (*WAYS, *REORDERED):
        cells = [_cell(kept.get((rate, ranks, way))) for _, rate, ranks in columns]
        if any(cells):
            print(f"| {TITLES.get(way, way)} | " + " | ".join(cells) + " |")


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if "error" in row:
        return "failed"
    engine = row["cpu_s"].get("gradlab-engine")
    return f"{row['step_s'] / row['compute_s']:.2f}" + (f" ({1e3 * engine:.0f})" if engine else "")


def parts(rows: list[Row], model: str, setting: str) -> None:
    """Print what the steps of a setting take beyond computing alone: of the clock, of the wire, and of processors."""
    print(f"\n{model}, {setting}: milliseconds beyond computing alone\n")
    print("| way | step | wire | engine | sockets | training's thread |\n|---|---|---|---|---|---|")
    for row in rows:
        if (row.get("model"), f"{row.get('rate')}:{row.get('ranks')}") != (model, setting) or "error" in row:
            continue
        alone = row["compute_cpu_s"]
        engine, main, *sockets = (
            row["cpu_s"].get(name, 0) - alone.get(name, 0)
            for name in ("gradlab-engine", "MainThread", "gloo_tcp_loop", "pt_gloo_runloop")
        )
        figures = (row["step_s"] - row["compute_s"], row["wire_s"], engine, sum(sockets), main)
        print(f"| {TITLES.get(row['hook'], row['hook'])} | " + " | ".join(f"{1e3 * x:.0f}" for x in figures) + " |")


def main() -> None:
    """Measure what is not kept yet, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--netbench", type=Path)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), metavar="RATE:RANKS")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=(*WAYS, *REORDERED))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=8, help="ways that take turns; more of them need more memory")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--parts", metavar="RATE:RANKS", help="also print what a setting's steps are made of")
    options = parser.parse_args()
    if not options.table:
        if options.netbench is None or not (options.netbench / "run.sh").exists():
            raise SystemExit(f"--netbench {options.netbench}: expected a folder with run.sh")
        for model in options.models:
            for setting in options.settings:
                for row in measured(options.netbench.resolve(), model, setting, options):
                    add(options.rows, row, unshown=("cpu_s", "compute_cpu_s"))
    for model in options.models:
        table(read(options.rows), model, options.settings)
        if options.parts:
            parts(read(options.rows), model, options.parts)


if __name__ == "__main__":
    main()
