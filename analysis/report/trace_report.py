"""Write the two reports: one of a trace, one of training runs beside what was predicted of them."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradlab.analysis.fit.gradiveq import GradiveqFit
from gradlab.analysis.forecast.decide import WORDS
from gradlab.analysis.forecast.frontier import Row
from gradlab.analysis.forecast.local_speed import LocalSpeed
from gradlab.analysis.forecast.speed import SpeedForecast, caution_lines
from gradlab.analysis.measure.spectrum import TraceSpectrum, measure_spectrum
from gradlab.analysis.outputs import REPORT_FILES, require_free
from gradlab.analysis.questions.accuracy import accuracy_section, replay_verdict
from gradlab.analysis.questions.gradients import agreement_line, gradients_section
from gradlab.analysis.questions.pays import pays_section, range_cell, speed_verdict, trace_brief
from gradlab.analysis.questions.plans import plans_section
from gradlab.analysis.questions.runs import comparison_sections, comparison_verdict
from gradlab.analysis.questions.slices import fit_verdict
from gradlab.analysis.replay.result import Replay
from gradlab.analysis.report.look import THOROUGH, Look
from gradlab.analysis.report.page import Page, write_page
from gradlab.analysis.section import Section
from gradlab.errors import GradlabError
from gradlab.executor.rules import Finding, sentences
from gradlab.formatting import format_count
from gradlab.jsonable import plain
from gradlab.plan import Plan
from gradlab.progress import Progress

if TYPE_CHECKING:
    from gradlab.trace import Trace

Out = str | os.PathLike[str]


def summarize_trace(trace: Trace) -> dict[str, Any]:
    """Describe what was recorded."""
    return {
        "path": str(trace.path),
        "digest": trace.digest,
        "world_size": trace.world_size,
        "steps": len(trace.steps),
        "first_iteration": int(trace.steps[0]),
        "last_iteration": int(trace.steps[-1]),
        "layers": [layer.to_json() for layer in trace.model_layers],
        "parameters": sum(layer.numel for layer in trace.model_layers),
        "extent": trace.extent,
        "samples": {name: sample.to_json() for name, sample in trace.samples.items()},
        "metadata": plain(trace.metadata),
    }


@dataclass
class Examination:
    """Measurements of a trace. Each page of a report shows a part of it.

    spectrum: spectra of every layer. None: not measured yet.
    fit: a GradiVeQ fit on the trace.
    plans, replays: plans replayed on the trace, by name; speed: forecasts of them.
    frontier: every setting that was replayed in search of those plans, see `gradlab.analysis.forecast.frontier`.
    local_steps: the same with an exchange after several steps. None: not known, or not worth a word.
    tapes: recordings of those plans' steps for the page's script. None: the page computes nothing itself.
    measured: further parts by their names in report.json: between_nodes, noise_scale, limits, slice_structure,
        sign_blocks. A part that is missing or None has no page.
    remarks: warnings, one line each.
    """

    spectrum: TraceSpectrum | None = None
    fit: GradiveqFit | None = None
    plans: Mapping[str, Plan] = field(default_factory=dict)
    replays: dict[str, Replay] = field(default_factory=dict)
    speed: SpeedForecast | None = None
    frontier: Sequence[Row] = ()
    local_steps: LocalSpeed | None = None
    tapes: Any = None
    measured: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    look: Look = THOROUGH


def write_trace_report(
    trace: Trace,
    out: Out,
    examination: Examination | None = None,
    *,
    overwrite: bool = False,
    full: bool = False,
    repeat: str = "",
    workers: int = 1,
    progress: Progress | None = None,
) -> Path:
    """Write the measurements of a trace into a folder: report.html, report.json, figures/.

    Args:
        trace: the recording.
        out: the folder, made if it is missing.
        examination: measurements. If it is None or has no spectrum, the spectrum is measured now. Replays of other
            fitted plans than its fit's must have been judged by `Replay.held_out`.
        overwrite: whether to replace a report.
        full: whether the page's tables and figures are unfolded at first.
        repeat: the command that writes it, for the page's end.
        workers: processes that draw.
        progress: called after each figure.

    Returns:
        The path of report.html.
    """
    folder = require_free(out, overwrite, contents=REPORT_FILES)
    known = examination or Examination()
    fit, recorded = known.fit, summarize_trace(trace)
    judged = _judged(known.replays, [fit] if fit else [])
    data: dict[str, Any] = {
        "kind": "trace",
        "trace": recorded,
        "look": plain(known.look),
        "spectrum": dict(plain(known.spectrum or measure_spectrum(trace, workers=workers, progress=progress))),
        "fit": fit.measured if fit else None,
        "replays": {name: replay.to_json() for name, replay in judged.items()},
        "payoff": known.speed,
        "frontier": plain(known.frontier),
        "local_steps": known.local_steps,
        **{name: dict(plain(part)) if part else None for name, part in known.measured.items()},
    }
    page = Page(
        title=f"Gradients of {recorded['metadata'].get('workload') or trace.path.name}",
        verdict=trace_verdict(data),
        data=data,
        warnings=[*known.remarks, *(fit.warnings if fit else []), *_replay_warnings(judged)],
        facts=_trace_facts(recorded),
        sections=trace_sections(data, known.look),
        formats=known.look.formats,
        play=playable_data(known, trace.path),
        full=full,
        repeat=repeat,
        brief=trace_brief(data),
    )
    return write_page(page, folder, overwrite=overwrite, workers=workers, progress=progress)


def write_comparison(
    out: Out,
    *,
    runs: Mapping[str, Mapping[str, Any]],
    replays: Mapping[str, Replay],
    fits: Mapping[str, GradiveqFit] | None = None,
    trace_summary: Mapping[str, Any] | None = None,
    spectrum: TraceSpectrum | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write a report of training runs beside what replays and fits of the same names predicted.

    Args:
        out: the folder, made if it is missing.
        runs: the trainer's reports by name, at least one. The run named "dense" is the reference.
        replays: replays of the runs' plans, by the runs' names; those of fits are judged after the fits' samples.
        fits: fits of the runs' plans, by the runs' names.
        trace_summary: the replayed trace, as `summarize_trace` gives it.
        spectrum: spectrum of the same trace.
        overwrite: whether to replace a report that is there.
        progress: called after each figure.

    Returns:
        The path of report.html.
    """
    folder = require_free(out, overwrite, contents=REPORT_FILES)
    if not runs:
        raise GradlabError("a comparison needs at least one run, and got none")
    ran = dict(plain(runs))
    judged = _judged(replays, (fits or {}).values())
    shown = {name: replay.to_json() for name, replay in judged.items()}
    fitted = {name: fit.measured for name, fit in (fits or {}).items()}
    measured = dict(plain(spectrum)) if spectrum else None
    recorded = dict(plain(trace_summary)) if trace_summary else None
    page = Page(
        title=f"Predicted and observed: {next(iter(ran.values())).get('workload') or 'training runs'}",
        verdict=comparison_verdict(ran),
        data={
            "kind": "comparison",
            "trace": recorded,
            "spectrum": measured,
            "fits": fitted,
            "replays": shown,
            "runs": ran,
        },
        warnings=[
            *(line for fit in (fits or {}).values() for line in fit.warnings),
            *_replay_warnings(judged),
            *_run_warnings(ran),
        ],
        facts=[*_run_facts(ran), *(_trace_facts(recorded) if recorded else [])],
        sections=comparison_sections(ran, shown, fitted, measured),
        full=True,
    )
    return write_page(page, folder, overwrite=overwrite, progress=progress)


