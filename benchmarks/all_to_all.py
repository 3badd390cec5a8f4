"""An all-to-all over a limited link: Gloo's own, and messages between pairs that are all received from the start.

    RANK=... WORLD_SIZE=... LOCAL_RANK=0 MASTER_ADDR=... MASTER_PORT=... GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 \
        python benchmarks/all_to_all.py --rate 200mbit [--repeats 7] [--rows ROWS.jsonl]
    python benchmarks/all_to_all.py --table --rows ROWS.jsonl

To be started once per rank, each behind a network interface of its own, whose limit is set from outside; --rate only
names it. The three ways take turns, and a time is the median of the slowest ranks'. "all-gather" sends as many bytes,
the same to every rank. "at the link's rate" is what the bytes that a rank sends take at that rate, without headers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from rows import Row, keep, read

from gradlab.runtime.network.messages import Messages
from gradlab.runtime.timeline import Timeline

MEGABYTES = (0.1, 0.5, 1, 4, 16)
UNITS = {"mbit": 1e6, "gbit": 1e9}
Way = Callable[[], None]


def ways(nbytes: int) -> dict[str, Way]:
    """The three ways of sending (N - 1) / N of so many bytes from every rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sent, received = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
    part, others = nbytes // ranks, [other for other in range(ranks) if other != rank]
    parts = [{other: vector[other * part :][:part] for other in others} for vector in (received, sent)]
    timeline, group = Timeline(), dist.group.WORLD
    assert group is not None

    def messages() -> None:
        Messages(group, "messages", *parts, timeline).wait()

    return {
        "all-to-all": lambda: dist.all_to_all_single(received, sent),
        "messages": messages,
        "all-gather": lambda: dist.all_gather(list(received.split(part)), sent[:part]),
    }


def measured(rate: str, megabytes: float, repeats: int) -> Row:
    """Time the ways in turns, milliseconds of the slowest rank."""
    ranks = dist.get_world_size()
    nbytes = int(megabytes * 1e6) // ranks * ranks
    chosen = ways(nbytes)
    taken: dict[str, list[float]] = {way: [] for way in chosen}
    for turn in range(repeats + 1):
        for way, run in chosen.items():
            dist.barrier()
            began = time.perf_counter()
            run()
            slowest = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if turn:
                taken[way].append(1e3 * float(slowest))
    ideal = 8e3 * nbytes * (ranks - 1) / ranks / (float(rate[:-4]) * UNITS[rate[-4:]])
    return {
        "rate": rate,
        "ranks": ranks,
        "megabytes": megabytes,
        "at the link's rate": ideal,
        **{way: statistics.median(times) for way, times in taken.items()},
    }


def table(rows: list[Row]) -> None:
    """Print the table."""
    columns = ("at the link's rate", "messages", "all-to-all", "all-gather")
    print("| link | ranks | of a rank, MB | " + " | ".join(f"{name}, ms" for name in columns) + " |")
    print("|---" * (len(columns) + 3) + "|")
    for row in rows:
        cells = " | ".join(f"{row[name]:.1f}" for name in columns)
        print(f"| {row['rate']} | {row['ranks']} | {row['megabytes']:g} | {cells} |")


def main() -> None:
    """Measure as one of the ranks, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        table(read(options.rows))
        return
    if options.rate[-4:] not in UNITS or not options.rate[:-4].isdigit():
        parser.error(f"--rate {options.rate}: expected whole numbers of mbit or gbit, such as 200mbit")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for megabytes in MEGABYTES:
        row = measured(options.rate, megabytes, options.repeats)
        if dist.get_rank() == 0:
            keep(options.rows, row)
            table([row])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
