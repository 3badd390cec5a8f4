"""Figures of a trace: spectra, held-out loss, agreement between ranks, norms. Inputs are as in report.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from gradlab.analysis.figures.style import (
    BLACK,
    BLUE,
    GREY,
    VERMILION,
    layer_colors,
    name_layers,
    panels,
    running_mean,
    smoothing_window,
)
from gradlab.formatting import format_percent

if TYPE_CHECKING:
    from gradlab.analysis.fit.gradiveq import GradiveqMeasurement

Spectrum = Mapping[str, Any]
Values = Callable[[Mapping[str, Any]], Any]


def plot_spectra(spectrum: Spectrum, part: str) -> Figure:
    """Draw eigenvalues and cumulative variance by layer."""
    figure, (left, right) = panels(2, 2, height=2.8)
    layers = spectrum["layers"]
    for layer, color in zip(layers, layer_colors(len(layers)), strict=True):
        values = np.array(layer[f"{part}_eigenvalues"])
        shown = values > 1e-10 * values.max(initial=0)
        axis = np.arange(1, len(values) + 1)
        left.plot(axis[shown], values[shown] / values.max(initial=1e-300), color=color, label=short(layer["name"]))
        right.plot(axis, layer[f"{part}_cumulative_variance"], color=color)
    left.set(xscale="log", yscale="log", xlabel="axis", ylabel="eigenvalue / largest", title="(a) spectrum")
    right.set(xscale="log", ylim=(0, 1.03), xlabel="axes kept, d", ylabel="share of variance", title="(b) cumulative")
    for loss in (0.01, 0.1):
        right.axhline(1 - loss, color=GREY, linewidth=0.8, linestyle="--")
        right.text(1.0, 1 - loss - 0.02, f"{1 - loss:.0%}", color=GREY, fontsize=7, va="top")
    name_layers(figure, [left, right], [short(layer["name"]) for layer in layers])
    return figure


def plot_dimensions(spectrum: Spectrum) -> Figure:
    """Draw the dimension d that one slice needs by eq. (6), for three lambdas, beside the slice's size K, by layer."""
    layers = spectrum["layers"]
    figure, (axes,) = panels(1, 1, height=max(1.4, 0.24 * len(layers) + 0.7))
    rows = np.arange(len(layers))
    for loss, marker, color in (("0.1", "v", GREY), ("0.05", "s", BLUE), ("0.01", "o", VERMILION)):
        values = [np.median([d[loss] for d in layer["slice_dimensions"].values()]) for layer in layers]
        axes.plot(values, rows, marker, color=color, label=f"λ = {loss}", linestyle="none")
    axes.plot([layer["slice_size"] for layer in layers], rows, "|", color=BLACK, markersize=9, label="slice size K")
    limit = len(spectrum["steps"]) - 1
    axes.axvline(limit, color=GREY, linewidth=0.8, linestyle="--", label=f"T - 1 = {limit} samples allow no more")
    axes.set(xscale="log", xlabel="dimension d (median over slices), elements", yticks=rows)
    axes.set_yticklabels([short(layer["name"]) for layer in layers])
    axes.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=3)
    return figure


def plot_holdout(measured: GradiveqMeasurement) -> Figure:
    """Draw the loss on later iterations by age of the fit: pooled with its references, and layer by layer."""
    figure, (left, right) = panels(2, 2, height=2.9, sharey=True)
    held, control, threshold = measured.holdout, measured.random_basis, measured.promised_loss
    ages = np.array([np.sqrt(first * last) for first, last in held.ages])
    left.plot(ages, _numbers(control.loss_by_age), "--", color=GREY, marker="x", label="random basis, same d")
    left.plot(ages, _numbers(held.loss_by_age), color=VERMILION, marker="o", label="fitted basis, later iterations")
    left.axhline(measured.in_sample_loss, color=BLACK, linestyle="-.", label="iterations fitted on, all slices")
    left.axhline(
        measured.fitted_slices_loss,
        color=BLUE,
        linestyle=(0, (4, 2)),
        label="iterations fitted on, fitted slices",
    )
    if threshold is not None:
        left.axhline(threshold, color=BLACK, linestyle=":", label=f"threshold λ = {format_percent(threshold, 0)}")
        right.axhline(threshold, color=BLACK, linestyle=":")
    groups = held.groups
    for (name, curve), color in zip(groups.items(), layer_colors(len(groups)), strict=True):
        right.plot(ages, _numbers(curve.loss_by_age), color=color, marker="o", label=short(name))
    curves = [control, *groups.values()]
    top = max([1.0, *(value for curve in curves for value in curve.loss_by_age if value is not None)])
    left.set(xscale="log", ylim=(0, 1.05 * top), ylabel="loss ‖ĝ - g‖² / ‖g‖²", title="(a) all fitted layers")
    right.set(xscale="log", title="(b) layer by layer")
    for axes in (left, right):
        axes.set_xlabel("age of the fit, iterations")
        _plain_log_ticks(axes, ages)
    if len(groups) <= 7:
        right.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    else:
        name_layers(figure, [right], [short(name) for name in groups])
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=2)
    return figure


def plot_agreement(spectrum: Spectrum) -> Figure:
    """Draw the cosine between the gradients of two ranks over time, by layer."""
    return _over_time(spectrum, lambda layer: layer["cosine"], "cosine between two ranks", zero=True)


def plot_norms(spectrum: Spectrum) -> Figure:
    """Draw the norm of the averaged gradient over time, by layer."""
    figure = _over_time(spectrum, lambda layer: layer["norm"], "‖averaged gradient‖", zero=False)
    axes = figure.axes[0]
    if not any((np.asarray(line.get_ydata(), float) > 0).any() for line in axes.lines):
        return figure  # all zero: nothing that a logarithmic axis could show
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2.0, 5.0)))
    axes.yaxis.set_minor_formatter("{x:g}" if high < 100 * low else NullFormatter())
    return figure


def _over_time(spectrum: Spectrum, values: Values, label: str, zero: bool) -> Figure:
    figure, (axes,) = panels(1, 1, height=2.7)
    layers, steps = spectrum["layers"], spectrum["steps"]
    window = smoothing_window(len(steps))
    if zero:
        axes.axhline(0, color=GREY, linewidth=0.8)
    for layer, color in zip(layers, layer_colors(len(layers)), strict=True):
        axes.plot(steps, running_mean(values(layer), window), color=color, label=short(layer["name"]))
    axes.set(xlabel="iteration", ylabel=label, xlim=(steps[0], steps[-1]))
    name_layers(figure, [axes], [short(layer["name"]) for layer in layers])
    return figure


def short(name: str) -> str:
    """Shorten a layer's name by ".weight", unless only a number would be left."""
    stem = name.removesuffix(".weight")
    return name if stem.isdigit() else stem


def _numbers(values: Any) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def _plain_log_ticks(axes: Any, values: np.ndarray) -> None:
    """Set ticks 1, 2, 5, 10, ... written out, as many as the range holds."""
    candidates = [base * 10**power for power in range(7) for base in (1, 2, 5)]
    ticks = [tick for tick in candidates if values.min() * 0.8 <= tick <= values.max() * 1.25]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
