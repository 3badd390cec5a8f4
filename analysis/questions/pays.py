"""Will it pay, on my nodes and my link? Step times of every plan on every number of nodes and link, and local steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gradlab.analysis.figures.chart import Chart, Mark, Panel, lines, note, points, rule
from gradlab.analysis.figures.palette import BLACK, BLUE, GREEN, GREY, ORANGE, VERMILION, method_colors
from gradlab.analysis.forecast import Forecast, Network, NodeForecast
from gradlab.analysis.forecast.endings import EndingRange
from gradlab.analysis.forecast.link import spell_rate
from gradlab.analysis.forecast.local_endings import UNCOMPRESSED, local_endings
from gradlab.analysis.forecast.local_speed import MOST_WAITING, LocalSpeed
from gradlab.analysis.forecast.local_steps import CLOSE, LocalSteps
from gradlab.analysis.forecast.networks import networks_table
from gradlab.analysis.forecast.plans import pays_text, traffic_text
from gradlab.analysis.forecast.speed import Judged, SpeedForecast
from gradlab.analysis.section import Drawing, Section, Table
from gradlab.formatting import format_count, format_counted, format_percent, format_ratio, format_seconds

Json = Mapping[str, Any]
OVER_TIME = (
    "Losses of our training of nanoGPT's Shakespeare (docs/local-steps.md), over the time that its steps would take on "
    "your machines and your link. Dashed: through the plan, as if its errors cost nothing. Your losses differ; look at "
    "the order of the lines at a given time."
)


def pays_section(data: Json) -> Section | None:
    """Make the page: the report's first line answers it, and it is answered in full beneath."""
    parts = [part for part in (step_times_section(data), local_steps_section(data)) if part is not None]
    speed: SpeedForecast | None = data.get("payoff")
    tables = []
    if speed is not None and speed.compute_seconds is not None and len(speed.configurations) > 1 and trace_brief(data):
        tables.append(networks_table(speed))
    return Section("pay", "Will it pay, on my nodes and my link?", "", tables, parts=parts) if parts else None


def trace_brief(data: Json) -> str:
    """Say in short what to take; empty where that is about local steps, or nothing is forecast."""
    speed, local = data.get("payoff"), data.get("local_steps")
    return "" if speed is None or (local is not None and local.recorded is not None) else str(speed.brief)


def speed_verdict(data: Json) -> str:
    """Say what to take where, and where local steps are the next thing to try."""
    text, local = data["payoff"].verdict, data.get("local_steps")
    if local is None:
        return str(text)
    if local.recorded is None:
        return f"{text} {local.verdict}"
    return f"With an exchange in every step: {text[:1].lower()}{text[1:]}"


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
    what = "step" if speed.compute_seconds else "exchange alone"
    note = (
        f"Forecast from computing time ({speed.network.profile.compute_source}), the codec times of the replays, "
        "and the bytes that the codecs ask for. Plain DDP in 16 bits: half the bytes, casting not counted. Cosine: of "
        "the replayed update with the true mean, both summed over so many steps. Similar methods ended: losses over "
        "dense training's of the methods with the nearest cosines in the trainings of docs/comparison.md and "
        "docs/text.md, least, middle and most. They are few, on small tasks: an observation, no bound."
    )
    name, first = next(iter(speed.forecasts.items()))
    traffic = [text for node in first.nodes if (text := traffic_text(node, first.network))]
    note += f" {name} on FSDP2's shards between {'; '.join(traffic)}." if traffic else ""
    columns = (
        "nodes", "link", "plan", what, "speed-up", "vs 16 bits", "cosine", "summed over", "similar methods ended",
    )  # fmt: skip
    tables = [Table("Step times", columns, rows, note, text_columns=3)]
    if speed.compute_seconds is not None:
        even = [
            [name, str(node.job.world_size), pays_text(node.break_even), pays_text(node.half_break_even)]
            for name, forecast in speed.forecasts.items()
            for node in forecast.nodes
        ]
        caution = "Speed alone: whether a plan's update is worth it is another question, see its cosine above."
        header = ("plan", "nodes", "beside dense", "beside 16 bits")
        tables.append(Table("Break-even link speed", header, even, caution, text_columns=1))
    caption = f"Where a plan's line is below that of {speed.network.dense} it saves time; grey: the links asked for."
    drawing = Drawing("payoff", "Step time over link speed", caption, speed_chart(speed))
    local = data.get("local_steps")
    # The report's first line is this in short; of pseudo-gradients it is about local steps.
    short = bool(trace_brief(data)) and trace_brief(data) != speed_verdict(data)
    answer = speed_verdict(data) if short or (local is not None and local.recorded is not None) else ""
    return Section("payoff", "Step times by plan, nodes and link", answer, tables, [drawing])


