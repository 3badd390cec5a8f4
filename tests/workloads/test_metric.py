"""What reports say of a run's metric, whatever it is called and whichever way is better."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradlab.analysis.questions.runs import comparison_table, comparison_verdict, tradeoff_chart, training_chart
from gradlab.analysis.report.trace_report import write_comparison
from gradlab.datasets.metric import ACCURACY, BITS_PER_BYTE, PERPLEXITY, LogitMetric
from gradlab.metric import Metric, final_score, metric_of, scores
from gradlab.training.report import RankOutcome, measured

EVERY = (ACCURACY, PERPLEXITY, BITS_PER_BYTE)


def _run(metric: LogitMetric, values: list[float], seconds: float = 0.01) -> dict[str, Any]:
    """The report of a run of as many steps as values, as the trainer makes and a file keeps it."""
    outcome = RankOutcome([seconds] * len(values), [1.0] * len(values), list(enumerate(values, 1)))
    report = json.loads(json.dumps(measured([outcome], 100, metric)))
    bytes_ = {"mean": 100.0, "max": 100.0}
    return {**report, "payload_bytes_per_step": bytes_, "compression_ratio": 2.0}


@pytest.mark.parametrize("metric", EVERY)
def test_a_report_names_its_metric(metric: LogitMetric) -> None:
    run = _run(metric, [0.5, 0.75])
    assert metric_of([{}, run]) == Metric(**metric.to_json())
    assert scores(run) == [[1, 0.5], [2, 0.75]]
    assert final_score(run) == 0.75


def test_a_report_without_a_metric_is_of_an_accuracy_that_was_not_measured() -> None:
    assert metric_of([{}]) == Metric("accuracy", "higher", "percent")
    assert (scores({}), final_score({})) == ([], None)


def test_a_run_that_diverged_has_no_final_score() -> None:
    for value in (math.nan, math.inf, None):
        assert final_score({"final_score": value}) is None


@given(value=st.floats(0.01, 1e4), reference=st.floats(0.01, 1e4))
def test_worse_is_a_matter_of_direction(value: float, reference: float) -> None:
    higher, lower = Metric("a", "higher", "number"), Metric("b", "lower", "number")
    assert not higher.worse(reference, reference)
    assert not (higher.worse(value, reference) and lower.worse(value, reference))
    if abs(value - reference) > 0.031 * reference:
        assert higher.worse(value, reference) == (value < reference)
        assert lower.worse(value, reference) == (value > reference)
    assert lower.worse(None, reference)
    assert higher.worse(math.nan, reference)


def _verdict(metric: LogitMetric, dense: float, topk: float) -> str:
    return comparison_verdict({"dense": _run(metric, [dense], 0.02), "topk": _run(metric, [topk])})


@pytest.mark.parametrize(
    ("metric", "dense", "topk", "verdict"),
    [
        (ACCURACY, 0.9, 0.89, "All methods end within 2 points of dense (90.0 %) or above, one seed each."),
        (ACCURACY, 0.9, 0.7, "Accuracy is lost by topk (70.0 %); dense reaches 90.0 %, one seed each."),
        (PERPLEXITY, 150, 152, "All methods end within 3 % of dense (perplexity 150) or below, one seed each."),
        (PERPLEXITY, 150, 90, "All methods end within 3 % of dense (perplexity 150) or below, one seed each."),
        (PERPLEXITY, 150, 180, "Perplexity is lost by topk (180); dense reaches 150, one seed each."),
        (PERPLEXITY, 150, math.inf, "Perplexity is lost by topk (diverged); dense reaches 150, one seed each."),
        (BITS_PER_BYTE, 3.0, 3.2, "Bits per byte is lost by topk (3.20); dense reaches 3.00, one seed each."),
        (BITS_PER_BYTE, math.nan, 3.2, "Bits per byte: dense itself diverged."),
    ],
)
def test_the_verdict_goes_by_the_metric(metric: LogitMetric, dense: float, topk: float, verdict: str) -> None:
    assert _verdict(metric, dense, topk).endswith(verdict)


def test_the_verdict_says_when_nothing_was_measured() -> None:
    bare = {"step_seconds": 0.01}
    assert comparison_verdict({"dense": bare, "topk": bare}).endswith("Accuracy was not measured.")


@pytest.mark.parametrize(
    ("metric", "column", "cells"),
    [
        (ACCURACY, "final accuracy", ["75.0 %", "50.0 %"]),
        (PERPLEXITY, "final perplexity", ["0.750", "-"]),
    ],
)
def test_tables_and_figures_are_in_the_terms_of_the_metric(
    metric: LogitMetric, column: str, cells: list[str], tmp_path: Path
) -> None:
    last = math.inf if metric is PERPLEXITY else 0.5
    runs = {"dense": _run(metric, [0.9, 0.75]), "topk": _run(metric, [0.9, last])}
    table = comparison_table(runs, {})
    assert table.columns[:2] == ("method", column)
    assert [row[1] for row in table.rows] == cells
    _, tested = training_chart(runs).panels
    factor = 100 if metric is ACCURACY else 1
    drawn = [mark.y for mark in tested.marks]
    expected = [[0.9, 0.75], [0.9, math.nan if metric is PERPLEXITY else 0.5]]
    assert np.allclose(drawn, factor * np.array(expected), equal_nan=True)
    unit = ", %" if metric is ACCURACY else ""
    assert tested.y == f"test {metric.name}{unit}"
    assert tradeoff_chart({"dense": runs["dense"]}).panels[0].y == f"final test {metric.name}{unit}"
    page = write_comparison(tmp_path / "report", runs=runs, replays={})
    report = json.loads((page.parent / "report.json").read_text())
    assert f"Training: loss and {metric.name}" in [figure["title"] for figure in report["figures"]]
    assert ("accuracy" in page.read_text()) == (metric is ACCURACY)
