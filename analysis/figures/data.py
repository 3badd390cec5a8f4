"""What a figure shows, as plain JSON, taken from what was drawn: lines, points, intervals, bars and images."""

from __future__ import annotations

from typing import Any, TypeGuard

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PathCollection, QuadMesh
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from gradlab.jsonable import plain

_DIGITS = 6  # significant: what no reader of a plot can see is not worth its bytes


def figure_data(figure: Figure) -> dict[str, Any]:
    """Read a figure's data as {"panels": [...]}.

    A panel has title, labels, scales, series of x and y, bars, points and images. Gaps (NaN) are null. References are
    lines across the whole axes: one of their coordinates is a share of the axes.
    """
    return dict(plain({"panels": [_panel(axes) for axes in figure.axes if axes.get_label() != "<colorbar>"]}))


def _panel(axes: Axes) -> dict[str, Any]:
    panel: dict[str, Any] = {
        "title": axes.get_title() or axes.get_title(loc="left"),
        "x": axes.get_xlabel(),
        "y": axes.get_ylabel(),
        "x_scale": axes.get_xscale(),
        "y_scale": axes.get_yscale(),
    }
    names = [text.get_text() for text in axes.get_yticklabels()] if _is_named(axes) else []
    lines = [line for line in axes.get_lines() if len(np.atleast_1d(line.get_xdata()))]
    named = {id(c.lines[0]): str(c.get_label()) for c in axes.containers if isinstance(c, ErrorbarContainer)}
    parts = {
        "series": [_line(line, named.get(id(line))) for line in lines if line.get_transform() == axes.transData],
        "references": [_line(line) for line in lines if line.get_transform() != axes.transData],
        "points": [_points(c) for c in axes.collections if isinstance(c, PathCollection)],
        "intervals": [_segments(c) for c in axes.collections if isinstance(c, LineCollection)],
        "bars": [_bar(patch) for patch in axes.patches if _is_bar(patch, axes)],
        "images": [_rounded(image.get_array()) for image in axes.get_images()]
        + [_rounded(c.get_array()) for c in axes.collections if isinstance(c, QuadMesh)],
        "rows": names,
    }
    return panel | {name: part for name, part in parts.items() if part}


def _is_named(axes: Axes) -> bool:
    return axes.get_yscale() == "linear" and any(
        text.get_text() and not _number(text.get_text()) for text in axes.get_yticklabels()
    )


def _number(text: str) -> bool:
    try:
        float(text.replace("\N{MINUS SIGN}", "-"))
    except ValueError:
        return False
    return True


def _label(artist: Any) -> str | None:
    label = str(artist.get_label())
    return None if label.startswith("_") else label


def _is_bar(patch: Patch, axes: Axes) -> TypeGuard[Rectangle]:
    return isinstance(patch, Rectangle) and patch.get_data_transform() == axes.transData


def _line(line: Any, label: str | None = None) -> dict[str, Any]:
    return {"label": label or _label(line), "x": _rounded(line.get_xdata()), "y": _rounded(line.get_ydata())}


def _points(collection: PathCollection) -> dict[str, Any]:
    x, y = np.asarray(collection.get_offsets(), float).T
    return {"label": _label(collection), "x": _rounded(x), "y": _rounded(y)}


def _segments(collection: LineCollection) -> dict[str, Any]:
    return {"label": _label(collection), "segments": [_rounded(part) for part in collection.get_segments()]}


def _bar(patch: Rectangle) -> list[float]:
    """Return left, bottom, width and height."""
    return list(_rounded(np.array([patch.get_x(), patch.get_y(), patch.get_width(), patch.get_height()])))


def _rounded(values: Any) -> Any:
    array: np.ndarray = np.ma.filled(np.ma.asarray(values, dtype=float), np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        decimals = _DIGITS - 1 - np.floor(np.log10(np.abs(array)))
    scale = 10.0 ** np.clip(np.where(np.isfinite(decimals), decimals, 0), -300, 300)
    return np.where(np.isfinite(array), np.round(array * scale) / scale, array).tolist()
