"""Layers, flattening orders and slices, against explicit loops over the paper's text."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from gradlab.errors import GradlabError
from gradlab.layout import (
    ROLES,
    Layer,
    bare_names,
    canonical_json,
    describe_difference,
    filter_axes,
    fingerprint,
    flatten,
    flatten_alike,
    layers_of,
    named_layers,
    names_as_in,
    split_slices,
    unflatten,
    unflatten_alike,
)
from gradlab.workspace import Workspace
from support.laws import law

shapes = st.lists(st.integers(0, 5), max_size=5).map(tuple)
orders = st.sampled_from(["native", "gradiveq"])


def counting(shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor whose elements tell where they stand in memory."""
    return torch.arange(int(np.prod(shape, dtype=int)), dtype=torch.float64).reshape(shape)


# --- flattening and slices ------------------------------------------------------------------------------------------


@law(shapes, orders)
def test_flattening_is_a_permutation_that_unflatten_inverts(shape: tuple[int, ...], order: str) -> None:
    tensor = counting(shape)
    vector = flatten(tensor, order)
    back = unflatten(vector, shape, order)
    assert (vector.shape, back.shape) == ((tensor.numel(),), tensor.shape)
    assert torch.equal(back, tensor)
    assert torch.equal(vector.sort().values, tensor.reshape(-1))


@law(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.sampled_from(ROLES), st.integers(1, 4))
def test_layers_of_one_shape_are_flattened_together_as_each_alone(shape: list[int], role: str, count: int) -> None:
    tensors = [torch.randn(shape) for _ in range(count)]
    vectors = flatten_alike(tensors, Workspace(), role)
    assert torch.equal(vectors, torch.stack([flatten(tensor, "gradiveq", role=role) for tensor in tensors]))
    back = unflatten_alike(vectors, shape, Workspace(), role)
    assert all(torch.equal(one, tensor) for one, tensor in zip(back, tensors, strict=True))


@pytest.mark.parametrize("shape", [(65, 515, 3, 3), (700, 401), (130, 99, 5, 5), (1100, 300, 1, 1), (70, 63, 4, 4, 4)])
def test_large_tensors_are_permuted_as_small_ones_are(shape: tuple[int, ...]) -> None:
    """They are copied tile by tile, and no edge of a tile is lost."""
    spatial = range(2, len(shape))
    for tensor in (counting(shape), counting(shape[::-1]).permute(*range(len(shape))[::-1])):
        expected = tensor.permute(*spatial, 1, 0).reshape(-1)
        vector = flatten(tensor, "gradiveq")
        assert torch.equal(vector, expected)
        assert torch.equal(unflatten(vector, shape, "gradiveq"), tensor)
        assert torch.equal(unflatten(vector.repeat_interleave(2)[::2], shape, "gradiveq"), tensor)


@law(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_gradiveq_order_is_the_papers(filters: int, depth: int, height: int, width: int) -> None:
    """Section 2: every F collocated gradients adjacent, "first along the filter depth, then width, finally height"."""
    weight = torch.randn(filters, depth, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    explicit = [
        weight[f, d, h, w] for h in range(height) for w in range(width) for d in range(depth) for f in range(filters)
    ]
    assert torch.equal(flatten(weight, "gradiveq"), torch.stack(explicit))


def test_gradiveq_order_of_other_ranks() -> None:
    matrix, sequence, volume = counting((3, 4)), counting((3, 4, 5)), counting((2, 3, 2, 2, 3))
    assert torch.equal(flatten(matrix, "gradiveq"), torch.stack([matrix[f, d] for d in range(4) for f in range(3)]))
    expected = torch.stack([sequence[f, d, x] for x in range(5) for d in range(4) for f in range(3)])
    assert torch.equal(flatten(sequence, "gradiveq"), expected)
    coordinates = [(z, y, x) for z in range(2) for y in range(2) for x in range(3)]
    expected = torch.stack([volume[f, d, z, y, x] for z, y, x in coordinates for d in range(3) for f in range(2)])
    assert torch.equal(flatten(volume, "gradiveq"), expected)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 3, 4, 5)])
def test_unknown_order_is_refused_both_ways(shape: tuple[int, ...]) -> None:
    for call in (lambda: flatten(counting(shape), "papers"), lambda: unflatten(torch.ones(120), shape, "papers")):  # type: ignore[arg-type]
        with pytest.raises(GradlabError, match="'papers': expected 'native' or 'gradiveq'"):
            call()


