"""LGC's bytes part by part: the shapes of ResNets, and plans against what trained runs counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import ModuleType

import pytest

from support.benchmark_modules import BENCHMARKS, benchmark_modules


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


def test_kept_rows_are_what_the_plans_forecast(bytes_of_lgc: ModuleType) -> None:
    """The tables of docs/lgc.md follow from the plans of today."""
    kept = [json.loads(line) for line in (BENCHMARKS / "results" / "lgc-bytes.jsonl").read_text().splitlines()]
    runs = bytes_of_lgc.read(BENCHMARKS / "results" / "lgc-training.jsonl")
    assert [*bytes_of_lgc.table6_rows(), *bytes_of_lgc.trained_rows(runs)] == kept


def test_forecasts_of_trained_plans_are_near_what_was_counted(bytes_of_lgc: ModuleType) -> None:
    """Within 3 %, but where an autoencoder diverged and values travelled as they are."""
    runs = bytes_of_lgc.read(BENCHMARKS / "results" / "lgc-training.jsonl")
    rows = list(bytes_of_lgc.trained_rows(runs))
    far = []
    for row in rows:
        total = sum(row["ranks"][0].values())
        if abs(total / row["counted"] - 1) > 0.03:
            far.append((row["task"], row["method"]))
    assert len(rows) == 21
    assert far == [("camvid", f"LGC {pattern}, as written (text)") for pattern in ("ring", "server")]
