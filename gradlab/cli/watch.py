"""`gradlab watch`: a run in the terminal while it trains."""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gradlab.cli.console import OUT, print_json
from gradlab.errors import GradlabError
from gradlab.formatting import format_bytes, format_number, format_seconds
from gradlab.printable import printable

KEPT = 4096  # lines, for means and sparklines
RECENT = 50  # steps that a mean is over
POINTS = 40  # of a sparkline
MOST_RULES = 6  # of which are shown
LARGEST = 8  # layers whose errors and norms are listed
_BARS = "▁▂▃▄▅▆▇█"
_SECONDS = 0.5  # between two looks at the file
_LINE_BYTES = 2**20  # a longer one is none of ours


def watch(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="File of ScalarLog, or of gradlab train --log.")],
    once: Annotated[bool, typer.Option("--once", help="Show what is there now, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the last numbers as JSON, and end.")] = False,
) -> None:
    """Show a running training: loss, bytes, times, errors and residuals by layer, and rules that fired.

    It ends when the run does, or with Ctrl-C, which the run does not notice.

    Examples:

      gradlab train text_chars --data input.txt --compress plan.safetensors --log run.jsonl

      gradlab watch run.jsonl
    """
    seen = Seen()
    tail = Tail(log)
    if once or as_json:
        seen.add(tail.lines())
        if not seen.rows and seen.end is None:
            raise GradlabError(f"{log} has no line yet: expected those of gradlab.runtime.ScalarLog")
        if as_json:
            print_json(seen.to_json())
        else:
            OUT.print(seen.shown(str(log)))
        return
    with Live(console=OUT, auto_refresh=False) if OUT.is_terminal else nullcontext() as live:
        while seen.end is None:
            seen.add(tail.lines())
            if live is not None:
                live.update(seen.shown(str(log)), refresh=True)
            with suppress(KeyboardInterrupt):
                time.sleep(_SECONDS if seen.end is None else 0)
                continue
            break
    if not OUT.is_terminal:
        OUT.print(seen.shown(str(log)))


