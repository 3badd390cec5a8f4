"""Processor time that a step of many small layers takes, codec by codec, beside the identity plan.

    python benchmarks small_layers [--layers 300 1000] [--codecs topk sign] [--repeats 15] [--rows ROWS.jsonl]
    python benchmarks small_layers --rows ROWS.jsonl --table

One rank of a real process group takes real steps, so that no network is counted. "default" is the codec's uniform plan,
"per layer" has a group for each layer, "grouped" groups of 4 MiB, "one layer" is one matrix of as many values. The
plans take turns; a figure is the median of the calling thread's processor time. "for layers" is what of a step the
matrix does not take. A row is a form of a codec's plan.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layer_lists import small_layers
from rows import Row, keep, markdown, options, read

from gradlab.layout import Layer
from gradlab.plan import Plan
from gradlab.runtime import Exchange

SPARSE = {"density": 0.01}
CODECS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("identity", "cast", "natural", "block_scaled", "qsgd", "terngrad", "sign", "one_bit")},
    **{"topk": SPARSE, "sampled_threshold": SPARSE, "threshold": {}, "random_k": SPARSE, "clt_k": SPARSE},
    **{"dct_topk": {}, "powersgd": {"rank": 1}},
    "gradiveq": {"ratio": 16.0, "complement": 1.0, "warmup_steps": 0, "compressed_steps": 0},
}
FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "per layer": {"group_bytes": 0},
    "grouped": {"group_bytes": 4 * 2**20},
}
ONE = "one layer"


def one_layer(layers: list[Layer]) -> list[Layer]:
    numel = sum(layer.numel for layer in layers)
    rows = next(rows for rows in range(math.isqrt(numel), 0, -1) if numel % rows == 0)
    return [Layer("matrix", (rows, numel // rows), "linear")]


class Run:
    def __init__(self, layers: list[Layer], codec: str, **choice: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        plan = Plan.uniform(layers, codec, **CODECS[codec], **choice)
        self._gradients = {layer.name: torch.randn(layer.shape, generator=generator) for layer in layers}
        parameters = {layer.name: torch.zeros(layer.shape, requires_grad=True) for layer in layers}
        self.exchange = Exchange(plan, parameters.items())

    def seconds(self) -> float:
        """Take a step, and return its processor seconds."""
        given = {name: gradient.clone() for name, gradient in self._gradients.items()}
        began = time.thread_time()
        self.exchange.step(given)
        return time.thread_time() - began


def measured(layers: list[Layer], codec: str, repeats: int) -> Iterator[Row]:
    runs = {form: Run(layers, codec, **choice) for form, choice in FORMS.items()}
    runs[ONE] = Run(one_layer(layers), codec)
    turns = [{form: run.seconds() for form, run in runs.items()} for _ in range(repeats + 3)]
    for form, run in runs.items():
        # The first steps learn and warm up.
        low, middle, high = statistics.quantiles([turn[form] for turn in turns[3:]], n=4)
        row = {"layers": len(layers), "codec": codec, "form": form}
        yield row | {"milliseconds": 1e3 * middle, "quartiles": [1e3 * low, 1e3 * high]}
        run.exchange.close()


def table(rows: list[Row]) -> str:
    """Lay out milliseconds."""
    forms, lines = (*FORMS, ONE), []
    by_key = {(row["layers"], row["codec"], row["form"]): row["milliseconds"] for row in rows}
    for layers, codec in dict.fromkeys((row["layers"], row["codec"]) for row in rows):
        times = [by_key[layers, codec, form] for form in forms]
        of_layers = (1e3 * times[0] / layers, 1e3 * (times[0] - times[-1]) / layers)
        shown = (by_key[layers, "identity", "default"], *times, *of_layers)
        lines.append([layers, codec, *(f"{one:.1f}" for one in shown)])
    return markdown(("layers", "codec", "identity", *forms, "us per layer", "for layers"), lines)


def main() -> None:
    named = {"layers": [300, 1000], "codecs": list(CODECS), "repeats": 15}
    chosen = options(__doc__, **named, rows=Path, table=False)
    if chosen.table:
        print(table(read(chosen.rows)))
        return
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    cases = product(chosen.layers, chosen.codecs)
    found = (row for count, codec in cases for row in measured(small_layers(count), codec, chosen.repeats))
    print(table([keep(chosen.rows, row) for row in found]))
    dist.destroy_process_group()
