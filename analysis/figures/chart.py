"""Charts as plain data: one value is drawn, written as CSV, and read off a page.

A chart has panels, and a panel marks of six kinds: lines, points, bars, heat, intervals and a timeline. Beside these
stand rules, bands and notes, which are no data.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gradlab.analysis.figures.palette import BLACK, GREY, layer_colors
from gradlab.files import write_whole

Numbers = Sequence[Any] | np.ndarray
SERIES = ("lines", "points", "intervals")
_COLUMNS = ("panel", "series", "x", "y", "low", "high", "value")


@dataclass(frozen=True)
class Mark:
    """Something drawn in a panel.

    kind: "lines", "points", "bars", "heat", "intervals", "timeline"; or "rule", "band" and "note".
    x, y: coordinates (n,); None and NaN are gaps. Heat: y is the matrix.
    ends: low and high ends along x of intervals and spans, (n,) each; the left ends of bars, (n,).
    """

    kind: str
    x: Numbers = ()
    y: Numbers = ()
    label: str = ""
    color: Any = BLACK
    ends: tuple[Numbers, ...] = ()
    look: Mapping[str, Any] = field(default_factory=dict)


def lines(x: Numbers, y: Numbers, color: Any = BLACK, label: str = "", **look: Any) -> Mark:
    """Draw a line through points (n,)."""
    return Mark("lines", x, y, label, color, look=look)


def points(x: Numbers, y: Numbers, color: Any = BLACK, label: str = "", marker: str = "o", **look: Any) -> Mark:
    """Draw points (n,)."""
    return Mark("points", x, y, label, color, look={"marker": marker, **look})


def rule(at: float | None, color: Any = GREY, label: str = "", across: str = "y", **look: Any) -> Mark:
    """Draw a line across the whole panel: at a value of y, or of x."""
    return Mark("rule", (), (at,), label, color, look={"across": across, "linewidth": 0.8, **look})


def note(x: float, y: float, text: str, **look: Any) -> Mark:
    """Write a few words at a point."""
    return Mark("note", (x,), (y,), text, GREY, look={"fontsize": 7, **look})


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    rows: names of the rows 0, 1, ..., from above, in place of a scale of y.
    ticks: places on the axis of x with their labels.
    x_text, y_text: functions that write an axis's values.
    legend: whether the panel has a legend of its own.
    look: arguments of `Axes.set`, such as xscale and ylim.
    """

    marks: Sequence[Mark]
    x: str = ""
    y: str = ""
    title: str = ""
    rows: Sequence[str] = ()
    ticks: Sequence[tuple[float, str]] = ()
    x_text: Callable[[float], str] | None = None
    y_text: Callable[[float], str] | None = None
    legend: bool = False
    look: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Chart:
    """Panels side by side.

    height: inches of a row of panels, without the margin of the whole.
    legend: "below", "right" or "", for the labels of all panels.
    layers: names of the layers that the first lines of each panel show, in order; a colour bar names many.
    shares: axes that panels have in common, as `Figure.subplots` takes them.
    """

    panels: Sequence[Panel]
    columns: int = 1
    height: float = 2.5
    legend: str = "below"
    layers: Sequence[str] = ()
    caption: str = ""
    shares: Mapping[str, Any] = field(default_factory=dict)

    def csv(self) -> str:
        """Write every mark of the six kinds, a row per value; numbers have six digits."""
        written = io.StringIO()
        table = csv.writer(written, lineterminator="\n")
        table.writerow(_COLUMNS)
        for number, panel in enumerate(self.panels, 1):
            for mark in panel.marks:
                table.writerows([panel.title or str(number), mark.label, *row] for row in _values(mark))
        return written.getvalue()


def by_layer(layers: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Pair layers with their colours."""
    return zip(layers, layer_colors(len(layers)), strict=True)


def round_ticks(
    values: Iterable[float], text: Callable[[float], str] = lambda value: f"{value:g}", most: int = 9
) -> list[tuple[float, str]]:
    """Choose ticks 1, 2, 5, 10, ... within the range of positive values, or its ends."""
    low, high = min(values := list(values)), max(values)
    steps = [base * 10.0**power for power in range(-3, 13) for base in (1, 2, 5)]
    ticks = [step for step in steps if 0.8 * low <= step <= 1.25 * high]
    ticks = ticks if len(ticks) > 1 else sorted({low, high})
    return [(tick, text(tick)) for tick in ticks[:: -(-len(ticks) // most)]]


def numbers(values: Numbers) -> np.ndarray:
    """Turn None into NaN: float64."""
    return np.array(values, dtype=object).astype(float)


def apart(pairs: Iterable[tuple[Any, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Split pairs into x and y, (n,) each."""
    x, y = numbers(list(pairs)).reshape(-1, 2).T
    return x, y


def _values(mark: Mark) -> Iterator[list[Any]]:
    """Rows of a mark in `csv`, without panel and series."""
    if mark.kind == "heat":
        for at, row in enumerate(numbers(mark.y)):
            yield from ([_short(column), _short(at), "", "", _short(value)] for column, value in enumerate(row))
    elif mark.kind in (*SERIES, "bars", "timeline"):
        ends = [numbers(part) for part in mark.ends] or [np.full(len(mark.y), np.nan)] * 2
        for x, y, *more in zip(numbers(mark.x), numbers(mark.y), *ends, strict=True):
            yield [_short(x), _short(y), *(_short(end) for end in more), *[""] * (3 - len(more))]


def _short(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else ""


def write_chart(chart: Chart, out: Path) -> None:
    """Draw a chart and write it in the format of the file's ending, whole or not at all."""
    from gradlab.analysis.figures.drawn import draw_files  # matplotlib takes long to import

    form = out.suffix.removeprefix(".")
    files, _ = draw_files(chart, out.stem, (form,))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, files[form])
