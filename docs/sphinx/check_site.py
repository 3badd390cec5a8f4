"""Check the built site: every link and anchor in it resolves, nothing is loaded from another host, no name is missing.

python docs/sphinx/check_site.py build/docs
"""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What a browser loads by itself, by tag and attribute. A link that the reader follows is none of it.
LOADED = {
    ("script", "src"), ("link", "href"), ("img", "src"), ("img", "srcset"), ("iframe", "src"), ("source", "src"),
    ("video", "src"), ("audio", "src"), ("object", "data"), ("embed", "src"), ("form", "action"),
}  # fmt: skip
FOREIGN = re.compile(r"(?:https?:)?//")
FOREIGN_IN_STYLE = re.compile(r"""(?:@import\s*|url\()\s*["']?((?:https?:)?//[^"')\s]+)""")


@dataclass
class Page(HTMLParser):
    """What a page has and asks for.

    anchors: ids that links may point to.
    links: addresses that the reader may follow.
    loaded: addresses that a browser loads by itself.
    """

    anchors: set[str] = field(default_factory=set)
    links: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif (tag, name) == ("a", "href") and value:
                self.links.add(value)
            elif (tag, name) in LOADED and value:
                self.loaded.add(value)
            elif name == "style" and value:
                self.loaded |= set(FOREIGN_IN_STYLE.findall(value))


def read(path: Path) -> Page:
    """Read a page of HTML."""
    page = Page()
    page.feed(path.read_text("utf-8"))
    return page


def problems(site: Path) -> Iterator[str]:
    """Find what is wrong with a site.

    Args:
        site: the folder of the built pages.

    Returns:
        One line per problem.
    """
    pages = {path.resolve(): read(path) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        yield from (f"{name}: loads {address}" for address in sorted(page.loaded) if FOREIGN.match(address))
        for link in sorted(page.links | page.loaded):
            if reason := broken(path, link, pages):
                yield f"{name}: {link}: {reason}"
    for path in sorted(site.rglob("*.css")):
        for address in FOREIGN_IN_STYLE.findall(path.read_text("utf-8")):
            yield f"{path.relative_to(site)}: loads {address}"


def broken(path: Path, link: str, pages: dict[Path, Page]) -> str:
    """Say why a link of a page leads nowhere; empty if it leads somewhere, or to another host."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return ""
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not target.is_file():
        return "no such file"
    if parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
        return "no such anchor"
    return ""


def names_in_index(path: Path) -> set[str]:
    """Read the names that the site describes, from Sphinx's objects.inv."""
    data = path.read_bytes()
    for _ in range(4):  # lines of text before the compressed part
        data = data.partition(b"\n")[2]
    return {line.split(" ")[0] for line in zlib.decompress(data).decode().splitlines() if " py:" in line}


def main() -> int:
    """See the module's text."""
    from public_names import documented

    site = Path(sys.argv[1])
    found = list(problems(site))
    missing = sorted(documented() - names_in_index(site / "objects.inv"))
    found += [f"the reference lacks {name}" for name in missing]
    print("\n".join([*found, f"{site}: {len(list(site.rglob('*.html')))} pages, {len(found)} problems"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
