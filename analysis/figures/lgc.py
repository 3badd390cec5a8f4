"""Figures about LGC: autoencoders' errors while they learn and later, and what other codes of the same values reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from gradlab.analysis.figures.style import BLUE, GREY, VERMILION, layer_colors, panels, write_below

if TYPE_CHECKING:
    from gradlab.analysis.fit.lgc.fit import LgcMeasurement


def plot_fit(measured: LgcMeasurement) -> Figure:
    """Draw an autoencoder's error over epochs, learned from and stopped by, and on held-out iterations over age."""
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
    """Draw LGC's Fig. 13: training loss over iterations for each way to become sparse."""
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
    """Draw LGC's Fig. 14: an autoencoder's error over the iterations in which it learns."""
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
