"""Figures of methods: replays of a trace, training runs, and both side by side. Inputs are as in report.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from gradlab.analysis.figures.spectra import short
from gradlab.analysis.figures.style import (
    BLUE,
    GREY,
    ORANGE,
    SKY,
    method_colors,
    method_markers,
    panels,
    running_mean,
    smoothing_window,
)
from gradlab.analysis.replay.error_series import common, in_sample_series, observed_series, predicted_series
from gradlab.formatting import format_bytes, format_seconds
from gradlab.metric import final_score, metric_of, scores

Runs = Mapping[str, Mapping[str, Any]]
Replays = Mapping[str, Mapping[str, Any]]
_ERROR = "relative error\n‖input - decoded‖ / ‖input‖"
TIMES = {"compute": SKY, "wait": "#BBBBBB", "compress": ORANGE, "communicate": BLUE}
# Bars must be told apart in grey print, too.
HATCHES = {"compute": "", "wait": "////", "compress": "", "communicate": "...."}
_EDGE: dict[str, Any] = {"edgecolor": "white", "linewidth": 0}


def plot_training(runs: Runs) -> Figure:
    """Draw the training loss and the test metric of every run over iterations."""
    metric, tested = metric_of(runs.values()), any(scores(run) for run in runs.values())
    figure, axes = panels(1 + tested, 2, height=2.6)
    colors, markers = method_colors(runs), method_markers(runs)
    for name, run in runs.items():
        losses = running_mean(run["losses"], smoothing_window(len(run["losses"])))
        axes[0].plot(np.arange(len(losses)), losses, color=colors[name], label=name)
        if scores(run):
            steps, values = np.array(scores(run), dtype=float).T
            axes[1].plot(steps, metric.drawn(values), color=colors[name], marker=markers[name])
    axes[0].set(xlabel="iteration", ylabel="training loss (running mean)")
    if tested:
        axes[1].set(xlabel="iteration", ylabel=metric.label)
    warmup = max((run.get("warmup_steps") or 0 for run in runs.values()), default=0)
    if warmup:
        for panel in axes:
            panel.axvline(warmup, color=GREY, linewidth=0.8, linestyle=":")
        axes[0].annotate(
            "compression starts", (warmup, 0.97), xycoords=("data", "axes fraction"), xytext=(3, 0),
            textcoords="offset points", fontsize=7, color=GREY, va="top",
        )  # fmt: skip
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(5, len(runs)))
    return figure


def plot_errors(replays: Replays, runs: Runs) -> Figure:
    """Draw the contribution error per step, predicted by replay and observed in training, one panel per method."""
    names = [name for name in {**replays, **runs} if has_errors(name, replays, runs)]
    figure, axes = panels(len(names), 3, height=2.1, sharey=True, sharex=True)
    colors = method_colors({**runs, **replays})
    for panel, name in zip(axes, names, strict=True):
        if name in runs and len(observed_series(runs[name])[0]):
            panel.plot(*observed_series(runs[name]), ".", color=GREY, markersize=2.5, label="observed in training")
        if name in replays:
            panel.plot(*predicted_series(replays[name]), color=colors[name], linewidth=1.2, label="predicted by replay")
            if len(in_sample_series(replays[name])[0]):
                panel.plot(*in_sample_series(replays[name]), ":", color=colors[name], label="iterations fitted on")
        panel.set(title=name, xlabel="iteration")
        panel.xaxis.set_tick_params(labelbottom=True)
    axes[0].set_ylim(
        0, 1.05 * max(np.max(np.asarray(line.get_ydata())) for panel in axes for line in panel.get_lines())
    )
    for panel in axes[:: min(3, len(axes))]:
        panel.set_ylabel(_ERROR)
    named = {label: line for panel in axes for line, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    if len(named) > 1:
        figure.legend(list(named.values()), list(named), loc="outside lower center", ncols=3)
    return figure


def has_errors(name: str, replays: Replays, runs: Runs) -> bool:
    """Say whether there is an error over time to draw of a method, see `plot_errors`."""
    predicted = predicted_series(replays[name])[1] if name in replays else np.zeros(0)
    observed = observed_series(runs[name])[1] if name in runs else np.zeros(0)
    return bool(predicted.any() or observed.any())


def plot_error_ratio(replays: Replays, runs: Runs) -> Figure:
    """Draw the predicted error divided by the observed one, per step, with a band from 0.8 to 1.25."""
    figure, (axes,) = panels(1, 1, height=2.5)
    colors = method_colors({**runs, **replays})
    axes.axhspan(0.8, 1.25, color="#efefef", zorder=0)
    axes.axhline(1, color=GREY, linewidth=0.8)
    for name in replays:
        if name not in runs:
            continue
        steps, predicted, observed = common(predicted_series(replays[name]), observed_series(runs[name]))
        usable = (observed > 0) & (predicted > 0)
        if usable.any():
            ratio = predicted[usable] / observed[usable]
            axes.plot(steps[usable], ratio, color=colors[name], linewidth=0.7, alpha=0.35)
            smooth = running_mean(ratio, smoothing_window(len(ratio)))
            axes.plot(steps[usable], smooth, color=colors[name], label=name)
    axes.set(xlabel="iteration", ylabel="predicted / observed error", yscale="log")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.7), max(high, 1.43))
    ticks = [t for t in (0.1, 0.2, 0.5, 0.8, 1, 1.25, 2, 5, 10) if axes.get_ylim()[0] <= t <= axes.get_ylim()[1]]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_yticks([], minor=True)
    figure.legend(loc="outside lower center", ncols=5)
    return figure


def plot_tradeoff(runs: Runs) -> Figure:
    """Draw payload bytes per step against the test metric at the end."""
    metric = metric_of(runs.values())
    points = {n: (r["payload_bytes_per_step"]["mean"], float(metric.drawn(final_score(r)))) for n, r in runs.items()}
    return _scatter(points, "payload per step and rank", f"final {metric.label}", list(runs))


def _scatter(points: Mapping[str, tuple[float, float]], xlabel: str, ylabel: str, names: list[str]) -> Figure:
    figure, (axes,) = panels(1, 1, height=2.8)
    colors, markers = method_colors(names), method_markers(names)
    for name, (x, y) in points.items():
        axes.plot(x, y, markers[name], color=colors[name], markersize=7, label=name, linestyle="none")
    axes.set(xscale="log", xlabel=xlabel, ylabel=ylabel)
    sizes = [x for x, _ in points.values()]
    axes.set_xlim(min(sizes) / 1.8, max(sizes) * 1.8)
    _bytes_ticks(axes)
    axes.margins(y=0.15)
    figure.legend(loc="outside right upper")
    return figure


def _bytes_ticks(axes: Axes) -> None:
    low, high = axes.get_xlim()
    candidates = [base * 10.0**power for power in range(13) for base in (1, 2, 5)]
    ticks = [tick for tick in candidates if low <= tick <= high]
    while len(ticks) > 7:
        ticks = ticks[::2] if len(ticks) < 10 else ticks[::3]
    axes.set_xticks(ticks, [format_bytes(tick, 1) for tick in ticks])
    axes.set_xticks([], minor=True)


def plot_times(runs: Runs) -> Figure:
    """Draw two bars per method, in seconds: a step (compute, then wait), and the exchange beside computing."""
    figure, (axes,) = panels(1, 1, height=0.5 * len(runs) + 0.9)
    names, longest = list(runs), 0.0
    for offset, parts in ((-0.2, ("compute", "wait")), (0.2, ("compress", "communicate"))):
        left = np.zeros(len(names))
        for part in parts:
            width = np.array([(runs[name].get("time") or {}).get(part) or 0.0 for name in names])
            rows = np.arange(len(names)) + offset
            axes.barh(rows, width, left=left, color=TIMES[part], height=0.36, label=part, hatch=HATCHES[part], **_EDGE)
            left += width
        for row, total in enumerate(left):
            if total > 0:
                note = f" {format_seconds(total)}" + (" per step" if offset < 0 else " beside it")
                axes.text(float(total), row + offset, note, va="center", fontsize=7)
        longest = max(longest, float(left.max()))
    axes.set(yticks=range(len(names)), xlabel="time per step", xlim=(0, 1.28 * max(longest, 1e-9)))
    axes.set_yticklabels(names)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value, 2)))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def plot_layer_errors(replays: Replays, runs: Runs) -> Figure:
    """Draw the contribution error by layer, predicted (hollow) and observed (filled), one colour per method."""
    rows: dict[str, int] = {}
    for replay in replays.values():
        for layer in replay["layer_errors"]:
            rows.setdefault(layer, len(rows))
    figure, (axes,) = panels(1, 1, height=max(1.5, 0.26 * len(rows) + 0.8))
    colors, markers = method_colors({**runs, **replays}), method_markers({**runs, **replays})
    for position, (name, replay) in enumerate(replays.items()):
        errors = replay["layer_errors"]
        if not any(errors.values()):
            continue
        style: dict[str, Any] = {"marker": markers[name], "color": colors[name], "linestyle": "none", "markersize": 5}
        # Methods that err alike stay apart: each has its own line within the layer's row.
        apart = min(0.24, 0.8 / len(replays))
        heights = {layer: row + apart * (position - (len(replays) - 1) / 2) for layer, row in rows.items()}
        at = [heights[layer] for layer in errors]
        axes.plot(list(errors.values()), at, **style, markerfacecolor="none", label=f"{name}, predicted")
        seen = {n: e for n, e in (runs.get(name, {}).get("layer_errors") or {}).items() if n in rows}
        if seen:
            at = [heights[layer] for layer in seen]
            axes.plot(list(seen.values()), at, **style, label=f"{name}, observed", alpha=0.75)
    axes.set(xlabel="relative error ‖input - decoded‖ / ‖input‖", yticks=range(len(rows)))
    axes.set_xlim(0, 1.03 * max(np.max(np.asarray(line.get_xdata())) for line in axes.get_lines()))
    axes.set_yticklabels([short(name) for name in rows])
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=3)
    return figure
