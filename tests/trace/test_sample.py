"""Samples of layers: whole rows in aligned runs, drawn from the seed and the name alone, and how JSON holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.trace.sample import LayerSample, describe_samples, sample_layer, sampled_numel
from support.laws import law

SHAPES = st.lists(st.integers(1, 300), min_size=1, max_size=4).map(tuple)
SMALL_SHAPES = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)


@law(SHAPES, st.integers(1, 200_000), st.integers(0, 3))
def test_a_sample_is_runs_of_whole_rows_within_its_bound(shape: tuple[int, ...], numel: int, seed: int) -> None:
    layer = Layer("weight", shape, "linear")
    sample = sample_layer(layer, numel, seed)
    assert sampled_numel(layer, numel) == (sample.stored.numel if sample else layer.numel)
    if sample is None:
        return
    width = layer.numel // shape[0]
    assert sample.stored.numel <= max(numel, width)
    assert sample.stored.shape[1:] == shape[1:]
    edges = [edge for block in sample.blocks for edge in block]
    assert edges == sorted(edges)
    assert 0 <= edges[0] < edges[-1] <= shape[0]
    run = min(stop - start for start, stop in sample.blocks)
    assert all(edge % (run & -run) == 0 for edge in edges)
    assert sample_layer(layer, numel, seed) == sample


def test_heads_of_64_and_128_outputs_stay_whole() -> None:
    sample = sample_layer(Layer("attention", (3072, 1024), "linear"), 512 * 1024)
    assert sample is not None
    assert sample.stored.shape == (512, 1024)
    assert all(edge % 128 == 0 for block in sample.blocks for edge in block)


@pytest.mark.parametrize(
    ("role", "shape", "axis"),
    [
        ("linear", (1024, 512), 0),
        ("transposed_linear", (512, 1024), 1),
        ("experts", (4, 1024, 64), 1),
        ("transposed_experts", (4, 64, 1024), 2),
        ("transposed_convolution", (64, 256, 3, 3), 1),
    ],
)
def test_outputs_are_sampled_with_all_their_inputs(role: str, shape: tuple[int, ...], axis: int) -> None:
    sample = sample_layer(Layer("weight", shape, role), 2**16)
    assert sample is not None
    assert sample.axis == axis
    assert [n for n, (kept, size) in enumerate(zip(sample.stored.shape, shape, strict=True)) if kept < size] == [axis]
    whole = torch.arange(sample.layer.numel).view(shape)
    target = torch.empty(sample.stored.shape, dtype=whole.dtype)
    sample.copy(target, whole)
    assert torch.equal(target, whole.index_select(axis, torch.cat([torch.arange(*block) for block in sample.blocks])))


def test_every_stretch_of_a_layer_is_sampled() -> None:
    sample = sample_layer(Layer("packed", (3 * 1024, 256), "linear"), 3 * 128 * 256)
    assert sample is not None
    assert [start // 1024 for start, _ in sample.blocks] == [0, 1, 2]


def test_seeds_and_names_draw_other_blocks() -> None:
    def blocks(name: str, seed: int) -> tuple[tuple[int, int], ...]:
        sample = sample_layer(Layer(name, (8192, 64), "linear"), 2**16, seed)
        assert sample is not None
        return sample.blocks

    assert len({blocks("a", 0), blocks("a", 1), blocks("b", 0)}) == 3


@law(SMALL_SHAPES, st.integers(1, 30_000))
def test_a_copy_is_what_is_taken(shape: tuple[int, ...], numel: int) -> None:
    sample = sample_layer(Layer("weight", shape, "linear"), numel)
    if sample is None:
        return
    whole = torch.arange(sample.layer.numel, dtype=torch.float32).view(shape)
    target = torch.empty(sample.stored.shape)
    sample.copy(target, whole)
    assert torch.equal(target, sample.take(whole))
    assert target.flatten()[0] == sample.blocks[0][0] * (sample.layer.numel // shape[0])


def test_a_sample_survives_json() -> None:
    sample = sample_layer(Layer("weight", (4096, 64), "linear"), 2**16)
    assert sample is not None
    assert LayerSample.from_json(sample.to_json(), sample.stored, Path("t")) == sample


@pytest.mark.parametrize(
    "change",
    [
        {"blocks": []},
        {"blocks": [[0, 8], [4, 12]]},
        {"blocks": [[8, 16], [0, 8]]},
        {"blocks": [[0, 15]]},
        {"blocks": [[0.0, 16.0]]},
        {"blocks": [[56, 72]]},
        {"axis": 2},
        {"axis": 1},
        {"shape": [8, 3]},
        {"shape": "x"},
    ],
)
def test_a_sample_that_does_not_fit_is_refused(change: dict[str, Any]) -> None:
    sound = {"shape": [64, 3], "axis": 0, "blocks": [[0, 16]]}
    stored = Layer("weight", (16, 3), "linear")
    assert LayerSample.from_json(sound, stored, Path("t")).share == 0.25
    with pytest.raises(GradlabError, match="t: the sample of layer 'weight' is not sound"):
        LayerSample.from_json(sound | change, stored, Path("t"))


def test_the_description_names_shares() -> None:
    layers = [Layer("a", (1024, 64), "linear"), Layer("b", (10,), "bias")]
    assert describe_samples({}, layers) == "all values of 2 layers"
    sample = LayerSample(Layer("a", (4096, 64), "linear"), 0, ((0, 1024),))
    assert describe_samples({"a": sample}, layers) == "25.0 % of the values: 25.0 % of 1 layer (a), 1 layer whole"
