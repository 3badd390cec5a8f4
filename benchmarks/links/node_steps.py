"""Step times and sent bytes of ranks on nodes with one limited link each: DDP, hierarchical DDP and FSDP2, in one run.

    RANK=... WORLD_SIZE=... LOCAL_RANK=... LOCAL_WORLD_SIZE=... MASTER_ADDR=... MASTER_PORT=... \
        GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 python benchmarks node_steps --rate 100mbit \
        [--ways "plain DDP"] [--link link.json] [--rounds 3] [--steps 3] [--width 96] [--batch 24] [--rows ROWS.jsonl]
    python benchmarks node_steps --table [--rows ROWS.jsonl]

To be started once per rank, each node's ranks behind a network interface whose limit is set from outside; --rate only
names it. Bytes are what a node sends in a step by that interface's counter. Every way takes turns with its base, and a
step takes as long as its slowest rank. The base is computing alone, all ranks at once. "sharded" is FSDP2 over all
ranks, or native HSDP on nodes of several, with gradients (between these), parameters or both in int8. Its base is FSDP2
inside nodes, from which all ranks at once forecast "predicted"; that of other rows is by `gradlab predict --measured`.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rows import Row, add, options, read
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradlab import compress
from gradlab.analysis.forecast import Network, forecast
from gradlab.analysis.forecast.link import Link
from gradlab.analysis.forecast.network import Profile
from gradlab.analysis.forecast.simulator import FSDP, HSDP, SHARDS, Node
from gradlab.cli.options import links_of
from gradlab.layout import layers_of
from gradlab.plan import Plan, named_plan
from gradlab.runtime import compress_fsdp

ROWS = Path(__file__).parents[1] / "results" / "fsdp-steps.jsonl"

CODECS: dict[str, tuple[str, dict[str, Any]]] = {
    "uncompressed": ("identity", {}),
    "int8": ("block_scaled", {"dtype": "int8"}),
    "PowerSGD rank 1": ("PowerSGD", {"rank": 1}),
    "top-k 1 %": ("topk", {"density": 0.01}),
}

# What is quantized where parameters are sharded.
SHARDED: dict[str, tuple[str, ...]] = {
    "sharded": (),
    "sharded, gradients": ("gradients",),
    "sharded, parameters": ("parameters",),
    "sharded, both": ("gradients", "parameters"),
}

# Flat DDP alone runs these, on nodes of one rank. What is timed of GradiVeQ is one phase of its cycle.
# Bases need as many samples as they have axes: 256 at K / d = 8 and K near 2048.
COMPRESSING = {"sample_steps": 8, "pooled": 64, "compressed_steps": 0}
SAMPLING = {"sample_steps": 1_000_000}
NARROW = {"ratio": 8, "slice_size": 512}
HALF = {"ratio": 20, "slice_size": 512, "complement": 0.5}
FLAT_CODECS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("dist-EF-blockSGDM", "dist-EF-blockSGD", "signum")},
    "QSGD 4 bits, max norm, by ring": ("QSGD, max norm", {"bits": 4, "ring": True}),
    "GradiVeQ compressing": ("gradiveq", {"ratio": 8, **COMPRESSING}),
    "GradiVeQ compressing, K = 512": ("gradiveq", {**NARROW, **COMPRESSING}),
    "GradiVeQ compressing, K = 512, by ring": ("gradiveq", {**NARROW, "ring": True, **COMPRESSING}),
    "GradiVeQ sampling": ("gradiveq", {**NARROW, **SAMPLING}),
    "GradiVeQ sampling, by ring": ("gradiveq", {**NARROW, "ring": True, **SAMPLING}),
    "GradiVeQ, half random, K / d = 20, K = 512": ("gradiveq", {**HALF, **COMPRESSING}),
}
PEERS: dict[str, Callable[[DistributedDataParallel], None]] = {
    "PyTorch fp16": lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "PyTorch PowerSGD rank 1": lambda ddp: ddp.register_comm_hook(
        powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook
    ),
}

ALONE, APART = "computing alone", "FSDP2 inside nodes"
PLAIN, EVERY_RANK = "plain DDP", "every rank"
WAYS = (
    PLAIN,
    f"{EVERY_RANK}, PowerSGD rank 1",
    *(f"DDP, {codec}" for codec in CODECS),
    *SHARDED,
)
FLAT_WAYS = (*PEERS, *(f"{EVERY_RANK}, {codec}" for codec in FLAT_CODECS))
RATE = 0.001

Context = Callable[[], AbstractContextManager[Any]]


def network(width: int) -> nn.Module:
    """A plain convolutional network whose wider layers hold most of the parameters, as a residual network's do."""
    torch.manual_seed(0)
    channels = [3, width, 2 * width, 4 * width, 8 * width]
    layers: list[nn.Module] = []
    for before, after in pairwise(channels):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.Conv2d(after, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], 10))


