"""The campaign on text: rows are kept and not made twice, tables show what failed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support.benchmark_modules import benchmark_modules


@pytest.fixture(scope="module")
def campaign() -> Iterator[ModuleType]:
    with benchmark_modules("text_chars") as modules:
        yield modules["text_chars"]


def _row(method: str, validation: float | None, **other: Any) -> dict[str, Any]:
    sizes = {"predicted_payload": 1000, "payload": 1000.0, "dense_payload": 4000}
    return {
        "kind": "training", "mode": "shared", "method": method, "seed": 0, "steps": 9, "validation": validation
    } | sizes | other  # fmt: skip


def test_a_run_is_a_row_and_is_not_made_again(campaign: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be, or not to be, that is the question\n" * 20)
    for _ in range(2):
        runs = campaign.Campaign(tmp_path / "rows.jsonl", tmp_path, tmp_path / "a.txt", 2)
        runs.run("shared", "dense", 0)
    (row,) = campaign.read(tmp_path / "rows.jsonl")
    assert row["payload"] == row["predicted_payload"] == 4 * 804_096
    assert 0 < row["validation"] < 2 * math.log(65)
    assert row["version"]


def test_methods_that_diverged_or_were_refused_stand_last(campaign: ModuleType) -> None:
    rows = [
        _row("top-k 1 %", None),
        _row("dense", 2.0),
        {
            "kind": "training",
            "mode": "shared",
            "method": "QSGD 4 bits, max norm",
            "seed": 0,
            "steps": 9,
            "refused": "no",
        },
        _row("int8", 2.125),
    ]
    lines = campaign.table(rows, 9).splitlines()[2:]
    assert [line.split()[0] for line in lines] == ["dense", "int8", "top-k", "QSGD"]
    assert "+0.125" in lines[1]
    assert "diverged" in lines[2]
    assert "refused" in lines[3]
    assert not campaign.table(rows, 10)


def test_what_the_report_recommended_stands_beside_what_turned_out(campaign: ModuleType) -> None:
    losses = {"dense": 2.0, "float16": 2.0, "int8": 2.01, "QSGD 4 bits, max norm": 2.02, "top-k 1 %": 2.5}
    cosines = {"16-bit floats": 1.0, "int8": 0.99, "QSGD 4 bits, max norm": 0.9, "top-k 1 %": 0.3, "1-bit SGD": 0.2}
    report = {
        "kind": "report",
        "mode": "shared",
        "compute_seconds": 0.02,
        "named": {
            "at 100 Mbit/s between 4 nodes": ["top-k 1 %", "QSGD 4 bits, max norm"],
            "at 1 Gbit/s between 4 nodes": [],
            "at 10 Gbit/s between 4 nodes": ["1-bit SGD"],
        },
        "cosines": cosines,
    }
    lines = campaign.table([*(_row(*item) for item in losses.items()), report], 9).splitlines()
    assert "the report beforehand, at 20.0 ms of computing per step:" in lines
    both = "top-k 1 % (loss to dense +0.500), or QSGD 4 bits, max norm (loss to dense +0.020)"
    assert f"  at 100 Mbit/s between 4 nodes: {both}" in lines
    assert "  at 10 Gbit/s between 4 nodes: 1-bit SGD (loss to dense not trained yet)" in lines
    assert "  at 1 Gbit/s between 4 nodes: do not compress" in lines
    assert "of its order of 4 plans with the validation loss: +1.00 (no interval: 4 items" in lines[-1]


def test_every_compressing_method_is_compared_by_default_settings_it_has(campaign: ModuleType) -> None:
    """Every plan can be made, but those by layer, which need a recording."""
    layers = campaign.layers_of(campaign.WORKLOAD.model(0))
    for method in campaign.METHODS.values():
        if not method.by_layer:
            plan = method.plan(layers, 100)
            assert plan.schedule.warmup_steps == (100 if method.codec or method.published else 0)
            assert bool(plan.applies_momentum) <= (not method.momentum)
