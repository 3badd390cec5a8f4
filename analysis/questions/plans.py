"""The plan to take: the decision, all plans side by side, and every setting that was replayed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gradlab.analysis.figures.chart import Chart, Panel, apart, lines, points, rule
from gradlab.analysis.figures.palette import BLACK, method_colors, method_markers
from gradlab.analysis.forecast.frontier import GIVEN
from gradlab.analysis.forecast.speed import Configuration, SpeedForecast
from gradlab.analysis.questions.layer_matrix import layer_matrix_section
from gradlab.analysis.section import Drawing, Section, Table
from gradlab.formatting import format_bytes, format_counted, format_ratio, format_seconds
from gradlab.saving import Saving

Json = Mapping[str, Any]
_LEAST_ERROR = 1e-7  # of a cosine of 1, on a logarithmic axis


def plans_section(data: Json) -> Section | None:
    """Make the page; None: nothing was replayed. data: a trace report's."""
    replays: Json = data["replays"]
    if not replays:
        return None
    at, matrix = _asked(data), layer_matrix_section(data)
    answer = "Which plan is fastest depends on the time of computing, which is not known here: see the bytes of each."
    if at is not None:
        found = data["payoff"].decisions[0]
        methods = "" if found.plan is None else "; ".join(replays[found.plan]["summary"]["methods"])
        answer = found.why + (f" {found.plan} is {methods}." if methods else "")
    parts = [matrix] if matrix is not None else []
    title = "Which plan, with which settings?"
    return Section("which", title, answer, [_plan_table(data, at)], _frontier(data, at), parts=parts)


def _asked(data: Json) -> Configuration | None:
    """The first number of nodes and link that steps are forecast for; None without a time of computing."""
    speed: SpeedForecast | None = data.get("payoff")
    return None if speed is None or speed.compute_seconds is None else speed.configurations[0]


def _plan_table(data: Json, at: Configuration | None) -> Table:
    """All plans side by side, in short; the fastest first where steps are forecast."""
    replays, seconds = data["replays"], at.seconds if at is not None else {}
    rows = []
    for name in sorted(replays, key=lambda name: seconds.get(name, math.inf)):
        cells = [name, "; ".join(replays[name]["summary"]["methods"])]
        if at is not None:
            took = seconds.get(name)
            cells += [format_seconds(took), format_ratio(at.dense_seconds / took if took else None)]
        rows.append([*cells, *_sent(data, at, name)])
    columns = ["plan", "method", *(["step", "speed-up"] if at else []), "wire/step", "ratio", "vs 16 bits"]
    ranks = format_counted(at.nodes, "node") if at else f"the {data['trace']['world_size']} recorded ranks"
    note = (
        f"Wire: what a rank's network interface sends per step, between {ranks}. Ratio: how many times fewer bytes it "
        "is than plain DDP's, in 32 bits a value."
    )
    if at is not None:
        note += f" Step: forecast {at.where}; a dense one takes {format_seconds(at.dense_seconds)}."
    return Table("Plans side by side", columns, rows, note, text_columns=2)


def _sent(data: Json, at: Configuration | None, plan: str) -> tuple[str, str, str]:
    """Return bytes that a rank sends, and how many times fewer than plain DDP's in 32 and in 16 bits."""
    if at is None or plan not in data["payoff"].forecasts:
        summary = data["replays"][plan]["summary"]
        return format_bytes(summary["wire_bytes_per_step"]["mean"]), *Saving.read(summary).cells
    pair = data["payoff"].forecasts[plan].nodes[0].links[0]
    sent = float(pair.compressed.wire_bytes)
    return format_bytes(sent), *Saving.of(sent, pair.dense.wire_bytes, pair.half.wire_bytes).cells


def _frontier(data: Json, at: Configuration | None) -> list[Drawing]:
    """Draw every setting that was replayed: its error over its step's seconds."""
    rows = [row for row in data.get("frontier") or () if None not in (row["seconds"], row["cosine"])]
    if at is None or not rows:
        return []
    caption = (
        f"Every setting that was replayed, by method: 1 minus its judged cosine, over its step {at.where}. "
        "Filled: within the allowed loss by what similar methods ended at. Lower and to the left is better."
    )
    chart = _frontier_chart(rows, {at.dense_way: at.dense_seconds, "16 bits": at.half_seconds})
    return [Drawing("frontier", "Error over step time", caption, chart)]


def _frontier_chart(rows: Sequence[Json], uncompressed: Mapping[str, float]) -> Chart:
    """Draw a line per family."""
    families: dict[str, list[Json]] = {}
    for row in rows:
        families.setdefault(row["family"], []).append(row)
    colors, markers, marks = method_colors(families), method_markers(families), []
    for name, curve in families.items():
        at = [(row["seconds"], max(_LEAST_ERROR, 1 - row["cosine"])) for row in curve]
        look: dict[str, Any] = {"marker": markers[name], "ms": 6}
        style = "none" if name == GIVEN else "-"
        marks.append(lines(*apart(at), colors[name], name, linestyle=style, lw=0.8, fillstyle="none", **look))
        inside = [pair for pair, row in zip(at, curve, strict=True) if row["within"]]
        marks += [points(*apart(inside), colors[name], **look)] if inside else []
    for (name, seconds), style in zip(uncompressed.items(), ("--", ":"), strict=False):
        marks.append(rule(seconds, BLACK, name, across="x", linestyle=style))
    look = {"xscale": "log", "yscale": "log"}
    return Chart([Panel(marks, "step time, s", "error: 1 - cosine", look=look)], height=3.2, legend="right")
