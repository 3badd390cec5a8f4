"""The table that sets methods side by side; the report and the commands print the same rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradlab.analysis.formatting import format_bytes, format_percent, format_ratio, format_seconds
from gradlab.analysis.series import common, median_or_none, observed_series, predicted_series

COLUMNS = (
    "method",
    "final accuracy",
    "payload/step",
    "wire/step",
    "ratio",
    "error predicted",
    "error observed",
    "compute",
    "compress",
    "communicate",
    "wait",
)
REPLAY_COLUMNS = (
    "plan",
    "method",
    "payload/step",
    "wire/step",
    "ratio",
    "error of a rank",
    "error of the mean",
    "cosine",
    "codec time",
)


def median_errors(replay: Mapping[str, Any] | None, run: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Median contribution error, predicted and observed, over the iterations that both have; None for what is not."""
    observed = observed_series(run)
    if replay is None:
        return None, median_or_none(observed[1])
    predicted = predicted_series(replay)
    steps, at, here = common(predicted, observed)
    if len(steps):
        return median_or_none(at), median_or_none(here)
    return median_or_none(predicted[1]), median_or_none(observed[1])


def comparison_rows(runs: Mapping[str, Any], replays: Mapping[str, Any]) -> list[list[str]]:
    """One row of text per run, columns as `COLUMNS`. runs, replays: JSON by method, replays may lack some."""
    rows = []
    for name, run in runs.items():
        predicted, observed = median_errors(replays.get(name), run)
        times = run.get("time") or {}
        rows.append(
            [
                name,
                format_percent(run.get("final_accuracy")),
                format_bytes((run.get("payload_bytes_per_step") or {}).get("mean")),
                format_bytes((run.get("wire_bytes_per_step") or {}).get("mean")),
                format_ratio(run.get("compression_ratio")),
                format_percent(predicted),
                format_percent(observed),
                *(format_seconds(times.get(part)) for part in COLUMNS[7:]),
            ]
        )
    return rows


def replay_rows(replays: Mapping[str, Any]) -> list[list[str]]:
    """One row of text per replay, columns as `REPLAY_COLUMNS`."""
    rows = []
    for name, replay in replays.items():
        found = replay["summary"]
        cosine = found["cosine"]
        rows.append(
            [
                name,
                "; ".join(found["methods"]),
                format_bytes(found["payload_bytes_per_step"]["mean"]),
                format_bytes(found["wire_bytes_per_step"]["mean"]),
                format_ratio(found["compression_ratio"]),
                format_percent(found["contribution_error"]),
                format_percent(found["aggregate_error"]),
                "-" if cosine is None else f"{cosine:.3f}",
                format_seconds(found["codec_seconds"]),
            ]
        )
    return rows
