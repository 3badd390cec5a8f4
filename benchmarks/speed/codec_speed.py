"""Encoding and decoding of every codec beside a plain copy of the same gradients, one thread, one run.

    python benchmarks codec_speed [--layers "one tensor" ResNet-18 "GPT-2 small"] [--repeats 9] [--codecs sign topk]
        [--device cuda] [--rows ROWS.jsonl]
    python benchmarks codec_speed --rows ROWS.jsonl --table

The gradients are one large tensor's, or those of a real model's layers as `Plan.uniform` groups them; memory is reused
as the engine reuses it. Copy, encoding and decoding take turns; a ratio is that of the medians. "encode" is what a
codec does before and between collectives; "decode" what it does with the last answers, of one rank; "own" what error
feedback then asks of it. The first iterations, in which codecs learn, are not timed. The aim is a tenth of a copy's
speed, a twentieth on GPT-2's layers, on a GPU a third. A row is a codec's setting on a list of layers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from layer_lists import LISTS
from rows import Row, keep, options, read

from gradlab.codec import Deferred, Exchanged
from gradlab.collectives import Mean, Sum, answer_for, as_requests
from gradlab.executor import PlanRun, RunSettings, Step
from gradlab.layout import Layer
from gradlab.plan import Plan
from gradlab.workspace import RecyclingWorkspace

Settings = Mapping[str, Any]
# Two iterations of learning are few, but what they learn is used all the same; it is that phase which is timed.
_LEARNED = {"density": 0.01, "training_steps": 2, "optimizer": "adam", "most_error": 1e9}
ITERATIONS_BEFORE = {"lgc_ring": 3, "lgc_server": 3, "gradiveq": 2}
# The recommended form, at d = K / 20: two samples of 32 slices give the fitted half its axes.
_HALF = {"ratio": 20.0, "complement": 0.5, "whitening": False, "pooled": 32, "sample_steps": 2, "compressed_steps": 0}
CASES: dict[str, list[dict[str, Any]]] = {
    "identity": [{}],
    "cast": [{"dtype": "float16"}],
    "natural": [{}],
    "block_scaled": [{"dtype": "int8"}, {"dtype": "int4"}, {"dtype": "float8_e4m3fn"}],
    "qsgd": [{"bits": 4}, {"bits": 8}],
    "nuqsgd": [{"bits": 4}],
    "intsgd": [{}],
    "terngrad": [{}, {"shared_scale": True}],
    "sign": [{}, {"block_size": 4096}, {"block_size": 256}, {"scale": "one"}],
    "one_bit": [{}],
    "topk": [{"density": 0.01}, {"density": 0.001}, {"density": 0.01, "index_coding": "smallest"}],
    "sampled_threshold": [{"density": 0.01}],
    "threshold": [{"density": 0.01}],
    "random_k": [{"density": 0.01}],
    "clt_k": [{"density": 0.01}, {"density": 0.01, "selection": "chunks"}],
    "dct_topk": [{"chunk": 64, "count": 32}],
    "chunk_topk": [{}, {"bits": None}],
    "ecsq": [{"bits": 0.1}, {"bits": 0.25}, {"bits": 1.2}],
    "powersgd": [{"rank": 4}, {"rank": 4, "alternating": True}],
    "lgc_ring": [_LEARNED],
    "lgc_server": [_LEARNED],
    "gradiveq": [{"ratio": 16.0, "complement": 1.0, "compressed_steps": 0}, _HALF],
}
# Every codec compresses from the first iteration.
BEFORE = {"gradiveq": {"warmup_steps": 0}, "lgc_ring": {"warmup_steps": 0}, "lgc_server": {"warmup_steps": 0}}


class Stopwatch:
    """Seconds between moments of the device that computes: on a GPU by events in its stream, else by the clock."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, began: Any, ended: Any) -> float:
        if not self._cuda:
            return float(ended - began)
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3


