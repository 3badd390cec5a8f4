"""Everything that can be asked of a recording, for its report: what does not apply to a trace is said, not raised."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from gradlab.analysis.fit.gradiveq import GradiveqFit, NotFittable, fit_gradiveq
from gradlab.analysis.forecast.link import Link
from gradlab.analysis.forecast.payoff import measure_payoff, usual_plans
from gradlab.analysis.forecast.profile import Profile
from gradlab.analysis.measure.between_ranks import measure_between_ranks
from gradlab.analysis.measure.layer_places import layer_places
from gradlab.analysis.measure.limits import measure_limits, place_plans
from gradlab.analysis.measure.noise_scale import TraceNoise, measure_noise_scale
from gradlab.analysis.measure.sign_blocks import measure_sign_blocks
from gradlab.analysis.measure.slices.of_trace import measure_slice_structure
from gradlab.analysis.measure.spectrum import TraceSpectrum, measure_spectrum
from gradlab.analysis.replay import check_replay, replay
from gradlab.analysis.replay.result import Replay
from gradlab.errors import GradlabError
from gradlab.formatting import format_count
from gradlab.plan import Plan
from gradlab.progress import Progress

if TYPE_CHECKING:
    from gradlab.trace import Trace

Found = TypeVar("Found")

# What can be asked, by the names of a report's pages; layers, their spectra and agreement are always measured.
PARTS = ("payoff", "between", "noise", "limits", "within", "signs")
# GradiVeQ's L_t; of a shorter trace the first half, so that the other can be held out.
SAMPLES = 100
# Parameters up to which a GradiVeQ fit of the whole model is quickly made, and values whose signs are.
_MOST_FITTED, _SIGN_VALUES, _FEWEST_SIGN_STEPS = 4 * 10**6, 2**27, 4
_MOST_SIGN_STEPS = 400
# Steps replayed for a first look: values over all ranks that bound them, the fewest, and the most.
_REPLAYED_VALUES, _FEWEST_STEPS, _MOST_STEPS = 4 * 10**8, 8, 40


@dataclass
class Examination:
    """What was found, as `gradlab.analysis.report.trace_report.write_trace_report` takes it."""

    spectrum: TraceSpectrum
    fit: GradiveqFit | None = None
    replays: dict[str, Replay] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def attempt(self, what: str, measure: Callable[[], Found]) -> Found | None:
        """The measurement, or a remark on why this trace has none."""
        try:
            return measure()
        except GradlabError as reason:
            self.remarks.append(f"{what}: {reason}")
            return None


def examine(
    trace: Trace,
    *,
    plans: Mapping[str, Plan] | None = None,
    origins: Mapping[str, Mapping[str, Any]] | None = None,
    nodes: Sequence[int] = (8,),
    links: Sequence[Link] = (Link(1e9, 1e-4), Link(2.5e10, 1e-4)),
    profile: Profile | None = None,
    after_addition: Sequence[str] = (),
    parts: Collection[str] = PARTS,
    workers: int = 1,
    progress: Progress | None = None,
) -> Examination:
    """Measure a trace in every way, or in some.

    plans: what is replayed and forecast, None for `usual_plans`; origins: of their artifacts by name, so that errors of
    fitted ones are those of later iterations; nodes, links, profile: as `measure_payoff`;
    after_addition: as `layer_places`; parts: of `PARTS`; workers: processes that share layers out.

    Raises:
        GradlabError: for a trace too short to measure at all, a plan of another model, an unknown part, or a layer
            pattern that matches none.
    """
    for part in parts:
        if part not in PARTS:
            raise GradlabError(f"unknown part {part!r}, expected some of {', '.join(PARTS)}")
    layer_places(trace, after_addition)
    for plan in (plans or {}).values():  # before the work, not after it
        check_replay(trace, plan, replay_start(trace), len(trace.steps))
    spectrum = measure_spectrum(trace, workers=workers, progress=progress)
    found = Examination(spectrum)
    if spectrum.never_finite_layers:
        found.remarks.append(f"Never finite on all ranks, and left out: {', '.join(spectrum.never_finite_layers)}.")
    if "within" in parts:
        _of_one_node(found, trace, progress)
    if "signs" in parts:
        steps = max(_FEWEST_SIGN_STEPS, _SIGN_VALUES // max(1, _values_per_step(trace)))
        signs = partial(measure_sign_blocks, trace, most_steps=min(steps, _MOST_SIGN_STEPS), progress=progress)
        found.measured["sign_blocks"] = found.attempt("Nothing to say of signs", signs)
    if trace.world_size > 1:
        if "between" in parts:
            _of_several_nodes(found, trace, after_addition, workers, progress)
        if "noise" in parts:
            found.measured["noise_scale"] = found.attempt("No noise scale", partial(_noise_scale, found, trace))
        if "payoff" in parts:
            _of_plans(found, trace, plans, origins or {}, nodes, links, profile, workers, progress)
    else:
        found.remarks.append("Recorded on one rank: what nodes share and what plans do is not measured.")
    if "limits" in parts:
        measure = partial(measure_limits, trace, workers=workers, progress=progress)
        limits = found.attempt("No limits", measure)
        if limits is not None:
            known = {name: plan for name, plan in _plans(trace, plans).items() if name in found.replays}
            limits = replace(limits, plans=place_plans(limits, found.replays, known))
        found.measured["limits"] = limits
    return found


def _of_one_node(found: Examination, trace: Trace, progress: Progress | None) -> None:
    parameters = sum(layer.numel for layer in trace.layers)
    if parameters > _MOST_FITTED:
        found.remarks.append(
            f"No GradiVeQ fit: of {format_count(parameters)} parameters it takes long; `gradlab fit gradiveq` makes it."
        )
    else:
        try:
            found.fit = fit_gradiveq(trace, samples=max(2, min(SAMPLES, len(trace.steps) // 2)), progress=progress)
        except NotFittable as reason:
            found.remarks.append(f"No GradiVeQ fit: {reason}")
    found.measured["slice_structure"] = measure_slice_structure(trace, samples=SAMPLES, progress=progress)


def _of_several_nodes(
    found: Examination, trace: Trace, after_addition: Sequence[str], workers: int, progress: Progress | None
) -> None:
    measure = partial(
        measure_between_ranks, trace, after_addition=after_addition, workers=workers, progress=progress
    )  # fmt: skip
    found.measured["between_nodes"] = found.attempt("Nothing to say of what nodes share", measure)


def _noise_scale(found: Examination, trace: Trace) -> TraceNoise:
    layers, batch = found.spectrum.layers, trace.metadata.get("batch_size")
    passes = int(np.median(trace.scalars(0)["accumulation"]))  # of forward and backward, that make up a gradient
    return measure_noise_scale(
        np.stack([layer.inner for layer in layers]),
        [layer.layer.name for layer in layers],
        batch * max(1, passes) if type(batch) is int and batch > 0 else None,
        np.random.default_rng(0),
    )


def _of_plans(
    found: Examination,
    trace: Trace,
    plans: Mapping[str, Plan] | None,
    origins: Mapping[str, Mapping[str, Any]],
    nodes: Sequence[int],
    links: Sequence[Link],
    profile: Profile | None,
    workers: int,
    progress: Progress | None,
) -> None:
    tried = _plans(trace, plans)
    start = replay_start(trace)
    for name, plan in tried.items():
        # A plan that was named must fit; of the usual ones those that do are enough.
        run = partial(replay, trace, plan, start=start, workers=workers, progress=progress)
        result = run() if plans is not None else found.attempt(name, run)
        if result is not None:
            found.replays[name] = result.held_out(origins.get(name, {}))
    replayed = {name: plan for name, plan in tried.items() if name in found.replays}
    if replayed:
        found.measured["payoff"] = found.attempt(
            "No forecast",
            lambda: measure_payoff(replayed, found.replays, nodes, links, profile=profile, progress=progress),
        )


def _plans(trace: Trace, plans: Mapping[str, Plan] | None) -> Mapping[str, Plan]:
    return usual_plans(trace.layers) if plans is None else plans


def replay_start(trace: Trace) -> int:
    """Position from which plans are replayed for a first look: the last steps, as many as are quickly done."""
    steps = int(np.clip(_REPLAYED_VALUES // max(1, _values_per_step(trace)), _FEWEST_STEPS, _MOST_STEPS))
    return max(0, len(trace.steps) - steps)


def _values_per_step(trace: Trace) -> int:
    """Of all ranks."""
    return trace.world_size * sum(layer.numel for layer in trace.layers)
