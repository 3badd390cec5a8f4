"""Cost in accuracy, and how sure it is: replays, and what trainings with such errors ended at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradlab.analysis.figures.chart import Chart, Panel, apart, lines
from gradlab.analysis.figures.palette import method_colors
from gradlab.analysis.forecast.endings import (
    MAX_LOSS,
    EndingRange,
    ended_at,
    judged_by,
    judgement_text,
    loss_limit_text,
    standing,
)
from gradlab.analysis.questions.errors import errors_chart, has_errors, layer_errors_drawing, lossy_replays
from gradlab.analysis.questions.pays import range_cell
from gradlab.analysis.section import Drawing, Section, Table
from gradlab.formatting import format_bytes, format_counted, format_percent, format_seconds
from gradlab.saving import Saving

Json = Mapping[str, Any]
REPLAY_COLUMNS = (
    "plan", "method", "payload/step", "wire/step", "ratio", "vs 16 bits", "error of a rank", "error of the mean",
    "cosine", "sums: error", "sums: cosine", "codec time",
)  # fmt: skip
_BUSY = 1.25  # the clock's time over the processor's from which a table says that the machine was busy
# Residual norm under error feedback: its growth from the last but one quarter of the steps to the last.
_GROWING, _SETTLED = 1.2, 200  # steps after a cold start, during which it grows in any case


def accuracy_section(data: Json) -> Section | None:
    """Make the page; None: nothing was replayed. data: a trace report's."""
    replays: Json = data["replays"]
    if not replays:
        return None
    speed = data.get("payoff")
    close = _who_is_close(replays, speed.max_loss if speed is not None else MAX_LOSS)
    answer = " ".join([*close, _how_sure(replays)])
    title = "What does it cost in accuracy, and how sure is that?"
    return Section("accuracy", title, answer, [_accuracy_table(replays)], parts=[_replays_section(data)])


def _ended(summary: Json) -> EndingRange | None:
    """Look up final losses of trainings with similar cosines; None without a cosine."""
    cosine, length, memory = judged_by(summary)
    return None if cosine is None or length is None else ended_at(cosine, length, memory)


def _who_is_close(replays: Json, max_loss: float) -> list[str]:
    """Name the plans whose like ended within the allowed loss, and the one farthest from dense."""
    endings = {name: ended for name, replay in replays.items() if (ended := _ended(replay["summary"])) is not None}
    if not endings:
        return ["What the plans would end at is not known: too few later iterations with a gradient were replayed."]
    close = [name for name, ended in endings.items() if ended.within(max_loss)]
    limit = loss_limit_text(max_loss)
    lines = [
        f"Nine tenths of our trainings with errors like those of {', '.join(close)} ended with {limit} than dense."
        if close
        else f"No plan's similar trainings ended with {limit} than dense in nine cases of ten."
    ]
    worst = max(endings, key=lambda name: endings[name].middle)
    if worst not in close:
        lines.append(f"Those like {worst} ended {endings[worst].text}.")
    return lines


def _how_sure(replays: Json) -> str:
    """Say what the judgement rests on."""
    steps = [replay["summary"]["judged_steps"] for replay in replays.values()]
    judged = str(min(steps)) if min(steps) == max(steps) else f"{min(steps)} to {max(steps)}"
    sure = f"How sure: each plan is judged on {judged} recorded steps that its fit did not see"
    limits = " ".join(["", *_recording_cautions(replay["summary"] for replay in replays.values())])
    return f"{sure}, and trainings of other models ended so. A pilot on your own training knows more.{limits}"


def _recording_cautions(summaries: Any) -> list[str]:
    cautions = dict.fromkeys(one["caution"] for one in summaries if one["caution"])
    return [f"Preliminary: {line}." for line in cautions]


def _accuracy_table(replays: Json) -> Table:
    """List the cosine of each plan's update, and how trainings like that ended; the nearest to dense comes first."""
    rows = []
    summaries = {name: replay["summary"] for name, replay in replays.items()}
    for name in sorted(summaries, key=lambda name: standing(*judged_by(summaries[name]))):
        summary = summaries[name]
        cosine = "-" if summary["judged_cosine"] is None else f"{summary['judged_cosine']:.3f}"
        rows.append([name, cosine, str(summary["judged_length"] or "-"), range_cell(_ended(summary))])
    columns = ("plan", "cosine", "summed over", "similar methods ended")
    note = (
        "Cosine: of the plan's update with the true mean, both summed over so many steps, as replayed. Similar: "
        "plans of the same kind with cosines about as far from 1, on the small tasks of docs/comparison.md, and "
        "their final loss over dense training's: nine tenths are from the first figure to the last, half up to the "
        "middle one."
    )
    return Table("What updates keep, and what similar methods ended at", columns, rows, note)


# --- replays ----------------------------------------------------------------------------------------------------------


def _replays_section(data: Json) -> Section:
    """Make the page of what plans do to the recorded gradients."""
    replays = data["replays"]
    drawings, answer = _error_drawings(replays), replay_verdict(replays)
    if any(replay["summary"].get("unsent") for replay in replays.values()):
        caption = (
            "Norm of the compression error over that of the same iteration's gradient. Where it goes on growing, old "
            "gradients pile up."
        )
        drawings.append(Drawing("waiting", "Residual norm under error feedback", caption, _residuals(replays)))
    if growing := [name for name, replay in replays.items() if _grows(replay["summary"])]:
        answer += f" The residual norm still grows at the end with {', '.join(growing)}."
    return Section("replays", "Errors of plans on these gradients", answer, [replay_table(replays)], drawings)


