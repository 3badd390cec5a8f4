"""The digits workload: all of scikit-learn's images, and a recipe that learns them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gradlab import datasets
from gradlab.errors import GradlabError


def test_digits_are_all_of_scikit_learn_in_a_fixed_normalised_split() -> None:
    from sklearn.datasets import load_digits

    data = datasets.get("digits").load()
    assert data.train_x.shape == (1437, 1, 8, 8)
    assert data.test_x.shape == (360, 1, 8, 8)
    assert data.train_x.mean().item() == pytest.approx(0, abs=1e-5)
    assert data.train_x.std().item() == pytest.approx(1, abs=1e-5)
    pixels, classes = load_digits(return_X_y=True)
    x, y = torch.cat([data.train_x, data.test_x]).reshape(-1, 64), torch.cat([data.train_y, data.test_y])
    restored = ((x - x.min()) / (x.max() - x.min()) * 16).round().to(torch.int64)
    rows = sorted([*map(int, row), int(label)] for row, label in zip(restored, y, strict=True))
    assert rows == sorted([*map(int, row), int(label)] for row, label in zip(pixels, classes, strict=True))
    assert torch.equal(data.test_x, datasets.get("digits").load().test_x)


def test_a_limit_keeps_the_first_samples_unchanged() -> None:
    workload = datasets.get("digits")
    whole, part = workload.load(), workload.load(train_limit=10, test_limit=5000)
    assert torch.equal(part.train_x, whole.train_x[:10])
    assert torch.equal(part.test_y, whole.test_y)
    with pytest.raises(GradlabError, match="test_limit is 0"):
        workload.load(test_limit=0)


def test_digits_refuse_a_path() -> None:
    with pytest.raises(GradlabError, match="digits is bundled"):
        datasets.get("digits").load("digits.npz")


def _train(workload: datasets.Workload, data: datasets.Data, recipe: datasets.Recipe, ranks: int) -> torch.nn.Module:
    """Data-parallel SGD in one process: each rank's mean gradient, averaged over the ranks."""
    model, size = workload.model(0), len(data.train_x)
    optimizer = torch.optim.SGD(
        model.parameters(), recipe.learning_rate, recipe.momentum, weight_decay=recipe.weight_decay
    )
    orders = [datasets.batches(size, recipe.batch_size, rank, ranks, 0, recipe.steps) for rank in range(ranks)]
    generator = torch.Generator().manual_seed(0)
    for step, parts in enumerate(zip(*orders, strict=True)):
        optimizer.param_groups[0]["lr"] = datasets.learning_rate_at(recipe, step)
        optimizer.zero_grad()
        for indices in parts:
            x = workload.augment(data.train_x[indices], generator)
            (workload.loss(model(x), data.train_y[indices]) / ranks).backward()
        optimizer.step()
    return model


@pytest.mark.thorough
def test_digits_train_to_95_percent_on_two_ranks() -> None:
    workload = datasets.get("digits")
    data = workload.load()
    model = _train(workload, data, dataclasses.replace(workload.recipe, steps=200), ranks=2)
    assert workload.score(model, data.test_x, data.test_y) >= 0.95
