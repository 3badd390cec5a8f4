"""The four questions that a trace's report answers, each short, with all that was measured folded out beneath it.

1. Will it pay, on these nodes and this link? 2. Which plan, with which settings? 3. What does it cost in accuracy, and
how sure is that? 4. What do the gradients look like?
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gradlab.analysis.figures import forecast as forecast_plots
from gradlab.analysis.forecast.endings import MAX_LOSS, EndingRange, ended_at, judged_by, loss_limit_text, standing
from gradlab.analysis.forecast.plans import SPEED_NOISE
from gradlab.analysis.forecast.speed import Configuration, SpeedForecast
from gradlab.analysis.report.between_ranks import between_ranks_section
from gradlab.analysis.report.layer_matrix import layer_matrix_section
from gradlab.analysis.report.layers import layer_anchors, layers_section
from gradlab.analysis.report.limits import limits_section
from gradlab.analysis.report.local_steps import local_steps_section
from gradlab.analysis.report.look import THOROUGH, Look
from gradlab.analysis.report.noise_scale import noise_scale_section
from gradlab.analysis.report.page import Drawing, Section, Table
from gradlab.analysis.report.replays import replays_section
from gradlab.analysis.report.signs import signs_section
from gradlab.analysis.report.step_times import range_cell, step_times_section
from gradlab.analysis.report.tables import trend_text
from gradlab.analysis.report.verdict import agreement_line, ranking_line
from gradlab.analysis.report.within_rank import within_rank_section
from gradlab.formatting import format_bytes, format_counted, format_percent, format_ratio, format_seconds
from gradlab.saving import Saving

Json = Mapping[str, Any]

PAY = "pay"


def trace_sections(data: Json, look: Look = THOROUGH) -> list[Section]:
    """Make the pages of a recording, one per question."""
    made = (_pays(data), _which_plan(data), _accuracy(data), _gradients(data, look))
    return [_with_figures(section, look.figures) for section in made if section is not None]


def _with_figures(section: Section, most: int | None) -> Section:
    """Keep the first figures of a section, and of each of its parts."""
    parts = [_with_figures(part, most) for part in section.parts]
    return replace(section, drawings=section.drawings[:most], parts=parts)


def _known(sections: Sequence[Section | None]) -> list[Section]:
    return [section for section in sections if section is not None]


# --- will it pay? -----------------------------------------------------------------------------------------------------


def _pays(data: Json) -> Section | None:
    """The report's first line answers it; here it is played with, and answered in full beneath."""
    parts = _known([step_times_section(data), local_steps_section(data)])
    return Section(PAY, "Will it pay, on my nodes and my link?", parts=parts) if parts else None


# --- which plan? ------------------------------------------------------------------------------------------------------


def _which_plan(data: Json) -> Section | None:
    replays: Json = data["replays"]
    if not replays:
        return None
    parts = _known([layer_matrix_section(data, layer_anchors(data))])
    title = "Which plan, with which settings?"
    return Section("which", title, _choice(data), [_plan_table(data)], _frontier_drawings(data), parts=parts)


def _frontier_drawings(data: Json) -> list[Drawing]:
    """Draw every setting that was replayed: its error over its step's seconds."""
    at, rows = _asked(data), [row for row in data.get("frontier") or () if None not in (row["seconds"], row["cosine"])]
    if at is None or not rows:
        return []
    caption = (
        f"Every setting that was replayed, by method: 1 minus its judged cosine, over its step {at.where}. "
        "Filled: within the allowed loss by what similar methods ended at. Lower and to the left is better."
    )
    uncompressed = {at.dense_way: at.dense_seconds, "16 bits": at.half_seconds}
    draw = partial(forecast_plots.plot_frontier, rows, uncompressed)
    return [Drawing("frontier", "Error over step time", caption, draw)]


def _asked(data: Json) -> Configuration | None:
    """The first number of nodes and link that steps are forecast for; None without a time of computing."""
    speed: SpeedForecast | None = data.get("payoff")
    return None if speed is None or speed.compute_seconds is None else speed.configurations[0]


def _choice(data: Json) -> str:
    """Name the plan to take for the first number of nodes and link, with its settings."""
    at = _asked(data)
    if at is None:
        return "Which plan is fastest depends on the time of computing, which is not known here: see the bytes of each."
    where = at.where[:1].upper() + at.where[1:]
    if at.takes_16_bits:
        return f"{where} plain 16 bits: no plan saves time worth the trouble, and they do."
    if not at.pays:
        return f"{where} none: no plan saves time worth the trouble."
    speed: SpeedForecast = data["payoff"]
    near = f"with {speed.limit}"
    fastest, taken = str(at.fastest), at.taken
    if taken is not None:
        answer = f"{where} {_named(data, taken)}: the fastest {near}."
    elif at.half_saves > SPEED_NOISE:
        answer = f"{where} plain 16 bits: no plan {near} is faster by more than forecasts err."
    else:
        answer = f"{where} no plan {near} saves time."
    if fastest in (taken, at.closest):
        return answer
    saved = format_percent(at.fastest_saves, 0)
    return f"{answer} The fastest of all, at a larger loss, is {_named(data, fastest)}: it saves {saved}."


