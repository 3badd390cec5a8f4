"""Structure within a rank, which GradiVeQ builds on: a fit tried on later iterations, slices, and its cycle.

After Yu et al., "GradiVeQ", NeurIPS 2018: Fig. 4 (adjacent gradients), Fig. 5 (slice size), Fig. 6 (what iterations are
under a plan) and Fig. 7a (loss over time). Beside them stand losses on later iterations and those of random bases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from gradlab.analysis.figures.chart import (
    Chart,
    Mark,
    Panel,
    apart,
    by_layer,
    lines,
    numbers,
    points,
    round_ticks,
    rule,
)
from gradlab.analysis.figures.palette import BLACK, BLUE, GREY, SKY, VERMILION, method_colors, short
from gradlab.analysis.measure.slices.structure import TOLERANCE
from gradlab.analysis.section import Drawing, Section, Table
from gradlab.formatting import format_count, format_number, format_percent, format_ratio

if TYPE_CHECKING:
    from gradlab.analysis.fit.gradiveq import GradiveqMeasurement
    from gradlab.analysis.replay.cycle import LayerCycle, LossOverTime, TrainingCycle

Json = Mapping[str, Any]
_LOSS = "loss ‖ĝ - g‖² / ‖g‖²"
_FIT_COLUMNS = (
    "layer", "slices along", "slice K", "axes d", "slices", "K / d", "loss, fitted slices", "loss, all slices",
    "loss, later iterations", "loss, random basis",
)  # fmt: skip
_STRUCTURE_COLUMNS = (
    "layer", "slice K", "correlation of neighbours (by chance)", "loss at multiples of F D / beside them",
    "L_c",
)  # fmt: skip


def within_rank_section(data: Json) -> Section:
    """Make the page. data: a trace report's, "fit" as a `GradiveqMeasurement`, or None."""
    fit: GradiveqMeasurement | None = data["fit"]
    structure = data.get("slice_structure")
    tables, drawings = ([fit_table(fit)], fit_drawings(fit)) if fit else ([], [])
    if structure and structure["layers"]:
        tables, drawings = [*tables, structure_table(structure)], [*drawings, *structure_drawings(structure)]
    return Section("within", "Structure within a rank", fit_verdict(fit) if fit else "", tables, drawings)


# --- a fit ------------------------------------------------------------------------------------------------------------


def fit_verdict(measured: GradiveqMeasurement) -> str:
    """Say whether a GradiVeQ fit holds on later iterations."""
    later, control = measured.holdout.loss, measured.random_basis.loss
    if later is None:
        return "The GradiVeQ fit could not be tried on any later iteration."
    threshold = measured.promised_loss
    sent = measured.saving.text("fewer bytes")
    lost = f"{format_percent(later)} of the gradient's energy is lost on later iterations"
    if control is not None and later >= control:
        return f"The GradiVeQ fit holds nothing that lasts: {lost}, {format_percent(control)} with random bases."
    if threshold is None:
        beside = "" if control is None else f" ({format_percent(control)} with random bases)"
        return f"GradiVeQ at {sent}: {lost}{beside}."
    if later <= 2 * threshold:
        return f"GradiVeQ holds what its threshold promises: {lost}, at {sent}."
    return f"GradiVeQ does not hold what its threshold ({format_percent(threshold)}) promises: {lost}, at {sent}."


def fit_table(measured: GradiveqMeasurement) -> Table:
    """List a GradiVeQ fit's sizes and losses."""
    rows = []
    for name, layer in measured.layers.items():
        later, control = (curve.groups[name].loss for curve in (measured.holdout, measured.random_basis))
        losses = (layer.fitted_slices_loss, layer.in_sample_loss, later, control)
        sizes = (layer.slice_size, layer.dimension, layer.slices)
        ratio = format_ratio(layer.slice_size / layer.dimension)
        rows.append([name, layer.slice_axis, *map(format_count, sizes), ratio, *map(format_percent, losses)])
    left_out = "; ".join(f"{name}: {why}" for name, why in measured.skipped.items())
    note = "Loss is ‖ĝ - g‖² / ‖g‖² of the averaged gradient (GradiVeQ, Fig. 5)."
    note += f" Left dense: {left_out}." if left_out else ""
    return Table("GradiVeQ fit, layer by layer", _FIT_COLUMNS, rows, note)