@law(st.integers(0, 60), st.integers(1, 70))
def test_slices_and_tail_reassemble(numel: int, slice_size: int) -> None:
    vector = torch.arange(float(numel))
    slices, tail = split_slices(vector, slice_size)
    assert slices.shape == (numel // slice_size, slice_size)
    assert tail.numel() == numel % slice_size < slice_size
    assert torch.equal(torch.cat([slices.reshape(-1), tail]), vector)
    with pytest.raises(GradlabError, match=f"slice size {-numel}"):
        split_slices(vector, -numel)


def test_filters_and_depth() -> None:
    """Depth of a grouped convolution is that of one group."""
    for shape, axes in (((16, 8, 3, 3), (16, 8)), ((12, 300), (12, 300)), ((65,), (65, 1)), ((), (1, 1))):
        assert filter_axes(Layer("a", shape)) == axes
    (layer,) = layers_of(nn.Conv2d(8, 16, 3, groups=4, bias=False))
    assert filter_axes(layer) == (16, 2)


# --- layers of a model ----------------------------------------------------------------------------------------------


class Everything(nn.Module):
    """One parameter of each role."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))
        self.conv = nn.Conv2d(3, 4, 3)
        self.up = nn.ConvTranspose1d(4, 2, 3, bias=False)
        self.batch = nn.BatchNorm2d(4)
        self.layer = nn.LayerNorm(4)
        self.group = nn.GroupNorm(2, 4)
        self.rms = nn.RMSNorm(4)
        self.embedding = nn.Embedding(5, 4)
        self.bag = nn.EmbeddingBag(5, 4)
        self.head = nn.Linear(4, 2)
        self.attention = nn.MultiheadAttention(4, 2)


def test_roles() -> None:
    assert {layer.name: layer.role for layer in layers_of(Everything())} == {
        "scale": "other",
        "conv.weight": "convolution",
        "conv.bias": "bias",
        "up.weight": "transposed_convolution",
        "batch.weight": "normalization",
        "batch.bias": "bias",
        "layer.weight": "normalization",
        "layer.bias": "bias",
        "group.weight": "normalization",
        "group.bias": "bias",
        "rms.weight": "normalization",
        "embedding.weight": "embedding",
        "bag.weight": "embedding",
        "head.weight": "linear",
        "head.bias": "bias",
        "attention.in_proj_weight": "linear",
        "attention.in_proj_bias": "bias",
        "attention.out_proj.weight": "linear",
        "attention.out_proj.bias": "bias",
    }


def test_layers_are_the_models_parameters_in_order() -> None:
    """Those that are trained; one that is shared once, under its first name."""
    model = Everything()
    expected = list(model.named_parameters())
    pairs = named_layers(model)
    assert [layer.name for layer, _ in pairs] == [name for name, _ in expected]
    assert all(ours is theirs for (_, ours), (_, theirs) in zip(pairs, expected, strict=True))
    assert [layer.shape for layer, _ in pairs] == [tuple(parameter.shape) for _, parameter in expected]
    tied = nn.ModuleDict({"embedding": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    tied["head"].weight = tied["embedding"].weight
    assert layers_of(tied) == (Layer("embedding.weight", (5, 4), "embedding"),)
    tied["embedding"].weight.requires_grad_(False)
    assert layers_of(tied) == ()


class Wrapper(nn.Module):
    """Names its child as DDP does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_wrappers_leave_no_trace_in_names() -> None:
    """DDP, torch.compile, both in either order, and torch.compile of a part give the bare model's layers."""
    bare = layers_of(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(2, 2)))

    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(2, 2))

    assert layers_of(Wrapper(model())) == bare
    assert layers_of(torch.compile(model(), backend="eager")) == bare
    assert layers_of(torch.compile(Wrapper(model()), backend="eager")) == bare
    assert layers_of(Wrapper(torch.compile(model(), backend="eager"))) == bare
    partly = model()
    partly[0] = torch.compile(partly[0], backend="eager")
    assert layers_of(Wrapper(partly)) == bare


def test_bare_names() -> None:
    for name, bare in {
        "conv.weight": "conv.weight",
        "module.conv.weight": "conv.weight",
        "module._orig_mod.conv.weight": "conv.weight",
        "_orig_mod.module.conv.weight": "conv.weight",
        "block._orig_mod.conv.weight": "block.conv.weight",
        "block.module.weight": "block.module.weight",
        "modules.weight": "modules.weight",
        "module": "module",
    }.items():
        assert bare_names([name]) == [bare]


_PARTS = st.sampled_from(["module", "_orig_mod", "up", "weight"])
_NAMES = st.lists(st.lists(_PARTS, min_size=1, max_size=4).map(".".join), min_size=1, max_size=6, unique=True)


