"""The page of step times: every plan on every number of nodes and link."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from gradlab.analysis.figures import forecast as forecast_plot
from gradlab.analysis.forecast.endings import EndingRange
from gradlab.analysis.forecast.link import spell_rate
from gradlab.analysis.forecast.plans import pays_text
from gradlab.analysis.forecast.speed import Judged, SpeedForecast
from gradlab.analysis.report.page import Drawing, Section, Table
from gradlab.analysis.report.verdict import speed_verdict, trace_brief
from gradlab.formatting import (
    format_ratio,
    format_seconds,
)

Json = Mapping[str, Any]


def step_times_section(data: Json) -> Section | None:
    """Make the page of every plan on every number of nodes and link; None if nothing is forecast."""
    speed: SpeedForecast | None = data.get("payoff")
    if speed is None:
        return None
    rows = []
    for item in speed.configurations:
        where = [str(item.nodes), spell_rate(item.bits_per_second)]
        uncompressed = [(item.dense_way, item.dense_seconds), (f"{speed.network.dense}, 16 bits", item.half_seconds)]
        for name, seconds in [*uncompressed, *sorted(item.seconds.items(), key=lambda pair: pair[1])]:
            factors = [format_ratio(step / seconds if seconds else None) for _, step in uncompressed]
            rows.append([*where, name, format_seconds(seconds), *factors, *_judged_cells(speed.judged.get(name))])
    even = [
        [name, str(node.job.world_size), pays_text(node.break_even), pays_text(node.half_break_even)]
        for name, forecast in speed.forecasts.items()
        for node in forecast.nodes
    ]
    what = "step" if speed.compute_seconds else "exchange alone"
    note = (
        f"Forecast from computing time ({speed.network.profile.compute_source}), the codec times of the replays, "
        "and the bytes that the codecs ask for. Plain DDP in 16 bits: half the bytes, casting not counted. Cosine: of "
        "the replayed update with the true mean, both summed over so many steps. Similar methods ended: losses over "
        "dense training's of the methods with the nearest cosines in the trainings of docs/comparison.md and "
        "docs/text.md, least, middle and most. They are few, on small tasks: an observation, no bound."
    )
    columns = (
        "nodes",
        "link",
        "plan",
        what,
        "speed-up",
        "vs 16 bits",
        "cosine",
        "summed over",
        "similar methods ended",
    )
    tables = [Table("Step times", columns, rows, note, text_columns=3)]
    if speed.compute_seconds is not None:
        caution = "Speed alone: whether a plan's update is worth it is another question, see its cosine above."
        header = ("plan", "nodes", "beside dense", "beside 16 bits")
        tables.append(Table("Break-even link speed", header, even, caution, text_columns=1))
    drawing = Drawing(
        "payoff",
        "Step time over link speed",
        f"Where a plan's line is below that of {speed.network.dense} it saves time; grey: the links asked for.",
        partial(forecast_plot.plot_speed, speed),
    )
    local = data.get("local_steps")
    # The report's first line is this in short; of pseudo-gradients it is about local steps.
    short = bool(trace_brief(data)) and trace_brief(data) != speed_verdict(data)
    answer = speed_verdict(data) if short or (local is not None and local.recorded is not None) else ""
    return Section("payoff", "Step times by plan, nodes and link", answer, tables, [drawing])


def _judged_cells(judged: Judged | None) -> tuple[str, str, str]:
    if judged is None or judged.ended is None:
        return "-", "-", "-"
    return f"{judged.cosine:.3f}", str(judged.length), ended_cell(judged)


def ended_cell(judged: Judged) -> str:
    """Write what a plan's similar methods ended at, over dense training: least, middle and most."""
    return range_cell(judged.ended)


def range_cell(ended: EndingRange | None) -> str:
    """Write a range of endings over dense training: least, middle and most."""
    if ended is None:
        return "-"
    return ", ".join(f"{100 * end:+.1f} %" for end in (ended.low, ended.middle, ended.high))
