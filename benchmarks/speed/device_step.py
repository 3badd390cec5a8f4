"""A step of GPT-2 small on a GPU under every codec: time, kernels, waits of the host and memory, beside plain DDP's.

    python benchmarks device_step [--ways plain topk] [--steps 15] [--rows ROWS.jsonl]      keeps what is measured
    python benchmarks device_step --rows ROWS.jsonl --table

One rank under NCCL, so that nothing travels and one message is decoded, where a rank of N may decode N. 124 million
parameters of random weights (transformers; no download), random tokens, bfloat16 autocast, AdamW. Each way has a model
of its own, and plain DDP is measured first and last. A row is a way: medians, and kernels and waits (of the host for
the device, as the driver counts them) of one more step under PyTorch's profiler.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rows import Row, keep, markdown, options, read
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from gradlab.plan import Plan
from gradlab.runtime import CompressionState, compression_hook

Attach = Callable[[DistributedDataParallel], Any]
GROUPED = {"group_bytes": 25 * 2**20}
WARMUP = 8
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")


def ours(codec: str, measure_every: int = 0, cuda_graphs: bool = False, **settings: Any) -> Attach:
    def attach(model: DistributedDataParallel) -> CompressionState:
        plan = Plan.uniform(model, codec, **settings)
        state = CompressionState(plan, model, measure_every=measure_every, cuda_graphs=cuda_graphs)
        model.register_comm_hook(state, compression_hook)
        return state

    return attach


# Ways of one codec, each of which may be recorded as graphs too.
CODECS: dict[str, tuple[str, dict[str, Any]]] = {
    "cast bfloat16": ("cast", {"dtype": "bfloat16"}),
    "powersgd 4": ("powersgd", {"rank": 4}),
    "topk 1 %": ("topk", {"density": 0.01}),
    "topk 1 %, across layers": ("topk", {"density": 0.01, **GROUPED}),
    "sign": ("sign", {}),
    "one_bit": ("one_bit", {}),
    "block_scaled int8": ("block_scaled", {"dtype": "int8"}),
    "block_scaled int4": ("block_scaled", {"dtype": "int4"}),
    "dct_topk 64:32": ("dct_topk", {"chunk": 64, "count": 32}),
    "qsgd 4 bits": ("qsgd", {"bits": 4}),
    "natural": ("natural", {}),
    "terngrad": ("terngrad", {}),
    "chunk_topk": ("chunk_topk", {}),
}
WAYS: dict[str, Attach] = {
    "plain": lambda model: None,
    "PyTorch bf16 hook": lambda model: model.register_comm_hook(None, bf16_compress_hook),
    "PyTorch PowerSGD 4": lambda model: model.register_comm_hook(
        PowerSGDState(None, 4, start_powerSGD_iter=2), powerSGD_hook
    ),
    "identity": ours("identity"),
    **{f"{name}, graphs": ours(codec, cuda_graphs=True, **settings) for name, (codec, settings) in CODECS.items()},
    **{name: ours(codec, **settings) for name, (codec, settings) in CODECS.items()},
    "powersgd 4, layer by layer": ours("powersgd", rank=4, group_bytes=0),
    "topk 1 %, layer by layer": ours("topk", density=0.01, group_bytes=0),
    "topk 1 %, measured at every step": ours("topk", 1, density=0.01),
    "threshold 1 %": ours("threshold", density=0.01),
    "sampled_threshold 1 %": ours("sampled_threshold", density=0.01),
    "random_k 1 %": ours("random_k", density=0.01),
    "clt_k 1 %, chunks": ours("clt_k", density=0.01, selection="chunks"),
    "gradiveq 1/16, coordinates": ours("gradiveq", ratio=16.0, complement=1.0, compressed_steps=0, warmup_steps=0),
    "ecsq 0.25 bits": ours("ecsq", bits=0.25),
    "ecsq 0.25 bits, groups": ours("ecsq", bits=0.25, **GROUPED),
}


class Training:
    """A model under one way, and its steps. chosen: the model's size and the batch's."""

    def __init__(self, attach: Attach, device: torch.device, chosen: argparse.Namespace) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        config = GPT2Config(n_layer=chosen.layers, n_embd=chosen.width, n_positions=chosen.context)
        ids = [device] if device.type == "cuda" else None
        self._device, self._size = device, (chosen.batch, chosen.context)
        self._model = DistributedDataParallel(GPT2LMHeadModel(config).to(device), device_ids=ids)
        self.state = attach(self._model)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        self._vocabulary = config.vocab_size
        self._generator = torch.Generator(device).manual_seed(0)

    def step(self) -> None:
        tokens = torch.randint(self._vocabulary, self._size, device=self._device, generator=self._generator)
        self._optimizer.zero_grad()
        with torch.autocast(self._device.type, torch.bfloat16):
            loss = self._model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self._optimizer.step()
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def measured(way: str, device: torch.device, chosen: argparse.Namespace) -> Row:
    """Time a way's steps, and look at one of them. memory: bytes at most, without what was there before."""
    held = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    training = Training(WAYS[way], device, chosen)
    for _ in range(WARMUP):
        training.step()
    seconds = []
    for _ in range(chosen.steps):
        began = time.perf_counter()
        training.step()
        seconds.append(time.perf_counter() - began)
    row: Row = {"way": way, "seconds": statistics.median(seconds), "quartiles": statistics.quantiles(seconds, n=4)[::2]}
    if device.type == "cuda":
        memory = torch.cuda.max_memory_allocated() - held
        row |= {"memory": memory, "device": torch.cuda.get_device_name(), **looked_at(training)}
    if isinstance(training.state, CompressionState):
        if made := training.state.run.graphs.values():
            row["recorded"] = sum(one.recorded for one in made)
            row["not recorded"] = sorted({one.why for one in made if one.why})
        training.state.close()
    return row


