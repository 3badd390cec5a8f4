"""Figures of forecasts: step time over link speed, for one plan with its break-even, and for several side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradlab.analysis.figures.style import BLACK, GREY, VERMILION, method_colors, panels
from gradlab.analysis.forecast.link import format_rate

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


def plot_payoff(payoff: Mapping[str, Any]) -> Figure:
    """Step time over link speed of several plans and of plain DDP, a panel per number of nodes.

    payoff: as `gradlab.analysis.forecast.payoff.measure_payoff` gives it.
    """
    forecasts = payoff["forecasts"]
    figure, axes = panels(len(payoff["nodes"]), _COLUMNS, height=2.9, sharey=True)
    colors = method_colors(forecasts)
    for index, (panel, count) in enumerate(zip(axes, payoff["nodes"], strict=True)):
        curves = {name: found["nodes"][index]["curve"] for name, found in forecasts.items()}
        # Curves reach as far as each plan's own break-even: they are shown where all have one.
        low = max(min(curve["bits_per_second"]) for curve in curves.values())
        high = min(max(curve["bits_per_second"]) for curve in curves.values())
        first = next(iter(curves.values()))
        panel.plot(first["bits_per_second"], first["dense"], "--", color=BLACK, label="plain DDP")
        for name, curve in curves.items():
            panel.plot(curve["bits_per_second"], curve["compressed"], color=colors[name], label=name)
        if payoff["compute_seconds"]:
            panel.axhline(payoff["compute_seconds"], color=GREY, linewidth=0.8, linestyle=":", label="computing alone")
        for rate in payoff["links"]:
            if not isinstance(rate, str):
                panel.axvline(rate, color=GREY, linewidth=0.6)
        panel.set(xscale="log", yscale="log", xlabel="link speed")
        if low < high:
            panel.set_xlim(low, high)
        panel.set_title(f"{count} nodes")
        panel.xaxis.set_major_formatter(lambda value, _: format_rate(value))
        panel.tick_params(axis="x", labelrotation=30)
    axes[0].set_ylabel("step time, s" if payoff["compute_seconds"] else "exchange alone, s")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
