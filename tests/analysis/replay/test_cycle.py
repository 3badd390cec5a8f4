"""What iterations are under a plan (GradiVeQ's Fig. 6), and recorded losses over time (Fig. 7a)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from gradlab.analysis.fit.gradiveq import fit_gradiveq
from gradlab.analysis.questions.slices import cycle_chart, loss_over_time_chart
from gradlab.analysis.replay.cycle import loss_over_time, recorded_losses, training_cycle
from gradlab.artifact import Artifact
from gradlab.codecs.gradiveq import GradiVeQ
from gradlab.plan import Plan
from support.command_line import Command
from support.laws import law
from support.recorded import BIAS, CONVOLUTION, LINEAR, random_gradients, record

SETTINGS = {"slice_size": 8, "compressed_steps": 5, "sample_steps": 3, "ratio": 4.0}


@pytest.mark.parametrize("complement", [0.0, 0.5])
def test_the_phases_of_a_cycle(tmp_path: Path, complement: float) -> None:
    """3 dense iterations that bases are fitted on, 5 compressed, 3 sampled, and so on."""
    settings = GradiVeQ.Settings(**SETTINGS, reuse=2, complement=complement)
    with record(tmp_path / "t", random_gradients(0, 20, 2)) as trace:
        plan = fit_gradiveq(trace, samples=3, settings=settings).plan
        cycle = training_cycle(trace, plan)
    assert cycle.iterations == tuple(range(20))
    for group in plan.groups:
        expected = ["dense"] * 3 + ["compressed"] * 5 + (["sampled"] * 3 + ["compressed"] * 5) * 2
        [layer] = plan.members(group)
        assert cycle.layers[layer.name].phases == tuple(expected[:20])
        assert cycle.layers[layer.name].fitted_after == (10, 18)
        slices = layer.numel // 8
        assert cycle.layers[layer.name].slices == slices
        assert cycle.layers[layer.name].fitted_slices == tuple((m,) for m in range(0, slices, 2))
    together = [all(layer.phases[n] == "compressed" for layer in cycle.layers.values()) for n in range(20)]
    assert cycle.all_compressed().tolist() == together
    assert len(cycle_chart(cycle).panels) == len(plan.groups)


def test_other_codecs_are_dense_and_then_compressed(tmp_path: Path) -> None:
    with record(tmp_path / "t", random_gradients(0, 6, 2)) as trace:
        plan = Plan.uniform((CONVOLUTION, LINEAR, BIAS), "topk", density=0.1, warmup_steps=2, minimum_numel=1)
        cycle = training_cycle(trace, plan)
    assert {layer.phases for layer in cycle.layers.values()} == {("dense",) * 2 + ("compressed",) * 4}


@law(st.lists(st.booleans(), min_size=1, max_size=30), st.floats(0.1, 9), st.floats(0.1, 9))
def test_time_is_the_sum_of_steps(compressed: list[bool], dense: float, seconds: float) -> None:
    losses = np.linspace(2, 1, len(compressed))
    curve = loss_over_time(losses, np.array(compressed), dense, seconds)
    spent = 0.0
    for at, fast in enumerate(compressed):
        spent += seconds if fast else dense
        assert curve.seconds[at] == pytest.approx(spent)
    assert curve.loss == tuple(losses)
    assert loss_over_time_chart({"dense": curve}).panels[0].marks[0].label == "dense"


def test_the_command_that_draws_it(gradlab: Command, tmp_path: Path) -> None:
    with record(tmp_path / "t", random_gradients(0, 20, 2)) as trace:
        fit = fit_gradiveq(trace, samples=3, settings=GradiVeQ.Settings(**SETTINGS))
        assert recorded_losses(trace) == pytest.approx(1 / np.arange(1, 21))
    artifact = fit.artifact().save(tmp_path / "gradiveq.safetensors")
    assert Artifact.load(artifact).plan.groups[0].settings["compressed_steps"] == 5
    figure = tmp_path / "cycle.svg"
    code, out, err = gradlab("evaluate", tmp_path / "t", artifact, "--cycle", figure, "--json")
    assert (code, json.loads(out).keys()) == (0, {"gradiveq"}), err
    assert "sampled, a basis is fitted on it" in figure.read_text()
    code, _, err = gradlab("evaluate", tmp_path / "t", artifact, artifact, "--cycle", tmp_path / "other.svg")
    assert code == 2
    assert "--cycle draws the iterations of one method, not of 2" in err
