"""The cost of recording: step times and processor seconds without a recorder, with one, and with wandb.watch, in turns.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node RANKS benchmarks capture_cost --model resnet18
        [--steps 10] [--rounds 5] [--ways ...] [--rows ROWS.jsonl]
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 1 benchmarks capture_cost --disk [--rows ROWS.jsonl]
    python benchmarks capture_cost --table [--rows ROWS.jsonl]

Every way trains a model of its own with the same values. In every round each takes its turn of some steps, so that a
slow spell of the machine falls on all. A turn's time is that of its slowest rank. Ratios are to the turn without a
recorder in the same round. On two cores one rank leaves a core to the writer's thread, and two ranks leave none.

Processor seconds are rank 0's, those that its writer still spends after a turn included: of the threads that train, of
the recorder's writer, and of other processes that it has started, such as wandb's.

Checksums are computed by zlib, or by ISA-L where it is installed: a run with it keeps rows of its own.

--disk writes a gigabyte in turns: by a plain loop of writes with an fsync at the end, and by recorders of a model whose
gradients are there already, from the first step to the closed trace. Its folder is --folder, a temporary one
by default. wandb.watch is timed where wandb is installed. It runs offline.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rows import Row, add, read
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradlab.capture import TraceRecorder
from gradlab.datasets import resnet, transformer
from gradlab.trace.crc import crc32

ROWS = Path(__file__).parents[1] / "results" / "capture-cost.jsonl"
OFF = "no recorder"
SETTINGS: dict[str, dict[str, Any]] = {
    "every step, float32": {},
    "every step, bfloat16": {"dtype": "bfloat16"},
    "every 10th step, float32": {"every": 10},
}
WATCH = "wandb.watch, every step"
WAYS = (OFF, *SETTINGS, WATCH)
PLAIN = "write and fsync"
CHECKSUMS = crc32.__module__.partition(".")[0]  # "zlib" or "isal"
WRITER = "gradlab-trace-writer"
QUIET_SECONDS, QUIET_SHARE = 0.1, 0.05  # work is over when this process takes a smaller share of a core for so long

AfterStep = Callable[[torch.Tensor], None]


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


MODELS = {"resnet18": (residual_step, 8), "transformer": (transformer_step, 16)}


def recording(ddp: DistributedDataParallel, optimizer: Any, folder: Path, **settings: Any) -> tuple[AfterStep, Any]:
    """Attach a recorder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # one rank alone says nothing about others
        recorder = TraceRecorder(ddp, folder, optimizer=optimizer, **settings)
    return lambda loss: recorder.annotate(loss=loss), recorder.close


def watching(ddp: DistributedDataParallel, folder: Path) -> tuple[AfterStep, Any]:
    """Attach wandb.watch, which keeps a histogram of 64 bins of every gradient."""
    import wandb

    folder.mkdir(exist_ok=True)
    run = wandb.init(mode="offline", project="capture-cost", dir=folder, settings=wandb.Settings(silent=True))
    run.watch(ddp, log="gradients", log_freq=1)
    return lambda loss: run.log({"loss": loss.item()}), run.finish


class Contestant:
    """One way's model, its step and its figures."""

    def __init__(self, way: str, model: str, batch: int, folder: Path) -> None:
        torch.manual_seed(1)
        bare, self._loss = MODELS[model][0](batch)
        self.parameters = sum(parameter.numel() for parameter in bare.parameters())
        self.ddp = DistributedDataParallel(bare)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.001)
        self.folder = folder / way.replace(" ", "-")
        self.after: AfterStep = lambda loss: None
        self.close: Callable[[], object] = lambda: None
        others = writer_threads()
        if way in SETTINGS:
            self.after, self.close = recording(self.ddp, self.optimizer, self.folder, **SETTINGS[way])
        elif way == WATCH:
            self.after, self.close = watching(self.ddp, self.folder)
        self.writers = writer_threads() - others
        self.seconds: list[float] = []
        self.processor = {"training": 0.0, "writer": 0.0, "others": 0.0}
        self.steps = 0

    def step(self) -> None:
        """Train one step."""
        self.optimizer.zero_grad()
        loss = self._loss(self.ddp)
        loss.backward()
        self.after(loss.detach())
        self.optimizer.step()

    def turn(self, steps: int, counted: bool = True) -> None:
        """Take some steps that all ranks begin together, then wait until what they left to others is done."""
        dist.barrier()
        if counted and not self.seconds:
            self.processor["writer"] -= self.writer_seconds()
        before, start = processor_seconds(), time.perf_counter()
        for _ in range(steps):
            self.step()
        slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        await_quiet()
        self.steps += steps
        if counted:
            for who, spent in processor_seconds().items():
                self.processor[who] += spent - before[who]
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            self.seconds.append(float(slowest) / steps)

    def writer_seconds(self) -> float:
        """Processor seconds of its recorder's writer so far. It may write a step while others have their turn."""
        return sum(_scheduled(Path(f"/proc/self/task/{thread}")) for thread in self.writers)


