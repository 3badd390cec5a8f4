"""The optimizer that a recipe names, and the clipping before its step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from gradlab.datasets.recipe import Recipe, learning_rate_at

Parameters = Iterable[nn.Parameter]


def build_optimizer(recipe: Recipe, parameters: Parameters) -> torch.optim.Optimizer:
    """Build SGD or AdamW with the recipe's settings, at the learning rate of step 0.

    It has two groups, matrices first, if the recipe does not decay vectors.
    """
    rate, groups = learning_rate_at(recipe, 0), _groups(recipe, parameters)
    if recipe.optimizer == "adamw":
        betas = (recipe.momentum, recipe.second_momentum)
        return torch.optim.AdamW(groups, lr=rate, betas=betas, weight_decay=recipe.weight_decay)
    return torch.optim.SGD(
        groups, lr=rate, momentum=recipe.momentum, weight_decay=recipe.weight_decay, nesterov=recipe.nesterov
    )


def _groups(recipe: Recipe, parameters: Parameters) -> list[dict[str, Any]]:
    all_of_them = list(parameters)
    if recipe.decays_vectors:
        return [{"params": all_of_them}]
    vectors = [parameter for parameter in all_of_them if parameter.ndim < 2]
    matrices = [parameter for parameter in all_of_them if parameter.ndim >= 2]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


def clip_gradients(recipe: Recipe, parameters: Parameters) -> None:
    """Scale all gradients by min(1, clip_norm / norm), in place; nothing without a `clip_norm`.

    It comes after the exchange, so that every rank clips the same averaged gradient.
    """
    if recipe.clip_norm is not None:
        nn.utils.clip_grad_norm_(parameters, recipe.clip_norm)
