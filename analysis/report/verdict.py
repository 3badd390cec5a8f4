"""Verdicts in plain words: the first line of a report, and its pages' answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gradlab.analysis.forecast import SPEED_NOISE
from gradlab.analysis.forecast.endings import judged_by, judgement_text, standing
from gradlab.analysis.forecast.link import spell_rate
from gradlab.analysis.intervals import FEWEST_RANKED
from gradlab.analysis.report.tables import trend_text
from gradlab.formatting import format_number, format_percent, format_ratio, format_seconds
from gradlab.metric import RELATIVE_NOISE, final_score, metric_of, scores
from gradlab.saving import Saving

if TYPE_CHECKING:
    from gradlab.analysis.fit.gradiveq import GradiveqMeasurement
    from gradlab.analysis.fit.lgc.fit import LgcMeasurement
    from gradlab.analysis.layer_plan.hold import Hold
    from gradlab.analysis.layer_plan.provenance import LgrecoProvenance
    from gradlab.analysis.layer_plan.step_time_search import FastestPlan

# A plan by layer is not worth a smaller gain than this.
_LITTLE_GAIN = 0.02
# An autoencoder with more than this share of the error of zeros has learned next to nothing.
_NOTHING_LEARNED = 0.9
_DIVERGED = 1.5
_SHORT = 16
_SAME_ORDER = 0.8  # the least rank correlation that counts as one order
_COLLAPSED = 0.05  # spread of codes over their size


def step_seconds(run: Mapping[str, Any]) -> float | None:
    """Return a run's seconds per step: as reported, else computing plus waiting; None without times."""
    if run.get("step_seconds"):
        return float(run["step_seconds"])
    times = run.get("time") or {}
    return float((times.get("compute") or 0.0) + (times.get("wait") or 0.0)) or None


def comparison_verdict(runs: Mapping[str, Any]) -> str:
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


def _compute_seconds(run: Mapping[str, Any]) -> float:
    return float((run.get("time") or {}).get("compute") or 0.0)


def _quality_line(runs: Mapping[str, Any], dense: Mapping[str, Any]) -> str:
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
    listed = ", ".join(f"{method} ({_reached(metric.text(value), value)})" for method, value in lost.items())
    return f"{name} is lost by {listed}; dense reaches {metric.text(reference)}, one seed each."


def _reached(text: str, value: float | None) -> str:
    return "diverged" if value is None else text


def trace_verdict(data: Mapping[str, Any]) -> str:
    """Say what a recording tells about compressing this training. Where compression pays comes first."""
    fit, replays, speed = data["fit"], data["replays"], data.get("payoff")
    lines = []
    if speed is not None:
        local = data.get("local_steps")
        return str(local.verdict if local is not None and local.recorded is not None else speed_verdict(data))
    if fit is None and not replays:
        lines.append("A recording alone does not say that compression pays: fit a codec, or replay plans.")
    if fit is not None:
        lines.append(fit_verdict(fit))
    if replays:
        lines.append(replay_verdict(replays))
    lines.append(agreement_line(data["spectrum"]))
    return " ".join(line for line in lines if line)


def trace_brief(data: Mapping[str, Any]) -> str:
    """Say the same in short, for the page, where each question has its own answer."""
    speed, local = data.get("payoff"), data.get("local_steps")
    if speed is None or (local is not None and local.recorded is not None):
        return ""
    return str(speed.brief)


def speed_verdict(data: Mapping[str, Any]) -> str:
    """Say which plan is fastest where, and where local steps are the next thing to try."""
    text, local = data["payoff"].verdict, data.get("local_steps")
    if local is None:
        return str(text)
    if local.recorded is None:
        return f"{text} {local.verdict}"
    return f"With an exchange in every step: {text[:1].lower()}{text[1:]}"


def fit_verdict(measured: GradiveqMeasurement) -> str:
    """Say whether a GradiVeQ fit holds on later iterations."""
    later, control = measured.holdout.loss, measured.random_basis.loss
    if later is None:
        return "The GradiVeQ fit could not be tried on any later iteration."
    threshold = measured.promised_loss
    sent = measured.saving.text("fewer bytes")
    lost = f"{format_percent(later)} of the gradient's energy is lost on later iterations"
    if control is not None and later >= control:
        return f"The GradiVeQ fit holds nothing that lasts: {lost}, {format_percent(control)} with random bases."
    if threshold is None:
        beside = "" if control is None else f" ({format_percent(control)} with random bases)"
        return f"GradiVeQ at {sent}: {lost}{beside}."
    if later <= 2 * threshold:
        return f"GradiVeQ holds what its threshold promises: {lost}, at {sent}."
    return f"GradiVeQ does not hold what its threshold ({format_percent(threshold)}) promises: {lost}, at {sent}."