def fit_drawings(measured: GradiveqMeasurement, name: str = "") -> list[Drawing]:
    """List the held-out curve of a GradiVeQ fit."""
    promised = measured.promised_loss
    by_rule = "" if promised is None else f" (d by eq. (6), threshold {format_percent(promised)})"
    caption = (
        f"Fitted on {len(measured.fitted_on)} iterations{by_rule}, tried on all later ones. (a) all fitted layers "
        "together, with the loss on the fit's own iterations and that of random bases of the same size; (b) by layer."
    )
    title = "Loss on later iterations, by age of the fit" + (f": {name}" if name else "")
    return [Drawing(f"holdout_{name}" if name else "holdout", title, caption, _holdout(measured))]


def _holdout(measured: GradiveqMeasurement) -> Chart:
    held, control, threshold = measured.holdout, measured.random_basis, measured.promised_loss
    ages = [(first * last) ** 0.5 for first, last in held.ages]
    limit = (
        [] if threshold is None else [rule(threshold, BLACK, f"threshold λ = {format_percent(threshold, 0)}", ls=":")]
    )
    pooled = [
        lines(ages, control.loss_by_age, GREY, "random basis, same d", marker="x", ls="--"),
        lines(ages, held.loss_by_age, VERMILION, "fitted basis, later iterations", marker="o"),
        rule(measured.in_sample_loss, BLACK, "iterations fitted on, all slices", linestyle="-."),
        rule(measured.fitted_slices_loss, BLUE, "iterations fitted on, fitted slices", linestyle=(0, (4, 2))),
        *limit,
    ]
    groups = list(held.groups.items())
    each = [lines(ages, curve.loss_by_age, color, short(name), marker="o") for (name, curve), color in by_layer(groups)]
    look, ticks = {"xscale": "log"}, round_ticks(ages)
    age = "age of the fit, iterations"
    left = Panel(
        pooled, age, _LOSS, "(a) all fitted layers", ticks=ticks, legend=True, look={**look, "ylim": (0, None)}
    )
    right = Panel([*each, *limit], age, "", "(b) layer by layer", ticks=ticks, look=look)
    return Chart([left, right], 2, 2.9, layers=[short(name) for name in held.groups], shares={"sharey": True})


# --- slice structure --------------------------------------------------------------------------------------------------


def structure_table(structure: Json) -> Table:
    """List the slice structure of each layer."""
    remarks = [
        *structure["remarks"],
        *(f"{row['name']}: {line}" for row in structure["layers"] for line in row["remarks"]),
    ]
    note = (
        f"Fitted on {len(structure['fitted_on'])} iterations, losses ‖ĝ - g‖² / ‖g‖² on later ones. Correlation: mean "
        "|r|. At multiples, beside: medians over slice sizes K that are multiples and over the next ones tried; lower "
        "at multiples is the paper's Fig. 5. L_c: the age in iterations up to which a basis loses at most "
        f"{format_percent(TOLERANCE, 0)} more than when young."
    )
    rows = [_structure_row(layer) for layer in structure["layers"]]
    return Table("What GradiVeQ would find", _STRUCTURE_COLUMNS, rows, " ".join([note, *(f"{r}." for r in remarks)]))


def _structure_row(layer: Json) -> list[str]:
    correlation, aged = layer["correlation"] or {}, layer["staleness"]
    lasts = format_number(None) if aged is None else aged["suggested"] or f"at least {aged['last_age']}"
    return [
        layer["name"],
        format_count(layer["slice_size"]),
        f"{format_number(correlation.get('mean_absolute'), 2)} ({format_number(correlation.get('by_chance'), 2)})",
        " / ".join(format_percent(loss) for loss in _at_and_beside(layer["slice_sizes"])),
        str(lasts),
    ]


def _at_and_beside(slice_sizes: Json | None) -> tuple[float | None, float | None]:
    """Compute the median later losses of Fig. 5 at multiples of the period, and at the sizes next to each."""
    at, beside = [], []
    multiples, losses = (slice_sizes["multiples"], slice_sizes["later_loss"]) if slice_sizes else ([], [])
    for position, multiple in enumerate(multiples):
        near = [n for n in (position - 1, position + 1) if 0 <= n < len(losses) and not multiples[n]]
        if multiple and near:
            at.append(losses[position])
            beside.append(sum(losses[n] for n in near) / len(near))
    return (median(at), median(beside)) if at else (None, None)


