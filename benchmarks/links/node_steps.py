"""Step times and sent bytes of ranks on nodes with one limited link each: DDP, hierarchical DDP and FSDP2, in one run.

    RANK=... WORLD_SIZE=... LOCAL_RANK=... LOCAL_WORLD_SIZE=... MASTER_ADDR=... MASTER_PORT=... \
        GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 python benchmarks node_steps --rate 100mbit \
        [--rounds 3] [--steps 3] [--width 96] [--batch 24] [--rows ROWS.jsonl]
    ... python benchmarks node_steps --rate 100mbit --collectives [--rows ROWS.jsonl]
    python benchmarks node_steps --predict [--rows ROWS.jsonl]
    python benchmarks node_steps --table [--rows ROWS.jsonl]

To be started once per rank, each node's ranks behind a network interface of their own, whose limit is set from outside;
--rate only names it. Bytes are read off that interface's counter: what a node sends in a step, headers included. Every
way trains a model of its own with the same values. It takes turns with its base, because a machine is not equally fast
at all times; the first step of each turn is not counted. A step takes as long as its slowest rank.

The base of DDP is "computing alone", the model without any exchange, all ranks at once. That of FSDP2 is "nodes in
step", its work inside a node, where nodes wait for one another at every unit: they exchange one number there. "nodes
apart" has no such wait.

--collectives times what a forecast wants to know of the links: all-reduces and all-gathers between nodes by all ranks
at once, small ones amid computing, and reduce-scatters inside nodes. --predict adds to every way's row the forecast of
its step, from the base's time and the collectives. FSDP's work inside nodes is in its base.
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
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from predicted_steps import residual_layers
from rows import Row, add, read
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradlab import compress
from gradlab.layout import Layer, layers_of
from gradlab.plan import named_plan
from gradlab.runtime import compress_fsdp

ROWS = Path(__file__).parents[1] / "results" / "fsdp-steps.jsonl"

CODECS: dict[str, tuple[str, dict[str, Any]]] = {
    "uncompressed": ("identity", {}),
    "int8": ("block_scaled", {"dtype": "int8"}),
    "PowerSGD rank 1": ("PowerSGD", {"rank": 1}),
    "top-k 1 %": ("topk", {"density": 0.01}),
}

# Flat DDP alone runs these, on nodes of one rank. What is timed of GradiVeQ is one phase of its cycle.
# Bases need as many samples as they have axes: 256 at K / d = 8 and K near 2048.
COMPRESSING = {"sample_steps": 8, "pooled": 64, "compressed_steps": 0}
SAMPLING = {"sample_steps": 1_000_000}
FLAT_CODECS: dict[str, tuple[str, dict[str, Any]]] = {
    "dist-EF-blockSGDM": ("dist-EF-blockSGDM", {}),
    "dist-EF-blockSGD": ("dist-EF-blockSGD", {}),
    "signum": ("signum", {}),
    "QSGD 4 bits, max norm, by ring": ("QSGD, max norm", {"bits": 4, "ring": True}),
    "GradiVeQ compressing": ("gradiveq", {"ratio": 8, **COMPRESSING}),
    "GradiVeQ compressing, K = 512": ("gradiveq", {"ratio": 8, "slice_size": 512, **COMPRESSING}),
    "GradiVeQ compressing, K = 512, by ring": (
        "gradiveq",
        {"ratio": 8, "slice_size": 512, "ring": True, **COMPRESSING},
    ),
    "GradiVeQ sampling": ("gradiveq", {"ratio": 8, "slice_size": 512, **SAMPLING}),
    "GradiVeQ sampling, by ring": ("gradiveq", {"ratio": 8, "slice_size": 512, "ring": True, **SAMPLING}),
    "GradiVeQ, half random, K / d = 20, K = 512": (
        "gradiveq",
        {"ratio": 20, "slice_size": 512, "complement": 0.5, **COMPRESSING},
    ),
}
PEERS: dict[str, Callable[[DistributedDataParallel], None]] = {
    "PyTorch fp16": lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "PyTorch PowerSGD rank 1": lambda ddp: ddp.register_comm_hook(
        powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook
    ),
}

ALONE, APART, IN_STEP = "computing alone", "FSDP2, nodes apart", "FSDP2, nodes in step"
PLAIN, NATIVE, EVERY_RANK = "plain DDP", "native HSDP", "every rank"
WAYS = (
    PLAIN,
    f"{EVERY_RANK}, PowerSGD rank 1",
    *(f"DDP, {codec}" for codec in CODECS),
    APART,
    NATIVE,
    *(f"FSDP2, {codec}" for codec in CODECS),
)
FLAT_WAYS = (*PEERS, *(f"{EVERY_RANK}, {codec}" for codec in FLAT_CODECS))
RATE = 0.001
# Every convolution is a unit of its own: a forecast's units end after this many MiB.
UNIT_CAP_MB = 0.1

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
    """Shard every convolution and the rest, each a unit of its own."""
    for module in model:
        if isinstance(module, nn.Conv2d):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def in_step(model: nn.Sequential, group: dist.ProcessGroup) -> nn.Sequential:
    """Let nodes exchange one number for each unit."""

    def wait(flat: torch.Tensor) -> None:
        dist.all_reduce(flat[:1].clone(), group=group)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(wait)
    return model


class Contestant:
    """One way's model, and its times so far.

    Attributes:
        seconds: this rank's, of the counted steps.
        sent: bytes that the node has sent in them.
    """

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
        if way == NATIVE:
            return sharded(model, mesh), nullcontext
        if way == APART:
            return sharded(model, mesh["shard"]), nullcontext
        if way == IN_STEP:
            return in_step(sharded(model, mesh["shard"]), mesh["replicate"].get_group()), nullcontext
        if way in (PLAIN, ALONE):
            ddp = DistributedDataParallel(model)
            return ddp, ddp.no_sync if way == ALONE else nullcontext
        if way in PEERS:
            ddp = DistributedDataParallel(model)
            PEERS[way](ddp)
            return ddp, nullcontext
        name, settings = (CODECS | FLAT_CODECS)[codec]
        plan = named_plan(layers_of(model), name, **settings)
        if kind == "FSDP2":
            self.close = compress_fsdp(sharded(model, mesh["shard"]), plan, between=mesh["replicate"]).close
            return model, nullcontext
        ddp = DistributedDataParallel(model)
        within = None if kind == EVERY_RANK else mesh["shard"]
        self.close = compress(ddp, plan, within=within, optimizer=self.optimizer).close
        return ddp, nullcontext

    def step(self) -> float:
        """Take a step that all ranks begin together, and return its seconds on this rank."""
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


def slowest_of(work: Callable[[], object]) -> float:
    """Time what all ranks begin together, by the rank that takes longest."""
    dist.barrier()
    start = time.perf_counter()
    work()
    slowest = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def seconds_of(collective: Callable[[], object], repeats: int = 7) -> float:
    """Time a collective that all ranks begin together: the median, after two that are not counted."""
    return statistics.median([slowest_of(collective) for _ in range(repeats + 2)][2:])


def seconds_amid_computing(collective: Callable[[], object], batch: int, turns: int = 10, repeats: int = 5) -> float:
    """Time a collective between convolutions, as a step has it: what it adds to each of them.

    Ranks that share cores come to it one after another, and a rank that has waited first has to be given a core.
    """
    layer, images = nn.Conv2d(96, 96, 3, padding=1), torch.randn(batch, 96, 16, 16)

    def alone() -> None:
        for _ in range(turns):
            layer(images).sum().backward()

    def together() -> None:
        for _ in range(turns):
            layer(images).sum().backward()
            collective()

    pairs = [slowest_of(together) - slowest_of(alone) for _ in range(repeats + 1)]
    return statistics.median(pairs[1:]) / turns


def collectives(mesh: DeviceMesh, rate: str, batch: int) -> Row:
    """Time all-reduces and all-gathers between nodes and a reduce-scatter inside them.

    The bytes are a node's, those of all its ranks, and so is the bandwidth.
    """
    nodes, ranks = mesh["replicate"].size(), mesh["shard"].size()
    between, inside = mesh["replicate"].get_group(), mesh["shard"].get_group()
    observations = []
    for numel in (1_000, 30_000, 300_000, 1_300_000):
        values, gathered = torch.randn(numel), torch.empty(nodes * numel)
        about = {"nodes": nodes, "bytes": ranks * values.nbytes, "bandwidth": rate}
        all_reduce = partial(dist.all_reduce, values, group=between)
        seconds = seconds_of(all_reduce) if numel > 100_000 else seconds_amid_computing(all_reduce, batch)
        observations.append({**about, "seconds": round(seconds, 5)})
        if numel > 100_000:
            seconds = seconds_of(partial(dist.all_gather_single, gathered, values, group=between))
            observations.append({**about, "collective": "all-gather", "seconds": round(seconds, 5)})
    output = torch.empty(10_000_000 // ranks)
    whole = torch.randn(ranks * output.numel())
    seconds = seconds_of(partial(dist.reduce_scatter_single, output, whole, group=inside))
    sent = whole.nbytes * (ranks - 1) / ranks
    return {"measured": observations, "inside_bits_per_second": round(8 * sent / seconds)}


def measure(way: str, base: Contestant, make: Callable[[str], Contestant], options: argparse.Namespace) -> Row:
    """Time a way's steps in turns with its base's."""
    contestant = make(way)
    base.seconds, base.sent = [], 0
    for _ in range(options.rounds):
        base.turn(options.steps)
        contestant.turn(options.steps)
    row = {**contestant.row(), "base_seconds": base.row()["seconds"]}
    contestant.close()
    return row


def _layers(row: Row) -> tuple[Layer, ...]:
    """The layers of a row's model: this benchmark's network, or a ResNet-18 that was timed by another program."""
    if row.get("model") == "resnet18":
        return residual_layers((64, 128, 256, 512), 2)
    return layers_of(network(row["width"]))


def add_predictions(rows: list[Row]) -> None:
    """Forecast the seconds of every way's step, from the collectives that were timed, and put them into its row."""
    from gradlab.analysis.forecast import Network, forecast
    from gradlab.analysis.forecast.calibration import ALL_REDUCE, Observation, calibrate_link
    from gradlab.analysis.forecast.link import Link, parse_bandwidth
    from gradlab.analysis.forecast.network import Profile
    from gradlab.analysis.forecast.simulator import BETWEEN, SHARDS, Node
    from gradlab.analysis.forecast.step_time import FLAT, HIERARCHICAL, HSDP

    timed = [row for row in rows if "measured" in row]
    seen = [
        Observation(
            one["nodes"],
            one["bytes"],
            parse_bandwidth(one["bandwidth"]),
            one["seconds"],
            one.get("collective", ALL_REDUCE),
        )
        for row in timed
        for one in row["measured"]
    ]
    calibration = calibrate_link(Link(1e9, 1e-4), seen)
    inside = Link(statistics.mean(row["inside_bits_per_second"] for row in timed), header_share=0.0)
    for row in rows:
        if "way" not in row or row["way"] in (APART, *FLAT_WAYS):
            continue
        kind, _, codec = row["way"].partition(", ")
        on_shards = kind in ("FSDP2", NATIVE)
        compute = statistics.median(row["base_seconds"])
        plans = {"FSDP2": SHARDS, NATIVE: SHARDS}.get(kind, BETWEEN)
        # What FSDP does inside a node is in the time of its step.
        node = Node(row["local_ranks"], Link(1e14) if on_shards else inside, plans, on_cpus=True)
        links = [Link(parse_bandwidth(row["rate"]), 1e-4)]
        cap = UNIT_CAP_MB if on_shards else None
        cores = row["cores"] / (row["nodes"] * row["local_ranks"])
        network_ = Network(links, [row["nodes"]], Profile(compute, "measured"), cores, cap, node)
        name, settings = CODECS.get(codec, CODECS["int8"]) if codec != "uncompressed" else CODECS["int8"]
        plan = named_plan(_layers(row), name, **settings)
        (pair,) = forecast(plan, network_, calibration=calibration).nodes[0].links
        dense = {PLAIN: FLAT, NATIVE: HSDP, "DDP, uncompressed": HIERARCHICAL, "FSDP2, uncompressed": HSDP}
        step = pair.ways[dense[row["way"]]] if row["way"] in dense else pair.compressed
        row["predicted"] = round(step.seconds, 3)


