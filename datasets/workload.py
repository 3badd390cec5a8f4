"""What a workload is: data, a model, a loss, a recipe, and how accuracy is measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import nn
from torch.nn import functional

from gradlab.datasets.recipe import Recipe
from gradlab.errors import GradlabError


@dataclass(frozen=True)
class Data:
    """A data set in memory, normalised and split.

    train_x, test_x: float32 images (samples, channels, height, width), about zero mean and unit variance;
    train_y, test_y: int64 classes (samples,).
    """

    train_x: torch.Tensor
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor


class Workload(ABC):
    """A data set with the model and the recipe it is trained by. Stateless: methods are functions."""

    name: ClassVar[str]
    description: ClassVar[str]
    pairing: ClassVar[str]  # where this data set, model and recipe were put together
    recipe: ClassVar[Recipe]
    needs_path: ClassVar[bool]  # whether `load` needs a file that the user has

    @abstractmethod
    def load(self, path: str | None = None, *, train_limit: int | None = None, test_limit: int | None = None) -> Data:
        """Read the data; the limits keep the first so many samples of a split.

        Raises:
            GradlabError: if the path is missing, unneeded, or does not hold this data set.
        """

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """A new model on the CPU; its values follow from the seed alone, and no global generator is advanced."""

    @abstractmethod
    def augment(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Training images (batch, channels, height, width), randomly altered; of the same shape."""

    @final
    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy in nats of logits (batch, classes) against classes (batch,)."""
        return functional.cross_entropy(output, target)

    @final
    @torch.no_grad()
    def accuracy(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor, *, batch_size: int = 250) -> float:
        """The fraction (0 to 1) of images (samples, ...) whose largest logit is their class (samples,).

        The model is put in evaluation mode and back. Raises GradlabError if there are no samples.
        """
        if not len(x):
            raise GradlabError("accuracy of no samples: expected at least 1 image")
        was_training = model.training
        model.eval()
        try:
            parts = zip(x.split(batch_size), y.split(batch_size), strict=True)
            right = sum(int((model(images).argmax(1) == classes).sum()) for images, classes in parts)
        finally:
            model.train(was_training)
        return right / len(x)


def limited(length: int, limit: int | None, split: str) -> int:
    """How many of `length` samples a limit keeps; GradlabError for a limit below 1."""
    if limit is not None and limit < 1:
        raise GradlabError(f"{split}_limit is {limit}: expected at least 1 sample, or None for all")
    return length if limit is None else min(length, limit)
