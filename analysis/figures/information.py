"""Figures of what ranks share, how noisy gradients are, how far codecs are from the limit. Inputs as in report.json."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradlab.analysis.figures.spectra import short
from gradlab.analysis.figures.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    layer_colors,
    method_colors,
    method_markers,
    name_layers,
    panels,
    write_below,
)
from gradlab.analysis.measure.layer_places import AFTER_ADDITION

Json = Mapping[str, Any]
_ESTIMATORS = {
    "copula": ("Gaussian copula", BLUE, "o"),
    "mixed": ("nearest neighbours", GREEN, "^"),
}
_MOST_LAYERS, _MOST_ROWS = 6, 60
# Enough to see each family; the others are in the data.
_FAMILY_COLORS = {
    "quantization": (BLUE, "s"),
    "sparsification": (VERMILION, "^"),
    "low rank": (GREEN, "D"),
    "other": (PURPLE, "o"),
}


def plot_claim(between: Json) -> Figure:
    """Draw LGC's Fig. 4 beside estimates that are corrected for chance.

    (a) Entropy and information by the paper's histogram, of the pair and of the shuffled pair. (b) What ranks share
    beyond the shifted null, by corrected estimators, with intervals.
    """
    layers, paper = spread_layers(between["layers"], _MOST_ROWS), str(between["paper_bins"])
    figure, (left, right) = panels(2, 2, height=max(2.6, 0.2 * len(layers) + 1.2), sharey=True)
    rows = np.arange(len(layers))
    histograms = [layer["histograms"][paper] for layer in layers]
    for name, label, color, marker in (
        ("entropy", "entropy H", BLACK, "|"),
        ("information", "information of the pair", VERMILION, "o"),
        ("shuffled", "information, pair shuffled", BLUE, "x"),
    ):
        values = [np.mean(histogram[name]) for histogram in histograms]
        left.plot(values, rows, marker, color=color, label=label, markersize=5, linestyle="none", fillstyle="none")
    for position, (name, (label, color, marker)) in enumerate(_ESTIMATORS.items()):
        placed = [
            (row + 0.22 * (position - 0.5), layer["estimators"][name]["excess"])
            for row, layer in zip(rows, layers, strict=True)
        ]
        style: dict[str, Any] = {"color": color, "markersize": 3, "linewidth": 0.9}
        known = np.array([(one["bits"], y, one["low"], one["high"]) for y, one in placed if one["low"] is not None])
        middle, height, low, high = known.reshape(-1, 4).T
        right.errorbar(middle, height, xerr=[middle - low, high - middle], fmt=marker, label=label, **style)
        without = [(one["bits"], y) for y, one in placed if one["low"] is None]
        if without:
            right.plot(*np.array(without).T, marker, fillstyle="none", **style)
    right.axvline(0, color=GREY, linewidth=0.8)
    left.set(xlabel="bits per parameter", title="(a) LGC's histogram, 2³² levels", yticks=rows)
    left.set_yticklabels([_marked(layer) for layer in layers], fontsize=7 if len(layers) <= 30 else 4)
    right.set(xlabel="bits per parameter beyond the shifted null", title="(b) corrected estimators")
    left.set_xlim(left=0)
    left.invert_yaxis()
    for panel in (left, right):
        handles = panel.get_legend_handles_labels()
        panel.legend(*handles, loc="upper center", bbox_to_anchor=(0.45, -0.16 - 0.4 / len(layers)), fontsize=7)
    return figure


def _marked(layer: Json) -> str:
    marks = {"first": "first", "last": "last", AFTER_ADDITION: "+"}
    place = ", ".join(marks[mark] for mark in layer["place"])
    return short(layer["name"]) + (f" ({place})" if place else "")


def plot_information_over_iterations(between: Json) -> Figure:
    """Draw LGC's Figs. 3 and 12: (a) entropy (dotted), information (solid); (b) copula of a pair, of the shifted
    pair.
    """
    layers = spread_layers(between["layers"])
    figure, (left, right) = panels(2, 2, height=2.7)
    for layer, color in zip(layers, layer_colors(len(layers)), strict=True):
        steps, paper = layer["iterations"], layer["histograms"][str(between["paper_bins"])]
        left.plot(steps, paper["information"], color=color, label=short(layer["name"]))
        left.plot(steps, paper["entropy"], color=color, linestyle=":")
        right.plot(steps, layer["estimators"]["copula"]["paired"], color=color)
        right.plot(steps, layer["estimators"]["copula"]["shifted"], color=color, linestyle=":")
    left.set(
        xlabel="iteration", ylabel="bits per parameter", title="(a) LGC's histogram: H (dotted), I", ylim=(0, None)
    )
    right.set(xlabel="iteration", title="(b) copula: pair, shifted pair (dotted)")
    right.axhline(0, color=GREY, linewidth=0.8)
    name_layers(figure, [left, right], [short(layer["name"]) for layer in layers])
    return figure


def plot_information_of_nodes(between: Mapping[str, Json], caption: str = "") -> Figure:
    """Draw LGC's Figs. 3 and 12 for several numbers of nodes, a column each.

    Above: entropy (dotted) and information (solid) by the paper's histogram. Below: the copula's information of a pair
    (solid) and of the shifted pair (dotted).
    """
    figure, axes = panels(2 * len(between), len(between), height=2.0, sharey="row", sharex=True)
    write_below(figure, caption)
    for column, (title, one) in enumerate(between.items()):
        above, below = axes[column], axes[len(between) + column]
        layers = spread_layers(one["layers"])
        for layer, color in zip(layers, layer_colors(len(layers)), strict=True):
            steps, paper = layer["iterations"], layer["histograms"][str(one["paper_bins"])]
            above.plot(steps, paper["information"], color=color, label=short(layer["name"]))
            above.plot(steps, paper["entropy"], color=color, linestyle=":")
            below.plot(steps, layer["estimators"]["copula"]["paired"], color=color)
            below.plot(steps, layer["estimators"]["copula"]["shifted"], color=color, linestyle=":")
        above.set(title=title, ylim=(0, None))
        below.set(xlabel="iteration")
        below.axhline(0, color=GREY, linewidth=0.8)
    axes[0].legend(fontsize=6)
    axes[0].set(ylabel="histogram: H (dotted), I")
    axes[len(between)].set(ylabel="copula: pair, shifted (dotted)")
    return figure


def spread_layers(layers: Sequence[Json], most: int = _MOST_LAYERS) -> list[Json]:
    """Choose layers evenly spread from the first to the last."""
    if len(layers) <= most:
        return list(layers)
    return [layers[i] for i in np.unique(np.linspace(0, len(layers) - 1, most).round().astype(int))]


def plot_lags(between: Json) -> Figure:
    """Draw the copula information of one rank's gradient with another's, over the iterations between the two."""
    layers = spread_layers(between["layers"])
    figure, (axes,) = panels(1, 1, height=2.5)
    for layer, color in zip(layers, layer_colors(len(layers)), strict=True):
        lags = layer["lags"]
        axes.plot(lags["lags"], lags["information"], color=color, marker="o", label=short(layer["name"]))
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(left=-0.15)
    ticks = sorted({lag for layer in layers for lag in layer["lags"]["lags"]})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set(xlabel="recorded iterations between the two gradients", ylabel="bits per parameter")
    name_layers(figure, [axes], [short(layer["name"]) for layer in layers])
    return figure


def plot_top_indices(between: Json) -> Figure:
    """Draw the share of largest values that two ranks have in common, and the energy at another rank's positions."""
    figure, (left, right) = panels(2, 2, height=2.6)
    layers = [layer for layer in between["layers"] if layer["top_indices"]]
    for layer, color in zip(layers, layer_colors(len(layers)), strict=True):
        rows = layer["top_indices"]
        density = [row["density"] for row in rows]
        left.plot(density, [row["overlap"] for row in rows], "o-", color=color, label=short(layer["name"]))
        right.plot(density, [row["energy_at_others"] for row in rows], "o-", color=color)
    known = sorted({row["density"] for layer in layers for row in layer["top_indices"]})
    for panel in (left, right):
        panel.plot(known, known, "--", color=GREY, linewidth=0.9)
        panel.set(xscale="log", xlabel="density k / n", ylim=(0, 1))
    left.text(known[-1], known[-1], "chance ", color=GREY, fontsize=7, ha="right", va="bottom")
    left.set(ylabel="share", title="(a) positions in common")
    right.set(title="(b) energy kept at another's positions")
    name_layers(figure, [left, right], [short(layer["name"]) for layer in layers])
    return figure


