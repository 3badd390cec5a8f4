"""Numbers, tables and sentences of a run, drawn for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Group
from rich.table import Table
from rich.text import Text

from gradlab.formatting import format_bytes, format_number, format_seconds
from gradlab.printable import printable

RECENT = 50  # values that a mean is over
POINTS = 40  # of a sparkline
BARS = "▁▂▃▄▅▆▇█"
_MOST_LINES = 6  # of rules or problems that are shown


class Watched(Protocol):
    """A file or a folder that is looked at again and again, for the first time when this is made."""

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""

    def look(self) -> None:
        """Read what is new. Raise GradlabError if it cannot be read."""

    def drawn(self) -> Group:
        """Draw the last look."""

    def to_json(self) -> dict[str, Any]:
        """The last numbers, for scripts."""


@dataclass(frozen=True)
class Series:
    """A number over steps.

    Attributes:
        name: as in the file. One that ends with "bytes" or "seconds" has that unit.
        values: one per step, at least one; None: not finite, or not known.
    """

    name: str
    values: Sequence[float | None]

    def cells(self) -> tuple[str, str, str, str]:
        """Return the name, the last value, the mean of the last `RECENT` known values, and a line or words."""
        recent = [value for value in self.values[-RECENT:] if value is not None]
        mean = sum(recent) / len(recent) if recent else None
        name = self.name.replace("_", " ")
        return name, self._written(self.values[-1]), self._written(mean), self._words() or sparkline(self.values)

    def _words(self) -> str:
        """Words for a series without a line; empty: there is a line to draw.

        Values that are written the same are constant: a line would blow their last digits up to its full height.
        """
        known = [value for value in self.values if value is not None]
        if not known:
            return "never finite"
        if self._written(min(known)) != self._written(max(known)):
            return ""
        if len(self.values) == 1:
            return "one value so far"
        return "constant where known" if None in self.values else "constant"

    def _written(self, value: float | None) -> str:
        if value is None:
            return "not finite"
        if self.name.endswith("bytes"):
            return format_bytes(value)
        return format_seconds(value) if self.name.endswith("seconds") else format_number(value, 4)


def numbers(series: Sequence[Series]) -> Table:
    """Draw a row per series."""
    table = Table(box=None, pad_edge=False)
    for column in ("", "last", f"mean of {RECENT}", ""):
        table.add_column(column, justify="right" if column else "left")
    for one in series:
        table.add_row(*map(text, one.cells()))
    return table


def rows(title: str, columns: Sequence[str], cells: Sequence[Sequence[str]]) -> Group:
    """Draw a table of texts after an empty line. The first column names the row."""
    table = Table(title=text(title), title_justify="left", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in cells:
        table.add_row(*map(text, row))
    return Group(Text(""), table)


def last_lines(title: str, lines: Sequence[str]) -> list[Text]:
    """Draw the last of some sentences below their title; nothing if there are none."""
    return [Text(title), *(text(f"  {one}") for one in lines[-_MOST_LINES:])] if lines else []


def text(words: str, style: str = "") -> Text:
    """Draw words from a file in one line: neither markup nor what drives a terminal."""
    return Text(printable(words, one_line=True), style=style)


def sparkline(series: Sequence[float | None]) -> str:
    """Draw a series in one line: means of as many stretches as there is room for, blank where nothing is finite.

    Returns:
        At most `POINTS` characters.
    """
    means = stretch_means(series, POINTS)
    known = [value for value in means if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    span = high / 2 - low / 2  # halves, as the difference of two large numbers may overflow
    top = len(BARS) - 1
    return "".join(
        " " if value is None else BARS[round((value / 2 - low / 2) / span * top) if span else top // 2]
        for value in means
    )


def stretch_means(series: Sequence[float | None], most: int) -> list[float | None]:
    """Cut a series into stretches of about the same length, and average each.

    Args:
        series: values in order; None: not known.
        most: stretches at most.

    Returns:
        A mean per stretch; None where no value is known and finite.

    >>> stretch_means([1.0, 3.0, None, None, 5.0, None], 3)
    [2.0, None, 5.0]
    """
    count = min(most, len(series))
    means: list[float | None] = []
    for point in range(count):
        part = series[point * len(series) // count : (point + 1) * len(series) // count]
        known = [value for value in part if value is not None and math.isfinite(value)]
        means.append(sum(value / len(known) for value in known) if known else None)
    return means
