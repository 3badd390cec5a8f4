"""Training and what was predicted: runs side by side, beside replays and fits of the same names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from gradlab.analysis.figures.chart import Chart, Mark, Panel, lines, note, points, round_ticks, rule
from gradlab.analysis.figures.palette import (
    BLUE,
    ORANGE,
    SKY,
    method_colors,
    method_markers,
    running_mean,
    smoothing_window,
)
from gradlab.analysis.forecast.decide import SPEED_NOISE
from gradlab.analysis.questions.errors import (
    common,
    error_ratio_chart,
    errors_chart,
    layer_errors_drawing,
    lossy_replays,
    median_or_none,
    observed_series,
    predicted_series,
)
from gradlab.analysis.questions.gradients import agreement_line, over_time_drawings, spectrum_drawings
from gradlab.analysis.questions.slices import fit_drawings, fit_table, fit_verdict
from gradlab.analysis.section import Drawing, Section, Table
from gradlab.formatting import format_bytes, format_percent, format_seconds
from gradlab.metric import RELATIVE_NOISE, final_score, metric_of, scores
from gradlab.saving import Saving

if TYPE_CHECKING:
    from gradlab.analysis.fit.gradiveq import GradiveqMeasurement

Json = Mapping[str, Any]
COMPARISON_COLUMNS = (
    "method", "final", "payload/step", "wire/step", "ratio", "vs 16 bits", "error predicted", "error observed",
    "compute", "compress", "communicate", "wait",
)  # fmt: skip
# Bars must be told apart in grey print, too.
_TIMES = {
    "compute": (SKY, ""),
    "wait": ("#BBBBBB", "////"),
    "compress": (ORANGE, ""),
    "communicate": (BLUE, "...."),
}


def comparison_sections(
    runs: Json, replays: Json, fits: Mapping[str, GradiveqMeasurement], spectrum: Json | None
) -> list[Section]:
    """Make the pages of training runs, with what was predicted of them."""
    title, tables = "What happened in training, and what was predicted", [comparison_table(runs, replays)]
    sections = [Section("runs", title, comparison_verdict(runs), tables, _drawings(runs, replays))]
    if fits:
        tables = [fit_table(fit) for fit in fits.values()]
        drawings = [item for name, fit in fits.items() for item in fit_drawings(fit, name)]
        answer = " ".join(fit_verdict(fit) for fit in fits.values())
        sections.append(Section("fits", "Do fits hold on later iterations?", answer, tables, drawings))
    if spectrum:
        drawings = [*spectrum_drawings(spectrum), *over_time_drawings(spectrum)]
        sections.append(Section("spectrum", "How correlated are gradients?", agreement_line(spectrum), [], drawings))
    return sections


# --- in words ---------------------------------------------------------------------------------------------------------


def step_seconds(run: Json) -> float | None:
    """Return a run's seconds per step: as reported, else computing plus waiting; None without times."""
    if run.get("step_seconds"):
        return float(run["step_seconds"])
    times = run.get("time") or {}
    return float((times.get("compute") or 0.0) + (times.get("wait") or 0.0)) or None


def comparison_verdict(runs: Json) -> str:
    """Say whether compression paid, by the runs' times and final metric."""
    dense = runs.get("dense")
    timed = {name: seconds for name, run in runs.items() if name != "dense" and (seconds := step_seconds(run))}
    reference = step_seconds(dense) if dense else None
    if dense is None or not reference or not timed:
        return "Whether compression pays cannot be told: it takes a dense run and a compressed one, both timed."
    fastest = min(timed, key=lambda name: timed[name])
    if timed[fastest] > (1 - SPEED_NOISE) * reference:
        most = max(map(Saving.read, runs.values()), key=lambda saving: saving.ratio or 1.0)
        return (
            f"Compression does not pay on this link: a dense step takes {format_seconds(reference)}, the fastest "
            f"compressed one ({fastest}) {format_seconds(timed[fastest])}. Up to {most.text('fewer bytes')} are "
            f"worth something only where bytes are slow. {_quality_line(runs, dense)}"
        )
    drift = _compute_seconds(dense) - _compute_seconds(runs[fastest])
    if drift >= 0.5 * (reference - timed[fastest]):
        return (
            f"Whether compression pays in time cannot be told here: {fastest} takes {format_seconds(timed[fastest])} "
            f"per step and dense {format_seconds(reference)}, but computing alone, which no codec changes, differs by "
            f"{format_seconds(drift)} between the two runs. {_quality_line(runs, dense)}"
        )
    return (
        f"{fastest} pays in time: {format_seconds(timed[fastest])} per step instead of {format_seconds(reference)}, at "
        f"{Saving.read(runs[fastest]).text('fewer bytes')}. {_quality_line(runs, dense)}"
    )


