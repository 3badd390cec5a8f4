"""Parameters that get another memory, layout or object after something was attached to them."""

from pathlib import Path
from typing import Any

import pytest

from support.process_pool import ProcessPool

WHEN = ["before DDP", *(f"before step {step}" for step in (0, 1, 3)), "back before step 0", "back before step 3"]


@pytest.mark.parametrize(
    ("when", "options"),
    [
        *((when, {"gradient_as_bucket_view": True}) for when in WHEN),
        *((when, {}) for when in ("before DDP", "before step 1", "back before step 0")),
        ("before step 3", {"find_unused_parameters": True}),
    ],
)
def test_a_gradient_is_seen_in_its_parameters_shape(
    pool: ProcessPool, tmp_path: Path, when: str, options: dict[str, Any]
) -> None:
    """Whenever the parameters' layout changes: by a codec as in lockstep, bit for bit, and by a recording."""
    for result in pool.run("jobs.layout_tasks:layouts_under_ddp", 2, when=when, folder=str(tmp_path), **options):
        assert result == {"compressed": True, "recorded": True, "steps": 4, "lost": 0}


@pytest.mark.parametrize("formats", [("contiguous_format", "channels_last"), ("channels_last", "contiguous_format")])
def test_old_gradients_in_a_bucket_are_refused(pool: ProcessPool, tmp_path: Path, formats: tuple[str, str]) -> None:
    """DDP hands these over where gradients are views of buckets and a convolution's layout changes on the way."""
    results = pool.run("jobs.layout_tasks:convolution_that_turns", 2, folder=str(tmp_path), formats=formats)
    for rank, result in enumerate(results):
        assert "0.weight: its gradient is in DDP's bucket in no layout of the parameter's" in result["compressed"]
        assert (result["steps"], result["lost"], result["told"]) == (3, 3, int(rank == 0))


@pytest.mark.parametrize(
    ("change", "delay"), [("nothing", 0), ("channels_last", 1), ("double", 1), ("clipped", 0), ("frozen", 1)]
)
def test_workers_stay_together_where_parameters_get_another_memory(pool: ProcessPool, change: str, delay: int) -> None:
    assert pool.run("jobs.layout_tasks:outer_step_after", 2, change=change, delay=delay) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("weight_norm", "3.weight, 3.parametrizations.weight.original0"),
        ("assigned", "0.weight, 0.bias, 3.weight and 1 more layers: unfrozen, added or replaced after"),
        ("replaced", "3.weight, 3.bias: unfrozen, added or replaced after the OuterStep was made"),
        ("unfrozen", "0.weight, 0.bias: unfrozen"),
        ("added", "4.weight, 4.bias: unfrozen, added"),
    ],
)
def test_workers_refuse_parameters_that_are_others_than_before(pool: ProcessPool, change: str, named: str) -> None:
    for line in pool.run("jobs.layout_tasks:outer_step_after", 2, change=change, delay=0):
        assert named in line
        assert "make a new OuterStep" in line


def test_weight_decay_reads_parameters_as_they_are_now(pool: ProcessPool) -> None:
    assert pool.run("jobs.layout_tasks:decays_by_present_values", 2) == [True, True]


def test_another_dtype_under_ddp_is_named(pool: ProcessPool, tmp_path: Path) -> None:
    """Autograd then drops DDP's hook, and ranks drift apart."""
    first, second = pool.run("jobs.layout_tasks:other_dtype_under_ddp", 2, folder=str(tmp_path))
    for said in (*first.values(), second["compressed before"], second["recorded before"]):
        assert "after the DDP model was made, or of another dtype or device since" in said
