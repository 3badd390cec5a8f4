"""GradiVeQ's kernels, run by Triton's interpreter, against the PyTorch lines that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradlab import codecs
from gradlab.codec import Batch, Context, Exchanged, Tensors, exchange_group
from gradlab.collectives import LockstepResult, run_lockstep
from gradlab.layout import Layer, filter_strides, flatten
from support.by_kernels import by_kernels, work_of_steps

pytest.importorskip("triton")
LAYERS = [
    Layer("convolution", (9, 5, 2, 1), "convolution"),
    Layer("linear", (4, 33), "linear"),
    Layer("small", (3,)),  # sent as it is
    Layer("turned", (5, 9, 2), "transposed_convolution"),
    Layer("experts", (2, 8, 5), "experts"),
    Layer("embedding", (20, 6), "embedding"),
    Layer("empty", (0, 4)),
]
DRAWN: dict[str, Any] = {"ratio": 3.0, "complement": 1.0, "compressed_steps": 0}
HALF: dict[str, Any] = {"ratio": 3.0, "complement": 0.5, "sample_steps": 2, "sample_bits": 0}
WHOLE: dict[str, Any] = {"loss_threshold": 0.2, "sample_steps": 2, "sample_bits": 0, "compressed_steps": 1}


def gradients(step: int, rank: int) -> Tensors:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return {layer.name: torch.randn(layer.shape, generator=draw) for layer in LAYERS}


def steps(count: int, settings: dict[str, Any]) -> list[list[LockstepResult[Exchanged]]]:
    """All ranks' results, step by step."""
    codec, states, found = codecs.make("gradiveq", slice_size=35, **settings), [Tensors(), Tensors()], []
    for step in range(count):
        given = [Batch.of(gradients(step, rank), LAYERS) for rank in range(2)]
        runs = [exchange_group(codec, given[rank], states[rank], Context(rank, 2, step, "g")) for rank in range(2)]
        found.append(run_lockstep(runs))
        states = [result.value.state for result in found[-1]]
    return found


@pytest.mark.parametrize(("count", "settings"), [(1, DRAWN), (3, HALF), (4, WHOLE)], ids=["drawn", "half", "whole"])
def test_steps_by_kernels_are_those_of_the_lines(count: int, settings: dict[str, Any]) -> None:
    """Means, own contributions, states and bytes, to float32's rounding of sums of 35 products; without products bit
    for bit."""
    expected = steps(count, settings)
    with by_kernels() as started:
        found = steps(count, settings)
        last = found[2 if settings is WHOLE else -1][0].value
        left = last.own.compression_error()
    assert started.count("_multiply") == (0 if settings is DRAWN else 2)
    for name, error in left.items():
        torch.testing.assert_close(error + last.own[name], last.compressor_input[name])
    bound = {"rtol": 0.0, "atol": 0.0} if settings is DRAWN else {"rtol": 1e-5, "atol": 1e-5}
    for by_rank, lines in zip(found, expected, strict=True):
        for result, line in zip(by_rank, lines, strict=True):
            assert result.payload_bytes == line.payload_bytes
            for mine, other in (
                (result.value.mean, line.value.mean),
                (result.value.own, line.value.own),
                (result.value.state, line.value.state),
            ):
                assert mine.keys() == other.keys()
                for name, value in mine.items():
                    torch.testing.assert_close(value, other[name], **bound)


def test_what_is_not_finite_shows_in_its_layer_alone() -> None:
    given = gradients(0, 0)
    given["linear"][3] = torch.nan
    with by_kernels():
        codec = codecs.make("gradiveq", slice_size=35, **DRAWN)
        [done] = run_lockstep([exchange_group(codec, Batch.of(given, LAYERS), {}, Context(0, 1, 0))])
    assert [name for name, mean in done.value.mean.items() if not mean.isfinite().all()] == ["linear"]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_the_order_follows_from_distances(layer: Layer) -> None:
    strides = filter_strides(layer)
    assert strides is not None
    (filters, depth, *far), j = strides, torch.arange(layer.numel)
    places = j % max(1, filters) * far[0]
    if layer.numel:
        places += j // filters % depth * far[1] + j // filters // depth * far[2]
    native = torch.arange(layer.numel).reshape(layer.shape)
    assert torch.equal(flatten(native, "gradiveq", role=layer.role), places)
    assert filter_strides(Layer("stack", (2, 3, 4, 5), "experts")) is None  # places of two axes, not one


@pytest.mark.parametrize(("settings", "most"), [(DRAWN, 5), (HALF, 6)], ids=["drawn", "half"])
def test_operations_do_not_grow_with_layers(settings: dict[str, Any], most: int) -> None:
    """Layers of several shapes: one of the operations joins their gradients, one brings coordinates. No wait."""
    few, many = (work_of_steps(lambda: codecs.make("gradiveq", slice_size=8, **settings), n, 4, 3) for n in (2, 12))
    assert few == many
    assert few.total() == most