def _compute_seconds(run: Json) -> float:
    return float((run.get("time") or {}).get("compute") or 0.0)


def _quality_line(runs: Json, dense: Json) -> str:
    metric, reference = metric_of(runs.values()), final_score(dense)
    name = metric.name[:1].upper() + metric.name[1:]
    if reference is None:
        return f"{name}: dense itself diverged." if scores(dense) else f"{name} was not measured."
    ends = {method: final_score(run) for method, run in runs.items() if scores(run) or final_score(run) is not None}
    lost = {method: value for method, value in ends.items() if metric.worse(value, reference)}
    if not lost and metric.form == "percent":
        return f"All methods end within 2 points of dense ({metric.text(reference)}) or above, one seed each."
    if not lost:
        way = "below" if metric.better == "lower" else "above"
        share = format_percent(RELATIVE_NOISE, 0)
        return (
            f"All methods end within {share} of dense ({metric.name} {metric.text(reference)}) or {way}, one seed each."
        )
    texts = {method: "diverged" if value is None else metric.text(value) for method, value in lost.items()}
    listed = ", ".join(f"{method} ({text})" for method, text in texts.items())
    return f"{name} is lost by {listed}; dense reaches {metric.text(reference)}, one seed each."


# --- as a table -------------------------------------------------------------------------------------------------------


def comparison_table(runs: Json, replays: Json) -> Table:
    """Put runs side by side, with predicted errors where there is a replay."""
    note = (
        "Bytes per compressed step and rank: payload is what a rank contributes, wire what its network interface "
        "sends. Errors: median of ‖input - decoded‖ / ‖input‖ of the compressor over the iterations that replay and "
        "run share, without those that a plan was fitted on. A step lasts compute + wait; compress and communicate run "
        "beside computing."
    )
    method, final, *rest = COMPARISON_COLUMNS
    columns = (method, f"{final} {metric_of(runs.values()).name}", *rest)
    return Table("Methods side by side", columns, _comparison_rows(runs, replays), note)


def _comparison_rows(runs: Json, replays: Json) -> list[list[str]]:
    rows, metric = [], metric_of(runs.values())
    for name, run in runs.items():
        times = run.get("time") or {}
        rows.append(
            [
                name,
                metric.text(final_score(run)),
                format_bytes((run.get("payload_bytes_per_step") or {}).get("mean")),
                format_bytes((run.get("wire_bytes_per_step") or {}).get("mean")),
                *Saving.read(run).cells,
                *map(format_percent, median_errors(replays.get(name), run)),
                *(format_seconds(times.get(part)) for part in COMPARISON_COLUMNS[8:]),
            ]
        )
    return rows


def median_errors(replay: Json | None, run: Json) -> tuple[float | None, float | None]:
    """Compute the median contribution error, predicted and observed, as shares of the input's norm, or None."""
    observed = observed_series(run)
    if replay is None:
        return None, median_or_none(observed[1])
    predicted = predicted_series(replay)
    steps, at, here = common(predicted, observed)
    if len(steps):
        return median_or_none(at), median_or_none(here)
    return median_or_none(predicted[1]), median_or_none(observed[1])


# --- as charts --------------------------------------------------------------------------------------------------------


