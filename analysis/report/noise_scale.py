"""The page of the gradient noise scale."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from gradlab.analysis.figures import information as information_plots
from gradlab.analysis.report.between_ranks import drift_line
from gradlab.analysis.report.page import Drawing, Section
from gradlab.formatting import (
    format_number,
    format_percent,
)

Json = Mapping[str, Any]


_SAME_DATA = 1e-6  # noise over signal


def noise_scale_section(data: Json) -> Section | None:
    """Make the page; None: the noise scale was not measured. data: a trace report's."""
    noise = data.get("noise_scale")
    if not noise:
        return None
    size, model = noise["batch_size"], noise["model"]
    unit = "examples" if size else "batches of one rank"
    scale = model["batches"]
    if scale is None:
        least = format_number((size or 1) * model["low"]) if model["low"] is not None else "any number of"
        answer = (
            f"No signal stands out of the ranks' noise: the noise scale is above {least} {unit}, and what is common to "
            "ranks is too little for a code to use."
        )
    elif scale < _SAME_DATA:
        answer = "All ranks computed the same gradient: check that each of them sees data of its own."
    else:
        value, low, high = (None if x is None else (size or 1) * x for x in (scale, model["low"], model["high"]))
        interval = f"no interval: {model['refused']}"
        if not model["refused"]:
            above = format_number(high) if high is not None else "no upper end"
            interval = f"{format_percent(model['level'], 0)} interval {format_number(low)} to {above}"
        answer = (
            f"The gradient noise scale is {format_number(value)} {unit} ({interval}): a rank's batch"
            f"{f' of {size}' if size else ''} is {_times(scale)}, so a gradient is "
            f"{format_percent(1 / (1 + scale), 0)} "
            f"signal, and the mean of {noise['world_size']} is "
            f"{format_percent(1 / (1 + scale / noise['world_size']), 0)}."
        )
    if model["drift"] is not None:
        answer += f" The share of signal {drift_line(model['drift'])} over the recording."
    drawing = Drawing(
        "noise_scale",
        "Redundancy over batch and ranks",
        "McCandlish et al. 2018: (a) ranks with larger batches agree more; dots are this recording's ranks taken "
        "together in "
        "groups. (b) If ranks are equally correlated: bits per value and rank that coding them together could save at "
        "best, "
        "and the share of signal in their mean; dotted: this recording.",
        partial(information_plots.plot_noise_scale, noise),
    )
    return Section("noise", "How much of a gradient is signal", answer, [], [drawing])


def _times(scale: float) -> str:
    return f"{format_number(scale, 2)} times smaller" if scale >= 1 else f"{format_number(1 / scale, 2)} times larger"