def looked_at(training: Training) -> Row:
    """Count a step's work of the device: kernels and their seconds, and the host's waits by name."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        training.step()
    on_device = [
        one
        for one in seen.events()
        if one.device_type == torch.autograd.DeviceType.CUDA and not getattr(one, "is_user_annotation", False)
    ]
    return {
        "kernels": len(on_device),
        "busy": sum(one.time_range.elapsed_us() for one in on_device) / 1e6,
        "waits": dict(Counter(one.name for one in seen.events() if one.name in WAITS)),
    }


def table(rows: list[Row]) -> str:
    """Lay out ratios to the mean of plain DDP's medians, and differences to its first row."""
    plain = [row for row in rows if row["way"] == "plain"]
    base, lines = statistics.fmean(row["seconds"] for row in plain), []
    for row in rows:
        cells = [row["way"], f"{1e3 * row['seconds']:.1f}", f"{row['seconds'] / base:.2f}"]
        if "kernels" in row:
            more = {key: row[key] - plain[0][key] for key in ("kernels", "busy", "memory")}
            waits = sum(row["waits"].values()) - sum(plain[0]["waits"].values())
            cells += [f"{more['kernels']}", f"{1e3 * more['busy']:.1f}", f"{waits}", f"{more['memory'] / 1e9:.2f}"]
        lines.append([*cells, *[""] * (7 - len(cells))])
    heads = ("way", "step, ms", "over plain", "kernels more", "device busy, ms more", "waits more", "GB more")
    return markdown(heads, lines)


def run(chosen: argparse.Namespace) -> list[Row]:
    """Measure the ways that were asked for, in this process, as the one rank."""
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    warnings.filterwarnings("ignore", message="gradlab: world size 1")
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        named: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
        dist.init_process_group("nccl" if named else "gloo", store=store, rank=0, world_size=1, **named)
        rows = []
        for way in [*chosen.ways, *(["plain"] if len(chosen.ways) > 1 else [])]:
            try:
                rows.append(keep(chosen.rows, measured(way, device, chosen)))
            except Exception as error:  # the others are measured all the same
                print(f"{way}: {type(error).__name__}: {error}", flush=True)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
        dist.destroy_process_group()
    return rows


def main() -> None:
    sizes = {"layers": 12, "width": 768, "context": 1024, "batch": 8}
    chosen = options(__doc__, ways=list(WAYS), steps=15, rows=Path, table=False, **sizes)
    print(table(read(chosen.rows) if chosen.table else run(chosen)))
