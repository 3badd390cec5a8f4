"""Training with local steps, dense and compressed, beside synchronous training: losses, bytes, and predicted times.

    python benchmarks local_steps_trained --data tinyshakespeare.txt --rows ROWS.jsonl [--task text_chars]
        [--ways sync int4 "ecsq 0.5, feedback"] [--seeds 0 1] [--local-steps 8 30 100] [--steps 800]
    python benchmarks local_steps_trained --rows ROWS.jsonl --table [--task text_chars]
    python benchmarks local_steps_trained --rows ROWS.jsonl --frontier [--task text_chars]
    python benchmarks local_steps_trained --rows ROWS.jsonl --write     analysis/forecast/local_endings.json

text_chars: nanoGPT's CPU configuration (804,096 parameters, AdamW), 4 workers of 3 sequences. cifar10: images halved to
16 x 16 and ResNet-8 (75,290 parameters, SGD with momentum), 4 workers of 16 images. A worker is a process. "sync"
averages gradients in every step, through the named codec or uncompressed. The others take H local steps and DiLoCo's
outer step, but "SparseLoCo" and "averaging", whose outer optimizer is SGD of rate 1, and ", outer 0.5 0.9", of rate 0.5
and Nesterov momentum 0.9; "streaming" has 3 fragments that are applied 5 local steps late. Of a codec nothing is kept
for later, but with ", feedback" error feedback is around it; "signs" come back as signs, "gathered" all of them do.
", Muon" at the end: Muon for matrices and AdamW for the rest in each worker, as in MuLoCo. A row is
a run: bytes of an exchange, and forecasts of a local step with its share of the exchange where computing takes 20 ms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache, partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rows import Row, fill, grouped, markdown, mean, options, read
from torch import nn

from gradlab import datasets
from gradlab.analysis.forecast import Network, forecast
from gradlab.analysis.forecast.link import Link, parse_bandwidth
from gradlab.analysis.forecast.local_endings import CODED, UNCOMPRESSED
from gradlab.analysis.forecast.local_steps import forecast_local_steps
from gradlab.analysis.forecast.network import Profile
from gradlab.codec import seeded_generator
from gradlab.datasets import Cifar10, Data, Recipe, batches, build_optimizer, clip_gradients, get, learning_rate_at
from gradlab.datasets.resnet import initialized
from gradlab.layout import layers_of, named_layers
from gradlab.plan import Plan, Wrap, method_plan
from gradlab.runtime import Exchange, OuterStep
from gradlab.training.settings import TrainSettings

WORKERS, BATCH, COMPUTING = 4, {"text_chars": 3, "cifar10": 16}, 0.02
RATES = ("50mbit", "1gbit", "25gbit")
ENDINGS = Path(__file__).parents[2] / "analysis" / "forecast" / "local_endings.json"
_WINDOW = 50  # steps, in each of which a row has the mean loss of the workers' batches: its course
DENSE = ("DiLoCo", "sync", "streaming", "averaging")
CODECS: dict[str, dict[str, Any]] = {
    **{dtype: {"codec": "block_scaled", "dtype": dtype} for dtype in ("int8", "int4", "nvfp4")},
    **{f"ecsq {bits}": {"codec": "ecsq", "bits": bits} for bits in (1.25, 0.5, 0.25, 0.1)},
    "top-k 3 %": {"codec": "topk", "density": 0.03},
    "chunks": {"codec": "chunk_topk"},
    "DCT": {"codec": "dct_topk"},
    "PowerSGD": {"codec": "powersgd", "rank": 4},
    "signs": {"codec": "sign"},
    "16 bits": {"codec": "cast"},
    "IntSGD": {"codec": "intsgd"},
    "QSGD": {"codec": "qsgd"},
    "NUQSGD": {"codec": "nuqsgd"},
    "natural": {"codec": "natural"},
    "TernGrad": {"codec": "terngrad"},
    "1-bit SGD": {"codec": "one_bit"},
    "random-k 3 %": {"codec": "random_k", "density": 0.03},
    "CLT-k 3 %": {"codec": "clt_k", "density": 0.03},
    "sampled threshold 3 %": {"codec": "sampled_threshold", "density": 0.03},
}
MUON = ", Muon"
WAYS = ("sync", "DiLoCo", "SparseLoCo", *CODECS)


class SmallCifar10(Cifar10):  # type: ignore[misc]
    """Images halved to 16 x 16, and one block a stage, so that seeds by the dozen fit on a CPU."""

    def model(self, seed: int) -> nn.Module:
        return nn.Sequential(nn.AvgPool2d(2), initialized(3, (16, 32, 64), (1, 1, 1), 10, seed))


datasets._WORKLOADS["cifar10"] = SmallCifar10()  # in the processes of `streaming` too


def plan_of(way: str, task: str) -> Plan:
    layers, (name, *how) = layers_of(get(task).model(0)), way.removeprefix("streaming ").split(", ")
    if name in ("sync", "averaging") and how:
        name, *how = how
    if name in DENSE:
        return Plan(layers)
    if name == "SparseLoCo":
        return method_plan(layers, name)
    around = [Wrap("error_feedback")] if "feedback" in how else []
    if name == "signs" and "gathered" not in how:
        around.append(Wrap("two_way", {"error_feedback": "feedback" in how}))
    return Plan.uniform(layers, wrappers=around, **CODECS[name])


@cache  # and before workers are forked: reading CIFAR-10 takes longer than training on it
def loaded(task: str, data: str) -> Data:
    return get(task).load(data)


def trained(key: Row, chosen: argparse.Namespace) -> Row:
    way, every, task = key["way"], key["every"], chosen.task
    settings = TrainSettings(task, str(chosen.data), WORKERS, chosen.steps, BATCH[task], seed=key["seed"])
    loaded(task, settings.data)
    inner, way = way.endswith(MUON), way.removesuffix(MUON)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(  # fork: no imports anew
            _worker, (way, inner, every, settings, folder), WORKERS, start_method="fork"
        )
        done: Row = json.loads(Path(folder, "0.json").read_text(encoding="utf-8"))
    return done | {"times": predicted(way, every, task)}


def _worker(rank: int, way: str, muon: bool, every: int, settings: TrainSettings, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORKERS)
    torch.manual_seed(settings.seed)
    workload = get(settings.workload)
    recipe, data = settings.applied_to(workload.recipe), loaded(settings.workload, settings.data)
    model, plan = workload.model(settings.seed), plan_of(way, settings.workload)
    optimizers = _muon_and_adamw(recipe, model) if muon else [build_optimizer(recipe, model.parameters())]
    parameters = {layer.name: parameter for layer, parameter in named_layers(model)}
    generator = seeded_generator("augmentation", settings.seed, rank)
    if way.startswith("sync"):
        exchange, every = Exchange(plan, parameters.items(), optimizer=optimizers), 1
    else:
        outer = _outer_step(way, plan, model, every)
    count, losses = recipe.steps // every * every, []
    order = batches(len(data.train_x), recipe.batch_size, rank, WORKERS, settings.seed, recipe.steps)
    for step, indices in enumerate(islice(order, count)):
        for group in (group for one in optimizers for group in one.param_groups):
            group["lr"] = learning_rate_at(recipe, step)
        model.zero_grad()
        loss = workload.loss(model(workload.augment(data.train_x[indices], generator)), data.train_y[indices])
        loss.backward()
        if way.startswith("sync"):
            exchange.step({name: one.grad for name, one in parameters.items() if one.grad is not None})
        clip_gradients(recipe, model.parameters())
        for one in optimizers:
            one.step()
        losses.append(float(loss.detach()))
        if not way.startswith("sync"):
            outer.step()
    if way.startswith("sync"):
        payload = exchange.statistics.steps[-1].payload_bytes
        exchange.close()
    else:
        payload = _ended(outer, parameters)
    means = torch.tensor(losses)
    dist.all_reduce(means)
    if rank == 0:
        score = workload.score(model, data.test_x, data.test_y)
        losses = (means / WORKERS).tolist()
        course = [round(statistics.fmean(losses[start : start + _WINDOW]), 4) for start in range(0, count, _WINDOW)]
        row = {"score": score, "loss": statistics.fmean(losses[-10:]), "payload": payload, "course": course}
        Path(folder, "0.json").write_text(json.dumps(row), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _muon_and_adamw(recipe: Recipe, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon at AdamW's rate and weight decay for matrices but embeddings, AdamW for the rest."""
    matrices, others = [], []
    for layer, parameter in named_layers(model):
        (matrices if len(layer.shape) == 2 and layer.role != "embedding" else others).append(parameter)
    options = {"weight_decay": recipe.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
    return [torch.optim.Muon(matrices, **options), build_optimizer(recipe, others)]


def _outer_step(way: str, plan: Plan, model: nn.Module, every: int) -> OuterStep:
    how: dict[str, Any] = {"fragments": 3, "delay": 5} if way.startswith("streaming") else {}
    rule = "1 0" if way.startswith(("SparseLoCo", "averaging")) else way.partition(", outer ")[2]
    if rule:
        rate, momentum = map(float, rule.split())
        how["outer_optimizer"] = partial(torch.optim.SGD, lr=rate, momentum=momentum, nesterov=momentum > 0)
    return OuterStep(plan, model, every=every, **how)


def _ended(outer: OuterStep, parameters: Mapping[str, torch.Tensor]) -> float:
    exchanges = [one.exchange for one in outer.fragments if one.exchange is not None]
    payload = sum(one.statistics.steps[-1].payload_bytes for one in exchanges)
    common = {name: one for part in outer.fragments for name, one in part.parameters.items()}
    outer.wait()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(common[name])
    outer.close()
    return payload or 4 * sum(parameter.numel() for parameter in parameters.values())


def predicted(way: str, every: int, task: str) -> list[float]:
    links = [Link(parse_bandwidth(rate), 1e-4, 0.06) for rate in RATES]
    network, plan = Network(links, (WORKERS,), Profile(COMPUTING, "given")), plan_of(way, task)
    if dense := not plan.compressed_groups:
        plan = plan_of("int8", task)  # whose uncompressed exchange is asked for
    synchronous = forecast(plan, network)
    if way.startswith("sync"):
        return [(pair.dense if dense else pair.compressed).seconds for _, pair in synchronous.comparisons]
    seconds = [one.seconds(every, dense=dense) for one in forecast_local_steps(plan, network, synchronous)]
    # What streaming exchanges hides behind computing, where it takes no longer.
    return [max(COMPUTING, one - COMPUTING) for one in seconds] if way.startswith("streaming") else seconds


def table(rows: list[Row], score: str) -> str:
    """Lay out scores by way and H, bytes, and times. score: what it is."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    runs = grouped(rows, lambda row: (ways.index(row["way"]), row["every"]))
    lines = []
    for (_, every), here in sorted(runs.items()):
        scores = ", ".join(f"{row['score']:.3f}" for row in sorted(here, key=lambda row: row["seed"]))
        payload = mean(here, "payload") / every
        first = min(here, key=lambda row: row["seed"])
        times = [f"{1e3 * seconds:.1f}" for seconds in first["times"]]
        lines.append([first["way"], every, scores, f"{payload:,.0f}", *times])
    return markdown(("way", "H", score, "bytes per step", *(f"{rate}, ms a step" for rate in RATES)), lines)


def frontier(rows: list[Row], score: str) -> str:
    """Lay out what codecs cost: scores, mean of seeds (*: of one), and times fewer bytes than synchronously."""
    base = "averaging, " if rows[0].get("task") else ""  # the outer optimizer that the task prefers
    runs = grouped(rows, lambda row: (row["way"], row["every"]))
    dense = runs["sync", 1]
    lines = []
    for codec, name in [(base.removesuffix(", ") or "DiLoCo", "uncompressed"), *((base + one, one) for one in CODECS)]:
        bare, fed = ([runs.get((codec + how, every), []) for every in (8, 30, 100)] for how in ("", ", feedback"))
        cells = [*(_cell(one, mean(dense, "payload")) for one in bare), *(_cell(one, None) for one in fed)]
        if any(cells):
            lines.append([name, *(cell or "-" for cell in cells)])
    heads = [f"H = {every}{fed}" for fed in ("", ", feedback") for every in (8, 30, 100)]
    title = f"{score} (sync {mean(dense, 'score'):.3f})"
    return markdown((title, *heads), lines)


def _cell(runs: list[Row], dense: float | None) -> str:
    if not runs:
        return ""
    fewer = f" ({dense * runs[0]['every'] / mean(runs, 'payload'):,.0f}x)" if dense else ""
    return f"{mean(runs, 'score'):.3f}{'' if len(runs) > 1 else '*'}{fewer}"


def endings(rows: list[Row]) -> list[Row]:
    """Say how text trainings of the ways that gradlab names went, mean of their seeds."""
    runs = grouped((row for row in rows if "task" not in row), lambda row: (row["way"], row["every"]))
    dense = mean(runs["sync", 1], "score")
    plans = {"sync": UNCOMPRESSED, "DiLoCo": UNCOMPRESSED, "ecsq 0.5": CODED}
    return [
        {
            "plan": plans[way],
            "every": every,
            "above": round(mean(some, "score") - dense, 3),
            "window": _WINDOW,
            "course": [
                round(statistics.fmean(losses), 3)
                for losses in zip(*(row["course"] for row in some if "course" in row), strict=True)
            ],
        }
        for (way, every), some in sorted(runs.items(), key=lambda item: item[0][1])
        if way in plans
    ]


def main() -> None:
    torch.set_num_threads(1)  # a process with threads cannot fork
    named = {"ways": WAYS, "local_steps": [8, 30, 100], "seeds": [0, 1], "steps": 800}
    chosen = options(__doc__, data=Path, rows=Path, task=BATCH, **named, table=False, frontier=False, write=False)
    if chosen.write:
        lines = ",\n".join(json.dumps(one) for one in endings(read(chosen.rows)))
        ENDINGS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        return
    of_task = {} if chosen.task == "text_chars" else {"task": chosen.task}
    keys: Iterator[Row] = (
        {"way": way, "every": every, "seed": seed, "steps": chosen.steps, **of_task}
        for seed, way in product(chosen.seeds, chosen.ways)
        for every in ([1] if way.startswith("sync") else chosen.local_steps)
    )
    if not (chosen.table or chosen.frontier):
        fill(chosen.rows, keys, lambda key: trained(key, chosen))
    rows = [row for row in read(chosen.rows) if row.get("task", "text_chars") == chosen.task]
    laid_out = frontier if chosen.frontier else table
    print(laid_out(rows, "validation loss" if chosen.task == "text_chars" else "accuracy"))
