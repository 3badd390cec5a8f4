"""Speeds on one GPU: codecs beside a copy, and steps of GPT-2 beside plain DDP's; the most important ones first.

    make gpu-speed PYTHON=python3 [OUT=FOLDER] [ARGS="--seconds 450 --only 'step of*' '*int4*'"]
    python benchmarks gpu_speed --device cpu --tiny          tries it without a GPU
    python benchmarks gpu_speed --rows ROWS.jsonl --table

Rows are kept as they come. After --seconds no case begins; the next call with the same rows goes on there. A case that
fails has a row that says why. --out (OUT) is a folder that gets a copy of the rows, and the table. --only: patterns of
"step of GPT-2 small: sign", "one tensor: sign" and the like.

Codecs are measured as by codec_speed, on GPT-2's layers, one tensor and 300 small layers. Steps are of GPT-2 small (124
million parameters) and medium (355 million), random weights and tokens (8 x 1,024), bfloat16 autocast, AdamW. One rank
under NCCL, so that nothing travels and one message is decoded, where a rank of N may decode N. Steps of a way and of
plain DDP take turns in one process, and a ratio is that of their medians. memory: bytes at most, with the model.
PyTorch's profiler counts launches of kernels, kernels and the host's waits of one more step.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import codec_speed
import torch
import torch.distributed as dist
from codec_speed import BEFORE, CASE_OF, looked_at
from layer_lists import LISTS, small_layers
from rows import Row, fill_until, grouped, markdown, on_card, read, show
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from gradlab.datasets.transformer import TransformerSize, initialized
from gradlab.plan import Plan
from gradlab.runtime import CompressionState, compression_hook

Attach = Callable[[DistributedDataParallel], Any]
SMALL, MEDIUM = "GPT-2 small", "GPT-2 medium"
SIZES = {
    SMALL: TransformerSize(50257, 1024, 768, layers=12, heads=12),
    MEDIUM: TransformerSize(50257, 1024, 1024, layers=24, heads=16),
}
TINY = {name: TransformerSize(64, 16, 16 * layers, layers, heads=2) for name, layers in ((SMALL, 1), (MEDIUM, 2))}
BATCH = 8
WARMUP, TURNS, FEWEST, ENOUGH = 8, 15, 7, 5.0  # steps; turns, and after how many seconds fewer of them do


def ours(codec: str, **settings: Any) -> Attach:
    def attach(model: DistributedDataParallel) -> CompressionState:
        plan = Plan.uniform(model, codec, **{**BEFORE.get(codec, {}), **settings})
        state = CompressionState(plan, model, measure_every=0)
        model.register_comm_hook(state, compression_hook)
        return state

    return attach


PLAIN = "plain"
FIRST: dict[str, Attach] = {
    PLAIN: lambda model: None,
    "PyTorch bf16 hook": lambda model: model.register_comm_hook(None, bf16_compress_hook),
    "PyTorch PowerSGD 4": lambda model: model.register_comm_hook(
        PowerSGDState(None, 4, start_powerSGD_iter=2), powerSGD_hook
    ),
}
WAYS: dict[str, Attach] = {
    **FIRST,
    **{title: ours(codec, **settings) for title, (codec, settings) in CASE_OF.items()},
}
IMPORTANT = ("block_scaled", "ecsq", "topk", "powersgd", "sign", "cast", "qsgd")


def keys() -> Iterator[Row]:
    """The rows, in the order in which they are wanted."""
    first = [title for name in IMPORTANT for title, (codec, _) in CASE_OF.items() if codec == name]
    rest = [title for title in CASE_OF if title not in first]

    def steps(model: str, ways: Sequence[str]) -> Iterator[Row]:
        return ({"model": model, "way": way} for way in ways)

    def codecs(layers: str, cases: Sequence[str]) -> Iterator[Row]:
        return ({"layers": layers, "case": case} for case in cases)

    yield from steps(SMALL, [*FIRST, *first])
    yield from codecs(SMALL, first)
    yield from steps(MEDIUM, [*FIRST, *first])
    yield from codecs("one tensor", first)
    yield from codecs("300 small layers", first)
    yield from steps(SMALL, rest)
    for layers in (SMALL, "one tensor", "300 small layers"):
        yield from codecs(layers, rest)
    yield from steps(MEDIUM, rest)


def title_of(key: Row) -> str:
    return f"step of {key['model']}: {key['way']}" if "way" in key else f"{key['layers']}: {key['case']}"


@functools.lru_cache(maxsize=1)
def untrained(size: TransformerSize, device: torch.device) -> nn.Module:
    return initialized(size, 0).to(device)


class Training:
    """A model under one way, and its steps."""

    def __init__(self, size: TransformerSize, attach: Attach, device: torch.device) -> None:
        self._device, self._size = device, size
        ids = [device] if device.type == "cuda" else None
        self._model = DistributedDataParallel(copy.deepcopy(untrained(size, device)), device_ids=ids)
        self.state = attach(self._model)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        self._generator = torch.Generator(device).manual_seed(0)

    def step(self) -> float:
        """Take a step, and return its seconds."""
        began, shape = time.perf_counter(), (BATCH, self._size.context + 1)
        tokens = torch.randint(self._size.vocabulary, shape, device=self._device, generator=self._generator)
        self._optimizer.zero_grad()
        with torch.autocast(self._device.type, torch.bfloat16):
            loss = functional.cross_entropy(self._model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        self._optimizer.step()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began


@functools.lru_cache(maxsize=1)
def beside(size: TransformerSize, device: torch.device) -> Training:
    """Plain DDP's training, after its first steps, whose turns all ways of a model share."""
    training = Training(size, FIRST[PLAIN], device)
    for _ in range(WARMUP):
        training.step()
    return training


