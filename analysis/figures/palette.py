"""The formats, colours, markers and smoothing of all figures; colour-blind readers can tell the colours apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

# Okabe & Ito, "Color universal design", 2008.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY = "#767676"
_METHOD_COLORS = {"dense": BLACK, "gradiveq": VERMILION, "topk": BLUE, "powersgd": GREEN}
_SPARE_COLORS = (ORANGE, PURPLE, SKY, "#8C6D31", "#5F4690", GREY)
_METHOD_MARKERS = {"dense": "o", "gradiveq": "s", "topk": "^", "powersgd": "D"}
_SPARE_MARKERS = ("v", "P", "X", "<", ">", "*", "h", "d", "p")
FORMATS = ("svg", "pdf")  # in which figures are written
# More layers than this are told apart by a colour bar, not by a legend.
MOST_NAMED_LAYERS = 7


def method_colors(names: Iterable[str]) -> dict[str, str]:
    """Give each method a colour, the same in every figure."""
    spare = iter(_SPARE_COLORS * 4)
    colors: dict[str, str] = {}
    for name in names:
        known = next((color for key, color in _METHOD_COLORS.items() if name.lower().startswith(key)), None)
        colors[name] = known if known and known not in colors.values() else next(spare)
    return colors


def method_markers(names: Iterable[str]) -> dict[str, str]:
    """Give each method a marker, the same in every figure, so that colour is never the only sign."""
    spare = iter(_SPARE_MARKERS * 4)
    return {name: _METHOD_MARKERS.get(name.lower()) or next(spare) for name in names}


def layer_colors(count: int) -> list[Any]:
    """Choose a colour per layer: named hues for few layers, a perceptually even ramp from first to last for many."""
    if count <= MOST_NAMED_LAYERS:
        return [BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, BLACK][:count]
    return list(_ramp(np.linspace(0, 1, count)))


def _ramp(places: np.ndarray) -> np.ndarray:
    from matplotlib import colormaps  # which takes long to import, and few need
    from matplotlib.colors import ListedColormap

    # The brightest tenth of viridis is too pale on white paper.
    return ListedColormap(colormaps["viridis"](np.linspace(0, 0.9, 256)))(places)


def short(name: str) -> str:
    """Shorten a layer's name by ".weight", unless only a number would be left."""
    stem = name.removesuffix(".weight")
    return name if stem.isdigit() else stem


def running_mean(values: Any, window: int) -> np.ndarray:
    """Average each value (samples,) with its neighbours, centred, without NaN; NaN if the window holds no value."""
    series = np.array([np.nan if v is None else v for v in values], dtype=float)
    finite = np.isfinite(series)
    kernel = np.ones(min(window, len(series)))
    total = np.convolve(np.where(finite, series, 0.0), kernel, "same")
    count = np.convolve(finite.astype(float), kernel, "same")
    return np.divide(total, count, out=np.full(len(series), np.nan), where=count > 0.5)


def smoothing_window(count: int) -> int:
    """Choose a window that leaves about 30 independent values."""
    return max(1, count // 30)
