"""Every link between the project's pages leads to a file that is there, and to a heading that is in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.markdown import anchors, broken_links, links

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / ".github").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert list(broken_links(page)) == []


def test_links_are_found_where_markdown_has_them() -> None:
    page = (
        '[a](b.md#c) ![d [e]](f.svg) [g](h.md "title") `[no](link)`\n```\n[no](link)\n```\n[i](https://j.org) '
        "[![k](l.png)](m.md)\n"
    )
    assert links(page) == ["b.md#c", "f.svg", "h.md", "https://j.org", "m.md"]


def test_anchors_are_those_of_github() -> None:
    page = "# What holds, bit for bit?\n## `gradlab` on FSDP2's [link](x.md)\n## Twice\n## Twice\n```\n# none\n```\n"
    assert anchors(page) == {"what-holds-bit-for-bit", "gradlab-on-fsdp2s-link", "twice", "twice-1"}


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Here\n[a](#here) [b](#there) [c](other.md#x) [d](gone.md) [e](https://gone.example)\n")
    (tmp_path / "other.md").write_text("# Y\n")
    assert list(broken_links(page)) == [
        "#there: no such heading",
        "other.md#x: no such heading",
        "gone.md: no such file",
    ]
