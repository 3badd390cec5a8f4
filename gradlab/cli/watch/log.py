"""The log of a run, a line of JSON per step: what it grows by, and what is shown of it."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Group

from gradlab.cli.watch.terminal import RECENT, Series, last_lines, numbers, rows, text
from gradlab.errors import GradlabError
from gradlab.formatting import format_number, format_seconds
from gradlab.json_form import require_form

_KEPT = 4096  # lines, for means and curves
_KEPT_RULES = 1000
_LARGEST = 8  # layers whose errors and norms are listed
_LINE_BYTES = 2**20  # a longer one is none of ours
_ERROR, _NORM = "relative_error/", "residual_norm/"  # before a layer's name
# gradlab's own numbers: what one's script gave, such as the loss, comes before them.
_OWN = ("bytes", "seconds", "loss_scale", "finite", "compression_ratio", "ratio_to_16_bits")
_DERIVED = ("step_seconds", "residual_norm", "largest_relative_error")
_LINE = {"step": int, "rules?": (None, [str])}


class Tail:
    """The lines that a file grows by.

    Raises:
        GradlabError: if the file cannot be read, or a line is none of a log. The next call goes on after that line.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._rest = path, 0, b""
        self._whole: deque[bytes] = deque()

    def lines(self) -> Iterator[Mapping[str, Any]]:
        """Yield the whole lines that came since the last call. A file that became shorter is read from its start."""
        while self._whole:
            yield self._parsed(self._whole.popleft())
        try:
            with open(self._path, "rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset, self._rest = 0, b""
                file.seek(self._offset)
                while block := file.read(_LINE_BYTES):
                    self._offset += len(block)
                    *whole, self._rest = (self._rest + block).split(b"\n")
                    if len(self._rest) > _LINE_BYTES:
                        self._rest = b""
                        raise GradlabError(f"{self._path} is no log: a line of more than {_LINE_BYTES} bytes")
                    self._whole.extend(whole)
                    while self._whole:
                        yield self._parsed(self._whole.popleft())
                if self._rest[:1] not in (b"", b"{"):  # a line that no more text makes one of a log is not waited for
                    rest, self._rest = self._rest, b""
                    self._parsed(rest)
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
        return require_form(value, _LINE, f"{self._path}: step {str(value['step'])[:20]}")


class WatchedLog:
    """What a log said so far.

    Args:
        path: of the log.

    Raises:
        GradlabError: as of `Tail`; from `look` too.

    Attributes:
        last: the numbers of the last line that has some.
        rows: the last lines' numbers of the run as a whole, with those that follow from them: seconds of a step, the
            norm of all layers' residuals, and the largest error. A line's numbers by layer are too many to keep.
        rules: sentences of rules that fired.
        end: how the run ended; None: it goes on.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._tail = path, Tail(path)
        self.last: dict[str, float | None] = {}
        self.rows: deque[dict[str, float | None]] = deque(maxlen=_KEPT)
        self.rules: list[str] = []
        self.end: str | None = None
        self.look()

    @property
    def ended(self) -> bool:
        """Whether the run has ended; one that is resumed in the same file goes on."""
        return self.end is not None

    def look(self) -> None:
        """Take in the lines that are new."""
        self.add(self._tail.lines())

    def require_lines(self) -> None:
        """Raise GradlabError if there is no line yet."""
        if not self.rows and self.end is None:
            raise GradlabError(f"{self._path} has no line yet: expected those of gradlab.runtime.ScalarLog")

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Take in more lines."""
        for line in lines:
            if line.get("ended") is True or isinstance(line.get("error"), str):
                self.end = str(line.get("error") or "ended")
                continue
            self.end = None  # it was resumed
            self.rules += [rule[:300] for rule in line.get("rules") or ()]
            del self.rules[:-_KEPT_RULES]
            self.last = {str(name): _number(value) for name, value in line.items() if _is_number(value)}
            self.rows.append(summary(self.last, self.rows[-1] if self.rows else {}))

    def to_json(self) -> dict[str, Any]:
        """The last numbers, what rules found, and how the run ended."""
        return {"last": self.last, "step_seconds": self.step_seconds, "rules": self.rules, "end": self.end}

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds of a step, of the recent ones."""
        recent = list(self.rows)[-RECENT:]
        return seconds_between(recent[0], recent[-1]) if recent else None

    def drawn(self) -> Group:
        """Draw the numbers, the layers with the largest errors, and rules that fired."""
        step = int(self.last.get("step") or 0)
        state = {None: "running", "ended": "ended"}.get(self.end, f"ended with an error: {self.end}")
        head = f"step {step}, {state}, {format_seconds(self.step_seconds)} a step"
        parts = (text(str(self._path)), text(head, style="bold"), numbers(self.series()))
        return Group(*parts, *self._layers(), *last_lines("rules that fired:", self.rules))

    def series(self) -> list[Series]:
        """Return the numbers of the run as a whole; what one's script gave comes first."""
        names = [name for name in (self.rows[-1] if self.rows else {}) if name not in ("step", "time")]
        names.sort(key=lambda name: name in _DERIVED or name.endswith(_OWN))
        return [Series(name, [row.get(name) for row in self.rows]) for name in names]

    def _layers(self) -> list[Group]:
        """The layers whose error is largest, with the norms of their residuals."""
        errors = by_layer(self.last, _ERROR)
        if not errors:
            return []
        size = {name: math.inf if value is None else value for name, value in errors.items()}
        largest = sorted(errors, key=lambda name: -size[name])[:_LARGEST]
        norms = by_layer(self.last, _NORM)
        cells = [(name, format_number(errors[name]), format_number(norms.get(name))) for name in largest]
        if len(errors) > _LARGEST:
            cells.append((f"and {len(errors) - _LARGEST} more", "", ""))
        return [rows("layers with the largest error", ("layer", "relative error", "residual norm"), cells)]


def summary(numbers: Mapping[str, float | None], before: Mapping[str, float | None]) -> dict[str, float | None]:
    """Reduce a line to its numbers of the run as a whole, with those that follow from it and from the line before.

    Args:
        numbers: of the line.
        before: what this function made of the line before; empty: there is none.

    Returns:
        Numbers by name, without those of single layers. Names that the line has itself stay as they are.
    """
    whole = {name: value for name, value in numbers.items() if "/" not in name}
    errors, norms = by_layer(numbers, _ERROR).values(), by_layer(numbers, _NORM).values()
    seconds = seconds_between(before, whole) if before else None
    derived: dict[str, float | None] = {} if seconds is None else {"step_seconds": seconds}
    if norms:
        derived["residual_norm"] = None if None in norms else _number(math.hypot(*filter(None, norms)))
    if errors:
        derived["largest_relative_error"] = None if None in errors else max(filter(None, errors), default=0.0)
    return derived | whole


def by_layer(numbers: Mapping[str, float | None], kind: str) -> dict[str, float | None]:
    """Return the numbers of one kind by layer."""
    return {name.removeprefix(kind): value for name, value in numbers.items() if name.startswith(kind)}


def seconds_between(first: Mapping[str, float | None], last: Mapping[str, float | None]) -> float | None:
    """Return the seconds of a step between two lines; None if the clock or the count went back, or stood still."""
    steps, seconds = ((last.get(name) or 0.0) - (first.get(name) or 0.0) for name in ("step", "time"))
    return seconds / steps if steps > 0 and seconds >= 0 else None


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _number(value: Any) -> float | None:
    """A number of a file; None if it is not finite."""
    try:
        found = math.nan if value is None else float(value)
    except OverflowError:  # a whole number beyond all floats
        return None
    return found if math.isfinite(found) else None