def plot_noise_scale(noise: Json) -> Figure:
    """Draw the cosine between ranks over the batch, and redundancy and signal over the number of ranks."""
    figure, (left, right) = panels(2, 2, height=2.6)
    expected, size = noise["expected"], noise["batch_size"] or 1
    batches = size * np.array(expected["batches"])
    left.plot(batches, expected["cosine"], color=BLUE, label="1 / (1 + B / b)")
    scale = noise["model"]["batches"]
    if scale is not None and math.isfinite(scale):
        left.axvline(
            size * scale, color=GREY, linestyle="--", linewidth=0.9, label=f"noise scale B = {size * scale:.3g}"
        )
        low, high = noise["model"]["low"], noise["model"]["high"]
        if low is not None and high is not None and math.isfinite(high):
            left.axvspan(size * low, size * high, color=GREY, alpha=0.15, linewidth=0)
    measured = noise["measured_cosine"]
    left.plot(
        [size * row["batches"] for row in measured],
        [row["cosine"] for row in measured],
        "o",
        color=VERMILION,
        label="measured, ranks grouped",
    )
    unit = "examples" if noise["batch_size"] else "batches of one rank"
    left.set(xscale="log", xlabel=f"batch of a rank, {unit}", ylabel="cosine between ranks", title="(a)", ylim=(0, 1))
    rows = noise["by_nodes"]
    ranks = [row["nodes"] for row in rows]
    right.plot(ranks, [row["redundancy_bits"] for row in rows], "o-", color=GREEN, label="redundancy, bits")
    right.plot(ranks, [row["signal_share_of_mean"] for row in rows], "s--", color=ORANGE, label="signal in the mean")
    right.axvline(noise["world_size"], color=GREY, linewidth=0.8, linestyle=":")
    right.set(xscale="log", xlabel="ranks", ylim=(0, None), title="(b) per value and rank")
    right.set_xticks([1, 4, 16, 64, 256], ["1", "4", "16", "64", "256"])
    right.set_xticks([], minor=True)
    for panel in (left, right):
        panel.legend(loc="best", fontsize=7)
    return figure


