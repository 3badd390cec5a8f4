"""The tables of a report, as text cells. The commands print the same rows."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

from gradlab.analysis.replay.error_series import common, median_or_none, observed_series, predicted_series
from gradlab.analysis.report.page import Table
from gradlab.formatting import (
    format_bytes,
    format_count,
    format_counted,
    format_number,
    format_percent,
    format_ratio,
    format_seconds,
)
from gradlab.metric import final_score, metric_of
from gradlab.saving import Saving

if TYPE_CHECKING:
    from gradlab.analysis.fit.gradiveq import GradiveqMeasurement
    from gradlab.analysis.fit.lgc.fit import LgcMeasurement
    from gradlab.analysis.layer_plan.provenance import LgrecoProvenance

_COMPARISON_COLUMNS = (
    "method",
    "final",
    "payload/step",
    "wire/step",
    "ratio",
    "vs 16 bits",
    "error predicted",
    "error observed",
    "compute",
    "compress",
    "communicate",
    "wait",
)
_REPLAY_COLUMNS = (
    "plan",
    "method",
    "payload/step",
    "wire/step",
    "ratio",
    "vs 16 bits",
    "error of a rank",
    "error of the mean",
    "cosine",
    "sums: error",
    "sums: cosine",
    "error's trend",
    "codec time",
)
_FIT_COLUMNS = (
    "layer",
    "slices along",
    "slice K",
    "axes d",
    "slices",
    "K / d",
    "loss, fitted slices",
    "loss, all slices",
    "loss, later iterations",
    "loss, random basis",
)
_STRUCTURE_COLUMNS = (
    "layer",
    "slice K",
    "correlation of neighbours (by chance)",
    "loss at multiples of F D / beside them",
    "loss, own basis / other slices'",
    "random",
    "L_c",
)
_LAYER_COLUMNS = (
    "layer",
    "shape",
    "slice K",
    "axes for 99 %",
    "95 %",
    "90 %",
    "energy in the time average",
    "cosine between ranks",
    "signal / noise",
)


def layer_plan_table(provenance: LgrecoProvenance) -> Table:
    """List every layer's setting, with its cost and error beside the uniform plan's."""
    cost = provenance.layer_cost
    text = format_seconds if cost == "seconds" else format_bytes
    rows = [
        [
            layer.name,
            layer.chosen,
            format_count(layer.numel),
            text(layer.cost),
            text(layer.uniform_cost),
            format_percent(layer.relative_error),
            format_percent(layer.uniform_relative_error),
        ]
        for layer in provenance.layers
    ]
    columns = ("layer", "setting", "elements", cost, "uniform", "error", "uniform")
    return Table("plan by layer", columns, rows, text_columns=2)


def selection_table(measured: LgcMeasurement) -> Table:
    """Compare ways to send the same selected values by their bytes and their error on held-out iterations."""
    rows = [
        [code.name, format_percent(code.error), format_bytes(code.payload_bytes), format_bytes(code.wire_bytes)]
        for code in measured.codes
    ]
    title = f"{measured.selected} selected values, averaged over {measured.world_size} ranks; positions come on top"
    return Table(title, ("sent as", "error, held out", "payload", "wire"), rows, text_columns=1)


def comparison_table(runs: Mapping[str, Any], replays: Mapping[str, Any]) -> Table:
    """Put runs side by side, with predicted errors where there is a replay."""
    note = (
        "Bytes per compressed step and rank: payload is what a rank contributes, wire what its network interface "
        "sends. Errors: median of ‖input - decoded‖ / ‖input‖ of the compressor over the iterations that replay and "
        "run share, without those that a plan was fitted on. A step lasts compute + wait; compress and communicate run "
        "beside computing."
    )
    method, final, *rest = _COMPARISON_COLUMNS
    columns = (method, f"{final} {metric_of(runs.values()).name}", *rest)
    return Table("Methods side by side", columns, _comparison_rows(runs, replays), note)


def _comparison_rows(runs: Mapping[str, Any], replays: Mapping[str, Any]) -> list[list[str]]:
    rows, metric = [], metric_of(runs.values())
    for name, run in runs.items():
        predicted, observed = median_errors(replays.get(name), run)
        times = run.get("time") or {}
        rows.append(
            [
                name,
                metric.text(final_score(run)),
                format_bytes((run.get("payload_bytes_per_step") or {}).get("mean")),
                format_bytes((run.get("wire_bytes_per_step") or {}).get("mean")),
                *Saving.read(run).cells,
                format_percent(predicted),
                format_percent(observed),
                *(format_seconds(times.get(part)) for part in _COMPARISON_COLUMNS[8:]),
            ]
        )
    return rows


def median_errors(replay: Mapping[str, Any] | None, run: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Compute the median contribution error, predicted and observed, as shares of the input's norm, or None."""
    observed = observed_series(run)
    if replay is None:
        return None, median_or_none(observed[1])
    predicted = predicted_series(replay)
    steps, at, here = common(predicted, observed)
    if len(steps):
        return median_or_none(at), median_or_none(here)
    return median_or_none(predicted[1]), median_or_none(observed[1])


