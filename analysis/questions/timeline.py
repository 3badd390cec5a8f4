"""The time of an iteration: messages that travelled while gradients were computed and compressed."""

from __future__ import annotations

from collections.abc import Mapping

from gradlab.analysis.figures.chart import Chart, Mark, Panel, apart, points
from gradlab.analysis.figures.palette import BLUE, GREEN, GREY, ORANGE, SKY, YELLOW
from gradlab.chrome_trace import Span, StepSpans

_KINDS = {
    "backward": SKY,
    "encode": ORANGE,
    "decode": YELLOW,
    "a ring's segment": GREEN,
    "waiting": "#BBBBBB",
    "network": BLUE,
}


def timelines_chart(steps: Mapping[str, StepSpans]) -> Chart:
    """Draw iterations below each other on one axis of time. Each begins with its first bucket."""
    panels = [_panel(name, step) for name, step in steps.items()]
    heights = [len(panel.rows) + 1 for panel in panels]
    height = 0.18 * sum(heights) / len(panels) + 0.4
    return Chart(panels, height=height, shares={"sharex": True, "height_ratios": heights})


def _panel(name: str, step: StepSpans) -> Panel:
    rows, lanes = sorted({span.row for span in step.spans}), {span.row: span.lane for span in step.spans}
    bars: dict[str, list[tuple[int, float, float]]] = {}
    arrivals = []
    for span in step.spans:
        row, start, stop = rows.index(span.row), 1000 * (span.start - step.begin), 1000 * (span.stop - step.begin)
        if stop > start:
            bars.setdefault(_kind(span), []).append((row, start, stop))
        else:  # a bucket's arrival
            arrivals.append((start, row - 0.45))
    marks = []
    for kind in (kind for kind in _KINDS if kind in bars):
        at, starts, stops = zip(*bars[kind], strict=True)
        marks.append(Mark("timeline", starts, at, kind, _KINDS[kind], (starts, stops)))
    marks += [points(*apart(arrivals), GREY, "", "v", ms=4, clip_on=False)] if arrivals else []
    named = [lanes[row] for row in rows]
    labels = [lane if lane not in named[:i] else "" for i, lane in enumerate(named)]
    times = step.times
    title = (
        f"{name}: {1000 * times.seconds:.0f} ms, the network busy for {1000 * times.network_seconds:.0f}, "
        f"{1000 * times.hidden_seconds:.0f} of them hidden"
    )
    return Panel(marks, "ms from the arrival of the first bucket", "", title, labels)


def _kind(span: Span) -> str:
    if span.lane == "encode and decode":
        return "a ring's segment" if span.name.endswith("segment") else span.name.split()[0]
    return "waiting" if span.lane == "wait" else span.lane
