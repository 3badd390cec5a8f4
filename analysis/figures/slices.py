"""Figures of what GradiVeQ builds on, one panel or row per layer. Each takes the JSON of `measure_slice_structure`.

After Yu et al., "GradiVeQ", NeurIPS 2018: Fig. 4 (adjacent gradients) and Fig. 5 (slice size). Beside them stand the
loss on later iterations and that of random bases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradlab.analysis.figures.spectra import short
from gradlab.analysis.figures.style import BLACK, BLUE, GREY, VERMILION, panels
from gradlab.formatting import format_percent

Structure = Mapping[str, Any]
Layer = Mapping[str, Any]
Style = dict[str, Any]
_LOSS = "loss ‖ĝ - g‖² / ‖g‖²"
_LATER: Style = {"color": VERMILION, "marker": "o"}
_IN_SAMPLE: Style = {"color": BLUE, "linestyle": "-.", "linewidth": 1.0}
_RANDOM: Style = {"color": GREY, "linestyle": "--", "linewidth": 1.0}


def measured(structure: Structure, part: str) -> list[Layer]:
    """Choose the layers that have a part."""
    return [layer for layer in structure["layers"] if layer[part] is not None]


def plot_adjacent(structure: Structure) -> Figure:
    """Draw Fig. 4: correlation of adjacent gradients, and two of them as recorded and on their principal axes."""
    layers = measured(structure, "scatter")
    figure, axes = panels(3 * len(layers), 3, height=2.15)
    for row, layer in enumerate(layers):
        correlation, before, after = axes[3 * row : 3 * row + 3]
        matrix = _numbers(layer["correlation"]["matrix"])
        image = correlation.imshow(matrix, vmin=-1, vmax=1, cmap="RdBu_r", interpolation="nearest")
        correlation.set(title=short(layer["name"]), xlabel="adjacent gradient", ylabel="adjacent gradient")
        correlation.grid(False)
        _scatter(before, layer["scatter"]["before"], ("gradient 1", "gradient 2"), "as recorded")
        shares = " + ".join(format_percent(share, 0) for share in layer["scatter"]["share"][:2])
        _scatter(after, layer["scatter"]["after"], ("gradient 1'", "gradient 2'"), f"rotated: {shares}")
    figure.colorbar(image, ax=axes, label="correlation", aspect=30, shrink=0.5, pad=0.02)
    return figure


def _scatter(axes: Axes, points: Sequence[Sequence[float]], names: tuple[str, str], title: str) -> None:
    first, second = _numbers(points)[:, :2].T
    axes.plot(first, second, ".", color=BLUE, markersize=3)
    axes.set(ylabel=names[1], title=title)
    axes.set_xlabel(names[0], loc="left")  # a power of ten stands at the right
    axes.set_aspect("equal", adjustable="datalim")
    axes.ticklabel_format(style="sci", scilimits=(-2, 2))
    axes.locator_params(nbins=4)


def plot_slice_sizes(structure: Structure) -> Figure:
    """Draw Fig. 5: slice size against the loss of the first slice's compressor on the others, and compression ratio."""
    layers = measured(structure, "slice_sizes")
    figure, axes = panels(2 * len(layers), 2, height=1.9)
    for row, layer in enumerate(layers):
        left, right = axes[2 * row : 2 * row + 2]
        tried, sizes = layer["slice_sizes"], layer["slice_sizes"]["sizes"]
        multiples = np.array(tried["multiples"], dtype=bool)
        _three_losses(left, sizes, tried, "later iterations", "o")
        kept = np.flatnonzero(multiples)
        left.plot(
            np.array(sizes)[kept], _numbers(tried["later_loss"])[kept], "s", color=BLACK, markersize=7, mfc="none"
        )
        right.plot(sizes, tried["ratios"], color=BLACK, marker="o")
        for panel in (left, right):
            for size in np.array(sizes)[kept]:
                panel.axvline(size, color=GREY, linewidth=0.6, linestyle=":")
            panel.set(xlabel="slice size K, elements", xscale="log")
            _ticks(panel, sizes)
        left.set(ylabel=_LOSS, title=short(layer["name"]))
        left.set_ylim(bottom=0)
        right.set(ylabel="K / d", title=f"boxes, dotted: multiples of {layer['period_is']} = {tried['period']}")
    _legend(figure, axes[0])
    return figure


