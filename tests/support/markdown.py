"""Links and anchors of Markdown pages, as GitHub resolves them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

FENCE = re.compile(r"^ *(```|~~~).*?^ *\1[^\n]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\](?:\([^)]*\))?)*\]\(([^()\s]+(?:\([^()]*\))?)(?:\s+\"[^\"]*\")?\)")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
ANCHOR = re.compile(r"<a\s+(?:id|name)=\"([^\"]+)\"")
OTHER_HOST = re.compile(r"[a-z][a-z+.-]*:")


def anchors(page: str) -> set[str]:
    """List the anchors of a page: of its headings, numbered where they repeat, and those it sets itself."""
    text, seen, found = FENCE.sub("", page), Counter[str](), set(ANCHOR.findall(page))
    for heading in HEADING.findall(text):
        slug = slug_of(heading)
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def slug_of(heading: str) -> str:
    """Make a heading's anchor: its text in lower case, without punctuation, with hyphens for spaces."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def links(page: str) -> list[str]:
    """List the targets of a page's links and images, without those in code."""
    return LINK.findall(re.sub(r"`[^`\n]*`", "", FENCE.sub("", page)))


def broken_links(path: Path) -> Iterator[str]:
    """Find links of a page that lead nowhere. Links to other hosts are not followed.

    Args:
        path: of the page.

    Returns:
        One line per link.
    """
    for link in links(path.read_text(encoding="utf-8")):
        if OTHER_HOST.match(link):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / unquote(name) if name else path
        if not target.exists():
            yield f"{link}: no such file"
        elif anchor and target.suffix == ".md" and unquote(anchor) not in anchors(target.read_text()):
            yield f"{link}: no such heading"