def sharded(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """Shard each convolution and the rest over a mesh, in place."""
    for module in model:
        if isinstance(module, nn.Conv2d):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def sharded_plan(way: str, model: nn.Module) -> Plan:
    """The plan of a way's gradients: int8, or nothing compressed."""
    layers = layers_of(model)
    return Plan.uniform(layers, "block_scaled", dtype="int8") if "gradients" in SHARDED[way] else Plan(layers)


def predicted(way: str, model: nn.Module, seconds: float, link: str, local: int) -> float:
    """Forecast a sharded step from its base's seconds, inside nodes included. All ranks do at once: a step's codecs
    share the cores."""
    ranks, quantized = dist.get_world_size(), SHARDED[way]
    where: dict[str, Any] = {"node": Node(local, Link(math.inf), SHARDS)} if local > 1 else {"sharded": True}
    where |= {"cores": (os.cpu_count() or 1) / ranks, "parameters": "int8" if "parameters" in quantized else ""}
    network = Network(links_of(link, "100us"), (ranks // local,), Profile(seconds, "measured"), **where)
    plan = sharded_plan(way, model)
    pair = forecast(plan, network, uncompressed=True).comparisons[0][1]
    return (pair.compressed if quantized else pair.ways[HSDP if local > 1 else FSDP]).seconds


class Contestant:
    """One way's model, this rank's seconds of the counted steps, and bytes that the node has sent in them."""

    def __init__(self, way: str, mesh: DeviceMesh, width: int, batch: int, interface: str) -> None:
        model = network(width)
        assert isinstance(model, nn.Sequential)
        self.close: Callable[[], None] = lambda: None
        self.optimizer = torch.optim.SGD(model.parameters(), lr=RATE)  # which a plan may ask for its learning rate
        self.model, self.context = self._attached(way, model, mesh)
        if isinstance(self.model, FSDPModule):  # whose parameters are others now
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        self.images = torch.randn(batch, 3, 32, 32, generator=generator)
        self.classes = torch.randint(10, (batch,), generator=generator)
        self.seconds: list[float] = []
        self.turns = self.sent = 0
        self._counter = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")

    def _attached(self, way: str, model: nn.Sequential, mesh: DeviceMesh) -> tuple[nn.Module, Context]:
        kind, _, codec = way.partition(", ")
        if way in SHARDED:
            plan, over_all = sharded_plan(way, model), mesh["shard"].size() == 1
            sharded(model, mesh["replicate"] if over_all else mesh)
            if quantized := SHARDED[way]:
                options: dict[str, Any] = {"within": mesh["replicate"]} if over_all else {}
                options |= {"parameters": "int8"} if "parameters" in quantized else {}
                self.close = compress_fsdp(model, plan, **options).close
            return model, nullcontext
        if way == APART:
            return sharded(model, mesh["shard"]), nullcontext
        if way in (PLAIN, ALONE):
            ddp = DistributedDataParallel(model)
            return ddp, ddp.no_sync if way == ALONE else nullcontext
        if way in PEERS:
            ddp = DistributedDataParallel(model)
            PEERS[way](ddp)
            return ddp, nullcontext
        name, settings = (CODECS | FLAT_CODECS)[codec]
        plan = named_plan(layers_of(model), name, **settings)
        ddp = DistributedDataParallel(model)
        within = None if kind == EVERY_RANK else mesh["shard"]
        self.close = compress(ddp, plan, within=within, optimizer=self.optimizer).close
        return ddp, nullcontext

    def step(self) -> float:
        dist.barrier()
        start = time.perf_counter()
        self.optimizer.zero_grad()
        with self.context():
            nn.functional.cross_entropy(self.model(self.images), self.classes).backward()
        self.optimizer.step()
        return time.perf_counter() - start

    def turn(self, steps: int) -> None:
        """Take one step that is not counted, ten in the first turn, then some that are."""
        for _ in range(1 if self.turns else 10):
            self.step()
        self.turns += 1
        dist.barrier()
        before = int(self._counter.read_text())
        self.seconds += [self.step() for _ in range(steps)]
        dist.barrier()
        self.sent += int(self._counter.read_text()) - before

    def row(self) -> Row:
        """The slowest rank's seconds, step by step, and the bytes that a node sends in one."""
        slowest = torch.tensor(self.seconds)
        node = torch.tensor(float(self.sent) / len(self.seconds))
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        dist.all_reduce(node)  # every rank of a node reads the same counter, so the mean over ranks is that over nodes
        sent = round(float(node) / dist.get_world_size())
        return {"seconds": [round(value, 4) for value in slowest.tolist()], "sent": sent}


def table(rows: list[Row]) -> str:
    """One line per way: at each rate its base's median step, its own, the difference, forecast; bytes a node sends."""
    steps = {(_title(row), row["rate"]): row for row in rows if "way" in row}
    rates, width = list(dict.fromkeys(rate for _, rate in steps)), max(len(title) for title, _ in steps)
    columns = " ".join(f"{'base':>6s} {rate:>8s} {'more':>6s} {'ratio':>6s} {'predicted':>10s}" for rate in rates)
    lines = [f"{'way':{width}s} {columns} {'sent, MB':>9s}"]
    order = [*WAYS, *FLAT_WAYS]
    for title in sorted(dict.fromkeys(title for title, _ in steps), key=lambda one: order.index(one.split(" (")[0])):
        cells, here = [], [steps[title, rate] for rate in rates if (title, rate) in steps]
        for row in here:
            base, seconds = (statistics.median(row[key]) for key in ("base_seconds", "seconds"))
            other = row.get("predicted")
            off = f"{other:5.2f} {100 * (other / seconds - 1):+3.0f}%" if other else "-"
            cells.append(f"{base:6.3f} {seconds:8.3f} {seconds - base:6.3f} {seconds / base:6.2f} {off:>10s}")
        lines.append(f"{title:{width}s} " + " ".join(cells) + f" {here[0]['sent'] / 1e6:9.2f}")
    return "\n".join(lines)


def _title(row: Row) -> str:
    return f"{row['way']} ({row['nodes']}x{row['local_ranks']})" if row["way"] in SHARDED else str(row["way"])


def main() -> None:
    """Time the ways in turn, or print the kept rows."""
    sizes = {"rounds": 3, "steps": 3, "width": 96, "batch": 24}
    chosen = options(__doc__, **sizes, ways=WAYS, rate="unlimited", link="", rows=ROWS, table=False)
    if chosen.table:
        print(table(read(chosen.rows)))
        return
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = dist.get_world_size() // local
    mesh = init_device_mesh("cpu", (nodes, local), mesh_dim_names=("replicate", "shard"))
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "eth0")
    make = partial(Contestant, mesh=mesh, width=chosen.width, batch=chosen.batch, interface=interface)
    bases = {name: make(name) for name in (ALONE, APART)}
    about = {name: getattr(chosen, name) for name in ("rate", "width", "batch")}
    about |= {"nodes": nodes, "local_ranks": local, "cores": os.cpu_count()}
    for way in chosen.ways:
        base = bases[APART if way in SHARDED else ALONE]
        contestant, base.seconds, base.sent = make(way), [], 0
        for _ in range(chosen.rounds):
            base.turn(chosen.steps)
            contestant.turn(chosen.steps)
        row = {**contestant.row(), "base_seconds": base.row()["seconds"]}
        contestant.close()
        if way in SHARDED:
            seconds, link = statistics.median(row["base_seconds"]), chosen.link or chosen.rate
            row["predicted"] = predicted(way, network(chosen.width), seconds, link, local)
        if dist.get_rank() == 0:
            add(chosen.rows, {"way": way} | about | row)
    dist.destroy_process_group()
