"""Small layers travel together by default, and each is treated as it would be alone."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from gradlab import codecs
from gradlab.errors import GradlabError
from gradlab.executor.lockstep_plan import LockstepPlan
from gradlab.layout import Layer
from gradlab.plan import Plan, Wrap
from gradlab.plan.gpu_groups import in_gpu_groups
from gradlab.plan.plan import FEWEST_SMALL, SMALL_GROUP_BYTES, SMALL_LAYER_BYTES

SHAPES = ((16, 20), (7, 40), (16, 20), (300, 1), (5, 8, 3, 3), (33, 9))
SMALL = [Layer(f"layer{at:02d}", SHAPES[at % len(SHAPES)]) for at in range(14)]
# Without random numbers, so that a group's streams do not differ from those of its layers. At the densities positions
# are packed, or a bit map.
WITHOUT_CHANCE: list[tuple[str, dict[str, Any]]] = [
    *((codec, {"density": density}) for codec in ("topk", "clt_k") for density in (0.001, 0.1, 0.7)),
    ("sampled_threshold", {"density": 0.001}),
    ("threshold", {"threshold": 1.5}),
    ("block_scaled", {"dtype": "int4"}),
    ("one_bit", {"wrappers": [Wrap("error_feedback")]}),
    ("sign", {"wrappers": [Wrap("error_feedback")]}),
    ("dct_topk", {"chunk": 8, "count": 3}),
    ("cast", {}),
]


@pytest.mark.parametrize(("codec", "settings"), WITHOUT_CHANCE)
def test_layers_of_a_group_are_what_each_is_alone_bit_for_bit(codec: str, settings: dict[str, Any]) -> None:
    plans = [Plan.uniform(SMALL, codec, **settings, **choice) for choice in ({}, {"group_bytes": 0})]
    assert [len(plan.compressed_groups) for plan in plans] == [1, len(SMALL)]
    runs = [LockstepPlan(plan, 2) for plan in plans]
    for step in range(3):
        grads = [
            {x.name: torch.randn(x.shape, generator=torch.Generator().manual_seed(97 * step + rank)) for x in SMALL}
            for rank in range(2)
        ]
        together, alone = (run.step(step, grads) for run in runs)
        means = {layer: mean for ranks in alone.exchanged.values() for layer, mean in ranks[0].mean.items()}
        (ranks,) = together.exchanged.values()
        assert all(torch.equal(mean, means[layer]) for layer, mean in ranks[0].mean.items())
        residuals = {key: value for state in runs[1].states[1].values() for key, value in state.items()}
        (state,) = runs[0].states[1].values()
        assert all(torch.equal(value, residuals[key]) for key, value in state.items() if key.endswith("/residual"))
        if codec not in ("threshold", "sampled_threshold"):  # whose sizes and positions are of the whole group
            assert together.payload[0] <= alone.payload[0]


def test_only_many_small_layers_in_a_row_share_a_group() -> None:
    large = Layer("large", (SMALL_LAYER_BYTES // 4, 1))
    few, many = SMALL[: FEWEST_SMALL - 1], SMALL[:FEWEST_SMALL]
    sizes = [len(group.layers) for group in Plan.uniform([*few, large], "topk").groups]
    assert sizes == [1] * FEWEST_SMALL
    groups = Plan.uniform([*many, large], "topk").groups
    assert [len(group.layers) for group in groups] == [FEWEST_SMALL, 1]
    assert [group.settings.get("across_layers") for group in groups] == [False, None]
    medium = [Layer(f"m{at}", (SMALL_LAYER_BYTES // 8, 1)) for at in range(70)]
    of_groups = [4 * sum(SMALL_LAYER_BYTES // 8 for _ in group.layers) for group in Plan.uniform(medium, "topk").groups]
    assert max(of_groups) <= SMALL_GROUP_BYTES
    assert len(of_groups) == 3
    assert Plan.uniform(many, "topk", across_layers=True).groups[0].settings["across_layers"] is True


def test_layers_of_a_model_on_another_device_share_large_groups() -> None:
    """Each keeps its own selection, unless groups are asked for."""
    modules = [nn.Linear(1024, width, bias=False) for width in (1024, 2048, 512, 512, 2048, 1024)]
    model = nn.Sequential(*modules)
    assert [len(group.layers) for group in Plan.uniform(model, "topk").groups] == [1] * 6
    far = model.to("meta")
    for codec in ("topk", "qsgd"):
        groups = Plan.uniform(far, codec).groups
        assert [len(group.layers) for group in groups] == [5, 1]
        assert groups[0].settings == ({"across_layers": False} if codec == "topk" else {})
    assert Plan.uniform(far, "topk", group_bytes=math.inf).groups[0].settings == {}
    assert len(Plan.uniform(far, "topk", group_bytes=0).groups) == 6
    assert len(Plan.uniform(far, "sign").groups) == 2
    assert len(Plan.uniform(far, "ecsq").groups) == 1
    for alone in ("identity", "lgc_ring"):
        assert len(Plan.uniform(far, alone).groups) == 6


@pytest.mark.parametrize("codec", codecs.names())
def test_groups_of_a_plan_become_those_of_a_model_on_another_device(codec: str) -> None:
    widths = (64, 256, 256, 700, 64, 64, 64, 64, 64, 64, 64, 64, 64, 3000, 2900, 1024)
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)), nn.LayerNorm(1024))
    made, expected = in_gpu_groups(Plan.uniform(model, codec)), Plan.uniform(model.to("meta"), codec)
    assert [(group.layers, group.name, group.wrappers) for group in made.groups] == [
        (group.layers, group.name, group.wrappers) for group in expected.groups
    ]
    shared = [[group.settings for group in plan.groups if len(group.layers) > 1] for plan in (made, expected)]
    assert shared[0] == shared[1]
    assert in_gpu_groups(made) == made


def test_groups_that_select_together_or_are_learned_stay() -> None:
    across = Plan.uniform(SMALL, "topk", across_layers=True, group_bytes=4000)
    assert len(across.groups) > 1
    assert in_gpu_groups(across) == across
    mixed = replace(across, groups=Plan.uniform(SMALL, "topk", group_bytes=0).groups)
    halves = [replace(group, settings={"density": 0.5}) for group in mixed.groups[:4]]
    joined = in_gpu_groups(replace(mixed, groups=(*halves, *mixed.groups[4:]))).groups
    assert [len(group.layers) for group in joined] == [4, len(SMALL) - 4]


def test_a_gradient_of_another_shape_than_the_plans_is_refused() -> None:
    """As many elements, laid out otherwise, would be taken for other rows and other channels."""
    grads = {layer.name: torch.ones(layer.shape) for layer in SMALL}
    grads["layer01"] = grads["layer01"].T
    wrong = r"a gradient of shape \[40, 7\] came for layer01, expected \[7, 40\]"
    with pytest.raises(GradlabError, match=wrong):
        LockstepPlan(Plan.uniform(SMALL, "topk"), 2).step(0, [grads, grads])
