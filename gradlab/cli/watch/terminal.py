"""Numbers, tables and sentences of a run, drawn for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Group
from rich.table import Table
from rich.text import Text

from gradlab.formatting import format_bytes, format_number, format_seconds
from gradlab.printable import printable

RECENT = 50  # values that a mean is over
POINTS = 40  # of a sparkline
BARS = "▁▂▃▄▅▆▇█"
_MOST_LINES = 6  # of rules or problems that are shown


@dataclass(frozen=True)
class Series:
    """A number over steps, at least one; None: not finite, or not known. Its name may end with a unit."""

    name: str
    values: Sequence[float | None]

    def cells(self) -> tuple[str, str, str, str]:
        """The name, the last value, the mean of the last `RECENT` known values, and a line or words."""
        recent = [value for value in self.values[-RECENT:] if value is not None]
        mean = self._written(sum(recent) / len(recent) if recent else None)
        known = [value for value in self.values if value is not None]
        # A line would blow the last digits of a constant up to its full height.
        constant = "constant" if known else "never finite"
        same = not known or self._written(min(known)) == self._written(max(known))
        line = constant if same else sparkline(self.values)
        return self.name.replace("_", " "), self._written(self.values[-1]), mean, line

    def _written(self, value: float | None) -> str:
        if value is None:
            return "not finite"
        if self.name.endswith("bytes"):
            return format_bytes(value)
        return format_seconds(value) if self.name.endswith("seconds") else format_number(value, 4)


def numbers(series: Sequence[Series]) -> Group:
    """Draw a row per series."""
    return rows("", ("", "last", f"mean of {RECENT}", ""), [one.cells() for one in series])


def rows(title: str, columns: Sequence[str], cells: Sequence[Sequence[str]]) -> Group:
    """Draw a table of texts, below its title after an empty line. The first column names the row."""
    table = Table(title=text(title) if title else None, title_justify="left", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number and column else "left")
    for row in cells:
        table.add_row(*map(text, row))
    return Group(*([Text("")] if title else []), table)


def last_lines(title: str, lines: Sequence[str]) -> list[Text]:
    """Draw the last of some sentences below their title; nothing if there are none."""
    return [Text(title), *(text(f"  {one}") for one in lines[-_MOST_LINES:])] if lines else []


def text(words: str, style: str = "") -> Text:
    """Draw words from a file in one line: neither markup nor what drives a terminal."""
    return Text(printable(words, one_line=True), style=style)


def sparkline(series: Sequence[float | None]) -> str:
    """Draw a series in at most `POINTS` characters: means of stretches, blank where nothing is known."""
    count = min(POINTS, len(series))
    edges = [point * len(series) // count for point in range(count + 1)] if count else []
    means = [_mean(series[first:last]) for first, last in pairwise(edges)]
    known = [value for value in means if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    span = high / 2 - low / 2  # halves, as the difference of two large numbers may overflow
    top = len(BARS) - 1
    return "".join(
        " " if value is None else BARS[round((value / 2 - low / 2) / span * top) if span else top // 2]
        for value in means
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(value / len(known) for value in known) if known else None
