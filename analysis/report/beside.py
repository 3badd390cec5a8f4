"""Two reports of recordings, side by side: what they were made of, their answers, and the plans and layers of both.

Nothing is measured again: all numbers are those of the two report.json.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradlab.analysis.figures.chart import Chart, Panel, lines, points
from gradlab.analysis.figures.palette import GREY, method_colors, method_markers
from gradlab.analysis.forecast.link import spell_rate
from gradlab.analysis.outputs import REPORT_FILES, require_free
from gradlab.analysis.report.page import Page, write_page
from gradlab.analysis.section import Drawing, Section, Table
from gradlab.errors import GradlabError
from gradlab.formatting import format_bytes, format_count, format_percent, format_ratio, format_seconds
from gradlab.json_form import require_form
from gradlab.jsonable import read_json

Json = Mapping[str, Any]
Value = float | None

_EXPECTED = "report.json of `gradlab analyze`"
_SAME = 0.02  # a change by no more than this is none
_MOST_NAMED = 12  # plans or layers with a name in a figure
_NUMBER = (float, None)
_PLACE = {
    **{"bits_per_second": (float, str), "nodes": int, "dense_seconds": _NUMBER, "half_seconds": _NUMBER},
    "seconds": {str: _NUMBER},
}
# What is read of a report.
_REPORT = {
    **{"id": str, "title": str, "brief": str, "warnings": [str], "versions": {str: object}},
    "look": {"quick?": (bool, None)},
    "trace": {
        **{"path": str, "digest": str, "steps": int, "world_size": int, "parameters": int, "layers": object},
        **{"first_iteration": (int, None), "last_iteration": (int, None)},
    },
    "replays": {
        str: {
            "summary": {
                **{"judged_cosine": _NUMBER, "contribution_error": _NUMBER, "codec_seconds": _NUMBER},
                "payload_bytes_per_step": {"mean": _NUMBER},
            }
        }
    },
    "spectrum": {"layers": [{"name": str, "mean_cosine": _NUMBER, "signal_to_noise": _NUMBER, "mean_share": _NUMBER}]},
    "payoff?": (None, {"compute_seconds": None}, {"compute_seconds": float, "places": [_PLACE]}),
}


@dataclass(frozen=True)
class Measure:
    """One number of a plan or a layer that both reports have: its name, its values by report and row, and its text."""

    name: str
    of: Mapping[str, Mapping[str, Value]]
    text: Callable[[Value], str]

    def pairs(self) -> dict[str, tuple[float, float]]:
        """The names that both reports know the number of, with both."""
        first, second = self.of.values()
        return {
            name: (float(one), float(other))  # a whole number of JSON may be larger than an array holds
            for name, one in first.items()
            if one is not None and (other := second.get(name)) is not None
        }


def read_report(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a report of a recording."""
    path = Path(folder) / "report.json"
    if not path.exists():
        raise GradlabError(f"{folder}: no report.json there, expected a folder that `gradlab analyze` wrote")
    data = read_json(path, _EXPECTED)
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind != "trace":
        raise GradlabError(f"{path}: kind is {repr(kind)[:80]}, expected 'trace': {_EXPECTED}")
    return require_form(data, _REPORT, f"{path} is no {_EXPECTED} of this version")


def write_beside(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    repeat: str = "",
) -> Path:
    """Write a report that sets two reports side by side."""
    folder = require_free(out, overwrite, contents=REPORT_FILES)
    paths = (Path(first), Path(second))
    names = _short_names(paths)
    reports = {name: read_report(path) for name, path in zip(names, paths, strict=True)}
    return write_page(_page(reports, repeat), folder, overwrite=overwrite)


def _short_names(paths: Sequence[Path]) -> tuple[str, str]:
    """The folders' names, or their whole paths where these are the same."""
    names = [path.resolve().name or str(path) for path in paths]
    if names[0] == names[1]:
        names = [str(path) for path in paths]
    return (names[0], names[1]) if names[0] != names[1] else (f"{names[0]} (first)", f"{names[1]} (second)")


