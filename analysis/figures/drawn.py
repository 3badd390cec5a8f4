"""Charts drawn by matplotlib, and what a page's script needs to know of the drawing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from gradlab.analysis.figures.chart import SERIES, Chart, Mark, Panel, numbers
from gradlab.analysis.figures.style import drawing, name_layers, panels, render, write_below

_POINTS_PER_INCH = 72


def draw_files(chart: Chart, name: str, formats: Sequence[str]) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
    """Draw a chart. Returns its files' contents by format, and its panels as `pointing` describes them."""
    with drawing():
        figure = draw(chart)
        return render(figure, name, formats), pointing(chart, figure)


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
        if mark.kind in SERIES and len(mark.y):
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
        series = (numbers(getattr(mark, axis)) for mark in panel.marks if mark.kind in SERIES)
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
        drawn = [mark.label for mark in panel.marks if mark.kind in SERIES and len(mark.y)]
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
