"""What is shown of a run or a recording, in a terminal and on a page alike: plain data, and its words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gradlab.formatting import format_bytes, format_number, format_seconds
from gradlab.printable import printable

RECENT = 50  # values that a mean is over
MOST_CURVES = 24  # on a page
_CURVE_POINTS = 160  # of a curve on a page


class Watched(Protocol):
    """A file or a folder that is looked at again and again, for the first time when this is made."""

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""

    def look(self) -> None:
        """Read what is new. Raise GradlabError if it cannot be read."""

    def view(self) -> View:
        """What to show of the last look."""

    def to_json(self) -> dict[str, Any]:
        """The last numbers, for scripts."""


@dataclass(frozen=True)
class Series:
    """A number over steps.

    Attributes:
        name: as in the file. One that ends with "bytes", "seconds" or "bytes_per_second" has that unit.
        steps: ascending.
        values: one per step; None: not finite, or not known.
        drawn: whether a page draws it as a curve.
    """

    name: str
    steps: Sequence[int]
    values: Sequence[float | None]
    drawn: bool = True

    @property
    def title(self) -> str:
        """The name in words."""
        return text_of(self.name.replace("_", " "))

    @property
    def last(self) -> str:
        """The last value with its unit."""
        return written(self.name, self.values[-1])

    @property
    def mean(self) -> str:
        """The mean of the last `RECENT` values that are known, with its unit."""
        known = [value for value in self.values[-RECENT:] if value is not None]
        return written(self.name, sum(known) / len(known) if known else None)

    @property
    def range(self) -> tuple[str, str] | None:
        """The lowest and the highest value with their unit; None: no value is known."""
        known = [value for value in self.values if value is not None]
        return (written(self.name, min(known)), written(self.name, max(known))) if known else None

    @property
    def without_line(self) -> str:
        """What is said in place of a line that would show nothing; empty: there is a line to draw.

        Values that are written the same are constant: a line would blow their last digits up to its full height.
        """
        if self.range is None:
            return "never finite"
        if self.range[0] != self.range[1]:
            return ""
        if len(self.values) == 1:
            return "one value so far"
        return "constant where known" if None in self.values else "constant"


@dataclass(frozen=True)
class Rows:
    """A table of text cells. The first column names the row."""

    title: str
    columns: Sequence[str]
    cells: Sequence[Sequence[str]]


@dataclass(frozen=True)
class View:
    """Everything that is shown.

    Attributes:
        title: the file or the folder.
        head: how far it is, in one line.
        facts: names with values.
        series: numbers over steps; each has at least one value.
        tables: of layers or ranks.
        rules: sentences of rules that fired.
        problems: what cannot be read, one line each.
    """

    title: str
    head: str
    facts: Sequence[tuple[str, str]] = ()
    series: Sequence[Series] = ()
    tables: Sequence[Rows] = ()
    rules: Sequence[str] = ()
    problems: Sequence[str] = ()


def page_json(view: View) -> dict[str, Any]:
    """Write a view as the page's script takes it: all numbers as text, but the points of curves.

    Returns:
        Plain JSON. Each text can be shown as it is: it drives, hides and turns around nothing.
    """
    drawn = [one for one in view.series if one.drawn][:MOST_CURVES]
    return {
        "title": text_of(view.title),
        "head": text_of(view.head),
        "facts": [[text_of(name), text_of(value)] for name, value in view.facts],
        "numbers": [[one.title, one.last, one.mean] for one in view.series],
        "curves": [curve_json(one) for one in drawn],
        "tables": [
            {
                "title": text_of(table.title),
                "columns": [text_of(column) for column in table.columns],
                "rows": [[text_of(cell) for cell in row] for row in table.cells],
            }
            for table in view.tables
        ],
        "rules": [text_of(rule) for rule in view.rules],
        "problems": [text_of(problem) for problem in view.problems],
    }


def curve_json(series: Series) -> dict[str, Any]:
    """Write a series as a curve of at most 160 points, with the texts that stand around it.

    Returns:
        "points": heights from 0 (the lowest) to 1 (the highest), null where no value is known; none of a series without
        a line. "without_line" says why it has none, and is empty otherwise.
    """
    means = stretch_means(series.values, _CURVE_POINTS)
    known = [value for value in series.values if value is not None]  # a mean hides the lowest and the highest
    low, high = min(known, default=0.0), max(known, default=0.0)
    lowest, highest = series.range or ("", "")
    return {
        "name": series.title,
        "last": series.last,
        "low": lowest,
        "high": highest,
        "without_line": series.without_line,
        "first_step": str(series.steps[0]),
        "last_step": str(series.steps[-1]),
        "points": []
        if series.without_line
        else [None if value is None else height(value, low, high) for value in means],
    }


def height(value: float, low: float, high: float) -> float:
    """Return where a value lies between the lowest (0) and the highest (1); 0.5 where these are the same.

    >>> height(3.0, 2.0, 4.0), height(1e308, -1e308, 1e308)
    (0.5, 1.0)
    """
    if not high > low:
        return 0.5
    span = high / 2 - low / 2  # halves, as the difference of two large numbers may overflow
    return min(1.0, max(0.0, (value / 2 - low / 2) / span)) if span else 0.5


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


def text_of(words: str) -> str:
    """Words from a file, in one line that drives, hides and turns around nothing."""
    return printable(words, one_line=True)


def written(name: str, value: float | None) -> str:
    """Write a number with the unit that its name ends with."""
    if value is None:
        return "not finite"
    if name.endswith("bytes_per_second"):
        return f"{format_bytes(value)}/s"
    if name.endswith("bytes"):
        return format_bytes(value)
    return format_seconds(value) if name.endswith("seconds") else format_number(value, 4)
