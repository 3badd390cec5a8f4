"""Answers of gradlab's commands on tasks: before a pilot, after it, and what came.

    python benchmarks promise --data FOLDER --rows FILE [--tasks words ...] [--limits 1% ...]
    python benchmarks promise --rows FILE --table

100 steps of each task are recorded on two ranks. `gradlab recommend` chooses a plan from the recording, and `gradlab
pilot` from trials; then the script trains densely and with both plans. The script is this file with --job. FOLDER has
CIFAR-10 as an NPZ file and WikiText-2 as text. A row is a task with a limit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rows import Row, add, markdown, missing, options, read
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import gradlab
from gradlab.artifact import Artifact
from gradlab.capture import TraceRecorder

PROGRAM = Path(__file__).parents[1]
NETWORK = ("--nodes", "2", "--bandwidth", "2mbit", "--compute-seconds", "20ms")
RECORDED, CHECKED = 100, 16  # steps of a recording, batches of a validation
Batch = tuple[torch.Tensor, ...]


@dataclass
class Training:
    """A model with what trains it. draw: makes a rank's batch with a generator; rate: factor on the learning rate, by
    the share of training that is over; steps: of a whole training."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    draw: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    rate: Callable[[float], float] = lambda over: 1.0
    steps: int = 200


def stairs(over: float) -> float:
    return 1.0 if over < 0.6 else 0.1 if over < 0.85 else 0.01


def _drawn(images: torch.Tensor, classes: torch.Tensor, size: int, generator: torch.Generator) -> Batch:
    chosen = torch.randint(len(images), (size,), generator=generator)
    return images[chosen], classes[chosen]


def _windows(text: torch.Tensor, size: int, length: int, generator: torch.Generator) -> Batch:
    starts = torch.randint(len(text) - length - 1, (size, 1), generator=generator)
    found = text[starts + torch.arange(length + 1)]
    return found[:, :-1], found[:, 1:]


def _classified(model: nn.Module, batch: Batch) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def _mlp(*widths: int) -> nn.Sequential:
    parts = [layer for before, after in pairwise(widths) for layer in (nn.Linear(before, after), nn.ReLU())]
    return nn.Sequential(*parts[:-1])


def vgg(data: Path) -> Training:
    """CIFAR-10 in 16 x 16, convolutions without any norm, RMSprop with stairs."""
    with np.load(data / "cifar10.npz", allow_pickle=False) as arrays:
        pictures, classes = arrays["x_train"][:10_000], torch.from_numpy(arrays["y_train"][:10_000]).long()
    images = torch.from_numpy(pictures.astype(np.float32) / 127.5 - 1).movedim(-1, 1)
    parts: list[nn.Module] = []
    for before, after in pairwise((3, 24, 48, 64)):
        parts += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*parts, nn.Flatten(), _mlp(256, 128, 10))
    draw = partial(_drawn, functional.avg_pool2d(images, 2), classes, 16)
    return Training(model, torch.optim.RMSprop(model.parameters(), 5e-4), draw, _classified, stairs, steps=300)


class Words(nn.Module):
    def __init__(self, known: int) -> None:
        super().__init__()
        self.embedding, self.gru = nn.Embedding(known, 48), nn.GRU(48, 96, batch_first=True)
        self.head = nn.Linear(96, known)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(self.embedding(text))[0])


def words(data: Path) -> Training:
    """WikiText-2's thousand most frequent words, a GRU, NAdam at a constant rate."""
    text = (data / "wikitext2" / "train.txt").read_text("utf-8").split()[:100_000]
    known = {word: code for code, (word, _) in enumerate(Counter(text).most_common(1000), 1)}
    codes, model = torch.tensor([known.get(word, 0) for word in text]), Words(1001)
    return Training(model, torch.optim.NAdam(model.parameters(), 2e-3), partial(_windows, codes, 8, 24), _classified)


def tabular(data: Path) -> Training:
    """A regression on 40 columns of which a network that is not trained makes the target; Nesterov's momentum."""
    teacher, columns = _mlp(40, 64, 64, 1), torch.randn(40)
    model = _mlp(40, 128, 128, 1)

    def draw(generator: torch.Generator) -> Batch:
        rows = torch.randn(32, 40, generator=generator) * columns
        with torch.no_grad():
            return rows, 10 * teacher(rows) + 0.1 * torch.randn(32, 1, generator=generator)

    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9, nesterov=True)
    loss = lambda model, batch: functional.mse_loss(model(batch[0]), batch[1])  # noqa: E731
    return Training(model, optimizer, draw, loss, stairs, steps=300)


TASKS = {"VGG": vgg, "words": words, "tabular": tabular}


