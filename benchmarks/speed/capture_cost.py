"""The cost of recording: step times and processor seconds without a recorder and with one, in turns.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node RANKS benchmarks capture_cost --model resnet18
        [--steps 10] [--rounds 5] [--rows ROWS.jsonl]
    python benchmarks capture_cost --table [--rows ROWS.jsonl]

Every way trains a model of its own with the same values, and in every round each takes its turn of some steps. A turn's
time is that of its slowest rank; ratios are to the turn without a recorder in the same round. On two cores one rank
leaves a core to the writer's thread, and two ranks leave none. Processor seconds are rank 0's, of the recorder's writer
and of all other threads. Checksums are computed by zlib, or by ISA-L where it is installed. A row is a way.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rows import Row, add, markdown, options, read
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradlab.capture import TraceRecorder
from gradlab.datasets import resnet, transformer
from gradlab.trace.crc import crc32

ROWS = Path(__file__).parents[1] / "results" / "capture-cost.jsonl"
OFF = "no recorder"
WAYS: dict[str, dict[str, Any]] = {
    OFF: {},
    "every step, float32": {},
    "every step, bfloat16": {"dtype": "bfloat16"},
    "every 10th step, float32": {"every": 10},
}
CHECKSUMS = crc32.__module__.partition(".")[0]  # "zlib" or "isal"
WRITER = "gradlab-trace-writer"
QUIET_SECONDS, QUIET_SHARE = 0.1, 0.05  # work is over when this process takes a smaller share of a core for so long


def residual_step() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    model = resnet.initialized(3, (64, 128, 256, 512), (2, 2, 2, 2), 10, seed=0)
    return model, torch.randn(8, 3, 32, 32), torch.randint(10, (8,))


def transformer_step() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    model = transformer.initialized(transformer.TransformerSize(4096, 64, width=256), seed=0)
    return model, torch.randint(4096, (16, 64)), torch.randint(4096, (16 * 64,))


MODELS = {"resnet18": residual_step, "transformer": transformer_step}


class Contestant:
    def __init__(self, way: str, model: str, folder: Path) -> None:
        torch.manual_seed(1)
        bare, self._inputs, self._targets = MODELS[model]()
        self.ddp = DistributedDataParallel(bare)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.001)
        self.folder = folder / way.replace(" ", "-")
        self.recorder: TraceRecorder | None = None
        others = writer_threads()
        if way != OFF:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # one rank alone says nothing about others
                self.recorder = TraceRecorder(self.ddp, self.folder, optimizer=self.optimizer, **WAYS[way])
        self.writers = writer_threads() - others
        self.seconds: list[float] = []
        self.processor = {"training": 0.0, "writer": 0.0}
        self.steps = 0

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.ddp(self._inputs).flatten(0, -2), self._targets)
        loss.backward()
        if self.recorder:
            self.recorder.annotate(loss=loss.detach())
        self.optimizer.step()

    def turn(self, steps: int, counted: bool = True) -> None:
        """Take some steps that all ranks begin together, then wait until what they left to others is done."""
        dist.barrier()
        if counted and not self.seconds:
            self.processor["writer"] -= self.writer_seconds()
        before, start = training_seconds(), time.perf_counter()
        for _ in range(steps):
            self.step()
        slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        await_quiet()
        self.steps += steps
        if counted:
            self.processor["training"] += training_seconds() - before
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            self.seconds.append(float(slowest) / steps)

    def writer_seconds(self) -> float:
        """Processor seconds of its recorder's writer so far. It may write a step while others have their turn."""
        return sum(map(_scheduled, self.writers))

    def row(self, counted: int) -> Row:
        """Close the recorder; the figures of as many counted steps."""
        self.processor["writer"] += self.writer_seconds()
        if self.recorder:
            self.recorder.close()
        dist.barrier()
        size = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        return {
            "parameters": sum(parameter.numel() for parameter in self.ddp.parameters()),
            "seconds": [round(value, 5) for value in self.seconds],
            "processor": {who: round(value / counted, 5) for who, value in self.processor.items()},
            "bytes": round(size / dist.get_world_size() / self.steps),
        }


def writer_threads() -> set[int]:
    """The recorders' writer threads, as the kernel numbers them."""
    return {thread.native_id for thread in threading.enumerate() if thread.name == WRITER and thread.native_id}


def training_seconds() -> float:
    """Processor seconds so far of all threads but writers."""
    return time.process_time() - sum(map(_scheduled, writer_threads()))


def _scheduled(thread: int) -> float:
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_bytes().split()[0]) / 1e9
    except OSError:  # it has ended meanwhile
        return 0.0


def await_quiet() -> None:
    """Wait until this process takes no time of a processor."""
    spent = time.process_time()
    while True:
        time.sleep(QUIET_SECONDS)
        now = time.process_time()
        if now - spent < QUIET_SHARE * QUIET_SECONDS:
            return
        spent = now


def compare(model: str, steps: int, rounds: int, folder: Path) -> Iterator[Row]:
    contestants = {way: Contestant(way, model, folder) for way in WAYS}
    for turn in range(rounds + 1):
        for contestant in contestants.values():
            contestant.turn(steps, counted=turn > 0)
    about = {"model": model, "ranks": dist.get_world_size(), "checksums": CHECKSUMS}
    for way, contestant in contestants.items():
        yield about | {"way": way} | contestant.row(steps * rounds)


def table(rows: Sequence[Row]) -> str:
    none = {_run_of(row): row for row in rows if row["way"] == OFF}
    heads = ("model, ranks", "recorder", "step, ms", "ratio to none (least to most)")
    more = ("processor ms per step: training, writer", "MB per step and rank")
    return markdown((*heads, *more), [_line(row, none[_run_of(row)]) for row in rows])


def _run_of(row: Row) -> tuple[str, int, str]:
    return row["model"], row["ranks"], row["checksums"]


def _line(row: Row, none: Row) -> list[str]:
    ratios = [mine / base for mine, base in zip(row["seconds"], none["seconds"], strict=True)]
    spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    spent = ", ".join(f"{1e3 * row['processor'][who]:.1f}" for who in ("training", "writer"))
    step, size = f"{1e3 * statistics.median(row['seconds']):.1f}", f"{row['bytes'] / 1e6:.1f}"
    way = row["way"] + f", {row['checksums']}" * (row["way"] != OFF and row["checksums"] != "zlib")
    return [f"{row['model']}, {row['ranks']}", way, step, spread, spent, size]


def main() -> None:
    chosen = options(__doc__, model=MODELS, steps=10, rounds=5, rows=ROWS, table=False)
    if chosen.table:
        print(table(read(chosen.rows)))
        return
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    # The same folder on all ranks.
    folder = Path(tempfile.gettempdir()) / f"gradlab-capture-cost-{os.environ['MASTER_PORT']}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for row in compare(chosen.model, chosen.steps, chosen.rounds, folder):
            if dist.get_rank() == 0:
                add(chosen.rows, row)
        dist.barrier()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    dist.destroy_process_group()
