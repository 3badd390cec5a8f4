"""LGC's phases timed on a trace: what an iteration of each sends, and what its time is made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gradlab.analysis.figures.lgc import plot_phases
from gradlab.analysis.figures.style import drawing
from gradlab.analysis.fit.lgc.phases import measure_phases
from gradlab.errors import GradlabError
from gradlab.executor.lockstep_plan import LockstepPlan
from gradlab.layout import Layer
from gradlab.plan import Schedule, lgc_plan
from gradlab.trace import Trace
from support.recorded import record

LAYERS = (
    Layer("stem.weight", (16, 16), "convolution"),
    Layer("mid.weight", (40, 50), "linear"),
    Layer("deep.weight", (60, 50), "linear"),
    Layer("deep.bias", (50,), "bias"),
    Layer("head.weight", (10, 50), "linear"),
)
RANKS, STEPS = 3, 3
SETTINGS = {"density": 0.2, "index_coding": "packed"}


def drawn(steps: int = STEPS, ranks: int = RANKS) -> list[list[dict[str, np.ndarray]]]:
    rng = np.random.default_rng(0)
    return [
        [{x.name: rng.standard_normal(x.shape, np.float32) for x in LAYERS} for _ in range(ranks)] for _ in range(steps)
    ]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return record(tmp_path_factory.mktemp("phases") / "t", drawn(), LAYERS)


@pytest.mark.parametrize("pattern", ["ring", "server"])
def test_each_phase_sends_what_a_run_sends_in_it(trace: Trace, pattern: str) -> None:
    """Against a run that passes through the phases: one dense iteration, two that learn, and then codes."""
    times = measure_phases(trace, pattern, **SETTINGS)
    settings = {**SETTINGS, "training_steps": 2, "most_error": 1e9, "optimizer": "adam", "loss": "mean"}
    plan = replace(lgc_plan(LAYERS, pattern, **settings), schedule=Schedule(1))
    lockstep, payloads = LockstepPlan(plan, RANKS), []
    for step, ranks in enumerate(drawn(4)):
        grads = [{name: torch.from_numpy(value) for name, value in one.items()} for one in ranks]
        payloads.append(sum(lockstep.step(step, grads).payload) / RANKS)
    full, learning, _, code = payloads  # the third broadcasts the autoencoder too
    assert times.full.payload_bytes == full == 4 * sum(x.numel for x in LAYERS)
    assert times.topk.payload_bytes == pytest.approx(learning)
    assert times.compressed.payload_bytes == pytest.approx(code)
    assert times.selected == 1000
    assert (times.pattern, times.world_size, times.iterations) == (pattern, RANKS, STEPS)


@pytest.mark.parametrize("pattern", ["ring", "server"])
def test_times_are_those_of_their_parts(trace: Trace, pattern: str, tmp_path: Path) -> None:
    """Only a phase that learns has time for it; learning has passes of all ranks forward and backward."""
    times = measure_phases(trace, pattern, **SETTINGS)
    assert min(times.selection, times.encode, times.decode) > 0
    assert times.learn > times.encode
    assert times.topk.learning_seconds == times.learn
    assert times.full.codec_seconds == times.full.learning_seconds == times.compressed.learning_seconds == 0
    assert times.topk.codec_seconds > 0
    assert times.compressed.codec_seconds > 0
    assert times.to_json()["topk"]["payload_bytes"] == times.topk.payload_bytes
    with drawing():
        figure = plot_phases({"one": times, "two": times}, 0.5, "drawn with this")
    left, right = figure.axes
    assert len(left.patches) == 3 * 6
    assert max(bar.get_y() + bar.get_height() for bar in left.patches) >= 500
    assert len(right.patches) == 2 * 4
    assert figure.get_supxlabel() == "drawn with this"
    figure.savefig(tmp_path / "phases.svg")


def test_what_cannot_be_timed_is_named(tmp_path: Path) -> None:
    alone = record(tmp_path / "alone", drawn(2, 1), LAYERS)
    with pytest.raises(GradlabError, match="one rank's gradients"):
        measure_phases(alone)
