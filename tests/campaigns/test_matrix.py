"""Some cells of the matrix codec x DDP option; `python tests/campaigns/matrix.py` runs them all."""

from __future__ import annotations

import pytest

from jobs.matrix_cells import OPTIONS
from support.process_pool import ProcessPool

# The options whose arithmetic is not the same outside of DDP; the others: test_executors_agree.py.
CLOSE = [name for name, option in OPTIONS.items() if option.tolerance and not option.compiled]


@pytest.mark.parametrize("option", CLOSE)
def test_cell(pool: ProcessPool, option: str) -> None:
    for verdict in pool.run("jobs.matrix_cells:run_cell", 2, row="topk + feedback", option=option):
        assert verdict.startswith("passed")


def test_mixed_precision_is_refused(pool: ProcessPool) -> None:
    for message in pool.run("jobs.matrix_cells:run_cell", 2, row="topk + feedback", option="mixed_precision"):
        assert "mixed_precision" in message


@pytest.mark.thorough
def test_two_models_in_one_process(pool: ProcessPool) -> None:
    for verdict in pool.run("jobs.matrix_cells:run_cell", 4, row="topk + feedback", option="two models"):
        assert verdict == "passed"


@pytest.mark.thorough  # as is the campaign itself
def test_compiled(pool: ProcessPool) -> None:
    for verdict in pool.run("jobs.matrix_cells:run_cell", 2, row="topk + feedback", option="compiled inside"):
        assert verdict == "passed"
