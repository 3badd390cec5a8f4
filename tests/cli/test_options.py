"""Meanings of the words of a command line, and refusals."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradlab import codecs
from gradlab.analysis.forecast import Network, forecast
from gradlab.analysis.forecast.diagnosis import link_to_json
from gradlab.analysis.forecast.link import Link
from gradlab.analysis.forecast.local_endings import ended_above
from gradlab.analysis.forecast.local_steps import forecast_local_steps
from gradlab.analysis.forecast.network import Profile
from gradlab.analysis.forecast.simulator import BETWEEN, SHARDS
from gradlab.analysis.replay.named_method import loaded_plans, named_methods, parse_method, plans_for, replays_of
from gradlab.artifact import Artifact
from gradlab.cli import options, predict, recommend
from gradlab.cli.console import Answer, print_json, warnings_as_lines
from gradlab.codec.registry import CODECS
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan import Plan
from gradlab.plan.recipes import METHODS
from gradlab.run_log import seconds_between
from gradlab.trace import Trace
from support.command_line import Command
from support.recorded import random_gradients, record

LAYERS = [Layer("w", (64, 32), "linear")]
PLAN = Plan.uniform(LAYERS, "topk", density=0.01)


@pytest.mark.parametrize(
    ("read", "words", "value"),
    [
        (options.workers_of, "3", 3),
        (options.share_of_loss, "1%", 0.01),
        (options.share_of_loss, "0.02", 0.02),
        (options.run_of, "run.json", Path("run.json")),
        (options.run_of, "0.3s", None),
        (options.computing_seconds, "250ms", 0.25),
        (lambda words: options.counts_of(words, "--local-steps"), "8, 30", [8, 30]),
    ],
)
def test_words_of_an_option(read: Callable[[Any], Any], words: str | None, value: object) -> None:
    assert read(words) == value


def test_links_and_nodes() -> None:
    assert options.links_of("200mbit,1gbit", "1ms") == [Link(2e8, 1e-3), Link(1e9, 1e-3)]
    assert options.nodes_of("4, 64", "400gbit") == ([4, 64], None)
    assert options.nodes_of("4", "400gbit", fsdp=True, over_nodes=True) == ([4], None)
    for fsdp, way in ((False, BETWEEN), (True, SHARDS)):
        counts, node = options.nodes_of("2x8,4x8", "10gbit", fsdp=fsdp)
        assert node is not None
        assert (counts, node.local_ranks, node.inside, node.plans) == ([2, 4], 8, Link(1e10), way)


@pytest.mark.parametrize(
    ("read", "words", "message"),
    [
        (options.workers_of, "0", "--workers 0: expected a number from 1"),
        (options.workers_of, "two", "--workers two: expected a number from 1"),
        (lambda words: options.nodes_of(words, "1gbit"), "8x", "--nodes '8x': expected numbers of nodes"),
        (lambda words: options.nodes_of(words, "1gbit"), "2x8,4x4", "expected nodes of one number of ranks"),
        (lambda words: options.nodes_of(words, "1gbit"), "2x0", "expected nodes of one number of ranks"),
        (lambda words: options.nodes_of(words, "1gbit", fsdp=True), "8", "FSDP2: parameters are sharded among"),
        (options.share_of_loss, "1% of it", "--max-loss 1% of it: expected a share of the loss"),
        (options.share_of_loss, "-1%", "--max-loss -1%: expected a share of the loss"),
        (options.share_of_loss, "some", "--max-loss some: expected a share of the loss"),
        (lambda words: options.counts_of(words, "--ranks"), "8,0", "--ranks '8,0': expected numbers from 1 with"),
        (lambda words: named_methods([words, words]), "topk", "topk: is named twice"),
        (parse_method, "tokp", "names no method .did you mean topk"),
        (parse_method, "topk:error_feedback=3", "error_feedback = 3, expected true or false"),
        (parse_method, "topk:density=7", "density = 7"),
    ],
)
def test_words_that_are_refused(read: Callable[[str], object], words: str, message: str) -> None:
    with pytest.raises(GradlabError, match=message):
        read(words)


def test_a_number_of_seconds_is_questioned_where_it_has_no_unit() -> None:
    with pytest.warns(UserWarning, match="--compute-seconds 360 is 360 seconds a step"):
        options.computing_seconds("360")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (options.computing_seconds("360s"), options.computing_seconds("3")) == (360.0, 3.0)


def test_an_answer_prints_all_that_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    Answer(["said"], ["mind this"], notes=["last"]).print()
    assert capsys.readouterr().out == "said\nwarning: mind this\nlast\n"
    with warnings_as_lines():
        warnings.simplefilter("always")
        for _ in range(2):
            warnings.warn("gradlab: once\n  only", stacklevel=1)
    assert capsys.readouterr().err == "warning: once only\n"


def test_json_is_strict(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": 1.5, "b": math.inf, "c": math.nan})
    assert json.loads(capsys.readouterr().out) == {"a": 1.5, "b": None, "c": None}


def test_two_artifacts_of_one_stem_are_two_plans(tmp_path: Path) -> None:
    paths = [tmp_path / folder / "plan.safetensors" for folder in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
        Artifact(PLAN).save(path)
    assert list(loaded_plans(paths)) == list(map(str, paths))
    assert list(loaded_plans(paths[:1])) == ["plan"]
    assert list(loaded_plans(paths[:1], taken=["plan"])) == [str(paths[0])]


def test_a_method_has_its_own_settings_and_feedback_as_given() -> None:
    [group] = parse_method("topk:density=0.5,error_feedback=false").plan_of(LAYERS).groups
    assert (dict(group.settings), [one.name for one in group.wrappers]) == ({"density": 0.5}, ["two_way"])
    assert parse_method("topk").plan_of(LAYERS).groups[0].wrappers == PLAN.groups[0].wrappers
    [group] = parse_method("PowerSGD:rank=2").plan_of(LAYERS).groups
    assert group.settings["rank"] == 2
    for name, method in METHODS.items():
        for key in method.settings:
            with pytest.raises(GradlabError, match=f"setting {key} = 'nothing'"):
                parse_method(f"{name}:{key}=nothing")


def test_code_in_a_folder_of_data_is_not_run(tmp_path: Path) -> None:
    file = tmp_path / "data" / "deep" / "mine.py"
    file.parent.mkdir(parents=True)
    file.write_text("raise SystemExit('run')\n")
    with pytest.raises(GradlabError, match="of which no code is run"):
        parse_method(str(file), not_in=tmp_path / "data")


def test_a_recording_of_one_rank_has_no_exchange(tmp_path: Path) -> None:
    record(tmp_path / "trace", random_gradients(0, 3, 1, LAYERS), LAYERS).close()
    with Trace(tmp_path / "trace") as trace, pytest.raises(GradlabError, match="there is no exchange to replay"):
        plans_for([parse_method("topk")], trace)


def test_a_forecast_is_printed_as_it_was_computed() -> None:
    network = Network([Link(1e5, 1e-4)], [4], Profile(0.01, "as given"))
    result = forecast(PLAN, network)
    answer = predict._answer(result, ["steps.svg"])
    [(_, pair)] = result.comparisons
    [row] = answer.tables[0].rows
    found = dict(zip(answer.tables[0].columns, row, strict=True))
    for column, step in (("dense step", pair.dense), ("16-bit step", pair.half), ("step", pair.compressed)):
        assert found[column] == predict.format_seconds(step.seconds)
    assert found["speed-up"] == predict.format_ratio(pair.dense.seconds / pair.compressed.seconds)
    assert found["vs 16 bits"] == predict.format_ratio(pair.half.seconds / pair.compressed.seconds)
    assert (list(answer.lines), answer.warnings, answer.notes[-1]) == ([result.verdict], result.remarks, "steps.svg")
    local = forecast_local_steps(PLAN, network, result, None, None)
    [row] = predict._local_answer(local, [8]).tables[0].rows
    assert row[3:6] == [
        predict.format_seconds(seconds)
        for seconds in (local[0].seconds(8), local[0].seconds(8, streaming=True), local[0].seconds(8, dense=True))
    ]
    assert (len(set(row[3:6])), row[6]) == (3, f"{ended_above()[8]:.2f}")


def test_one_number_of_nodes_is_recommended_for(tmp_path: Path) -> None:
    with pytest.raises(GradlabError, match="--nodes '4,8': expected one number of nodes"):
        recommend.recommend(tmp_path, tmp_path / "plan.safetensors", nodes="4,8")


def test_a_measured_link_is_asked_about_alone(tmp_path: Path) -> None:
    path = tmp_path / "link.json"
    path.write_text(json.dumps({"link": link_to_json(Link(2e8))}))
    with pytest.raises(GradlabError, match="a measured link has costs of its own: ask about it alone"):
        options.links_of(f"{path},1gbit", "100us")


@pytest.mark.parametrize(
    ("first", "last", "seconds"),
    [((3, 10.0), (5, 11.0), 0.5), ((3, 10.0), (3, 11.0), None), ((5, 1.0), (3, 2.0), None), ((3, 2.0), (5, 1.0), None)],
)
def test_seconds_of_a_step_need_steps_and_a_clock_that_goes_on(
    first: tuple[int, float], last: tuple[int, float], seconds: float | None
) -> None:
    lines = [dict(zip(("step", "time"), line, strict=True)) for line in (first, last)]
    assert seconds_between(*lines) == seconds


def test_every_codec_is_a_method() -> None:
    assert {parse_method(name).words for name in codecs.names()} == set(codecs.names())


def test_a_fitted_plan_is_judged_on_later_iterations(tmp_path: Path) -> None:
    record(tmp_path / "trace", random_gradients(0, 8, 2, LAYERS), LAYERS).close()
    with Trace(tmp_path / "trace") as trace:
        fitted = {"trace": trace.digest, "fitted_on": [0, 1, 2, 3, 4]}
        method = replace(parse_method("topk:density=0.1"), provenance=fitted)
        plans = {method.words: method.plan_of(trace.model_layers)}
        [found] = replays_of([method], plans, trace, workers=1).values()
    assert [step.iteration for step in found.judged] == [5, 6, 7]


def test_a_file_shows_the_codec_that_it_defines(
    gradlab: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CODECS, "registered", {})
    file = tmp_path / "shown_codec.py"
    file.write_text(
        "from gradlab.codecs.topk import TopK\n\n\nclass Shown(TopK):\n    name = 'shown'\n    about = TopK.about\n"
    )
    code, out, err = gradlab("methods", file, "--json")
    assert code == 0, err
    assert json.loads(out)["name"] == "shown"
    assert "register your own first" in gradlab("methods", "shown_too")[2]