def step_row(size: TransformerSize, way: str, device: torch.device) -> Row:
    """Time a way's steps in turn with plain DDP's, and look at one of them."""
    plain, cuda = beside(size, device), device.type == "cuda"
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if cuda else 0
    training = Training(size, WAYS[way], device)
    for _ in range(WARMUP):
        training.step()
    memory = torch.cuda.max_memory_allocated() - held if cuda else 0
    began, turns = time.perf_counter(), list[tuple[float, float]]()
    while len(turns) < TURNS and (len(turns) < FEWEST or time.perf_counter() - began < ENOUGH):
        turns.append((plain.step(), training.step()))
    others, seconds = zip(*turns, strict=True)
    row: Row = {"seconds": statistics.median(seconds), "quartiles": statistics.quantiles(seconds, n=4)[::2]}
    row |= {"plain": statistics.median(others), "memory": memory, **looked_at(training.step, device)}
    if isinstance(training.state, CompressionState):
        training.state.close()
    return row


@functools.cache
def join() -> None:
    """Become the one rank of a process group."""
    warnings.filterwarnings("ignore", message="gradlab: world size 1")
    store = dist.FileStore(f"{tempfile.mkdtemp()}/store", 1)
    named: dict[str, Any] = {"device_id": torch.device("cuda:0")} if torch.cuda.is_available() else {}
    dist.init_process_group("nccl" if named else "gloo", store=store, rank=0, world_size=1, **named)


def measured(key: Row, chosen: argparse.Namespace) -> Row:
    device = torch.device("cuda:0" if chosen.device == "cuda" else "cpu")
    if "way" in key:
        join()
        return step_row((TINY if chosen.tiny else SIZES)[key["model"]], key["way"], device)
    layers = small_layers(3) if chosen.tiny else LISTS[key["layers"]]()
    return codec_speed.compare(*CASE_OF[key["case"]], layers, 9, device, look=True)


def table(rows: Sequence[Row]) -> str:
    """Lay out steps over plain DDP's of the same turns, and their differences to plain DDP's row; then codecs."""
    sound = [row for row in rows if "failed" not in row]
    lines = []
    for model, ways in grouped((row for row in sound if "way" in row), lambda row: row.get("model", SMALL)).items():
        plain = [row for row in ways if row["way"] == PLAIN]
        base = statistics.fmean(row["seconds"] for row in plain) if plain else 0.0
        for row in ways:
            over = row["seconds"] / row.get("plain", base)
            cells = [model, row["way"], f"{1e3 * row['seconds']:.1f}", f"{over:.2f}"]
            if plain and "kernels" in row:
                more = {
                    key: row.get(key, 0) - plain[0].get(key, 0) for key in ("launches", "kernels", "busy", "memory")
                }
                waits = sum(row["waits"].values()) - sum(plain[0]["waits"].values())
                cells += [f"{more['launches']}", f"{more['kernels']}", f"{1e3 * more['busy']:.1f}", f"{waits}"]
                cells.append(f"{more['memory'] / 1e9:.2f}")
            lines.append([*cells, *[""] * (9 - len(cells))])
    heads = ("step, ms", "over plain", "launches more", "kernels more", "device busy, ms more", "waits more", "GB more")
    failed = [f"{title_of(row)}: {row['failed']}" for row in rows if "failed" in row]
    parts = [markdown(("model", "way", *heads), lines), codec_speed.table([row for row in sound if "case" in row])]
    return "\n\n".join([*parts, *failed])


def main() -> None:
    chosen = on_card(__doc__, 450.0, "runs/gpu-speed.jsonl", only=("*",))
    if not chosen.table:
        wanted = [key for key in keys() if any(fnmatchcase(title_of(key), one) for one in chosen.only)]
        fill_until(chosen, wanted, lambda key, until: measured(key, chosen), longest=60.0)
    show(chosen, table(read(chosen.rows)))


if __name__ == "__main__":
    main()
