"""The campaign on text: rows are kept and not made twice, tables show what failed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gradlab.plan.optimizer_rules import applied_by
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


def test_every_compressing_method_is_compared_by_default_settings_it_has(campaign: ModuleType) -> None:
    """Every plan can be made, but those by layer, which need a recording."""
    layers = campaign.layers_of(campaign.WORKLOAD.model(0))
    for method in campaign.METHODS.values():
        if not method.by_layer:
            plan = method.plan(layers, 100)
            assert plan.schedule.warmup_steps == (100 if method.codec or method.published else 0)
            assert bool(applied_by(plan)[0]) <= (not method.momentum)
