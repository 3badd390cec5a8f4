"""Along which axis of a matrix GradiVeQ's slices lie, and what a basis of d of K axes then loses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import strategies as st

from gradlab.codec import Batch
from gradlab.codecs.gradiveq import GradiVeQ
from gradlab.layout import Layer
from gradlab.learning.slice_pca import SLICE_AXES, default_slice_size, layer_slices, slice_order, slice_view
from gradlab.roles import ROLES
from support.laws import law

RANK = 4


def low_rank(shape: tuple[int, int], seed: int, steps: int, inputs_alone: bool = False) -> list[torch.Tensor]:
    """Gradients (outputs, inputs) of rank 4 whose row space is the same in all steps, and the column space, too,
    unless `inputs_alone`; float64."""
    generator = torch.Generator().manual_seed(seed)
    columns, rows = (torch.linalg.qr(torch.randn(n, RANK, generator=generator).double()).Q for n in shape)
    mixes = torch.randn(steps, RANK, RANK, generator=generator).double()
    free = torch.randn(steps, shape[0], RANK, generator=generator).double()
    return list((free if inputs_alone else columns @ mixes) @ rows.T)


def stored(gradient: torch.Tensor, role: str) -> torch.Tensor:
    """A gradient (outputs, inputs) as a layer of that role keeps it."""
    return gradient.T.contiguous() if role == "transposed_linear" else gradient


def later_loss(layer: Layer, gradients: list[torch.Tensor], **settings: object) -> float:
    """Energy that bases fitted on the first 60 gradients lose on the others."""
    shared = {"pooled": 100, "whitening": False, "compressed_steps": 0, **settings}
    codec = GradiVeQ(GradiVeQ.Settings(**shared))  # type: ignore[arg-type]
    codec = codec.fit([layer], {layer.name: torch.stack(gradients[:60])})
    errors = [codec.apply(Batch.of({layer.name: gradient}, [layer])).relative_error ** 2 for gradient in gradients[60:]]
    return sum(errors) / len(errors)


@pytest.mark.parametrize("role", ["linear", "transposed_linear"])
def test_rows_of_one_space_are_held_along_inputs_and_lost_along_outputs(role: str) -> None:
    """Inputs of rank 4 in every step, outputs of any direction: d = 4 axes along the inputs hold all of it; along the
    outputs a fixed basis of d of K axes holds no more than its share d / K."""
    gradients = [stored(gradient, role) for gradient in low_rank((40, 40), 1, 260, inputs_alone=True)]
    layer = Layer("w", tuple(gradients[0].shape), role)
    settings = {"slice_size": 40, "ratio": 40 / RANK}
    assert later_loss(layer, gradients, slice_axis="inputs", **settings) < 1e-10
    assert later_loss(layer, gradients, slice_axis="outputs", **settings) == pytest.approx(1 - RANK / 40, rel=0.03)


@pytest.mark.parametrize("role", ["linear", "transposed_linear"])
@pytest.mark.parametrize("shape", [(8, 64), (64, 8)])
def test_the_longer_axis_holds_a_matrix_of_rank_r_where_the_shorter_cannot(role: str, shape: tuple[int, int]) -> None:
    """At K / d = 8, the longer axis gets 8 axes, which hold rank 4; the shorter gets one, which holds a quarter."""
    gradients = [stored(gradient, role) for gradient in low_rank(shape, 2, 160)]
    layer = Layer("w", tuple(gradients[0].shape), role)
    longer, shorter = ("inputs", "outputs") if shape[1] > shape[0] else ("outputs", "inputs")
    losses = {
        axis: later_loss(layer, gradients, slice_axis=axis, slice_size=max(shape) if axis == longer else 8, ratio=8.0)
        for axis in ("outputs", "inputs")
    }
    assert losses[longer] < 1e-10
    assert losses[shorter] == pytest.approx(1 - 1 / RANK, abs=0.1)
    assert slice_view(layer) == slice_view(layer, longer)


def test_an_embedding_is_sliced_along_its_vectors() -> None:
    entries = Layer("positions", (1, 30, 20), "embedding")
    gradients = [gradient[None] for gradient in low_rank((30, 20), 3, 100, inputs_alone=True)]
    assert later_loss(entries, gradients, slice_size=20, ratio=20 / RANK) < 1e-10


@law(st.sampled_from(ROLES), st.lists(st.integers(1, 5), min_size=1, max_size=4), st.sampled_from(SLICE_AXES))
def test_slices_hold_every_element_once_whatever_the_axis(role: str, shape: list[int], axis: str) -> None:
    layer = Layer("w", tuple(shape), role)
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    view = slice_view(layer, axis)
    slices, tail = layer_slices(numbers, view, default_slice_size(view))
    found = torch.cat([slices.reshape(-1), tail])
    assert torch.equal(found.sort().values, numbers.reshape(-1))
    if axis == "auto":
        assert torch.equal(found, slice_order(layer))
    everything = GradiVeQ(GradiVeQ.Settings(ratio=1.0, complement=1.0, slice_axis=axis))
    gradient = numbers.double() + 1
    torch.testing.assert_close(everything.apply(Batch.of({"w": gradient}, [layer])).decoded["w"], gradient)


@law(st.integers(1, 9), st.integers(1, 9), st.sampled_from(SLICE_AXES))
def test_a_transposed_linear_layer_has_the_slices_of_the_linear_one(outputs: int, inputs: int, axis: str) -> None:
    numbers = torch.arange(outputs * inputs).reshape(outputs, inputs)
    linear = slice_view(Layer("w", (outputs, inputs), "linear"), axis)
    transposed = slice_view(Layer("w", (inputs, outputs), "transposed_linear"), axis)
    for size in {1, outputs, default_slice_size(linear)}:
        for one, other in zip(layer_slices(numbers, linear, size), layer_slices(numbers.T, transposed, size)):  # noqa: B905
            assert torch.equal(one, other)
    assert default_slice_size(linear) == default_slice_size(transposed)


def test_a_matrix_whose_longer_axis_exceeds_a_slice_is_sliced_along_the_other() -> None:
    head = Layer("head", (30522, 768), "linear")
    assert default_slice_size(slice_view(head)) == 2 * 768
    assert default_slice_size(slice_view(Layer("wte", (30522, 768), "embedding"))) == 2 * 768
    assert default_slice_size(slice_view(Layer("square", (64, 64), "linear"))) == 2048  # two slices, not one of 4096
