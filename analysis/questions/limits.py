"""How far are codecs from the least bits possible? Codecs and plans beside the rate-distortion limit."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from gradlab.analysis.figures.chart import Chart, Mark, Panel, lines, points
from gradlab.analysis.figures.palette import BLACK, BLUE, GREEN, GREY, PURPLE, SKY, VERMILION, short
from gradlab.analysis.measure.limits import rate_of_mean
from gradlab.analysis.section import Drawing, Section, Table
from gradlab.formatting import format_number, format_percent

Json = Mapping[str, Any]

# Squared errors, of the energy, between which a codec says something and sends something.
USEFUL = (0.05, 0.9)
_HALF_LOST = 0.5  # of the energy: among the errors at which codecs stand nearest to the floor
_MOST_LAYERS = 6
_FAMILIES = {
    "quantization": (BLUE, "s"),
    "sparsification": (VERMILION, "^"),
    "low rank": (GREEN, "D"),
    "other": (PURPLE, "o"),
}


def limits_section(data: Json) -> Section | None:
    """Make the page; None: codecs were not placed beside a limit. data: a trace report's."""
    limits = data.get("limits")
    if not limits or not limits["layers"]:
        return None
    placed: dict[str, list[Json]] = {}
    for row in (row for layer in limits["layers"] for row in layer["codecs"]):
        if USEFUL[0] <= row["relative_error"] <= USEFUL[1]:
            placed.setdefault(row["setting"], []).append(row)
    ranked = sorted((median(row["above_floor"] for row in rows), setting) for setting, rows in placed.items())
    answer = "No codec's error lies where a floor says something."
    if ranked:
        answer = (
            f"Of codecs that lose {format_percent(USEFUL[0], 0)} to {format_percent(USEFUL[1], 0)} of the energy, "
            f"{ranked[0][1]} stands nearest to the floor: {format_number(ranked[0][0], 2)} bits per value above it "
            f"(median over layers); {ranked[-1][1]} farthest, {format_number(ranked[-1][0], 2)} above."
        )
    answer += _mean_of_ranks_line(data["spectrum"], limits["world_size"])
    rows = [
        [setting, format_number(bits, 3), format_number(value, 3), str(len(placed[setting]))]
        for value, setting in ranked
        for bits in [median(row["bits"] for row in placed[setting])]
    ]
    note = "Medians over the layers in which the codec's squared error is 5 % to 90 % of the energy; without feedback."
    table = Table("Above the floor", ("codec", "bits per value", "above the floor", "layers"), rows, note)
    drawing = Drawing(
        "limits",
        "Bits per value against the least possible",
        "The Gaussian rate-distortion function of one rank's gradient coded by itself (reverse water-filling), on "
        "later iterations than its axes were fitted on, the lower of two descriptions. Codecs stand at the settings "
        "they offer a planner. The largest layers.",
        _chart(limits),
    )
    return Section("limits", "How far codecs are from the least bits possible", answer, [table], [drawing])


def _mean_of_ranks_line(spectrum: Json, ranks: int) -> str:
    """Say that the floor is one rank's, and what coding for the mean over ranks could save; empty for one rank."""
    cosines = [layer["mean_cosine"] for layer in spectrum["layers"] if layer["mean_cosine"] is not None]
    if not cosines:
        return ""
    cosine = min(1.0, max(0.0, sum(cosines) / len(cosines)))
    alone, together = (rate_of_mean(_HALF_LOST, c, ranks) for c in (0.0, cosine))
    return (
        f" The floor is that of one rank's gradient, coded by itself. Codes for the mean of {ranks} ranks alone could "
        f"learn from each other: at a cosine of {format_number(cosine, 2)} and an error of "
        f"{format_percent(_HALF_LOST, 0)} of the mean's energy, {format_number(together, 2)} bits per value in place "
        f"of {format_number(alone, 2)}."
    )


def _chart(limits: Json) -> Chart:
    """Draw the largest layers."""
    layers = sorted(limits["layers"], key=lambda layer: -layer["numel"])[:_MOST_LAYERS]
    panels = [limit_panel(limits, layer, short(layer["name"])) for layer in layers]
    return Chart(panels, columns=3, height=2.3, shares={"sharey": True})


def limit_panel(limits: Json, layer: Json, title: str) -> Panel:
    """Draw one layer's floor, codecs and plans: bits per value over relative squared error."""
    errors = limits["relative_errors"]
    marks = [
        lines(errors, layer["floor"], BLACK, "Gaussian floor, one rank alone"),
        lines(errors, layer["coordinates"], GREY, "coordinates alone", linestyle=":"),
    ]
    for family, (color, marker) in _FAMILIES.items():
        known = [row for row in layer.get("codecs", []) if _family(row["codec"]) == family]
        marks += _placed(known, color, family, marker, markersize=3.5, fillstyle="none")
    plans = [row for row in limits.get("plans", []) if row["layer"] == layer["name"]]
    marks += _placed(plans, SKY, "plans replayed", "*", markersize=6)
    look = {"xscale": "log", "yscale": "log", "xlim": (1e-5, 3), "ylim": (0.01, 40)}
    return Panel(marks, "squared error / energy", "bits per value", title, look=look)


def _placed(rows: list[Json], color: str, label: str, marker: str, **look: Any) -> list[Mark]:
    at = [row["relative_error"] for row in rows], [row["bits"] for row in rows]
    return [points(*at, color, label, marker, **look)] if rows else []


def _family(codec: str) -> str:
    from gradlab import codecs

    family = codecs.get(codec).about.family
    return family if family in _FAMILIES else "other"