def structure_drawings(structure: Json) -> list[Drawing]:
    """List the figures of slice structure, without those that no layer has data for."""
    first, last = (structure.get("windows") or [[0, 0]])[0]
    held = "Later iterations: not fitted on, spread over the rest of the trace."
    parts: dict[str, tuple[str, str, Callable[[Sequence[Json]], Chart]]] = {
        "scatter": (
            "adjacent gradients",
            "After Fig. 4, in GradiVeQ's order, over the iterations fitted on. Left: correlation of neighbours over "
            "iterations. Right: two of three neighbours, as recorded, then centred and rotated, with the share of the "
            "three's variance on either axis.",
            _adjacent,
        ),
        "slice_sizes": (
            "slice size and the first slice's compressor",
            "After Fig. 5: the basis fitted on the first slice (d by eq. (6)) compresses the remaining ones. The paper "
            f"finds that the loss dips at multiples of F D. {held}",
            _slice_sizes,
        ),
        "staleness": (
            "how fast a basis grows old",
            f"The first slice, bases fitted on windows of {last - first + 1} iterations. L_c: the age up to which the "
            f"loss stays within {format_percent(TOLERANCE, 0)} of the youngest bin's.",
            _staleness,
        ),
    }
    return [
        Drawing(f"gradiveq_{part}", f"What GradiVeQ would find: {title}", caption, make(layers))
        for part, (title, caption, make) in parts.items()
        if (layers := [layer for layer in structure["layers"] if layer[part] is not None])
    ]


def _adjacent(layers: Sequence[Json]) -> Chart:
    """Fig. 4: correlation of adjacent gradients, and two of them as recorded and on their principal axes."""
    panels = []
    for layer in layers:
        heat = Mark("heat", y=layer["correlation"]["matrix"], look={"vmin": -1, "vmax": 1, "cmap": "RdBu_r"})
        shares = " + ".join(format_percent(share, 0) for share in layer["scatter"]["share"][:2])
        panels.append(Panel([heat], "adjacent gradient", "adjacent gradient", short(layer["name"])))
        for what, prime, title in (("before", "", "as recorded"), ("after", "'", f"rotated: {shares}")):
            x, y = numbers(layer["scatter"][what])[:, :2].T
            marks = [points(x, y, BLUE, "", ".", markersize=3)]
            panels.append(Panel(marks, f"gradient 1{prime}", f"gradient 2{prime}", title, look={"aspect": "equal"}))
    return Chart(panels, columns=3, height=2.15)


def _slice_sizes(layers: Sequence[Json]) -> Chart:
    """Fig. 5: slice size against the loss of the first slice's compressor on the others, and compression ratio."""
    panels = []
    for layer in layers:
        tried, sizes = layer["slice_sizes"], layer["slice_sizes"]["sizes"]
        multiples = [(s, loss) for s, m, loss in zip(sizes, tried["multiples"], tried["later_loss"], strict=True) if m]
        marked = [rule(size, across="x", linestyle=":", lw=0.6) for size, _ in multiples]
        losses = [
            lines(sizes, tried["random_loss"], GREY, "random basis, same d", ls="--"),
            lines(sizes, tried["in_sample_loss"], BLUE, "iterations fitted on", ls="-."),
            lines(sizes, tried["later_loss"], VERMILION, "later iterations", marker="o"),
            points(*apart(multiples), BLACK, "", "s", ms=7, mfc="none"),
        ]
        ratios = [lines(sizes, tried["ratios"], BLACK, marker="o")]
        title = f"boxes, dotted: multiples of {layer['period_is']} = {tried['period']}"
        size, ticks, look = "slice size K, elements", round_ticks(sizes), {"xscale": "log", "ylim": (0, None)}
        panels.append(Panel([*losses, *marked], size, _LOSS, short(layer["name"]), ticks=ticks, look=look))
        panels.append(Panel([*ratios, *marked], size, "K / d", title, ticks=ticks, look={"xscale": "log"}))
    return Chart(panels, columns=2, height=1.9)


