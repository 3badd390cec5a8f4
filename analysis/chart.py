"""Charts as plain data: one value is drawn, written as CSV, and read off a page.

A chart has panels, and a panel marks of six kinds: lines, points, bars, heat, intervals and a timeline. Beside these
stand rules, bands and notes, which are no data.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from gradlab.analysis.figures.style import BLACK, GREY, drawing, layer_colors, name_layers, panels, render, write_below
from gradlab.files import write_whole

Numbers = Sequence[Any] | np.ndarray
_POINTS_PER_INCH = 72
_SERIES = ("lines", "points", "intervals")
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
    elif mark.kind in (*_SERIES, "bars", "timeline"):
        ends = [numbers(part) for part in mark.ends] or [np.full(len(mark.y), np.nan)] * 2
        for x, y, *more in zip(numbers(mark.x), numbers(mark.y), *ends, strict=True):
            yield [_short(x), _short(y), *(_short(end) for end in more), *[""] * (3 - len(more))]


def _short(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else ""


def draw(chart: Chart) -> Figure:
    """Draw a chart. Call it inside `gradlab.analysis.figures.style.drawing`."""
    figure, axes = panels(len(chart.panels), chart.columns, height=chart.height, **chart.shares)
    write_below(figure, chart.caption)
    for number, (one, panel) in enumerate(zip(axes, chart.panels, strict=True)):
        _draw_panel(one, panel, number)
    if chart.layers:
        name_layers(figure, axes, chart.layers)
    elif chart.legend and (named := _named(axes)):
        if chart.legend == "below":
            figure.legend([*named.values()], [*named], loc="outside lower center", ncols=min(4, len(named)))
        else:
            figure.legend([*named.values()], [*named], loc="outside right upper")
    return figure


def _named(axes: Sequence[Axes]) -> dict[str, Any]:
    """Labels with the first thing that bears each, without those that a panel's own legend shows."""
    without = (one for one in axes if one.get_legend() is None)
    return {label: handle for one in without for handle, label in zip(*one.get_legend_handles_labels(), strict=True)}


def _draw_panel(axes: Axes, panel: Panel, number: int) -> None:
    series = 0
    for mark in panel.marks:
        artist = _DRAWN[mark.kind](axes, mark)
        if mark.kind in _SERIES and len(mark.y):
            artist.set_gid(f"series-{number}-{series}")
            series += 1
    axes.set(xlabel=panel.x, ylabel=panel.y, title=panel.title, **_possible(panel))
    if panel.rows:
        axes.set_yticks(range(len(panel.rows)), panel.rows, fontsize=8 if len(panel.rows) <= 30 else 4)
        axes.invert_yaxis()
    if panel.ticks:
        axes.set_xticks(*zip(*panel.ticks, strict=True))
        axes.set_xticks([], minor=True)
    for axis, text in ((axes.xaxis, panel.x_text), (axes.yaxis, panel.y_text)):
        if text is not None:
            axis.set_major_formatter(FuncFormatter(partial(_written, text)))
            axis.set_minor_formatter(NullFormatter())
    if panel.legend:
        axes.legend(fontsize=7)


def _possible(panel: Panel) -> dict[str, Any]:
    """Leave out a logarithmic scale that has nothing positive to show, as of gradients that are all zero."""

    def positive(axis: str) -> bool:
        series = (numbers(getattr(mark, axis)) for mark in panel.marks if mark.kind in _SERIES)
        return any((values > 0).any() for values in series)

    return {name: value for name, value in panel.look.items() if value != "log" or positive(name[0])}


def _written(text: Callable[[float], str], value: float, _: int | None) -> str:
    return text(value)


def _lines(axes: Axes, mark: Mark) -> Any:
    return axes.plot(numbers(mark.x), numbers(mark.y), color=mark.color, label=mark.label or None, **mark.look)[0]


def _points(axes: Axes, mark: Mark) -> Any:
    return _lines(axes, replace(mark, look={"linestyle": "none", **mark.look}))


