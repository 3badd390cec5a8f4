"""Step times and sent bytes of ranks on nodes with one limited link each: DDP, hierarchical DDP and FSDP2, in one run.

    RANK=... WORLD_SIZE=... LOCAL_RANK=... LOCAL_WORLD_SIZE=... MASTER_ADDR=... MASTER_PORT=... \
        GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 python benchmarks/node_steps.py --rate 100mbit \
        [--steps 6] [--width 96] [--rows ROWS.jsonl]
    ... python benchmarks/node_steps.py --rate 100mbit --collectives
    python benchmarks/node_steps.py --table [--rows ROWS.jsonl]

To be started once per rank, each node's ranks behind a network interface of their own, whose limit is set from outside;
--rate only names it. Bytes are read off that interface's counter: what a node sends in a step, headers included. Every
way trains a model of its own with the same values; a way's steps follow each other, after two that are not counted.
A step takes as long as its slowest rank. "computing alone" is the model without any exchange, all ranks at once;
"nodes apart" exchanges nothing between nodes.

--collectives times what `gradlab predict` wants to know, and prints it as JSON: all-reduces between nodes by all
ranks at once, for its --measured, and the speed of reduce-scatters inside nodes, for its --inside.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rows import Row, add, read
from step_time import network
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradlab import compress
from gradlab.layout import layers_of
from gradlab.plan import Plan
from gradlab.runtime import compress_fsdp

ROWS = Path(__file__).parent / "results" / "fsdp-steps.jsonl"

CODECS: dict[str, tuple[str, dict[str, Any]]] = {
    "uncompressed": ("identity", {}),
    "int8": ("block_scaled", {"dtype": "int8"}),
    "PowerSGD rank 1": ("powersgd", {"rank": 1}),
    "top-k 1 %": ("topk", {"density": 0.01}),
}

# FSDP2's work inside a node alone.
FSDP2_ALONE = "FSDP2, nodes apart"

Prepared = tuple[nn.Module, Callable[[], AbstractContextManager[Any]], Callable[[], None]]


def sharded(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """Shard every convolution and the rest, each a unit of its own."""
    for module in model:
        if isinstance(module, nn.Conv2d):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def prepare(way: str, mesh: DeviceMesh, width: int) -> Prepared:
    """Return a way's model, the context of its backward pass, and what ends it."""
    model = network(width)
    assert isinstance(model, nn.Sequential)
    kind, _, codec = way.partition(", ")
    if kind == "native HSDP":
        return sharded(model, mesh), nullcontext, lambda: None
    if way == FSDP2_ALONE:
        return sharded(model, mesh["shard"]), nullcontext, lambda: None
    if kind in ("plain DDP", "computing alone"):
        ddp = DistributedDataParallel(model)
        return ddp, ddp.no_sync if kind == "computing alone" else nullcontext, lambda: None
    name, settings = CODECS[codec]
    plan = Plan.uniform(layers_of(model), name, **settings)
    if kind == "DDP":
        ddp = DistributedDataParallel(model)
        return ddp, nullcontext, compress(ddp, plan, within=mesh["shard"]).close
    state = compress_fsdp(sharded(model, mesh["shard"]), plan, between=mesh["replicate"])
    return model, nullcontext, state.close


WAYS = (
    "computing alone",
    "plain DDP",
    "native HSDP",
    FSDP2_ALONE,
    *(f"{kind}, {codec}" for kind in ("DDP", "FSDP2") for codec in CODECS),
)


