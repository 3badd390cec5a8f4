"""Training with local steps, dense and compressed, beside synchronous training: losses, bytes, and predicted times.

    python benchmarks local_steps_trained --data tinyshakespeare.txt --rows ROWS.jsonl [--task text_chars]
        [--ways sync int4 "streaming int4"] [--seeds 0 1] [--local-steps 8 30 100] [--steps 800] [--step-seconds 0.02]
    python benchmarks local_steps_trained --rows ROWS.jsonl --table [--task text_chars]

text_chars is nanoGPT's CPU configuration (804,096 parameters, AdamW) with 4 workers of 3 sequences; cifar10 is its
images halved to 16 x 16 and ResNet-8 (75,290 parameters, SGD with momentum) with 4 workers of 16 images. Each is a
process with `gradlab.runtime.OuterStep`; "streaming" has 3 fragments that are applied 5 local steps late, half and
half. "sync" averages gradients in every step, through the named codec or uncompressed. The others take H local steps
and DiLoCo's outer step (SGD of rate 0.7, Nesterov momentum 0.9), but "SparseLoCo" and "averaging", whose outer
optimizer is SGD of rate 1 without momentum. Bytes are what a worker sends per local step (payload). Times are of a
local step, with its share of the exchange, from `forecast_local_steps` for machines on which computing takes so many
seconds a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rows import Row, add, grouped, markdown, missing, options, read
from torch import nn

from gradlab import datasets
from gradlab.analysis.forecast import Network, forecast
from gradlab.analysis.forecast.link import Link, parse_bandwidth
from gradlab.analysis.forecast.local_steps import forecast_local_steps
from gradlab.analysis.forecast.network import Profile
from gradlab.cli.train.settings import TrainSettings
from gradlab.codec import seeded_generator
from gradlab.datasets import Cifar10, batches, build_optimizer, clip_gradients, get, learning_rate_at
from gradlab.datasets.resnet import initialized
from gradlab.layout import layers_of, named_layers
from gradlab.plan import Plan, method_plan
from gradlab.runtime import Exchange, OuterStep

WORKERS, BATCH = 4, {"text_chars": 3, "cifar10": 16}
FRAGMENTS, DELAY = 3, 5  # of streaming
RATES = ("50mbit", "1gbit", "25gbit")
WAYS: dict[str, Any] = {
    "DiLoCo": Plan,
    "sync": Plan,
    "streaming": Plan,
    "averaging": Plan,
    "int8": lambda layers: Plan.uniform(layers, "block_scaled", dtype="int8"),
    "int4": lambda layers: Plan.uniform(layers, "block_scaled", dtype="int4"),
    "ecsq 0.5 bits": lambda layers: Plan.uniform(layers, "ecsq", bits=0.5),
    "top-k 3 %": lambda layers: Plan.uniform(layers, "topk", density=0.03),
    "QSGD 4 bits": lambda layers: method_plan(layers, "QSGD, max norm", bits=4),
    "16-bit floats": lambda layers: Plan.uniform(layers, "cast", dtype="float16"),
    "signs": lambda layers: Plan.uniform(layers, "sign"),
    "PowerSGD 2": lambda layers: Plan.uniform(layers, "powersgd", rank=2),
    "SparseLoCo": lambda layers: method_plan(layers, "SparseLoCo"),
}


class SmallCifar10(Cifar10):  # type: ignore[misc]
    """Images halved to 16 x 16, and one block a stage, so that seeds by the dozen fit on a CPU."""

    def model(self, seed: int) -> nn.Module:
        return nn.Sequential(nn.AvgPool2d(2), initialized(3, (16, 32, 64), (1, 1, 1), 10, seed))


datasets._WORKLOADS["cifar10"] = SmallCifar10()  # in the processes of `streaming` too


def plan_of(way: str, task: str) -> Plan:
    """Exchanges go through it."""
    codec = way
    for form in ("sync, ", "streaming ", "averaging, "):
        codec = codec.removeprefix(form)
    return WAYS[codec](layers_of(get(task).model(0)))


def trained(way: str, every: int, seed: int, chosen: argparse.Namespace) -> Row:
    """Train one way with `every` local steps on real workers, and return its row with the forecast times."""
    settings = TrainSettings(chosen.task, str(chosen.data), WORKERS, chosen.steps, BATCH[chosen.task], seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_worker, (way, every, settings, folder), nprocs=WORKERS)
        done: Row = json.loads(Path(folder, "0.json").read_text(encoding="utf-8"))
    return done | {"times": predicted(way, every, chosen)}


@dataclass
class Worker:
    """A worker of a run: its model, its samples, its draws, and its losses."""

    settings: TrainSettings
    rank: int
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        settings, self.workload = self.settings, get(self.settings.workload)
        self.recipe, self.data = settings.applied_to(self.workload.recipe), self.workload.load(settings.data)
        self.model = self.workload.model(settings.seed)
        self.optimizer = build_optimizer(self.recipe, self.model.parameters())
        self.order: Iterator[torch.Tensor] = batches(
            len(self.data.train_x), self.recipe.batch_size, self.rank, WORKERS, settings.seed, self.recipe.steps
        )
        self.generator = seeded_generator("augmentation", settings.seed, self.rank)

    def step(self, step: int, exchange: Callable[[], object] = lambda: None) -> None:
        """Take an optimizer step. exchange: called after backward."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(self.recipe, step)
        indices = next(self.order)
        self.optimizer.zero_grad()
        inputs = self.workload.augment(self.data.train_x[indices], self.generator)
        loss = self.workload.loss(self.model(inputs), self.data.train_y[indices])
        loss.backward()
        exchange()
        clip_gradients(self.recipe, self.model.parameters())
        self.optimizer.step()
        self.losses.append(float(loss.detach()))