def _error_drawings(replays: Json) -> list[Drawing]:
    # No error is finite where every iteration holds what is not.
    lossy = {name: one for name, one in lossy_replays(replays).items() if has_errors(name, replays, {})}
    if not lossy:
        return []
    caption = (
        "‖input - decoded‖ / ‖input‖ of the compressor, over all ranks and compressed layers; the input includes the "
        "residual of error feedback. Dotted: iterations that a plan was fitted on."
    )
    errors = Drawing("replay_errors", "Error of each method over time", caption, errors_chart(lossy, {}))
    return [errors, layer_errors_drawing(lossy, {})]


def _grows(summary: Json) -> bool:
    return summary["compressed_steps"] >= _SETTLED and (summary.get("residual_growth") or 0.0) > _GROWING


def replay_verdict(replays: Mapping[str, Any]) -> str:
    """Say which replayed plan's similar methods trained best, judged on iterations after its fit.
    Plans with and without memory have different cosines, so similar trainings' losses decide, then the cosine.
    """
    summaries = {name: replay["summary"] for name, replay in replays.items()}
    unknown = [name for name, summary in summaries.items() if summary["contribution_error"] is None]
    lossy = {name: summary for name, summary in summaries.items() if summary["contribution_error"]}
    known = {name: summary for name, summary in lossy.items() if summary["aggregate_error"] is not None}
    unknown += [name for name in lossy if name not in known]  # the mean was zero in every iteration
    said = []
    if known:
        best = min(known, key=lambda name: standing(*judged_by(known[name])))
        chosen = known[best]
        sent = Saving.read(chosen).text("fewer bytes")
        mean, own = format_percent(chosen["aggregate_error"]), format_percent(chosen["contribution_error"])
        several = f"Of the lossy plans replayed, {best} is the one whose similar methods trained best: it"
        which = several if len(summaries) > 1 else best
        judged = judgement_text(*judged_by(chosen))
        said.append(
            f"{which} sends {sent}; {judged}. Median errors of a step: {mean} of the mean, {own} of a rank's own."
        )
        said += _recording_cautions(known.values())
    elif len(unknown) < len(summaries):
        said.append("The plans replayed change no gradient.")
    if unknown:
        said.append(
            f"Nothing is known about {', '.join(unknown)}: no finite iteration with a gradient was replayed, "
            "but those of its fit."
        )
    return " ".join(said)


def replay_table(replays: Mapping[str, Any]) -> Table:
    """Put replays side by side. A last column holds errors on the iterations that a plan was fitted on."""
    note = (
        "Medians over the compressed iterations; of a plan fitted on this trace, over those after its fit. Error of a "
        "rank: ‖input - decoded‖ / ‖input‖ of its compressor; the input includes the residual of error feedback. Error "
        "of the mean and cosine: against this iteration's true averaged gradient; under error feedback a large error "
        "here is earlier gradient being delivered late. Sums: the same of updates summed over windows of "
        f"{_window_lengths(replays)} successive steps. "
    )
    note += _codec_time_note(replays)
    columns: tuple[str, ...] = REPLAY_COLUMNS
    rows = [_replay_row(name, replay["summary"]) for name, replay in replays.items()]
    inside = [replay["summary"]["in_sample"] for replay in replays.values()]
    if any(inside):
        columns = (*columns, "in-sample: rank, mean, cosine")
        note += " In-sample: the same where the plan was fitted, which is no prediction."
        rows = [[*row, ", ".join(_error_cells(seen)) if seen else "-"] for row, seen in zip(rows, inside, strict=True)]
    return Table("Plans replayed on the trace", columns, rows, note, text_columns=2)


def _replay_row(name: str, summary: Mapping[str, Any]) -> list[str]:
    spread, time = summary["codec_seconds_range"], format_seconds(summary["codec_seconds"])
    return [
        name,
        "; ".join(summary["methods"]),
        format_bytes(summary["payload_bytes_per_step"]["mean"]),
        format_bytes(summary["wire_bytes_per_step"]["mean"]),
        *Saving.read(summary).cells,
        *_error_cells(summary),
        ", ".join(format_percent(one["aggregate_error"]) for one in _sums(summary)) or "-",
        ", ".join(f"{one['cosine']:.3f}" for one in _sums(summary)) or "-",
        f"{time} ({' to '.join(format_seconds(end) for end in spread)})" if spread else time,
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


def _codec_time_note(replays: Mapping[str, Any]) -> str:
    """Say where a report's codec times come from, and whether the machine was busy when they were taken."""
    note = (
        "Codec time: processor time in the codecs' code per step and rank, in lockstep; the median over the compressed "
        "steps, and the least and the most of one. Forecasts in this report start from the same medians."
    )
    shares = {name: replay["summary"]["codec_wall_share"] for name, replay in replays.items()}
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


# --- charts -----------------------------------------------------------------------------------------------------------


def _residuals(replays: Mapping[str, Json]) -> Chart:
    """The residual norm under error feedback, divided by the gradient's norm, over the replayed iterations."""
    colors, marks = method_colors(replays), []
    for name, replay in replays.items():
        at = [(step["iteration"], step["unsent"]) for step in replay["steps"] if (step.get("unsent") or 0) > 1e-3]
        marks += [lines(*apart(at), colors[name], name)] if at else []  # less is rounding
    return Chart([Panel(marks, "iteration", "‖residual‖ / ‖gradient‖", look={"yscale": "log"})])
