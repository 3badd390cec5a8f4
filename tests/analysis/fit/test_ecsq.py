"""A plan of ecsq with tables fitted on a recording, and the command that writes it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gradlab.analysis.fit.ecsq import with_fitted_tables
from gradlab.analysis.replay import replay
from gradlab.artifact import Artifact
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan import Plan
from gradlab.plan.plan import learned_tensors
from gradlab.trace import Trace
from support.command_line import Command
from support.recorded import random_gradients, record

LAYERS = (Layer("large", (40, 60), "linear"), Layer("small", (40, 60), "linear"), Layer("bias", (40,), "bias"))
STEPS = 12


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Normal gradients, of which one matrix's are a tenth of the other's."""
    gradients = random_gradients(0, STEPS, 2, LAYERS)
    for step in gradients:
        for rank in step:
            rank["small"] *= np.float32(0.1)
    return record(tmp_path_factory.mktemp("trace") / "trace", gradients, LAYERS)


def test_fitted_tables_are_measured_on_iterations_that_they_were_not_fitted_on(trace: Trace, tmp_path: Path) -> None:
    """Those of the earlier half alone fit nothing else, and at equal bits they miss no more."""
    plain = Plan.uniform(trace.model_layers, "ecsq", wrappers=(), bits=0.4)
    fitted = with_fitted_tables(trace, plain)
    shorter = random_gradients(0, STEPS // 2, 2, LAYERS)
    for step in shorter:
        for rank in step:
            rank["small"] *= np.float32(0.1)
    alone = random_gradients(0, STEPS, 2, LAYERS)[STEPS // 2 :]
    again = with_fitted_tables(record(tmp_path / "trace", [*shorter, *alone], LAYERS), plain)
    assert again.digest == fitted.digest
    later = [replay(trace, plan).compressed[STEPS // 2 :] for plan in (plain, fitted)]
    errors = [np.mean([step.contribution_error for step in steps]) for steps in later]
    assert errors[1] <= errors[0]


def test_a_trace_without_a_later_half_is_refused(tmp_path: Path) -> None:
    short = record(tmp_path / "trace", random_gradients(0, 1, 2, LAYERS), LAYERS)
    with pytest.raises(GradlabError, match="a trace of 1 iteration, expected 2 or more"):
        with_fitted_tables(short, Plan.uniform(short.model_layers, "ecsq"))


def test_the_command_writes_the_plan_and_what_speaks_for_it(trace: Trace, gradlab: Command, tmp_path: Path) -> None:
    out = tmp_path / "ecsq.safetensors"
    code, printed, err = gradlab("fit", "ecsq", trace.path, "--bits", 0.4, "--out", out)
    assert code == 0, err
    assert printed.startswith("ecsq sends ")
    saved = Artifact.load(out)
    (group,) = saved.plan.compressed_groups
    assert (group.codec, group.settings["bits"]) == ("ecsq", 0.4)
    assert [wrap.name for wrap in group.wrappers] == ["error_feedback", "two_way"]
    code, printed, err = gradlab(
        "fit", "ecsq", trace.path, "-s", "tables=fitted", "--json", "--overwrite", "--out", out
    )
    assert code == 0, err
    assert Artifact.load(out).provenance["fitted_on"] == list(range(STEPS // 2))
    assert json.loads(printed)["replay"]["judged_steps"] == STEPS // 2
    fitted = Artifact.load(out).plan
    assert fitted.compressed_groups[0].settings["tables"] == "fitted"
    assert learned_tensors(fitted).keys() >= {f"{fitted.compressed_groups[0].name}::large/tables"}
    words = ["--error", 0.5, "--both-ways", "--warmup-steps", 3, "--overwrite", "--json"]
    code, printed, err = gradlab("fit", "ecsq", trace.path, *words, "--out", out)
    assert code == 0, err
    plan = Artifact.load(out).plan
    assert [wrap.name for wrap in plan.compressed_groups[0].wrappers] == ["error_feedback", "two_way"]
    assert plan.schedule.warmup_steps == 3
    assert gradlab("fit", "ecsq", trace.path, "--bits", 0, "--overwrite", "--out", out)[0] == 2