def table(rows: list[Row]) -> str:
    """One line per way: at each rate its base's median step, its own, the difference, forecast; bytes a node sends."""
    steps = {(row["way"], row["rate"]): row for row in rows if "way" in row}
    rates = list(dict.fromkeys(rate for _, rate in steps))
    columns = " ".join(f"{'base':>6s} {rate:>8s} {'more':>6s} {'ratio':>6s} {'predicted':>10s}" for rate in rates)
    width = max(len(way) for way, _ in steps)
    lines = [f"{'way':{width}s} {columns} {'sent, MB':>9s}"]
    for way in (*WAYS, *FLAT_WAYS):
        mine = {rate: steps[way, rate] for rate in rates if (way, rate) in steps}
        if not mine:
            continue
        cells = []
        for row in mine.values():
            base, seconds = (statistics.median(row[key]) for key in ("base_seconds", "seconds"))
            other = row.get("predicted")
            off = f"{other:5.2f} {100 * (other / seconds - 1):+3.0f}%" if other else "-"
            cells.append(f"{base:6.3f} {seconds:8.3f} {seconds - base:6.3f} {seconds / base:6.2f} {off:>10s}")
        sent = next(iter(mine.values()))["sent"]
        lines.append(f"{way:{width}s} " + " ".join(cells) + f" {sent / 1e6:9.2f}")
    return "\n".join(lines)


