"""A view drawn for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from gradlab.cli.watch.view import RECENT, Rows, Series, View, height, stretch_means, text_of

POINTS = 40  # of a sparkline
_MOST_RULES = 6  # of which are shown
BARS = "▁▂▃▄▅▆▇█"


def drawn(view: View) -> Group:
    """Draw a view."""
    parts: list[Any] = [_text(view.title), _text(view.head, style="bold")]
    parts += [_text(f"{name}: {value}") for name, value in view.facts]
    parts += [_numbers(view.series)] if view.series else []
    for table in view.tables:
        parts += [Text(""), _table(table)]
    for title, lines in (("rules that fired:", view.rules), ("problems:", view.problems)):
        if lines:
            parts += [Text(title), *(_text(f"  {line}") for line in lines[-_MOST_RULES:])]
    return Group(*parts)


def _numbers(series: Sequence[Series]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column, side in (("", "left"), ("last", "right"), (f"mean of {RECENT}", "right"), ("", "left")):
        table.add_column(column, justify=side)  # type: ignore[arg-type]
    for one in series:
        table.add_row(_text(one.title), one.last, one.mean, one.without_line or sparkline(one.values))
    return table


def _table(rows: Rows) -> Table:
    table = Table(title=_text(rows.title), title_justify="left", box=None, pad_edge=False)
    for number, column in enumerate(rows.columns):
        table.add_column(_text(column), justify="right" if number else "left")
    for cells in rows.cells:
        table.add_row(*map(_text, cells))
    return table


def _text(words: str, style: str = "") -> Text:
    """Words from a file: neither markup nor what drives a terminal."""
    return Text(text_of(words), style=style)


def sparkline(series: Sequence[float | None]) -> str:
    """Draw a series in one line: means of as many stretches as there is room for, blank where nothing is finite.

    Args:
        series: values in order, at least two of which differ; see `Series.without_line` of others.

    Returns:
        At most `POINTS` characters.
    """
    means = stretch_means(series, POINTS)
    known = [value for value in means if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    top = len(BARS) - 1
    return "".join(" " if value is None else BARS[round(height(value, low, high) * top)] for value in means)
