"""Analysing a trace larger than memory: peak memory of every process, and reading beside a plain sequential read.

Records noise with a common part for a ResNet-18 (11.2 million parameters) on 4 nodes until the trace has the size asked
for, drops nothing from the page cache unless run by root, and then measures in one run:

    plain        all of the trace's files, read from the first byte to the last
    trace        all values through `Trace.read`, in stretches of columns, verified where whole rows are read
    spectrum     `measure_spectrum` of all values (inner products included), by the workers
    examine      everything that `gradlab analyze` does

    python benchmarks/large_trace.py --trace runs/large --gigabytes 4.3 --workers 2
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gradlab.analysis.forecast import Network
from gradlab.analysis.forecast.profile import Profile
from gradlab.analysis.measure.spectrum import measure_spectrum
from gradlab.analysis.parallel import default_workers, share_out
from gradlab.analysis.report.examine import examine
from gradlab.analysis.report.trace_report import write_trace_report
from gradlab.capture.writing.trace_writer import TraceWriter
from gradlab.layout import Layer
from gradlab.trace import Trace

_BLOCK = 2**24
_WIDTH = 2**18


def resnet18() -> list[Layer]:
    """Its weight matrices and batch norms, CIFAR form."""
    layers, channels = [Layer("conv1.weight", (64, 3, 3, 3), "convolution")], 64
    for stage, width in enumerate((64, 128, 256, 512)):
        for block in range(2):
            name = f"layer{stage + 1}.{block}"
            layers.append(Layer(f"{name}.conv1.weight", (width, channels, 3, 3), "convolution"))
            layers.append(Layer(f"{name}.bn1.weight", (width,), "normalization"))
            layers.append(Layer(f"{name}.conv2.weight", (width, width, 3, 3), "convolution"))
            if channels != width:
                layers.append(Layer(f"{name}.downsample.weight", (width, channels, 1, 1), "convolution"))
            channels = width
    return [*layers, Layer("fc.weight", (1000, 512), "linear")]


def record(path: Path, nbytes: float, nodes: int = 4) -> None:
    """Gradients of signal share 0.1, until the trace holds so many bytes."""
    layers = resnet18()
    steps = int(np.ceil(nbytes / (4 * nodes * sum(layer.numel for layer in layers))))
    generator = np.random.default_rng(0)
    with TraceWriter(path, layers, nodes) as writer:
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


def read_layer(path: str, name: str) -> tuple[int, int]:
    """Bytes of one layer on all ranks through the trace; and this process's peak memory in bytes."""
    total = 0
    with Trace(path) as trace:
        numel = trace.layer(name).numel
        for rank in range(trace.world_size):
            for first in range(0, numel, _WIDTH):
                part = None if numel <= _WIDTH else slice(first, min(first + _WIDTH, numel))
                total += trace.read(name, rank, 0, len(trace.steps), part).nbytes
    return total, peak()


def peak() -> int:
    """Of this process's memory since it began, in bytes; what its parent held before does not count."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def peak_of(path: str, name: str) -> tuple[str, int]:
    """A worker's peak memory so far; which worker, nobody needs to know."""
    return name, peak()


def timed(what: str, nbytes: int, work: Callable[[], object]) -> None:
    """Run and say how long, and how fast; by then the peak memory of this process."""
    began = time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    print(f"{what:>9} {seconds:8.1f} s {nbytes / seconds / 1e6:8.0f} MB/s   {peak() / 2**20:6.0f} MiB", flush=True)


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="recorded if it is not there")
    parser.add_argument("--gigabytes", type=float, default=4.3)
    parser.add_argument("--workers", type=int, default=default_workers())
    parser.add_argument("--report", type=Path, help="write the report here, too")
    arguments = parser.parse_args()
    path = arguments.trace
    if not path.exists():
        record(path, 1e9 * arguments.gigabytes)
    on_disk = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    with Trace(path) as trace:
        names, steps = [layer.name for layer in trace.layers], len(trace.steps)
        nbytes = 4 * steps * trace.world_size * sum(layer.numel for layer in trace.layers)
    print(f"{on_disk / 1e9:.2f} GB on disk, {nbytes / 1e9:.2f} GB of gradients, {arguments.workers} workers")
    timed("plain", on_disk, lambda: plain_read(path))
    timed("plain", on_disk, lambda: plain_read(path))
    calls, peaks = [(str(path), name) for name in names], set[int]()
    timed("trace, 1", nbytes, lambda: share_out(read_layer, calls))
    timed("trace", nbytes, lambda: share_out(read_layer, calls, workers=arguments.workers))
    with Trace(path) as trace:
        timed("spectrum", nbytes, lambda: measure_spectrum(trace, workers=arguments.workers))

        def everything() -> None:
            network = Network(profile=Profile(0.36, "as given"))
            examination = examine(trace, network=network, workers=arguments.workers)
            if arguments.report:
                write_trace_report(trace, arguments.report, examination, overwrite=True)

        timed("examine", nbytes, everything)
        peaks.update(size for _, size in share_out(peak_of, calls * 4, workers=arguments.workers))
    print(f"peak memory: this process {peak() / 2**20:.0f} MiB, a worker {max(peaks) / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