def writer_threads() -> set[int]:
    """The recorders' writer threads, as the kernel numbers them."""
    return {thread.native_id for thread in threading.enumerate() if thread.name == WRITER and thread.native_id}


def processor_seconds() -> dict[str, float]:
    """Processor seconds so far but those of writers, by who spent them. Processes that have ended are left out."""
    writers = writer_threads()
    spent = {"training": 0.0, "others": 0.0}
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) not in writers:
            spent["training"] += _scheduled(task)
    for process in _started_by(os.getpid()):
        for task in Path(f"/proc/{process}/task").iterdir():
            spent["others"] += _scheduled(task)
    return spent


def _scheduled(task: Path) -> float:
    try:
        return int((task / "schedstat").read_text().split()[0]) / 1e9
    except OSError:  # it has ended meanwhile
        return 0.0


def _started_by(parent: int) -> list[int]:
    """Processes that a process has started, and those that they have started."""
    children: list[int] = []
    for task in Path(f"/proc/{parent}/task").iterdir():
        for child in (task / "children").read_text().split():
            children += [int(child), *_started_by(int(child))]
    return children


def await_quiet() -> None:
    """Wait until neither this process nor those that it has started take time of a processor."""
    spent = _all_seconds()
    while True:
        time.sleep(QUIET_SECONDS)
        now = _all_seconds()
        if now - spent < QUIET_SHARE * QUIET_SECONDS:
            return
        spent = now


def _all_seconds() -> float:
    writers = (_scheduled(Path(f"/proc/self/task/{thread}")) for thread in writer_threads())
    return sum(processor_seconds().values()) + sum(writers)


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def compare(options: argparse.Namespace, folder: Path) -> list[Row]:
    """Let all ways take turns; a row for each."""
    batch = options.batch or MODELS[options.model][1]
    ways = [way for way in options.ways if way != WATCH or importlib.util.find_spec("wandb")]
    contestants = {way: Contestant(way, options.model, batch, folder) for way in ways}
    for contestant in contestants.values():
        contestant.turn(options.steps, counted=False)
    for _ in range(options.rounds):
        for contestant in contestants.values():
            contestant.turn(options.steps)
    rows = []
    for way, contestant in contestants.items():
        contestant.processor["writer"] += contestant.writer_seconds()
        contestant.close()
        dist.barrier()
        counted = options.steps * options.rounds
        rows.append(
            {
                "model": options.model,
                "parameters": contestant.parameters,
                "batch": batch,
                "ranks": dist.get_world_size(),
                "checksums": CHECKSUMS,
                "way": way,
                "seconds": [round(value, 5) for value in contestant.seconds],
                "processor": {who: round(value / counted, 5) for who, value in contestant.processor.items()},
                "bytes": round(size_of(contestant.folder) / dist.get_world_size() / contestant.steps),
            }
        )
    missing = [way for way in options.ways if way not in ways]
    about = {"model": options.model, "ranks": dist.get_world_size(), "checksums": CHECKSUMS}
    return rows + [{**about, "way": way} for way in missing]


@dataclass
class Disk:
    """A gigabyte of steps of ResNet-18, written to one folder.

    steps: number of steps, of 4 bytes per parameter.
    """

    folder: Path
    steps: int = 24

    def __post_init__(self) -> None:
        self.model, _ = residual_step(1)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())

    def plain(self) -> tuple[int, float]:
        """Write as many bytes as the recorder of all steps, and force them to the disk; bytes and seconds."""
        step, path = memoryview(os.urandom(4 * self.parameters)), self.folder / "plain"
        start = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            for _ in range(self.steps):
                for at in range(0, len(step), 2**20):
                    file.write(step[at : at + 2**20])
            os.fsync(file.fileno())
        return path.stat().st_size, time.perf_counter() - start

    def recorded(self, **settings: Any) -> tuple[int, float]:
        """Record as many steps as come; bytes and seconds."""
        ddp = DistributedDataParallel(_Gradients(self.model), gradient_as_bucket_view=True)
        path = self.folder / "trace"
        _, close = recording(ddp, None, path, **settings)
        start = time.perf_counter()
        for _ in range(self.steps):
            ddp().backward()
        close()
        return size_of(path), time.perf_counter() - start


