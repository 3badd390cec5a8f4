"""The corpus's campaign: that runs are kept, and the table that the page shows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from gradlab.analysis.corpus.manifest import read_corpus
from gradlab.analysis.corpus.outcome import Outcome, read_outcomes
from gradlab.analysis.forecast.endings import EndingRange
from gradlab.analysis.replay.named_method import parse_method
from gradlab.formatting import parse_bytes
from gradlab.layout import layers_of
from support.benchmark_modules import BENCHMARKS, benchmark_modules
from support.recorded import random_gradients, record

KEPT = BENCHMARKS / "results" / "corpus.jsonl"


@pytest.fixture(scope="module")
def campaign() -> Iterator[ModuleType]:
    with benchmark_modules("corpus") as modules:
        yield modules["corpus"]


def test_every_method_of_the_corpus_is_one_that_evaluate_takes(campaign: ModuleType) -> None:
    layers = layers_of(campaign.baselines()["nanogpt"].task.model(0))
    digests = {parse_method(words).plan_of(layers).digest for words in campaign.METHODS.values()}
    assert len(digests) == len(campaign.METHODS)


def test_recordings_are_small_and_hold_whole_layers(campaign: ModuleType) -> None:
    """A few MB each: of every layer all values, on four ranks, in two bytes."""
    for baseline in campaign.baselines().values():
        numel = sum(layer.numel for layer in layers_of(baseline.task.model(0)))
        assert 2 * numel * campaign.RANKS * campaign.RECORDED < parse_bytes(campaign.BUDGET)


def test_the_table_shows_what_was_predicted_beside_what_was_observed(campaign: ModuleType) -> None:
    numbers = {"steps": 9, "warmup_steps": 1, "seed": 0, "payload_bytes": 500.0, "dense_payload_bytes": 4000.0}
    row = Outcome(
        "nanogpt",
        "top-k",
        "topk",
        True,
        {4: 0.51234},
        0.51234,
        4,
        0.9,
        loss=2.2,
        dense_loss=2.0,
        predicted=EndingRange(-0.001, 0.02, math.inf, 0.4, 0.6, 5),
        **numbers,
    )
    line = "| nanogpt | top-k | 500 B | 8.00x | 4.00x | 0.512 | -0.1 % to without end | +10.0 % |"
    assert campaign.table([row]).splitlines()[2:] == [line]
    assert campaign.table([replace(row, loss=None)]).endswith("| diverged |")
    ends = [replace(row, loss=2.0 * loss) for loss in (0.9, 1.1, 3.0)]
    ends = [replace(one, predicted=EndingRange(-0.001, 0.02, 0.2, 0.4, 0.6, 5)) for one in ends]
    assert campaign.agreement(ends) == "nanogpt: of 3 methods 1 ended as similar methods did, 1 below, 1 above"


def test_the_kept_rows_are_of_methods_in_their_order_on_every_recording(campaign: ModuleType) -> None:
    kept = read_outcomes(KEPT)
    methods = (campaign.OTHER_DENSE, *campaign.METHODS)
    wanted = [(recording, method) for recording in campaign.baselines() for method in methods]
    found = [(one.recording, one.method) for one in kept]
    assert found == [pair for pair in wanted if pair in found]
    assert {one.recording for one in kept} == set(campaign.baselines())
    assert all(one.words == campaign.METHODS.get(one.method, "") for one in kept)
    assert all(one.steps == campaign.baselines()[one.recording].task.recipe.steps for one in kept)


def test_a_method_that_was_not_trained_is_left_out_and_told(
    campaign: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "corpus" / "nanogpt"
    record(folder, random_gradients(0, 3, 2)).close()
    chosen = {"nanogpt": campaign.baselines()["nanogpt"]}
    assert campaign.Campaign(tmp_path, tmp_path, chosen, {"top-k 1 %": "topk"}).outcomes() == []
    assert "nanogpt: top-k 1 % is left out" in capsys.readouterr().err


def test_a_corpus_says_what_the_page_says_is_to_be_minded(campaign: ModuleType, tmp_path: Path) -> None:
    """One text: the page's own, without the items of recordings that are not there."""
    page = campaign.PAGE.read_text()
    items = campaign.caveats(page)
    flat = " ".join(page.split())
    assert len(items) >= 5
    assert all(f"- {item}" in flat for item in items)
    assert all(one.source.name in " ".join(items) for one in campaign.baselines().values())
    (folder := tmp_path / "corpus" / "nanogpt").parent.mkdir()
    record(folder, random_gradients(0, 3, 2)).close()
    one = campaign.Campaign(tmp_path, tmp_path, {"nanogpt": campaign.baselines()["nanogpt"]}, {})
    one.assemble([], "python benchmarks corpus")
    found = read_corpus(tmp_path / "corpus").manifest["caveats"]
    assert found == [item for item in items if not item.startswith("**cifar-resnet**")]
    assert len(found) == len(items) - 1
    readme = (tmp_path / "corpus" / "README.md").read_text()
    assert [line[2:] for line in readme.splitlines() if line.startswith("- ")] == found
