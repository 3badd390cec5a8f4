"""Figures of forecasts: step time over link speed, of one plan or several, and the frontier of error over seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradlab.analysis.figures.style import BLACK, GREY, VERMILION, method_colors, method_markers, panels
from gradlab.analysis.forecast import Forecast, Network, NodeForecast
from gradlab.analysis.forecast.frontier import GIVEN
from gradlab.analysis.forecast.link import spell_rate
from gradlab.analysis.forecast.speed import SpeedForecast
from gradlab.formatting import format_counted

_COLUMNS = 3
_LEAST_ERROR = 1e-7  # of a cosine of 1, on a logarithmic axis


def plot_step_time(forecast: Forecast) -> Figure:
    """Draw step time over link speed, one panel per number of nodes."""
    figure, axes = panels(len(forecast.nodes), _COLUMNS, height=2.6, sharey=True)
    for letter, (panel, node) in enumerate(zip(axes, forecast.nodes, strict=True)):
        _draw(panel, node, forecast.network)
        count = node.job.world_size
        panel.set_title(f"({chr(ord('a') + letter)}) {format_counted(count, 'node')}")
        panel.set_xlabel("link speed")
    for panel in axes[::_COLUMNS]:
        panel.set_ylabel("step time, s")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _draw(panel: Axes, node: NodeForecast, network: Network) -> None:
    speeds = [pair.link.bits_per_second for pair in node.curve]
    panel.plot(speeds, [pair.dense.seconds for pair in node.curve], "--", color=BLACK, label=network.dense)
    half = f"{network.dense}, 16 bits"
    panel.plot(speeds, [pair.half.seconds for pair in node.curve], ":", color=BLACK, label=half)
    panel.plot(speeds, [pair.compressed.seconds for pair in node.curve], color=VERMILION, label="compressed")
    panel.axhline(network.profile.compute_seconds, color=GREY, linewidth=0.8, linestyle=":", label="computing alone")
    for pair in node.links:
        if math.isfinite(pair.link.bits_per_second):
            panel.plot(pair.link.bits_per_second, pair.dense.seconds, "o", color=BLACK)
            panel.plot(pair.link.bits_per_second, pair.compressed.seconds, "s", color=VERMILION)
    even = node.break_even
    if even is not None and math.isfinite(even):
        panel.axvline(even, color=GREY, linewidth=0.8, linestyle="--")
        panel.text(
            even, 0.97, f" break-even {spell_rate(even)}", color=GREY, fontsize=7, va="top", ha="left",
            transform=panel.get_xaxis_transform(),
        )  # fmt: skip
    panel.set(xscale="log", yscale="log")
    panel.xaxis.set_major_formatter(lambda value, _: spell_rate(value))
    panel.tick_params(axis="x", labelrotation=30)


def plot_speed(speed: SpeedForecast) -> Figure:
    """Draw step time over link speed of several plans and of plain DDP, one panel per number of nodes."""
    network = speed.network
    figure, axes = panels(len(network.nodes), _COLUMNS, height=2.9, sharey=True)
    colors = method_colors(speed.forecasts)
    for index, (panel, count) in enumerate(zip(axes, network.nodes, strict=True)):
        curves = {name: forecast.nodes[index].curve for name, forecast in speed.forecasts.items()}
        rates = {name: [pair.link.bits_per_second for pair in curve] for name, curve in curves.items()}
        # Curves reach as far as each plan's own break-even: they are shown where all have one.
        low, high = max(map(min, rates.values())), min(map(max, rates.values()))
        name, curve = next(iter(curves.items()))
        panel.plot(rates[name], [pair.dense.seconds for pair in curve], "--", color=BLACK, label=network.dense)
        half = f"{network.dense}, 16 bits"
        panel.plot(rates[name], [pair.half.seconds for pair in curve], ":", color=BLACK, label=half)
        for name, curve in curves.items():
            panel.plot(rates[name], [pair.compressed.seconds for pair in curve], color=colors[name], label=name)
        if speed.compute_seconds:
            panel.axhline(speed.compute_seconds, color=GREY, linewidth=0.8, linestyle=":", label="computing alone")
        for link in network.links:
            if math.isfinite(link.bits_per_second):
                panel.axvline(link.bits_per_second, color=GREY, linewidth=0.6)
        panel.set(xscale="log", yscale="log", xlabel="link speed")
        if low < high:
            panel.set_xlim(low, high)
        panel.set_title(f"{count} nodes")
        panel.xaxis.set_major_formatter(lambda value, _: spell_rate(value))
        panel.tick_params(axis="x", labelrotation=30)
    axes[0].set_ylabel("step time, s" if speed.compute_seconds else "exchange alone, s")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def plot_frontier(rows: Sequence[Mapping[str, Any]], uncompressed: Mapping[str, float]) -> Figure:
    """Draw the error of every replayed setting over the seconds of its step, a line per family."""
    figure, (axes,) = panels(1, 1, height=3.2)
    families: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        families.setdefault(row["family"], []).append(row)
    colors, markers = method_colors(families), method_markers(families)
    for name, curve in families.items():
        seconds = [row["seconds"] for row in curve]
        errors = [max(_LEAST_ERROR, 1 - row["cosine"]) for row in curve]
        look: dict[str, Any] = {"color": colors[name], "marker": markers[name], "markersize": 6}
        line = "none" if name == GIVEN else "-"
        axes.plot(seconds, errors, linestyle=line, linewidth=0.8, fillstyle="none", label=name, **look)
        inside = [place for place, row in enumerate(curve) if row["within"]]
        if inside:
            axes.plot([seconds[i] for i in inside], [errors[i] for i in inside], linestyle="none", **look)
    for (name, seconds_of), style in zip(uncompressed.items(), ("--", ":"), strict=False):
        axes.axvline(seconds_of, color=BLACK, linewidth=0.8, linestyle=style, label=name)
    axes.set(xscale="log", yscale="log", xlabel="step time, s", ylabel="error: 1 - cosine")
    figure.legend(loc="outside right upper")
    return figure
