"""Encoding and decoding of every codec beside a plain copy of the same gradients, one thread, one run.

    python benchmarks codec_speed [--layers "one tensor" ResNet-18 "GPT-2 small"] [--repeats 9] [--codecs sign topk]
        [--rows ROWS.jsonl]
    python benchmarks codec_speed --rows ROWS.jsonl --table

The gradients are one large tensor's, or those of a real model's layers as `Plan.uniform` groups them; memory is reused
as the engine reuses it. Copy, encoding and decoding take turns; a ratio is that of the medians. "encode" is what a
codec does before and between collectives; "decode" what it does with the last answers, of one rank; "own" what error
feedback then asks of it. The first iterations, in which codecs learn, are not timed. The aim is a tenth of a copy's
speed, a twentieth on GPT-2's layers, on a GPU (`make gpu-speed`) a third. A row is a codec's setting on a list of
layers; on a GPU it has launches of kernels and the host's waits of one more step.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from layer_lists import LISTS, on_device
from rows import Row, fill, markdown, options, read
from torch.profiler import ProfilerActivity, profile

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
    "cast": [{"dtype": "float16"}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "stochastic": True}],
    "natural": [{}],
    "block_scaled": [{"dtype": one} for one in ("int8", "int4", "float8_e4m3fn", "mxfp8", "mxfp4", "nvfp4")],
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
BEFORE: dict[str, dict[str, Any]] = {name: {"warmup_steps": 0} for name in ("gradiveq", "lgc_ring", "lgc_server")}

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")  # a name begins so
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")  # a step ends with another one, for the clock


class Stopwatch:
    """Seconds by name between moments of the device that computes: on a GPU by events in its stream, which nobody waits
    for before the end, else by the clock."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: dict[str, list[tuple[Any, Any]]] = {}

    def now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def took(self, name: str, began: Any) -> None:
        """Note that what has a name took from a moment until now."""
        self._spans.setdefault(name, []).append((began, self.now()))

    def seconds(self) -> dict[str, float]:
        """Wait for the device, and sum up what was noted."""
        if not self._cuda:
            return {name: sum(ended - began for began, ended in spans) for name, spans in self._spans.items()}
        torch.cuda.synchronize()
        of = {name: [began.elapsed_time(ended) for began, ended in spans] for name, spans in self._spans.items()}
        return {name: sum(milliseconds) / 1e3 for name, milliseconds in of.items()}


class Timed:
    """One rank's steps of a codec over layers, with the engine's memory, which is taken back after each step."""

    def __init__(self, codec: str, settings: Settings, layers: Sequence[Layer], device: torch.device) -> None:
        of = on_device(layers) if device.type == "cuda" else layers
        plan = Plan.uniform(of, codec, wrappers=(), **{**BEFORE.get(codec, {}), **settings})
        self._memory, self._device = RecyclingWorkspace(), device
        self._run = PlanRun(plan, 0, 1, RunSettings(device=device), workspace=self._memory)
        names = {name for group in self._run.groups.values() for name in group.layers}
        draw = {"generator": torch.Generator(device).manual_seed(0), "device": device}
        self._gradients = {x.name: torch.randn(x.shape, **draw) for x in plan.layers if x.name in names}
        self.numel = sum(gradient.numel() for gradient in self._gradients.values())
        self._copied = [torch.empty(self.numel, device=device) for _ in range(2)]

    def step(self) -> dict[str, float]:
        """Take a step; seconds of a copy, of encoding, of decoding, and of what error feedback asks for."""
        watch = Stopwatch(self._device)
        began = watch.now()
        self._copied[0].copy_(self._copied[1])
        watch.took("copy", began)
        step = self._run.begin()
        step.add(self._gradients)
        for group in self._run.groups:
            self._exchange(step, group, watch)
        self._run.end(step)
        self._memory.recycle()
        return {"encode": 0.0, "decode": 0.0, "own": 0.0} | watch.seconds()

    def _exchange(self, step: Step, group: str, watch: Stopwatch) -> None:
        coroutine, answer = step.exchange(group), None
        while True:
            began = watch.now()
            try:
                asked = coroutine.send(answer)
            except StopIteration as stop:
                watch.took("decode", began)
                done: Exchanged = stop.value
                break
            watch.took("encode", began)
            answer = answer_for(asked, [_answer(request) for request in as_requests(asked)])
        began = watch.now()
        _own(done)
        watch.took("own", began)


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
    name: str, settings: Settings, layers: Sequence[Layer], repeats: int, device: torch.device, look: bool = False
) -> Row:
    """Medians with quartiles, in copies of the compressed gradients on their device. look: count launches, too."""
    timed, first = Timed(name, settings, layers, device), 2 + ITERATIONS_BEFORE.get(name, 1)
    turns = [timed.step() for _ in range(repeats + first)][first:]  # in the first turns codecs learn and warm up
    times = {key: [turn[key] for turn in turns] for key in turns[0]}
    copy = statistics.median(times.pop("copy"))
    quartiles = {key: [one / copy for one in statistics.quantiles(x, n=4)[::2]] for key, x in times.items()}
    ratios = {key: statistics.median(values) / copy for key, values in times.items()}
    counted = looked_at(timed.step, device) if look else {}
    return {"values": timed.numel, "copy": copy, **ratios, "quartiles": quartiles, **counted}