def sent(interface: str) -> int:
    """Return the bytes that this node's interface has sent."""
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def measure(way: str, mesh: DeviceMesh, options: argparse.Namespace) -> Row:
    """Time a way's steps on all ranks."""
    model, context, close = prepare(way, mesh, options.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    torch.manual_seed(1 + dist.get_rank())
    images, classes = torch.randn(options.batch, 3, 32, 32), torch.randint(10, (options.batch,))
    times, before = [], 0
    for step in range(-2, options.steps):
        dist.barrier()
        if step == 0:
            before = sent(options.interface)
        start = time.perf_counter()
        optimizer.zero_grad()
        with context():
            nn.functional.cross_entropy(model(images), classes).backward()
        optimizer.step()
        if step >= 0:
            times.append(time.perf_counter() - start)
    dist.barrier()
    node = torch.tensor(float(sent(options.interface) - before) / options.steps)
    slowest = torch.tensor(times)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(node)  # every rank of a node reads the same counter, so the mean over ranks is that over nodes
    close()
    ranks = dist.get_world_size()
    return {"seconds": [round(value, 4) for value in slowest.tolist()], "sent": round(float(node) / ranks)}


def seconds_of(collective: Callable[[], object], repeats: int = 7) -> float:
    """Time a collective that all ranks begin together: the slowest rank's median, after two that are not counted."""
    times = []
    for _ in range(repeats + 2):
        dist.barrier()
        start = time.perf_counter()
        collective()
        slowest = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(float(slowest))
    return statistics.median(times[2:])


def collectives(mesh: DeviceMesh, rate: str) -> dict[str, Any]:
    """Time all-reduces between nodes and a reduce-scatter inside them.

    The bytes are a node's, those of all its ranks, and so is the bandwidth.
    """
    nodes, ranks = mesh["replicate"].size(), mesh["shard"].size()
    between, inside = mesh["replicate"].get_group(), mesh["shard"].get_group()
    observations = []
    for numel in (1_000, 30_000, 300_000, 1_300_000):
        values = torch.randn(numel)
        seconds = seconds_of(partial(dist.all_reduce, values, group=between))
        nbytes = ranks * values.nbytes
        observations.append({"nodes": nodes, "bytes": nbytes, "bandwidth": rate, "seconds": round(seconds, 5)})
    output = torch.empty(10_000_000 // ranks)
    whole = torch.randn(ranks * output.numel())
    seconds = seconds_of(partial(dist.reduce_scatter_single, output, whole, group=inside))
    sent = whole.nbytes * (ranks - 1) / ranks
    return {"measured": observations, "inside_bits_per_second": round(8 * sent / seconds)}


def table(rows: list[Row]) -> str:
    """One line per way: the median step at each rate, over computing alone, and the bytes a node sends."""
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    median = {(row["way"], row["rate"]): statistics.median(row["seconds"]) for row in rows}
    lines = [f"{'way':26s} " + " ".join(f"{rate:>9s} {'ratio':>6s}" for rate in rates) + f" {'sent, MB':>9s}"]
    for way in WAYS:
        mine = [row for row in rows if row["way"] == way]
        if not mine:
            continue
        cells = []
        for rate in rates:
            seconds, alone = median.get((way, rate)), median.get(("computing alone", rate))
            cells.append(f"{seconds:9.3f} {seconds / alone:6.2f}" if seconds and alone else f"{'-':>9s} {'-':>6s}")
        lines.append(f"{way:26s} " + " ".join(cells) + f" {mine[0]['sent'] / 1e6:9.2f}")
    return "\n".join(lines)


def main() -> None:
    """Measure every way on all ranks, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--steps", 6), ("--width", 96), ("--batch", 8)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--rate", default="unlimited")
    parser.add_argument("--interface", default=os.environ.get("GLOO_SOCKET_IFNAME", "eth0"))
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--collectives", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table(read(options.rows)))
        return
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    mesh = init_device_mesh("cpu", (dist.get_world_size() // local, local), mesh_dim_names=("replicate", "shard"))
    for way in () if options.collectives else options.ways:
        row = measure(way, mesh, options)
        if dist.get_rank() == 0:
            add(options.rows, {"way": way, "rate": options.rate, "width": options.width, "batch": options.batch} | row)
    if options.collectives:
        timed = collectives(mesh, options.rate)
        if dist.get_rank() == 0:
            print(json.dumps(timed))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
