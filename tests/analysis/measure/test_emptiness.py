"""A recording without gradients is refused; ranks and layers without them are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gradlab.analysis import examine
from gradlab.analysis.measure.emptiness import require_gradients
from gradlab.errors import GradlabError
from gradlab.trace import Trace
from support.command_line import Command
from support.recorded import LAYERS, random_gradients, record

FIRST, OTHERS = LAYERS[0].name, [layer.name for layer in LAYERS[1:]]
Changed = Callable[[int, int, str, np.ndarray], np.ndarray | float]  # of a step, a rank, a layer and its gradient


def written(path: Path, changed: Changed, steps: int = 5) -> Trace:
    """Record random gradients of two ranks, changed."""
    found = random_gradients(0, steps, 2)
    for step, ranks in enumerate(found):
        for rank, layers in enumerate(ranks):
            for name, value in layers.items():
                layers[name] = np.full_like(value, 1) * changed(step, rank, name, value)
    return record(path / "trace", found)


@pytest.mark.parametrize(
    ("value", "why"), [(0.0, "every gradient in iterations 0, 2, 4 is zero"), (np.nan, "no layer in")]
)
def test_nothing_is_refused(gradlab: Command, tmp_path: Path, value: float, why: str) -> None:
    with written(tmp_path, lambda *of: value) as trace, pytest.raises(GradlabError, match=why):
        examine(trace)
    code, out, err = gradlab("recommend", trace.path, "--out", tmp_path / "plan", "--compute-seconds", "0.2s")
    assert (code, out, err.count("\n"), why in err) == (2, "", 1, True)


@pytest.mark.parametrize(
    ("changed", "remarks"),
    [
        (lambda step, rank, name, value: value, []),
        # A layer with a gradient in one of the iterations that are read has gradients.
        (lambda step, rank, name, value: value * (step == 2), []),
        (
            lambda step, rank, name, value: value * (name != FIRST),
            [f"No plan is judged on {FIRST}: zero in iterations 0, 2, 4."],
        ),
        (
            lambda step, rank, name, value: value if rank or name == FIRST else np.inf,
            [f"No plan is judged on {', '.join(OTHERS)}: not finite in iterations 0, 2, 4."],
        ),
        (
            lambda step, rank, name, value: value * rank,
            ["Every gradient of rank 0 is zero in iterations 0, 2, 4: check that it sees data of its own."],
        ),
        (
            lambda step, rank, name, value: step + 1.0,
            ["All ranks have the same gradient in iteration 4: check that each of them sees data of its own."],
        ),
    ],
)
def test_ranks_and_layers_are_named(tmp_path: Path, changed: Changed, remarks: list[str]) -> None:
    with written(tmp_path, changed) as trace:
        assert require_gradients(trace) == remarks
