"""The reference and the public names hold each other; what turns docstrings into pages, and what checks the site."""

from __future__ import annotations

import importlib
import inspect
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from gradlab import codecs, wrappers
from support.reference import DOCS, site_modules

LINK = re.compile(r"\]\((\w+)\.md\)")


@pytest.fixture(scope="module")
def site() -> Iterator[SimpleNamespace]:
    with site_modules("public_names", "docstrings", "check_site") as [names, docstrings, check]:
        yield SimpleNamespace(names=names, docstrings=docstrings, check=check)


# --- names ----------------------------------------------------------------------------------------------------------


def test_each_room_has_a_page_that_the_index_links(site: SimpleNamespace) -> None:
    pages = {path.stem: path.read_text() for path in (DOCS / "reference").glob("*.md")}
    assert set(pages) == {*site.names.PAGES, "index"}
    assert set(LINK.findall(pages["index"])) == set(site.names.PAGES)
    for page, room in site.names.PAGES.items():
        assert site.names.BLOCK.findall(pages[page]) == [room]
        assert pages[page].startswith(f"# {room}\n")


def test_each_package_with_public_names_has_a_page_or_is_inside_one_that_has(site: SimpleNamespace) -> None:
    from gradlab import __all__ as front

    rooms = {*site.names.PAGES.values()}
    assert {"gradlab", "gradlab.analysis", "gradlab.capture", "gradlab.codec", "gradlab.runtime"} <= rooms
    modules = {
        f"gradlab.{name}" for name in front if isinstance(getattr(importlib.import_module("gradlab"), name), ModuleType)
    }
    assert modules <= rooms


def test_each_public_name_is_described_once_and_has_a_text(site: SimpleNamespace) -> None:
    described = [
        line.split(":: ")[1]
        for room in site.names.PAGES.values()
        for line in site.names.entries(room)
        if re.match(r"\.\. (?:autoclass|autofunction|py:data):: ", line)
    ]
    assert len(described) == len(set(described))
    assert set(described) == site.names.documented()
    for room in site.names.PAGES.values():
        for name, thing in site.names.offers(room).items():
            home = site.names.home(name, thing)
            text = site.names.data_comment(home, name) if site.names.is_data(thing) else inspect.getdoc(thing)
            assert text, f"{room}.{name} has no docstring, or, as a constant, no comment that begins with #:"


def test_every_codec_and_wrapper_is_described_with_its_settings(site: SimpleNamespace) -> None:
    for room, registry in (("gradlab.codecs", codecs), ("gradlab.wrappers", wrappers)):
        lines = site.names.entries(room)
        assert sum(line.startswith("   * - :py:obj:`") for line in lines) >= len(registry.names())
    assert "      * - ``density``" in site.names.entries("gradlab.codecs")


def test_a_name_that_is_missing_or_has_no_text_is_noticed(
    site: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gradlab.plan

    monkeypatch.setattr(gradlab.plan, "__all__", [*gradlab.plan.__all__, "SMALL_GROUP_BYTES"])
    monkeypatch.setattr(gradlab.plan, "SMALL_GROUP_BYTES", gradlab.plan.plan.SMALL_GROUP_BYTES, raising=False)
    site.names.offers.cache_clear()
    assert "gradlab.plan.SMALL_GROUP_BYTES" in site.names.documented()
    site.names.offers.cache_clear()


# --- docstrings -----------------------------------------------------------------------------------------------------


def test_fields_get_a_heading_and_code_a_literal_block(site: SimpleNamespace) -> None:
    lines = [
        "A plan.",
        "",
        "layers: all of them.",
        "    More.",
        "",
        "    plan = Plan()",
        "",
        "Law: x_ = |y|.",
        "",
        ">>> a_",
        "1",
    ]
    assert site.docstrings.as_google(lines, {"layers"}, "Attributes") == [
        *("A plan.", ""),
        *("Attributes:", "    layers: all of them.", "        More.", ""),
        *("::", "", "    plan = Plan()", ""),
        *("Law: x\\_ = \\|y\\|.", ""),
        *(">>> a_", "1", ""),
    ]


def test_sections_are_left_to_napoleon_with_their_names_as_they_are(site: SimpleNamespace) -> None:
    lines = [
        "Fit.",
        "",
        "Args:",
        "    mean_: of `x_`, 2 * x.",
        "",
        "        Still of it.",
        "Raises:",
        "    GradlabError: if *x* is bad.",
    ]
    assert site.docstrings.as_google(lines, set(), "Args") == [
        *("Fit.", ""),
        *("Args:", "    mean_: of `x_`, 2 \\* x.", ""),
        *("        Still of it.", "Raises:", "    GradlabError: if \\*x\\* is bad.", ""),
    ]


def test_an_entry_of_several_names_is_one_for_each(site: SimpleNamespace) -> None:
    lines = ["Args:", "    first, last: of them,", "        in order.", "    other: one."]
    assert site.docstrings.as_google(lines, set(), "Args") == [
        *("Args:", "    first: of them,", "        in order.", "    last: of them,", "        in order."),
        *("    other: one.", ""),
    ]
    fields = site.docstrings.as_google(["a, b: two."], {"a", "b"}, "Attributes")
    assert fields == ["Attributes:", "    a: two.", "    b: two.", ""]


def test_a_formula_inside_a_paragraph_is_a_block_and_a_list_stays_one(site: SimpleNamespace) -> None:
    assert site.docstrings.as_google(["It is at most", "    2 * |x|", "or less."], set(), "Args") == [
        *("It is at most", "", "::", "", "    2 * |x|", "", "or less.", ""),
    ]
    assert site.docstrings.as_google(["- one,", "  on two lines", "- two"], set(), "Args") == [
        "- one,",
        "  on two lines",
        "- two",
        "",
    ]


# --- the built site -------------------------------------------------------------------------------------------------

SOUND = '<link href="site.css"><body id="top"><a href="#top">up</a><a href="b.html#x">b</a></body>'


def write(folder: Path, **pages: str) -> Path:
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text)
    (folder / "site.css").write_text("a { background: url(figure.svg) }")
    return folder


def test_a_sound_site_has_no_problems(site: SimpleNamespace, tmp_path: Path) -> None:
    assert (
        list(site.check.problems(write(tmp_path, a=SOUND, b='<p id="x"><a href="https://pytorch.org">torch</a></p>')))
        == []
    )


def test_links_that_lead_nowhere_and_what_comes_from_elsewhere_are_found(site: SimpleNamespace, tmp_path: Path) -> None:
    write(tmp_path, a=SOUND, b='<a href="c.html"></a><script src="https://cdn.example/x.js"></script>')
    (tmp_path / "site.css").write_text('@import "//fonts.example/font.css";')
    assert list(site.check.problems(tmp_path)) == [
        "a.html: b.html#x: no such anchor",
        "b.html: loads https://cdn.example/x.js",
        "b.html: c.html: no such file",
        "site.css: loads //fonts.example/font.css",
    ]


def test_the_index_of_a_site_tells_its_names(site: SimpleNamespace, tmp_path: Path) -> None:
    text = "gradlab.Plan py:class 1 docs/reference/gradlab.html#$ -\nindex std:doc -1 index.html Home\n"
    (tmp_path / "objects.inv").write_bytes(b"# 1\n# 2\n# 3\n# 4\n" + zlib.compress(text.encode()))
    assert site.check.names_in_index(tmp_path / "objects.inv") == {"gradlab.Plan"}
