"""Artifacts of every codec that learns, of plans with wrappers, and of plans that are chosen anew."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save

from campaigns.fuzzed.case import Case, Format, altered_json, damaged
from gradlab.artifact import Artifact, _seal
from gradlab.errors import GradlabError
from gradlab.executor.lockstep_plan import LockstepPlan
from gradlab.layout import Layer, fingerprint
from gradlab.plan import Plan, Wrap, method_plan
from gradlab.plan.plan import hash_tensor, learned_tensors
from support.contract import plan_for
from support.prescribed import gradients

SHAPES = {"conv": (16, 8, 3, 3), "wide": (12, 300), "tall": (300, 7), "vector": (65,)}
Tensors = dict[str, torch.Tensor]


def plans() -> list[Plan]:
    """Plans that are different kinds of file."""
    layers = [Layer(name, shape, "convolution" if len(shape) == 4 else "linear") for name, shape in SHAPES.items()]
    learned = [
        plan_for(case, grouping, feedback=True, shapes=SHAPES)
        for case in ("gradiveq", "lgc_ring", "lgc_server", "gradiveq, coordinates")
        for grouping in ("layer", "model")
    ]
    made = [
        Plan.uniform(layers, "topk", density=0.05),
        Plan.uniform(layers, "ecsq", bits=0.5, wrappers=[Wrap("error_feedback"), Wrap("two_way")]),
        Plan.uniform(layers, "powersgd", rank=2, warmup_steps=1),
        method_plan(layers, "DGC", density=0.05),
        method_plan(layers, "dist-EF-blockSGDM", weight_decay=1e-4),
        method_plan(layers, "QSGD, max norm", bits=4),
    ]
    return learned + made


class ArtifactFiles(Format):
    """Files that `Artifact.save` wrote."""

    file_name = "plan.safetensors"

    def __init__(self) -> None:
        self._files: list[tuple[bytes, dict[str, Any], Tensors]] = []
        with tempfile.TemporaryDirectory() as folder:
            for number, plan in enumerate(plans()):
                path = Artifact(plan, {"method": "fuzz", "steps": [1, 2]}).save(Path(folder) / f"{number}.safetensors")
                with safe_open(str(path), framework="pt") as file:
                    header = json.loads(file.metadata()["gradlab"])
                    tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no dict
                assert read(path) == identity(header["plan"], tensors)
                self._files.append((path.read_bytes(), header, tensors))

    def case(self, draw: np.random.Generator) -> Case:
        data, header, tensors = self._files[int(draw.integers(len(self._files)))]
        expected = identity(header["plan"], tensors)
        way = int(draw.integers(3))
        if way == 0:
            kind, data = damaged(data, draw)
            return Case(kind, data, False, expected, read)
        if way == 1 or not tensors:
            changed = altered_json(header, draw) if draw.random() < 0.2 else altered_plan(header, draw)
            return Case("header, sealed", sealed(changed, tensors), True, expected, read)
        kind, tensors = altered_tensors(tensors, draw)
        return Case(f"{kind}, sealed", sealed(header, tensors), True, expected, read)


def altered_plan(header: dict[str, Any], draw: np.random.Generator) -> dict[str, Any]:
    """Alter a plan's groups alone, its schedule and seed, or anything; its fingerprint fits the layers where it can."""
    plan = dict(header["plan"])
    part = str(draw.choice(["groups", "groups", "schedule", "seed", "layers", "all"]))
    plan = altered_json(plan, draw) if part == "all" else {**plan, part: altered_json(plan[part], draw)}
    with contextlib.suppress(GradlabError, LookupError, TypeError):
        plan["fingerprint"] = fingerprint([Layer.from_json(layer) for layer in plan["layers"]])
    return {**header, "plan": plan}


def sealed(header: Any, tensors: Tensors) -> bytes:
    """Write a header and tensors as `Artifact.save` does, with right hashes, whatever the header holds."""
    if isinstance(header, dict):
        header = {key: value for key, value in header.items() if key != "header_sha256"}
        if isinstance(header.get("sha256"), dict):
            header["sha256"] = {key: hash_tensor(tensor) for key, tensor in tensors.items()}
        try:
            text = _seal(header)
        except (GradlabError, UnicodeEncodeError):  # infinite numbers, halves of UTF-16 pairs
            text = json.dumps(header)
    else:
        text = json.dumps(header)
    return save({key: tensor.contiguous().clone() for key, tensor in tensors.items()}, {"gradlab": text})


def altered_tensors(tensors: Tensors, draw: np.random.Generator) -> tuple[str, Tensors]:
    """Alter a learned tensor."""
    changed, names = {key: tensor.clone() for key, tensor in tensors.items()}, sorted(tensors)
    one, other = (names[int(draw.integers(len(names)))] for _ in range(2))
    value = changed[one]
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "swapped": lambda: changed[other].clone(),
        "double": value.double,
        "half": value.half,
        "whole numbers": lambda: value.to(torch.int32),
        "flags": lambda: value > 0,
        "flat": lambda: value.reshape(-1).clone(),
        "turned": lambda: value.transpose(0, -1).clone() if value.ndim > 1 else value[None].clone(),
        "a row less": lambda: value[:-1].clone() if value.ndim and len(value) else torch.zeros(1),
        "a row more": lambda: torch.cat([value, value[-1:]]) if value.ndim and len(value) else torch.zeros(1),
        "one number": lambda: value.reshape(-1)[:1].reshape(()) if value.numel() else torch.zeros(()),
        "none": lambda: value.reshape(-1)[:0].clone(),
        "nan": lambda: torch.full_like(value.float(), torch.nan),
        "huge": lambda: value.float() * 1e38,
        "negative": lambda: -value.float() - 1,
        "zero": lambda: torch.zeros_like(value),
    }
    kind = str(draw.choice([*ways, "gone", "new"]))
    if kind == "gone":
        del changed[one]
    elif kind == "new":
        changed[f"{one}x"] = value
    elif kind == "swapped":
        changed[one], changed[other] = changed[other], changed[one]
    else:
        changed[one] = ways[kind]()
    return kind, changed


def identity(plan: Any, tensors: Tensors) -> str:
    hashes = {key: hash_tensor(tensor) for key, tensor in tensors.items()}
    return hashlib.sha256(json.dumps([plan, hashes], sort_keys=True).encode()).hexdigest()


def read(path: Path) -> str:
    """Load an artifact, forecast its bytes, and run two steps of it on two ranks."""
    plan = Artifact.load(path).plan
    found = identity(plan.to_json(), dict(learned_tensors(plan)))
    if sum(layer.numel for layer in plan.layers) > 10**5:
        return found  # a large model is no finding
    plan.payload_bytes(2)
    lockstep = LockstepPlan(plan, 2, True)
    shapes = {layer.name: layer.shape for layer in plan.layers}
    for step in range(2):
        lockstep.step(step, [gradients(shapes, rank, step) for rank in range(2)])
    return found
