"""Measure a recording in every way, for its report.

A measurement that the trace does not allow becomes a remark.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gradlab.analysis.fit.gradiveq import NotFittable, fit_gradiveq
from gradlab.analysis.forecast import Network
from gradlab.analysis.forecast.candidates import Family, candidates
from gradlab.analysis.forecast.endings import MAX_LOSS
from gradlab.analysis.forecast.frontier import Trial, Tried, try_plans
from gradlab.analysis.forecast.local_speed import forecast_local_speed
from gradlab.analysis.forecast.tape import forecast_tapes
from gradlab.analysis.measure.between_ranks import measure_between_ranks
from gradlab.analysis.measure.emptiness import require_gradients
from gradlab.analysis.measure.limits import measure_limits, place_plans
from gradlab.analysis.measure.noise_scale import measure_noise_scale
from gradlab.analysis.measure.sign_blocks import measure_sign_blocks
from gradlab.analysis.measure.slices.of_trace import measure_slice_structure
from gradlab.analysis.measure.spectrum import TraceSpectrum, measure_spectrum
from gradlab.analysis.replay import check_replay
from gradlab.analysis.report.look import THOROUGH, Look
from gradlab.analysis.report.trace_report import Examination
from gradlab.errors import GradlabError
from gradlab.formatting import format_count, format_counted
from gradlab.plan import Plan
from gradlab.progress import Progress

if TYPE_CHECKING:
    from gradlab.trace import Trace

_LONGEST_BEGINNING = 1000  # iterations; a later recording is of a run that goes on from a checkpoint

# Parts by the names of a report's pages; layers, their spectra and agreement are always measured.
PARTS = ("payoff", "between", "noise", "limits", "within", "signs")


@dataclass(frozen=True)
class ExamineOptions:
    """The measurements of `examine`, and the plans that it tries.

    plans: plans to replay and to forecast, by name. None: none but those of `families`.
    families: families whose settings are searched by replay. None: without `plans`, those of `candidates`; else none.
    provenances: provenances of the plans' artifacts, by name, so that fitted plans are judged on iterations after
        their fit.
    network: network that the plans' steps are forecast for. None: `Network()`.
    max_loss: final loss that is allowed above dense training, as a share of its loss.
    parts: names out of `PARTS`.
    look: extent of the measurements.
    for_page: whether plans are run dry at other numbers of nodes too, for a page to play with.
    """

    plans: Mapping[str, Plan] | None = None
    families: Mapping[str, Family] | None = None
    provenances: Mapping[str, Mapping[str, Any]] | None = None
    network: Network | None = None
    max_loss: float = MAX_LOSS
    parts: Collection[str] = PARTS
    look: Look = THOROUGH
    for_page: bool = False


@dataclass(frozen=True)
class _Work:
    """A trace under examination."""

    trace: Trace
    options: ExamineOptions
    workers: int
    progress: Progress | None

    @property
    def sharing(self) -> dict[str, Any]:
        return {"workers": self.workers, "progress": self.progress}


def examine(
    trace: Trace,
    options: ExamineOptions | None = None,
    *,
    workers: int = 1,
    progress: Progress | None = None,
    **changes: Any,
) -> Examination:
    """Measure a trace in every way, or in the ways that `parts` names.

    >>> from gradlab.analysis import examine
    >>> with Trace("trace") as trace:
    ...     examination = examine(trace, parts=["noise"])
    >>> examination.remarks, examination.measured["noise_scale"].world_size
    ([], 2)

    Args:
        trace: the recording.
        options: measurements, and plans to try.
        workers: processes that share the layers and the plans.
        progress: called as the work goes on.
        changes: fields of `ExamineOptions` by name, which differ from `options`.

    Returns:
        The measurements, with remarks on what could not be measured.

    Raises:
        GradlabError: for a trace too short to measure at all, a plan of another model, or an unknown part.
    """
    options = replace(options or ExamineOptions(), **changes)
    look, work = options.look, _Work(trace, options, workers, progress)
    for part in options.parts:
        if part not in PARTS:
            raise GradlabError(f"unknown part {part!r}, expected some of {', '.join(PARTS)}")
    _check_plans(trace, options.plans or {}, look)  # before the work, not after it
    empty = require_gradients(trace, replay_start(trace, look))
    spectrum = measure_spectrum(trace, look.spectrum.iterations(_values_per_step(trace)), **work.sharing)
    found = Examination(spectrum, look=look, remarks=remarks_on(trace, look, options.parts, spectrum))
    if spectrum.never_finite_layers:
        found.remarks.append(f"Never finite on all ranks, and left out: {', '.join(spectrum.never_finite_layers)}.")
    alone = trace.world_size == 1
    if alone:
        found.remarks.append("Recorded on one rank: what ranks share and what plans do is not measured.")
    for part, measure in _MEASURES.items():
        if part in options.parts and not (alone and part in _OF_SEVERAL):
            measure(found, work)
    found.remarks += empty
    return found


def _attempt(found: Examination, name: str, without: str, measure: Callable[[], Any]) -> None:
    """Add a measurement. If this trace does not allow it, add a remark that says why."""
    found.measured[name] = None
    try:
        found.measured[name] = measure()
    except GradlabError as reason:
        found.remarks.append(f"{without}: {reason}")


def _within(found: Examination, work: _Work) -> None:
    trace, look = work.trace, found.look
    parameters = sum(layer.numel for layer in trace.model_layers)
    if look.fitted == 0:
        found.remarks.append("No GradiVeQ fit: a quick look makes none.")
    elif parameters > look.fitted:
        found.remarks.append(
            f"No GradiVeQ fit: of {format_count(parameters)} parameters it takes long; `gradlab fit gradiveq` makes it."
        )
    else:
        try:
            samples = max(2, min(look.samples, len(trace.steps) // 2))
            found.fit = fit_gradiveq(trace, samples=samples, **work.sharing)
        except NotFittable as reason:
            found.remarks.append(f"No GradiVeQ fit: {reason}")
    _attempt(
        found,
        "slice_structure",
        "Slices are not measured",
        lambda: measure_slice_structure(trace, samples=look.samples, **work.sharing),
    )


def _signs(found: Examination, work: _Work) -> None:
    steps, why = found.look.signs.iterations(_values_per_step(work.trace)), "Signs are not measured"
    _attempt(found, "sign_blocks", why, lambda: measure_sign_blocks(work.trace, most_steps=steps, **work.sharing))


def _between(found: Examination, work: _Work) -> None:
    _attempt(
        found,
        "between_nodes",
        "Agreement of ranks is not measured",
        lambda: measure_between_ranks(work.trace, found.look.between, **work.sharing),
    )


def _noise(found: Examination, work: _Work) -> None:
    assert found.spectrum is not None
    layers, batch = found.spectrum.layers, work.trace.metadata.get("batch_size")
    passes = int(np.median(work.trace.scalars(0)["accumulation"]))  # forward and backward passes of one gradient
    size = batch * max(1, passes) if type(batch) is int and batch > 0 else None
    inner, names = np.stack([layer.inner for layer in layers]), [layer.layer.name for layer in layers]
    _attempt(found, "noise_scale", "No noise scale", lambda: measure_noise_scale(inner, names, size))


def _payoff(found: Examination, work: _Work) -> None:
    """Try plans, and forecast them for the page to play with, and with local steps."""
    trace, options = work.trace, work.options
    none = options.families is None and options.plans is None
    tried = try_recorded(
        trace,
        families_of(trace, found.look) if none else options.families or {},
        options.plans or {},
        provenances=options.provenances,
        network=options.network,
        max_loss=options.max_loss,
        look=found.look,
        **work.sharing,
    )
    found.plans, found.replays, found.speed, found.frontier = tried.plans, tried.replays, tried.speed, tried.frontier
    found.remarks += tried.remarks
    if tried.speed is not None:
        known = {name: plan for name, plan in tried.plans.items() if name in tried.replays}
        if options.for_page:
            found.tapes = forecast_tapes(known, tried.speed.forecasts, work.progress)
        found.local_steps = forecast_local_speed(known, tried.speed, trace.local_step_count, progress=work.progress)


def _limits(found: Examination, work: _Work) -> None:
    look = found.look.limits
    _attempt(found, "limits", "No limits", lambda: measure_limits(work.trace, extent=look, **work.sharing))
    if (limits := found.measured["limits"]) is not None:
        found.measured["limits"] = replace(limits, plans=place_plans(limits, found.replays, found.plans))


_MEASURES: Mapping[str, Callable[[Examination, _Work], None]] = {
    "within": _within,
    "signs": _signs,
    "between": _between,
    "noise": _noise,
    "payoff": _payoff,
    "limits": _limits,
}
_OF_SEVERAL = ("between", "noise", "payoff")  # parts that need several ranks


def remarks_on(
    trace: Trace, look: Look, parts: Collection[str] = ("payoff",), spectrum: TraceSpectrum | None = None
) -> list[str]:
    """Say what limits any measurement of a recording. spectrum: that was measured. None: it was not."""
    remarks = [_what_is_quick(trace, spectrum, look, parts)] if look.quick else []
    if trace.local_steps:
        remarks.append(f"Not gradients of single steps, but {trace.local_steps}.")
    if trace.several_passes:
        remarks.append(f"{trace.several_passes}.")
    if trace.unrecorded:
        remarks.append(
            f"{trace.left_out}: plans, bytes and step times are of all layers, errors and final losses are judged by "
            "the recorded ones alone."
        )
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
        measured.append("plans at fewer settings")
    if "limits" in parts:
        measured.append(f"codecs in one iteration of up to {look.limits.layers} layers, at one setting each")
    if "within" in parts:
        measured.append(f"slices fitted on up to {look.samples} iterations")
    if "signs" in parts:
        measured.append(f"signs of up to {look.signs.iterations(_values_per_step(trace))} iterations")
    return f"A quick look: {', '.join(measured)}. Leave --quick out to judge more steps and settings."


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
    workers: int = 1,
    progress: Progress | None = None,
) -> Tried:
    """Try plans as `examine` does for "payoff", and nothing else: what a recommendation needs."""
    _check_plans(trace, plans, look)
    start = replay_start(trace, look)
    trial = Trial(families, plans, network or Network(), max_loss, start, look.search_seconds, provenances or {})
    return try_plans(trace, trial, workers=workers, progress=progress)


def _check_plans(trace: Trace, plans: Mapping[str, Plan], look: Look) -> None:
    for plan in plans.values():
        check_replay(trace, plan, replay_start(trace, look), len(trace.steps))


def replay_start(trace: Trace, look: Look = THOROUGH) -> int:
    """Find the position from which plans are replayed for a report: the last steps, as many as take little time."""
    return max(0, len(trace.steps) - look.replays.iterations(_values_per_step(trace)))


def _values_per_step(trace: Trace) -> int:
    """Return the number of gradient values in a step, over all ranks."""
    return trace.world_size * sum(layer.numel for layer in trace.layers)