def _worker(rank: int, way: str, every: int, settings: TrainSettings, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORKERS)
    torch.manual_seed(settings.seed)
    worker = Worker(settings, rank)
    exchanged = _gradients_exchanged if way.startswith("sync") else partial(_local_steps, way=way, every=every)
    payload = exchanged(worker, plan_of(way, settings.workload))
    losses = torch.tensor(worker.losses)
    dist.all_reduce(losses)
    if rank == 0:
        score = worker.workload.score(worker.model, worker.data.test_x, worker.data.test_y)
        means = (losses / WORKERS).tolist()
        row = {"score": score, "loss": statistics.fmean(means[-10:]), "payload": payload}
        Path(folder, "0.json").write_text(json.dumps(row), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _local_steps(worker: Worker, plan: Plan, way: str, every: int) -> float:
    """Train with `OuterStep`, and end with the common parameters; the bytes of an exchange."""
    how: dict[str, Any] = {"fragments": FRAGMENTS, "delay": DELAY} if way.startswith("streaming") else {}
    if way.startswith(("SparseLoCo", "averaging")):
        how["outer_optimizer"] = partial(torch.optim.SGD, lr=1.0)
    outer = OuterStep(plan, worker.model, every=every, **how)
    for step in range(worker.recipe.steps // every * every):
        worker.step(step)
        outer.step()
    exchanges = [one.exchange for one in outer.fragments if one.exchange is not None]
    payload = sum(one.statistics.steps[-1].payload_bytes for one in exchanges)
    common = {name: one for part in outer.fragments for name, one in part.parameters.items()}
    outer.wait()
    with torch.no_grad():
        for layer, parameter in named_layers(worker.model):
            parameter.copy_(common[layer.name])
    outer.close()
    return payload or 4 * sum(parameter.numel() for parameter in worker.model.parameters())


def _gradients_exchanged(worker: Worker, plan: Plan) -> float:
    """Train with gradients through a plan in every step; the bytes of a step."""
    parameters = {layer.name: parameter for layer, parameter in named_layers(worker.model)}
    exchange = Exchange(plan, parameters.items(), optimizer=worker.optimizer)

    def all_ranks() -> None:
        exchange.step({name: one.grad for name, one in parameters.items() if one.grad is not None})

    for step in range(worker.recipe.steps):
        worker.step(step, all_ranks)
    payload = exchange.statistics.steps[-1].payload_bytes
    exchange.close()
    return payload


def table(rows: list[Row], score: str) -> str:
    """Lay out scores by way and H, bytes, and times. score: what it is."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    runs = grouped(rows, lambda row: (ways.index(row["way"]), row["every"]))
    lines = []
    for (_, every), here in sorted(runs.items()):
        scores = ", ".join(f"{row['score']:.3f}" for row in sorted(here, key=lambda row: row["seed"]))
        payload = statistics.fmean(row["payload"] for row in here) / every
        first = min(here, key=lambda row: row["seed"])
        times = [f"{1e3 * seconds:.1f}" for seconds in first["times"]]
        lines.append([first["way"], every, scores, f"{payload:,.0f}", *times])
    return markdown(("way", "H", score, "bytes per step", *(f"{rate}, ms a step" for rate in RATES)), lines)


def predicted(way: str, every: int, chosen: argparse.Namespace) -> list[float]:
    """A step's forecast seconds on every link."""
    links = [Link(parse_bandwidth(rate), 1e-4, 0.06) for rate in RATES]
    network = Network(links, (WORKERS,), Profile(chosen.step_seconds, "given"))
    dense = way in ("sync", "DiLoCo", "averaging", "streaming")
    plan = plan_of("int8" if dense else way, chosen.task)  # whose uncompressed exchange is asked for
    synchronous = forecast(plan, network)
    if way.startswith("sync"):
        return [(pair.dense if dense else pair.compressed).seconds for _, pair in synchronous.comparisons]
    if way.startswith("streaming"):  # what is exchanged hides behind computing, where it takes no longer
        found = forecast_local_steps(plan, network, synchronous)
        return [max(chosen.step_seconds, one.seconds(every, dense=dense) - chosen.step_seconds) for one in found]
    return [one.seconds(every, dense=dense) for one in forecast_local_steps(plan, network, synchronous)]


def main() -> None:
    """Train what is not kept yet, or print the table."""
    named = {"ways": tuple(WAYS), "local_steps": [8, 30, 100], "seeds": [0, 1], "steps": 800, "step_seconds": 0.02}
    chosen = options(__doc__, data=Path, rows=Path, task=BATCH, **named, table=False)
    of_task = {} if chosen.task == "text_chars" else {"task": chosen.task}
    keys: Iterator[Row] = (
        {"way": way, "every": every, "seed": seed, "steps": chosen.steps, **of_task}
        for seed, way in product(chosen.seeds, chosen.ways)
        for every in ([1] if way.startswith("sync") else chosen.local_steps)
    )
    for key in () if chosen.table else missing(chosen.rows, keys):
        add(chosen.rows, key | trained(key["way"], key["every"], key["seed"], chosen))
    rows = [row for row in read(chosen.rows) if row.get("task", "text_chars") == chosen.task]
    print(table(rows, "validation loss" if chosen.task == "text_chars" else "accuracy"))


if __name__ == "__main__":
    main()
