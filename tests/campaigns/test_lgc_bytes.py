"""LGC's bytes part by part: the shapes of ResNets."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from support.benchmark_modules import benchmark_modules


@pytest.fixture(scope="module")
def bytes_of_lgc() -> Iterator[ModuleType]:
    with benchmark_modules("lgc_bytes") as modules:
        yield modules["lgc_bytes"]


@pytest.mark.parametrize(
    ("model", "classes", "numel", "convolutions"),
    [
        ("ResNet-50", 1000, 25_557_032, 53),
        ("ResNet-101", 1000, 44_549_160, 104),
        ("ResNet-50", 10, 23_528_522, 53),
    ],
)
def test_the_shapes_are_those_of_the_published_networks(
    bytes_of_lgc: ModuleType, model: str, classes: int, numel: int, convolutions: int
) -> None:
    """Parameters and convolutions as everybody counts them."""
    layers = bytes_of_lgc.resnet_layers(bytes_of_lgc.BLOCKS[model], classes)
    assert sum(layer.numel for layer in layers) == numel
    assert sum(layer.role == "convolution" for layer in layers) == convolutions
    assert len({layer.name for layer in layers}) == len(layers) == 3 * convolutions + 2
