"""Figures of plans by layer: every layer's setting, and how its error goes with the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gradlab.analysis.figures.style import BLUE, GREY, SKY, VERMILION, method_colors, method_markers, panels
from gradlab.analysis.layer_plan.provenance import LayerSetting, LgrecoProvenance

PLAN, UNIFORM = VERMILION, BLUE
_UNITS = {"payload": "payload, bytes", "wire": "bytes on the wire", "seconds": "seconds"}


def plot_layers(provenance: LgrecoProvenance) -> Figure:
    """Draw L-GreCo's Fig. 1: every layer's setting and size, in the order of communication, and its relative error."""
    layers = list(reversed(provenance.layers))  # backward hands over the last layers first
    figure, (top, bottom) = panels(2, 1, height=2.3, sharex=True)
    positions = np.arange(1, len(layers) + 1)
    sizes = top.twinx()
    sizes.bar(positions, [layer.numel for layer in layers], color=SKY, alpha=0.35, width=0.9)
    sizes.set(yscale="log", ylabel="elements of the layer")
    sizes.set_zorder(top.get_zorder() - 1)
    top.patch.set_visible(False)
    varied = provenance.varied
    if all(layer.codec == provenance.codec and varied in layer.settings for layer in layers):
        top.step(positions, [layer.settings[varied] for layer in layers], where="mid", color=PLAN, label="by layer")
        top.axhline(provenance.reference[varied], color=UNIFORM, linestyle="--", label="uniform")
        top.set_ylabel(varied)
    else:
        shares = [layer.cost / layer.uniform_cost if layer.uniform_cost else np.nan for layer in layers]
        _draw_families(top, positions, layers, shares)
        top.axhline(1.0, color=UNIFORM, linestyle="--", label="uniform")
        top.set(yscale="log", ylabel=f"{_UNITS[provenance.layer_cost]} / uniform's")
    top.legend(loc="best", fontsize=7, ncols=2)
    bottom.plot(positions, [layer.uniform_relative_error for layer in layers], "_", color=UNIFORM)
    bottom.plot(positions, [layer.relative_error for layer in layers], ".", color=PLAN)
    bottom.set(ylabel="relative error", xlabel="layer, in the order of communication", ylim=(0, None))
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _draw_families(panel: Axes, positions: np.ndarray, layers: Sequence[LayerSetting], shares: list[float]) -> None:
    codecs = list(dict.fromkeys(layer.codec for layer in layers))
    colors, markers = method_colors(codecs), method_markers(codecs)
    for codec in codecs:
        rows = [row for row, layer in enumerate(layers) if layer.codec == codec]
        values = [shares[row] for row in rows]
        panel.plot(positions[rows], values, linestyle="", marker=markers[codec], color=colors[codec], label=codec)


def plot_sensitivity(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw L-GreCo's Fig. 11a: how a layer's L2 error goes with what its compression does to the loss.

    (left) The correlation over layers, by setting, a line per checkpoint. (right) The layers at the last checkpoint.
    rows: one per checkpoint, with "checkpoint", "varied", "settings", "errors" and "differences" (layers, settings),
    and "correlations" as `gradlab.analysis.layer_plan.sensitivity.correlations` gives them.
    """
    figure, (left, right) = panels(2, 2, height=2.6)
    labels = [str(row["checkpoint"]) for row in rows]
    colors, markers = method_colors(labels), method_markers(labels)
    for label, row in zip(labels, rows, strict=True):
        correlations = row["correlations"]
        left.plot(row["settings"], correlations["pearson"], marker=markers[label], color=colors[label], label=label)
        left.plot(row["settings"], correlations["spearman"], marker=markers[label], color=colors[label], linestyle="--")
    left.axhline(0.0, color=GREY, linewidth=0.8)
    left.set(xscale="log", ylim=(-1, 1.05), xlabel=rows[0]["varied"], ylabel="correlation (dashed: of ranks)")
    left.legend(title="iteration", fontsize=7, title_fontsize=7)
    last = rows[-1]
    names = [f"{last['varied']} {value}" for value in last["settings"]]
    colors, markers = method_colors(names), method_markers(names)
    for position, name in enumerate(names):
        points = np.array([last["errors"], last["differences"]], dtype=float)[:, :, position]
        right.plot(*points, linestyle="", marker=markers[name], markersize=4, color=colors[name], label=name)
    right.axhline(0.0, color=GREY, linewidth=0.8)
    right.set(xscale="log", xlabel="squared error of a layer", ylabel="loss, above uncompressed")
    right.legend(fontsize=7)
    return figure
