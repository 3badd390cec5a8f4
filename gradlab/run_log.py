"""The log of a run (`gradlab.runtime.ScalarLog`), a line of JSON per step, read while it grows, with tables of it."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradlab.errors import GradlabError
from gradlab.formatting import format_bytes, format_number, format_seconds, sparkline
from gradlab.json_form import require_form

RECENT = 50  # values that a mean is over
_KEPT = 4096  # lines, for means and curves
_KEPT_RULES = 1000
_LARGEST = 8  # layers whose errors and norms are listed
_LINE_BYTES = 2**20  # a longer one is none of ours
_ERROR, _NORM = "relative_error/", "residual_norm/"  # before a layer's name
# gradlab's own numbers: what one's script gave, such as the loss, comes before them.
_OWN = ("bytes", "seconds", "loss_scale", "finite", "compression_ratio", "ratio_to_16_bits")
_RANK, _SLOW = "slowest_rank", 1.25  # times the usual rank's seconds, beyond which it is named
_DERIVED = ("noise_scale", "step_seconds", "residual_norm", "largest_relative_error")
_LINE = {"step": int, "rules?": (None, [str])}
Numbers = Mapping[str, float | None]


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


class WatchedLog:
    """A log as far as it was read.

    last: the numbers of the last line that has some.
    rows: the last lines' summaries; a line's numbers by layer are too many to keep.
    end: how the run ended; None: it goes on.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._offset = path, 0
        self.last: dict[str, float | None] = {}
        self.rows: deque[dict[str, float | None]] = deque(maxlen=_KEPT)
        self.rules: list[str] = []
        self.end: str | None = None
        self.look()

    @property
    def ended(self) -> bool:
        """Whether the run has ended; one that is resumed in the same file goes on."""
        return self.end is not None

    def require_lines(self) -> None:
        """Refuse a log without a line."""
        if not self.rows and self.end is None:
            raise GradlabError(f"{self.path} has no line yet: expected those of gradlab.runtime.ScalarLog")

    def look(self) -> None:
        """Take in the lines that are new."""
        for line in self._lines():
            if line.get("ended") is True or isinstance(line.get("error"), str):
                self.end = str(line.get("error") or "ended")
                continue
            self.end = None  # it was resumed
            self.rules += [rule[:300] for rule in line.get("rules") or ()]
            del self.rules[:-_KEPT_RULES]
            self.last = {str(name): _number(value) for name, value in line.items() if _is_number(value)}
            self.rows.append(summary(self.last, self.rows[-1] if self.rows else {}))

    def _lines(self) -> Iterator[Mapping[str, Any]]:
        """Yield the whole lines that are new. A file that became shorter is read from its start.

        After an error the next call goes on behind the wrong line.
        """
        try:
            with open(self.path, "rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                while line := file.readline(_LINE_BYTES):
                    if not line.endswith(b"\n") and line.startswith(b"{") and len(line) < _LINE_BYTES:
                        return  # more of it may come
                    self._offset += len(line)
                    yield self._parsed(line)
        except OSError as error:
            raise GradlabError(f"cannot read {self.path}: {error.strerror or error}") from None

    def _parsed(self, line: bytes) -> Mapping[str, Any]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict) or type(value.get("step")) is not int:
            start = line[:60].decode(errors="replace").rstrip("\n")
            raise GradlabError(f'{self.path} is no log: expected lines of JSON with a "step", got {start!r}')
        return require_form(value, _LINE, f"{self.path}: step {str(value['step'])[:20]}")

    def to_json(self) -> dict[str, Any]:
        """The last numbers, what rules found, and how the run ended."""
        return {"last": self.last, "step_seconds": self.step_seconds, "rules": self.rules, "end": self.end}

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds of a step, over the recent ones."""
        recent = list(self.rows)[-RECENT:]
        return seconds_between(recent[0], recent[-1]) if recent else None

    def lines(self) -> list[str]:
        """How far the run is, in one line, and a slow rank."""
        step = int(self.last.get("step") or 0)
        state = {None: "running", "ended": "ended"}.get(self.end, f"ended with an error: {self.end}")
        return [f"step {step}, {state}, {format_seconds(self.step_seconds)} a step", *self._slow_rank()]

    def _slow_rank(self) -> list[str]:
        """Name the slowest rank, if it takes much longer than the others."""
        rank, slow, usual = (self.last.get(name) for name in (_RANK, f"{_RANK}_seconds", "usual_rank_seconds"))
        if rank is None or slow is None or usual is None or slow <= _SLOW * usual:
            return []
        after = f"its gradients are ready after {format_seconds(slow)}, the usual rank's after {format_seconds(usual)}"
        return [f"rank {rank:.0f} is slow: {after}"]

    def tables(self) -> list[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
        """Titles, columns and cells: the numbers, and the layers whose error is largest with their residuals' norms."""
        whole = ("", ("", "last", f"mean of {RECENT}", ""), [one.cells() for one in self.series()])
        errors, norms = by_layer(self.last, _ERROR), by_layer(self.last, _NORM)
        size = {name: math.inf if value is None else value for name, value in errors.items()}
        largest = sorted(errors, key=lambda name: -size[name])[:_LARGEST]
        cells = [(name, format_number(errors[name]), format_number(norms.get(name))) for name in largest]
        if len(errors) > _LARGEST:
            cells.append((f"and {len(errors) - _LARGEST} more", "", ""))
        columns = ("layer", "relative error", "residual norm")
        return [whole, *([("layers with the largest error", columns, cells)] if cells else [])]

    def remarks(self) -> tuple[str, Sequence[str]]:
        """Title and lines: rules that fired."""
        return "warnings by rules:", self.rules

    def series(self) -> list[Series]:
        """The numbers of the run as a whole; what one's script gave comes first."""
        names = [name for name in (self.rows[-1] if self.rows else {}) if name not in ("step", "time", _RANK)]
        names.sort(key=lambda name: name in _DERIVED or name.endswith(_OWN))
        return [Series(name, [row.get(name) for row in self.rows]) for name in names]


def summary(line: Numbers, before: Numbers) -> dict[str, float | None]:
    """Reduce a line to its numbers of the run as a whole, with those that follow from it and from the summary before.

    Names that the line has itself stay as they are.
    """
    whole = {name: value for name, value in line.items() if "/" not in name}
    errors, norms = by_layer(line, _ERROR).values(), by_layer(line, _NORM).values()
    seconds = seconds_between(before, whole) if before else None
    derived: dict[str, float | None] = {} if seconds is None else {"step_seconds": seconds}
    if norms:
        derived["residual_norm"] = None if None in norms else _number(math.hypot(*filter(None, norms)))
    if errors:
        derived["largest_relative_error"] = None if None in errors else max(filter(None, errors), default=0.0)
    return derived | whole


def by_layer(line: Numbers, kind: str) -> dict[str, float | None]:
    """The numbers of one kind by layer."""
    return {name.removeprefix(kind): value for name, value in line.items() if name.startswith(kind)}


def seconds_between(first: Numbers, last: Numbers) -> float | None:
    """The seconds of a step between two lines; None if the clock or the count went back, or stood still."""
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
