"""What a page needs to read values off a figure: which elements are series, and where each panel's axes lie.

A page's script finds the point of a series that is nearest to the pointer in the SVG itself, and turns its place into
values by the axes. Nothing that the SVG holds is written twice.
"""

from __future__ import annotations

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

_POINTS_PER_INCH = 72
_SCALES = ("linear", "log")


def mark_series(figure: Figure) -> None:
    """Give every line and every set of points an id in the SVG. Call it before the figure is rendered."""
    for panel, axes in enumerate(_panels(figure)):
        for number, artist in enumerate(_series(axes)):
            artist.set_gid(f"series-{panel}-{number}")


def panels_of(figure: Figure) -> list[dict[str, Any]]:
    """Describe a rendered figure's panels: "box" in the SVG's units, "x" and "y" with scale, "series" by id."""
    width, height = (_POINTS_PER_INCH * float(inches) for inches in figure.get_size_inches())
    described = []
    labels = [(axes.get_xlabel(), axes.get_ylabel()) for axes in _panels(figure)]
    shared = tuple(next((label for label in ends if label), "") for ends in zip(*labels, strict=True)) or ("", "")
    for panel, axes in enumerate(_panels(figure)):
        if axes.get_xscale() not in _SCALES or axes.get_yscale() not in _SCALES:
            continue
        place = axes.get_position()
        described.append(
            {
                "box": [
                    round(value, 2)
                    for value in (place.x0 * width, (1 - place.y1) * height, place.x1 * width, (1 - place.y0) * height)
                ],
                "x": _axis(axes.get_xlabel() or shared[0], axes.get_xscale(), axes.get_xlim()),
                "y": _axis(axes.get_ylabel() or shared[1], axes.get_yscale(), axes.get_ylim()),
                "series": {
                    f"series-{panel}-{number}": _label(artist, axes) for number, artist in enumerate(_series(axes))
                },
            }
        )
    return [panel for panel in described if panel["series"]]


def _panels(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.get_label() != "<colorbar>" and axes.axison]


def _series(axes: Axes) -> list[Any]:
    """Lines and sets of points in the axes' own coordinates; lines across the whole axes are none."""
    lines = [line for line in axes.get_lines() if line.get_transform() == axes.transData]
    points = [one for one in axes.collections if isinstance(one, PathCollection)]
    return [*lines, *points]


def _label(artist: Any, axes: Axes) -> str:
    named = {id(c.lines[0]): str(c.get_label()) for c in axes.containers if isinstance(c, ErrorbarContainer)}
    label = named.get(id(artist), str(artist.get_label())) if isinstance(artist, Line2D) else str(artist.get_label())
    return "" if label.startswith("_") else label


def _axis(label: str, scale: str, limits: tuple[float, float]) -> dict[str, Any]:
    low, high = (float(limit) for limit in limits)
    if not (math.isfinite(low) and math.isfinite(high)):
        low, high = 0.0, 1.0
    return {"label": label, "scale": scale, "low": low, "high": high}