class Timed:
    """One rank's steps of a codec over layers, with the engine's memory, which is taken back after each step."""

    def __init__(self, codec: str, settings: Settings, layers: Sequence[Layer], device: torch.device) -> None:
        plan = Plan.uniform(layers, codec, wrappers=(), **{**BEFORE.get(codec, {}), **settings})
        self._memory, self._watch = RecyclingWorkspace(), Stopwatch(device)
        self._run = PlanRun(plan, 0, 1, RunSettings(device=device), workspace=self._memory)
        names = {name for group in self._run.groups.values() for name in group.layers}
        generator, compressed = torch.Generator().manual_seed(0), [layer for layer in layers if layer.name in names]
        self._gradients = {x.name: torch.randn(x.shape, generator=generator).to(device) for x in compressed}
        numel = sum(gradient.numel() for gradient in self._gradients.values())
        self._copied = [torch.empty(numel, device=device) for _ in range(2)]

    def step(self) -> dict[str, float]:
        """Take a step; seconds of a copy, of encoding, of decoding, and of what error feedback asks for."""
        began = self._watch.now()
        self._copied[0].copy_(self._copied[1])
        took = {"copy": self._watch.seconds(began, self._watch.now()), "encode": 0.0, "decode": 0.0, "own": 0.0}
        step = self._run.begin()
        step.add(self._gradients)
        for group in self._run.groups:
            self._exchange(step, group, took)
        self._run.end(step)
        self._memory.recycle()
        return took

    def _exchange(self, step: Step, group: str, took: dict[str, float]) -> None:
        coroutine, answer, watch = step.exchange(group), None, self._watch
        while True:
            began = watch.now()
            try:
                asked = coroutine.send(answer)
            except StopIteration as stop:
                took["decode"] += watch.seconds(began, watch.now())
                done: Exchanged = stop.value
                break
            took["encode"] += watch.seconds(began, watch.now())
            answer = answer_for(asked, [_answer(request) for request in as_requests(asked)])
        began = watch.now()
        _own(done)
        took["own"] += watch.seconds(began, watch.now())


def _answer(request: Any) -> Any:
    if isinstance(request, Mean | Sum):
        return request.tensor
    if hasattr(request, "tensors"):
        return list(request.tensors)
    return request.tensor if hasattr(request, "root") else [request.tensor]


def _own(done: Exchanged) -> list[torch.Tensor]:
    """Error feedback's result of an exchange: the compression error, or the decoded contribution."""
    if isinstance(done.own, Deferred) and done.own.compression_error is not None:
        return list(done.own.compression_error().values())
    return [done.own[name] for name in done.own]


def compare(name: str, settings: Settings, layers: Sequence[Layer], repeats: int, device: torch.device) -> Row:
    """Medians with quartiles, in copies of the compressed gradients on their device."""
    timed, first = Timed(name, settings, layers, device), 2 + ITERATIONS_BEFORE.get(name, 1)
    turns = [timed.step() for _ in range(repeats + first)][first:]  # in the first turns codecs learn and warm up
    times = {key: [turn[key] for turn in turns] for key in turns[0]}
    copy = statistics.median(times.pop("copy"))
    quartiles = {key: [one / copy for one in statistics.quantiles(x, n=4)[::2]] for key, x in times.items()}
    ratios = {key: statistics.median(values) / copy for key, values in times.items()}
    return {"case": case_title(name, settings), "copy": copy, **ratios, "quartiles": quartiles}


def measured(chosen: argparse.Namespace) -> Iterator[Row]:
    device = torch.device(chosen.device)
    cases = [(name, settings) for name in chosen.codecs for settings in CASES[name]]
    for (name, settings), title in product(cases, chosen.layers):
        row = {"codec": name, "layers": title} | compare(name, settings, LISTS[title](), chosen.repeats, device)
        if device.type == "cuda":
            row["device"] = torch.cuda.get_device_name(device)
        yield keep(chosen.rows, row)


def case_title(name: str, settings: Settings) -> str:
    return name + "".join(f", {key} {value}" for key, value in settings.items())


def main() -> None:
    named = {"layers": ("one tensor",), "repeats": 9, "codecs": list(CASES), "device": "cpu"}
    chosen = options(__doc__, **named, rows=Path, table=False)
    torch.set_num_threads(1)
    form = "{:52s} {:12s} {:>7s} {:>7s} {:>7s} {:>7s} {:>26s} {:>6s} {}"
    print(form.format("case", "layers", "copy ms", "encode", "decode", "own", "slower, of a copy's speed", "aim", ""))
    for times in read(chosen.rows) if chosen.table else measured(chosen):
        title = times.get("layers", "one tensor")
        aim = 3 if "device" in times else 20 if title == "GPT-2 small" else 10
        slowest = max(times["encode"], times["decode"])
        numbers = [f"{times[key]:.1f}" for key in ("encode", "decode", "own")]
        row = (times["case"], title, f"{times['copy'] * 1e3:.3g}", *numbers, f"1/{slowest:.1f}", f"1/{aim}")
        print(form.format(*row, "" if slowest <= aim else "missed"), flush=True)
