"""Some cells of the matrix codec x DDP option; `python tests/matrix.py` runs them all."""

from __future__ import annotations

import pytest
from matrix_cells import OPTIONS
from process_pool import ProcessPool

# Every option but those that take long or a world of their own, with one codec each; at 2 ranks in a part of the pool.
CODECS = ["powersgd + feedback", "topk + correction", "qsgd + two-way", "topk + feedback", "cast + feedback"]
QUICK = [name for name, option in OPTIONS.items() if not (option.compiled or option.part or option.together > 1)]
CELLS = [(CODECS[position % len(CODECS)], option) for position, option in enumerate(QUICK)]


@pytest.mark.parametrize(("row", "option"), CELLS)
def test_cell(pool: ProcessPool, row: str, option: str) -> None:
    for said in pool.run("matrix_cells:run_cell", 2, row=row, option=option):
        assert said == "passed" or (option == "mixed_precision" and "mixed_precision" in said)


def test_unused_on_all_of_four_ranks(pool: ProcessPool) -> None:
    for said in pool.run("matrix_cells:run_cell", 4, row="powersgd + feedback", option="find_unused_parameters"):
        assert said == "passed"


def test_two_models_in_one_process(pool: ProcessPool) -> None:
    for said in pool.run("matrix_cells:run_cell", 4, row="topk + feedback", option="two models"):
        assert said == "passed"


def test_compiled(pool: ProcessPool) -> None:
    for said in pool.run("matrix_cells:run_cell", 2, row="topk + feedback", option="compiled inside"):
        assert said == "passed"
