"""What is refused, or warned of, before a run: each in one line that names it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from gradlab.errors import GradlabError
from gradlab.layout import named_layers
from gradlab.plan import Group, Plan
from gradlab.runtime.checks import check
from gradlab.runtime.engine.options import RunOptions


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("deterministic", "no", "deterministic = 'no', expected True or False"),
        ("hold_unused", 1, "hold_unused = 1, expected True or False"),
        ("rules", 5, "rules = 5, expected one of ignore, warn, error"),
        ("rules", {"loud": "warn"}, "there is no rule 'loud'"),
        ("scaler", 5, "scaler is int, expected a GradScaler"),
        ("optimizer", "sgd", "optimizer is str, expected a torch optimizer"),
    ],
)
def test_options_are_named_with_what_came_and_what_was_expected(option: str, value: Any, message: str) -> None:
    with pytest.raises(GradlabError, match=message):
        RunOptions(**{option: value}).check()


def test_complex_layers_are_refused_where_they_are_compressed() -> None:
    model = nn.ModuleDict({"real": nn.Linear(8, 8), "complex": nn.Linear(8, 8, dtype=torch.complex64)})
    pairs = list(named_layers(model))
    layers = [layer for layer, _ in pairs]
    with pytest.raises(GradlabError, match=r"complex\.weight: complex parameters.*leave these layers dense"):
        check(Plan.uniform(layers, "topk", minimum_numel=9), pairs, 2, RunOptions())
    real = Group("real.weight", ("real.weight",), "topk", {"density": 0.1})
    check(Plan(tuple(layers), (real,)), pairs, 2, RunOptions())


def test_an_optimizer_of_another_model_is_warned_of() -> None:
    model, other = nn.Linear(8, 8), nn.Linear(8, 8)
    pairs = list(named_layers(model))
    plan = Plan.uniform([layer for layer, _ in pairs], "topk", minimum_numel=9)
    with pytest.warns(UserWarning, match="holds none of the model's parameters"):
        check(plan, pairs, 2, RunOptions(optimizer=torch.optim.SGD(other.parameters(), lr=0.1)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(plan, pairs, 2, RunOptions(optimizer=torch.optim.SGD([model.weight], lr=0.1)))
        check(plan, pairs, 2, RunOptions())