def _intervals(axes: Axes, mark: Mark) -> Any:
    x, (low, high) = numbers(mark.x), map(numbers, mark.ends)
    look = {"fmt": "o", "markersize": 3, "linewidth": 0.9, **mark.look}
    bars = axes.errorbar(x, numbers(mark.y), xerr=[x - low, high - x], color=mark.color, label=mark.label, **look)
    return bars.lines[0]


def _bars(axes: Axes, mark: Mark) -> Any:
    left = numbers(mark.ends[0]) if mark.ends else 0.0
    return axes.barh(numbers(mark.y), numbers(mark.x), left=left, color=mark.color, label=mark.label, **mark.look)


def _heat(axes: Axes, mark: Mark) -> Any:
    axes.grid(False)
    return axes.imshow(numbers(mark.y), interpolation="nearest", **mark.look)


def _timeline(axes: Axes, mark: Mark) -> Any:
    starts, stops = map(numbers, mark.ends)
    look = {"height": 0.8, "edgecolor": "white", "linewidth": 0.2, **mark.look}
    return axes.barh(numbers(mark.y), stops - starts, left=starts, color=mark.color, label=mark.label, **look)


def _rule(axes: Axes, mark: Mark) -> Any:
    look, at = dict(mark.look), mark.y[0]
    across = axes.axhline if look.pop("across") == "y" else axes.axvline
    if at is not None and math.isfinite(at):
        across(at, color=mark.color, label=mark.label or None, **look)


def _band(axes: Axes, mark: Mark) -> Any:
    """From one end to the other, along x where only x is given, else along y."""
    span, ends = (axes.axvspan, mark.x) if len(mark.x) else (axes.axhspan, mark.y)
    span(*ends, color=mark.color, linewidth=0, zorder=0, **mark.look)


def _note(axes: Axes, mark: Mark) -> Any:
    axes.text(mark.x[0], mark.y[0], mark.label, color=mark.color, **mark.look)


_DRAWN: Mapping[str, Callable[[Axes, Mark], Any]] = {
    "lines": _lines,
    "points": _points,
    "intervals": _intervals,
    "bars": _bars,
    "heat": _heat,
    "timeline": _timeline,
    "rule": _rule,
    "band": _band,
    "note": _note,
}


def pointing(chart: Chart, figure: Figure) -> list[dict[str, Any]]:
    """Describe a rendered figure's panels for a page's script, which finds the point nearest to the pointer in the SVG.

    "box" is in the SVG's units, "x" and "y" have label, scale and limits, "series" labels by the SVG's ids.
    """
    width, height = (_POINTS_PER_INCH * float(inches) for inches in figure.get_size_inches())
    labels = zip(*((panel.x, panel.y) for panel in chart.panels), strict=True)
    shared = [next((label for label in of_axis if label), "") for of_axis in labels]
    described = []
    for number, (axes, panel) in enumerate(zip(figure.axes, chart.panels, strict=False)):
        drawn = [mark.label for mark in panel.marks if mark.kind in _SERIES and len(mark.y)]
        if not drawn or not {axes.get_xscale(), axes.get_yscale()} <= {"linear", "log"}:
            continue
        place = axes.get_position()
        box = (place.x0 * width, (1 - place.y1) * height, place.x1 * width, (1 - place.y0) * height)
        described.append(
            {
                "box": [round(value, 2) for value in box],
                "x": _axis(panel.x or shared[0], axes.get_xscale(), axes.get_xlim()),
                "y": _axis(panel.y or shared[1], axes.get_yscale(), axes.get_ylim()),
                "series": {f"series-{number}-{place}": label for place, label in enumerate(drawn)},
            }
        )
    return described


def _axis(label: str, scale: str, limits: tuple[float, float]) -> dict[str, Any]:
    low, high = (float(limit) for limit in limits)
    known = math.isfinite(low) and math.isfinite(high)
    return {"label": label, "scale": scale, "low": low if known else 0.0, "high": high if known else 1.0}


def write_chart(chart: Chart, out: Path) -> None:
    """Draw a chart and write it in the format of the file's ending, whole or not at all."""
    with drawing():
        files = render(draw(chart), out.stem)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, files[out.suffix.removeprefix(".")])
