"""Processor time that a step of many small layers takes, codec by codec, beside the identity plan.

    python benchmarks small_layers [--layers 300 1000] [--codecs topk sign] [--repeats 15] [--rows ROWS.jsonl]
    python benchmarks small_layers --rows ROWS.jsonl --table

One rank of a real process group takes real steps (`gradlab.runtime.Exchange`), so that what is counted is the machinery
and the codecs, and no network. "default" is the codec's uniform plan, "per layer" the same with a group for each layer,
"grouped" with all layers in groups of 4 MiB, "one layer" a plan of one matrix of as many values. The plans take turns,
and a figure is the median of the calling thread's processor time. "us per layer" is that of the default, "for layers"
what of it the matrix does not take. "in Python" is the default without PyTorch's and numpy's part: the calls that its
step makes into PyTorch are written down once, and made again by themselves, in turns with the steps; numpy's share of
a step is a profiler's (of the functions that it calls by name, without operators).
"""

from __future__ import annotations

import cProfile
import math
import pstats
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layer_lists import small_layers
from rows import Row, keep, markdown, options, read
from torch.overrides import TorchFunctionMode

from gradlab.layout import Layer
from gradlab.plan import Plan
from gradlab.runtime import Exchange

CODECS: dict[str, dict[str, Any]] = {
    "identity": {},
    "cast": {},
    "natural": {},
    "block_scaled": {},
    "qsgd": {},
    "terngrad": {},
    "sign": {},
    "one_bit": {},
    "topk": {"density": 0.01},
    "sampled_threshold": {"density": 0.01},
    "threshold": {},
    "random_k": {"density": 0.01},
    "clt_k": {"density": 0.01},
    "dct_topk": {},
    "powersgd": {"rank": 1},
    "gradiveq": {"ratio": 16.0, "complement": 1.0, "warmup_steps": 0, "compressed_steps": 0},
}
FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "per layer": {"group_bytes": 0},
    "grouped": {"group_bytes": 4 * 2**20},
}
ONE, CALLS = "one layer", "default, its calls"


def one_layer(layers: list[Layer]) -> list[Layer]:
    """Return a matrix of as many values as the layers have, as square as can be."""
    numel = sum(layer.numel for layer in layers)
    rows = next(rows for rows in range(math.isqrt(numel), 0, -1) if numel % rows == 0)
    return [Layer("matrix", (rows, numel // rows), "linear")]


class Calls(TorchFunctionMode):
    """The calls into PyTorch made while it is active; reading a tensor's shape or type is none.

    Integers are kept as they were: they may be positions, in memory that something else used since.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Write a call down and make it."""
        if getattr(function, "__name__", "") != "__get__":
            self.made.append((function, own_integers(args), own_integers(kwargs or {})))
        return function(*args, **(kwargs or {}))

    def seconds(self) -> float:
        """Make all calls again, and return their processor seconds."""
        calls = [(function, own_integers(args), own_integers(kwargs)) for function, args, kwargs in self.made]
        with torch.no_grad():
            began = time.thread_time()
            for function, args, kwargs in calls:
                function(*args, **kwargs)
            return time.thread_time() - began


def own_integers(value: Any) -> Any:
    """Copy tensors of integers in a call's arguments."""
    if isinstance(value, torch.Tensor):
        return value if value.dtype.is_floating_point else value.clone()
    if isinstance(value, dict):
        return {key: own_integers(one) for key, one in value.items()}
    return type(value)(map(own_integers, value)) if type(value) in (list, tuple) else value


class Run:
    """One plan at work on gradients of its layers."""

    def __init__(self, layers: list[Layer], codec: str, **choice: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        self.plan = Plan.uniform(layers, codec, **CODECS[codec], **choice)
        self._gradients = {layer.name: torch.randn(layer.shape, generator=generator) for layer in layers}
        parameters = {layer.name: torch.zeros(layer.shape, requires_grad=True) for layer in layers}
        self.exchange = Exchange(self.plan, parameters.items())

    def seconds(self) -> float:
        """Take a step, and return its processor seconds."""
        given = self._given()
        began = time.thread_time()
        self.exchange.step(given)
        return time.thread_time() - began

    def calls(self) -> Calls:
        """Take a step, and return its calls. Making them changes the same values again: take no steps after."""
        for _ in range(3):
            self.seconds()
        given = self._given()
        with Calls() as calls:
            self.exchange.step(given)
        return calls

    def numpys_share(self) -> float:
        """The share of a step that numpy's compiled functions take."""
        profile, given = cProfile.Profile(time.thread_time), self._given()
        began = time.thread_time()
        self.exchange.step(given)
        plain, given = time.thread_time() - began, self._given()
        profile.runcall(self.exchange.step, given)
        functions = pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
        return sum(own for (_, _, name), (_, _, own, _, _) in functions if "numpy" in name) / plain

    def _given(self) -> dict[str, torch.Tensor]:
        return {name: gradient.clone() for name, gradient in self._gradients.items()}


def measured(layers: list[Layer], codec: str, repeats: int) -> Iterator[Row]:
    """Time the forms of one codec's plan, in turns."""
    runs = {form: Run(layers, codec, **choice) for form, choice in FORMS.items()}
    runs[ONE] = Run(one_layer(layers), codec)
    written = Run(layers, codec)
    timed = runs | {CALLS: written.calls()}
    seconds: dict[str, list[float]] = {form: [] for form in timed}
    for turn in range(repeats + 3):
        for form, run in timed.items():
            taken = run.seconds()
            if turn > 2:  # the first steps learn and warm up
                seconds[form].append(taken)
    for form, run in timed.items():
        low, middle, high = statistics.quantiles(seconds[form], n=4)
        yield {
            "layers": len(layers),
            "codec": codec,
            "form": form,
            "calls": len(run.made) if isinstance(run, Calls) else None,
            "numpy": runs[form].numpys_share() if form == "default" else None,
            "milliseconds": 1e3 * middle,
            "quartiles": [1e3 * low, 1e3 * high],
        }
    for run in (*runs.values(), written):
        run.exchange.close()


def table(rows: list[Row]) -> str:
    """Lay out milliseconds; "in Python" where the rows have what it takes."""
    forms = (*FORMS, ONE)
    by_key = {(row["layers"], row["codec"], row["form"]): row["milliseconds"] for row in rows}
    numpys = {(row["layers"], row["codec"]): row["numpy"] for row in rows if row.get("numpy") is not None}
    lines = []
    for layers, codec in dict.fromkeys((row["layers"], row["codec"]) for row in rows):
        times = [by_key[layers, codec, form] for form in forms]
        of_layers = [times[0], times[0] - times[-1]]
        if numpys:
            of_layers.append(times[0] * (1 - numpys[layers, codec]) - by_key[layers, codec, CALLS])
        shown = (by_key[layers, "identity", "default"], *times, *(1e3 * one / layers for one in of_layers))
        lines.append([layers, codec, *(f"{one:.1f}" for one in shown)])
    heads = ("layers", "codec", "identity", *forms, "us per layer", "for layers", *["in Python"] * bool(numpys))
    return markdown(heads, lines)


def main() -> None:
    """Measure, and print the table."""
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


if __name__ == "__main__":
    main()
