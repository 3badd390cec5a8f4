"""`gradlab watch`: the command."""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradlab.cli.console import OUT, print_json
from gradlab.errors import GradlabError

if TYPE_CHECKING:
    from gradlab.cli.watch.view import Watched

PORT = 8421
_SECONDS = 0.5  # between two looks, at least
_SHARE = 0.1  # of a core's time that looking takes at most: the run needs the rest


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Log of a run, or folder of a trace.")],
    once: Annotated[bool, typer.Option("--once", help="Show what is there now, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the last numbers as JSON, and end.")] = False,
    page: Annotated[bool, typer.Option("--serve", help="Show it as a page on 127.0.0.1, until Ctrl-C.")] = False,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help=f"Of the page. 0: any free one. [default: {PORT}]")
    ] = None,
) -> None:
    """Show a run while it trains or records, in the terminal or as a page.

    Of a log (gradlab.runtime.ScalarLog, gradlab train --log): loss, bytes, ratio, times, errors and residuals by layer,
    and rules that fired. Of a trace's folder (gradlab.capture.TraceRecorder, gradlab train --capture): iterations,
    bytes and their rate, what the budget leaves, the loss, and every rank. A recording that was killed is shown too.

    It ends when the run does, or with Ctrl-C. It only reads: the run does not notice.

    Examples:

      gradlab train text_chars --data input.txt --compress plan.safetensors --log run.jsonl

      gradlab watch run.jsonl

      gradlab watch run.jsonl --serve

      gradlab watch trace --once
    """
    if page and (once or as_json):
        raise GradlabError("--serve shows a page until Ctrl-C: leave --once and --json out")
    if port is not None and not page:
        raise GradlabError(f"--port {port} is of the page: give --serve too")
    watched = _watched(run, need_lines=once or as_json)
    if page:
        from gradlab.cli.watch.server import serve

        serve(watched, PORT if port is None else port, str(run))
    elif once or as_json:
        print_json(watched.to_json()) if as_json else _print(watched)
    else:
        _follow(watched)


def _watched(run: Path, need_lines: bool) -> Watched:
    """What is shown of a path. need_lines: refuse a log that is empty still."""
    if run.is_dir():
        from gradlab.cli.watch.recording import WatchedTrace

        trace = WatchedTrace(run)
        trace.settle()
        return trace
    from gradlab.cli.watch.log import WatchedLog

    log = WatchedLog(run)
    if need_lines:
        log.require_lines()
    return log


def _print(watched: Watched) -> None:
    from gradlab.cli.watch.terminal import drawn

    OUT.print(drawn(watched.view()))


def _follow(watched: Watched) -> None:
    """Draw it anew in the terminal until it ends, or Ctrl-C; without a terminal once, at the end."""
    from rich.live import Live

    from gradlab.cli.watch.terminal import drawn

    with (
        suppress(KeyboardInterrupt),
        Live(console=OUT, auto_refresh=False) if OUT.is_terminal else nullcontext() as live,
    ):
        seconds = 0.0
        while True:
            if live is not None:
                live.update(drawn(watched.view()), refresh=True)
            if watched.ended:
                break
            time.sleep(pause(seconds))
            began = time.monotonic()
            watched.look()
            seconds = time.monotonic() - began
    if not OUT.is_terminal:
        _print(watched)


def pause(seconds: float) -> float:
    """Return the seconds until the next look, after one that took so many."""
    return max(_SECONDS, seconds / _SHARE)
