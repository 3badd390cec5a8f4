"""Measure a recording in every way, for its report.

A measurement that the trace does not allow becomes a remark.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from gradlab.analysis.fit.gradiveq import NotFittable, fit_gradiveq
from gradlab.analysis.forecast import Network
from gradlab.analysis.forecast.candidates import Family, candidates
from gradlab.analysis.forecast.endings import MAX_LOSS
from gradlab.analysis.forecast.frontier import Tried, try_plans
from gradlab.analysis.forecast.local_speed import forecast_local_speed
from gradlab.analysis.forecast.tape import forecast_tapes
from gradlab.analysis.measure.between_ranks import measure_between_ranks
from gradlab.analysis.measure.layer_places import layer_places
from gradlab.analysis.measure.limits import measure_limits, place_plans
from gradlab.analysis.measure.noise_scale import TraceNoise, measure_noise_scale
from gradlab.analysis.measure.sign_blocks import measure_sign_blocks
from gradlab.analysis.measure.slices.of_trace import measure_slice_structure
from gradlab.analysis.measure.spectrum import SpectrumOptions, TraceSpectrum, measure_spectrum
from gradlab.analysis.parallel import Workers
from gradlab.analysis.replay import check_replay
from gradlab.analysis.report.look import THOROUGH, Look
from gradlab.analysis.report.trace_report import Examination
from gradlab.errors import GradlabError
from gradlab.formatting import format_count, format_counted
from gradlab.plan import Plan
from gradlab.progress import Progress

if TYPE_CHECKING:
    from gradlab.trace import Trace

Result = TypeVar("Result")

_LONGEST_BEGINNING = 1000  # iterations; a later recording is of a run that goes on from a checkpoint

# Parts by the names of a report's pages; layers, their spectra and agreement are always measured.
PARTS = ("payoff", "between", "noise", "limits", "within", "signs")


def examine(
    trace: Trace,
    *,
    plans: Mapping[str, Plan] | None = None,
    families: Mapping[str, Family] | None = None,
    provenances: Mapping[str, Mapping[str, Any]] | None = None,
    network: Network | None = None,
    max_loss: float = MAX_LOSS,
    after_addition: Sequence[str] = (),
    parts: Collection[str] = PARTS,
    look: Look = THOROUGH,
    for_page: bool = False,
    workers: Workers = 1,
    progress: Progress | None = None,
) -> Examination:
    """Measure a trace in every way, or in the ways that `parts` names.

    >>> from gradlab.analysis import examine
    >>> with Trace("trace") as trace:
    ...     examination = examine(trace, parts=["noise"])
    >>> examination.remarks, examination.measured["noise_scale"].world_size
    ([], 2)

    Args:
        trace: the recording.
        plans: the plans to replay and to forecast, by name. None: none but those of `families`.
        families: whose settings are searched by replay. None: without `plans`, those of `candidates`; else none.
        provenances: provenances of the plans' artifacts, by name, so that fitted plans are judged on iterations after
            their fit.
        network: what the plans' steps are forecast for. None: `Network()`.
        max_loss: by how much similar methods may have ended above dense training, as a share of its loss.
        after_addition: patterns of layers that read a residual sum, as `layer_places` takes them.
        parts: names out of `PARTS`.
        look: how much is measured.
        for_page: whether plans are run dry at other numbers of nodes too, for a page to play with.
        workers: processes, or a cluster, that share the layers and the plans.
        progress: called as the work goes on.

    Returns:
        What was measured, with remarks on what could not be.

    Raises:
        GradlabError: for a trace too short to measure at all, a plan of another model, an unknown part, or a layer
            pattern that matches none.
    """
    for part in parts:
        if part not in PARTS:
            raise GradlabError(f"unknown part {part!r}, expected some of {', '.join(PARTS)}")
    layer_places(trace, after_addition)
    _check_plans(trace, plans or {}, look)  # before the work, not after it
    options = SpectrumOptions(max_samples=look.spectrum.iterations(_values_per_step(trace)))
    spectrum = measure_spectrum(trace, options, workers=workers, progress=progress)
    examination = Examination(spectrum, look=look)
    examination.remarks += remarks_on(trace, look, parts, spectrum)
    if spectrum.never_finite_layers:
        layers = ", ".join(spectrum.never_finite_layers)
        examination.remarks.append(f"Never finite on all ranks, and left out: {layers}.")
    if "within" in parts:
        _of_one_rank(examination, trace, workers, progress)
    if "signs" in parts:
        steps = look.signs.iterations(_values_per_step(trace))
        signs = partial(measure_sign_blocks, trace, most_steps=steps, workers=workers, progress=progress)
        examination.measured["sign_blocks"] = _attempt(examination, "Nothing to say of signs", signs)
    if trace.world_size > 1:
        if "between" in parts:
            between = partial(
                measure_between_ranks,
                trace,
                look.between,
                after_addition=after_addition,
                workers=workers,
                progress=progress,
            )
            examination.measured["between_nodes"] = _attempt(examination, "Nothing to say of what ranks share", between)
        if "noise" in parts:
            noise = partial(_noise_scale, spectrum, trace)
            examination.measured["noise_scale"] = _attempt(examination, "No noise scale", noise)
        if "payoff" in parts:
            tried = try_recorded(
                trace,
                families_of(trace, look) if families is None and plans is None else families or {},
                plans or {},
                provenances=provenances,
                network=network,
                max_loss=max_loss,
                look=look,
                workers=workers,
                progress=progress,
            )
            _take(examination, tried, trace, for_page, progress)
    else:
        examination.remarks.append("Recorded on one rank: what ranks share and what plans do is not measured.")
    if "limits" in parts:
        measure = partial(measure_limits, trace, extent=look.limits, workers=workers, progress=progress)
        limits = _attempt(examination, "No limits", measure)
        if limits is not None:
            limits = replace(limits, plans=place_plans(limits, examination.replays, examination.plans))
        examination.measured["limits"] = limits
    return examination


def _attempt(examination: Examination, what: str, measure: Callable[[], Result]) -> Result | None:
    """Return the measurement. If this trace does not allow it, add a remark that says why, and return None."""
    try:
        return measure()
    except GradlabError as reason:
        examination.remarks.append(f"{what}: {reason}")
        return None


def remarks_on(
    trace: Trace, look: Look, parts: Collection[str] = ("payoff",), spectrum: TraceSpectrum | None = None
) -> list[str]:
    """Say what limits any measurement of a recording. spectrum: that was measured. None: it was not."""
    remarks = [_what_is_quick(trace, spectrum, look, parts)] if look.quick else []
    if trace.local_steps:
        remarks.append(f"Not gradients of single steps, but {trace.local_steps}.")
    if trace.several_passes:
        remarks.append(f"{trace.several_passes}.")
    if trace.samples:
        remarks.append(f"Measured on a sample: the trace holds {trace.extent}.")
    return remarks


def _what_is_quick(trace: Trace, spectrum: TraceSpectrum | None, look: Look, parts: Collection[str]) -> str:
    """Say how little a quick look measures."""
    recorded, between = len(trace.steps), look.between
    measured = [] if spectrum is None else [f"spectra of {len(spectrum.steps)} of {recorded} iterations"]
    if "between" in parts:
        pair = f"{format_counted(between.pairs, 'pair')} of ranks"
        measured.append(f"{pair} in up to {between.iterations} iterations at up to {between.values} values of a layer")
    if "payoff" in parts:
        measured.append(f"plans over the last {recorded - replay_start(trace, look)} iterations, at fewer settings")
    if "limits" in parts:
        measured.append(f"codecs in one iteration of up to {look.limits.layers} layers, at one setting each")
    if "within" in parts:
        measured.append(f"slices fitted on up to {look.samples} iterations")
    if "signs" in parts:
        measured.append(f"signs of up to {look.signs.iterations(_values_per_step(trace))} iterations")
    return f"A quick look: {', '.join(measured)}. Without --quick more is measured."


def _of_one_rank(examination: Examination, trace: Trace, workers: Workers, progress: Progress | None) -> None:
    look, parameters = examination.look, sum(layer.numel for layer in trace.model_layers)
    if look.fitted == 0:
        examination.remarks.append("No GradiVeQ fit, which is not made for a quick look.")
    elif parameters > look.fitted:
        examination.remarks.append(
            f"No GradiVeQ fit: of {format_count(parameters)} parameters it takes long; `gradlab fit gradiveq` makes it."
        )
    else:
        try:
            samples = max(2, min(look.samples, len(trace.steps) // 2))
            examination.fit = fit_gradiveq(trace, samples=samples, workers=workers, progress=progress)
        except NotFittable as reason:
            examination.remarks.append(f"No GradiVeQ fit: {reason}")
    structure = partial(measure_slice_structure, trace, samples=look.samples, workers=workers, progress=progress)
    if trace.samples:
        examination.measured["slice_structure"] = _attempt(examination, "Nothing to say of slices", structure)
    else:
        examination.measured["slice_structure"] = structure()


def _noise_scale(spectrum: TraceSpectrum, trace: Trace) -> TraceNoise:
    layers, batch = spectrum.layers, trace.metadata.get("batch_size")
    passes = int(np.median(trace.scalars(0)["accumulation"]))  # of forward and backward, that make up a gradient
    return measure_noise_scale(
        np.stack([layer.inner for layer in layers]),
        [layer.layer.name for layer in layers],
        batch * max(1, passes) if type(batch) is int and batch > 0 else None,
    )


def families_of(trace: Trace, look: Look = THOROUGH) -> dict[str, Family]:
    """List the families of plans that are searched for a report: a quick look takes every second setting."""
    return candidates(trace.model_layers, coarse=look.quick, warmup_steps=beginning(trace, look))


def beginning(trace: Trace, look: Look = THOROUGH) -> int:
    """Return the iteration from which plans are judged, and compress: 0 in a recording of a run long under way."""
    first = int(trace.steps[replay_start(trace, look)])
    return first if first <= _LONGEST_BEGINNING else 0


def try_recorded(
    trace: Trace,
    families: Mapping[str, Family],
    plans: Mapping[str, Plan],
    *,
    provenances: Mapping[str, Mapping[str, Any]] | None = None,
    network: Network | None = None,
    max_loss: float = MAX_LOSS,
    look: Look = THOROUGH,
    workers: Workers = 1,
    progress: Progress | None = None,
) -> Tried:
    """Try plans as `examine` does for "payoff", and nothing else: what a recommendation needs."""
    _check_plans(trace, plans, look)
    return try_plans(
        trace,
        families,
        plans,
        network=network or Network(),
        max_loss=max_loss,
        start=replay_start(trace, look),
        seconds=look.search_seconds,
        provenances=provenances,
        workers=workers,
        progress=progress,
    )


def _check_plans(trace: Trace, plans: Mapping[str, Plan], look: Look) -> None:
    for plan in plans.values():
        check_replay(trace, plan, replay_start(trace, look), len(trace.steps))


def _take(examination: Examination, tried: Tried, trace: Trace, for_page: bool, progress: Progress | None) -> None:
    """Take what was tried into an examination, with forecasts for the page to play with and of local steps."""
    examination.plans, examination.replays = tried.plans, tried.replays
    examination.speed, examination.frontier = tried.speed, tried.frontier
    examination.remarks += tried.remarks
    if examination.speed is not None:
        known = {name: plan for name, plan in tried.plans.items() if name in tried.replays}
        if for_page:
            examination.tapes = forecast_tapes(known, examination.speed.forecasts, progress)
        examination.local_steps = forecast_local_speed(
            known, examination.speed, trace.local_step_count, progress=progress
        )


def replay_start(trace: Trace, look: Look = THOROUGH) -> int:
    """Find the position from which plans are replayed for a report: the last steps, as many as take little time."""
    return max(0, len(trace.steps) - look.replays.iterations(_values_per_step(trace)))


def _values_per_step(trace: Trace) -> int:
    """Return the number of gradient values in a step, over all ranks."""
    return trace.world_size * sum(layer.numel for layer in trace.layers)
