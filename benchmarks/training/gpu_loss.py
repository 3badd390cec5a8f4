"""GPT-2 small from scratch on one GPU, between 4 and 8 emulated nodes in lockstep: held-out loss under each codec.

    make gpu-loss PYTHON=python3 [OUT=FOLDER] [ARGS="--text FILE --seconds 480 --plans dense int4 --ranks 4 --seeds 0"]
    python benchmarks gpu_loss --device cpu --tiny --steps 6          tries it without a GPU
    python benchmarks gpu_loss --rows ROWS.jsonl --table

A step has 32 rows of 512 tokens, whatever the number of nodes: each node has the gradient of its share, the plan's
codecs are between them (`LockstepPlan`, which is what the engine computes), after 100 dense steps. 124 million
parameters, bfloat16 autocast, AdamW, 1,000 steps. The text is --text, any file, or the Python sources of the standard
library and of torch: cut into words, marks and spaces, of which the most frequent are tokens; others are spelled by
bytes. Every 20th block of 64 KiB is held out. Losses are in nats per token, on the same 128 rows every 100 steps.

A row is a plan, a number of nodes and a seed, with its curve. After --seconds a run is saved in --work, has a row of
the steps so far, and the next call goes on there. The most important runs come first: seed 0 and 4 nodes, then 8.
--out (OUT) is a folder that gets a copy of the rows, and the table.

Predicted, not measured, for an H200 (62.9 ms for GPT-2's step of 8,192 tokens): 0.14 s for a dense step, 2.3 minutes
for a run. Each node adds its codec's work: at 1.05 times a plain step for int4, 1.08 for top-k and 1.3 for ecsq, the
first four runs take 11 minutes of 25. At the 90, 140 and 372 ms of the codecs' PyTorch lines they take 35.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sysconfig
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import emulated
import numpy as np
import torch
from rows import Row, fill_until, grouped, markdown, on_card, read, show
from torch import nn
from torch.nn import functional

from gradlab.datasets import Recipe, TextChars
from gradlab.datasets.optimizer import build_optimizer, clip_gradients
from gradlab.datasets.transformer import TransformerSize, initialized
from gradlab.executor.lockstep_plan import LockstepPlan
from gradlab.plan import Plan

PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("identity", {}),
    "int4": ("block_scaled", {"dtype": "int4"}),
    "top-k 1 %": ("topk", {"density": 0.01}),
    "ecsq 1": ("ecsq", {"bits": 1.0}),
    "16 bits": ("cast", {"dtype": "bfloat16"}),
    "PowerSGD 4": ("powersgd", {"rank": 4}),
    "ecsq 0.25": ("ecsq", {"bits": 0.25}),
    "int8": ("block_scaled", {"dtype": "int8"}),
}
# nanoGPT's, with GPT-3's rate for this size.
RECIPE = replace(TextChars.recipe, learning_rate=6e-4, second_momentum=0.95, batch_size=32, steps=1000)
SIZE = TransformerSize(50257, 512, 768, layers=12, heads=12)
TINY = TransformerSize(300, 16, 16, layers=1, heads=2)
BLOCK, HELD_OUT, MOST_BYTES = 2**16, 20, 2**26
HELD_ROWS, SAVE_EVERY = 128, 120.0
_PIECES = re.compile(rb" ?\w+| ?[^\w\s]+|\s+")


def read_text(file: Path | None, most: int) -> bytes:
    """Read a file, or Python's and torch's sources in the order of their names, up to so many bytes."""
    if file:
        return file.read_bytes()[:most]
    text = bytearray()
    for folder in (Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parent):
        for path in sorted(folder.rglob("*.py")) if len(text) < most else ():
            if len(text) < most and not any(part.endswith("-packages") for part in path.relative_to(folder).parts):
                text += path.read_bytes()
    return bytes(text[:most])


def tokens_of(text: bytes, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut a text into tokens: of the blocks for training and of those held out, two (tokens,) of int64.

    Tokens below 256 are bytes, others the most frequent pieces of the training blocks.
    """
    block = min(BLOCK, len(text) // HELD_OUT + 1)
    blocks = [text[at : at + block] for at in range(0, len(text), block)]
    held = b"".join(blocks[::HELD_OUT])
    train = _PIECES.findall(b"".join(one for at, one in enumerate(blocks) if at % HELD_OUT))
    pieces = [piece for piece, _ in Counter(train).most_common() if len(piece) > 1][: vocabulary - 256]
    number = {piece: [256 + at] for at, piece in enumerate(pieces)}

    def encoded(parts: Sequence[bytes]) -> np.ndarray:
        return np.fromiter((token for part in parts for token in number.get(part, part)), np.int64)

    return encoded(train), encoded(_PIECES.findall(held))


@dataclass(frozen=True)
class Task:
    """The model, its recipe for one node's share of a batch, and the tokens on the device."""

    size: TransformerSize
    recipe: Recipe
    train: torch.Tensor
    held: torch.Tensor

    def loss(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return functional.cross_entropy(model(x).flatten(0, 1), y.flatten())

    def rows(self, tokens: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = tokens[starts.to(tokens.device)[:, None] + torch.arange(self.size.context + 1, device=tokens.device)]
        return rows[:, :-1], rows[:, 1:]

    def micro_batches(self, ranks: int, seed: int, step: int) -> emulated.Micro:
        """Draw a step's rows, which follow from the seed and the step, and share them among the nodes."""
        draw = torch.Generator().manual_seed(1_000_003 * seed + step)
        starts = torch.randint(len(self.train) - self.size.context, (ranks * self.recipe.batch_size,), generator=draw)
        return [self.rows(self.train, one) for one in starts.chunk(ranks)]

    @torch.no_grad()
    def held_loss(self, model: nn.Module) -> float:
        starts = torch.linspace(0, len(self.held) - self.size.context - 1, HELD_ROWS).long()
        parts = [float(self.loss(model, *self.rows(self.held, one))) for one in starts.split(8)]
        return statistics.fmean(parts)


class Run:
    """A run under a plan, which can be saved between steps and goes on from its file, if there is one.

    Attributes:
        step: number of the next step.
        curve: steps with the held-out loss after them, and the training loss of the last of them.
    """

    def __init__(self, task: Task, key: Row, file: Path, device: torch.device) -> None:
        codec, settings = PLANS[key["plan"]]
        self.model = initialized(task.size, key["seed"]).to(device)
        self._task, self._key, self._file = task, key, file
        self._optimizer = build_optimizer(task.recipe, self.model.parameters())
        plan = Plan.uniform(self.model, codec, warmup_steps=task.recipe.warmup_steps, seed=key["seed"], **settings)
        self._lockstep = LockstepPlan(plan, key["ranks"])
        self._step, self._wire, self._seconds = 0, 0.0, 0.0
        self.curve: list[list[float]] = []
        if file.exists():
            self._load(torch.load(file, weights_only=True))

    def save(self) -> None:
        runs = self._lockstep.runs
        whole = {
            "key": self._key,
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "states": [[run.states, run.learning_rates] for run in runs],
            "progress": [self._step, self._wire, self._seconds, self.curve],
        }
        unfinished = self._file.with_suffix(".unfinished")
        torch.save(whole, unfinished)
        unfinished.replace(self._file)

    def _load(self, whole: dict[str, Any]) -> None:
        if whole["key"] != self._key:
            return
        self.model.load_state_dict(whole["model"])
        self._optimizer.load_state_dict(whole["optimizer"])
        self._step, self._wire, self._seconds, self.curve = whole["progress"]
        for run, (states, rates) in zip(self._lockstep.runs, whole["states"], strict=True):
            run.go_on_from(states, self._step, rates)

    def until(self, until: float) -> Row:
        """Train until the last step or until so late, and return the row's values."""
        recipe, saved, loss = self._task.recipe, time.time(), 0.0
        points = recipe.steps // 10
        while self._step < recipe.steps and math.isfinite(loss) and time.time() < until:
            began = time.perf_counter()
            micro = self._task.micro_batches(self._key["ranks"], self._key["seed"], self._step)
            result, loss = emulated.compressed_gradients(
                self._task, self.model, self._optimizer, self._lockstep, self._step, micro
            )
            clip_gradients(recipe, self.model.parameters())
            self._optimizer.step()
            self._step += 1
            self._wire += statistics.fmean(result.wire) if result.compressing else 0.0
            if self._step % points == 0:
                self.curve.append([self._step, self._task.held_loss(self.model), loss])
            self._seconds += time.perf_counter() - began
            if time.time() > saved + SAVE_EVERY:
                self.save()
                saved = time.time()
        compressing = max(1, self._step - self._lockstep.plan.schedule.warmup_steps)
        row = {
            "curve": self.curve,
            "wire": self._wire / compressing,
            "step_seconds": self._seconds / max(1, self._step),
        }
        if not math.isfinite(loss):
            return row | {"diverged": self._step}
        if self._step < recipe.steps:
            self.save()
            return row | {"steps": self._step}
        with suppress(FileNotFoundError):
            self._file.unlink()
        return row


class Campaign:
    """The runs on one text, which is read when the first of them begins."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self._chosen = chosen
        self._tokens: list[torch.Tensor] = []
        self._text = read_text(chosen.text, 2**18 if chosen.tiny else MOST_BYTES)

    def keys(self) -> Iterator[Row]:
        text = f"{len(self._text)} bytes, {zlib.crc32(self._text):08x}"
        for seed, ranks, plan in product(self._chosen.seeds, self._chosen.ranks, self._chosen.plans):
            yield {"plan": plan, "ranks": ranks, "seed": seed, "steps": self._chosen.steps, "text": text}

    def train(self, key: Row, until: float) -> Row:
        chosen, device = self._chosen, torch.device(self._chosen.device)
        size = TINY if chosen.tiny else SIZE
        if not self._tokens:
            self._tokens = [torch.from_numpy(one).to(device) for one in tokens_of(self._text, size.vocabulary)]
        recipe = replace(RECIPE, steps=chosen.steps, warmup_steps=min(chosen.steps // 10, RECIPE.warmup_steps))
        task = Task(size, replace(recipe, batch_size=RECIPE.batch_size // key["ranks"]), *self._tokens)
        chosen.work.mkdir(parents=True, exist_ok=True)
        file = chosen.work / f"{key['plan'].replace(' ', '-')}-{key['ranks']}-{key['seed']}.pt"
        row = Run(task, key, file, device).until(until)
        if device.type == "cuda":
            row |= {"device": torch.cuda.get_device_name(), "memory": torch.cuda.max_memory_allocated()}
            torch.cuda.reset_peak_memory_stats()
        return row | {"tokens": len(task.train), "torch": torch.__version__}


def table(rows: Sequence[Row]) -> str:
    """Lay out each run's last row: bytes sent in a step, held-out losses, and the last one over dense training's."""
    runs = grouped((row for row in rows if row.get("curve")), lambda row: (row["text"], row["ranks"], row["seed"]))
    lines = []
    for (_, ranks, seed), of_one in runs.items():
        by_plan = {row["plan"]: row for row in sorted(of_one, key=lambda row: row["curve"][-1][0])}
        dense = {step: held for step, held, _ in by_plan.get("dense", {}).get("curve", [])}
        for plan, row in by_plan.items():
            step, held, _ = row["curve"][-1]
            tenths = [f"{row['curve'][at][1]:.3f}" if len(row["curve"]) > at else "" for at in (1, 4, 9)]
            over = f"{100 * (held / dense[step] - 1):+.2f}" if step in dense and plan != "dense" else ""
            end = "diverged" if "diverged" in row else step
            lines.append(
                (plan, ranks, seed, f"{row['wire'] / 1e6:.2f}", *tenths, end, over, f"{1e3 * row['step_seconds']:.0f}")
            )
    heads = ("plan", "nodes", "seed", "MB sent a step", "held-out loss at 1/5", "at 1/2", "at the end", "steps")
    text = markdown((*heads, "over dense at these steps, %", "ms a step"), lines)
    return "\n\n".join([text, *(f"{row['plan']}: {row['failed']}" for row in rows if "failed" in row)])


def main() -> None:
    named = {"steps": RECIPE.steps, "plans": list(PLANS), "ranks": (4, 8), "seeds": (0, 1)}
    chosen = on_card(__doc__, 480.0, "runs/gpu-loss.jsonl", text=Path, work=Path("runs/gpu-loss"), **named)
    if not chosen.table:
        campaign = Campaign(chosen)
        fill_until(chosen, campaign.keys(), campaign.train, longest=chosen.seconds + 60.0)
    show(chosen, table(read(chosen.rows)))


if __name__ == "__main__":
    main()