def _judged_cells(judged: Judged | None) -> tuple[str, str, str]:
    if judged is None or judged.ended is None:
        return "-", "-", "-"
    return f"{judged.cosine:.3f}", str(judged.length), range_cell(judged.ended)


def range_cell(ended: EndingRange | None) -> str:
    """Write a range of endings over dense training: least, middle and most."""
    if ended is None:
        return "-"
    return ", ".join(f"{100 * end:+.1f} %" for end in (ended.low, ended.middle, ended.high))


def speed_chart(speed: SpeedForecast) -> Chart:
    """Draw step time over link speed of several plans and of plain DDP, one panel per number of nodes."""
    colors, panels = method_colors(speed.forecasts), []
    for index, count in enumerate(speed.network.nodes):
        nodes = {name: forecast.nodes[index] for name, forecast in speed.forecasts.items()}
        rates = [[pair.link.bits_per_second for pair in node.curve] for node in nodes.values()]
        # Curves reach as far as each plan's own break-even: they are shown where all have one.
        low, high = max(map(min, rates)), min(map(max, rates))
        marks = _uncompressed(next(iter(nodes.values())), speed.network, speed.compute_seconds)
        marks += [_curve(node, colors[name], name) for name, node in nodes.items()]
        asked = [link.bits_per_second for link in speed.network.links]
        marks += [rule(rate, across="x", linewidth=0.6) for rate in asked]
        label = "step time, s" if speed.compute_seconds else "exchange alone, s"
        panels.append(_over_rates(marks, format_counted(count, "node"), label, (low, high) if low < high else None))
    return Chart(panels, columns=3, height=2.9, shares={"sharey": True})


def step_time_chart(forecast: Forecast) -> Chart:
    """Draw one plan's step time over link speed with its break-even, one panel per number of nodes."""
    panels = []
    for letter, node in enumerate(forecast.nodes):
        marks = _uncompressed(node, forecast.network, forecast.network.profile.compute_seconds)
        marks.append(_curve(node, VERMILION, "compressed"))
        for pair in node.links:
            if math.isfinite(rate := pair.link.bits_per_second):
                marks.append(points([rate], [pair.dense.seconds], BLACK))
                marks.append(points([rate], [pair.compressed.seconds], VERMILION, marker="s"))
        if (even := node.break_even) is not None and math.isfinite(even):
            marks.append(rule(even, across="x", linestyle="--"))
            top = max(pair.dense.seconds for pair in node.curve)
            marks.append(note(even, top, f" break-even {spell_rate(even)}", va="top"))
        title = f"({chr(ord('a') + letter)}) {format_counted(node.job.world_size, 'node')}"
        panels.append(_over_rates(marks, title, "step time, s"))
    return Chart(panels, columns=3, height=2.6, shares={"sharey": True})


