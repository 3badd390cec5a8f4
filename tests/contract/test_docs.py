"""Pages that follow from the code: the page of methods is up to date, and the tutorial's code runs as it stands."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import pkgutil
import re
import runpy
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.main import get_command

from contract import test_contract, test_glossary, test_theory
from gradlab import codecs, wrappers
from gradlab.analysis.questions import accuracy, runs
from gradlab.cli import predict as predict_module
from gradlab.cli.main import app
from gradlab.codec import check_codec
from gradlab.codec.registry import CODECS
from gradlab.errors import GradlabError
from gradlab.plan.recipes import METHODS
from gradlab.runtime.engine.statistics import Place, StepMeans, Summary
from gradlab.runtime.run_report import GroupMeans, RunReport
from support.command_line import Command
from support.warm_python import python

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
COMMAND = re.compile(r"\bgradlab ((?:[a-z]+ )+[^`#\n]*)")
BLOCK = re.compile(r"^```python(?: file=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def methods() -> str:
    """The page of methods as `make docs` fills it in."""
    return runpy.run_path(str(DOCS / "sphinx" / "methods_page.py"))["filled"]((DOCS / "methods.md").read_text())


@pytest.mark.thorough
def test_the_page_of_methods_has_all(methods: str) -> None:
    assert all(f"\n### {name}\n" in methods for name in (*codecs.names(), *wrappers.names()))
    assert all(f"\n| {name} |" in methods for name in METHODS)


@pytest.mark.thorough
@pytest.mark.parametrize("name", wrappers.names())
def test_the_page_of_methods_lists_the_codecs_that_a_wrapper_takes(name: str, methods: str, gradlab: Command) -> None:
    """A plan of what is listed is built; a plan of what is not is refused with the words of `gradlab methods`."""
    around = re.search(rf"^\| {name} \| (.*) \|$", methods, re.MULTILINE)
    assert around is not None
    everything = around[1] == "all codecs"
    taken = set(codecs.names()) if everything else set(around[1].partition(": ")[2].split(", "))
    code, out, _ = gradlab("methods", name)
    assert code == 0
    assert f"Around: {around[1]}" in out
    for codec in codecs.names():
        codec_class, method = codecs.get(codec), wrappers.get(name)
        if codec in taken:
            method(codec_class())
        else:
            with pytest.raises(GradlabError) as refusal:
                method(codec_class())
            assert f"refused: {refusal.value}" in out
    assert out.count("refused:") == len(codecs.names()) - len(taken)


def test_every_codec_stands_in_one_family() -> None:
    """The table of docs/decide.md."""
    rows = (DOCS / "decide.md").read_text().partition("| family | codecs |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"`(\w+)`", rows)) == sorted(codecs.names())


def test_names_files_and_links_of_pages_are_there() -> None:
    missing: list[object] = []
    names: set[str] = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        links = {page.parent / link for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)}
        files = {ROOT / name for name in re.findall(r"\bbenchmarks/[\w/-]+\.\w+", text)}
        missing += [(page.name, path) for path in links | files if not path.exists()]
        names |= {*re.findall(r"\bgradlab(?:\.\w+)+", text)}
    assert missing == []
    assert [name for name in sorted(names) if not _exists(name)] == []


def _exists(name: str) -> bool:
    """Whether a dotted name is something in a module, or a module, which is not run: it may need an extra."""
    with contextlib.suppress(ModuleNotFoundError):  # what it would be in is no package
        if importlib.util.find_spec(name) is not None:
            return True
    with contextlib.suppress(ImportError, AttributeError):
        pkgutil.resolve_name(name)
        return True
    return False


def test_commands_of_pages_have_the_options_named() -> None:
    program = get_command(app)
    for line in (line for page in PAGES for line in COMMAND.findall(page.read_text(encoding="utf-8"))):
        words, command = line.split(), program
        while words and hasattr(command, "get_command") and (within := command.get_command(None, words[0])):
            command = within
            words.pop(0)
        line = line.partition(" -- ")[0]  # what follows is another program's
        known = {option for parameter in command.params for option in parameter.opts}
        assert not set(re.findall(r"(?<!\S)--[a-z-]+", line)) - known, line


def test_each_codec_names_its_paper_in_full() -> None:
    """Venue and year of the short form stand in the file's own text."""
    for name in codecs.names():
        about = codecs.get(name).about
        text = sys.modules[codecs.get(name).__module__].__doc__ or ""
        assert all(year in text for year in re.findall(r"\d{4}", about.paper)), name
        assert about.formula, name


