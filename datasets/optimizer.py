"""The optimizer that a recipe names."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from gradlab.datasets.recipe import Recipe, learning_rate_at


def build_optimizer(recipe: Recipe, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Build SGD or AdamW with the recipe's settings, at the learning rate of step 0."""
    rate = learning_rate_at(recipe, 0)
    if recipe.optimizer == "adamw":
        betas = (recipe.momentum, recipe.second_momentum)
        return torch.optim.AdamW(parameters, lr=rate, betas=betas, weight_decay=recipe.weight_decay)
    return torch.optim.SGD(
        parameters, lr=rate, momentum=recipe.momentum, weight_decay=recipe.weight_decay, nesterov=recipe.nesterov
    )