def playable_data(examination: Examination, trace: Path) -> dict[str, Any] | None:
    """Collect what the page's script computes steps from. None: without tapes there is nothing to compute."""
    speed, tapes = examination.speed, examination.tapes
    if speed is None or tapes is None:
        return None
    first = speed.configurations[0]
    finite = first.bits_per_second if math.isfinite(first.bits_per_second) else 1e12
    plans = {
        name: {
            "tapes": of_plan,
            "text": one.text,
            "allowed": one.within(speed.max_loss),
            "ended": range_cell(one.ended),
        }
        for name, of_plan in tapes["plans"].items()
        for one in [speed.judged[name]]
    }
    local = examination.local_steps
    every = 1 if local is None or local.recorded is None else local.recorded
    asked = {"every": every, "nodes": first.nodes, "bits_per_second": finite, "trace": shlex.quote(str(trace))}
    limit = {"words": WORDS, "max_loss": f"{100 * speed.max_loss:g}%", "limit": speed.limit}
    return {**tapes, **asked, **limit, "plans": plans, "cautions": caution_lines(speed.judged.values())}


def _trace_facts(recorded: Mapping[str, Any]) -> list[tuple[str, str]]:
    span = f"{recorded['first_iteration']} to {recorded['last_iteration']}"
    return [
        ("trace", f"{recorded['path']} (sha256 {str(recorded['digest'])[:12]})"),
        ("recorded", f"{recorded['steps']} iterations, {span}, on {recorded['world_size']} ranks"),
        ("model", f"{len(recorded['layers'])} layers, {format_count(recorded['parameters'])} parameters"),
        ("measured on", str(recorded.get("extent") or "all values")),
    ]


