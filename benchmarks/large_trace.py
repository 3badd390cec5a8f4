"""Analysing large recordings: wall time, speed beside a plain read, and peak memory of a worker, part by part.

    python benchmarks/large_trace.py --trace FOLDER --model resnet20 --gigabytes 1 --rows ROWS.jsonl [--workers 2]
    python benchmarks/large_trace.py --trace FOLDER --model resnet18 --gigabytes 4 --rows ROWS.jsonl
    python benchmarks/large_trace.py --rows ROWS.jsonl --table

Records noise with a common part for a ResNet-20 (0.27 million parameters) or a ResNet-18 (11.2 million) on 4 ranks,
until the recording has the size asked for, if FOLDER is not there yet. Then, in this order:

    plain read                all of the recording's files, from the first byte to the last, the second time
    read through the trace    all values through `Trace.read`, by the workers, verified where whole rows are read
    parts                     `examine` and the report, a part for each name that reports progress
    gradlab analyze           the command in a process of its own, from its start to its end, and with --quick

Speed is the recording's gradients over the part's seconds, whatever it samples of them. Peak memory is the kernel's
(VmHWM), which is reset at the beginning of each part: of the worker with the most, and of the process that starts
them. What ROWS.jsonl has is measured again, and the table shows the last row of each part.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from layer_lists import resnet
from rows import Row, add, read

from gradlab.analysis.forecast import Network
from gradlab.analysis.forecast.profile import Profile
from gradlab.analysis.parallel import default_workers, share_out
from gradlab.analysis.report.examine import examine
from gradlab.analysis.report.trace_report import write_trace_report
from gradlab.capture.writing.trace_writer import TraceWriter
from gradlab.layout import Layer
from gradlab.trace import Trace

_BLOCK = 2**24
_WIDTH = 2**18
_COMPUTE = "0.36s"


MODELS: dict[str, tuple[str, Callable[[], list[Layer]]]] = {
    "resnet20": ("ResNet-20", lambda: resnet((16, 32, 64), 3, 10)),
    "resnet18": ("ResNet-18", lambda: resnet((64, 128, 256, 512), 2, 1000)),
}


def record(path: Path, layers: Sequence[Layer], nbytes: float, nodes: int = 4) -> None:
    """Gradients of signal share 0.1, until the trace holds so many bytes."""
    steps = int(np.ceil(nbytes / (4 * nodes * sum(layer.numel for layer in layers))))
    generator = np.random.default_rng(0)
    with TraceWriter(path, list(layers), nodes) as writer:
        for step in range(steps):
            common = {x.name: generator.standard_normal(x.shape, dtype=np.float32) for x in layers}
            for rank in range(nodes):
                own = {
                    x.name: np.float32(0.316) * common[x.name]
                    + np.float32(0.949) * generator.standard_normal(x.shape, dtype=np.float32)
                    for x in layers
                }
                writer.append(rank, step, own, loss=1.0, learning_rate=0.1, loss_scale=1.0)


def plain_read(path: Path) -> int:
    """Bytes of all files, read in order."""
    total = 0
    for file in sorted(path.rglob("*")):
        if file.is_file():
            with file.open("rb", buffering=0) as stream:
                while chunk := stream.read(_BLOCK):
                    total += len(chunk)
    return total


def read_layer(path: str, name: str) -> int:
    """Bytes of one layer on all ranks through the trace."""
    total = 0
    with Trace(path) as trace:
        numel = trace.layer(name).numel
        for rank in range(trace.world_size):
            for first in range(0, numel, _WIDTH):
                part = None if numel <= _WIDTH else slice(first, min(first + _WIDTH, numel))
                total += trace.read(name, rank, 0, len(trace.steps), part).nbytes
    return total


def processes() -> list[int]:
    """This process and all that it, or one of these, has started."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:  # it has ended meanwhile
                continue
    found = [os.getpid()]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def forget_peaks() -> None:
    """Let the kernel begin anew to note the most memory of each of our processes."""
    for process in processes():
        try:
            Path(f"/proc/{process}/clear_refs").write_text("5", encoding="utf-8")
        except OSError:
            continue


def peaks() -> tuple[int, int]:
    """The most memory of this process and of the largest that it has started, MiB, since it was forgotten."""
    by_process = {}
    for process in processes():
        try:
            status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
        except OSError:
            continue
        known = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
        by_process[process] = int(known[0]) // 1024 if known else 0
    own = by_process.pop(os.getpid())
    return own, max(by_process.values(), default=0)