def _drawings(runs: Mapping[str, Json], replays: Mapping[str, Json]) -> list[Drawing]:
    lossy, name = lossy_replays(replays), metric_of(runs.values()).name
    caption = "All runs start from the same parameters and see the same data in the same order."
    drawings = [Drawing("training", f"Training: loss and {name}", caption, training_chart(runs))]
    if lossy or any(observed_series(run)[1].any() for run in runs.values()):
        caption = (
            "Predicted: the method replayed on the dense run's gradients. Observed: what training with it measured. "
            "The first compressed iteration sees the same gradients; later ones drift apart with the parameters."
        )
        chart = errors_chart(lossy, runs)
        drawings.append(Drawing("errors", "Compression error: predicted and observed", caption, chart))
    if (ratio := error_ratio_chart(lossy, runs)) is not None:
        caption = "1 means exact; the band is 0.8 to 1.25. Thin: each iteration; thick: running mean."
        drawings.append(Drawing("error_ratio", "Predicted over observed error", caption, ratio))
    if placed := {
        n: run for n, run in runs.items() if final_score(run) is not None and run.get("payload_bytes_per_step")
    }:
        caption = f"Payload that a rank contributes per compressed step, and the {name} at the end; one seed each."
        drawings.append(Drawing("tradeoff", f"Bytes against {name}", caption, tradeoff_chart(placed)))
    if timed := {n: run for n, run in runs.items() if any((run.get("time") or {}).values())}:
        caption = (
            "Per step, as the runs measured it. Upper bar: what a step lasts, computing and then waiting for the "
            "exchange. Lower bar: the exchange itself, which runs beside computing as far as that hides it."
        )
        drawings.append(Drawing("times", "Where a step's time goes", caption, _times_chart(timed)))
    return [*drawings, *([layer_errors_drawing(lossy, runs)] if lossy else [])]


def training_chart(runs: Mapping[str, Json]) -> Chart:
    """Draw the training loss and the test metric of every run over iterations."""
    metric, tested = metric_of(runs.values()), any(scores(run) for run in runs.values())
    colors, markers = method_colors(runs), method_markers(runs)
    losses, values = list[Mark](), list[Mark]()
    for name, run in runs.items():
        smooth = running_mean(run["losses"], smoothing_window(len(run["losses"])))
        losses.append(lines(range(len(smooth)), smooth, colors[name], name))
        if scores(run):
            steps, found = np.array(scores(run), dtype=float).T
            values.append(lines(steps, metric.drawn(found), colors[name], marker=markers[name]))
    if warmup := max((run.get("warmup_steps") or 0 for run in runs.values()), default=0):
        start = rule(warmup, across="x", linestyle=":")
        highest = max((float(np.nanmax(mark.y)) for mark in losses if len(mark.y)), default=1.0)
        losses += [start, note(warmup, highest, " compression starts", va="top")]
        values.append(start)
    panels = [Panel(losses, "iteration", "training loss (running mean)"), Panel(values, "iteration", metric.label)]
    return Chart(panels[: 1 + tested], columns=2, height=2.6)


def tradeoff_chart(runs: Mapping[str, Json]) -> Chart:
    """Draw payload bytes per step against the test metric at the end."""
    metric, colors, markers = metric_of(runs.values()), method_colors(runs), method_markers(runs)
    sizes = {name: run["payload_bytes_per_step"]["mean"] for name, run in runs.items()}
    marks = [
        points([sizes[name]], [float(metric.drawn(final_score(run)))], colors[name], name, markers[name], ms=7)
        for name, run in runs.items()
    ]
    limits = (min(sizes.values()) / 1.8, max(sizes.values()) * 1.8)
    ticks = round_ticks(limits, lambda value: format_bytes(value, 1), most=6)
    look = {"xscale": "log", "xlim": limits}
    panel = Panel(marks, "payload per step and rank", f"final {metric.label}", ticks=ticks, look=look)
    return Chart([panel], height=2.8, legend="right")


def _times_chart(runs: Mapping[str, Json]) -> Chart:
    """Draw two bars per method, in seconds: a step (compute, then wait), and the exchange beside computing."""
    marks, longest, rows = list[Mark](), 1e-9, np.arange(len(runs))
    for offset, parts, what in (
        (-0.2, ("compute", "wait"), " per step"),
        (0.2, ("compress", "communicate"), " beside it"),
    ):
        left = np.zeros(len(runs))
        for part in parts:
            width = np.array([(run.get("time") or {}).get(part) or 0.0 for run in runs.values()])
            color, hatch = _TIMES[part]
            look = {"height": 0.36, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
            marks.append(Mark("bars", width, rows + offset, part, color, (left,), look))
            left = left + width
        totals = zip(left.tolist(), rows, strict=True)
        marks += [
            note(end, row + offset, f" {format_seconds(end)}{what}", va="center") for end, row in totals if end > 0
        ]
        longest = max(longest, float(left.max()))
    look = {"xlim": (0, 1.28 * longest)}
    panel = Panel(marks, "time per step", rows=list(runs), x_text=lambda value: format_seconds(value, 2), look=look)
    return Chart([panel], height=0.5 * len(runs) + 0.9)