def layer_plan_verdict(provenance: LgrecoProvenance) -> str:
    """Say what a plan by layer saves against the uniform one, and whether its error holds on later iterations."""
    gain = provenance.gain
    if provenance.step is not None:
        step = _step_line(provenance, provenance.step)
        return " ".join([step, _later_error_line(provenance), *_hold_lines(provenance.hold)])
    what = {"payload": "bytes", "wire": "bytes on the wire", "seconds": "seconds"}[provenance.cost]
    if gain < 1 - _LITTLE_GAIN:  # weighted costs, or a budget of its own
        first = f"By layer {format_ratio(1 / gain)} more {what} than {provenance.uniform} everywhere"
    elif gain < 1 + _LITTLE_GAIN:
        first = f"A plan by layer gains next to nothing over {provenance.uniform} everywhere ({format_ratio(gain)})"
    else:
        first = f"By layer {format_ratio(gain)} fewer {what} than {provenance.uniform} everywhere"
    lines = [f"{first}; {provenance.saving.text('fewer bytes than dense')} over the whole model."]
    if alone := provenance.alone:
        best = min(alone, key=lambda name: alone[name])
        lines.append(f"Of one codec alone, {best} needs {format_ratio(alone[best] / provenance.size)} as much.")
    lines += [_later_error_line(provenance), *_hold_lines(provenance.hold)]
    if provenance.gap:
        lines.append(f"The search was cut short: a plan may be {format_percent(provenance.gap)} smaller.")
    return " ".join(lines)


def _later_error_line(provenance: LgrecoProvenance) -> str:
    errors = provenance.relative_error
    later, uniform = errors.plan.held_out, errors.uniform.held_out
    if later is None:
        return "Nothing was held out: the error later on is not known."
    if not uniform:
        return ""
    more = later / uniform - 1
    compared = "no larger than" if more <= 0 else f"{format_percent(more)} above"
    return (
        f"On later iterations its error is {compared} the uniform plan's ({format_percent(later)} of the gradient "
        f"against {format_percent(uniform)}, without feedback)."
    )


def _hold_lines(hold: Hold | None) -> list[str]:
    """Say which alpha's error holds on later iterations where the one asked for does not."""
    if hold is None or hold.holds:
        return []
    if hold.largest is None:
        return [
            f"That is more than was allowed ({hold.asked:g} times the uniform plan's, --alpha), and a smaller one "
            "does not help. Expect the larger error in your run, or fit on a longer recording, or on later "
            "iterations of it (-s start=...)."
        ]
    if hold.taken:
        return [
            f"With --alpha {hold.asked:g} it was more than allowed, so that the plan is that of {hold.largest:g}, the "
            "largest that keeps its error there. These iterations were chosen on too: the figure is no check any more."
        ]
    return [
        f"That is more than was allowed ({hold.asked:g} times the uniform plan's, --alpha). Expect it in your run, or "
        f"give --hold: it takes --alpha {hold.largest:g}, the largest whose error is as allowed there."
    ]


def _step_line(provenance: LgrecoProvenance, step: FastestPlan) -> str:
    """Compare the plan's predicted step with the uniform and the dense one, and with a lower bound for any plan."""
    own, uniform, dense, half = map(format_seconds, (step.seconds, step.uniform, step.dense, step.half))
    where = f"{provenance.world_size} ranks at {spell_rate(step.link.bits_per_second)}"
    least = format_seconds(step.bound)
    bound = f"no choice among these settings, at this error, is predicted to take less than {least}"
    if step.dense <= (1 + SPEED_NOISE) * step.seconds:
        return (
            f"Do not compress for speed: with {where} a dense step is predicted to take {dense} ({half} in plain "
            f"16-bit reduction), the fastest plan found {own}, {provenance.uniform} everywhere {uniform}; {bound}."
        )
    first = f"By layer a step is predicted to take {own}, with {provenance.uniform} everywhere {uniform}"
    if step.uniform <= (1 + SPEED_NOISE) * step.seconds:
        first = f"By layer a step gains next to nothing: {own}, with {provenance.uniform} everywhere {uniform}"
    beaten = ", which is about as fast or faster" if step.half <= (1 + SPEED_NOISE) * step.seconds else ""
    return f"{first}, dense {dense}, in plain 16-bit reduction {half}{beaten} ({where}); {bound}."


def lgc_verdict(measured: LgcMeasurement) -> str:
    """Say whether the autoencoder beats codes of the same bytes that need no learning."""
    own, rival = measured.autoencoder.error, measured.better
    error = f"{format_percent(own)} of the averaged selected values is lost on later iterations"
    instead = ""
    if rival is not None:
        instead = (
            f", and {format_percent(rival.error)} by {rival.name}, which sends as many bytes or fewer and needs "
            "no learning"
        )
    if own > _DIVERGED:
        return f"Do not use the autoencoder, which is worse than sending zeros: {error}{instead}. Try a smaller rate."
    if own > _NOTHING_LEARNED:
        return f"Do not use the autoencoder, which has learned next to nothing: {error}{instead}."
    if rival is not None:
        return f"Do not use the autoencoder: {error}{instead}."
    return f"The autoencoder beats what needs no learning at its bytes: {error}."