def test_commands_show_one_method_and_all(gradlab: Command) -> None:
    code, out, _ = gradlab("methods", "topk")
    assert code == 0
    assert "density = 0.01" in out
    assert "Stich" in out
    code, out, _ = gradlab("methods", "two_way", "--json")
    assert code == 0
    assert '"server": "sharded"' in out
    code, _, err = gradlab("methods", "top-k")
    assert code == 2
    assert "did you mean topk" in err
    code, out, _ = gradlab("methods", "demo")
    assert code == 0
    assert out.startswith("DeMo: error_feedback(carried=0.999")


@pytest.fixture
def tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The tutorial's files in a folder, and its other code, in order."""
    code = []
    for name, text in BLOCK.findall((DOCS / "add-a-codec.md").read_text()):
        if name:
            (tmp_path / name).write_text(text)
        else:
            code.append(text)
    monkeypatch.setattr(CODECS, "registered", {})
    monkeypatch.syspath_prepend(tmp_path)
    yield SimpleNamespace(folder=tmp_path, code=code)
    sys.modules.pop("sparse_ternary", None)


def test_the_tutorial_runs(tutorial: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for text in tutorial.code:
        exec(compile(text, "add-a-codec.md", "exec"), names)
    assert len(tutorial.code) == 4
    assert "bytes instead of" in capsys.readouterr().out


@pytest.mark.thorough
def test_the_tutorials_script_trains(tutorial: SimpleNamespace) -> None:
    ran = subprocess.run(
        [python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"],
        cwd=tutorial.folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    assert float(re.findall(r"loss (\d+\.\d+)", ran.stdout)[0]) < 2.0


def test_the_tutorials_codec_keeps_the_contract(tutorial: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file among the codecs it is found, and passes what the suites ask of one, but for the runs on real ranks."""
    monkeypatch.setattr(codecs, "__path__", [*codecs.__path__, str(tutorial.folder)])
    (tutorial.folder / "train.py").unlink()
    name = "sparse_ternary"
    assert name in codecs.names()
    check_codec(codecs.make(name))
    test_contract.test_lockstep_laws(name)
    for settings in codecs.get(name).about.candidates:
        test_theory.test_the_formula_is_what_is_forecast(name, dict(settings))
        test_theory.test_errors_are_within_what_is_guaranteed(name, dict(settings))
    sys.modules.pop("gradlab.codecs.sparse_ternary", None)


def test_the_page_of_numbers_defines_every_figure() -> None:
    """Of `state.report()`, of a replay, of runs side by side and of a forecast."""
    page = (DOCS / "numbers.md").read_text()
    place = Place(0, 1, lambda _: 8.0, dense_payload_bytes=8, half_payload_bytes=4)
    report = RunReport(place, 8.0, iteration=0, residuals=None, refresh=None, summary=Summary(0), groups=())
    keys = {*report.to_json(), *(field.name for shape in (StepMeans, GroupMeans) for field in fields(shape))}
    assert not keys - set(re.findall(r"`(\w+)`", page))
    predict = ast.walk(ast.parse(Path(predict_module.__file__).read_text(encoding="utf-8")))
    columns = {
        head for node in predict for found in test_glossary._columns(node) for head in test_glossary._texts(found)
    }
    columns |= {*accuracy.REPLAY_COLUMNS, *runs.COMPARISON_COLUMNS}
    named = {"plan", "method", "nodes", "link", "H"}  # they are no figures
    assert not columns - named - set(re.findall(r'"([^"]+)"', page))


def test_promises_name_tests_that_exist() -> None:
    """docs/promises.md: a file of tests with one of its functions, or a campaign."""
    page = (ROOT / "docs" / "promises.md").read_text()
    named = re.findall(r"tests/[\w/]+\.py(?:::\w+)?", page)
    assert len(named) > 50
    for name in named:
        file, _, function = name.partition("::")
        text = (ROOT / file).read_text()
        assert f"\ndef {function}(" in text if function else file.startswith("tests/campaigns/"), name
    rows = [line for line in page.splitlines() if line.startswith("| ") and "held by" not in line]
    assert all("tests/" in row.split("|")[2] for row in rows)


def test_no_bullet_of_the_changelog_stands_twice() -> None:
    """Changes to it are merged line by line, and both forms of a changed line stay."""
    text = (Path(__file__).parents[2] / "CHANGELOG.md").read_text(encoding="utf-8")
    begun = re.findall(r"^- \*\*(.+?)\*\*", text, re.MULTILINE)
    assert len(begun) > 5
    assert len(set(begun)) == len(begun)
