"""Figures of LGC's autoencoders: errors while they learn, and on later iterations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from gradlab.analysis.style import BLUE, GREY, VERMILION, panels


def plot_fit(origin: Mapping[str, Any]) -> Figure:
    """Error over epochs, where it was learned and where it says when to stop; and held out, over age. origin: of a
    fit."""
    figure, (left, right) = panels(2, 2, height=2.4)
    epochs = range(1, len(origin["curve"]) + 1)
    for key, label, color in (("learned", "learned from", BLUE), ("stop", "stopped by", VERMILION)):
        left.plot(epochs, [errors[key] for errors in origin["curve"]], color=color, label=label)
    left.set(xlabel="epoch", ylabel="error, in that of zeros", ylim=(0, None))
    left.legend(fontsize=7)
    held = origin["holdout"]
    ages = [sum(span) / 2 for span in held["ages"]]
    right.plot(ages, held["error_by_age"], marker="o", markersize=3, color=VERMILION)
    right.axhline(1.0, color=GREY, linewidth=0.8, linestyle=":")
    right.set(xlabel="iterations since it learned", ylabel="held-out error", ylim=(0, None))
    return figure