def plot_limits(limits: Json, most: int = _MOST_LAYERS) -> Figure:
    """Draw bits per value over relative squared error: the floor and every codec, one panel per layer."""
    layers = sorted(limits["layers"], key=lambda layer: -layer["numel"])[:most]
    figure, axes = panels(len(layers), 3, height=2.3, sharey=True, sharex=True)
    for panel, layer in zip(axes, layers, strict=True):
        draw_limits(panel, limits, layer)
        panel.set_title(short(layer["name"]), fontsize=8)
        panel.set_xlabel("squared error / energy")
        panel.xaxis.set_tick_params(labelbottom=True)
    for panel in axes[:: min(3, len(axes))]:
        panel.set_ylabel("bits per value")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def draw_limits(panel: Axes, limits: Json, layer: Json) -> None:
    """Draw one layer's floor, codecs and plans: bits per value over relative squared error."""
    errors = limits["relative_errors"]
    panel.plot(errors, layer["floor"], color=BLACK, label="Gaussian floor, one rank alone")
    panel.plot(errors, layer["coordinates"], ":", color=GREY, label="coordinates alone")
    for family, (color, marker) in _FAMILY_COLORS.items():
        points = [row for row in layer.get("codecs", []) if _family(row["codec"]) == family]
        if points:
            x, y = [row["relative_error"] for row in points], [row["bits"] for row in points]
            panel.plot(x, y, marker, color=color, markersize=3.5, label=family, linestyle="none", fillstyle="none")
    plans = [row for row in limits.get("plans", []) if row["layer"] == layer["name"]]
    if plans:
        x, y = [row["relative_error"] for row in plans], [row["bits"] for row in plans]
        panel.plot(x, y, "*", color=SKY, markersize=6, label="plans replayed", linestyle="none")
    panel.set(xscale="log", yscale="log", xlim=(1e-5, 3), ylim=(0.01, 40))


