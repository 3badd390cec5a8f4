"""Workloads: a data set with the model and the recipe that the papers pair it with.

workload = gradlab.datasets.get("digits")
data = workload.load()
model = workload.model(seed=0)
for indices in gradlab.datasets.batches(len(data.train_x), 32, rank=0, world_size=2, seed=0, steps=300):
    loss = workload.loss(model(data.train_x[indices]), data.train_y[indices])

A workload's class takes other settings: `gradlab.datasets.TextWords(context=128, vocabulary=20_000)`.
"""

from __future__ import annotations

from gradlab.datasets.digits import Digits
from gradlab.datasets.images import CamVid, Cifar10, FashionMnist
from gradlab.datasets.metric import LogitMetric
from gradlab.datasets.optimizer import build_optimizer, clip_gradients
from gradlab.datasets.recipe import Recipe, learning_rate_at
from gradlab.datasets.sampling import batches
from gradlab.datasets.text import TextBytes, TextChars, TextWords
from gradlab.datasets.workload import Data, Workload
from gradlab.errors import GradlabError

__all__ = [
    "CamVid",
    "Data",
    "LogitMetric",
    "Recipe",
    "TextBytes",
    "TextChars",
    "TextWords",
    "Workload",
    "batches",
    "build_optimizer",
    "clip_gradients",
    "get",
    "learning_rate_at",
    "names",
]

_ALL: tuple[Workload, ...] = (Digits(), Cifar10(), FashionMnist(), CamVid(), TextBytes(), TextChars(), TextWords())
_WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in _ALL}


def names() -> list[str]:
    """List the names of all workloads; the first needs no download."""
    return list(_WORKLOADS)


def get(name: str) -> Workload:
    """Return the workload of that name.

    Raises:
        GradlabError: for an unknown name; the message lists the known names.
    """
    if name not in _WORKLOADS:
        raise GradlabError(f"unknown workload {name!r}: expected one of {', '.join(_WORKLOADS)}")
    return _WORKLOADS[name]
