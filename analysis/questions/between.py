"""Information that ranks share: entropy and information as LGC measures them, beside estimates corrected for chance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np

from gradlab.analysis.figures.chart import Chart, Mark, Panel, apart, by_layer, lines, points, rule
from gradlab.analysis.figures.palette import BLACK, BLUE, GREEN, VERMILION, short
from gradlab.analysis.section import Drawing, Section, Table
from gradlab.formatting import format_number, format_percent

Json = Mapping[str, Any]
_BY_CHANCE = 0.9  # shuffled over paired information from which on an estimator says nothing
_REMARK_COLUMNS = ("layer", "series", "what was found")
_LABELS = {"copula": "copula", "mixed": "nearest neighbours"}
ESTIMATORS = {"copula": ("Gaussian copula", BLUE, "o"), "mixed": ("nearest neighbours", GREEN, "^")}
_MOST_LAYERS, _MOST_ROWS = 6, 60


def between_ranks_section(data: Json) -> Section | None:
    """Make the page; None: what ranks share was not measured. data: a trace report's."""
    between = data.get("between_nodes")
    if not between or not between["layers"]:
        return None
    return Section("between", "What ranks share", _answer(between), _tables(between), _drawings(between))


def _answer(between: Json) -> str:
    layers, paper = between["layers"], str(between["paper_bins"])
    common, by_chance = (
        median(_mean_of(x, paper, name) / max(_mean_of(x, paper, "entropy"), 1e-9) for x in layers)
        for name in ("information", "shuffled")
    )
    excess = {layer["name"]: layer["estimators"]["copula"]["excess"] for layer in layers}
    ends = [one["low"] for one in excess.values() if one["low"] is not None]
    parts = [
        f"By LGC's histogram {format_percent(common, 0)} of a layer's entropy is common to two ranks (median over "
        f"layers); of pairs put together at random it is {format_percent(by_chance, 0)}"
        f"{': the estimator finds that much in anything' if by_chance > _BY_CHANCE * common else ''}. What ranks share "
        f"in an iteration, beyond what they share {between['shift_iterations']} iterations apart, is "
        f"{format_number(median(one['bits'] for one in excess.values()), 2)} bits per parameter (median, Gaussian "
        f"copula); its interval lies above 0 in {sum(end > 0 for end in ends)} of {len(ends)} layers (by chance in "
        f"{len(ends) / 40:.1f})."
    ]
    if without := [name for name, one in excess.items() if one["low"] is None]:
        reason = excess[without[0]]["refused"]
        parts.append(f"Layers without an interval: {len(without)}, such as {without[0]}: {reason}.")
    if drifting := [name for name, one in excess.items() if one["drift"] is not None]:
        parts.append(
            f"It drifts over the iterations in {len(drifting)} of {len(layers)} layers ({drifting[0]} first), so that "
            "one mean does not say it all."
        )
    return " ".join(parts)


def _mean_of(layer: Json, bins: str, name: str) -> float:
    return fmean(layer["histograms"][bins][name])


