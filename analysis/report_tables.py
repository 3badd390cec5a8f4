"""The tables of a report, as text cells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradlab.analysis.formatting import format_count, format_number, format_percent, format_ratio
from gradlab.analysis.page import Table
from gradlab.analysis.summary import COLUMNS, REPLAY_COLUMNS, comparison_rows, replay_rows

_FIT_COLUMNS = (
    "layer",
    "slice K",
    "axes d",
    "slices",
    "K / d",
    "loss, fitted slices",
    "loss, all slices",
    "loss, later iterations",
    "loss, random basis",
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


def comparison_table(runs: Mapping[str, Any], replays: Mapping[str, Any]) -> Table:
    """Runs side by side, with predicted errors where there is a replay."""
    note = (
        "Bytes per compressed step and rank: payload is what a rank contributes, wire what its network interface "
        "sends. Errors: median of ‖asked - sent‖ / ‖asked‖ over the iterations that replay and run share. "
        "A step lasts compute + wait; compress and communicate run beside computing."
    )
    return Table("Methods side by side", COLUMNS, comparison_rows(runs, replays), note)


def replay_table(replays: Mapping[str, Any]) -> Table:
    """Replays side by side."""
    note = (
        "Medians over the compressed iterations. Error of a rank: ‖asked - sent‖ / ‖asked‖, the residual of error "
        "feedback being part of what is asked. Error of the mean and cosine: against this iteration's true averaged "
        "gradient; under error feedback a large error here is earlier gradient being delivered late."
    )
    return Table("Plans replayed on the trace", REPLAY_COLUMNS, replay_rows(replays), note, text_columns=2)


def fit_table(origin: Mapping[str, Any]) -> Table:
    """A fit's sizes and losses, layer by layer."""
    rows = []
    for name, fact in origin["layers"].items():
        later, control = origin["holdout"]["groups"][name]["loss"], origin["random_basis"]["groups"][name]["loss"]
        losses = (fact["fitted_slices_loss"], fact["in_sample_loss"], later, control)
        sizes = (fact["slice_size"], fact["dimension"], fact["slices"])
        ratio = format_ratio(fact["slice_size"] / fact["dimension"])
        rows.append([name, *map(format_count, sizes), ratio, *map(format_percent, losses)])
    left_out = "; ".join(f"{name}: {why}" for name, why in origin["skipped"].items())
    note = "Loss is ‖ĝ - g‖² / ‖g‖² of the averaged gradient (GradiVeQ, Fig. 5)."
    note += f" Left dense: {left_out}." if left_out else ""
    return Table("GradiVeQ fit, layer by layer", _FIT_COLUMNS, rows, note)


def layer_table(spectrum: Mapping[str, Any]) -> Table:
    """What was measured of each layer."""
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