def replay_table(replays: Mapping[str, Any]) -> Table:
    """Put replays side by side. A last column holds errors on the iterations that a plan was fitted on."""
    note = (
        "Medians over the compressed iterations; of a plan fitted on this trace, over those after its fit. Error of a "
        "rank: ‖input - decoded‖ / ‖input‖ of its compressor; the input includes the residual of error feedback. Error "
        "of the mean and cosine: against this iteration's true averaged gradient; under error feedback a large error "
        "here is earlier gradient being delivered late. Sums: the same of updates summed over windows of "
        f"{_window_lengths(replays)} successive steps. Error's trend: of a rank's error, in points per 100 iterations, "
        "with a 95 % interval that allows for dependent steps. "
    )
    note += codec_time_note(replays)
    columns: tuple[str, ...] = _REPLAY_COLUMNS
    rows = [_replay_row(name, replay["summary"]) for name, replay in replays.items()]
    inside = [replay["summary"]["in_sample"] for replay in replays.values()]
    if any(inside):
        columns = (*columns, "in-sample: rank, mean, cosine")
        note += " In-sample: the same where the plan was fitted, which is no prediction."
        rows = [[*row, ", ".join(_error_cells(seen)) if seen else "-"] for row, seen in zip(rows, inside, strict=True)]
    return Table("Plans replayed on the trace", columns, rows, note, text_columns=2)


def _replay_row(name: str, summary: Mapping[str, Any]) -> list[str]:
    return [
        name,
        "; ".join(summary["methods"]),
        format_bytes(summary["payload_bytes_per_step"]["mean"]),
        format_bytes(summary["wire_bytes_per_step"]["mean"]),
        *Saving.read(summary).cells,
        *_error_cells(summary),
        ", ".join(format_percent(one["aggregate_error"]) for one in _sums(summary)) or "-",
        ", ".join(f"{one['cosine']:.3f}" for one in _sums(summary)) or "-",
        trend_text(summary["trend"]),
        _codec_time(summary),
    ]


