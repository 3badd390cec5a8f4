"""LGC, as written and at its best, beside what it must beat: trained on CIFAR-10 with emulated nodes.

    python benchmarks/lgc.py --data cifar10.npz --train rows.jsonl [--methods dense ...] [--seeds 0 1]
    python benchmarks/lgc.py --train rows.jsonl --table

The images halved to 16 x 16, ResNet-8 (75,290 parameters), 4 nodes with 16 images each, SGD with momentum 0.9, learning
rate 0.1 falling to 0, 1200 iterations: 200 dense, 300 in which the autoencoder learns, 700 with codes. 1 % of every
layer is selected; the first layer is dense, the last sparse. "frozen" selects for those 300 iterations and then moves
the compressed layers no more: a method that does not beat it has learned nothing. Ratios are of payload, indices and
the broadcast of the autoencoder counted: in the last 50 iterations, and over the whole run. One line of JSON per run;
what is there is not done again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import emulated
import torch
from accuracy import WORKLOAD, resnet8

from gradlab import codecs
from gradlab.codecs.lgc_ring import LgcRing
from gradlab.collectives import Coroutine
from gradlab.layout import Layer, layers_of
from gradlab.learned_selection import Selection
from gradlab.lgc_plan import GROUP, lgc_plan
from gradlab.methods import method_plan
from gradlab.plan import Group, Plan, Wrap

RANKS, STEPS, DENSE, LEARNING, DENSITY, MOMENTUM = 4, 1200, 200, 300, 0.01, 0.9
RECIPE = replace(WORKLOAD.recipe, learning_rate=0.1, batch_size=16, steps=STEPS, schedule="cosine")
FEEDBACK = Wrap("error_feedback", {"step_size_ratio": False})
ADAM = {"optimizer": "adam", "loss": "mean"}
Layers = Sequence[Layer]


@codecs.register
class Frozen(LgcRing):
    """The control: nothing in place of codes."""

    name = "frozen_ring"

    def _averaged_codes(self, selected: Selection, weights: torch.Tensor) -> Coroutine[torch.Tensor]:
        yield ()
        return torch.zeros_like(selected.values)


def _lgc(pattern: str, momentum: float | None = MOMENTUM, keep: str = "unselected", **settings: Any) -> Any:
    """As written but for these: whatever it has learned is used."""
    values = {"density": DENSITY, "training_steps": LEARNING, "most_error": 1e9, **settings}
    return lambda layers: lgc_plan(layers, pattern, momentum=momentum, keep=keep, warmup_steps=DENSE, **values)


def _frozen(layers: Layers) -> Plan:
    plan = _lgc("ring", None, **ADAM)(layers)
    groups = [replace(group, codec="frozen_ring") if group.name == GROUP else group for group in plan.groups]
    return replace(plan, groups=tuple(groups))


def _clt_k(**settings: Any) -> Callable[[Layers], Plan]:
    """The same layers as LGC's, each for itself."""

    def plan(layers: Layers) -> Plan:
        names = [name for group in _lgc("ring", None)(layers).groups for name in group.layers]
        values = {"density": DENSITY, "leader": "random", **settings}
        groups = [Group(name, (name,), "clt_k", values, (FEEDBACK,)) for name in names]
        return replace(Plan(tuple(layers), tuple(groups)), schedule=_lgc("ring", None)(layers).schedule)

    return plan


METHODS: dict[str, Callable[[Layers], Plan]] = {
    "dense": lambda layers: Plan(tuple(layers)),
    "DGC": lambda layers: method_plan(layers, "DGC", momentum=MOMENTUM, warmup_steps=DENSE, density=DENSITY),
    "CLT-k": _clt_k(),
    "CLT-k, int8": _clt_k(values="int8"),
    "LGC ring, as written": _lgc("ring"),
    "LGC ring, Adam, normalised": _lgc("ring", None, "difference", normalise="layer", **ADAM),
    "LGC ring, by value": _lgc("ring", None, "difference", normalise="layer", order="value", **ADAM),
    "LGC server, as written": _lgc("server"),
    "LGC server, shared": _lgc("server", None, "difference", positions="shared", normalise="layer", **ADAM),
    "frozen": _frozen,
}


def run(method: str, data: Any, seed: int) -> dict[str, Any]:
    """Train once; the optimizer's momentum is 0 where the plan applies it."""
    plan = METHODS[method](layers_of(resnet8(RECIPE, RANKS).model(seed)))
    recipe = replace(RECIPE, momentum=0.0, nesterov=False) if plan.applies_momentum else RECIPE
    return emulated.train(resnet8(recipe, RANKS), plan, data, seed)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Accuracy and loss seed by seed, ratios, and the codecs' time per iteration and rank."""
    lines = ["method                       accuracy %     loss           ratio at the end  whole run  codec ms"]
    for method in METHODS:
        mine = [row for row in rows if row["method"] == method]
        if mine:
            accuracy = ", ".join(f"{100 * row['score']:.1f}" for row in mine)
            loss = ", ".join(f"{row['loss']:.3f}" for row in mine)
            last, whole, seconds = (
                statistics.fmean(row[key] for row in mine) for key in ("last_ratio", "ratio", "codec_seconds")
            )
            lines.append(f"{method:27s}  {accuracy:13s}  {loss:13s}  {last:16.1f}  {whole:9.1f}  {1e3 * seconds:8.2f}")
    return "\n".join(lines)


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="cifar10.npz")
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--table", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.data:
        data = WORKLOAD.load(chosen.data, train_limit=20000, test_limit=10000)
        for seed in chosen.seeds:
            for method in chosen.methods:
                about = {"method": method, "seed": seed}
                if not any(about.items() <= row.items() for row in read(chosen.train)):
                    row = about | run(method, data, seed)
                    with chosen.train.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    print(json.dumps(row), flush=True)
    if chosen.table:
        print(table(read(chosen.train)))


if __name__ == "__main__":
    main()
