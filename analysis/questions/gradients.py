"""The look of gradients: spectra, agreement and norms, and a page for each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from gradlab.analysis.figures.chart import Chart, Panel, by_layer, lines, note, rule
from gradlab.analysis.figures.palette import BLUE, VERMILION, running_mean, short, smoothing_window
from gradlab.analysis.questions.between import ESTIMATORS, between_ranks_section, with_interval
from gradlab.analysis.questions.layer_matrix import layer_anchors, plans_on_layer
from gradlab.analysis.questions.limits import USEFUL, limit_panel, limits_section
from gradlab.analysis.questions.noise import noise_scale_section
from gradlab.analysis.questions.signs import signs_section
from gradlab.analysis.questions.slices import within_rank_section
from gradlab.analysis.section import Drawing, Section, Table
from gradlab.formatting import format_count, format_number, format_percent

Json = Mapping[str, Any]
_SHARES: Json = {"xscale": "log", "ylim": (0, 1.03)}
_MOST_COMPARED = 100  # layers, the largest, on whose pages plans are compared
_LAYER_COLUMNS = (
    "layer", "shape", "slice K", "axes for 99 %", "95 %", "90 %", "energy in the time average", "cosine between ranks",
    "signal / noise",
)  # fmt: skip


def gradients_section(data: Json, layer_figures: int) -> Section:
    """Make the page, with what is measured folded beneath it: figures of so many layers, the largest."""
    spectrum, noise = data["spectrum"], noise_scale_section(data)
    answer = " ".join(line for line in (agreement_line(spectrum), noise.answer if noise else "") if line)
    lead, *others = over_time_drawings(spectrum)
    within = within_rank_section(data)
    within = replace(within, drawings=[*within.drawings, *spectrum_drawings(spectrum), *others])
    parts = [between_ranks_section(data), replace(noise, answer="") if noise else None, limits_section(data), within]
    parts += [signs_section(data), layers_section(data, layer_figures)]
    shown = [part for part in parts if part is not None]
    return Section("gradients", "What do my gradients look like?", answer, drawings=[lead], parts=shown)


def agreement_line(spectrum: Json) -> str:
    """Say how far two ranks' gradients agree."""
    cosines = [layer["mean_cosine"] for layer in spectrum["layers"] if layer["mean_cosine"] is not None]
    if not cosines:
        return ""
    mean = sum(cosines) / len(cosines)
    meaning = "mostly noise of their own batches" if mean < 0.3 else "a good part in common"
    return f"Two ranks' gradients have a cosine of {format_number(mean, 2)} on average: {meaning}."


def spectrum_drawings(spectrum: Json) -> list[Drawing]:
    """List the figures of a trace's spectrum."""
    count = len(spectrum["steps"])
    return [
        Drawing(
            "slice_spectrum",
            "Spectrum of a slice of the averaged gradient",
            f"Eigenvalues of the covariance over {count} iterations of each layer's first slice (GradiVeQ's order, K "
            "elements), and the share of variance that the leading d axes hold. So many samples show at most "
            f"{count - 1} axes: these curves are in-sample and say nothing yet about later iterations.",
            _spectra(spectrum["layers"], "slice"),
        ),
        Drawing(
            "layer_spectrum",
            "Spectrum of whole layers over time",
            f"The same for all elements of a layer together, by snapshot PCA over {count} iterations.",
            _spectra(spectrum["layers"], "layer"),
        ),
    ]


def over_time_drawings(spectrum: Json) -> list[Drawing]:
    """List the figures over iterations: agreement between ranks, if there are several, and norms."""
    drawings = []
    if any(layer["mean_cosine"] is not None for layer in spectrum["layers"]):
        caption = (
            "Cosine between the gradients that two ranks compute in one iteration, mean over pairs; running mean. "
            "Near 0, each rank's gradient is mostly noise of its own batch, which no fit can foresee."
        )
        chart = _over_time(spectrum, "cosine", "cosine between two ranks")
        drawings.append(Drawing("agreement", "Agreement between ranks", caption, chart))
    caption = "Euclidean norm of the gradient averaged over ranks, by layer; running mean."
    chart = _over_time(spectrum, "norm", "‖averaged gradient‖", yscale="log")
    return [*drawings, Drawing("norms", "Norm of the gradient", caption, chart)]


def _spectra(layers: Sequence[Json], part: str) -> Chart:
    values, shares = [], []
    for layer, color in by_layer(layers):
        found = np.array(layer[f"{part}_eigenvalues"])
        axis, shown = np.arange(1, len(found) + 1), found > 1e-10 * found.max(initial=0)
        values.append(lines(axis[shown], found[shown] / found.max(initial=1e-300), color, short(layer["name"])))
        shares.append(lines(axis, layer[f"{part}_cumulative_variance"], color))
    for kept in (0.99, 0.9):
        shares += [rule(kept, linestyle="--"), note(1.0, kept - 0.02, f"{kept:.0%}", va="top")]
    look = {"xscale": "log", "yscale": "log"}
    left = Panel(values, "axis", "eigenvalue / largest", "(a) spectrum", look=look)
    right = Panel(shares, "axes kept, d", "share of variance", "(b) cumulative", look=_SHARES)
    return Chart([left, right], columns=2, height=2.8, layers=[short(layer["name"]) for layer in layers])


