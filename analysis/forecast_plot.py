"""The figure of a forecast: step time over link speed, for the plan and for plain DDP, with the break-even marked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradlab.analysis.link import format_rate
from gradlab.analysis.style import BLACK, GREY, VERMILION, panels

_COLUMNS = 3


def plot_step_time(forecast: Mapping[str, Any]) -> Figure:
    """Step time over link speed, one panel per number of nodes. forecast: as `Forecast.to_json` gives it."""
    nodes = forecast["nodes"]
    figure, axes = panels(len(nodes), _COLUMNS, height=2.6, sharey=True)
    compute = forecast["profile"]["compute_seconds"]
    for letter, (panel, found) in enumerate(zip(axes, nodes, strict=True)):
        _draw(panel, found, compute)
        count = found["nodes"]
        panel.set_title(f"({chr(ord('a') + letter)}) {count} node{'s' * (count != 1)}")
        panel.set_xlabel("link speed")
    for panel in axes[::_COLUMNS]:
        panel.set_ylabel("step time, s")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _draw(panel: Axes, found: Mapping[str, Any], compute: float) -> None:
    curve = found["curve"]
    speeds = curve["bits_per_second"]
    panel.plot(speeds, curve["dense"], "--", color=BLACK, label="plain DDP")
    panel.plot(speeds, curve["compressed"], color=VERMILION, label="compressed")
    panel.axhline(compute, color=GREY, linewidth=0.8, linestyle=":", label="computing alone")
    for link in found["links"]:
        if not isinstance(link["bits_per_second"], str):
            panel.plot(link["bits_per_second"], link["dense"]["seconds"], "o", color=BLACK)
            panel.plot(link["bits_per_second"], link["compressed"]["seconds"], "s", color=VERMILION)
    even = found["break_even_bits_per_second"]
    if isinstance(even, (int, float)):
        panel.axvline(even, color=GREY, linewidth=0.8, linestyle="--")
        panel.text(
            even, 0.97, f" break-even {format_rate(even)}", color=GREY, fontsize=7, va="top", ha="left",
            transform=panel.get_xaxis_transform(),
        )  # fmt: skip
    panel.set(xscale="log", yscale="log")
    panel.xaxis.set_major_formatter(lambda value, _: format_rate(value))
    panel.tick_params(axis="x", labelrotation=30)
