"""Encoding and decoding of every codec beside a plain copy of the same tensor, one thread, one run.

    python benchmarks/codec_speed.py [--numel 11059200] [--repeats 9] [--codecs sign qsgd topk] [--markdown]
        [--rows ROWS.jsonl]             keeps what is measured
    python benchmarks/codec_speed.py --rows ROWS.jsonl --table [--milliseconds]

Copy, encoding and decoding take turns, so that whatever else the machine does meets all of them; a ratio is that of the
medians. "encode" is what a codec does before it asks for a collective, and between two; "decode" what it does with the
last answers, of one rank; "own" what error feedback then asks of it besides, the contribution or what it left. Of
codecs with a state it is the second iteration that is timed; of LGC, one after it has learned.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rows import Row, read

from gradlab import codecs
from gradlab.codec import Codec, Context, Deferred, Exchanged, Tensors
from gradlab.codec.settings import build_settings
from gradlab.collectives import Mean, answer_for, as_requests, run_lockstep
from gradlab.workspace import Workspace

CPU = torch.device("cpu")
# Two iterations of learning are few, but what they learn is used all the same; it is that phase which is timed.
_LEARNED = {"density": 0.01, "training_steps": 2, "optimizer": "adam", "most_error": 1e9}
_ITERATIONS_BEFORE = {"lgc_ring": 3, "lgc_server": 3, "gradiveq": 2}
# The recommended form, at d = K / 20: two samples of 32 slices give the fitted half its axes.
_HALF = {"ratio": 20.0, "complement": 0.5, "whitening": False, "pooled": 32, "sample_steps": 2, "compressed_steps": 0}
CASES: dict[str, list[dict[str, Any]]] = {
    "identity": [{}],
    "cast": [{"dtype": "float16"}],
    "natural": [{}],
    "block_scaled": [{"dtype": "int8"}, {"dtype": "int4"}, {"dtype": "float8_e4m3fn"}],
    "qsgd": [{"bits": 4}, {"bits": 8}],
    "terngrad": [{}, {"values_per_byte": 5}, {"shared_scale": True}],
    "sign": [{}, {"block_size": 4096}, {"block_size": 256}, {"scale": "one"}],
    "one_bit": [{}, {"block": "tensor"}],
    "topk": [{"density": 0.01}, {"density": 0.001}, {"density": 0.01, "index_coding": "smallest"}],
    "sampled_threshold": [{"density": 0.01}],
    "threshold": [{"density": 0.01}],
    "random_k": [{"density": 0.01}],
    "clt_k": [{"density": 0.01}, {"density": 0.01, "selection": "chunks"}],
    "dct_topk": [{"chunk": 64, "count": 32}],
    "powersgd": [{"rank": 4}, {"rank": 4, "alternating": True}],
    "lgc_ring": [_LEARNED],
    "lgc_server": [_LEARNED],
    "gradiveq": [
        {"ratio": 16.0, "complement": 1.0, "compressed_steps": 0},
        {"ratio": 16.0, "complement": 1.0, "drawn": "coordinates", "compressed_steps": 0},
        _HALF,
        {**_HALF, "drawn": "coordinates"},
    ],
}
SORTS = {"topk", "sampled_threshold", "threshold", "clt_k", "dct_topk"}


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


def exchange(
    codec: Codec, grads: Tensors, state: Tensors, context: Context, watch: Stopwatch
) -> tuple[Exchanged, float, float]:
    """One rank's exchange with itself: what came of it, seconds of encoding and of decoding."""
    coroutine, answer = codec.exchange(grads, state, context), None
    spans: list[tuple[Any, Any]] = []
    while True:
        began = watch.now()
        try:
            step = coroutine.send(answer)
        except StopIteration as stop:
            ended = watch.now()
            return stop.value, sum(watch.seconds(*span) for span in spans), watch.seconds(began, ended)
        spans.append((began, watch.now()))
        answer = answer_for(step, [_answer(request) for request in as_requests(step)])


