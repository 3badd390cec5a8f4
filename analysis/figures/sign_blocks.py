"""Figures of `measure_sign_blocks`: Fig. 1 of dist-EF-blockSGD, and what more scales would keep."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from gradlab.analysis.figures.style import BLACK, BLUE, GREY, VERMILION, panels

Json = Mapping[str, Any]
_GAUSSIAN = (math.pi / 2 - 1) ** 0.5


def plot_sign_statistics(blocks: Json) -> Figure:
    """Draw Fig. 1: (a) coefficient of variation of magnitudes, (b) delta with its lower bounds, by window."""
    figure, (left, right) = panels(2, 2, height=2.3)
    drawn = blocks["figure_1"]
    iterations = drawn["iterations"]
    left.plot(iterations, drawn["variation"], color=BLUE, marker="o")
    left.axhline(_GAUSSIAN, color=GREY, linewidth=0.8, linestyle=":")
    left.annotate(
        "Gaussian", (1, _GAUSSIAN), xycoords=("axes fraction", "data"), fontsize=7, color=GREY, ha="right", va="bottom"
    )
    left.set(xlabel="iteration", ylabel="coefficient of variation\nof |g| within tensors", title="(a)")
    left.set_ylim(bottom=0)
    for key, bound, color, marker, label in (
        ("delta_by_tensor", "bound_by_tensor", VERMILION, "s", "a scale per tensor"),
        ("delta_of_model", "bound_of_model", BLACK, "o", "one for the model"),
    ):
        right.plot(iterations, drawn[key], color=color, marker=marker, label=label)
        right.axhline(drawn[bound], color=color, linewidth=0.8, linestyle=":")
    right.set(xlabel="iteration", ylabel="smallest δ (dotted: bounds)", yscale="log", title="(b)")
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def plot_sign_blocks(blocks: Json) -> Figure:
    """Draw the share of energy that signs keep over bits per value: scales shared out by gain, blocks of one size."""
    figure, (panel,) = panels(1, 1, height=2.3)
    rows, one = blocks["suggestion"]["rows"], blocks["suggestion"]["kept_by_one_block"]
    bits = [row["bits_per_value"] for row in rows]
    drawn: list[tuple[str, dict[str, Any], str]] = [
        ("kept", {"color": VERMILION, "marker": "s"}, "shared out by what they keep"),
        ("kept_by_equal_blocks", {"color": BLUE, "marker": "o", "linestyle": "--"}, "blocks of one size"),
    ]
    for key, style, label in drawn:
        panel.plot(bits, [row[key] for row in rows], label=label, **style)
    panel.axhline(one, color=BLACK, linewidth=0.8, linestyle=":", label="one block for the model")
    panel.set(xlabel="bits per value", ylabel="energy kept\nΣ ‖v_b‖₁² / d_b over ‖v‖²")
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