def lgc_warnings(measured: LgcMeasurement) -> list[str]:
    """List what a user must know before training with the autoencoder."""
    warnings = []
    if measured.selected < _SHORT:
        warnings.append(
            f"{measured.selected} values are selected: padded to a multiple of 16 their code is hardly shorter; "
            "raise the density."
        )
    if measured.code_spread < _COLLAPSED:
        warnings.append(
            f"Codes of successive iterations differ by {format_percent(measured.code_spread)} of "
            "their size: they say next to nothing. With a server a smaller similarity loss may help (--set "
            "similarity=0)."
        )
    if not measured.autoencoder.error <= measured.most_error:
        warnings.append(
            f"Its error is above most_error = {measured.most_error:g}: training with it sends selected values as they "
            "are, to the end."
        )
    return warnings


def replay_verdict(replays: Mapping[str, Any]) -> str:
    """Say which replayed plan's similar methods trained best, judged on iterations after its fit.
    Plans with and without memory have different cosines, so similar trainings' losses decide, then the cosine.
    """
    summaries = {name: replay["summary"] for name, replay in replays.items()}
    unknown = [name for name, summary in summaries.items() if summary["contribution_error"] is None]
    lossy = {name: summary for name, summary in summaries.items() if summary["contribution_error"]}
    known = {name: summary for name, summary in lossy.items() if summary["aggregate_error"] is not None}
    unknown += [name for name in lossy if name not in known]  # the mean was zero in every iteration
    lines = []
    if known:
        best = min(known, key=lambda name: standing(*judged_by(known[name])))
        chosen = known[best]
        sent = Saving.read(chosen).text("fewer bytes")
        mean, own = format_percent(chosen["aggregate_error"]), format_percent(chosen["contribution_error"])
        several = f"Of the lossy plans replayed, {best} is the one whose similar methods trained best: it"
        which = several if len(summaries) > 1 else best
        judged = judgement_text(*judged_by(chosen))
        lines.append(
            f"{which} sends {sent}; {judged}. Median errors of a step: {mean} of the mean, {own} of a rank's own."
        )
        lines += _cautions(known)
    elif len(unknown) < len(summaries):
        lines.append("The plans replayed change no gradient.")
    if unknown:
        lines.append(
            f"Nothing is known about {', '.join(unknown)}: no finite iteration with a gradient was replayed, "
            "but those of its fit."
        )
    return " ".join(lines)


def _cautions(summaries: Mapping[str, Any]) -> list[str]:
    """Say where errors grow over the recording, and where it is short or of the beginning of training."""
    lines = []
    growing = {name: one["trend"] for name, one in summaries.items() if one["trend"] and one["trend"]["low"] > 0}
    if growing:
        listed = ", ".join(f"{name} ({trend_text(one)} points per 100 iterations)" for name, one in growing.items())
        lines.append(f"A rank's error grows over the recording, and is to be expected larger later: {listed}.")
    cautions = dict.fromkeys(one["caution"] for one in summaries.values() if one["caution"])
    return [*lines, *(f"Mind the recording: {line}." for line in cautions)]


def ranking_line(ranking: Mapping[str, Any]) -> str:
    """Say whether plans keep their order over the run."""
    windows = zip(ranking["agreement"], ranking["agreement_intervals"], strict=True)
    least, interval = min(windows, key=lambda window: window[0])
    order = "the same" if least > _SAME_ORDER else "not the same"
    known = f"no interval: {len(ranking['whole'])} plans, expected at least {FEWEST_RANKED} that differ"
    if interval is not None:
        known = f"95 % interval {interval[0]:.2f} to {interval[1]:.2f} by Bonett and Wright"
    return (
        f"The order of plans by {ranking['measure'].replace('_', ' ')} is {order} all through what was replayed (rank "
        f"correlation with the whole order at least {least:.2f}; {known})."
    )


def agreement_line(spectrum: Mapping[str, Any]) -> str:
    """Say how far two ranks' gradients agree."""
    cosines = [layer["mean_cosine"] for layer in spectrum["layers"] if layer["mean_cosine"] is not None]
    if not cosines:
        return ""
    mean = sum(cosines) / len(cosines)
    meaning = "mostly noise of their own batches" if mean < 0.3 else "a good part in common"
    return f"Two ranks' gradients have a cosine of {format_number(mean, 2)} on average: {meaning}."
