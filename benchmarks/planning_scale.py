"""A plan by layer for the 161 layers of a ResNet-50 from a large trace: time, and memory of each worker.

    python benchmarks/planning_scale.py --trace TRACE [--gigabytes 2] [--workers 2]

The trace is made if it is not there: gradients of falling spectra, and noise, in the shapes of a ResNet-50 of a quarter
of the channels, 4 ranks. Planned are PowerSGD ranks (the paper's range around 4) in one process, in several, and on a
dask.distributed cluster of as many workers; the tables must be equal. Memory is each process' peak resident set size.
"""

from __future__ import annotations

import argparse
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from gradlab.analysis.layer_plan.lgreco import LgrecoFit, fit_lgreco
from gradlab.capture.writing.trace_writer import TraceWriter
from gradlab.layout import Layer
from gradlab.trace import Trace

RANKS = 4


def resnet50(narrower: int = 4) -> list[Layer]:
    """Its 161 parameters, with fewer channels."""
    layers = [Layer("conv1.weight", (64 // narrower, 3, 7, 7), "convolution"), *norm("bn1", 64 // narrower)]
    inputs = 64 // narrower
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
        inner, outputs = width // narrower, 4 * width // narrower
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            for number, shape in enumerate(((inner, inputs, 1, 1), (inner, inner, 3, 3), (outputs, inner, 1, 1)), 1):
                layers += [Layer(f"{name}.conv{number}.weight", shape, "convolution")]
                layers += norm(f"{name}.bn{number}", shape[0])
            if block == 0:
                layers += [Layer(f"{name}.downsample.weight", (outputs, inputs, 1, 1), "convolution")]
                layers += norm(f"{name}.downsample.bn", outputs)
            inputs = outputs
    return [*layers, Layer("fc.weight", (1000, inputs), "linear"), Layer("fc.bias", (1000,), "bias")]


def norm(name: str, channels: int) -> list[Layer]:
    """A normalisation's two vectors."""
    return [Layer(f"{name}.weight", (channels,), "normalization"), Layer(f"{name}.bias", (channels,), "normalization")]


def write(path: Path, gigabytes: float) -> None:
    """A trace of at least so many gigabytes."""
    layers, rng = resnet50(), np.random.default_rng(0)
    steps = math.ceil(gigabytes * 1e9 / (4 * RANKS * sum(layer.numel for layer in layers)))
    with TraceWriter(path, layers, RANKS) as writer:
        for step in range(steps):
            for rank in range(RANKS):
                writer.append(rank, step, {layer.name: gradient(layer, rng) for layer in layers}, loss=1.0)


def gradient(layer: Layer, rng: np.random.Generator) -> np.ndarray:
    """Of a layer's shape: a matrix of falling spectrum with noise on it; of vectors, noise."""
    noise = 0.1 * rng.standard_normal(layer.shape, dtype=np.float32)
    if len(layer.shape) == 1:
        return noise
    count = min(6, layer.shape[0])
    left = rng.standard_normal((layer.shape[0], count), dtype=np.float32) * 0.6 ** np.arange(count, dtype=np.float32)
    right = rng.standard_normal((count, layer.numel // layer.shape[0]), dtype=np.float32)
    return noise + (left @ right).reshape(layer.shape)


@contextmanager
def peaks() -> Iterator[dict[int, float]]:
    """Peak resident set size in MB of every process that this one starts, and of itself, by process id."""
    memory: dict[int, float] = {}
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.2):
            for pid in (os.getpid(), *descendants(os.getpid())):
                memory[pid] = max(memory.get(pid, 0.0), peak(pid))

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield memory
    finally:
        over.set()
        watcher.join()


def descendants(pid: int) -> list[int]:
    """Ids of the processes that a process started, and that these did."""
    children = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                children.append(int(entry.name))
        except (OSError, IndexError):  # it has ended
            continue
    return children + [one for child in children for one in descendants(child)]


def peak(pid: int) -> float:
    """Peak resident set size in MB; 0 of a process that has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1e3 for line in status.splitlines() if line.startswith("VmHWM")), 0.0)


def report(title: str, seconds: float, memory: dict[int, float], fit: LgrecoFit) -> None:
    """One line: time, memory, and what was planned."""
    workers = [value for pid, value in memory.items() if pid != os.getpid() and value > 100]
    others = ", ".join(f"{value:.0f}" for value in sorted(workers, reverse=True)[:4])
    print(
        f"{title:22s} {seconds:6.1f} s   this process {memory.get(os.getpid(), 0):5.0f} MB   others [{others}] MB   "
        f"size {fit.provenance.size:.0f}, gain {fit.provenance.gain:.3f}, gap {fit.provenance.gap:g}",
        flush=True,
    )


def same(one: LgrecoFit, other: LgrecoFit) -> bool:
    """Whether two fits have equal tables of errors."""
    pairs = zip(one.problem.table.layers, other.problem.table.layers, strict=True)
    return all(np.array_equal(a.squared_l2, b.squared_l2) for a, b in pairs)


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--workers", type=int, default=2)
    chosen = parser.parse_args()
    if not chosen.trace.exists():
        write(chosen.trace, chosen.gigabytes)
    from dask.distributed import LocalCluster

    with Trace(chosen.trace) as trace:
        size = sum(file.stat().st_size for file in chosen.trace.rglob("*") if file.is_file())
        print(f"{len(trace.layers)} layers, {len(trace.steps)} steps, {trace.world_size} ranks, {size / 1e9:.2f} GB")
        fits = []
        for title, options in (("one process", {}), (f"{chosen.workers} processes", {"workers": chosen.workers})):
            began = time.perf_counter()
            with peaks() as memory:
                fits.append(fit_lgreco(trace, "powersgd", {"rank": 4}, **options))
            report(title, time.perf_counter() - began, memory, fits[-1])
        with LocalCluster(n_workers=chosen.workers, threads_per_worker=1, dashboard_address=None) as cluster:
            began = time.perf_counter()
            with peaks() as memory:
                fits.append(fit_lgreco(trace, "powersgd", {"rank": 4}, cluster=cluster.scheduler_address))
            report(f"cluster of {chosen.workers}", time.perf_counter() - began, memory, fits[-1])
    print("tables equal:", all(same(fits[0], fit) for fit in fits[1:]))


if __name__ == "__main__":
    main()
