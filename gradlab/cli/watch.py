"""Show a run while it trains or records.

A log (gradlab.runtime.ScalarLog, gradlab train --log) shows loss, bytes, ratio, times, errors and residuals by
layer, and rules that fired. A trace's folder (gradlab.capture.TraceRecorder, gradlab train --capture) shows
iterations, bytes and their rate, what the budget leaves, and every rank. It shows a killed recording too.

It ends when the run does, or with Ctrl-C. It only reads: the run does not notice.

Examples:

  gradlab train text_chars --data input.txt --compress plan.safetensors --log run.jsonl

  gradlab watch run.jsonl

  gradlab watch trace --once
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from gradlab.cli.console import OUT, print_json
from gradlab.cli.options import AsJson
from gradlab.printable import printable

if TYPE_CHECKING:
    from gradlab.run_log import WatchedLog
    from gradlab.trace.watched import WatchedTrace

_SECONDS = 0.5  # between two looks, at least
_SHARE = 0.1  # of a core's time that looking takes at most: the run needs the rest
_MOST_LINES = 6  # of rules or problems that are shown


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Log of a run, or folder of a trace.")],
    once: Annotated[bool, typer.Option("--once", help="Show what is there now, and end.")] = False,
    as_json: AsJson = False,
) -> None:
    watched = _watched(run, need_lines=once or as_json)
    if as_json:
        print_json(watched.to_json())
    elif once:
        OUT.print(drawn(watched))
    else:
        _follow(watched)


def _watched(run: Path, need_lines: bool) -> WatchedLog | WatchedTrace:
    """Open a log or a trace. need_lines: refuse a log that is still empty."""
    if run.is_dir():
        from gradlab.trace.watched import WatchedTrace

        return WatchedTrace(run)
    from gradlab.run_log import WatchedLog

    log = WatchedLog(run)
    if need_lines:
        log.require_lines()
    return log


def _follow(watched: WatchedLog | WatchedTrace) -> None:
    """Draw it anew in the terminal until it ends, or Ctrl-C; without a terminal once, at the end."""
    from rich.live import Live

    with (
        suppress(KeyboardInterrupt),
        Live(console=OUT, auto_refresh=False) if OUT.is_terminal else nullcontext() as live,
    ):
        seconds = 0.0
        while True:
            if live is not None:
                live.update(drawn(watched), refresh=True)
            if watched.ended:
                break
            time.sleep(pause(seconds))
            began = time.monotonic()
            watched.look()
            seconds = time.monotonic() - began
    if not OUT.is_terminal:
        OUT.print(drawn(watched))


def pause(seconds: float) -> float:
    """Return the seconds until the next look, after one that took so many."""
    return max(_SECONDS, seconds / _SHARE)


def drawn(watched: WatchedLog | WatchedTrace) -> Group:
    """Draw a log or a trace for a terminal: how far it is, its tables, and rules or problems."""
    head, *facts = watched.lines()
    parts = [_text(str(watched.path)), _text(head, style="bold"), *map(_text, facts)]
    title, lines = watched.remarks()
    more = [Text(title), *(_text(f"  {one}") for one in lines[-_MOST_LINES:])] if lines else []
    return Group(*parts, *(_rows(*table) for table in watched.tables()), *more)


def _rows(title: str, columns: Sequence[str], cells: Sequence[Sequence[str]]) -> Group:
    """Draw a table of texts, below its title after an empty line. The first column names the row."""
    table = Table(title=_text(title) if title else None, title_justify="left", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number and column else "left")
    for row in cells:
        table.add_row(*map(_text, row))
    return Group(*([Text("")] if title else []), table)


def _text(words: str, style: str = "") -> Text:
    """Draw words from a file in one line: neither markup nor what drives a terminal."""
    return Text(printable(words, one_line=True), style=style)