class Measured:
    """Measures parts of work, and keeps a row of each. As progress of the work, a new name begins a new part.

    Args:
        key: what all rows have.
        rows: file that they are kept in.
        nbytes: of the recording's gradients.
    """

    def __init__(self, key: Row, rows: Path | None, nbytes: int) -> None:
        self._key, self._rows, self._nbytes = key, rows, nbytes
        self._part, self._began = "", 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self._part:
            self.begin(what)

    def begin(self, part: str) -> None:
        """End a part and begin the next; "" begins none."""
        seconds = time.perf_counter() - self._began
        if self._part:
            own, worker = peaks()
            self.keep(self._part, seconds, own_mib=own, worker_mib=worker)
        forget_peaks()
        self._part, self._began = part, time.perf_counter()

    def keep(self, part: str, seconds: float, nbytes: int | None = None, **more: Any) -> None:
        """Keep a row, and print it."""
        speed = (nbytes or self._nbytes) / seconds / 1e6
        row = self._key | {"part": part, "seconds": round(seconds, 2), "mb_per_second": round(speed, 1)} | more
        if self._rows is None:
            print(row, flush=True)
        else:
            add(self._rows, row)

    def __enter__(self) -> Measured:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.begin("")


def measure(path: Path, model: str, workers: int, rows: Path | None) -> None:
    """Measure everything of a recording."""
    on_disk = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    with Trace(path) as trace:
        names = [layer.name for layer in trace.layers]
        nbytes = 4 * len(trace.steps) * trace.world_size * sum(layer.numel for layer in trace.layers)
        key = {"model": MODELS[model][0], "gigabytes": round(nbytes / 1e9, 2), "iterations": len(trace.steps)}
    key |= {"workers": workers, "quick": False}
    plain_read(path)
    began = time.perf_counter()
    plain_read(path)
    Measured(key, rows, nbytes).keep("plain read", time.perf_counter() - began, on_disk)
    with Measured(key, rows, nbytes) as watch:
        share_out(peaks, [()] * workers, workers=workers)  # processes begin
        watch.begin("read through the trace")
        share_out(read_layer, [(str(path), name) for name in names], workers=workers)
    network = Network(profile=Profile(0.36, "as given"))
    with tempfile.TemporaryDirectory() as folder:
        with Trace(path) as trace, Measured(key, rows, nbytes) as watch:
            examination = examine(trace, network=network, workers=workers, progress=watch)
            watch.begin("report")
            write_trace_report(trace, folder, examination, overwrite=True, workers=workers, progress=watch)
        for quick in (False, True):
            seconds = command(path, Path(folder), workers, quick)
            Measured(key | {"quick": quick}, rows, nbytes).keep("gradlab analyze", seconds)


def command(path: Path, out: Path, workers: int, quick: bool) -> float:
    """Run `gradlab analyze`, and return its seconds."""
    words = [sys.executable, "-c", "from gradlab.cli.main import main; main()", "analyze", str(path), "--out", str(out)]
    words += ["--overwrite", "--compute-seconds", _COMPUTE, "--workers", str(workers), *["--quick"] * quick]
    began = time.perf_counter()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def recordings(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """The last row of each part, a list by recording."""
    by_recording: dict[tuple[Any, ...], dict[tuple[str, bool], Row]] = {}
    for row in rows:
        parts = by_recording.setdefault((row["model"], row["gigabytes"], row["workers"]), {})
        parts[row["part"], row["quick"]] = row
    for parts in by_recording.values():
        yield list(parts.values())


def table(rows: Sequence[Row]) -> str:
    """A line per part; columns by recording: seconds, MB/s, and the most memory of a worker in MiB."""
    head, columns = ["part"], []
    for found in recordings(rows):
        first = found[0]
        head += [f"{first['model']}, {first['gigabytes']:.1f} GB: s", "MB/s", "MiB"]
        columns.append({_title(row): row for row in found})
    titles = list(dict.fromkeys(title for column in columns for title in column))
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    for title in sorted(titles, key=lambda title: title.startswith("`")):
        cells = [cell for column in columns for cell in _cells(column.get(title))]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _title(row: Row) -> str:
    if row["part"] != "gradlab analyze":
        return str(row["part"])
    return "`gradlab analyze --quick`" if row["quick"] else "`gradlab analyze`"


def _cells(row: Row | None) -> list[str]:
    if row is None:
        return ["-"] * 3
    return [f"{row['seconds']:.1f}", f"{row['mb_per_second']:.0f}", str(row.get("worker_mib") or "-")]


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="recorded if it is not there")
    parser.add_argument("--model", choices=MODELS, default="resnet20")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=default_workers())
    parser.add_argument("--rows", type=Path, help="where rows are kept")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if arguments.trace is not None:
        if not arguments.trace.exists():
            record(arguments.trace, MODELS[arguments.model][1](), 1e9 * arguments.gigabytes)
        measure(arguments.trace, arguments.model, arguments.workers, arguments.rows)
    if arguments.table:
        print(table(read(arguments.rows)))


if __name__ == "__main__":
    main()
