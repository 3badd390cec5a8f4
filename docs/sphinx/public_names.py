"""The reference's entries: what each room of the package offers, from its `__all__`, as reStructuredText for autodoc.

A thing that several rooms offer is described in the first of them, and the others point there.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import GenericAlias, ModuleType
from typing import Any

from docstrings import escaped

from gradlab.catalog import SettingRow, first_sentence, setting_rows
from gradlab.codec import Codec

# The rooms with a page of their own, by the page's name in docs/reference.
PAGES = {
    "package": "gradlab",
    "codecs": "gradlab.codecs",
    "wrappers": "gradlab.wrappers",
    "plan": "gradlab.plan",
    "trace": "gradlab.trace",
    "capture": "gradlab.capture",
    "runtime": "gradlab.runtime",
    "analysis": "gradlab.analysis",
    "replay": "gradlab.analysis.replay",
    "forecast": "gradlab.analysis.forecast",
    "codec": "gradlab.codec",
    "collectives": "gradlab.collectives",
}
# Rooms of which each file holds one method.
METHODS = ("gradlab.codecs", "gradlab.wrappers")
BLOCK = re.compile(r"^```\{public-names\} ([\w.]+)\n```$", re.MULTILINE)


def filled(page: str) -> str:
    """Fill a page's block of public names with their entries.

    Args:
        page: Markdown. A block names one room.

    Returns:
        The page, with a block of reStructuredText in its place.
    """
    return BLOCK.sub(lambda block: "```{eval-rst}\n" + "\n".join(entries(block[1])) + "\n```", page)


def entries(room: str) -> list[str]:
    """Describe a room: a table of its names, then an entry for each.

    Args:
        room: the full name of a package with an `__all__`.

    Returns:
        Lines of reStructuredText.
    """
    named = [(name, getattr(importlib.import_module(room), name)) for name in public_names(room)]
    table = [".. list-table::", "   :widths: 30 70", "   :class: names", ""]
    for name, thing in named:
        table += [f"   * - {link(room, name)}", f"     - {summary(room, name, thing)}"]
    if room in METHODS:
        table += [line for method in methods_of(room) for line in row_of_method(method)]
    here = [line for name, thing in named if home(name, thing) == room for line in entry(room, name, thing)]
    return [*table, "", *here, *(methods(room) if room in METHODS else [])]


def public_names(room: str) -> list[str]:
    """List what a room offers: classes and functions first, then constants and types."""
    module = importlib.import_module(room)
    return sorted(module.__all__, key=lambda name: (is_data(getattr(module, name)), name.casefold()))


def is_data(thing: Any) -> bool:
    """Say whether a thing has no docstring of its own: a constant, or a type that stands for others."""
    # Python 3.10 calls dict[str, int] a class.
    alias = isinstance(thing, GenericAlias)
    return alias or not (inspect.isclass(thing) or inspect.isroutine(thing) or isinstance(thing, ModuleType))


@functools.cache
def offers(room: str) -> dict[str, Any]:
    """Return what a room offers, by name."""
    module = importlib.import_module(room)
    return {name: getattr(module, name) for name in module.__all__}


def home(name: str, thing: Any) -> str:
    """Return the first room that offers a thing under this name."""
    return next(room for room in PAGES.values() if offers(room).get(name) is thing)


def link(room: str, name: str) -> str:
    """Point to a name's entry, or to the page of a room that is offered by its name."""
    thing = getattr(importlib.import_module(room), name)
    if isinstance(thing, ModuleType):
        return f":doc:`{thing.__name__} <{page_of(thing.__name__)}>`"
    return f":py:obj:`{name} <{home(name, thing)}.{name}>`"


def page_of(room: str) -> str:
    """Return the name of a room's page."""
    return next(page for page, other in PAGES.items() if other == room)


def summary(room: str, name: str, thing: Any) -> str:
    """Return the first sentence of what is said of a name."""
    text = data_comment(home(name, thing), name) if is_data(thing) else inspect.getdoc(thing) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    first = re.split(r"(?<=[.:])\s+(?=[A-Z])", paragraph)[0]
    return escaped(first)


def entry(room: str, name: str, thing: Any) -> list[str]:
    """Return the directive that describes one name."""
    if isinstance(thing, ModuleType):
        return []
    if is_data(thing):
        return [f".. py:data:: {room}.{name}", f"   :value: {shown(thing)}", "", f"   {data_comment(room, name)}", ""]
    if inspect.isclass(thing):
        return [f".. autoclass:: {room}.{name}", "   :members:", "   :member-order: bysource", ""]
    return [f".. autofunction:: {room}.{name}", ""]


def shown(thing: Any) -> str:
    """Write a constant's value, or the types that a name stands for, without the folders they lie in."""
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", repr(thing))


def data_comment(room: str, name: str) -> str:
    """Return the text of the comment `#: ...` above a constant, in the file that the room takes it from.

    Args:
        room: that offers the constant.
        name: of the constant.

    Returns:
        One line; empty if there is no such comment.
    """
    module, name = defined_in(room, name)
    path = Path(str(importlib.import_module(module).__file__))
    lines = path.read_text("utf-8").splitlines()
    place = next(number for number, line in enumerate(lines) if re.match(rf"{re.escape(name)}\b.*=", line))
    comment = list[str]()
    while place and lines[place - 1].startswith("#:"):
        place -= 1
        comment.insert(0, lines[place].removeprefix("#:").strip())
    return " ".join(comment)


def defined_in(room: str, name: str) -> tuple[str, str]:
    """Return the module in which a name that a room imports is defined, and its name there."""
    path = Path(str(importlib.import_module(room).__file__))
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return defined_in(node.module, alias.name)
    return room, name


def methods(room: str) -> Iterator[str]:
    """Describe every codec or wrapper: its class, and a table of its settings."""
    for method in methods_of(room):
        yield from (f".. autoclass:: {method.__module__}.{method.__name__}", "   :no-members:", "")
        rows = setting_rows(method)
        if rows:
            yield from ("   .. list-table:: Settings", "      :header-rows: 1", "      :widths: 24 18 58", "")
            yield from ("      * - name", "        - default", "        - meaning")
            for row in rows:
                yield from (f"      * - ``{row.name}``", f"        - ``{row.default!r}``", f"        - {meaning(row)}")
            yield ""


def methods_of(room: str) -> list[type[Codec]]:
    """Return the class of every codec or wrapper."""
    module = importlib.import_module(room)
    return [module.get(name) for name in module.names()]


def row_of_method(method: type[Codec]) -> tuple[str, str]:
    """Return a method's row in the table of names."""
    return (
        f"   * - :py:obj:`{method.name} <{method.__module__}.{method.__name__}>`",
        f"     - {escaped(first_sentence(method))}",
    )


def meaning(row: SettingRow) -> str:
    """Say what a setting does, with its unit, its values and the paper's symbol."""
    details = [row.unit, row.values, f"{row.symbol} in the paper" if row.symbol else ""]
    text = f"{row.help} ({'; '.join(filter(None, details))})"
    return escaped(" ".join(text.split()))


def documented() -> set[str]:
    """List the full names of everything that the reference describes."""
    names = {
        f"{room}.{name}"
        for room in PAGES.values()
        for name, thing in offers(room).items()
        if not isinstance(thing, ModuleType) and home(name, thing) == room
    }
    return names | {f"{method.__module__}.{method.__name__}" for room in METHODS for method in methods_of(room)}
