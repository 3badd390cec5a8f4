"""Training under a codec's gather and its way through shards, by number of ranks: what the second rounding costs.

    python benchmarks many_ranks --data cifar10.npz --rows ROWS.jsonl [--task image] [--plans top-k ecsq_0.25]
        [--ranks 8 16] [--seeds 0 1] [--forms gather shards]
    python benchmarks many_ranks --rows ROWS.jsonl --table

image: CIFAR-10 halved to 16 x 16 and ResNet-8 (75,290 parameters, SGD with momentum), 128 images a step that the ranks
share. text: a file by characters and a transformer (104,320 parameters, AdamW), 32 rows a step. each_image, each_text:
as many ranks have one image or row each. They run in lockstep, and keep feedback. "gather": every rank decodes every
message; PowerSGD's and plain averages are of this form. "shards": `two_way` as plans have it from 5 ranks on. "same":
its answers have messages' settings. "bfloat16", "int8": a gather whose residuals are kept so, "nearest": in
bfloat16 without random rounding. A row has the mean loss of the last 50 steps, and the loss of 2,000 test samples,
in nats; bytes are of the mean rank and step. The tables: of shards over the gather, and of all over plain averages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import emulated
import torch
from accuracy import resnet8
from rows import Row, fill, grouped, markdown, mean, options, read

from gradlab.codec import wrapper
from gradlab.datasets import TextChars, get
from gradlab.layout import layers_of
from gradlab.plan import FEEDBACK, Plan, Wrap
from gradlab.plan.plan import ANSWER

STEPS, WARMUP = 200, 30
FORMS = {
    "gather": FEEDBACK,
    "shards": (*FEEDBACK, Wrap("two_way", {"answer": ANSWER})),
    "same": (*FEEDBACK, Wrap("two_way")),
    "int8": (Wrap("error_feedback", {"buffer": "int8"}),),
    **dict.fromkeys(("bfloat16", "nearest"), (Wrap("error_feedback", {"buffer": "bfloat16"}),)),
}
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "int4": ("block_scaled", {"dtype": "int4"}),
    "top-k": ("topk", {"density": 0.01}),
    "chunk_topk": ("chunk_topk", {}),
    "ecsq_0.25": ("ecsq", {"bits": 0.25}),
    "ecsq_1": ("ecsq", {"bits": 1.0}),
    "qsgd_4": ("qsgd", {"bits": 4, "aggregation": "gather"}),
    "signs": ("sign", {}),
    "powersgd_4": ("powersgd", {"rank": 4}),
    "plain": ("identity", {}),
}


def task_of(name: str, ranks: int) -> emulated.Task:
    """Return a task whose ranks share one batch, whatever their number, or have one sample each."""
    batch = {"image": 128 // ranks, "text": 32 // ranks}.get(name, 1)
    if name.endswith("image"):
        recipe = replace(get("cifar10").recipe, batch_size=batch, steps=STEPS, warmup_steps=WARMUP)
        return resnet8(replace(recipe, schedule="cosine"), ranks)
    text = TextChars(context=48, width=64, layers=2)
    recipe = replace(text.recipe, learning_rate=2e-3, batch_size=batch, steps=STEPS, warmup_steps=WARMUP)
    return emulated.Task(text, recipe, ranks)


def train(task: emulated.Task, data: Any, key: Row) -> Row:
    """Train under a row's plan and form, and return its losses in nats, its score, and the bytes sent in a step."""
    codec, settings = PLANS[key["plan"]]
    layers = layers_of(task.model(0))
    plan = Plan.uniform(layers, codec, wrappers=FORMS[key["form"]], warmup_steps=WARMUP, **settings)
    to_nearest = patch.object(wrapper, "bfloat16_at_random", lambda values, bits, out: out.copy_(values))
    with to_nearest if key["form"] == "nearest" else nullcontext():
        done = emulated.train(task, plan, data, key["seed"])
    return {name: done[name] for name in ("loss", "test_loss", "score", "wire")}


def table(rows: Sequence[Row]) -> str:
    """Losses of other forms over the gather's, in per cent: mean over seeds, and the range."""

    def cells(of_case: Sequence[Row]) -> Iterator[tuple[object, ...]]:
        forms = grouped(of_case, lambda row: row["form"])
        gathered = {row["seed"]: row for row in forms.pop("gather", ())}
        for form, others in forms.items():
            pairs = [(row, gathered[row["seed"]]) for row in others if row["seed"] in gathered]
            if pairs:
                more = [[100 * (a[x] / b[x] - 1) for a, b in pairs] for x in ("loss", "test_loss")]
                said = [f"{sum(one) / len(one):+.2f} ({min(one):+.2f} to {max(one):+.2f})" for one in more]
                yield form, *said, f"{mean(others, 'wire') / mean(gathered.values(), 'wire'):.2f}", len(pairs)

    cases = grouped(rows, lambda row: (row["task"], row["plan"], row["ranks"]))
    heads = ("task", "plan", "ranks", "form", "loss, %", "test loss, %", "bytes sent, of the gather's", "seeds")
    return markdown(heads, [(*case, *line) for case, of_case in sorted(cases.items()) for line in cells(of_case)])


def over_plain(rows: Sequence[Row]) -> str:
    """Training losses over those of plain averages between as many ranks, in per cent, mean over seeds."""
    plain = {(row["task"], row["ranks"], row["seed"]): row["loss"] for row in rows if row["plan"] == "plain"}
    more = [
        row | {"more": 100 * (row["loss"] / plain[key] - 1)}
        for row in rows
        if row["plan"] != "plain" and (key := (row["task"], row["ranks"], row["seed"])) in plain
    ]
    ranks = sorted({row["ranks"] for row in more})
    cases = grouped(more, lambda row: (row["task"], row["plan"], row["form"]))
    lines = [
        (*case, *(f"{mean(found, 'more'):+.1f}" if (found := of_ranks.get(n)) else "" for n in ranks))
        for case, of_case in sorted(cases.items())
        for of_ranks in [grouped(of_case, lambda row: row["ranks"])]
    ]
    return markdown(("task", "plan", "form", *map(str, ranks)), lines)


def main() -> None:
    """Train the runs that the rows lack, or show the table."""
    wanted = options(
        __doc__,
        **{
            "data": Path,
            "rows": Path,
            "task": {"image": 0, "text": 0, "each_image": 0, "each_text": 0},
            "table": False,
        },
        **{"plans": list(PLANS), "ranks": (8, 16, 4, 32), "seeds": (0, 1), "forms": ("gather", "shards")},
    )
    if wanted.table:
        print(table(read(wanted.rows)), over_plain(read(wanted.rows)), sep="\n\n")
        return
    torch.set_num_threads(1)
    names = ("seed", "ranks", "plan", "form")
    keys = (
        {"task": wanted.task, **dict(zip(names, values, strict=True))}
        for values in product(wanted.seeds, wanted.ranks, wanted.plans, wanted.forms)
    )
    data = task_of(wanted.task, 1).workload.load(str(wanted.data))
    fill(wanted.rows, keys, lambda key: train(task_of(wanted.task, key["ranks"]), data, key))


if __name__ == "__main__":
    main()