def _page(reports: Mapping[str, Json], repeat: str) -> Page:
    measures = _plan_measures(reports)
    sections = [
        Section("answers", "What do they answer?", "", [_answers(reports), _facts(reports)]),
        _differ("plan", reports, measures),
        _differ("layer", reports, _layer_measures(reports)),
    ]
    first, second = reports
    return Page(
        title=f"{first} beside {second}",
        verdict=_verdict(reports, measures),
        data={
            "kind": "beside",
            "reports": {
                name: {key: report[key] for key in ("id", "title", "brief")} for name, report in reports.items()
            },
            "plans": {
                measure.name: {name: list(pair) for name, pair in measure.pairs().items()} for measure in measures
            },
        },
        warnings=_warnings(reports),
        sections=[section for section in sections if section is not None],
        formats=("svg",),
        full=True,
        repeat=repeat,
    )


def _verdict(reports: Mapping[str, Json], measures: Sequence[Measure]) -> str:
    """Say how far the second report's numbers are from the first's."""
    first, second = reports
    lines = [f"{second} over {first}, of the plans that both have:"]
    for measure in measures:
        ratios = sorted(other / one for one, other in measure.pairs().values() if one > 0)
        if ratios and (ratios[0] < 1 - _SAME or ratios[-1] > 1 + _SAME):
            lines.append(f"{measure.name} {format_ratio(ratios[0])} to {format_ratio(ratios[-1])};")
    if len(lines) == 1:
        known = any(measure.pairs() for measure in measures)
        same = f"all numbers within {format_percent(_SAME, 0)} of each other" if known else "none: nothing to compare"
        return f"{lines[0]} {same}."
    return " ".join(lines).rstrip(";") + "."


def _warnings(reports: Mapping[str, Json]) -> list[str]:
    """Reasons why a comparison is unfair."""
    (first, one), (second, other) = reports.items()
    lines = []
    if one["trace"]["layers"] != other["trace"]["layers"]:
        lines.append("The recordings are of different models: layers are compared by their names.")
    if one["look"] != other["look"]:
        lines.append(f"They measured different amounts: {first} {_looked(one)}, {second} {_looked(other)}.")
    return lines


def _looked(report: Json) -> str:
    return "with --quick" if report["look"].get("quick") else "in full"


def _answers(reports: Mapping[str, Json]) -> Table:
    rows = [
        ["in short", *(report["brief"] for report in reports.values())],
        ["warnings", *(" ".join(report["warnings"]) or "-" for report in reports.values())],
    ]
    return Table("Answers", ("", *reports), rows, text_columns=3)


def _facts(reports: Mapping[str, Json]) -> Table:
    def facts(report: Json) -> dict[str, str]:
        trace = report["trace"]
        return {
            "report": report["id"],
            "trace": f"{trace['path']} (sha256 {trace['digest'][:12]})",
            "recorded": f"{trace['steps']} steps, {trace['first_iteration']} to {trace['last_iteration']}",
            "ranks": str(trace["world_size"]),
            "parameters": format_count(trace["parameters"]),
            "measured": _looked(report),
            **{name: str(version) for name, version in report["versions"].items()},
        }

    first, second = map(facts, reports.values())
    rows = [[name, value, second.get(name, "-")] for name, value in first.items()]
    return Table("What they were made of", ("", *reports), rows, text_columns=3)


def _plan_measures(reports: Mapping[str, Json]) -> list[Measure]:
    def of(get: Callable[[Json], Value]) -> dict[str, dict[str, Value]]:
        return {
            name: {plan: get(replay["summary"]) for plan, replay in report["replays"].items()}
            for name, report in reports.items()
        }

    steps = [
        Measure(f"step {where}", {name: times[where] for name, times in of_place.items()}, format_seconds)
        for of_place in [{name: _step_times(report) for name, report in reports.items()}]
        for where in dict.fromkeys(where for times in of_place.values() for where in times)
        if all(where in times for times in of_place.values())
    ]
    return [
        *steps,
        Measure("payload", of(lambda summary: summary["payload_bytes_per_step"]["mean"]), format_bytes),
        Measure("cosine of the update", of(lambda summary: summary["judged_cosine"]), _three_digits),
        Measure("error of a rank", of(lambda summary: summary["contribution_error"]), format_percent),
        Measure("codec time", of(lambda summary: summary["codec_seconds"]), format_seconds),
    ]