def main() -> None:
    """Measure every way on all ranks, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--rounds", 3), ("--steps", 3), ("--width", 96), ("--batch", 24)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=(*WAYS, *FLAT_WAYS))
    parser.add_argument("--rate", default="unlimited")
    parser.add_argument("--interface", default=os.environ.get("GLOO_SOCKET_IFNAME", "eth0"))
    parser.add_argument("--rows", type=Path, default=ROWS)
    for flag in ("--collectives", "--table", "--predict"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table(read(options.rows)))
        return
    if options.predict:
        rows = read(options.rows)
        add_predictions(rows)
        options.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = dist.get_world_size() // local
    mesh = init_device_mesh("cpu", (nodes, local), mesh_dim_names=("replicate", "shard"))
    if options.collectives:
        timed = collectives(mesh, options.rate, options.batch)
        if dist.get_rank() == 0:
            add(options.rows, timed)
    else:
        make = partial(Contestant, mesh=mesh, width=options.width, batch=options.batch, interface=options.interface)
        bases = {name: make(name) for name in (ALONE, IN_STEP)}
        about = {name: getattr(options, name) for name in ("rate", "width", "batch")}
        about |= {"nodes": nodes, "local_ranks": local, "cores": os.cpu_count()}
        for way in options.ways:
            base = bases[IN_STEP if way == NATIVE or way.startswith("FSDP2") else ALONE]
            row = measure(way, base, make, options)
            if dist.get_rank() == 0:
                add(options.rows, {"way": way} | about | row)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
