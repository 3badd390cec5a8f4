"""The page of codecs beside the rate-distortion limit."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from statistics import median
from typing import Any

from gradlab.analysis.figures import information as information_plots
from gradlab.analysis.measure.rate_distortion import rate_of_mean
from gradlab.analysis.report.page import Drawing, Section, Table
from gradlab.formatting import (
    format_number,
    format_percent,
)

Json = Mapping[str, Any]


# Squared errors, of the energy, between which a codec says something and sends something.
USEFUL = (0.05, 0.9)


_HALF_LOST = 0.5  # of the energy: among the errors at which codecs stand nearest to the floor


def limits_section(data: Json) -> Section | None:
    """Make the page; None: codecs were not placed beside a limit. data: a trace report's."""
    limits = data.get("limits")
    if not limits or not limits["layers"]:
        return None
    nearest: dict[str, list[float]] = {}
    bits: dict[str, list[float]] = {}
    for layer in limits["layers"]:
        for row in layer["codecs"]:
            if USEFUL[0] <= row["relative_error"] <= USEFUL[1]:
                nearest.setdefault(row["setting"], []).append(row["above_floor"])
                bits.setdefault(row["setting"], []).append(row["bits"])
    ranked = sorted((median(values), setting) for setting, values in nearest.items())
    answer = "No codec's error lies where a floor says something."
    if ranked:
        answer = (
            f"Of codecs that lose {format_percent(USEFUL[0], 0)} to {format_percent(USEFUL[1], 0)} of the energy, "
            f"{ranked[0][1]} stands nearest to the floor: {format_number(ranked[0][0], 2)} bits per value above it "
            "(median "
            f"over layers); {ranked[-1][1]} farthest, {format_number(ranked[-1][0], 2)} above."
        )
    answer += _mean_of_ranks_line(data["spectrum"], limits["world_size"])
    rows = [
        [setting, format_number(median(bits[setting]), 3), format_number(value, 3), str(len(nearest[setting]))]
        for value, setting in ranked
    ]
    note = "Medians over the layers in which the codec's squared error is 5 % to 90 % of the energy; without feedback."
    drawing = Drawing(
        "limits",
        "Bits per value against the least possible",
        "The Gaussian rate-distortion function of one rank's gradient coded by itself (reverse water-filling), on "
        "later iterations than its axes were fitted on, the lower of two descriptions. Codecs stand at the settings "
        "they offer a planner. The largest layers.",
        partial(information_plots.plot_limits, limits),
    )
    table = Table("Above the floor", ("codec", "bits per value", "above the floor", "layers"), rows, note)
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