def job(chosen: argparse.Namespace) -> None:
    """Train a task under DDP, and print the mean loss on batches that no step has, which --result writes as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1000)
    training = TASKS[chosen.job](chosen.data)
    model, optimizer = DistributedDataParallel(training.model), training.optimizer
    attached: Any = nullcontext()
    if chosen.record:
        attached = TraceRecorder(model, chosen.record, optimizer=optimizer, overwrite=True)
    elif chosen.plan:
        attached = gradlab.compress(model, chosen.plan, optimizer=optimizer)
    with attached:
        for step in range(chosen.stop or training.steps):
            generator = torch.Generator().manual_seed(step * 64 + dist.get_rank())
            torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
            optimizer.zero_grad()
            training.loss(model, training.draw(generator)).backward()
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
                group["lr"] = group["initial_lr"] * training.rate(step / training.steps)
            optimizer.step()
    if dist.get_rank() == 0:
        generator = torch.Generator().manual_seed(77_777_777)
        training.model.eval()
        with torch.no_grad():
            losses = [training.loss(training.model, training.draw(generator)) for _ in range(CHECKED)]
        found = float(torch.stack(losses).mean())
        print(f"{chosen.job}: {found:.6f}")
        if chosen.result:
            chosen.result.write_text(json.dumps({"loss": found}))
    dist.destroy_process_group()


def command(task: str, data: Path, *words: object) -> list[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*launch, str(PROGRAM), "promise", "--job", task, "--data", str(data), *map(str, words)]


def run(words: Sequence[object]) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def answered(*words: object) -> Row:
    began = time.monotonic()
    found: Row = json.loads(run([sys.executable, "-m", "gradlab.cli.main", *words]))
    return found | {"seconds": time.monotonic() - began}


def promises(task: str, data: Path, limits: Sequence[str]) -> Iterator[Row]:
    """Record, and for each limit recommend, try, and train."""
    with tempfile.TemporaryDirectory() as kept:
        trace, result = Path(kept, "trace"), Path(kept, "result.json")
        ends: dict[str | None, float] = {}  # by plan, each trained once; None: dense training

        def end(artifact: Path | None) -> float:
            plan = None if artifact is None else Artifact.load(artifact).plan.digest
            if plan not in ends:
                run(command(task, data, "--result", result, *(("--plan", artifact) if artifact else ())))
                ends[plan] = float(json.loads(result.read_text(encoding="utf-8"))["loss"])
            return ends[plan]

        run(command(task, data, "--record", trace, "--stop", RECORDED))
        for limit in limits:
            folder = Path(kept, limit)
            folder.mkdir()
            before, after = (folder / f"{name}.safetensors" for name in ("before", "after"))
            found = answered("recommend", trace, "--out", before, *NETWORK, "--max-loss", limit, "--json")
            plans = [*([before] if before.exists() else []), *found["artifacts_to_try"]]
            words = ("pilot", trace, "--out", after, "--max-loss", limit, "--json")
            training = command(task, data, "--record", trace)
            tried = answered(*words, *(word for path in plans for word in ("--plan", path)), "--", *training)
            row: Row = {"task": task, "limit": limit, "before": found["plan"], "text": found["text"]}
            row |= {"recommend_seconds": found["seconds"], "pilot_seconds": tried["seconds"]}
            row |= {"proposed": [(one["plan"], one["risk"]) for one in found["proposals"]]}
            row |= {"after": tried["best"], "outcomes": tried["outcomes"], "dense": end(None)}
            for name, artifact in (("before", before), ("after", after)):
                row[f"{name}_end"] = end(artifact) / row["dense"] - 1 if artifact.exists() else None
            yield row


def table(rows: Sequence[Row]) -> str:
    cells = []
    for row in rows:
        best = next((one for one in row["outcomes"] if one["name"] == row["after"]), {})
        expected = f"{best['end_low']:+.1%} to {best['end_high']:+.1%}" if best.get("end_low") is not None else "-"
        came = ["-" if row[key] is None else f"{row[key]:+.2%}" for key in ("before_end", "after_end")]
        cells.append([row["task"], row["limit"], row["before"], came[0], row["after"], expected, came[1]])
    return markdown(("task", "limit", "before the pilot", "came", "after the pilot", "expected", "came"), cells)


def main() -> None:
    of_job: dict[str, Any] = {"job": str, "record": str, "plan": str, "stop": int, "result": Path}
    chosen = options(__doc__, data=Path, rows=Path, tasks=list(TASKS), limits=("1%",), table=False, **of_job)
    if chosen.job:
        job(chosen)
        return
    for task in () if chosen.table else chosen.tasks:
        limits = [key["limit"] for key in missing(chosen.rows, ({"task": task, "limit": x} for x in chosen.limits))]
        for row in promises(task, chosen.data, limits) if limits else ():
            add(chosen.rows, row, ("outcomes",))
    print(table(read(chosen.rows)))
