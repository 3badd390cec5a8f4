"""Encoding and decoding of every codec beside a plain copy of the same gradients, one thread, one run.

    python benchmarks codec_speed [--layers "one tensor" ResNet-18 "GPT-2 small"] [--repeats 9] [--codecs sign topk]
        [--rows ROWS.jsonl]                          keeps what is measured
    python benchmarks codec_speed --device cuda --group-bytes 26214400 --layers "GPT-2 small" [--graphs]
    python benchmarks codec_speed --rows ROWS.jsonl --table

The gradients are those of one large tensor, or of the layers of a real model as `Plan.uniform` groups them. Memory is
reused as the engine reuses it: otherwise most of "decode" would be the system's work of providing new pages.

Copy, encoding and decoding take turns, so that whatever else the machine does meets all of them; a ratio is that of the
medians. "encode" is what a codec does before it asks for a collective, and between two; "decode" what it does with the
last answers, of one rank; "own" what error feedback then asks of it besides, the contribution or what it left. The
first iterations, in which codecs begin or learn, are not timed. The aim is a tenth of a copy's speed, a twentieth on
GPT-2's layers. On a GPU it is a third of a copy's within the device.
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
from gradlab.executor.device_graphs import CudaGraphs
from gradlab.layout import Layer
from gradlab.plan import Plan
from gradlab.workspace import RecyclingWorkspace

CPU = torch.device("cpu")
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
    "gradiveq": [
        {"ratio": 16.0, "complement": 1.0, "compressed_steps": 0},
        _HALF,
    ],
}
# Every codec compresses from the first iteration.
BEFORE = {"gradiveq": {"warmup_steps": 0}, "lgc_ring": {"warmup_steps": 0}, "lgc_server": {"warmup_steps": 0}}


class Stopwatch:
    """Seconds between moments of the device that computes: on a GPU by events in its stream, else by the clock."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def now(self) -> Any:
        """This moment: on a GPU, when what was asked of it so far is done."""
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
    """One rank's steps of a codec over layers, with the engine's memory, which is taken back after each group and step.

    Args:
        codec: the codec's id.
        settings: settings of the codec.
        layers: layers that `Plan.uniform` groups and compresses; those that it leaves dense are left out.
        device: device of the gradients.
        group_bytes: most bytes of a group; None: the default.
        graphs: whether exchanges are recorded as a GPU's graphs.
    """

    def __init__(
        self,
        codec: str,
        settings: Mapping[str, Any],
        layers: Sequence[Layer],
        device: torch.device,
        group_bytes: float | None = None,
        graphs: bool = False,
    ) -> None:
        grouping = {} if group_bytes is None else {"group_bytes": group_bytes}
        plan = Plan.uniform(layers, codec, wrappers=(), **{**BEFORE.get(codec, {}), **settings, **grouping})
        self._memory, self._watch = RecyclingWorkspace(), Stopwatch(device)
        chosen = RunSettings(device=device, graphs=CudaGraphs(device) if graphs else None)
        self._run, self._graphs = PlanRun(plan, 0, 1, chosen, workspace=self._memory), graphs
        names = {name for group in self._run.groups.values() for name in group.layers}
        generator = torch.Generator().manual_seed(0)
        self._gradients = {
            layer.name: torch.randn(layer.shape, generator=generator).to(device)
            for layer in layers
            if layer.name in names
        }
        numel = sum(gradient.numel() for gradient in self._gradients.values())
        self._copied = [torch.empty(numel, device=device) for _ in range(2)]

    def step(self) -> dict[str, float]:
        """Take a step; seconds of encoding, of decoding, and of what error feedback asks for."""
        took = {"encode": 0.0, "decode": 0.0, "own": 0.0}
        step = self._run.begin()
        # Recorded exchanges may write in the gradients' memory.
        step.add({name: one.clone() for name, one in self._gradients.items()} if self._graphs else self._gradients)
        for group in self._run.groups:
            self._exchange(step, group, took)
        self._run.end(step)
        self._memory.recycle()
        return took

    def copy(self) -> float:
        """Copy as much once; seconds."""
        began = self._watch.now()
        self._copied[0].copy_(self._copied[1])
        return self._watch.seconds(began, self._watch.now())

    def _exchange(self, step: Step, group: str, took: dict[str, float]) -> None:
        coroutine, answer, watch = step.exchange(group, reuse=self._graphs), None, self._watch
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


def compare(
    name: str,
    settings: Mapping[str, Any],
    layers: Sequence[Layer],
    repeats: int,
    device: torch.device = CPU,
    group_bytes: float | None = None,
    graphs: bool = False,
) -> dict[str, Any]:
    """Medians with quartiles, in copies of the compressed gradients on their device."""
    timed = Timed(name, settings, layers, device, group_bytes, graphs)
    times: dict[str, list[float]] = {"copy": [], "encode": [], "decode": [], "own": []}
    for turn in range(repeats + (first := 2 + 3 * graphs + ITERATIONS_BEFORE.get(name, 1))):
        took = {"copy": timed.copy(), **timed.step()}
        for key, value in took.items():
            if turn >= first:  # the first turns learn and warm up
                times[key].append(value)
    middle = {key: statistics.median(values) for key, values in times.items()}
    spread = {key: statistics.quantiles(values, n=4)[::2] for key, values in times.items()}
    title = name + "".join(f", {key} {value}" for key, value in settings.items())
    return {
        "case": title,
        "copy": middle["copy"],
        **{key: middle[key] / middle["copy"] for key in ("encode", "decode", "own")},
        "quartiles": {key: [one / middle["copy"] for one in spread[key]] for key in ("encode", "decode", "own")},
    }


def measured(chosen: argparse.Namespace) -> Iterator[Row]:
    """Time the codecs that were asked for, one after another."""
    for name in chosen.codecs:
        for settings, title in product(CASES[name], chosen.layers):
            row = {"codec": name, "layers": title}
            device = torch.device(chosen.device)
            row |= compare(name, settings, LISTS[title](), chosen.repeats, device, chosen.group_bytes, chosen.graphs)
            if device.type == "cuda":
                row["device"] = torch.cuda.get_device_name(device)
            yield keep(chosen.rows, row)


def main() -> None:
    """Print the table."""
    named = {"layers": ("one tensor",), "repeats": 9, "codecs": list(CASES), "device": "cpu", "group_bytes": float}
    chosen = options(__doc__, **named, graphs=False, rows=Path, table=False)
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


if __name__ == "__main__":
    main()