class Tail:
    """The lines that a file grows by.

    Raises:
        GradlabError: if the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._rest = path, 0, b""

    def lines(self) -> Iterator[Mapping[str, Any]]:
        """Yield the whole lines that came since the last call. A file that became shorter is read from its start."""
        try:
            with open(self._path, "rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset, self._rest = 0, b""
                file.seek(self._offset)
                while block := file.read(_LINE_BYTES):
                    self._offset += len(block)
                    *whole, self._rest = (self._rest + block).split(b"\n")
                    if len(self._rest) > _LINE_BYTES:
                        raise GradlabError(f"{self._path} is no log: a line of more than {_LINE_BYTES} bytes")
                    yield from map(self._parsed, whole)
        except OSError as error:
            raise GradlabError(f"cannot read {self._path}: {error.strerror or error}") from None

    def _parsed(self, line: bytes) -> Mapping[str, Any]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict) or type(value.get("step")) is not int:
            start = line[:60].decode(errors="replace")
            raise GradlabError(f'{self._path} is no log: expected lines of JSON with a "step", got {start!r}')
        return value


class Seen:
    """What a log said so far.

    Attributes:
        rows: the last lines with numbers.
        rules: sentences of rules that fired.
        end: how the run ended; None: it goes on.
    """

    def __init__(self) -> None:
        self.rows: deque[dict[str, float | None]] = deque(maxlen=KEPT)
        self.rules: list[str] = []
        self.end: str | None = None

    def add(self, lines: Iterator[Mapping[str, Any]]) -> None:
        """Take in more lines."""
        for line in lines:
            if line.get("ended") is True or isinstance(line.get("error"), str):
                self.end = str(line.get("error") or "ended")
                continue
            self.end = None  # it was resumed
            self.rules += [str(rule)[:300] for rule in line.get("rules") or () if isinstance(rule, str)]
            numbers = {str(name): _number(value) for name, value in line.items() if _is_number(value)}
            self.rows.append(numbers)

    def to_json(self) -> dict[str, Any]:
        """The last numbers, what rules found, and how the run ended."""
        last = dict(self.rows[-1]) if self.rows else {}
        return {"last": last, "step_seconds": self.step_seconds, "rules": self.rules, "end": self.end}

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds of a step, of the recent ones."""
        recent = list(self.rows)[-RECENT:]
        if len(recent) < 2:
            return None
        first, last = recent[0], recent[-1]
        steps, seconds = ((last.get(name) or 0.0) - (first.get(name) or 0.0) for name in ("step", "time"))
        return seconds / steps if steps > 0 and seconds >= 0 else None

    def shown(self, title: str) -> Group:
        """Draw it for a terminal."""
        step = int(self.rows[-1]["step"] or 0) if self.rows else 0
        state = {None: "running", "ended": "ended"}.get(self.end, f"ended with an error: {self.end}")
        head = f"step {step}, {state}, {format_seconds(self.step_seconds)} a step"
        parts: list[Any] = [_text(title), _text(head, style="bold"), self._numbers(), *self._layers()]
        if self.rules:
            parts += [Text("rules that fired:"), *(_text(f"  {rule}") for rule in self.rules[-MOST_RULES:])]
        return Group(*parts)

    def _numbers(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for column, side in (("", "left"), ("last", "right"), (f"mean of {RECENT}", "right"), ("", "left")):
            table.add_column(column, justify=side)  # type: ignore[arg-type]
        names = [
            name for row in list(self.rows)[-1:] for name in row if name not in ("step", "time") and "/" not in name
        ]
        # What one's script gave, such as the loss, comes first; gradlab's own numbers are known by name.
        own = ("bytes", "seconds", "loss_scale", "finite")
        for name in sorted(names, key=lambda one: (one.endswith(own), names.index(one))):
            series = [row.get(name) for row in self.rows]
            known = [value for value in series[-RECENT:] if value is not None]
            mean = sum(known) / len(known) if known else None
            table.add_row(
                _text(name.replace("_", " ")),
                _written(name, series[-1]),
                _written(name, mean),
                sparkline(series),
            )
        return table

    def _layers(self) -> list[Any]:
        """The layers whose error is largest, with the norms of their residuals."""
        last = self.rows[-1] if self.rows else {}
        errors = {name.split("/", 1)[1]: value for name, value in last.items() if name.startswith("relative_error/")}
        if not errors:
            return []
        table = Table(box=None, pad_edge=False)
        table.add_column("layers with the largest error")
        table.add_column("relative error", justify="right")
        table.add_column("residual norm", justify="right")
        size = {name: math.inf if value is None else value for name, value in errors.items()}
        largest = sorted(errors, key=lambda name: -size[name])
        for name in largest[:LARGEST]:
            norm = last.get(f"residual_norm/{name}")
            table.add_row(_text(name), format_number(errors[name]), format_number(norm))
        if len(errors) > LARGEST:
            table.add_row(f"and {len(errors) - LARGEST} more", "", "")
        return [Text(""), table]


def _text(words: str, style: str = "") -> Text:
    """Words from a file: neither markup nor what drives a terminal."""
    return Text(printable(words, one_line=True), style=style)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _number(value: Any) -> float | None:
    """A number of a file; None if it is not finite."""
    try:
        found = math.nan if value is None else float(value)
    except OverflowError:  # a whole number beyond all floats
        return None
    return found if math.isfinite(found) else None


def _written(name: str, value: float | None) -> str:
    if value is None:
        return "not finite"
    if name.endswith("bytes"):
        return format_bytes(value)
    return format_seconds(value) if name.endswith("seconds") else format_number(value, 4)


def sparkline(series: Sequence[float | None]) -> str:
    """Draw a series in one line: means of as many stretches as there is room for, blank where nothing is finite.

    Args:
        series: values in order.

    Returns:
        At most `POINTS` characters.
    """
    count = min(POINTS, len(series))
    means = []
    for point in range(count):
        part = series[point * len(series) // count : (point + 1) * len(series) // count]
        known = [value for value in part if value is not None and math.isfinite(value)]
        means.append(sum(known) / len(known) if known else None)
    finite = [value for value in means if value is not None]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if value is None else _BARS[round((value - low) * scale)] for value in means)
