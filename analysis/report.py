"""The two reports: what a trace says, and what was predicted beside what happened in training."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradlab.analysis.formatting import format_count
from gradlab.analysis.gradiveq import GradiveqFit
from gradlab.analysis.page import Page, write_page
from gradlab.analysis.plain import plain
from gradlab.analysis.replay_result import Replay
from gradlab.analysis.report_figures import (
    fit_drawings,
    replay_drawings,
    run_drawings,
    sign_drawings,
    slice_structure_drawings,
    spectrum_drawings,
)
from gradlab.analysis.report_tables import (
    comparison_table,
    fit_table,
    layer_table,
    replay_table,
    sign_table,
    slice_structure_table,
)
from gradlab.analysis.spectrum import TraceSpectrum, measure_spectrum
from gradlab.analysis.target import REPORT_FILES, require_free
from gradlab.analysis.verdict import comparison_verdict, trace_verdict
from gradlab.errors import GradlabError
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
    structure: Mapping[str, Any] | None = None,
    signs: Mapping[str, Any] | None = None,
    remarks: Sequence[str] = (),
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Measure a trace and write the folder `out`: report.html, report.json, figures/. Returns the path of report.html.

    spectrum: measurements made before, None to make them now. structure: `measure_slice_structure`'s, signs:
    `measure_sign_blocks`', None to leave a section out. remarks: further warnings. Replays of the fit's plan are
    judged on iterations later than its samples; those of other fitted plans by `Replay.held_out`, before they come.

    Raises:
        GradlabError: for a report that is there already (unless overwrite), or a trace too short to measure.
    """
    folder = require_free(out, overwrite, contents=REPORT_FILES)
    measured = dict(plain((spectrum or measure_spectrum(trace, progress=progress)).to_json()))
    found = _judged(replays or {}, [fit] if fit else [])
    origin = dict(plain(fit.origin)) if fit else None
    found_structure = dict(plain(structure)) if structure else None
    found_signs = dict(plain(signs)) if signs else None
    shown = found_structure if found_structure and found_structure["layers"] else None
    recorded = summarize_trace(trace)
    fit_tables = [fit_table(origin)] if origin else []
    replay_tables = [replay_table(found)] if found else []
    page = Page(
        title=f"Gradients of {recorded['metadata'].get('workload') or trace.path.name}",
        verdict=trace_verdict(measured, origin, found),
        data={
            "kind": "trace",
            "trace": recorded,
            "spectrum": measured,
            "fit": origin,
            "replays": found,
            "slice_structure": found_structure,
            "sign_blocks": found_signs,
        },
        warnings=[*remarks, *(fit.warnings if fit else []), *_replay_warnings(found)],
        facts=_trace_facts(recorded),
        tables=[
            *fit_tables,
            *replay_tables,
            layer_table(measured),
            *([slice_structure_table(shown)] if shown else []),
            *([sign_table(found_signs)] if found_signs else []),
        ],
        drawings=[
            *(fit_drawings(origin) if origin else []),
            *replay_drawings(found),
            *spectrum_drawings(measured),
            *(slice_structure_drawings(shown) if shown else []),
            *(sign_drawings(found_signs) if found_signs else []),
        ],
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
        tables=[comparison_table(ran, found), *(fit_table(origin) for origin in origins.values())],
        drawings=[
            *run_drawings(ran, found),
            *(item for name, origin in origins.items() for item in fit_drawings(origin, name)),
            *(spectrum_drawings(measured) if measured else []),
        ],
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
    return [f"{name}: {line}" for name, found in replays.items() for line in found["summary"]["warnings"]]