def _step_times(report: Json) -> dict[str, dict[str, Value]]:
    """Steps by plan, dense ones too, by where they were forecast."""
    payoff = report.get("payoff")
    if not payoff or payoff["compute_seconds"] is None:
        return {}
    return {
        f"at {_rate(place['bits_per_second'])} between {place['nodes']} nodes": {
            "dense": place["dense_seconds"],
            "16 bits": place["half_seconds"],
            **place["seconds"],
        }
        for place in payoff["places"]
    }


def _rate(bits_per_second: float | str) -> str:
    return spell_rate(float("inf") if isinstance(bits_per_second, str) else bits_per_second)


def _three_digits(value: Value) -> str:
    return "-" if value is None else f"{value:.3f}"


def _differ(what: str, reports: Mapping[str, Json], measures: Sequence[Measure]) -> Section | None:
    """Set what both know of each "plan" or "layer" side by side: a table per measure, and a figure of the first."""
    shown = [measure for measure in measures if measure.pairs()]
    if not shown:
        return None
    tables = [_beside_table(measure, what, reports) for measure in shown]
    drawing = Drawing(
        f"beside_{what}s",
        f"{shown[0].name}, {what} by {what}",
        "Below the diagonal the second report's is smaller.",
        _beside_chart(shown[0], tuple(reports)),
    )
    answer = "Choose a measure; darker: a larger change."
    return Section(f"{what}s", f"How do {what}s differ?", answer, tables, [drawing])


def _beside_chart(measure: Measure, names: tuple[str, ...]) -> Chart:
    """Draw a point for each plan or layer, with the diagonal on which both reports say the same."""
    pairs = measure.pairs()
    values = [value for pair in pairs.values() for value in pair]
    low, high = min(values), max(values)
    named = len(pairs) <= _MOST_NAMED
    colors, markers = method_colors(pairs), method_markers(pairs)
    marks = [lines([low, high], [low, high], GREY, lw=0.8)]
    for name, (one, other) in pairs.items():
        color, label, marker = (colors[name], name, markers[name]) if named else (GREY, "", "o")
        marks.append(points([one], [other], color, label, marker, ms=6))
    look = {"xscale": "log", "yscale": "log"} if low > 0 and high > 10 * low else {}
    panel = Panel(marks, names[0], names[1], x_text=measure.text, y_text=measure.text, look=look)
    return Chart([panel], height=3.2, legend="right")


def _layer_measures(reports: Mapping[str, Json]) -> list[Measure]:
    def of(key: str) -> dict[str, dict[str, Value]]:
        return {
            name: {layer["name"]: layer[key] for layer in report["spectrum"]["layers"]}
            for name, report in reports.items()
        }

    return [
        Measure("cosine between ranks", of("mean_cosine"), _three_digits),
        Measure("signal over noise", of("signal_to_noise"), _three_digits),
        Measure("energy in the time average", of("mean_share"), format_percent),
    ]


def _beside_table(measure: Measure, head: str, reports: Mapping[str, Json]) -> Table:
    rows, shades = [], []
    for name, (one, other) in measure.pairs().items():
        ratio = other / one if one > 0 and other > 0 else None
        rows.append([name, measure.text(one), measure.text(other), format_ratio(ratio)])
        shades.append([0.0, 0.0, 0.0, 0.0 if ratio is None else min(1.0, abs(ratio - 1))])
    missing = sorted(set.symmetric_difference(*(set(known) for known in measure.of.values())))
    note = f"In one report alone: {', '.join(missing)}." if missing else ""
    return Table(measure.name, (head, *reports, "second over first"), rows, note, shades=shades, takes_turns=True)