def looked_at(step: Callable[[], Any], device: torch.device) -> Row:
    """Take a step under PyTorch's profiler: the host's launches of kernels, what ran on the GPU, copies among it, and
    its seconds, and the host's waits by name. Nothing without a GPU."""
    if device.type != "cuda":
        return {}
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, **counts(seen.events())}


def counts(events: Sequence[Any]) -> Row:
    on_device = [
        one
        for one in events
        if one.device_type == torch.autograd.DeviceType.CUDA and not getattr(one, "is_user_annotation", False)
    ]
    return {
        "launches": sum(one.name.startswith(LAUNCHES) for one in events),
        "kernels": len(on_device),
        "busy": sum(one.time_range.elapsed_us() for one in on_device) / 1e6,
        "waits": dict(Counter(one.name for one in events if one.name in WAITS)),
    }


def table(rows: Sequence[Row]) -> str:
    """Lay out times in copies. "GB/s": bytes of gradients that are encoded in a second."""
    lines = []
    for row in rows:
        title = row.get("layers", "one tensor")
        aim = 3 if "device" in row else 20 if title == "GPT-2 small" else 10
        slowest = max(row["encode"], row["decode"])
        gigabytes, encoding = 4e-9 * row.get("values", 0), row["encode"] * row["copy"]
        speed = f"{gigabytes / encoding:.3g}" if gigabytes and encoding else ""
        times = (f"{row['copy'] * 1e3:.3g}", *(f"{row[key]:.1f}" for key in ("encode", "decode", "own")))
        counted = (row["launches"], sum(row["waits"].values())) if "launches" in row else ("", "")
        missed = "" if slowest <= aim else ", missed"
        lines.append((row["case"], title, *times, speed, *counted, f"1/{slowest:.1f}", f"1/{aim}{missed}"))
    heads = ("case", "layers", "copy, ms", "encode", "decode", "own", "GB/s", "launches", "waits")
    return markdown((*heads, "slower, of a copy's speed", "aim"), lines)


def case_title(name: str, settings: Settings) -> str:
    return name + "".join(f", {key} {value}" for key, value in settings.items())


CASE_OF = {case_title(name, settings): (name, settings) for name in CASES for settings in CASES[name]}


def main() -> None:
    named = {"layers": ("one tensor",), "repeats": 9, "codecs": list(CASES)}
    chosen = options(__doc__, **named, rows=Path, table=False)
    torch.set_num_threads(1)
    if not chosen.table:
        titles = [title for title, (name, _) in CASE_OF.items() if name in chosen.codecs]
        keys = ({"layers": layers, "case": title} for title, layers in product(titles, chosen.layers))

        def measured(key: Row) -> Row:
            return compare(*CASE_OF[key["case"]], LISTS[key["layers"]](), chosen.repeats, torch.device("cpu"))

        fill(chosen.rows, keys, measured, ("quartiles",))
    print(table(read(chosen.rows)))