@law(_NAMES, st.integers(0, 2))
def test_bare_names_differ_as_the_names_do_and_know_no_ddp(names: list[str], times: int) -> None:
    bare = bare_names(names)
    assert len(set(bare)) == len(names)
    assert bare_names([f"{'module.' * times}{name}" for name in names]) == bare
    assert bare_names(bare) == bare


class WithModule(nn.Module):
    """Calls a part `module`, as DDP does, beside a parameter of the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.module = nn.Linear(4, 4)
        self.module.module = nn.Linear(4, 4)  # type: ignore[assignment]


def test_a_part_that_is_called_module_keeps_its_name() -> None:
    names = [name for name, _ in WithModule().named_parameters()]
    forms = (
        WithModule(),
        Wrapper(WithModule()),
        torch.compile(WithModule(), backend="eager"),
        Wrapper(torch.compile(WithModule(), backend="eager")),
    )
    for form in forms:
        assert sorted(layer.name for layer in layers_of(form)) == sorted(names)
    frozen = WithModule()
    frozen.weight.requires_grad_(False)
    assert {layer.name for layer in layers_of(frozen)} < set(names), "no name depends on what is trained"


def test_plans_that_name_no_module_are_known_again() -> None:
    names = ["head.weight", "module.weight"]
    assert names_as_in(["head.weight", "weight"], names) == ["head.weight", "weight"]
    assert names_as_in(names, names) == names
    assert names_as_in(["other"], names) == names


# --- descriptions ---------------------------------------------------------------------------------------------------

names = st.text(min_size=1, max_size=8)
layer_values = st.builds(Layer, names, shapes, st.sampled_from(ROLES))
layer_lists = st.lists(layer_values, max_size=5, unique_by=lambda layer: layer.name).map(tuple)


@law(layer_values)
def test_a_layer_round_trips_as_json(layer: Layer) -> None:
    assert Layer.from_json(layer.to_json()) == layer
    assert layer.numel == np.prod(layer.shape, dtype=int)


def test_what_is_no_layer_is_refused() -> None:
    shapes = (None, 4, "33", [3, -1], [3.0], [True], [2**63], [2**30, 2**30], [2**40] * 1000)
    names, roles = ("", 3, None), ("conv", [])
    changes = [{"name": name} for name in names] + [{"role": role} for role in roles] + [{"shape": x} for x in shapes]
    for change in changes:
        with pytest.raises(GradlabError, match="not a layer description") as error:
            Layer.from_json({"name": "a", "shape": [3, 3], "role": "linear"} | change)
        assert len(str(error.value)) < 300
    for value in (None, [], "a", 3):
        with pytest.raises(GradlabError, match="must be an object"):
            Layer.from_json(value)


@law(layer_lists, layer_lists)
def test_a_difference_shows_exactly_when_names_shapes_or_order_differ(
    expected: tuple[Layer, ...], actual: tuple[Layer, ...]
) -> None:
    same = [(layer.name, layer.shape) for layer in expected] == [(layer.name, layer.shape) for layer in actual]
    assert (describe_difference(expected, actual) == []) == same
    assert (fingerprint(expected) == fingerprint(actual)) == same


def test_the_difference_names_what_differs() -> None:
    expected = (Layer("a", (2,)), Layer("b", (3, 3)), Layer("c", ()))
    actual = (Layer("b", (3, 4)), Layer("c", ()), Layer("d", (5,)))
    assert describe_difference(expected, actual) == [
        "- a [2]: expected, not in the model",
        "~ b: expected shape [3, 3], the model has [3, 4]",
        "+ d [5]: in the model, not expected",
    ]
    assert describe_difference(expected, expected[::-1]) == ["the same layers in another order"]
    assert describe_difference(expected, expected) == []


def test_the_fingerprint_is_of_names_and_shapes_alone() -> None:
    """The text that is hashed is fixed: an artifact fits its model in every version."""
    layers = (Layer("a.weight", (2, 3), "linear"), Layer("a.bias", (2,), "bias"))
    text = '[["a.weight",[2,3]],["a.bias",[2]]]'
    assert fingerprint(layers) == hashlib.sha256(text.encode()).hexdigest()
    assert fingerprint(replace(layer, role="other") for layer in layers) == fingerprint(layers)
    assert fingerprint(layers[::-1]) != fingerprint(layers)


@law(st.dictionaries(st.text(max_size=5), st.integers() | st.floats(allow_nan=False, allow_infinity=False)))
def test_canonical_json_does_not_depend_on_insertion_order(value: dict[str, float]) -> None:
    backwards = dict(reversed(list(value.items())))
    assert canonical_json(value) == canonical_json(backwards)
    assert canonical_json({"a": [1, 2.5], "b": None}) == '{"a":[1,2.5],"b":null}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json([float("nan")])
