"""The interface of a workload: data, a model, a loss, a recipe, and the metric of a trained model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import nn
from torch.nn import functional

from gradlab.datasets.metric import IGNORED, LogitMetric
from gradlab.datasets.recipe import Recipe
from gradlab.errors import GradlabError


@dataclass(frozen=True)
class Data:
    """A data set in memory, split into training and test. The first axis counts samples.

    Attributes:
        train_x, test_x: float32 images (samples, channels, height, width) of about zero mean and unit variance; or
            int64 tokens (samples, context).
        train_y, test_y: int64 classes (samples,); each token's successor (samples, context); or classes of pixels
            (samples, height, width). -100 stands for no class, and counts neither in the loss nor in the metric.
    """

    train_x: torch.Tensor
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor


class Workload(ABC):
    """A data set with its model and training recipe. It holds nothing but settings."""

    name: str
    recipe: Recipe
    metric: LogitMetric
    needs_path: bool  # whether `load` needs a file that the user has
    interim_samples: int = 1000  # samples of the test split that measure the metric during training

    @abstractmethod
    def load(self, path: str | None = None, *, train_limit: int | None = None, test_limit: int | None = None) -> Data:
        """Read the data and normalise them.

        Args:
            path: the file or folder, for data sets that need one.
            train_limit: number of leading training samples to keep. None: all.
            test_limit: number of leading test samples to keep. None: all.

        Raises:
            GradlabError: if the path is missing, unneeded, or does not hold this data set, or a limit is below 1.
        """

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """Build a new model on the CPU whose values follow from the seed. No global generator is advanced."""

    def augment(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Alter training inputs (batch, ...) at random, in the same shape. By default they stay as they are."""
        return x

    @final
    def required(self, path: str | None, expected: str) -> str:
        """Return the path of the user's data.

        Raises:
            GradlabError: without one; the message says what is expected.
        """
        if path is None:
            raise GradlabError(f"workload {self.name} needs a path: {expected}")
        return path

    @final
    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Compute the mean cross entropy in nats. Targets of class -100 do not count.

        Args:
            output: logits (batch, ..., classes).
            target: classes (batch, ...).
        """
        return functional.cross_entropy(output.flatten(0, -2), target.flatten())

    @final
    @torch.no_grad()
    def score(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor, *, batch_size: int | None = None) -> float:
        """Compute the workload's metric of a model in evaluation mode. The model's mode is restored afterwards.

        Args:
            model: the model.
            x: inputs (samples, ...).
            y: classes (samples, ...).
            batch_size: samples at a time. None: the recipe's batch size.

        Raises:
            GradlabError: if there are no samples.
        """
        if not len(x):
            raise GradlabError(f"{self.metric.name} of no samples: expected at least 1")
        size = batch_size or self.recipe.batch_size
        was_training = model.training
        model.eval()
        try:
            parts = zip(x.split(size), y.split(size), strict=True)
            total = sum(float(self.metric.total(model(a).flatten(0, -2), b.flatten())) for a, b in parts)
        finally:
            model.train(was_training)
        return self.metric.of_mean(total / max(1, int((y != IGNORED).sum())))


def limited(length: int, limit: int | None, split: str) -> int:
    """Compute how many of `length` samples a limit keeps. split: "train" or "test", for messages."""
    if limit is not None and limit < 1:
        raise GradlabError(f"{split}_limit is {limit}: expected at least 1 sample, or None for all")
    return length if limit is None else min(length, limit)
