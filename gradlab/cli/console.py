"""How commands speak: results on standard output, progress and remarks on standard error."""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from gradlab.cli.streams import encodable
from gradlab.formatting import format_counted
from gradlab.printable import printable
from gradlab.progress import Progress


class _Printable(Console):
    """A console that prints no text which would drive the terminal: layer names come from files."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(printable(one) if isinstance(one, str) else one for one in objects), **options)


OUT = _Printable(highlight=False, soft_wrap=True)
ERR = _Printable(stderr=True, highlight=False, soft_wrap=True)
_OF_NUMPY = r".*( encountered|Mean of empty slice|All-NaN|Degrees of freedom <= 0)"
_UNBROKEN = 12  # characters of a number with its unit
_BEGINNING = 150  # characters of a warning that is printed in short


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Yield a function (what, done, total) that draws a bar per kind of work, or nothing without a terminal.

    A bar shows the share that is done, the time since it began and the time left. What is counted differs from work to
    work (values, iterations, figures), so that no numbers are shown.
    """
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
    """Within, a Python warning is one line on standard error, once, without the file and the line that raised it.

    Nothing is shown of numpy's warnings of single operations: results say where they are not finite.
    """
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
    """Print the result for scripts: one JSON document without NaN, nothing else on standard output.

    Args:
        value: plain JSON.
    """
    from gradlab.jsonable import plain

    print(json.dumps(plain(value), indent=1, allow_nan=False))


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """Print a table, in which numbers are never cut: on a narrow terminal it is wider than that.

    Args:
        title: above the table.
        header: the heads of the columns.
        rows: text cells.
        left: number of leading columns that hold text. The others hold numbers.
    """
    # What the encoding lacks is replaced before columns are measured. No text is markup: paths have brackets.
    named, *cells = (
        [Text(encodable(printable(cell, one_line=True), OUT.encoding)) for cell in row]
        for row in ((title, *header), *rows)
    )
    table = Table(title=named[0] if title else None, title_justify="left", header_style="bold")
    for column, head in enumerate(named[1:]):
        least = max(_least_width(one) for one in (head, *(row[column] for row in cells)))
        if column < left:  # names may be broken
            table.add_column(head, min_width=min(least, _UNBROKEN), overflow="fold")
        else:
            table.add_column(head, justify="right", min_width=least)
    for row in cells:
        table.add_row(*row)
    # A log has no width, also where FORCE_COLOR calls it a terminal.
    console = OUT if OUT.file.isatty() else Console(highlight=False, width=200)
    console.print(table, markup=False, crop=False)


def _least_width(cell: Text) -> int:
    """Return the width of a number that must not be cut: all of it, or its longest word where it is a sentence."""
    words = [cell] if cell.cell_len <= _UNBROKEN else cell.split(" ")
    return max(word.cell_len for word in words)


def print_warnings(lines: Iterable[str]) -> None:
    """Print what a reader must know before the numbers that follow. It is part of the result.

    Args:
        lines: one warning each.
    """
    for line in lines:
        OUT.print(f"warning: {line}", markup=False)


def tell_of_report(page: Path, as_json: bool) -> None:
    """Print what a report says in short, how its warnings begin, and what was written; or all of it as JSON.

    Args:
        page: its report.html, beside which report.json lies.
        as_json: whether to print the JSON.
    """
    written = json.loads((page.parent / "report.json").read_text("utf-8"))
    if as_json:
        print_json(written)
        return
    OUT.print(written["brief"], markup=False)
    print_warnings(textwrap.shorten(line, _BEGINNING, placeholder=" ...") for line in written["warnings"])
    for path in (page, page.parent / "report.json"):
        OUT.print(str(path), markup=False)
    if written["figures"]:
        OUT.print(f"{page.parent / 'figures'}/ ({format_counted(len(written['figures']), 'figure')})", markup=False)


def command_line() -> str:
    """Return the command as it was typed, to repeat it; empty where Python was started otherwise."""
    return shlex.join(["gradlab", *sys.argv[1:]]) if Path(sys.argv[0]).name == "gradlab" else ""


def say(text: str) -> None:
    """Print a remark for people, on standard error.

    Args:
        text: the remark.
    """
    ERR.print(text, markup=False)
