"""Reports: self-contained, escaped, complete, and never over an older one unasked."""

from __future__ import annotations

import json
import re
import subprocess
from html.parser import HTMLParser

import matplotlib
import numpy as np
import pytest

from gradlab.analysis.figures.chart import Chart, Panel, lines
from gradlab.analysis.figures.drawn import draw
from gradlab.analysis.figures.palette import method_colors, method_markers, running_mean
from gradlab.analysis.figures.style import drawing, render
from gradlab.analysis.fit.gradiveq import fit_gradiveq
from gradlab.analysis.measure.spectrum import measure_spectrum
from gradlab.analysis.questions.gradients import over_time_drawings
from gradlab.analysis.questions.runs import comparison_table, comparison_verdict, median_errors
from gradlab.analysis.replay import replay
from gradlab.analysis.report.look import Look
from gradlab.analysis.report.page import Page, inline_svg, write_page
from gradlab.analysis.report.trace_report import (
    Examination,
    summarize_trace,
    trace_sections,
    trace_verdict,
    write_comparison,
    write_trace_report,
)
from gradlab.analysis.section import Section
from gradlab.errors import GradlabError
from gradlab.executor.rules import finding
from gradlab.jsonable import plain
from gradlab.layout import Layer
from gradlab.plan import Plan
from support.recorded import random_gradients, record
from support.small_disk import fill, small_disk
from support.warm_python import python

HOSTILE = "<script>alert('x')</script>.weight"
ONE_LAYER = Look(layer_figures=1)
LAYERS = (
    Layer("conv.weight", (4, 2, 3, 3), "convolution"),
    Layer(HOSTILE, (4, 4, 3, 3), "convolution"),
    Layer("head.weight", (5, 6), "linear"),
    Layer("head.bias", (5,), "bias"),
)


class Reader(HTMLParser):
    """What a browser would load, run and index."""

    def __init__(self):
        super().__init__()
        self.tags, self.ids, self.loads, self.links, self.text = [], [], [], [], []
        self.inside = ""

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.inside = tag
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "srcset", "data", "poster") or (name.endswith("href") and tag != "a"):
                self.loads.append(value)
            if tag == "a" and name == "href":
                self.links.append(value)

    def handle_data(self, data):
        if self.inside not in ("title", "style", "script"):
            self.text.append(data)


def parse(path):
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    return reader


