"""The cost of recording: step times and processor seconds without a recorder and with one, in turns.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node RANKS benchmarks capture_cost --model resnet18
        [--steps 10] [--rounds 5] [--rows ROWS.jsonl]
    python benchmarks capture_cost --table [--rows ROWS.jsonl]

Every way trains a model of its own with the same values. In every round each takes its turn of some steps, so that a
slow spell of the machine falls on all. A turn's time is that of its slowest rank. Ratios are to the turn without a
recorder in the same round. On two cores one rank leaves a core to the writer's thread, and two ranks leave none.

Processor seconds are rank 0's, of the threads that train and of the recorder's writer, with those that the writer still
spends after a turn. Checksums are computed by zlib, or by ISA-L where it is installed: a run with it keeps rows of its
own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
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


def residual_step(batch: int) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """ResNet-18 for images of 32 x 32, and a step's loss on random ones."""
    images, classes = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    model = resnet.initialized(3, (64, 128, 256, 512), (2, 2, 2, 2), 10, seed=0)
    return model, lambda ddp: nn.functional.cross_entropy(ddp(images), classes)


def transformer_step(batch: int) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """A transformer of four blocks on 64 tokens, and a step's loss on random ones."""
    tokens, following = torch.randint(4096, (batch, 64)), torch.randint(4096, (batch * 64,))
    model = transformer.initialized(transformer.TransformerSize(4096, 64, width=256), seed=0)
    return model, lambda ddp: nn.functional.cross_entropy(ddp(tokens).flatten(0, 1), following)


MODELS = {"resnet18": partial(residual_step, 8), "transformer": partial(transformer_step, 16)}


class Contestant:
    """One way's model, its step and its figures."""

    def __init__(self, way: str, model: str, folder: Path) -> None:
        torch.manual_seed(1)
        bare, self._loss = MODELS[model]()
        self.parameters = sum(parameter.numel() for parameter in bare.parameters())
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
        """Train one step."""
        self.optimizer.zero_grad()
        loss = self._loss(self.ddp)
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
        return sum(_scheduled(Path(f"/proc/self/task/{thread}")) for thread in self.writers)


def writer_threads() -> set[int]:
    """The recorders' writer threads, as the kernel numbers them."""
    return {thread.native_id for thread in threading.enumerate() if thread.name == WRITER and thread.native_id}


def training_seconds() -> float:
    """Processor seconds so far of all threads but writers."""
    writers = writer_threads()
    return sum(_scheduled(task) for task in Path("/proc/self/task").iterdir() if int(task.name) not in writers)


def _scheduled(task: Path) -> float:
    try:
        return int((task / "schedstat").read_text().split()[0]) / 1e9
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


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def compare(chosen: argparse.Namespace, folder: Path) -> list[Row]:
    """Let all ways take turns; a row for each."""
    about = {"model": chosen.model, "ranks": dist.get_world_size(), "checksums": CHECKSUMS}
    contestants = {way: Contestant(way, chosen.model, folder) for way in WAYS}
    for contestant in contestants.values():
        contestant.turn(chosen.steps, counted=False)
    for _ in range(chosen.rounds):
        for contestant in contestants.values():
            contestant.turn(chosen.steps)
    rows, counted = [], chosen.steps * chosen.rounds
    for way, contestant in contestants.items():
        contestant.processor["writer"] += contestant.writer_seconds()
        if contestant.recorder:
            contestant.recorder.close()
        dist.barrier()
        row = {
            "way": way,
            "parameters": contestant.parameters,
            "seconds": [round(value, 5) for value in contestant.seconds],
            "processor": {who: round(value / counted, 5) for who, value in contestant.processor.items()},
            "bytes": round(size_of(contestant.folder) / dist.get_world_size() / contestant.steps),
        }
        rows.append(about | row)
    return rows


def table(rows: Sequence[Row]) -> str:
    """Lay out what training takes, a line per way."""
    none = {_run_of(row): row for row in rows if row["way"] == OFF}
    heads = ("model, ranks", "recorder", "step, ms", "ratio to none (least to most)")
    more = ("processor ms per step: training, writer", "MB per step and rank")
    return markdown((*heads, *more), [_line(row, none[_run_of(row)]) for row in rows])


def _run_of(row: Row) -> tuple[str, int, str]:
    return row["model"], row["ranks"], row["checksums"]


def _titled(way: str, row: Row) -> str:
    """A way of recording, and what computed its checksums unless that is zlib."""
    return way if way == OFF or row["checksums"] == "zlib" else f"{way}, {row['checksums']}"


def _line(row: Row, none: Row) -> list[str]:
    ratios = [mine / base for mine, base in zip(row["seconds"], none["seconds"], strict=True)]
    spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    spent = ", ".join(f"{1e3 * row['processor'][who]:.1f}" for who in ("training", "writer"))
    step, size = f"{1e3 * statistics.median(row['seconds']):.1f}", f"{row['bytes'] / 1e6:.1f}"
    return [f"{row['model']}, {row['ranks']}", _titled(row["way"], row), step, spread, spent, size]


def main() -> None:
    """Measure on all ranks, or print the table."""
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
        for row in compare(chosen, folder):
            if dist.get_rank() == 0:
                add(chosen.rows, row)
        dist.barrier()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
