"""Log a compressed training with a real logger, and read what the logger wrote back from its files.

Usage: loggers.py write|read tensorboard|wandb|trackio FOLDER

"write" trains and prints each step's numbers, as `scalars()` had them; "read" prints what the files hold. Both print a
JSON object: the numbers by step. A process of its own, as loggers start threads and servers.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradlab.plan import Plan
from gradlab.runtime import Exchange, log_scalars

Numbers = dict[int, dict[str, float]]
STEPS, PROJECT = 5, "gradlab"
_BLOCK, _FRAGMENT_HEAD = 2**15, 7  # bytes


@contextmanager
def tensorboard(folder: Path) -> Iterator[Any]:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        yield writer


@contextmanager
def wandb(folder: Path) -> Iterator[Any]:
    import wandb

    run = wandb.init(project=PROJECT, mode="offline", dir=str(folder))
    yield run
    run.finish()


@contextmanager
def trackio(folder: Path) -> Iterator[Any]:
    import trackio

    run = trackio.init(project=PROJECT, name="run")
    yield run
    trackio.finish()


def read_tensorboard(folder: Path) -> Numbers:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    found: Numbers = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            found.setdefault(event.step, {})[name] = event.value
    return found


def read_wandb(folder: Path) -> Numbers:
    from wandb.proto.wandb_internal_pb2 import Record

    [path] = folder.glob("wandb/offline-run-*/run-*.wandb")
    found: Numbers = {}
    for data in log_records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            found[record.history.step.num] = {name: value for name, value in items.items() if name[0] != "_"}
    return found


def log_records(content: bytes) -> Iterator[bytes]:
    """Records of a file in LevelDB's log format, as runs of W&B are, after a header of 7 bytes.

    A block has 32 KiB. A fragment has a checksum (4 bytes), its length (2 bytes, little-endian) and its type: 1 is a
    whole record; 2, 3 and 4 are the first, a middle and the last fragment of one.
    """
    at, whole = _FRAGMENT_HEAD, b""
    while at + _FRAGMENT_HEAD <= len(content):
        if (left := _BLOCK - at % _BLOCK) < _FRAGMENT_HEAD:  # a block's end is too short for another fragment
            at += left
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        whole += content[at + _FRAGMENT_HEAD : at + _FRAGMENT_HEAD + length]
        at += _FRAGMENT_HEAD + length
        if kind in (1, 4):
            yield whole
            whole = b""


def read_trackio(folder: Path) -> Numbers:
    with sqlite3.connect(folder / f"{PROJECT}.db") as database:
        rows = database.execute("SELECT step, metrics FROM metrics").fetchall()
    return {step: json.loads(metrics) for step, metrics in rows}


def train(folder: Path, logger: Any) -> Numbers:
    """Compress some steps on one rank, and log each."""
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 5))
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=0, world_size=1)
    plan = Plan.uniform(model, "topk", density=0.1)
    with warnings.catch_warnings():  # one rank has nobody to talk to
        warnings.simplefilter("ignore")
        exchange = Exchange(plan, model.named_parameters(), measure_every=2)
    found: Numbers = {}
    for step in range(STEPS):
        loss = model(torch.randn(8, 20)).square().mean()
        model.zero_grad()
        loss.backward()
        exchange.step({name: parameter.grad for name, parameter in model.named_parameters()})
        rate = math.nan if step == 1 else 0.1
        log_scalars(logger, exchange, step, loss=loss.item(), rate=rate)
        found[step] = {**exchange.scalars(), "loss": loss.item(), "rate": rate}
    exchange.close()
    return found


LOGGERS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Numbers]]] = {
    "tensorboard": (tensorboard, read_tensorboard),
    "wandb": (wandb, read_wandb),
    "trackio": (trackio, read_trackio),
}


def main() -> None:
    what, name, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    opened, read = LOGGERS[name]
    if what == "write":
        os.environ |= {"TRACKIO_DIR": str(folder), "HF_HUB_OFFLINE": "1", "WANDB_SILENT": "true"}
        with opened(folder) as logger:
            found = train(folder, logger)
    else:
        found = read(folder)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
