"""Checkpoints: a rank's file, as Accelerate and the Trainer keep it, damaged, or altered and sealed again."""

from __future__ import annotations

import copy
import functools
import hashlib
import io
import shutil
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from campaigns.fuzzed.artifact import altered_tensors
from campaigns.fuzzed.case import Case, Format, altered_json, damaged
from gradlab.errors import GradlabError
from gradlab.plan import Group, Plan, Wrap
from gradlab.plan.plan import hash_tensor
from gradlab.runtime import CompressionState, compression_hook
from gradlab.runtime.checkpoint import sealed
from gradlab.runtime.saved import RankFiles
from support.contract import SETTINGS
from support.prescribed import Prescribed, gradients
from support.prescribed import layers as prescribed_layers

SHAPES = {"conv": (8, 4, 3, 3), "wide": (12, 60), "tall": (60, 7), "vector": (33,)}
STEPS = 3
FEEDBACK = [Wrap("error_feedback")]


def grouped(codec: str, layers: tuple[str, ...], **settings: Any) -> Plan:
    """A plan of one group that compresses from the first step on."""
    known = SETTINGS.get(codec, {})
    group = Group("group", layers, codec, {**known, **settings}, tuple(FEEDBACK))
    return Plan(prescribed_layers(SHAPES), (group,))


PLANS: dict[str, Callable[[DistributedDataParallel], Plan]] = {
    "topk": lambda model: Plan.uniform(model, "topk", density=0.1),
    "powersgd": lambda model: Plan.uniform(model, "powersgd", rank=2, warmup_steps=0),
    "both ways": lambda model: Plan.uniform(model, "sign", wrappers=[*FEEDBACK, Wrap("two_way", {"buffer": "int8"})]),
    "momentum": lambda model: Plan.uniform(
        model, "topk", density=0.1, wrappers=[Wrap("momentum_correction", {"buffer": "int8"})]
    ),
    "ecsq": lambda model: Plan.uniform(model, "ecsq", bits=1.0),
    "threshold": lambda _: grouped("threshold", ("wide", "tall")),
    "lgc": lambda _: grouped("lgc_ring", ("conv", "wide"), training_steps=9),
    "gradiveq": lambda _: grouped("gradiveq", ("conv", "wide"), sample_steps=5),
}


class Run:
    """A run of one rank that has taken some steps."""

    def __init__(self, name: str) -> None:
        self.model = DistributedDataParallel(Prescribed(SHAPES))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.state = CompressionState(PLANS[name](self.model), self.model, optimizer=optimizer)
        self.model.register_comm_hook(self.state, compression_hook)
        for step in range(STEPS):
            self.step(step)
        self.saved = self.state.state_dict()
        self.files = RankFiles(self.state, self.model, None)
        self.sound = self.identity()

    def step(self, number: int) -> None:
        self.model(gradients(SHAPES, 0, number)).backward()

    def identity(self) -> str:
        """Of all that it would save."""
        saved = self.state.state_dict()
        tensors = {key: hash_tensor(tensor) for key, tensor in saved["states"].items()}
        rest = [saved["iteration"], sorted(saved["learning_rates"].items()), sorted(tensors.items())]
        return hashlib.sha256(repr(rest).encode()).hexdigest()


RUNS: dict[str, Run] = {}  # those that no case has broken


def run_of(name: str) -> Run:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if name not in RUNS:
        RUNS[name] = Run(name)
    return RUNS[name]


class CheckpointFiles(Format):
    """A rank's file; what is altered is a plain value, or a tensor of its states."""

    file_name = "gradlab_rank_0.pt"

    def close(self) -> None:
        for run in RUNS.values():
            run.state.close()
        RUNS.clear()
        dist.destroy_process_group()

    def case(self, draw: np.random.Generator) -> Case:
        name = str(draw.choice(list(PLANS)))
        run = run_of(name)
        saved, expected, read = {**run.saved, "marks": {}}, run.identity(), functools.partial(load, run)
        way = int(draw.integers(4))
        if draw.random() < 0.05:
            kind, data = bomb(saved, draw)
            return Case(kind, data, True, expected, read)
        if way < 2:
            kind, data = damaged(written(saved), draw)
            return Case(kind, data, False, expected, read)
        if way == 2 and saved["states"]:
            kind, states = altered_tensors(saved["states"], draw)
            saved = {**saved, "states": states}
        else:
            kind = "a value"
            rest = {key: value for key, value in saved.items() if key not in ("states", "sha256")}
            altered = altered_json(rest, draw)
            whole = {key: saved[key] for key in ("states", "sha256")}
            saved = {**altered, **whole} if isinstance(altered, dict) else altered
        again = draw.random() < 0.8
        kind += ", sealed" if again else ", unsealed"
        return Case(kind, written(resealed(saved, again)), again, expected, read)


def bomb(saved: dict[str, Any], draw: np.random.Generator) -> tuple[str, bytes]:
    """A few bytes that claim many."""
    kind = str(draw.choice(["no strides", "one storage", "deflated", "named often"]))
    zeros = torch.zeros(2**20)
    states: dict[str, torch.Tensor] = {
        "no strides": {"x::y/residual": torch.zeros(1).expand(2**29)},
        "one storage": {f"x::{number}/residual": zeros for number in range(1000)},
    }.get(kind, {"x::y/residual": torch.zeros(2**23)})
    data = written({**saved, "states": states})
    return kind, data if kind in ("no strides", "one storage") else packed(data, kind == "named often")


def packed(data: bytes, often: bool) -> bytes:
    """The archive with compressed members; or with the largest one under many names."""
    held = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.infolist():
            new.writestr(member.filename, old.read(member), zipfile.ZIP_STORED if often else zipfile.ZIP_DEFLATED)
        if often:
            largest = max(new.infolist(), key=lambda member: member.file_size)
            for number in range(100):
                again = copy.copy(largest)
                again.filename = f"{largest.filename}{number}"
                new.filelist.append(again)
    return held.getvalue()


def resealed(saved: Any, again: bool) -> Any:
    try:
        return sealed(saved) if again and isinstance(saved, Mapping) else saved
    except GradlabError:
        return saved


def written(saved: Any) -> bytes:
    file = io.BytesIO()
    torch.save(saved, file)
    return file.getvalue()


def load(run: Run, path: Path) -> str:
    """Continue from a file, and take a step; the run is then what it was."""
    folder = path.with_name("checkpoint")
    folder.mkdir(exist_ok=True)
    shutil.copy(path, folder / "gradlab_rank_0.pt")
    try:
        run.files.load(folder, "gradlab", "nothing to do")
        found = run.identity()
        run.step(STEPS)
        run.state.load_state_dict(run.saved)
        return found
    except GradlabError:
        assert run.identity() == run.sound, "a refused checkpoint changed the run"
        raise
    except BaseException:
        for name in [name for name, one in RUNS.items() if one is run]:
            del RUNS[name]
        raise
