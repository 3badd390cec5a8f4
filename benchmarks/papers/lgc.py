"""LGC, as written and at its best, beside what it must beat: trained with emulated nodes.

    python benchmarks lgc cifar10 --data cifar10.npz --train rows.jsonl [--methods dense ...] [--seeds 0 1]
    python benchmarks lgc camvid --data camvid.npz --train rows.jsonl
    python benchmarks lgc cifar10 --train rows.jsonl --table

cifar10: the images halved to 16 x 16, ResNet-8 (75,290 parameters), 16 images per node; 1200 iterations: 200 dense, 300
in which the autoencoder learns, 700 with codes. camvid: the pictures halved, a small PSPNet (227,355 parameters), 2
pictures per node; 600 iterations: 100, 150, 350. Both: 4 nodes, SGD without momentum, its rate rising over the dense
iterations and then falling to 0; where a plan applies momentum m itself, the rate is (1 - m) times that. 1 % of every
layer is selected; the first layer is dense, the last sparse. DGC's density falls to that while the others learn.
"frozen" selects while others learn and then moves the compressed layers no more (but for weight decay): a method that
does not beat it has learned nothing. Ratios are of payload, indices and the broadcast of the autoencoder counted: in
the last 50 iterations, and over the whole run; "sent" is what a rank sends in one of the last iterations, of the
server's who sends the common code and who does not, and what all ranks send in the whole run. One line of JSON per run;
what is there is not done again.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import emulated
import torch
from emulated import Task
from rows import Row, add, grouped, markdown, missing, options, read
from torch import nn
from torch.nn import functional

from gradlab import codecs
from gradlab.codec import Batch, Context, Exchanged, Tensors
from gradlab.codecs.lgc_ring import LgcRing
from gradlab.collectives import Coroutine
from gradlab.datasets import Data, Recipe, Workload, get
from gradlab.layout import Layer, layers_of
from gradlab.learning.selection import COMPRESSING
from gradlab.plan import Group, Plan, Wrap, lgc_plan, method_plan
from gradlab.plan.lgc_recipe import GROUP
from gradlab.plan.optimizer_rules import wrapper_that

RANKS, DENSITY, MOMENTUM = 4, 0.01, 0.9


@dataclass(frozen=True)
class Setting:
    """A task, and how many of its iterations are dense and how many learn."""

    task: Task
    dense: int
    learning: int
    limits: dict[str, int]


def _recipe(workload: Workload, learning_rate: float, steps: int, batch: int, warmup: int) -> Recipe:
    changed = {"learning_rate": learning_rate, "momentum": 0.0, "nesterov": False, "schedule": "cosine"}
    return replace(workload.recipe, **changed, steps=steps, batch_size=batch, warmup_steps=warmup)


def tasks() -> dict[str, Setting]:
    """Tasks by the name that the command takes."""
    images, streets = get("cifar10"), get("camvid")
    small = Task(images, _recipe(images, 1.0, 1200, 16, 200), RANKS, (1, 1, 1))
    return {
        "cifar10": Setting(small, 200, 300, {"train_limit": 20000, "test_limit": 10000}),
        "camvid": Setting(Task(streets, _recipe(streets, 0.5, 600, 2, 100), RANKS), 100, 150, {}),
    }


def load(name: str, setting: Setting, path: str) -> Data:
    """Pictures of streets are halved here, those of CIFAR-10 by the task."""
    data = setting.task.workload.load(path, **setting.limits)
    if name != "camvid":
        return data
    small = {f"{split}_x": functional.avg_pool2d(getattr(data, f"{split}_x"), 2) for split in ("train", "test")}
    labels = {f"{split}_y": getattr(data, f"{split}_y")[:, ::2, ::2].contiguous() for split in ("train", "test")}
    return replace(data, **small, **labels)


FEEDBACK = Wrap("error_feedback", {"step_size_ratio": False})
ADAM = {"optimizer": "adam", "loss": "mean"}


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


def _lgc(pattern: str, momentum: float | None = None, keep: str = "unselected", **settings: Any) -> Method:
    """As written but for these: whatever it has learned is used."""

    def plan(setting: Setting, model: nn.Module) -> Plan:
        values = {"density": DENSITY, "training_steps": setting.learning, "most_error": 1e9, **settings}
        return lgc_plan(model, pattern, momentum=momentum, keep=keep, warmup_steps=setting.dense, **values)

    return plan


def _frozen(setting: Setting, model: nn.Module) -> Plan:
    plan = _lgc("ring", **ADAM)(setting, model)
    groups = [replace(group, codec="frozen_ring") if group.name == GROUP else group for group in plan.groups]
    return replace(plan, groups=tuple(groups))


def _clt_k(**settings: Any) -> Method:
    """The same layers as LGC's, each for itself."""

    def plan(setting: Setting, model: nn.Module) -> Plan:
        like = _lgc("ring")(setting, model)
        values = {"density": DENSITY, "leader": "random", **settings}
        names = [name for group in like.groups for name in group.layers]
        groups = [Group(name, (name,), "clt_k", values, (FEEDBACK,)) for name in names]
        return Plan(like.layers, tuple(groups), like.schedule)

    return plan