def _named(data: Json, plan: str) -> str:
    return f"{plan} ({'; '.join(data['replays'][plan]['summary']['methods'])})"


def _plan_table(data: Json) -> Table:
    """All plans side by side, in short; the fastest first where steps are forecast."""
    at, replays = _asked(data), data["replays"]
    seconds = at.seconds if at is not None else {}
    rows = []
    for name in sorted(replays, key=lambda name: seconds.get(name, math.inf)):
        summary = replays[name]["summary"]
        cells = [name, "; ".join(summary["methods"])]
        if at is not None:
            took = seconds.get(name)
            cells += [format_seconds(took), format_ratio(at.dense_seconds / took if took else None)]
        rows.append([*cells, *_sent(data, name)])
    columns = ["plan", "method", *(["step", "speed-up"] if at else []), "wire/step", "ratio", "vs 16 bits"]
    ranks = format_counted(at.nodes, "node") if at else f"the {data['trace']['world_size']} recorded ranks"
    note = (
        f"Wire: what a rank's network interface sends per step, between {ranks}. Ratio: how many times fewer bytes it "
        "is than plain DDP's, in 32 bits a value."
    )
    if at is not None:
        note += f" Step: forecast {at.where}; a dense one takes {format_seconds(at.dense_seconds)}."
    return Table("Plans side by side", columns, rows, note, text_columns=2)


def _sent(data: Json, plan: str) -> tuple[str, str, str]:
    """Return bytes that a rank sends, and how many times fewer than plain DDP's in 32 and in 16 bits."""
    if _asked(data) is None or plan not in data["payoff"].forecasts:
        summary = data["replays"][plan]["summary"]
        return format_bytes(summary["wire_bytes_per_step"]["mean"]), *Saving.read(summary).cells
    pair = data["payoff"].forecasts[plan].nodes[0].links[0]
    sent = float(pair.compressed.wire_bytes)
    return format_bytes(sent), *Saving.of(sent, pair.dense.wire_bytes, pair.half.wire_bytes).cells


# --- what does it cost in accuracy? -----------------------------------------------------------------------------------


def _accuracy(data: Json) -> Section | None:
    replays: Json = data["replays"]
    if not replays:
        return None
    speed: SpeedForecast | None = data.get("payoff")
    answer = " ".join(
        [*_who_is_close(replays, speed.max_loss if speed is not None else MAX_LOSS), _how_sure(replays), *_order(data)]
    )
    parts = _known([replays_section(data)])
    title = "What does it cost in accuracy, and how sure is that?"
    return Section("accuracy", title, answer, [_accuracy_table(replays)], parts=parts)


def _ended(summary: Json) -> EndingRange | None:
    """What trainings with similar cosines ended at; None without a cosine."""
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
        else f"Of no plan nine tenths of our trainings with an error like its own ended with {limit} than dense."
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
    cautions = dict.fromkeys(one["summary"]["caution"] for one in replays.values() if one["summary"]["caution"])
    limits = "".join(f" Mind the recording: {line}." for line in cautions)
    return f"{sure}, and trainings of other models ended so. A pilot on your own training knows more.{limits}"


def _order(data: Json) -> list[str]:
    return [ranking_line(data["ranking"])] if data.get("ranking") else []


def _accuracy_table(replays: Json) -> Table:
    """What each plan's update keeps, and what trainings like that ended at; the nearest to dense comes first."""
    rows = []
    summaries = {name: replay["summary"] for name, replay in replays.items()}
    for name in sorted(summaries, key=lambda name: standing(*judged_by(summaries[name]))):
        summary, ended = summaries[name], _ended(summaries[name])
        cosine = "-" if summary["judged_cosine"] is None else f"{summary['judged_cosine']:.3f}"
        rows.append(
            [name, cosine, str(summary["judged_length"] or "-"), range_cell(ended), trend_text(summary["trend"])]
        )
    columns = ("plan", "cosine", "summed over", "similar methods ended", "error's trend")
    note = (
        "Cosine: of the plan's update with the true mean, both summed over so many steps, as replayed. Similar: "
        "plans of the same kind with cosines about as far from 1, on the small tasks of docs/comparison.md, and "
        "their final loss over dense training's: nine tenths are from the first figure to the last, half up to the "
        "middle one. Trend: of a rank's error, in points per 100 steps, with a 95 % interval."
    )
    return Table("What updates keep, and what similar methods ended at", columns, rows, note)


# --- what do the gradients look like? ---------------------------------------------------------------------------------


def _gradients(data: Json, look: Look) -> Section:
    noise, within = noise_scale_section(data), within_rank_section(data)
    # What stands in the open is not folded away beneath it once more.
    lead = [drawing for drawing in within.drawings if drawing.name in ("agreement", "norms")][:1]
    within = replace(within, drawings=[drawing for drawing in within.drawings if drawing not in lead])
    told = replace(noise, answer="") if noise else None
    parts = [between_ranks_section(data), told, limits_section(data), within, signs_section(data)]
    answer = " ".join(line for line in (agreement_line(data["spectrum"]), noise.answer if noise else "") if line)
    return Section(
        "gradients",
        "What do my gradients look like?",
        answer,
        drawings=lead,
        parts=[*_known(parts), layers_section(data, look.layer_figures)],
    )