def plot_consistency(structure: Structure) -> Figure:
    """Draw the loss of every slice under every other slice's basis, on later iterations."""
    layers = measured(structure, "consistency")
    figure, axes = panels(len(layers), 2, height=2.7)
    # One scale for all: layers are to be compared, and 1 is what losing everything means.
    most = max(1.0, *(float(_numbers(layer["consistency"]["later"]).max()) for layer in layers))
    for panel, layer in zip(axes, layers, strict=True):
        losses = layer["consistency"]
        image = panel.imshow(_numbers(losses["later"]), vmin=0, vmax=most, cmap="cividis", interpolation="nearest")
        numbers = losses["slices"]
        shown = np.unique(np.linspace(0, len(numbers) - 1, min(6, len(numbers))).round().astype(int))
        for set_ticks in (panel.set_xticks, panel.set_yticks):
            set_ticks(shown, [str(numbers[m]) for m in shown])
        panel.set(title=f"{short(layer['name'])}, K = {losses['slice_size']}", xlabel="slice", ylabel="basis of slice")
        panel.grid(False)
    figure.colorbar(image, ax=axes, label=_LOSS, aspect=30, pad=0.02)
    return figure


def plot_staleness(structure: Structure) -> Figure:
    """Draw the loss by age of the basis, in iterations, with the suggested L_c."""
    layers, limit = measured(structure, "staleness"), 1 + structure["tolerance"]
    figure, axes = panels(len(layers), 2, height=2.4)
    for panel, layer in zip(axes, layers, strict=True):
        staleness = layer["staleness"]
        ages = np.sqrt(np.prod(np.array(staleness["ages"], dtype=float), axis=1))
        for number, window in enumerate(staleness["by_window"]):
            label = "one window" if number == 0 else None
            _through(panel, ages, window, color=GREY, linewidth=0.6, alpha=0.7, label=label)
        _through(panel, ages, staleness["random_loss"], **_RANDOM, label="random basis, same d")
        _through(panel, ages, staleness["loss"], **_LATER, label="all windows")
        panel.axhline(limit * staleness["loss"][0], color=BLACK, linestyle=":", label=f"{limit:g} x the youngest")
        suggested = staleness["suggested"]
        panel.axvline(suggested or staleness["last_age"], color=BLACK, linewidth=1, linestyle="--")
        lasts = f"L_c = {suggested}" if suggested is not None else f"L_c at least {staleness['last_age']}"
        panel.set(title=f"{short(layer['name'])}: {lasts}", xlabel="age, iterations", ylabel=_LOSS, xscale="log")
        _ticks(panel, ages)
        panel.set_ylim(bottom=0)
    _legend(figure, axes[0])
    return figure


def _through(panel: Axes, ages: np.ndarray, losses: Sequence[float | None], **style: Any) -> None:
    """Draw a line through the bins that hold a value."""
    values = _numbers(losses)
    there = np.isfinite(values)
    panel.plot(ages[there], values[there], **style)


def _three_losses(panel: Axes, sizes: Sequence[int], losses: Layer, later: str, marker: str) -> None:
    panel.plot(sizes, _numbers(losses["random_loss"]), **_RANDOM, label="random basis, same d")
    panel.plot(sizes, _numbers(losses["in_sample_loss"]), **_IN_SAMPLE, label="iterations fitted on")
    panel.plot(sizes, _numbers(losses["later_loss"]), color=VERMILION, marker=marker, label=later)


def _legend(figure: Figure, axes: Axes) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)


def _numbers(values: Any) -> np.ndarray:
    return np.array(values, dtype=object).astype(float)  # None becomes NaN


def _ticks(panel: Axes, values: Any) -> None:
    """Set ticks 1, 2, 5, 10, ... written out, as many as the range holds, and at least the range's ends."""
    values = np.asarray(values, dtype=float)
    candidates = [base * 10**power for power in range(6) for base in (1, 2, 5)]
    ticks = [tick for tick in candidates if values.min() * 0.95 <= tick <= values.max() * 1.05]
    ticks = ticks if len(ticks) > 1 else sorted({round(values.min()), round(values.max())})
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.set_xticks([], minor=True)


PLOTS: dict[str, Callable[[Structure], Figure]] = {
    "scatter": plot_adjacent,
    "slice_sizes": plot_slice_sizes,
    "consistency": plot_consistency,
    "staleness": plot_staleness,
}
