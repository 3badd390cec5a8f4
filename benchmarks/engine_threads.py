"""Time of a step of one rank's engine with codecs on one thread and on several, in turns.

    python benchmarks/engine_threads.py [--threads 1 2] [--layers ResNet-18] [--codecs sign qsgd] [--repeats 15]
        [--rows ROWS.jsonl]
    python benchmarks/engine_threads.py --rows ROWS.jsonl --table

One rank of a real process group takes real steps (`gradlab.runtime.Exchange`); nothing else runs, so that all cores are
to spare. A figure is the median of the clock's milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from layer_lists import LISTS
from rows import Row, add, read
from small_layers import CODECS

from gradlab.layout import Layer
from gradlab.plan import Plan
from gradlab.runtime import Exchange


def measured(layers: Sequence[Layer], codec: str, threads: Sequence[int], repeats: int) -> Row:
    """Time the same plan's steps, on each number of threads in turn."""
    generator = torch.Generator().manual_seed(0)
    gradients = {layer.name: torch.randn(layer.shape, generator=generator) for layer in layers}
    named = {layer.name: torch.zeros(layer.shape, requires_grad=True) for layer in layers}
    plan = Plan.uniform(layers, codec, **CODECS[codec])
    engines = {count: Exchange(plan, named.items(), threads=count, measure_every=0) for count in threads}
    seconds: dict[int, list[float]] = {count: [] for count in threads}
    for turn in range(repeats + 3):
        for count, engine in engines.items():
            own = {name: gradient.clone() for name, gradient in gradients.items()}
            began = time.perf_counter()
            engine.step(own)
            if turn >= 3:  # the first steps provide memory
                seconds[count].append(time.perf_counter() - began)
    for engine in engines.values():
        engine.close()
    return {str(count): 1e3 * statistics.median(times) for count, times in seconds.items()}


def table(rows: Sequence[Row]) -> None:
    """Print milliseconds, and the ratio of the most threads to one."""
    threads = sorted({int(key) for row in rows for key in row["milliseconds"]})
    print("| layers | codec | " + " | ".join(f"{count} threads" for count in threads) + " | ratio |")
    print("|---" * (3 + len(threads)) + "|")
    for row in rows:
        times = [row["milliseconds"][str(count)] for count in threads]
        cells = " | ".join(f"{one:.1f}" for one in times)
        print(f"| {row['layers']} | {row['codec']} | {cells} | {times[-1] / times[0]:.2f} |")


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--layers", nargs="+", choices=list(LISTS), default=["ResNet-18"])
    parser.add_argument("--codecs", nargs="+", choices=list(CODECS), default=list(CODECS)[1:])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.table:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for title in options.layers:
            for codec in options.codecs:
                times = measured(LISTS[title](), codec, options.threads, options.repeats)
                add(options.rows, {"layers": title, "codec": codec, "milliseconds": times})
        dist.destroy_process_group()
    table(read(options.rows))


if __name__ == "__main__":
    main()