def _uncompressed(node: NodeForecast, network: Network, compute: float | None) -> list[Mark]:
    rates = [pair.link.bits_per_second for pair in node.curve]
    return [
        lines(rates, [pair.dense.seconds for pair in node.curve], BLACK, network.dense, linestyle="--"),
        lines(rates, [pair.half.seconds for pair in node.curve], BLACK, f"{network.dense}, 16 bits", linestyle=":"),
        *([rule(compute, GREY, "computing alone", linestyle=":")] if compute else []),
    ]


def _curve(node: NodeForecast, color: str, label: str) -> Mark:
    rates = [pair.link.bits_per_second for pair in node.curve]
    return lines(rates, [pair.compressed.seconds for pair in node.curve], color, label)


def _over_rates(marks: Sequence[Mark], title: str, label: str, limits: tuple[float, float] | None = None) -> Panel:
    look = {"xscale": "log", "yscale": "log", **({} if limits is None else {"xlim": limits})}
    return Panel(marks, "link speed", label, title, x_text=spell_rate, look=look)


def local_steps_section(data: Json) -> Section | None:
    """Make the page, a row per number of nodes, link and plan; None without forecasts of pseudo-gradients."""
    local: LocalSpeed | None = data.get("local_steps")
    if local is None:
        return None
    taken = [one.plans[one.plan] for one in local.configurations]
    over_time = Drawing("local-loss", "Loss over wall time", OVER_TIME, loss_chart(taken))
    if local.recorded is None:
        return Section("local-steps", "What local steps would bring", "", drawings=[over_time])
    rows = [
        [str(item.nodes), spell_rate(item.bits_per_second), name, *_local_cells(times, local)]
        for item in local.configurations
        for name, times in item.plans.items()
    ]
    heads = [f"H = {every}{' (recorded)' * (every == local.recorded)}" for every in local.numbers]
    limits = [
        f"within {format_percent(CLOSE - 1, 0)} of computing from",
        f"waiting at most {format_percent(MOST_WAITING, 0)} from",
    ]
    note = (
        "A local step's time over that of computing alone, with its share of the exchange of a whole model, for which "
        "a worker waits. Every step: gradients are exchanged in every step, beside computing. Last two columns: the "
        "least H from which on it is so. Streaming (`OuterStep(fragments=, delay=)`) hides more; its times are in "
        "report.json."
    )
    table = Table("Local steps", ["nodes", "link", "plan", "every step", *heads, *limits], rows, note, text_columns=3)
    return Section("local-steps", "How many local steps, and which plan?", local.verdict, [table], [over_time])


def loss_chart(places: Sequence[LocalSteps]) -> Chart:
    """Draw the losses of our own trainings with local steps over the time that their steps would take here.

    places: a panel for each number of nodes and link. A dashed line is for a plan's exchange.
    """
    courses = [one for one in local_endings() if one.plan == UNCOMPRESSED]
    panels = []
    for letter, place in enumerate(places):
        marks = []
        for one, color in zip(courses, (BLACK, BLUE, GREEN, ORANGE), strict=False):
            label, steps = "every step" if one.every == 1 else f"H = {one.every}", one.middles
            for times, name, style in ((place.uncompressed, label, "-"), (place, f"{label}, plan", "--")):
                seconds = times.compressed if one.every == 1 else times.seconds(one.every)
                marks.append(lines([seconds * step for step in steps], one.course, color, name, linestyle=style))
        where = f"{format_counted(place.nodes, 'node')}, {spell_rate(place.bits_per_second)}"
        title = f"({chr(ord('a') + letter)}) {where}"
        panels.append(Panel(marks, "wall time, s", "loss, nats", title, look={"xscale": "log"}))
    return Chart(panels, columns=3, height=2.6, shares={"sharey": True})


def _local_cells(times: LocalSteps, local: LocalSpeed) -> list[str]:
    seconds = [times.compressed, *(times.seconds(every) for every in local.numbers)]
    ratios = [format_ratio(one / times.compute) for one in seconds]
    return [*ratios, *(format_count(every) for every in (times.close, times.least(MOST_WAITING)))]
