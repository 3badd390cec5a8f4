"""LGC, as written and at its best, beside what it must beat: trained with emulated nodes.

    python benchmarks lgc cifar10 --data cifar10.npz --train ROWS.jsonl [--methods dense ...] [--seeds 0 1]
    python benchmarks lgc cifar10 --train ROWS.jsonl --table

cifar10: images halved to 16 x 16, ResNet-8 (75,290 parameters), 16 images per node; 1200 iterations: 200 dense, 300 in
which the autoencoder learns, 700 with codes. camvid: pictures halved, a small PSPNet (227,355 parameters), 2 pictures
per node; 600 iterations: 100, 150, 350. 4 nodes, SGD without momentum; where a plan applies momentum m itself, the rate
is (1 - m) times dense training's. 1 % of every layer is selected; the first layer is dense, the last sparse. "frozen"
selects while others learn and then moves the compressed layers no more. A row is a run; one that is there is not done
again. Bytes are payload, with indices and the autoencoder's broadcast; "sent" is of one of the last iterations, of the
server's rank that sends the common code and of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import emulated
import torch
from emulated import Task
from rows import Row, fill, grouped, markdown, mean, options, read
from torch import nn
from torch.nn import functional

from gradlab import codecs
from gradlab.codec import Batch, Context, Exchanged, Tensors
from gradlab.codecs.lgc_ring import LgcRing
from gradlab.collectives import Coroutine
from gradlab.datasets import Data, get
from gradlab.layout import Layer, layers_of
from gradlab.learning.selection import COMPRESSING
from gradlab.plan import Group, Plan, Wrap, lgc_plan
from gradlab.plan.lgc_recipe import GROUP
from gradlab.plan.optimizer_rules import wrapper_that

RANKS, DENSITY, MOMENTUM = 4, 0.01, 0.9


@dataclass(frozen=True)
class Setting:
    """A task, how many of its iterations are dense and how many learn, and limits of its data."""

    task: Task
    dense: int
    learning: int
    limits: dict[str, int]


def tasks() -> dict[str, Setting]:
    plain = {"momentum": 0.0, "nesterov": False, "schedule": "cosine"}
    images, streets = get("cifar10"), get("camvid")
    small = replace(images.recipe, **plain, learning_rate=1.0, steps=1200, batch_size=16, warmup_steps=200)
    large = replace(streets.recipe, **plain, learning_rate=0.5, steps=600, batch_size=2, warmup_steps=100)
    return {
        "cifar10": Setting(Task(images, small, RANKS, (1, 1, 1)), 200, 300, {"train_limit": 20000}),
        "camvid": Setting(Task(streets, large, RANKS), 100, 150, {}),
    }


def load(name: str, setting: Setting, path: str) -> Data:
    """Pictures of streets are halved here, those of CIFAR-10 by the task."""
    data = setting.task.workload.load(path, **setting.limits)
    if name != "camvid":
        return data
    small = {f"{split}_x": functional.avg_pool2d(getattr(data, f"{split}_x"), 2) for split in ("train", "test")}
    labels = {f"{split}_y": getattr(data, f"{split}_y")[:, ::2, ::2].contiguous() for split in ("train", "test")}
    return replace(data, **small, **labels)


@codecs.register
class Frozen(LgcRing):
    """The control: nothing in place of codes, and nothing is sent."""

    name = "frozen_ring"

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        clock = state.get(f"{next(iter(grads))}/clock")
        if clock is None or int(clock[0]) != COMPRESSING:
            return (yield from super().exchange(grads, state, context))
        yield ()
        return Exchanged({name: torch.zeros_like(grad) for name, grad in grads.items()}, dict(grads), state)

    def _bytes(self, layers: Sequence[Layer], world_size: int, mode: int, position: int) -> float:
        return 0.0 if mode == COMPRESSING else super()._bytes(layers, world_size, mode, position)

    def _position_bytes(self, layers: Sequence[Layer], world_size: int, mode: int) -> float:
        return 0.0 if mode == COMPRESSING else super()._position_bytes(layers, world_size, mode)

    def _code_bytes(self, layers: Sequence[Layer], world_size: int) -> float:
        return 0.0


Method = Callable[[Setting, nn.Module], Plan]


def _lgc(pattern: str, **settings: Any) -> Method:
    """As written but for these: whatever it has learned is used."""

    def plan(setting: Setting, model: nn.Module) -> Plan:
        values = {"density": DENSITY, "training_steps": setting.learning, "most_error": 1e9, "momentum": None}
        return lgc_plan(model, pattern, warmup_steps=setting.dense, **values | {"keep": "unselected"} | settings)

    return plan


def _frozen(setting: Setting, model: nn.Module) -> Plan:
    plan = _lgc("ring", **ADAM)(setting, model)
    groups = [replace(group, codec="frozen_ring") if group.name == GROUP else group for group in plan.groups]
    return replace(plan, groups=tuple(groups))


def _clt_k(**settings: Any) -> Method:
    def plan(setting: Setting, model: nn.Module) -> Plan:
        like, feedback = _lgc("ring")(setting, model), Wrap("error_feedback", {"step_size_ratio": False})
        values = {"density": DENSITY, "leader": "random", **settings}
        names = [name for group in like.groups for name in group.layers]
        groups = [Group(name, (name,), "clt_k", values, (feedback,)) for name in names]
        return Plan(like.layers, tuple(groups), like.schedule)

    return plan


ADAM = {"optimizer": "adam", "loss": "mean"}
BEST: dict[str, Any] = {"keep": "difference", "normalise": "layer", **ADAM}
METHODS: dict[str, Method] = {
    "dense": lambda setting, model: Plan(layers_of(model)),
    "CLT-k": _clt_k(),
    "CLT-k, int8": _clt_k(values="int8"),
    "LGC ring, as written (text)": _lgc("ring", momentum=MOMENTUM),
    "LGC ring, as written (algorithm)": _lgc("ring"),
    "LGC ring, Adam, normalised": _lgc("ring", **BEST),
    "LGC ring, by value": _lgc("ring", order="value", **BEST),
    "LGC server, as written (text)": _lgc("server", momentum=MOMENTUM),
    "LGC server, as written (algorithm)": _lgc("server"),
    "LGC server, shared": _lgc("server", positions="shared", **BEST),
    "frozen": _frozen,
}


def table(rows: Sequence[Row]) -> str:
    lines = []
    for method, runs in sorted(grouped(rows, lambda row: row["method"]).items(), key=lambda x: [*METHODS].index(x[0])):
        total = mean(runs, "payload") * RANKS * tasks()[runs[0]["task"]].task.recipe.steps / 1e6
        accuracy = ", ".join(f"{100 * row['score']:.1f}" for row in runs)
        loss = ", ".join(f"{row['loss']:.3f}" for row in runs)
        sent = " / ".join(f"{mean(runs, key) / 1e3:.2f}" for key in ("most_payload", "least_payload"))
        lines.append([method, accuracy, loss, sent, f"{mean(runs, 'last_ratio'):.1f}", f"{total:.0f}"])
    heads = ("accuracy %", "final loss", "sent, kB", "ratio at the end", "sent by all in the run, MB")
    return markdown(("method", *heads), lines)


def main() -> None:
    named = {"data": str, "train": Path("rows.jsonl"), "methods": list(METHODS), "seeds": [0, 1], "table": False}
    chosen = options(__doc__, ("task", tasks()), **named)
    torch.set_num_threads(1)
    setting = tasks()[chosen.task]
    if chosen.data:
        data = load(chosen.task, setting, chosen.data)

        def run(key: Row) -> Row:
            plan, recipe = METHODS[key["method"]](setting, setting.task.model(key["seed"])), setting.task.recipe
            if wrapper_that(plan, "applies_momentum"):
                recipe = replace(recipe, learning_rate=(1 - MOMENTUM) * recipe.learning_rate)
            return emulated.train(replace(setting.task, recipe=recipe), plan, data, key["seed"])

        keys = ({"task": chosen.task, "method": m, "seed": seed} for seed in chosen.seeds for m in chosen.methods)
        fill(chosen.train, keys, run)
    if chosen.table:
        print(table([row for row in read(chosen.train) if row["task"] == chosen.task]))
