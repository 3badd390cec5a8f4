"""Figures about LGC: autoencoders' errors while they learn and later, and what other codes of the same values reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from gradlab.analysis.figures.style import BLUE, GREY, VERMILION, layer_colors, panels, write_below
from gradlab.analysis.fit.lgc.value_codes import RatePoint

if TYPE_CHECKING:
    from gradlab.analysis.fit.lgc.fit import LgcMeasurement
    from gradlab.analysis.fit.lgc.phases import PhaseTimes


def plot_fit(measured: LgcMeasurement) -> Figure:
    """Draw an autoencoder's error over epochs, and on held-out iterations over age.

    One curve is of the iterations learned from, one of those that decide when to stop.
    """
    figure, (left, right) = panels(2, 2, height=2.4)
    epochs = range(1, len(measured.curve) + 1)
    left.plot(epochs, [errors.learned for errors in measured.curve], color=BLUE, label="learned from")
    left.plot(epochs, [errors.stop for errors in measured.curve], color=VERMILION, label="stopped by")
    left.set(xlabel="epoch", ylabel="error, in that of zeros", ylim=(0, None))
    left.legend(fontsize=7)
    ages = [sum(span) / 2 for span in measured.holdout.ages]
    right.plot(ages, measured.holdout.error_by_age, marker="o", markersize=3, color=VERMILION)
    right.axhline(1.0, color=GREY, linewidth=0.8, linestyle=":")
    right.set(xlabel="iterations since it learned", ylabel="held-out error", ylim=(0, None))
    return figure


def plot_sparsification(losses: Mapping[str, Sequence[float]], every: int = 1, caption: str = "") -> Figure:
    """Draw LGC's Fig. 13: training loss over iterations for each way to become sparse.

    Args:
        losses: means of `every` iterations at a time, by name.
        every: iterations per mean.
        caption: what it was drawn with, to stand below.

    Returns:
        The figure.
    """
    figure, (axes,) = panels(1, 1, height=2.8)
    write_below(figure, caption)
    for color, (name, values) in zip(layer_colors(len(losses)), losses.items(), strict=True):
        axes.plot([every * (at + 0.5) for at in range(len(values))], values, color=color, linewidth=1.2, label=name)
    axes.set(xlabel="iteration", ylabel="training loss")
    axes.legend(fontsize=7)
    return figure


def plot_reconstruction(
    errors: Mapping[str, Mapping[str, Sequence[float]]], mean_of: int = 10, caption: str = ""
) -> Figure:
    """Draw LGC's Fig. 14: an autoencoder's error over the iterations in which it learns.

    Args:
        errors: by panel (a number of nodes) and line (a setting).
        mean_of: iterations that a point averages.
        caption: what it was drawn with, to stand below.

    Returns:
        The figure.
    """
    figure, axes = panels(len(errors), 2, height=2.4, sharey=True)
    write_below(figure, caption)
    for axis, (title, curves) in zip(axes, errors.items(), strict=True):
        for number, (color, (name, values)) in enumerate(zip(layer_colors(len(curves)), curves.items(), strict=True)):
            means = [fmean(values[at : at + mean_of]) for at in range(0, len(values), mean_of)]
            iterations = [mean_of * (at + 0.5) for at in range(len(means))]
            style = (0, (4, number)) if number else "-"  # lines may lie on each other
            axis.plot(iterations, means, color=color, linewidth=1.2, linestyle=style, label=name)
        axis.axhline(1.0, color=GREY, linewidth=0.8, linestyle=":")
        axis.set(title=title, xlabel="iteration", ylim=(0, None))
    axes[0].set(ylabel="error, in that of zeros")
    axes[0].legend(fontsize=7)
    return figure


def plot_phases(times: Mapping[str, PhaseTimes], computing: float, caption: str = "") -> Figure:
    """Draw LGC's Table V: the time of an iteration in each phase, and of its parts, without the network.

    Args:
        times: by column, such as "ring, 4 nodes".
        computing: seconds of the model's own forward and backward pass.
        caption: what it was drawn with, to stand below.

    Returns:
        The figure.
    """
    figure, (left, right) = panels(2, 2, height=2.8)
    write_below(figure, caption)
    names = [f"{name}: {phase}" for name in times for phase in ("full", "top-k", "code")]
    updates = [update for one in times.values() for update in (one.full, one.topk, one.compressed)]
    stacks = {
        "forward and backward": (GREY, [1e3 * computing for _ in updates]),
        "codecs": (BLUE, [1e3 * update.codec_seconds for update in updates]),
        "learning": (VERMILION, [1e3 * update.learning_seconds for update in updates]),
    }
    bottom = [0.0] * len(updates)
    for label, (color, heights) in stacks.items():
        left.bar(range(len(updates)), heights, bottom=bottom, color=color, label=label)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    left.set_xticks(range(len(updates)), names, fontsize=5, rotation=90)
    left.set(ylabel="ms per iteration", title="an iteration of each phase")
    left.legend(fontsize=6)
    parts = ("selection", "encode", "decode", "learn")
    for number, (color, (name, one)) in enumerate(zip(layer_colors(len(times)), times.items(), strict=True)):
        places = [at + 0.8 * (number / len(times) - 0.5) for at in range(len(parts))]
        values = [1e3 * getattr(one, part) for part in parts]
        right.bar(places, values, width=0.8 / len(times), align="edge", color=color, label=name)
    right.set_xticks(range(len(parts)), parts)
    right.set(ylabel="ms", yscale="log", title="its parts")
    right.legend(fontsize=6)
    return figure


def plot_rates(curves: Mapping[str, Sequence[RatePoint]]) -> Figure:
    """Draw the error of the averaged selected vector over bits per value, a line per code.

    The dotted line is the least error for Gaussian values of one variance, 4 to the power of minus bits.

    Args:
        curves: points by the code's name.

    Returns:
        The figure.
    """
    figure, (axes,) = panels(1, 1, height=3.0)
    for color, (name, curve) in zip(layer_colors(len(curves)), curves.items(), strict=True):
        ordered = sorted(curve, key=lambda point: point.bits)
        style = "-o" if "trellis" in name else "--s"
        axes.plot(
            [point.bits for point in ordered],
            [point.error for point in ordered],
            style,
            color=color,
            markersize=3,
            label=name,
        )
    bits = sorted(point.bits for curve in curves.values() for point in curve)
    axes.plot(bits, [4.0**-value for value in bits], ":", color=GREY, label="Gaussian of one variance")
    axes.set(xlabel="bits per value, held out", ylabel="error, in that of zeros", yscale="log")
    axes.legend(fontsize=7)
    return figure
