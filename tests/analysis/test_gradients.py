"""Reading at any positions gives the rows that reading one by one gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st

from gradlab.analysis.gradients import read_positions, read_unscaled
from gradlab.trace import Trace
from support.laws import law
from support.recorded import LAYERS, random_gradients, record


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Forty steps of one rank, each with a loss scale of its own."""
    gradients = random_gradients(0, 40, 1)
    return record(tmp_path_factory.mktemp("read") / "t", gradients, loss_scale=[2.0**step for step in range(40)])


@law(st.sets(st.integers(0, 39), min_size=1), st.booleans(), examples=60)
def test_rows_are_those_read_one_by_one(trace: Trace, chosen: set[int], part: bool) -> None:
    positions, name = np.array(sorted(chosen)), LAYERS[0].name
    columns = slice(3, 17) if part else None
    rows = read_positions(trace, name, 0, positions, columns)
    alone = [read_unscaled(trace, name, 0, int(p), int(p) + 1, columns)[0] for p in positions]
    assert rows.tolist() == np.stack(alone).tolist()


def test_what_was_recorded_beside_gradients_cannot_be_written_to(trace: Trace) -> None:
    """It is put together once, and shared."""
    scalars = trace.scalars(0)
    with pytest.raises(ValueError, match="read-only"):
        scalars["loss_scale"][0] = 0
    scalars.clear()
    assert trace.scalars(0)["loss_scale"][1] == 2.0
