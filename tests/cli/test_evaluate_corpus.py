"""`gradlab evaluate` on a corpus and on a trace: every way to name a method, and what is refused in one line."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradlab.analysis.corpus.manifest import MANIFEST, ROWS
from gradlab.artifact import Artifact
from gradlab.codec.registry import CODECS
from gradlab.datasets import get
from gradlab.plan import Plan
from support.command_line import Command
from support.small_corpus import METHODS, NAME

PAGE = Path(__file__).parents[2] / "docs" / "add-a-codec.md"
BROKEN = """
from dataclasses import dataclass
from gradlab.codec import About, Compressor

class Broken(Compressor):
    name = "broken"
    about = About(family="quantization", formula="4 n", paper="none")

    @dataclass(frozen=True)
    class Settings:
        pass

    def compress(self, vector, generator):
        return (vector[1, 2, 3],)

    def add_decompressed(self, total, payload, scale):
        total += payload[0]

    def compressed_bytes(self, numel):
        return 4 * numel
"""


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that commands are typed in, with the tutorial's codec; what is registered goes with the test."""
    [code] = re.findall(r"^```python file=sparse_ternary.py\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    (tmp_path / "sparse_ternary.py").write_text(code)
    monkeypatch.setattr(CODECS, "registered", {})
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def judged(gradlab: Command, *words: object) -> dict[str, Any]:
    """The judgements on the one recording, by the method's words."""
    code, out, err = gradlab("evaluate", *words, "--json")
    assert code == 0, err
    return dict(json.loads(out)["judgements"][NAME])


def test_a_codec_with_settings_stands_among_the_corpuss_methods(gradlab: Command, corpus: Path, desk: Path) -> None:
    code, out, err = gradlab("evaluate", corpus, "topk:density=0.05")
    assert (code, err) == (0, "")
    assert "only 8 steps are judged" in out
    summary, ranking = out[out.index("what is judged") :].split(f"{NAME}: ResNet-10 on digits")
    assert "topk:density=0.05" in summary
    assert "2 of 3" in summary  # by cosine, between top-k 10 % and top-k 1 %
    order = [name for line in ranking.splitlines() for name in ("> topk:density=0.05", *METHODS) if name in line]
    assert order.index("top-k 1 %") < order.index("> topk:density=0.05") < order.index("16-bit floats")
    assert set(METHODS) <= set(order)


def test_judging_writes_nothing_and_counts_both_ratios(gradlab: Command, corpus: Path, desk: Path) -> None:
    words = ("topk:density=0.05", "QSGD, max norm:bits=4")
    found = judged(gradlab, corpus, *words)
    assert list(found) == list(words)
    assert all(one["codec_seconds"] > 0 for one in found.values())
    assert found["topk:density=0.05"]["memory"]
    assert found["topk:density=0.05"]["compression_ratio"] == pytest.approx(
        2 * found["topk:density=0.05"]["ratio_to_16_bits"]
    )
    assert [path.name for path in desk.iterdir()] == ["sparse_ternary.py"]


def test_a_method_of_the_corpus_gets_its_own_figures(gradlab: Command, corpus: Path, desk: Path) -> None:
    rows = {row["method"]: row for row in map(json.loads, (corpus / ROWS).read_text().splitlines())}
    found = judged(gradlab, corpus, *METHODS.values())
    for title, words in METHODS.items():
        for name in ("cosine", "length", "payload_bytes", "predicted", "aggregate_error"):
            assert found[words][name] == rows[title][name], (title, name)


def test_an_artifact_is_the_plan_that_it_holds(gradlab: Command, corpus: Path, desk: Path) -> None:
    plan = Plan.uniform(get(NAME).model(0), "topk", density=0.05)
    Artifact(plan).save(desk / "mine.safetensors")
    found = judged(gradlab, corpus, "mine.safetensors", "topk:density=0.05")
    one, other = found.values()
    for name in ("cosine", "payload_bytes", "predicted", "by_cosine", "by_bytes"):
        assert one[name] == other[name]


def test_a_codec_of_ones_own_is_named_by_its_file(gradlab: Command, corpus: Path, desk: Path) -> None:
    found = judged(gradlab, corpus, "sparse_ternary.py:density=0.05")["sparse_ternary.py:density=0.05"]
    short = judged(gradlab, corpus, "sparse_ternary:density=0.05")["sparse_ternary:density=0.05"]
    assert (
        found["payload_bytes"]
        == short["payload_bytes"]
        < judged(gradlab, corpus, "topk:density=0.05")["topk:density=0.05"]["payload_bytes"]
    )
    assert found["cosine"] == short["cosine"] > 0.1
    words = ("sparse_ternary.py", "topk:density=0.01", "qsgd")
    code, out, err = gradlab("evaluate", corpus / NAME, *words, "--json")
    assert code == 0, err
    methods = {name: replay["summary"]["methods"] for name, replay in json.loads(out).items()}
    assert list(methods) == list(words)
    assert methods["sparse_ternary.py"] == ["sparse_ternary(density=0.01) + two way from 5 ranks + feedback"]
    assert methods["topk:density=0.01"] == ["topk(density=0.01) + two way from 5 ranks + feedback"]


def test_an_artifact_of_ones_own_codec_needs_its_file_beside(gradlab: Command, corpus: Path, desk: Path) -> None:
    assert judged(gradlab, corpus, "sparse_ternary.py")
    Artifact(Plan.uniform(get(NAME).model(0), "sparse_ternary", density=0.05)).save(desk / "mine.safetensors")
    CODECS.registered.clear()
    code, out, err = gradlab("evaluate", corpus, "mine.safetensors")
    assert (code, out) == (2, "")
    assert "no codec 'sparse_ternary'" in err
    assert "mine.safetensors" in judged(gradlab, corpus, "sparse_ternary.py", "mine.safetensors")


def test_no_code_of_a_corpus_is_run(
    gradlab: Command, corpus: Path, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where the corpus's folder is the one that the command is typed in."""
    folder = Path(shutil.copytree(corpus, desk / "corpus"))
    (folder / "trap.py").write_text("from pathlib import Path\nPath('sprung').touch()\n")
    for place, words in ((desk, ("corpus", "corpus/trap.py")), (folder, (".", "trap")), (folder, (".", "./trap.py"))):
        monkeypatch.chdir(place)
        code, out, err = gradlab("evaluate", *words)
        assert (code, out) == (2, "")
        assert "of which no code is run" in err
    assert not list(desk.rglob("sprung"))


def test_what_names_no_method_or_does_not_fit_is_one_line(gradlab: Command, corpus: Path, desk: Path) -> None:
    (desk / "nothing.py").write_text("x = 1\n")
    (desk / "wrong.py").write_text("import os\nvalue = unknown\n")
    (desk / "half.py").write_text("def f(:\n")
    (desk / "broken.py").write_text(BROKEN)
    (desk / "twice.py").write_text(BROKEN + BROKEN.replace('"broken"', '"other"').replace("Broken", "Other"))
    (desk / "topk_again.py").write_text(BROKEN.replace('"broken"', '"topk"'))
    (desk / "json.py").write_text(BROKEN)
    other = Artifact(Plan.uniform(get("cifar10").model(0), "topk")).save(desk / "other.safetensors")
    late = Plan.uniform(get(NAME).model(0), "topk", warmup_steps=99)
    Artifact(late).save(desk / "late.safetensors")
    damaged = Path(shutil.copytree(corpus, desk / "damaged"))
    (damaged / MANIFEST).write_text((damaged / MANIFEST).read_text().replace("ResNet-10", "ResNet-11"))
    cases: dict[str, list[object]] = {
        "tokp: names no method (did you mean topk?)": [corpus, "tokp"],
        "expected an artifact (plan.safetensors), a codec or a published method": [corpus, "wonder"],
        "no artifact at": [corpus, "nowhere.safetensors"],
        "topk: setting density = 2, expected": [corpus, "topk:density=2"],
        "has no setting rank": [corpus, "topk:rank=2"],
        "has no setting warmup_steps": [corpus, "topk:warmup_steps=2"],
        "topk:density: density: expected NAME=VALUE": [corpus, "topk:density"],
        "error_feedback = 3, expected true or false": [corpus, "topk:error_feedback=3"],
        "is named twice": [corpus, "topk", "topk"],
        "nowhere.py: no such file": [corpus, "nowhere.py"],
        "nothing.py: defines 0 codecs (none), expected one class": [corpus, "nothing.py"],
        "twice.py: defines 2 codecs (Broken, Other)": [corpus, "twice.py"],
        "wrong.py: cannot be run (line 2: NameError: name 'unknown' is not defined)": [corpus, "wrong.py"],
        "half.py: cannot be run (line 1: SyntaxError: ": [corpus, "half"],
        "there is a codec 'topk' already": [corpus, "topk_again.py"],
        "json.py: there is a module 'json' already": [corpus, "json.py"],
        "broken.py: its codec fails on this recording (line 14: IndexError: ": [corpus, "broken.py"],
        "other.safetensors: this plan is for another model": [corpus, other],
        "late.safetensors: ": [corpus, "late.safetensors"],
        "damaged/corpus.json: damaged, its content does not match its sha256": [damaged, "topk"],
        "--out is for one trace": [corpus, "topk", "--out", "report"],
        "--start is for one trace": [corpus, "topk", "--start", 3],
        "--average-ranks is for one trace": [corpus, "topk", "--average-ranks", 2],
    }
    for expected, words in cases.items():
        code, out, err = gradlab("evaluate", *words)
        assert (code, out) == (2, ""), (words, err)
        assert err.startswith("gradlab: "), (words, err)
        assert err.count("\n") == 1, (words, err)
        assert expected in err, (words, err)
