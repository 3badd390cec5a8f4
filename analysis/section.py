"""Contents of a page: sections with answers, tables and charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gradlab.analysis.figures.chart import Chart
from gradlab.formatting import format_counted


@dataclass(frozen=True)
class Drawing:
    """A chart with its name, title and caption."""

    name: str
    title: str
    caption: str
    chart: Chart


@dataclass(frozen=True)
class Table:
    """A table of text cells. The first column names the row.

    text_columns: number of leading columns that hold words instead of numbers.
    links: anchors in the page that a row's name leads to, by the names.
    shades: darkness of each cell, from 0 to 1, by row and column; empty: none is.
    takes_turns: whether it shares its place with the section's other such tables, of which the reader chooses one.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    text_columns: int = 1
    links: Mapping[str, str] = field(default_factory=dict)
    shades: Sequence[Sequence[float]] = ()
    takes_turns: bool = False

    def linked(self, anchors: Mapping[str, str]) -> Table:
        """Return the same table whose rows lead to anchors, by the rows' names."""
        return replace(self, links=anchors)

    def shade(self, row: int, column: int) -> int:
        """How dark a cell is, in per cent. Numbers from 0, as the template counts them."""
        return round(100 * self.shades[row][column]) if self.shades else 0


@dataclass(frozen=True)
class Section:
    """One question with its answer, on a page of its own when printed, or one part of what answers it.

    parts: sections that fold out beneath. A section without parts folds its own tables and figures.
    of_layer: whether it shows one layer alone.
    """

    name: str
    title: str
    answer: str = ""
    tables: Sequence[Table] = ()
    drawings: Sequence[Drawing] = ()
    parts: Sequence[Section] = ()
    of_layer: bool = False

    @property
    def contents(self) -> str:
        """The parts that fold out: "2 tables and 3 figures"."""
        parts = [(len(self.tables), "table"), (len(self.drawings), "figure")]
        return " and ".join(format_counted(count, what) for count, what in parts if count)

    @property
    def all_drawings(self) -> list[Drawing]:
        """Its figures, and those of its parts."""
        return [*self.drawings, *(item for part in self.parts for item in part.all_drawings)]
