"""Plans of a whole model on a trace that holds samples of its large layers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import jobs.budget_tasks as tasks
from gradlab.analysis.fit.gradiveq import NotFittable, fit_gradiveq
from gradlab.analysis.fit.lgc.fit import fit_lgc
from gradlab.analysis.fit.signs import fit_block_sizes
from gradlab.analysis.fit.uniform import uniform_artifact
from gradlab.analysis.layer_plan.lgreco import fit_lgreco
from gradlab.analysis.replay import replay
from gradlab.analysis.report.examine import examine
from gradlab.analysis.report.trace_report import summarize_trace
from gradlab.errors import GradlabError
from gradlab.plan import Plan, Wrap, lgc_plan
from gradlab.trace import Trace

STEPS = 6
SAMPLED = ("convolution.weight", "wide.weight")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("sampled")
    tasks.by_emulation(folder / "full", STEPS)
    tasks.by_emulation(folder / "part", STEPS, budget=STEPS * tasks.BUDGET // tasks.STEPS)
    return folder / "full", folder / "part"


@pytest.fixture
def full(folders: tuple[Path, Path]) -> Iterator[Trace]:
    with Trace(folders[0]) as trace:
        yield trace


@pytest.fixture
def part(folders: tuple[Path, Path]) -> Iterator[Trace]:
    with Trace(folders[1]) as trace:
        assert set(trace.samples) == set(SAMPLED)
        assert len(trace.steps) == STEPS
        yield trace


def test_a_replay_of_samples_is_of_the_whole_models_plan(full: Trace, part: Trace) -> None:
    """Cast rounds every element apart from others: its bytes are exact, its error is nearly that of all elements."""
    plan = Plan.uniform(part.model_layers, "cast", dtype="float16", minimum_dimensions=1, minimum_numel=1)
    whole, sampled = replay(full, plan), replay(part, plan)
    assert sampled.plan_digest == plan.digest
    assert sampled.dense_payload_bytes == whole.dense_payload_bytes
    assert sampled.forecast_payload_bytes == whole.forecast_payload_bytes
    for ours, theirs in zip(sampled.steps, whole.steps, strict=True):
        assert ours.payload_bytes_mean == pytest.approx(theirs.payload_bytes_mean, rel=1e-3)
        assert ours.wire_bytes_mean == pytest.approx(theirs.wire_bytes_mean, rel=1e-3)
        assert ours.contribution_error == pytest.approx(theirs.contribution_error, rel=0.2)
        norms = [sum(norm for _, norm in step.layers.values()) for step in (ours, theirs)]
        assert norms[0] == pytest.approx(norms[1], rel=0.3)
    assert any("errors are those of the samples, bytes and seconds are estimates" in line for line in sampled.remarks)
    assert not any("sample" in line for line in whole.remarks)


def test_the_errors_of_a_sample_are_those_of_its_blocks(full: Trace, part: Trace) -> None:
    """The slow way: the codec on the blocks of the full trace, divided by the share of the layer that they are."""
    name = "wide.weight"
    fit = fit_lgreco(part, "topk", {"density": 0.1}, window=1, candidates={name: ()})
    [table] = fit.problem.table.layers
    assert table.layer == full.layer(name)
    sample = part.samples[name]
    expected = []
    for rank in range(full.world_size):
        gradient = sample.take(torch.from_numpy(full.read(name, rank, 0, 1)[0]).view(sample.layer.shape))
        largest = gradient.abs().flatten().sort(descending=True).values[round(0.1 * gradient.numel()) :]
        expected.append(float(largest.double().square().sum()) / sample.share)
    assert table.squared_l2[0, 0] == pytest.approx(np.mean(expected), rel=1e-5)


def test_fits_make_plans_for_whole_layers(full: Trace, part: Trace) -> None:
    fit = fit_lgreco(part, "powersgd", {"rank": 2}, window=2)
    assert fit.plan.layers == full.layers
    assert fit.provenance.uniform_payload_bytes == Plan.uniform(full.layers, "powersgd", rank=2).payload_bytes(2)
    assert fit.provenance.sample == part.extent
    assert fit_lgreco(full, "powersgd", {"rank": 2}, window=2).provenance.sample is None
    plan = Plan.uniform(part.model_layers, "powersgd", rank=2)
    assert uniform_artifact(plan, replay(part, plan)).plan.layers == full.layers


def test_what_needs_whole_layers_is_refused_by_name_with_a_remedy(part: Trace) -> None:
    remedy = r"record these layers whole: in fewer steps \(max_steps\), with a larger budget"
    held = "holds a sample of convolution.weight"
    with pytest.raises(NotFittable, match=f"{held} and 1 more; GradiVeQ cuts whole layers into slices.*{remedy}"):
        fit_gradiveq(part, samples=3)
    with pytest.raises(GradlabError, match=f"{held} and 1 more; LGC learns .*{remedy}"):
        fit_lgc(part)
    with pytest.raises(GradlabError, match=f"{held} and 1 more; scales are shared out .*{remedy}"):
        fit_block_sizes(part, 4.0, 3)
    for plan, method in (
        (Plan.uniform(part.model_layers, "gradiveq", roles=("convolution", "linear"), warmup_steps=0), "gradiveq cuts"),
        (lgc_plan(part.model_layers, density=0.01, warmup_steps=0), "lgc_ring learned from"),
    ):
        with pytest.raises(GradlabError, match=f"holds a sample of .*; {method} .*{remedy}"):
            replay(part, plan)


def test_gradiveq_is_fitted_on_layers_that_are_held_whole(full: Trace, part: Trace) -> None:
    settings = {"samples": 3, "roles": ("linear",)}
    with pytest.raises(NotFittable, match=r"wide\.weight"):
        fit_gradiveq(part, **settings)
    smaller = Plan.uniform(full.layers, "topk", density=0.5, roles=("linear",), wrappers=[Wrap("error_feedback")])
    assert replay(part, smaller).summary().contribution_error is not None


def test_a_report_says_whether_it_is_of_a_sample(full: Trace, part: Trace) -> None:
    assert summarize_trace(full)["extent"] == "all values of 6 layers"
    summary = summarize_trace(part)
    assert summary["extent"] == part.extent
    assert summary["parameters"] == sum(layer.numel for layer in full.layers)
    result = examine(part, parts=("signs", "between", "within"))
    assert result.remarks[0] == f"Measured on a sample: the trace holds {part.extent}."
    assert any(
        line.startswith("No GradiVeQ fit: ") and "sample of convolution.weight" in line for line in result.remarks
    )