def _over_time(spectrum: Json, what: str, label: str, **look: Any) -> Chart:
    layers, steps = spectrum["layers"], spectrum["steps"]
    window = smoothing_window(len(steps))
    marks = [
        lines(steps, running_mean(layer[what], window), color, short(layer["name"]))
        for layer, color in by_layer(layers)
    ]
    panel = Panel([*marks, rule(0)], "iteration", label, look={"xlim": (steps[0], steps[-1]), **look})
    return Chart([panel], height=2.7, layers=[short(layer["name"]) for layer in layers])


def layer_table(spectrum: Json) -> Table:
    """List the spectrum's results."""
    rows = []
    for layer in spectrum["layers"]:
        axes = layer["layer_dimensions"]
        rows.append(
            [
                layer["name"],
                " x ".join(map(str, layer["shape"])),
                format_count(layer["slice_size"]),
                *(format_count(axes[loss]) for loss in ("0.01", "0.05", "0.1")),
                format_percent(layer["mean_share"]),
                format_number(layer["mean_cosine"], 2),
                format_number(layer["signal_to_noise"], 2),
            ]
        )
    note = (
        f"Over {len(spectrum['steps'])} sampled iterations; axes are those of the whole layer, in-sample. Signal to "
        "noise: energy that ranks share over energy that each has alone. The time average of pure noise would hold "
        f"{format_percent(1 / len(spectrum['steps']))}."
    )
    return Table("Layers", _LAYER_COLUMNS, rows, note)


def layers_section(data: Json, figures: int) -> Section:
    """Make the page of all layers, and a page for each. figures: layers, the largest, that have a figure."""
    layers, anchors = data["spectrum"]["layers"], layer_anchors(data)
    largest = [layer["name"] for layer in sorted(layers, key=lambda layer: -prod(layer["shape"]))]
    parts = []
    for layer in layers:
        name, anchor = layer["name"], anchors[layer["name"]]
        caption = "What ranks share, its spectrum, and codecs above its floor."
        drawings = [Drawing(anchor.replace("-", "_"), name, caption, _layer_chart(data, layer))]
        tables = plans_on_layer(data["replays"], name) if name in largest[:_MOST_COMPARED] else []
        shown = drawings if name in largest[:figures] else []
        parts.append(Section(anchor, name, "; ".join(_facts(data, layer)) + ".", tables, shown, of_layer=True))
    return Section("layers", "All layers", "", [layer_table(data["spectrum"]).linked(anchors)], parts=parts)


def _named(part: Json | None, name: str) -> Json | None:
    """Find a layer in a part of a report. None: one of both is missing."""
    return next((layer for layer in part["layers"] if layer["name"] == name), None) if part else None


def _facts(data: Json, layer: Json) -> list[str]:
    between, limit = (_named(data.get(part), layer["name"]) for part in ("between_nodes", "limits"))
    facts = [
        " x ".join(map(str, layer["shape"])),
        f"{format_count(prod(layer['shape']))} parameters",
        *(between["place"] if between else []),
    ]
    if layer["mean_cosine"] is not None:
        facts.append(f"cosine between ranks {layer['mean_cosine']:.2f}")
    if between:
        facts.append(f"excess {with_interval(between['estimators']['copula']['excess'], 'bits', 3)} bits (copula)")
    useful = [row for row in (limit or {}).get("codecs", ()) if USEFUL[0] <= row["relative_error"] <= USEFUL[1]]
    if useful:
        best = min(useful, key=lambda row: row["above_floor"])
        facts.append(f"nearest to the floor: {best['setting']}, {best['above_floor']:.2f} bits above")
    return facts


def _layer_chart(data: Json, spectrum: Json) -> Chart:
    """Draw what was measured of one layer: what ranks share over time, its spectrum, codecs above the floor."""
    panels, name = [], spectrum["name"]
    if between := _named(data.get("between_nodes"), name):
        series = {label: (between["estimators"][method], color) for method, (label, color, _) in ESTIMATORS.items()}
        excess = [
            lines(between["iterations"], np.subtract(one["paired"], one["shifted"]), color, label, lw=1)
            for label, (one, color) in series.items()
        ]
        panels.append(Panel([*excess, rule(0)], "iteration", "excess, bits", "ranks share", legend=True))
    shares = [
        lines(range(1, len(share) + 1), share, color, label)
        for part, label, color in (("slice", "one slice", VERMILION), ("layer", "whole layer", BLUE))
        for share in [spectrum[f"{part}_cumulative_variance"]]
    ]
    panels.append(Panel(shares, "axes kept", "share of variance", "spectrum", legend=True, look=_SHARES))
    if limit := _named(data.get("limits"), name):
        panels.append(limit_panel(data["limits"], limit, "limit"))
    return Chart(panels, columns=3, height=2.1, legend="")
