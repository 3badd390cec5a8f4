"""Draw iterations as the engine ran them: what travelled while gradients were computed and compressed."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from gradlab.analysis.figures.style import BLUE, GREEN, GREY, ORANGE, SKY, WIDTH, YELLOW
from gradlab.chrome_trace import Span, StepSpans

_KINDS = {
    "backward": SKY,
    "encode": ORANGE,
    "decode": YELLOW,
    "a ring's segment": GREEN,
    "waiting": "#BBBBBB",
    "network": BLUE,
}


def plot_timelines(steps: Mapping[str, StepSpans]) -> Figure:
    """Draw iterations below each other on one axis of time. Each begins with its first bucket."""
    heights = [len(_rows(step)) + 1 for step in steps.values()]
    figure = Figure(figsize=(WIDTH, 0.18 * sum(heights) + 0.4 * len(steps) + 0.5), layout="constrained")
    axes = figure.subplots(len(steps), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    present: set[str] = set()
    for panel, (name, step) in zip(axes, steps.items(), strict=True):
        present |= _draw(panel, step)
        times = step.times
        panel.set_title(
            f"{name}: {1000 * times.seconds:.0f} ms, the network busy for {1000 * times.network_seconds:.0f}, "
            f"{1000 * times.hidden_seconds:.0f} of them hidden"
        )
    axes[-1].set_xlabel("ms from the arrival of the first bucket")
    legend = [Patch(color=color, label=kind) for kind, color in _KINDS.items() if kind in present]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend))
    return figure


def _rows(step: StepSpans) -> list[int]:
    return sorted({span.row for span in step.spans})


def _draw(panel: Axes, step: StepSpans) -> set[str]:
    """Draw one iteration, and return the kinds of spans that were drawn."""
    rows = _rows(step)
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for span in step.spans:
        row, start = rows.index(span.row), 1000 * (span.start - step.begin)
        if span.stop > span.start:
            bars.setdefault((row, _kind(span)), []).append((start, 1000 * (span.stop - span.start)))
        else:  # a bucket's arrival
            panel.plot([start], [row - 0.45], marker="v", color=GREY, markersize=4, clip_on=False)
    for (row, kind), spans in bars.items():
        panel.broken_barh(spans, (row - 0.4, 0.8), color=_KINDS[kind], edgecolor="white", linewidth=0.2)
    panel.set_yticks(range(len(rows)), _labels(step, rows))
    panel.set_ylim(len(rows) - 0.4, -0.9)
    panel.grid(axis="y", visible=False)
    return {kind for _, kind in bars}


def _kind(span: Span) -> str:
    if span.lane == "encode and decode":
        return "a ring's segment" if span.name.endswith("segment") else span.name.split()[0]
    return "waiting" if span.lane == "wait" else span.lane


def _labels(step: StepSpans, rows: list[int]) -> list[str]:
    """Label the first row of each lane with the lane's name, and the lane's other rows with an empty text."""
    lanes = {span.row: span.lane for span in step.spans}
    named = [lanes[row] for row in rows]
    return [lane if lane not in named[:i] else "" for i, lane in enumerate(named)]