def _staleness(layers: Sequence[Json]) -> Chart:
    """Loss by age of the basis, in iterations, with the suggested L_c."""
    limit, panels = 1 + TOLERANCE, []
    for layer in layers:
        aged = layer["staleness"]
        ages = [(first * last) ** 0.5 for first, last in aged["ages"]]
        marks = [
            _through(ages, window, GREY, "" if number else "one window", linewidth=0.6, alpha=0.7)
            for number, window in enumerate(aged["by_window"])
        ]
        marks += [
            _through(ages, aged["random_loss"], GREY, "random basis, same d", ls="--"),
            _through(ages, aged["loss"], VERMILION, "all windows", marker="o"),
            rule(limit * aged["loss"][0], BLACK, f"{limit:g} x the youngest", linestyle=":"),
            rule(aged["suggested"] or aged["last_age"], BLACK, across="x", linestyle="--"),
        ]
        lasts = f"at least {aged['last_age']}" if aged["suggested"] is None else f"= {aged['suggested']}"
        title, look = f"{short(layer['name'])}: L_c {lasts}", {"xscale": "log", "ylim": (0, None)}
        panels.append(Panel(marks, "age, iterations", _LOSS, title, ticks=round_ticks(ages), look=look))
    return Chart(panels, columns=2, height=2.4)


def _through(ages: Sequence[float], losses: Sequence[float | None], color: str, label: str, **look: Any) -> Mark:
    """Draw a line through the bins that hold a value."""
    known = [(age, loss) for age, loss in zip(ages, losses, strict=True) if loss is not None]
    return lines(*apart(known), color, label, **look)


# --- the cycle --------------------------------------------------------------------------------------------------------

_MOST_LAYERS, _MOST_SLICES = 6, 16
_KINDS = {"dense": GREY, "sampled": SKY, "sampled, a basis is fitted on it": BLUE, "compressed": VERMILION}
_SMOOTHED = 100  # a point of the loss averages a hundredth of the iterations


def cycle_chart(cycle: TrainingCycle) -> Chart:
    """Draw Fig. 6: the iterations of each slice, a panel per layer, for at most 6 layers and 16 slices of each."""
    names = list(cycle.layers)
    chosen = [names[int(i)] for i in np.unique(np.linspace(0, len(names) - 1, min(_MOST_LAYERS, len(names))).round())]
    panels = []
    for name in chosen:
        layer = cycle.layers[name]
        count = min(layer.slices, _MOST_SLICES)
        marks = [*_spans(cycle.iterations, layer, count)]
        marks += [rule(fit + 1, BLACK, across="x") for fit in layer.fitted_after]
        more = f", the first {count}" if count < layer.slices else ""
        title, below = f"{short(name)}: {layer.slices} slices{more}", "iteration; lines: bases are fitted"
        rows = [str(m + 1) if m in (0, count - 1) else "" for m in range(count)]
        panels.append(Panel(marks, below if name == chosen[-1] else "", "slice", title, rows))
    return Chart(panels, height=1.5, shares={"sharex": True})


def _spans(iterations: Sequence[int], layer: LayerCycle, count: int) -> list[Mark]:
    """Runs of iterations of one kind, for the first `count` slices."""
    fitted, found = {m for run in layer.fitted_slices for m in run}, dict[str, list[tuple[int, int, int]]]()
    for m in range(count):
        kinds = [
            "sampled, a basis is fitted on it" if phase == "sampled" and m in fitted else phase
            for phase in layer.phases
        ]
        for kind, run in groupby(zip(iterations, kinds, strict=True), key=lambda pair: pair[1]):
            at = [iteration for iteration, _ in run]
            found.setdefault(kind, []).append((m, at[0], at[-1] + 1))
    return [
        Mark("timeline", [0] * len(found[kind]), rows, kind, color, (starts, stops), {"height": 1.0})
        for kind, color in _KINDS.items()
        if kind in found
        for rows, starts, stops in [zip(*found[kind], strict=True)]
    ]


def loss_over_time_chart(curves: Mapping[str, LossOverTime]) -> Chart:
    """Draw Fig. 7a: training loss over wall-clock time, a line per plan."""
    colors, marks = method_colors(curves), []
    for name, curve in curves.items():
        width = max(1, len(curve.loss) // _SMOOTHED)
        kept = len(curve.loss) // width * width
        seconds, loss = (np.array(values[:kept]).reshape(-1, width) for values in (curve.seconds, curve.loss))
        marks.append(lines(seconds[:, -1], loss.mean(1), colors[name], name))
    return Chart([Panel(marks, "time, s", "training loss", legend=True)], height=2.8)