class _Gradients(nn.Module):
    """Has a model's parameters, and a loss whose gradients are there already."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._given = [torch.randn_like(parameter) for parameter in model.parameters()]

    def forward(self) -> torch.Tensor:
        return _Given.apply(self._given, *self.model.parameters())


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: Sequence[torch.Tensor], *parameters: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> Any:
        return (None, *ctx.gradients)


def disk_rows(options: argparse.Namespace, folder: Path) -> list[Row]:
    """Let all ways of writing take turns; a row for each."""
    disk = Disk(folder)
    ways: dict[str, Callable[[], tuple[int, float]]] = {
        PLAIN: disk.plain,
        "every step, float32": disk.recorded,
        "every step, bfloat16": lambda: disk.recorded(dtype="bfloat16"),
    }
    rows: dict[str, Row] = {way: {"disk": way, "checksums": CHECKSUMS, "bytes": 0, "seconds": []} for way in ways}
    for turn in range(options.rounds + 1):
        for way, write in ways.items():
            size, seconds = write()
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()
            if turn:  # the first turn warms up
                rows[way]["bytes"] = size
                rows[way]["seconds"].append(round(seconds, 4))
    return list(rows.values())


def table(rows: Sequence[Row]) -> str:
    """Print all rows: first what training takes, then the disk."""
    lines = [
        "| model, ranks | recorder | step, ms | ratio to none (least to most) | "
        "processor ms per step: training, writer, other processes | MB per step and rank |",
        "|---|---|---|---|---|---|",
    ]
    steps = [row for row in rows if "way" in row]
    none = {_run_of(row): row for row in steps if row["way"] == OFF}
    lines += [_line(row, none[_run_of(row)]) for row in steps]
    lines += ["", "| written by | MB | seconds (least to most) | MB/s | of plain writing |", "|---|---|---|---|---|"]
    disk = [row for row in rows if "disk" in row]
    speeds = {(row["checksums"], row["disk"]): row["bytes"] / statistics.median(row["seconds"]) / 1e6 for row in disk}
    for row in disk:
        took = f"{statistics.median(row['seconds']):.2f} ({min(row['seconds']):.2f} to {max(row['seconds']):.2f})"
        speed, plain = speeds[row["checksums"], row["disk"]], speeds[row["checksums"], PLAIN]
        name = row["disk"] if row["disk"] == PLAIN else _titled(row["disk"], row)
        lines.append(f"| {name} | {row['bytes'] / 1e6:.0f} | {took} | {speed:.0f} | {speed / plain:.2f} |")
    return "\n".join(lines)


def _run_of(row: Row) -> tuple[str, int, str]:
    return row["model"], row["ranks"], row["checksums"]


def _titled(way: str, row: Row) -> str:
    """A way of recording, and what computed its checksums unless that is zlib."""
    return way if way in (OFF, WATCH) or row["checksums"] == "zlib" else f"{way}, {row['checksums']}"


def _line(row: Row, none: Row) -> str:
    name, way = f"{row['model']}, {row['ranks']}", _titled(row["way"], row)
    if "seconds" not in row:
        return f"| {name} | {way} | not installed | - | - | - |"
    ratios = [mine / base for mine, base in zip(row["seconds"], none["seconds"], strict=True)]
    spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    spent = ", ".join(f"{1e3 * row['processor'][who]:.1f}" for who in ("training", "writer", "others"))
    step = f"{1e3 * statistics.median(row['seconds']):.1f}"
    return f"| {name} | {way} | {step} | {spread} | {spent} | {row['bytes'] / 1e6:.1f} |"


def main() -> None:
    """Measure on all ranks, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="resnet18")
    for name, default in (("--batch", None), ("--steps", 10), ("--rounds", 5)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rows", type=Path, default=ROWS)
    for flag in ("--disk", "--table"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table(read(options.rows)))
        return
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    above = options.folder or Path(tempfile.gettempdir())
    folder = above / f"gradlab-capture-cost-{os.environ['MASTER_PORT']}"  # the same one on all ranks
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for row in (disk_rows if options.disk else compare)(options, folder):
            if dist.get_rank() == 0:
                add(options.rows, row)
        dist.barrier()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
