"""How much of a gradient is signal? The page of the gradient noise scale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gradlab.analysis.figures.chart import Chart, Mark, Panel, lines, points, rule
from gradlab.analysis.figures.palette import BLUE, GREEN, GREY, ORANGE, VERMILION
from gradlab.analysis.questions.between import drift_line
from gradlab.analysis.section import Drawing, Section
from gradlab.formatting import format_number, format_percent

Json = Mapping[str, Any]
_SAME_DATA = 1e-6  # noise over signal
_RANKS = [(count, str(count)) for count in (1, 4, 16, 64, 256)]


def noise_scale_section(data: Json) -> Section | None:
    """Make the page; None: the noise scale was not measured. data: a trace report's."""
    noise = data.get("noise_scale")
    if not noise:
        return None
    answer = _answer(noise)
    if noise["model"]["drift"] is not None:
        answer += f" The share of signal {drift_line(noise['model']['drift'])} over the recording."
    drawing = Drawing(
        "noise_scale",
        "Redundancy over batch and ranks",
        "McCandlish et al. 2018: (a) ranks with larger batches agree more; dots are this recording's ranks taken "
        "together in groups. (b) If ranks are equally correlated: bits per value and rank that coding them together "
        "could save at best, and the share of signal in their mean; dotted: this recording.",
        _chart(noise),
    )
    return Section("noise", "How much of a gradient is signal", answer, [], [drawing])


def _unit(noise: Json) -> str:
    return "examples" if noise["batch_size"] else "batches of one rank"


def _answer(noise: Json) -> str:
    size, model = noise["batch_size"], noise["model"]
    scale = model["batches"]
    if scale is None:
        least = format_number((size or 1) * model["low"]) if model["low"] is not None else "any number of"
        return (
            f"No signal stands out of the ranks' noise: the noise scale is above {least} {_unit(noise)}, and what is "
            "common to ranks is too little for a code to use."
        )
    if scale < _SAME_DATA:
        return "All ranks computed the same gradient: check that each of them sees data of its own."
    value, low, high = (None if x is None else (size or 1) * x for x in (scale, model["low"], model["high"]))
    interval = f"no interval: {model['refused']}"
    if not model["refused"]:
        above = format_number(high) if high is not None else "no upper end"
        interval = f"{format_percent(model['level'], 0)} interval {format_number(low)} to {above}"
    times = f"{format_number(max(scale, 1 / scale), 2)} times {'smaller' if scale >= 1 else 'larger'}"
    return (
        f"The gradient noise scale is {format_number(value)} {_unit(noise)} ({interval}): a rank's batch"
        f"{f' of {size}' if size else ''} is {times}, so a gradient is {format_percent(1 / (1 + scale), 0)} signal, "
        f"and the mean of {noise['world_size']} is {format_percent(1 / (1 + scale / noise['world_size']), 0)}."
    )


def _chart(noise: Json) -> Chart:
    expected, size, model = noise["expected"], noise["batch_size"] or 1, noise["model"]
    measured, rows = noise["measured_cosine"], noise["by_nodes"]
    left = [lines(size * np.array(expected["batches"]), expected["cosine"], BLUE, "1 / (1 + B / b)")]
    if (scale := model["batches"]) is not None:
        left.append(rule(size * scale, GREY, f"noise scale B = {size * scale:.3g}", across="x", linestyle="--"))
        if model["low"] is not None and model["high"] is not None:
            left.append(Mark("band", (size * model["low"], size * model["high"]), color=GREY, look={"alpha": 0.15}))
    batches, cosines = [size * row["batches"] for row in measured], [row["cosine"] for row in measured]
    left.append(points(batches, cosines, VERMILION, "measured, ranks grouped"))
    ranks = [row["nodes"] for row in rows]
    right = [
        lines(ranks, [row["redundancy_bits"] for row in rows], GREEN, "redundancy, bits", marker="o"),
        lines(ranks, [row["signal_share_of_mean"] for row in rows], ORANGE, "signal in the mean", marker="s", ls="--"),
        rule(noise["world_size"], across="x", linestyle=":"),
    ]
    batch = f"batch of a rank, {_unit(noise)}"
    cosine = Panel(left, batch, "cosine between ranks", "(a)", legend=True, look={"xscale": "log", "ylim": (0, 1)})
    look = {"xscale": "log", "ylim": (0, None)}
    redundancy = Panel(right, "ranks", "", "(b) per value and rank", ticks=_RANKS, legend=True, look=look)
    return Chart([cosine, redundancy], columns=2, height=2.6)