def _tables(between: Json) -> list[Table]:
    paper, rows = str(between["paper_bins"]), []
    for layer in between["layers"]:
        rows.append(
            [
                layer["name"],
                ", ".join(layer["place"]) or "-",
                *(format_number(_mean_of(layer, paper, name)) for name in ("entropy", "information", "shuffled")),
                *(with_interval(layer["estimators"][name]["excess"], "bits", 3) for name in _LABELS),
                with_interval(layer["mean_cosine"], "mean", 2),
                format_number(layer["signal_to_noise"], 2),
            ]
        )
    columns = (
        "layer", "place", "entropy (LGC)", "information (LGC)", "shuffled (LGC)", "excess: copula",
        "nearest neighbours", "cosine", "signal / noise",
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
        title = "Series without an interval, or that drift"
        tables.append(Table(title, _REMARK_COLUMNS, remarks, hint, text_columns=3))
    return tables


def _numbers(values: Iterable[int]) -> str:
    """One number, or the least and the most of several."""
    known = sorted(values)
    return str(known[0]) if known[0] == known[-1] else f"{known[0]} to {known[-1]}"


def _series_remarks(layers: Sequence[Json]) -> list[list[str]]:
    """A row for each series over iterations that has no interval, or drifts."""
    rows = []
    for layer in layers:
        series = {f"excess: {label}": layer["estimators"][name]["excess"] for name, label in _LABELS.items()}
        for label, found in {**series, "cosine": layer["mean_cosine"]}.items():
            remarks = [f"no interval: {found['refused']}"] if found["refused"] else []
            remarks += [] if found["drift"] is None else [drift_line(found["drift"])]
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


def _drawings(between: Json) -> list[Drawing]:
    level, shift = format_percent(between["level"], 0), between["shift_iterations"]
    return [
        Drawing(
            "lgc_claim",
            "LGC's claim, by layer",
            "After Fig. 4 of LGC. (a) The paper's estimator, of the pair and of the shuffled pair. (b) Excess over "
            f"pairs {shift} iterations apart, {level} intervals over iterations; hollow: none could be given.",
            _claim(between),
        ),
        Drawing(
            "information",
            "Information over iterations",
            f"After Figs. 3 and 12 of LGC, means over {len(between['layers'][0]['pairs'])} pairs of ranks.",
            over_iterations({"": between}),
        ),
    ]


def spread_layers(layers: Sequence[Json], most: int = _MOST_LAYERS) -> list[Json]:
    """Choose layers evenly spread from the first to the last."""
    if len(layers) <= most:
        return list(layers)
    return [layers[i] for i in np.unique(np.linspace(0, len(layers) - 1, most).round().astype(int))]


def _claim(between: Json) -> Chart:
    """LGC's Fig. 4 beside estimates that are corrected for chance."""
    layers, paper = spread_layers(between["layers"], _MOST_ROWS), str(between["paper_bins"])
    rows = np.arange(len(layers))
    left = [
        points([_mean_of(layer, paper, name) for layer in layers], rows, color, label, marker, ms=5, fillstyle="none")
        for name, label, color, marker in (
            ("entropy", "entropy H", BLACK, "|"),
            ("information", "information of the pair", VERMILION, "o"),
            ("shuffled", "information, pair shuffled", BLUE, "x"),
        )
    ]
    right = [rule(0, across="x")]
    for position, (name, (label, color, marker)) in enumerate(ESTIMATORS.items()):
        placed = [
            (layer["estimators"][name]["excess"], row + 0.22 * (position - 0.5))
            for row, layer in zip(rows, layers, strict=True)
        ]
        known = [(one["bits"], at, one["low"], one["high"]) for one, at in placed if one["low"] is not None]
        middle, height, low, high = np.array(known).reshape(-1, 4).T
        right.append(Mark("intervals", middle, height, label, color, (low, high), {"fmt": marker}))
        hollow = [(one["bits"], at) for one, at in placed if one["low"] is None]
        right.append(points(*apart(hollow), color, "", marker, ms=3, fillstyle="none"))
    names = [_marked(layer) for layer in layers]
    beyond = "bits per parameter beyond the shifted null"
    panels = [
        Panel(left, "bits per parameter", "", "(a) LGC's histogram, 2³² levels", names, look={"xlim": (0, None)}),
        Panel(right, beyond, "", "(b) corrected estimators"),
    ]
    return Chart(panels, 2, max(2.6, 0.2 * len(layers) + 1.2), shares={"sharey": True})


def _marked(layer: Json) -> str:
    place = ", ".join(layer["place"])
    return short(layer["name"]) + (f" ({place})" if place else "")


def over_iterations(between: Mapping[str, Json], caption: str = "") -> Chart:
    """Draw LGC's Figs. 3 and 12, a column per title: entropy and information by its histogram and by the copula."""
    above, below, one = [], [], len(between) == 1
    for title, data in between.items():
        layers, paper = spread_layers(data["layers"]), str(data["paper_bins"])
        histogram, copula = [], []
        for layer, color in by_layer(layers):
            at, series, corrected = layer["iterations"], layer["histograms"][paper], layer["estimators"]["copula"]
            histogram.append(lines(at, series["information"], color, short(layer["name"])))
            histogram.append(lines(at, series["entropy"], color, ls=":"))
            copula += [lines(at, corrected["paired"], color), lines(at, corrected["shifted"], color, ls=":")]
        heads = (
            ("(a) LGC's histogram: H (dotted), I", "(b) copula: pair, shifted pair (dotted)") if one else (title, "")
        )
        labels = ("bits per parameter", "") if one else ("histogram: H (dotted), I", "copula: pair, shifted (dotted)")
        shown = labels if title == next(iter(between)) else ("", "")
        above.append(Panel(histogram, "iteration" if one else "", shown[0], heads[0], look={"ylim": (0, None)}))
        below.append(Panel([*copula, rule(0)], "iteration", shown[1], heads[1]))
    if one:
        return Chart([*above, *below], columns=2, height=2.7, layers=[short(layer["name"]) for layer in layers])
    shares = {"sharey": "row", "sharex": True}
    return Chart([*above, *below], columns=len(between), height=2.0, shares=shares, caption=caption)