def _answer(request: Any) -> Any:
    if isinstance(request, Mean):
        return request.tensor.clone()
    if hasattr(request, "tensors"):
        return list(request.tensors)
    return request.tensor if hasattr(request, "root") else [request.tensor]


def own_seconds(done: Exchanged, watch: Stopwatch) -> float:
    """Time what error feedback asks of an exchange: compression error or decoded contribution; seconds."""
    began = watch.now()
    if isinstance(done.own, Deferred) and done.own.compression_error is not None:
        done.own.compression_error()
    else:
        dict(done.own)
        _ = [done.own[name] for name in done.own]
    return watch.seconds(began, watch.now())


def compare(
    name: str, settings: Mapping[str, Any], numel: int, repeats: int, device: torch.device = CPU
) -> dict[str, Any]:
    """Medians, in copies of the tensor on its device."""
    method, watch = codecs.get(name), Stopwatch(device)
    codec = method(build_settings(method, settings)).to(device)
    shape = (1024, numel // 9216, 3, 3) if name == "gradiveq" else (4096, numel // 4096)
    grads = {"weight": torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)}
    target, memory = torch.empty_like(grads["weight"]), Workspace()
    begun: Tensors = {}
    for iteration in range(first := _ITERATIONS_BEFORE.get(name, 1)):
        begun = run_lockstep([codec.exchange(grads, begun, Context(0, 1, iteration, "weight"))])[0].value.state
    times: dict[str, list[float]] = {"copy": [], "encode": [], "decode": [], "own": []}
    for turn in range(repeats + 2):
        began = watch.now()
        target.copy_(grads["weight"])
        took = {"copy": watch.seconds(began, watch.now())}
        context = Context(0, 1, first + turn, "weight", workspace=memory)
        done, took["encode"], took["decode"] = exchange(codec, grads, begun, context, watch)
        took["own"] = own_seconds(done, watch)
        del done
        for key, value in took.items():
            if turn > 1:  # the first turns warm up
                times[key].append(value)
    middle = {key: statistics.median(values) for key, values in times.items()}
    title = name + "".join(f", {key} {value}" for key, value in settings.items())
    return {
        "case": title,
        "copy": middle["copy"],
        **{k: middle[k] / middle["copy"] for k in ("encode", "decode", "own")},
    }


def measured(options: argparse.Namespace) -> Iterator[Row]:
    """Time the codecs that were asked for, one after another."""
    for name in options.codecs:
        for settings in CASES[name]:
            row = {"codec": name, "numel": options.numel, **compare(name, settings, options.numel, options.repeats)}
            if options.rows:
                with options.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            yield row


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=4096 * 2700)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--codecs", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rows", type=Path)
    for flag in ("--markdown", "--table", "--milliseconds"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    header = ("case", "copy ms", "encode", "decode", "own", "slowest, of a copy's speed", "aim", "")
    form = (
        "| {} | {} | {} | {} | {} | {} | {} | {} |"
        if options.markdown
        else "{:52s} {:>7s} {:>7s} {:>7s} {:>7s} {:>28s} {:>6s} {}"
    )
    print(form.format(*header))
    if options.markdown:
        print(form.format(*["---"] * len(header)))
    for times in read(options.rows) if options.table else measured(options):
        slowest, aim = max(times["encode"], times["decode"]), 100 if times["codec"] in SORTS else 30
        unit = 1e3 * times["copy"] if options.milliseconds else 1.0
        numbers = [f"{times[key] * unit:.{2 if options.milliseconds else 1}f}" for key in ("encode", "decode", "own")]
        row = (times["case"], f"{times['copy'] * 1e3:.3g}", *numbers, f"1/{slowest:.1f}", f"1/{aim}")
        print(form.format(*row, "" if slowest <= aim else "missed"), flush=True)


if __name__ == "__main__":
    main()