def _sums(summary: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The windows of more than one step."""
    return [one for one in summary["windows"] if one["length"] > 1]


def _window_lengths(replays: Mapping[str, Any]) -> str:
    """The lengths of windows, with the most windows that a replay holds: "4 (10 windows), 16 (2 windows)"."""
    counts: dict[int, int] = {}
    for one in (one for replay in replays.values() for one in _sums(replay["summary"])):
        counts[one["length"]] = max(one["windows"], counts.get(one["length"], 0))
    listed = [f"{length} ({format_counted(count, 'window')})" for length, count in sorted(counts.items())]
    return ", ".join(listed) or "no number of"


def trend_text(found: Mapping[str, Any] | None) -> str:
    """Write a trend of a relative error in points per 100 iterations, with its interval: "+3.1 (+1.2 to +5.0)"."""
    if found is None:
        return "-"
    slope, low, high = (1e4 * found[key] for key in ("slope", "low", "high"))
    return f"{slope:+.1f} ({low:+.1f} to {high:+.1f})"


# The clock's time over the processor's from which a table says that the machine was busy.
_BUSY = 1.25


def _codec_time(summary: Mapping[str, Any]) -> str:
    """A plan's codec time with its spread: "5.1 ms (4.9 ms to 7.2 ms)"."""
    spread = summary.get("codec_seconds_range")
    text = format_seconds(summary["codec_seconds"])
    return f"{text} ({' to '.join(format_seconds(end) for end in spread)})" if spread else text


def codec_time_note(replays: Mapping[str, Any]) -> str:
    """Say where a report's codec times come from, and whether the machine was busy when they were taken."""
    note = (
        "Codec time: processor time in the codecs' code per step and rank, in lockstep; the median over the compressed "
        "steps, and the least and the most of one. Forecasts in this report start from the same medians."
    )
    shares = {name: replay["summary"].get("codec_wall_share") for name, replay in replays.items()}
    busy = {name: share for name, share in shares.items() if share is not None and share > _BUSY}
    if busy:
        most = max(busy, key=lambda name: busy[name])
        note += (
            f" The machine was busy: of {len(busy)} of {len(shares)} plans this code took more than {_BUSY} times as "
            f"long by the clock as by the processor, {most}'s {busy[most]:.1f} times. Processor time leaves waiting "
            "out, but not what shared caches and cores cost."
        )
    return note


def _error_cells(summary: Mapping[str, Any]) -> tuple[str, str, str]:
    cosine = "-" if summary["cosine"] is None else f"{summary['cosine']:.3f}"
    return format_percent(summary["contribution_error"]), format_percent(summary["aggregate_error"]), cosine


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


def slice_structure_table(structure: Mapping[str, Any]) -> Table:
    """List the slice structure of each layer."""
    remarks = [
        *structure["remarks"],
        *(f"{row['name']}: {line}" for row in structure["layers"] for line in row["remarks"]),
    ]
    note = (
        f"Fitted on {len(structure['fitted_on'])} iterations, losses ‖ĝ - g‖² / ‖g‖² on later ones. "
        "Correlation: mean |r|. At multiples, beside: medians over slice sizes K that are multiples and over "
        "the next ones tried; lower at multiples is the paper's Fig. 5. L_c: the age in iterations up to which a "
        f"basis loses at most {format_percent(structure['tolerance'], 0)} more than when young."
    )
    rows = [_structure_row(layer) for layer in structure["layers"]]
    return Table("What GradiVeQ would find", _STRUCTURE_COLUMNS, rows, " ".join([note, *(f"{r}." for r in remarks)]))


def sign_table(blocks: Mapping[str, Any]) -> Table:
    """Compute Table 1 of dist-EF-blockSGD for the recorded model and ranks: bits per iteration, a row per method."""
    bits = blocks["bits_per_iteration"]
    dense = bits["full-precision SGD"]
    counted = blocks["counted_bits_per_iteration"]
    rows = [
        [method, format_count(count), format_count(counted[method]), *Saving.of(counted[method], dense).cells]
        for method, count in bits.items()
    ]
    note = (
        "All ranks, to a server and back: by the formulas of Table 1 of dist-EF-blockSGD, every tensor a block, and "
        "counted off what the codecs make of a recorded gradient, whose last byte is filled up."
    )
    return Table("Bits per iteration of signs", ["method", "computed", "counted", "ratio", "vs 16 bits"], rows, note)


def _structure_row(layer: Mapping[str, Any]) -> list[str]:
    correlation, alike = (layer[part] or {} for part in ("correlation", "consistency"))
    aged, absent = layer["staleness"], format_number(None)
    lasts = absent if aged is None else aged["suggested"] or f"at least {aged['last_age']}"
    return [
        layer["name"],
        format_count(layer["slice_size"]),
        f"{format_number(correlation.get('mean_absolute'), 2)} ({format_number(correlation.get('by_chance'), 2)})",
        " / ".join(format_percent(loss) for loss in _at_and_beside(layer["slice_sizes"])),
        f"{format_percent(alike.get('own'))} / {format_percent(alike.get('others'))}",
        format_percent(alike.get("random")),
        str(lasts),
    ]


def _at_and_beside(slice_sizes: Mapping[str, Any] | None) -> tuple[float | None, float | None]:
    """Compute the median later losses of Fig. 5 at multiples of the period, and at the sizes next to each."""
    at, beside = [], []
    multiples, losses = (slice_sizes["multiples"], slice_sizes["later_loss"]) if slice_sizes else ([], [])
    for position, multiple in enumerate(multiples):
        near = [n for n in (position - 1, position + 1) if 0 <= n < len(losses) and not multiples[n]]
        if multiple and near:
            at.append(losses[position])
            beside.append(sum(losses[n] for n in near) / len(near))
    return (median(at), median(beside)) if at else (None, None)


def layer_table(spectrum: Mapping[str, Any]) -> Table:
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
