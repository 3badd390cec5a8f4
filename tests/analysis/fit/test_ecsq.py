"""A plan of ecsq beside the floor and beside every other codec at no more bytes, and the command that writes it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from gradlab.analysis.fit.ecsq import compare_at_equal_bytes, with_fitted_tables
from gradlab.analysis.measure.rate_distortion import distortion_at
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


def test_at_equal_bytes_it_is_nearest_to_the_floor(trace: Trace) -> None:
    bits = 1.2
    compared = compare_at_equal_bytes(trace, Plan.uniform(trace.model_layers, "ecsq", bits=bits))
    assert compared.ecsq.bits == pytest.approx(bits, rel=0.05)
    assert compared.iterations == (STEPS // 2, STEPS - 1)
    # The two matrices' variances, known as exactly as half a dozen iterations tell.
    known = np.repeat([1.0, 0.01], 2400)
    expected = math.sqrt(distortion_at(known, compared.ecsq.bits * len(known)) / known.sum())
    assert compared.floor == pytest.approx(expected, rel=0.1)
    assert compared.floor < compared.ecsq.error < min(other.error for other in compared.others)
    assert {other.codec for other in compared.others} >= {"topk", "random_k", "clt_k"}
    assert [other.error for other in compared.others] == sorted(other.error for other in compared.others)
    # Sizes that vary are forecast, and may come out otherwise.
    assert all(other.bits <= 1.02 * compared.ecsq.bits for other in compared.others if "threshold" not in other.codec)


def test_fitted_tables_are_measured_on_iterations_that_they_were_not_fitted_on(trace: Trace, tmp_path: Path) -> None:
    """Those of the earlier half alone fit nothing else, and at equal bits they miss no more."""
    plain = Plan.uniform(trace.model_layers, "ecsq", bits=0.4)
    fitted = with_fitted_tables(trace, plain)
    shorter = random_gradients(0, STEPS // 2, 2, LAYERS)
    for step in shorter:
        for rank in step:
            rank["small"] *= np.float32(0.1)
    alone = random_gradients(0, STEPS, 2, LAYERS)[STEPS // 2 :]
    again = with_fitted_tables(record(tmp_path / "trace", [*shorter, *alone], LAYERS), plain)
    assert again.digest == fitted.digest
    errors = [compare_at_equal_bytes(trace, plan).ecsq.error for plan in (plain, fitted)]
    assert errors[1] <= errors[0]


def test_what_is_measured_is_the_replay_without_feedback(trace: Trace) -> None:
    """Of matrices alone: what is sent dense counts neither in bits nor in errors."""
    compared = compare_at_equal_bytes(trace, Plan.uniform(trace.model_layers, "ecsq", step=0.5))
    steps = replay(trace, Plan.uniform(trace.model_layers, "ecsq", wrappers=(), step=0.5)).compressed[STEPS // 2 :]
    assert compared.ecsq.error == pytest.approx(np.mean([step.contribution_error for step in steps]))
    payload = np.mean([step.payload_bytes_mean for step in steps])
    assert compared.ecsq.bits == pytest.approx(8 * (payload - 4 * 40) / 4800)


def test_a_trace_without_a_later_half_is_refused(tmp_path: Path) -> None:
    short = record(tmp_path / "trace", random_gradients(0, 1, 2, LAYERS), LAYERS)
    with pytest.raises(GradlabError, match="a trace of 1 iteration, expected 2 or more"):
        compare_at_equal_bytes(short, Plan.uniform(short.model_layers, "ecsq"))


def test_the_command_writes_the_plan_and_what_speaks_for_it(trace: Trace, gradlab: Command, tmp_path: Path) -> None:
    out = tmp_path / "ecsq.safetensors"
    code, printed, err = gradlab("fit", "ecsq", trace.path, "--bits", 0.4, "--out", out)
    assert code == 0, err
    for words in ("rate-distortion function", "bits = 0.4", "without feedback, iterations 6 to 11", "topk"):
        assert words in printed
    saved = Artifact.load(out)
    (group,) = saved.plan.compressed_groups
    assert (group.codec, group.settings["bits"]) == ("ecsq", 0.4)
    assert [wrap.name for wrap in group.wrappers] == ["error_feedback"]
    alone = saved.provenance["alone"]
    assert alone["floor"] < alone["ecsq"]["error"] < alone["others"][0]["error"]
    code, printed, err = gradlab(
        "fit", "ecsq", trace.path, "-s", "tables=fitted", "--json", "--overwrite", "--out", out
    )
    assert code == 0, err
    fitted = Artifact.load(out).plan
    assert fitted.compressed_groups[0].settings["tables"] == "fitted"
    assert learned_tensors(fitted).keys() >= {f"{fitted.compressed_groups[0].name}::large/tables"}
    words = ["--error", 0.5, "--both-ways", "--warmup-steps", 3, "--overwrite", "--json"]
    code, printed, err = gradlab("fit", "ecsq", trace.path, *words, "--out", out)
    assert code == 0, err
    assert json.loads(printed)["alone"]["ecsq"]["error"] == pytest.approx(0.5, rel=0.05)
    plan = Artifact.load(out).plan
    assert [wrap.name for wrap in plan.compressed_groups[0].wrappers] == ["error_feedback", "two_way"]
    assert plan.schedule.warmup_steps == 3
    assert gradlab("fit", "ecsq", trace.path, "--bits", 0, "--overwrite", "--out", out)[0] == 2
