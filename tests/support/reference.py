"""The reference of docs/reference: the modules that write it, and what its examples find."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from gradlab import Artifact, Layer, Plan, Trace, Wrap, codecs, wrappers
from gradlab.capture import TraceWriter

DOCS = Path(__file__).parents[2] / "docs"
# What docs/reference/index.md says that examples take as imported.
IMPORTED = {
    "torch": torch,
    "Artifact": Artifact,
    "Layer": Layer,
    "Plan": Plan,
    "Trace": Trace,
    "Wrap": Wrap,
    "codecs": codecs,
    "wrappers": wrappers,
}
LAYERS = (Layer("conv.weight", (16, 8, 3, 3), "convolution"), Layer("head.weight", (10, 64), "linear"))


@contextmanager
def site_modules(*names: str) -> Iterator[list[ModuleType]]:
    """The modules of docs/sphinx of these names; none of them stays imported."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS / "sphinx")
        yield [importlib.import_module(name) for name in names]
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == DOCS / "sphinx":
            del sys.modules[name]


def documented() -> dict[str, Any]:
    """Everything that the reference describes, by full name."""
    with site_modules("public_names") as [names]:
        found = {}
        for room in names.PAGES.values():
            found |= {
                f"{room}.{name}": thing
                for name, thing in names.offers(room).items()
                if not inspect.ismodule(thing) and names.home(name, thing) == room
            }
            if room in names.METHODS:
                found |= {f"{method.__module__}.{method.__name__}": method for method in names.methods_of(room)}
        return found


def write_recording(path: Path) -> None:
    """Write the recording that examples find: 40 steps of two layers on two ranks, with what ranks have in common."""
    generator = torch.Generator().manual_seed(0)
    with TraceWriter(path, LAYERS, world_size=2) as writer:
        for index in range(40):
            common = {layer.name: torch.randn(layer.shape, generator=generator) for layer in LAYERS}
            for rank in range(2):
                noise = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in common.items()}
                gradients = {name: 0.01 * (tensor + noise[name]) for name, tensor in common.items()}
                writer.append(rank, index, gradients, loss=2.3 / (1 + 0.05 * index), learning_rate=0.1)