def _dgc(setting: Setting, model: nn.Module) -> Plan:
    """Its density falls to that of the others while these learn."""
    return method_plan(
        layers_of(model),
        "DGC",
        momentum=MOMENTUM,
        warmup_steps=setting.dense,
        wrapper_settings={"sparsity_warmup": {"steps": setting.learning}},
        density=DENSITY,
    )


BEST: dict[str, Any] = {"normalise": "layer", **ADAM}
METHODS: dict[str, Method] = {
    "dense": lambda setting, model: Plan(layers_of(model)),
    "DGC 1 %, ramp while others learn": _dgc,
    "CLT-k": _clt_k(),
    "CLT-k, int8": _clt_k(values="int8"),
    "CLT-k, int8, 4 %": _clt_k(values="int8", density=0.04),
    "LGC ring, as written (text)": _lgc("ring", MOMENTUM),
    "LGC ring, as written (algorithm)": _lgc("ring"),
    "LGC ring, Adam, normalised": _lgc("ring", None, "difference", **BEST),
    "LGC ring, by value": _lgc("ring", None, "difference", order="value", **BEST),
    "LGC ring, by value, 4 %": _lgc("ring", None, "difference", order="value", density=0.04, **BEST),
    "LGC ring, by value, vectors coded": _lgc("ring", None, "difference", order="value", vectors="autoencoder", **BEST),
    "LGC ring, by value, vectors sparse": _lgc("ring", None, "difference", order="value", vectors="sparse", **BEST),
    "LGC server, as written (text)": _lgc("server", MOMENTUM),
    "LGC server, as written (algorithm)": _lgc("server"),
    "LGC server, shared": _lgc("server", None, "difference", positions="shared", **BEST),
    "frozen": _frozen,
}


def run(method: str, setting: Setting, data: Data, seed: int) -> dict[str, Any]:
    """Train once."""
    plan = METHODS[method](setting, setting.task.model(seed))
    recipe = setting.task.recipe
    if wrapper_that(plan, "applies_momentum"):
        recipe = replace(recipe, learning_rate=(1 - MOMENTUM) * recipe.learning_rate)
    return emulated.train(replace(setting.task, recipe=recipe), plan, data, seed)


def table(rows: Sequence[Row]) -> str:
    """Accuracy and loss seed by seed, bytes and ratios."""
    lines = []
    for method, runs in sorted(grouped(rows, lambda row: row["method"]).items(), key=lambda x: [*METHODS].index(x[0])):
        keys = ("last_ratio", "payload", "most_payload", "least_payload")
        last, total, most, least = (statistics.fmean(row[key] for row in runs) for key in keys)
        total *= RANKS * tasks()[runs[0]["task"]].task.recipe.steps / 1e6
        accuracy = ", ".join(f"{100 * row['score']:.1f}" for row in runs)
        loss = ", ".join(f"{row['loss']:.3f}" for row in runs)
        sent = f"{most / 1e3:.2f} / {least / 1e3:.2f}"
        lines.append([method, accuracy, loss, sent, f"{last:.1f}", f"{total:.0f}"])
    heads = ("accuracy %", "final loss", "sent, kB", "ratio at the end", "sent by all in the run, MB")
    return markdown(("method", *heads), lines)


def main() -> None:
    """See the module's text."""
    named = {"data": str, "train": Path("rows.jsonl"), "methods": list(METHODS), "seeds": [0, 1], "table": False}
    chosen = options(__doc__, ("task", tasks()), **named)
    torch.set_num_threads(1)
    if chosen.data:
        setting = tasks()[chosen.task]
        data = load(chosen.task, setting, chosen.data)
        keys = ({"task": chosen.task, "method": m, "seed": seed} for seed in chosen.seeds for m in chosen.methods)
        for key in missing(chosen.train, keys):
            add(chosen.train, key | run(key["method"], setting, data, key["seed"]))
    if chosen.table:
        print(table([row for row in read(chosen.train) if row["task"] == chosen.task]))


if __name__ == "__main__":
    main()