def _family(codec: str) -> str:
    from gradlab import codecs

    family = codecs.get(codec).about.family
    return family if family in _FAMILY_COLORS else "other"


def plot_ranking(ranking: Json) -> Figure:
    """Draw (a) the rank of each plan in windows of the run, (b) how each window's order agrees with the whole run's.

    Bars are 95 % intervals over plans (Bonett & Wright 2000), from five plans on.
    """
    figure, (left, right) = panels(2, 2, height=2.7)
    middles = [(first + last) / 2 for first, last in ranking["windows"]]
    colors, markers = method_colors(ranking["ranks"]), method_markers(ranking["ranks"])
    for name, ranks in ranking["ranks"].items():
        left.plot(middles, ranks, marker=markers[name], color=colors[name], label=name)
    left.set(
        xlabel="iteration", ylabel="place (1: best cosine)", title="(a)", yticks=range(1, len(ranking["ranks"]) + 1)
    )
    left.invert_yaxis()
    right.plot(middles, ranking["agreement"], "o-", color=BLUE)
    for middle, interval in zip(middles, ranking["agreement_intervals"], strict=True):
        if interval is not None:
            right.plot([middle, middle], interval, color=BLUE, linewidth=0.8)
    right.set(xlabel="iteration", ylabel="rank correlation with the whole run", ylim=(-1.05, 1.05), title="(b)")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def plot_waiting(replays: Mapping[str, Json]) -> Figure:
    """Draw the residual norm under error feedback, divided by the gradient's norm, over the replayed iterations."""
    figure, (axes,) = panels(1, 1, height=2.5)
    colors = method_colors(replays)
    for name, replay in replays.items():
        points = [(step["iteration"], step["unsent"]) for step in replay["steps"] if step.get("unsent")]
        if points:
            steps, errors = zip(*points, strict=True)
            axes.plot(steps, errors, color=colors[name], label=name)
    axes.set(xlabel="iteration", ylabel="‖residual‖ / ‖gradient‖", yscale="log")
    axes.set_ylim(bottom=max(1e-3, axes.get_ylim()[0]))  # less is rounding
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def plot_layer(data: Json, name: str) -> Figure:
    """Draw what was measured of one layer: what ranks share over time, its spectrum, codecs above the floor."""
    between = named_layer(data.get("between_nodes"), name)
    spectrum = named_layer(data.get("spectrum"), name)
    limit = named_layer(data.get("limits"), name)
    figure, axes = panels(sum(map(bool, (between, spectrum, limit))), 3, height=2.1)
    left = iter(axes)
    if between:
        panel = next(left)
        for method, (label, color, _) in _ESTIMATORS.items():
            series = between["estimators"][method]
            excess = np.subtract(series["paired"], series["shifted"])
            panel.plot(between["iterations"], excess, color=color, label=label, linewidth=1)
        panel.axhline(0, color=GREY, linewidth=0.8)
        panel.set(xlabel="iteration", ylabel="excess, bits", title="ranks share")
        panel.legend(fontsize=6)
    if spectrum:
        panel = next(left)
        for part, label, color in (("slice", "one slice", VERMILION), ("layer", "whole layer", BLUE)):
            share = spectrum[f"{part}_cumulative_variance"]
            panel.plot(np.arange(1, len(share) + 1), share, color=color, label=label)
        panel.set(xscale="log", ylim=(0, 1.03), xlabel="axes kept", ylabel="share of variance", title="spectrum")
        panel.legend(fontsize=6, loc="lower right")
    if limit:
        panel = next(left)
        draw_limits(panel, data["limits"], limit)
        panel.set(xlabel="squared error / energy", ylabel="bits per value", title="limit")
    return figure


def named_layer(part: Json | None, name: str) -> Json | None:
    """Find the layer of this name in a part of a report. None: the layer or the part is missing."""
    return next((layer for layer in part["layers"] if layer["name"] == name), None) if part else None
