"""Two reports side by side: the numbers are those of both, and what is no report is refused."""

from __future__ import annotations

import csv
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from gradlab.analysis.forecast import Network
from gradlab.analysis.forecast.link import Link
from gradlab.analysis.forecast.network import Profile
from gradlab.analysis.report.beside import write_beside
from gradlab.analysis.report.examine import examine
from gradlab.analysis.report.look import QUICK
from gradlab.analysis.report.trace_report import write_trace_report
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan import Plan
from support.command_line import Command
from support.recorded import random_gradients, record

BODY, HEAD, OTHER = (
    Layer("<b>body</b>.weight", (48, 40), "linear"),
    Layer("head.weight", (10, 48), "linear"),
    Layer("other.weight", (12, 16), "linear"),
)


def report(folder: Path, seed: int, layers: tuple[Layer, ...], compute: float) -> Path:
    """A quick report of a small recording."""
    plans = {
        "int8": Plan.uniform(layers, "block_scaled", dtype="int8", warmup_steps=0),
        f"top-k {seed}": Plan.uniform(layers, "topk", density=0.1, warmup_steps=0),
    }
    with record(folder / "trace", random_gradients(seed, 12, 2, layers), layers) as trace:
        network = Network([Link(1e6), Link(1e9)], [2], Profile(compute, "as given"))
        examination = examine(trace, plans=plans, network=network, parts=["payoff"], look=replace(QUICK, figures=0))
        return write_trace_report(trace, folder / "report", examination).parent


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    early, late = (tmp_path_factory.mktemp(name) for name in ("early", "late"))
    return report(early, 0, (BODY, HEAD), 0.02), report(late, 1, (BODY, HEAD, OTHER), 0.01)


def read(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text())


def test_every_number_is_that_of_the_reports(two: tuple[Path, Path], tmp_path: Path) -> None:
    written = read(write_beside(*two, tmp_path / "beside").parent)
    reports = [read(folder) for folder in two]
    replays = [one["replays"]["int8"]["summary"] for one in reports]
    places = [one["payoff"]["places"] for one in reports]
    plans = written["plans"]
    assert plans["payload"]["int8"] == [one["payload_bytes_per_step"]["mean"] for one in replays]
    assert plans["cosine of the update"]["int8"] == [one["judged_cosine"] for one in replays]
    for place, where in enumerate(("1 Mbit/s", "1 Gbit/s")):
        of_both = plans[f"step at {where} between 2 nodes"]
        assert of_both["dense"] == [one[place]["dense_seconds"] for one in places]
        assert of_both["int8"] == [one[place]["seconds"]["int8"] for one in places]
    assert all("top-k" not in name for pairs in plans.values() for name in pairs)  # of one report alone
    assert [one["id"] for one in written["reports"].values()] == [one["id"] for one in reports]
    assert "different models" in written["warnings"][0]


def test_its_page_has_both_and_escapes_what_comes_from_files(two: tuple[Path, Path], tmp_path: Path) -> None:
    page = write_beside(*two, tmp_path / "beside").read_text()
    assert "&lt;b&gt;body&lt;/b&gt;.weight" in page
    assert "<b>body" not in page
    assert "In one report alone: top-k 0, top-k 1." in page
    assert "In one report alone: other.weight." in page
    for folder in two:
        assert read(folder)["brief"].split(";")[0] in page
    assert not re.findall(r"(?:src|href)=\"(?!#|figures/)[^\"]*\"", page)


def test_a_report_beside_itself_says_that_nothing_differs(two: tuple[Path, Path], tmp_path: Path) -> None:
    written = read(write_beside(two[0], two[0], tmp_path / "beside").parent)
    assert written["verdict"].endswith("all numbers within 2 % of each other.")
    assert len(written["reports"]) == 2
    assert not written["warnings"]


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda data: data | {"kind": "comparison"}, "kind is 'comparison', expected 'trace'"),
        (lambda data: [], "kind is None, expected 'trace'"),
        (
            lambda data: {key: data[key] for key in data if key != "replays"},
            "all of it is .*, expected an object with 'replays'",
        ),
        (lambda data: data | {"replays": 3}, "replays is 3, expected an object"),
        (lambda data: data | {"spectrum": {"layers": [{"name": "x"}]}}, "expected an object with 'mean_cosine'"),
    ],
)
def test_what_is_no_report_is_one_line(two, tmp_path: Path, damage, error) -> None:
    shutil.copytree(two[1], tmp_path / "damaged")
    (tmp_path / "damaged" / "report.json").write_text(json.dumps(damage(read(two[1]))))
    with pytest.raises(GradlabError, match=error):
        write_beside(two[0], tmp_path / "damaged", tmp_path / "beside")
    assert not (tmp_path / "beside").exists()


def test_the_command_prints_the_verdict_and_refuses_what_is_there(
    two: tuple[Path, Path], tmp_path: Path, gradlab: Command
) -> None:
    first, second = map(str, two)
    code, out, _ = gradlab("compare", first, second, "--out", str(tmp_path / "beside"))
    assert code == 0
    written = read(tmp_path / "beside")
    assert out.startswith(written["verdict"].split(":")[0])
    assert "different models" in out
    code, _, err = gradlab("compare", first, second, "--out", str(tmp_path / "beside"))
    assert (code, "exists already" in err) == (2, True)
    code, _, err = gradlab("compare", first, str(tmp_path), "--out", str(tmp_path / "again"))
    assert (code, "no report.json there" in err) == (2, True)


def test_negative_and_equal_numbers_are_drawn(two: tuple[Path, Path], tmp_path: Path) -> None:
    """Cosines between ranks may be negative, and a model may have one layer."""
    data = read(two[0])
    for layer in data["spectrum"]["layers"]:
        layer["mean_cosine"] = -0.1
    data["spectrum"]["layers"] = data["spectrum"]["layers"][:1]
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "report.json").write_text(json.dumps(data))
    written = read(write_beside(tmp_path / "one", tmp_path / "one", tmp_path / "beside").parent)
    *_, drawn = csv.DictReader((tmp_path / "beside" / "figures" / "beside_layers.csv").read_text().splitlines())
    assert (float(drawn["x"]), float(drawn["y"])) == (-0.1, -0.1)
    assert written["kind"] == "beside"