def run_json(name, *, seconds, accuracy, payload, replayed=None, ratio=1.0):
    """A run as the trainer writes it."""
    errors = {"steps": [], "relative": []}
    if replayed is not None:
        steps = [step for step in replayed.steps if step.contribution_error is not None]
        errors = {"steps": [s.iteration for s in steps], "relative": [1.1 * s.contribution_error for s in steps]}
    return {
        "name": name,
        "workload": "digits & <friends>",
        "world_size": 2,
        "steps": 12,
        "warmup_steps": 3,
        "final_score": accuracy,
        "final_loss": 0.5,
        "losses": [2.0 / (1 + i) for i in range(12)],
        "scores": [[4, accuracy / 2], [8, accuracy * 0.9], [12, accuracy]],
        "step_seconds": seconds,
        "time": {"compute": 0.8 * seconds, "compress": 0.001, "communicate": 0.3 * seconds, "wait": 0.2 * seconds},
        "payload_bytes_per_step": {"mean": payload, "max": payload},
        "wire_bytes_per_step": {"mean": payload, "max": payload},
        "dense_payload_bytes": 988,
        "compression_ratio": ratio,
        "errors": errors,
        "layer_errors": dict(replayed.layer_errors) if replayed is not None else {},
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One trace with a fit, replays and both reports."""
    folder, before = tmp_path_factory.mktemp("reports"), dict(matplotlib.rcParams)
    gradients, metadata = random_gradients(0, 12, 2, LAYERS), {"workload": "<b>digits</b>"}
    with record(folder / "trace", gradients, LAYERS, metadata=metadata) as trace:
        fit = fit_gradiveq(trace, samples=6, start=0, warmup_steps=3)  # compresses three of the steps it was fitted on
        topk = Plan.uniform(LAYERS, "topk", density=0.1, minimum_numel=1, warmup_steps=3)
        replays = {"gradiveq": replay(trace, fit.plan), "topk": replay(trace, topk)}
        runs = {
            "dense": run_json("dense", seconds=0.010, accuracy=0.9, payload=988),
            "gradiveq": run_json(
                "gradiveq", seconds=0.012, accuracy=0.8, payload=200, replayed=replays["gradiveq"], ratio=4.9
            ),
            "topk": run_json("topk", seconds=0.011, accuracy=0.9, payload=100, replayed=replays["topk"], ratio=9.9),
        }
        runs["topk"]["rules"] = [finding("residual_grows", "it is 9.9 times too large", 9.9, 1.0, group="a").to_json()]
        analysis = write_trace_report(trace, folder / "analysis", Examination(fit=fit, replays=replays, look=ONE_LAYER))
        comparison = write_comparison(
            folder / "comparison",
            runs=runs,
            replays=replays,
            fits={"gradiveq": fit},
            trace_summary=summarize_trace(trace),
            spectrum=measure_spectrum(trace),
        )
    return {
        "analysis": analysis,
        "comparison": comparison,
        "runs": runs,
        "replays": replays,
        "fit": fit,
        "settings_before": before,
        "settings_after": dict(matplotlib.rcParams),
    }


@pytest.mark.parametrize("which", ["analysis", "comparison"])
def test_page_needs_no_network(made, which):
    reader, text = parse(made[which]), made[which].read_text(encoding="utf-8")
    assert "http" not in text
    assert "@import" not in text
    assert not {"link", "iframe", "object", "img"} & set(reader.tags)
    assert 'id="play' not in text  # nothing was forecast
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|EventSource|eval|import)\b\s*\(", text)
    assert all(target.startswith("#") for target in reader.loads)  # uses inside a figure
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))
    assert len(reader.ids) == len(set(reader.ids))
    assert {target[1:] for target in reader.loads} <= set(reader.ids)


@pytest.mark.parametrize("which", ["analysis", "comparison"])
def test_every_figure_is_in_the_page_and_beside_it(made, which):
    folder, reader = made[which].parent, parse(made[which])
    figures = json.loads((folder / "report.json").read_text(encoding="utf-8"))["figures"]
    assert reader.tags.count("svg") == len(figures) > 5
    for figure in figures:
        svg = (folder / "figures" / f"{figure['name']}.svg").read_text(encoding="utf-8")
        assert "<text" in svg  # words stay words
        shown = (folder / "figures" / f"{figure['name']}.csv").read_text(encoding="utf-8").splitlines()
        assert shown[0] == "panel,series,x,y,low,high,value"
        assert len(shown) > 1
    assert all(
        (folder / target).is_file() for target in reader.links if not target.startswith("#") and ".pdf" not in target
    )
    assert {target[1:] for target in reader.links if target.startswith("#")} <= set(reader.ids)
    assert {path.stem for path in (folder / "figures").iterdir()} == {figure["name"] for figure in figures}


@pytest.mark.parametrize("which", ["analysis", "comparison"])
def test_names_from_outside_are_escaped(made, which):
    text = made[which].read_text(encoding="utf-8")
    assert "<script>alert(" not in text
    assert "&lt;script&gt;alert(" in text
    assert "<b>digits" not in text
    assert "<friends>" not in text


def judged(made):
    """The replays as the reports must judge them: the fitted plan by iterations after its fit."""
    return {**made["replays"], "gradiveq": made["replays"]["gradiveq"].held_out(made["fit"].provenance)}


def test_json_holds_what_the_figures_show(made):
    data = json.loads((made["comparison"].parent / "report.json").read_text(encoding="utf-8"))
    assert data["kind"] == "comparison"
    assert data["runs"] == made["runs"]
    assert data["replays"] == {name: result.to_json() for name, result in judged(made).items()}
    assert data["fits"]["gradiveq"] == made["fit"].provenance
    assert len(data["spectrum"]["layers"]) == 3
    data = json.loads((made["analysis"].parent / "report.json").read_text(encoding="utf-8"))
    assert data["trace"]["metadata"]["workload"] == "<b>digits</b>"
    assert data["fit"] == made["fit"].provenance


def body_words(path):
    return " ".join(" ".join(parse(path).text).split())


def test_first_line_is_the_verdict_and_warnings_follow(made):
    words = body_words(made["comparison"])
    assert words.startswith("Predicted and observed: digits & <friends> Compression does not pay on this link")
    assert body_words(made["analysis"]).startswith("Gradients of <b>digits</b> The GradiVeQ fit holds nothing that")
    assert made["fit"].warnings[0] in body_words(made["analysis"])
    assert "topk, in training: a: it is 9.9 times too large; the codec enlarges the residual" in words


def test_table_sets_predicted_beside_observed(made):
    words = body_words(made["comparison"])
    table = comparison_table(made["runs"], {name: result.to_json() for name, result in judged(made).items()})
    assert " ".join(table.columns) in words
    for row in table.rows:
        assert " ".join(row) in words
    predicted, observed = median_errors(made["replays"]["topk"].to_json(), made["runs"]["topk"])
    assert observed == pytest.approx(1.1 * predicted)


def test_an_older_report_stays_unless_asked(made, tmp_path):
    page = Page("t", "v", {"value": 1})
    path = write_page(page, tmp_path / "r")
    before = path.read_bytes()
    with pytest.raises(GradlabError, match=r"report\.html exists already: choose another name or ask to overwrite"):
        write_page(Page("other", "v", {}), tmp_path / "r")
    assert path.read_bytes() == before
    write_page(Page("other", "v", {}), tmp_path / "r", overwrite=True)
    assert b"other" in path.read_bytes()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(GradlabError, match="file is a file; a report is a folder"):
        write_page(page, tmp_path / "file")
    with pytest.raises(GradlabError, match="exists already"):
        write_comparison(tmp_path / "r", runs=made["runs"], replays={})


def test_a_full_disk_leaves_the_older_report(tmp_path):
    with small_disk(tmp_path, 2**20) as disk:
        write_page(Page("older", "v", {}), disk / "r")
        before = {file: file.read_bytes() for file in disk.rglob("*") if file.is_file()}
        fill(disk, 8192)
        full = {file: file.read_bytes() for file in disk.rglob("*") if file.is_file()}
        for folder in ("r", "new"):
            with pytest.raises(GradlabError, match=f"cannot write the report to .*{folder}: No space left on device"):
                write_page(Page("newer", "v", {"much": list(range(9000))}), disk / folder, overwrite=True)
            assert {file: file.read_bytes() for file in disk.rglob("*") if file.is_file()} == full
        assert before.items() <= full.items()
        assert not (disk / "new").exists()


def test_equal_charts_give_equal_files(tmp_path, made, monkeypatch):
    monkeypatch.setattr("gradlab.analysis.figures.drawn.render", render)  # PDFs, too
    drawings = over_time_drawings(json.loads((made["analysis"].parent / "report.json").read_text())["spectrum"])
    page, folders = Page("t", "v", {}, sections=[Section("s", "Norms", drawings=drawings[:1])]), []
    for name in ("a", "b"):
        path = write_page(page, tmp_path / name)
        assert [(path.parent / target).is_file() for target in parse(path).links if target.endswith(".pdf")] == [True]
        folders.append({file.name: file.read_bytes() for file in (path.parent / "figures").iterdir()})
    assert folders[0] == folders[1]
    files = {name.split(".")[1]: content for name, content in folders[0].items()}
    assert files.keys() == {"svg", "pdf", "csv"}
    assert files["pdf"].startswith(b"%PDF")


def test_what_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(GradlabError, match="cannot write the report to"):
        write_page(Page("t", "v", {}), tmp_path / "file" / "r")


def test_a_comparison_needs_a_run(tmp_path):
    with pytest.raises(GradlabError, match="at least one run"):
        write_comparison(tmp_path / "r", runs={}, replays={})


def test_a_trace_of_one_rank_has_no_agreement(tmp_path):
    with record(tmp_path / "t", random_gradients(1, 4, 1, LAYERS), LAYERS) as trace:
        data = {"fit": None, "replays": {}, "spectrum": dict(plain(measure_spectrum(trace)))}
    names = [figure.name for section in trace_sections(data, ONE_LAYER) for figure in section.all_drawings]
    assert "agreement" not in names
    assert "norms" in names
    assert "A recording alone does not say that compression pays" in trace_verdict(data)


def test_bare_runs_draw(tmp_path, made):
    bare = {"name": "dense", "losses": [1.0, 0.5]}
    page = write_comparison(tmp_path / "r", runs={"dense": bare}, replays={"topk": made["replays"]["topk"]})
    assert "cannot be told" in body_words(page)


def test_many_layers_have_a_colour_bar():
    names = [f"block{number}.conv" for number in range(9)]
    with drawing():
        chart = Chart([Panel([lines([1, 2], [number, 3]) for number in range(9)])], layers=names)
        text = render(draw(chart), "many", ["svg"])["svg"].decode()
    assert [word in text for word in ("first:", "block0.conv", "last:", "block8.conv", "block4.conv")] == [
        *[True] * 4,
        False,
    ]


@pytest.mark.parametrize("which", ["analysis", "comparison"])
def test_a_fitted_plan_is_judged_by_what_came_after_its_fit(made, which):
    data = json.loads((made[which].parent / "report.json").read_text(encoding="utf-8"))
    alone, summary = made["replays"]["gradiveq"].summary().to_json(), data["replays"]["gradiveq"]["summary"]
    assert (summary["judged_steps"], summary["in_sample"]["steps"], alone["judged_steps"]) == (6, 3, 9)
    assert alone["aggregate_error"] < summary["aggregate_error"]
    (warning,) = [line for line in data["warnings"] if "Only the 6 later iterations are a prediction" in line]
    assert warning.startswith("gradiveq: The plan was fitted on 3 of the compressed iterations")
    assert warning in body_words(made[which])
    name = {"analysis": "replay_errors", "comparison": "errors"}[which]
    assert "iterations fitted on" in (made[which].parent / "figures" / f"{name}.svg").read_text(encoding="utf-8")


def test_predicted_and_observed_errors_are_of_the_same_later_iterations(made):
    replayed = judged(made)["gradiveq"]
    predicted, observed = median_errors(replayed.to_json(), made["runs"]["gradiveq"])
    assert predicted == pytest.approx(replayed.summary().contribution_error)
    assert observed == pytest.approx(1.1 * predicted)


def test_a_short_trace_gives_no_report(tmp_path):
    with (
        record(tmp_path / "t", random_gradients(3, 1, 2, LAYERS), LAYERS) as trace,
        pytest.raises(GradlabError, match="expected at least 2"),
    ):
        write_trace_report(trace, tmp_path / "r")
    assert not (tmp_path / "r").exists()


def timed(seconds, accuracy, ratio=1.0):
    return {
        "step_seconds": seconds,
        "final_score": accuracy,
        "compression_ratio": ratio,
        "ratio_to_16_bits": ratio / 2,
    }


def test_derived_verdicts_follow_the_clock_and_the_accuracy():
    slower = comparison_verdict({"dense": timed(0.010, 0.9), "topk": timed(0.0098, 0.9, 80.0)})
    assert slower.startswith("Compression does not pay on this link: a dense step takes 10.0 ms")
    assert "All methods end within 2 points of dense (90.0 %)" in slower
    faster = comparison_verdict({"dense": timed(0.010, 0.9), "topk": timed(0.005, 0.7, 80.0)})
    assert faster.startswith(
        "topk pays in time: 5.00 ms per step instead of 10.0 ms, at 80.0x fewer bytes (40.0x vs 16 bits)."
    )
    assert "Accuracy is lost by topk (70.0 %)" in faster
    assert "cannot be told" in comparison_verdict({"topk": timed(0.005, 0.7)})


def test_a_gain_that_comes_from_computing_is_not_claimed():
    dense = {**timed(0.020, 0.9), "time": {"compute": 0.015, "wait": 0.005}}
    lucky = {**timed(0.018, 0.9, 16.0), "time": {"compute": 0.011, "wait": 0.007}}
    earned = {**timed(0.018, 0.9, 16.0), "time": {"compute": 0.015, "wait": 0.003}}
    unclear = comparison_verdict({"dense": dense, "powersgd": lucky})
    assert unclear.startswith("Whether compression pays in time cannot be told here: powersgd takes 18.0 ms")
    assert "differs by 4.00 ms" in unclear
    assert comparison_verdict({"dense": dense, "powersgd": earned}).startswith("powersgd pays in time")


def test_methods_look_the_same_in_every_figure():
    few, many = method_colors(["gradiveq", "topk"]), method_colors(["dense", "mine", "topk", "powersgd", "gradiveq"])
    assert {name: many[name] for name in few} == few
    assert len(set(many.values())) == 5
    assert len(set(method_markers(many).values())) == 5


def test_running_mean_leaves_gaps_out():
    np.testing.assert_allclose(running_mean([1.0, None, 3.0, 5.0], 3), [1.0, 2.0, 4.0, 4.0])
    np.testing.assert_allclose(running_mean([1.0, 2.0], 1), [1.0, 2.0])


def test_inlined_figures_keep_their_references():
    svg = b'<?xml?><svg xmlns:xlink="http://x"><metadata>http</metadata><style type="a">*{}</style>'
    svg += b'<path id="a"/><use xlink:href="#a" s="url(#a)"/></svg>'
    assert inline_svg(svg, "f", 'say "x"') == (
        '<svg role="img" aria-label="say &quot;x&quot;"><path id="f-a"/><use href="#f-a" s="url(#f-a)"/></svg>'
    )


def test_drawing_leaves_matplotlib_as_it_was(made):
    assert made["settings_after"] == made["settings_before"]


def test_importing_and_drawing_never_load_pyplot():
    """And the PDF has the font itself, so that its words stay words."""
    code = (
        "import sys, gradlab.analysis.report.trace_report\n"
        "from gradlab.analysis.figures.style import drawing, panels, render\n"
        "with drawing(): figure, _ = panels(1, 1); pdf = render(figure, 'empty')['pdf']\n"
        "sys.exit('matplotlib.pyplot' in sys.modules or b'/FontFile2' not in pdf)"
    )
    assert subprocess.run([python(), "-c", code], check=False).returncode == 0


def test_gradients_that_never_change_get_a_report(tmp_path):
    """Nothing varies, and nothing is positive: no figure may fail on a logarithmic axis, or warn."""
    layer = LAYERS[:1]
    constant = [[{layer[0].name: np.zeros(layer[0].shape, np.float32)}] * 2] * 30
    with record(tmp_path / "trace", constant, layer) as trace:
        fit = fit_gradiveq(trace, samples=10)
        page = write_trace_report(trace, tmp_path / "report", Examination(fit=fit))
    assert "figures/norms.svg" in page.read_text()
