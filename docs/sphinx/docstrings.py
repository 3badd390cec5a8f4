"""Docstrings of this project as reStructuredText for napoleon: pure functions over lines of text.

Docstrings are written to be read in an editor: a class lists its fields as "name: meaning" without a heading, code is
indented, and formulas have bars and underscores that reStructuredText would take for markup.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Sequence

SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):$")
FIELD = re.compile(r"\*{0,2}\w+(?:, \w+)*: ")
SEVERAL = re.compile(r"    (\w+(?:, \w+)+): (.*)")
ITEM = re.compile(r"(?:[-*]|\d+\.) ")
# Markup that is none: emphasis, substitutions, and references such as mean_.
MARKUP = re.compile(r"(?<!\\)(?:[*|]|(?<=\w)_(?!\w))")
CODE = re.compile(r"``.+?``|`[^`]+`")


def as_google(lines: Sequence[str], fields: Collection[str], heading: str) -> list[str]:
    """Write a docstring in the form that napoleon reads.

    Args:
        lines: of the docstring, without its common indentation.
        fields: names that a paragraph of "name: meaning" may explain.
        heading: of such a paragraph: "Attributes" of a class, "Args" of a function.

    Returns:
        The lines, with headings over fields, code as literal blocks, and markup escaped.
    """
    written: list[str] = []
    section, last = False, ""
    for paragraph in paragraphs(lines):
        first = paragraph[0]
        if not first.startswith(" "):
            section = any(SECTION.match(line) for line in paragraph)
        if first.startswith(">>>"):
            written += paragraph
        elif first.startswith("    ") and not section and not ITEM.match(last):
            written += ["::", "", *paragraph]
        elif explains(paragraph, fields):
            written += [f"{heading}:", *(f"    {escaped_entry(line)}" for line in paragraph)]
        elif section or ITEM.match(first):
            written += escaped_lines(paragraph)
        else:
            written += with_formulas(paragraph)
        written.append("")
        last = first
    return one_name_each(written)


def one_name_each(lines: Sequence[str]) -> list[str]:
    """Repeat an entry that explains several names for each of them: a field has one name; words before are its type.

    Args:
        lines: with sections as napoleon reads them.

    Returns:
        The lines, "first, second: meaning" as two entries.
    """
    written, place, section = list[str](), 0, ""
    while place < len(lines):
        line = lines[place]
        place += 1
        section = line if SECTION.match(line) else section
        several = SEVERAL.match(line) if section in ("Args:", "Attributes:") else None
        if several is None:
            written.append(line)
            continue
        more = list(itertools.takewhile(lambda below: below.startswith("        "), lines[place:]))
        place += len(more)
        for name in several[1].split(", "):
            written += [f"    {name}: {several[2]}", *more]
    return written


def paragraphs(lines: Sequence[str]) -> list[list[str]]:
    """Split lines at the empty ones. Indented lines that follow one another stay together, empty lines and all."""
    split: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            split[-1].append(line)
        elif split[-1]:
            split.append([])
    joined: list[list[str]] = []
    for part in filter(None, split):
        if joined and joined[-1][0].startswith("    ") and part[0].startswith("    "):
            joined[-1] += ["", *part]
        else:
            joined.append(part)
    return joined


def explains(paragraph: Sequence[str], fields: Collection[str]) -> bool:
    """Say whether every line that is not indented begins with names of fields and a colon."""
    heads = [FIELD.match(line) for line in paragraph if not line.startswith(" ")]
    return bool(heads) and all(head and {*head[0].strip("*: ").split(", ")} <= {*fields} for head in heads)


def with_formulas(paragraph: Sequence[str]) -> list[str]:
    """Set the indented lines of a paragraph as literal blocks: formulas, and short code."""
    written: list[str] = []
    for indented, lines in itertools.groupby(paragraph, lambda line: line.startswith("    ")):
        here = list(lines)
        written += ["", "::", "", *here, ""] if indented else map(escaped, here)
    return written


def escaped_lines(lines: Sequence[str]) -> list[str]:
    """Escape markup, but not in the names that a section's entries begin with."""
    section, written = False, []
    for line in lines:
        section = section or bool(SECTION.match(line))
        written.append(escaped_entry(line) if section else escaped(line))
    return written


def escaped_entry(line: str) -> str:
    """Escape markup after the names of an entry."""
    head = re.match(rf"\s*{FIELD.pattern}", line)
    return escaped(line) if head is None else head[0] + escaped(line[head.end() :])


def escaped(line: str) -> str:
    """Escape markup outside of code."""
    item = re.match(rf"\s*{ITEM.pattern}", line)
    begin = item.end() if item else 0
    written, place = line[:begin], begin
    for code in CODE.finditer(line, begin):
        written += MARKUP.sub(r"\\\g<0>", line[place : code.start()]) + code[0]
        place = code.end()
    return written + MARKUP.sub(r"\\\g<0>", line[place:])