def _run_facts(runs: Mapping[str, Any]) -> list[tuple[str, str]]:
    first = next(iter(runs.values()))
    warmup = max(int(run.get("warmup_steps") or 0) for run in runs.values())
    ranks, steps = first.get("world_size", "-"), first.get("steps", "-")
    return [("runs", f"{len(runs)}, each {steps} steps on {ranks} ranks, dense for the first {warmup}")]


def _judged(replays: Mapping[str, Replay], fits: Iterable[GradiveqFit]) -> dict[str, Replay]:
    """Judge each replay of a fit's plan on iterations later than the fit's."""
    provenances = {fit.plan.digest: fit.provenance for fit in fits}
    return {name: replay.held_out(provenances.get(replay.plan_digest, {})) for name, replay in replays.items()}


def _replay_warnings(replays: Mapping[str, Replay]) -> list[str]:
    """List each warning once, after the names of the plans that it concerns."""
    plans: dict[str, list[str]] = {}
    for name, replay in replays.items():
        for line in replay.warnings:
            plans.setdefault(line, []).append(name)
    return [f"{', '.join(names)}: {line}" for line, names in plans.items()]


def _run_warnings(runs: Mapping[str, Any]) -> list[str]:
    """List what the rules found in runs, as the trainer's reports have it."""
    return [
        f"{name}, in training: {line}"
        for name, run in runs.items()
        for line in sentences(map(Finding.from_json, run.get("rules") or ()), run.get("world_size", 0))
    ]


# --- the pages of a recording, one per question -----------------------------------------------------------------------


Json = Mapping[str, Any]


def trace_sections(data: Json, look: Look = THOROUGH) -> list[Section]:
    """Make the pages of a recording, one per question."""
    made = (
        pays_section(data),
        plans_section(data),
        accuracy_section(data),
        gradients_section(data, look.layer_figures),
    )
    return [_with_figures(section, look.figures) for section in made if section is not None]


def _with_figures(section: Section, most: int | None) -> Section:
    """Keep the first figures of a section, and of each of its parts."""
    parts = [_with_figures(part, most) for part in section.parts]
    return replace(section, drawings=section.drawings[:most], parts=parts)


def trace_verdict(data: Json) -> str:
    """Say what a recording tells about compressing this training. The decision comes first."""
    fit, replays = data["fit"], data["replays"]
    if data.get("payoff") is not None:
        local = data.get("local_steps")
        return str(local.verdict if local is not None and local.recorded is not None else speed_verdict(data))
    lines = []
    if fit is None and not replays:
        lines.append("A recording alone does not say that compression pays: fit a codec, or replay plans.")
    lines += [fit_verdict(fit)] if fit is not None else []
    lines += [replay_verdict(replays)] if replays else []
    return " ".join(line for line in (*lines, agreement_line(data["spectrum"])) if line)
