"""The two reports: what a trace says, and what was predicted beside what happened in training."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradlab.analysis.fit.gradiveq import GradiveqFit
from gradlab.analysis.measure.spectrum import TraceSpectrum, measure_spectrum
from gradlab.analysis.outputs import REPORT_FILES, require_free
from gradlab.analysis.replay.ranking import ranking_stability
from gradlab.analysis.replay.result import Replay
from gradlab.analysis.report.page import Page, write_page
from gradlab.analysis.report.sections import comparison_sections, trace_sections
from gradlab.analysis.report.verdict import comparison_verdict, trace_verdict
from gradlab.errors import GradlabError
from gradlab.formatting import format_count
from gradlab.jsonable import plain
from gradlab.progress import Progress

if TYPE_CHECKING:
    from gradlab.trace import Trace

Out = str | os.PathLike[str]


def summarize_trace(trace: Trace) -> dict[str, Any]:
    """What was recorded, as plain JSON."""
    return {
        "path": str(trace.path),
        "digest": trace.digest,
        "world_size": trace.world_size,
        "steps": len(trace.steps),
        "first_iteration": int(trace.steps[0]),
        "last_iteration": int(trace.steps[-1]),
        "layers": [layer.to_json() for layer in trace.layers],
        "parameters": sum(layer.numel for layer in trace.layers),
        "metadata": plain(trace.metadata),
    }


def write_trace_report(
    trace: Trace,
    out: Out,
    *,
    fit: GradiveqFit | None = None,
    replays: Mapping[str, Replay] | None = None,
    spectrum: TraceSpectrum | None = None,
    measured: Mapping[str, Any] | None = None,
    remarks: Sequence[str] = (),
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write what was measured of a trace to the folder `out`: report.html, report.json, figures/.

    spectrum: None to measure it now. measured: further findings by the names under which report.json holds them and
    `gradlab.analysis.report.sections` shows them (payoff, between_nodes, noise_scale, limits, slice_structure,
    sign_blocks); what is missing or None is left out. remarks: further warnings. Replays of the fit's plan are judged
    on iterations later than its samples; those of other fitted plans by `Replay.held_out`, before they come.

    Returns:
        The path of report.html.
    Raises:
        GradlabError: for a report that is there already (unless overwrite), or a trace too short to measure.
    """
    folder = require_free(out, overwrite, contents=REPORT_FILES)
    found = _judged(replays or {}, [fit] if fit else [])
    recorded = summarize_trace(trace)
    data: dict[str, Any] = {
        "kind": "trace",
        "trace": recorded,
        "spectrum": dict(plain((spectrum or measure_spectrum(trace, progress=progress)).to_json())),
        "fit": dict(plain(fit.origin)) if fit else None,
        "replays": found,
        "ranking": plain(ranking_stability(found)),
        **{name: dict(plain(part)) if part else None for name, part in (measured or {}).items()},
    }
    page = Page(
        title=f"Gradients of {recorded['metadata'].get('workload') or trace.path.name}",
        verdict=trace_verdict(data),
        data=data,
        warnings=[*remarks, *(fit.warnings if fit else []), *_replay_warnings(found)],
        facts=_trace_facts(recorded),
        sections=trace_sections(data),
    )
    return write_page(page, folder, overwrite=overwrite, progress=progress)


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
    """Predicted beside observed: runs as the trainer reports them, with replays and fits of the same names.

    The run named "dense" is the reference. trace_summary: `summarize_trace`. Replays of the fits' plans are judged on
    iterations later than their samples. Returns the path of report.html.

    Raises:
        GradlabError: for a report that is there already (unless overwrite), or no run at all.
    """
    folder = require_free(out, overwrite, contents=REPORT_FILES)
    if not runs:
        raise GradlabError("a comparison needs at least one run, and got none")
    ran = dict(plain(runs))
    found = _judged(replays, (fits or {}).values())
    origins = {name: dict(plain(fit.origin)) for name, fit in (fits or {}).items()}
    measured = dict(plain(spectrum.to_json())) if spectrum else None
    recorded = dict(plain(trace_summary)) if trace_summary else None
    page = Page(
        title=f"Predicted and observed: {next(iter(ran.values())).get('workload') or 'training runs'}",
        verdict=comparison_verdict(ran),
        data={
            "kind": "comparison",
            "trace": recorded,
            "spectrum": measured,
            "fits": origins,
            "replays": found,
            "runs": ran,
        },
        warnings=[
            *(line for fit in (fits or {}).values() for line in fit.warnings),
            *_replay_warnings(found),
        ],
        facts=[*_run_facts(ran), *(_trace_facts(recorded) if recorded else [])],
        sections=comparison_sections(ran, found, origins, measured),
    )
    return write_page(page, folder, overwrite=overwrite, progress=progress)


def _trace_facts(recorded: Mapping[str, Any]) -> list[tuple[str, str]]:
    span = f"{recorded['first_iteration']} to {recorded['last_iteration']}"
    return [
        ("trace", f"{recorded['path']} (sha256 {str(recorded['digest'])[:12]})"),
        ("recorded", f"{recorded['steps']} iterations, {span}, on {recorded['world_size']} ranks"),
        ("model", f"{len(recorded['layers'])} layers, {format_count(recorded['parameters'])} parameters"),
    ]


def _run_facts(runs: Mapping[str, Any]) -> list[tuple[str, str]]:
    first = next(iter(runs.values()))
    warmup = max(int(run.get("warmup_steps") or 0) for run in runs.values())
    ranks, steps = first.get("world_size", "-"), first.get("steps", "-")
    return [("runs", f"{len(runs)}, each {steps} steps on {ranks} ranks, dense for the first {warmup}")]


def _judged(replays: Mapping[str, Replay], fits: Iterable[GradiveqFit]) -> dict[str, dict[str, Any]]:
    """Replays as JSON; those of a fit's plan apart from what it was fitted on."""
    origins = {fit.plan.digest: fit.origin for fit in fits}
    return {name: found.held_out(origins.get(found.plan_digest, {})).to_json() for name, found in replays.items()}


def _replay_warnings(replays: Mapping[str, Any]) -> list[str]:
    """What to beware of, each line once, with the plans that it is about."""
    said: dict[str, list[str]] = {}
    for name, found in replays.items():
        for line in found["summary"]["warnings"]:
            said.setdefault(line, []).append(name)
    return [f"{', '.join(names)}: {line}" for line, names in said.items()]
