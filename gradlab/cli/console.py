"""How commands speak: results on standard output, progress and remarks on standard error."""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table as RichTable
from rich.text import Text

from gradlab.formatting import format_counted
from gradlab.printable import printable
from gradlab.progress import Progress

if TYPE_CHECKING:
    from gradlab.analysis.section import Table as SectionTable


class _Printable(Console):
    """A console that prints no text which would drive the terminal: layer names come from files."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(printable(one) if isinstance(one, str) else one for one in objects), **options)


OUT = _Printable(highlight=False, soft_wrap=True)
ERR = _Printable(stderr=True, highlight=False, soft_wrap=True)
_OF_NUMPY = r".*( encountered|Mean of empty slice|All-NaN|Degrees of freedom <= 0)"
_UNBROKEN = 12  # characters of a number with its unit
_BEGINNING = 150  # characters of a warning that is printed in short


class Table(NamedTuple):
    """Rows of text cells. The first text_columns may be broken; the others hold numbers, which are never cut."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int = 1


@dataclass(frozen=True)
class Answer:
    """The parts of a command's answer, from top to bottom."""

    lines: Sequence[str] = ()
    warnings: Sequence[str] = ()
    tables: Sequence[Table | SectionTable] = ()
    notes: Sequence[str] = ()

    def print(self) -> None:
        """Print it. No text is markup: paths have brackets."""
        for line in (*self.lines, *(f"warning: {line}" for line in self.warnings)):
            OUT.print(line, markup=False)
        for table in self.tables:
            print_table(table)
        for line in self.notes:
            OUT.print(line, markup=False)


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Yield a function (what, done, total) that draws a bar per kind of work, or nothing without a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=ERR, transient=True, disable=not ERR.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(escape(printable(what, one_line=True)), total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield report


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Show each Python warning once, as one line on standard error, and none of numpy's: results name what is not
    finite."""
    shown: set[str] = set()

    def show(message: Warning | str, *where: Any, **more: Any) -> None:
        line = "warning: " + " ".join(str(message).removeprefix("gradlab: ").split())
        if line not in shown:
            shown.add(line)
            say(line)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _OF_NUMPY, RuntimeWarning)
        warnings.showwarning = show
        yield


def print_json(value: Any) -> None:
    """Print the result for scripts: one JSON document without NaN, nothing else on standard output."""
    from gradlab.jsonable import plain

    print(json.dumps(plain(value), indent=1, allow_nan=False))


def print_table(table: Table | SectionTable) -> None:
    """Print a table, wider than a terminal if its numbers need that."""
    # What the encoding lacks is replaced before columns are measured.
    named, *cells = ([Text(_shown(cell)) for cell in row] for row in ((table.title, *table.columns), *table.rows))
    drawn = RichTable(title=named[0] if table.title else None, title_justify="left", header_style="bold")
    for column, head in enumerate(named[1:]):
        least = max(_least_width(one) for one in (head, *(row[column] for row in cells)))
        if column < table.text_columns:
            drawn.add_column(head, min_width=min(least, _UNBROKEN), overflow="fold")
        else:
            drawn.add_column(head, justify="right", min_width=least)
    for row in cells:
        drawn.add_row(*row)
    # A log has no width, also where FORCE_COLOR calls it a terminal.
    console = OUT if OUT.file.isatty() else Console(highlight=False, width=200)
    console.print(drawn, markup=False, crop=False)


def _shown(cell: str) -> str:
    text = printable(cell, one_line=True)
    return text.encode(OUT.encoding, "backslashreplace").decode(OUT.encoding)


def _least_width(cell: Text) -> int:
    """The width of a number, or of the longest word of a sentence."""
    words = [cell] if cell.cell_len <= _UNBROKEN else cell.split(" ")
    return max(word.cell_len for word in words)


def print_report(page: Path, as_json: bool) -> None:
    """Print a report's answer, how its warnings begin, and what was written; or all of it as JSON."""
    written = json.loads((page.parent / "report.json").read_text("utf-8"))
    if as_json:
        print_json(written)
        return
    files = [str(page), str(page.parent / "report.json")]
    if written["figures"]:
        files.append(f"{page.parent / 'figures'}/ ({format_counted(len(written['figures']), 'figure')})")
    shortened = [textwrap.shorten(line, _BEGINNING, placeholder=" ...") for line in written["warnings"]]
    Answer([written["brief"]], shortened, notes=files).print()


def command_line() -> str:
    """Return the command as it was typed, to repeat it; empty where Python was started otherwise."""
    return shlex.join(["gradlab", *sys.argv[1:]]) if Path(sys.argv[0]).name == "gradlab" else ""


def say(text: str) -> None:
    """Print a remark for people, on standard error."""
    ERR.print(text, markup=False)
