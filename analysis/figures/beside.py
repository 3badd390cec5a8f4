"""A figure of two reports: each plan's or layer's number in one against that in the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from matplotlib.figure import Figure

from gradlab.analysis.figures.style import GREY, method_colors, method_markers, panels

_MOST_NAMED = 12


def plot_beside(pairs: Mapping[str, tuple[float, float]], names: Sequence[str], text: Callable[[float], str]) -> Figure:
    """Draw a point for each plan or layer, with the diagonal on which both reports say the same."""
    figure, (axes,) = panels(1, 1, height=3.2)
    values = [value for pair in pairs.values() for value in pair]
    low, high = min(values), max(values)
    axes.axline((low, low), (high, high) if high > low else None, slope=None if high > low else 1.0, color=GREY, lw=0.8)
    named = len(pairs) <= _MOST_NAMED
    colors, markers = method_colors(pairs), method_markers(pairs)
    for name, (one, other) in pairs.items():
        marker, color = (markers[name], colors[name]) if named else ("o", GREY)
        axes.plot([one], [other], marker, color=color, label=name, linestyle="none", markersize=6)
    if low > 0 and high > 10 * low:
        axes.set(xscale="log", yscale="log")
    axes.set(xlabel=names[0], ylabel=names[1])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: text(value))
        axis.set_minor_formatter(lambda value, _: "")
    if named:
        figure.legend(loc="outside right upper")
    return figure
