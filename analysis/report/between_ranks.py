"""The page of what ranks share, beside null hypotheses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

from gradlab.analysis.figures import information as information_plots
from gradlab.analysis.report.page import Drawing, Section, Table
from gradlab.formatting import (
    format_number,
    format_percent,
)

Json = Mapping[str, Any]


_SHOWN_DENSITY = 0.01


# Shuffled over paired information from which on an estimator says nothing.
_BY_CHANCE = 0.9


_REMARK_COLUMNS = ("layer", "series", "what was found")


_ESTIMATORS = {"copula": "copula", "mixed": "nearest neighbours"}


def between_ranks_section(data: Json) -> Section | None:
    """Make the page; None: what ranks share was not measured. data: a trace report's."""
    between = data.get("between_nodes")
    if not between or not between["layers"]:
        return None
    layers, paper = between["layers"], str(between["paper_bins"])
    common, by_chance = (
        median(_mean_of(x, paper, name) / max(_mean_of(x, paper, "entropy"), 1e-9) for x in layers)
        for name in ("information", "shuffled")
    )
    excess = [x["estimators"]["copula"]["excess"] for x in layers]
    ends = [one["low"] for one in excess if one["low"] is not None]
    answer = (
        f"By LGC's histogram {format_percent(common, 0)} of a layer's entropy is common to two ranks (median over "
        "layers); "
        f"of pairs put together at random it is {format_percent(by_chance, 0)}"
        f"{': the estimator finds that much in anything' if by_chance > _BY_CHANCE * common else ''}. What ranks share "
        "in "
        f"an iteration, beyond what they share {between['shift_iterations']} iterations apart, is "
        f"{format_number(median(one['bits'] for one in excess), 2)} bits per parameter (median, Gaussian copula); its "
        f"interval lies above 0 in {sum(end > 0 for end in ends)} of {len(ends)} layers (by chance in "
        f"{len(ends) / 40:.1f})."
    )
    if len(ends) < len(layers):
        first = next(layer for layer, one in zip(layers, excess, strict=True) if one["low"] is None)
        reason = first["estimators"]["copula"]["excess"]["refused"]
        answer += f" Layers without an interval: {len(layers) - len(ends)}, such as {first['name']}: {reason}."
    if drifting := [layer["name"] for layer, one in zip(layers, excess, strict=True) if one["drift"] is not None]:
        answer += (
            f" It drifts over the iterations in {len(drifting)} of {len(layers)} layers ({drifting[0]} first), so that "
            "one mean does not say it all."
        )
    drawings = [
        Drawing(
            "lgc_claim",
            "LGC's claim, by layer",
            "After Fig. 4 of LGC; (first), (last), (+): first and last layer, after a residual addition. (a) The "
            "paper's "
            "estimator, of the pair and of the shuffled pair. (b) Excess over pairs "
            f"{between['shift_iterations']} iterations apart, {format_percent(between['level'], 0)} intervals "
            "over iterations; hollow: none could be given.",
            partial(information_plots.plot_claim, between),
        ),
        Drawing(
            "information",
            "Information over iterations",
            f"After Figs. 3 and 12 of LGC, means over {len(layers[0]['pairs'])} pairs of ranks.",
            partial(information_plots.plot_information_over_iterations, between),
        ),
        Drawing(
            "lags",
            "How long ranks share it",
            "One rank's gradient and another's so many recorded iterations later: what remains at large distances "
            "belongs "
            "to the parameters, not to the iteration.",
            partial(information_plots.plot_lags, between),
        ),
        Drawing(
            "top_indices",
            "Where the largest values lie",
            "What CLT-k relies on: one rank's k largest positions stand for all ranks'.",
            partial(information_plots.plot_top_indices, between),
        ),
    ]
    return Section("between", "What ranks share", answer, _between_tables(between), drawings)


def _numbers(values: Iterable[int]) -> str:
    """One number, or the least and the most of several."""
    known = sorted(values)
    return str(known[0]) if known[0] == known[-1] else f"{known[0]} to {known[-1]}"


def _mean_of(layer: Json, bins: str, name: str) -> float:
    values = layer["histograms"][bins][name]
    return float(sum(values) / len(values))


def _between_tables(between: Json) -> list[Table]:
    paper, rows = str(between["paper_bins"]), []
    for layer in between["layers"]:
        top = next((row for row in layer["top_indices"] if row["density"] == _SHOWN_DENSITY), None)
        rows.append(
            [
                layer["name"],
                ", ".join(layer["place"]) or "-",
                *(format_number(_mean_of(layer, paper, name)) for name in ("entropy", "information", "shuffled")),
                *(with_interval(layer["estimators"][name]["excess"], "bits", 3) for name in _ESTIMATORS),
                with_interval(layer["mean_cosine"], "mean", 2),
                format_number(layer["signal_to_noise"], 2),
                format_percent(top["overlap"] if top else None),
            ]
        )
    columns = (
        "layer", "place", "entropy (LGC)", "information (LGC)", "shuffled (LGC)", "excess: copula",
        "nearest neighbours", "cosine", "signal / noise", "top 1 % in common",
    )  # fmt: skip
    note = (
        "Bits per parameter. Excess: beyond the shifted null, with its interval over iterations. Estimators looked at "
        f"up to {between['values']} values of a layer in {between['iterations']} iterations, nearest neighbours at "
        f"{_numbers(layer['estimators']['mixed']['samples'] for layer in between['layers'])}, as many as their "
        "intervals need."
    )
    tables = [Table("Between ranks, by layer", columns, rows, note, text_columns=2)]
    if remarks := _series_remarks(between["layers"]):
        hint = "A trend cannot be told from a wandering that is slower than the recording is long."
        tables.append(
            Table("Series without an interval, or that drift", _REMARK_COLUMNS, remarks, hint, text_columns=3)
        )
    return tables


def _series_remarks(layers: Sequence[Json]) -> list[list[str]]:
    """A row for each series over iterations that has no interval, or drifts."""
    rows = []
    for layer in layers:
        series = {f"excess: {label}": layer["estimators"][name]["excess"] for name, label in _ESTIMATORS.items()}
        for label, found in {**series, "cosine": layer["mean_cosine"]}.items():
            remarks = [f"no interval: {found['refused']}"] if found["refused"] else []
            if found["drift"] is not None:
                remarks.append(drift_line(found["drift"]))
            if remarks:
                rows.append([layer["name"], label, "; ".join(remarks)])
    return rows


def drift_line(drift: Sequence[float]) -> str:
    """Say where a series began and ended."""
    return f"drifts from {format_number(drift[0], 2)} to {format_number(drift[1], 2)}"


def with_interval(found: Json, name: str, digits: int) -> str:
    """Write a mean over iterations with its interval: "0.031 [0.012, 0.050]"."""
    if found[name] is None:
        return "-"
    if found["low"] is None:
        return f"{found[name]:.{digits}f} [no interval]"
    return f"{found[name]:.{digits}f} [{found['low']:.{digits}f}, {found['high']:.{digits}f}]"
