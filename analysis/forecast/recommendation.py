"""One answer for one network: which plan to train with, plain 16-bit reduction, or none; and which plans to try.

Recommend the fastest plan that meets the loss limit: similar training runs ended within it of dense training
(`gradlab.analysis.forecast.endings`). A saving below the forecasts' error counts as none. If plain 16-bit reduction is
about as fast, it is recommended instead. None of that was tried on the task at hand: faster plans are proposed for a
pilot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradlab.analysis.forecast.plans import SPEED_NOISE
from gradlab.analysis.forecast.profile import NOT_MEASURED, Profile
from gradlab.analysis.forecast.speed import Configuration, Judged, SpeedForecast, caution_lines
from gradlab.errors import GradlabError
from gradlab.formatting import format_percent, format_seconds
from gradlab.jsonable import Jsonable

COMPRESS, HALF, NOTHING = "compress", "16 bits", "do not compress"
LIKELY, BOLD = "likely", "bold"


@dataclass(frozen=True)
class Proposal(Jsonable):
    """A plan for a pilot, faster than what is recommended without one.

    risk: `LIKELY`: half of the trainings with an error like its own ended within the allowed loss. `BOLD`: few did, or
        there are too few to tell.
    seconds: of a step.
    text: what is known of its loss, in prose.
    """

    plan: str
    risk: str
    seconds: float
    text: str


@dataclass(frozen=True)
class Recommendation(Jsonable):
    """What to do, and why.

    decision: `COMPRESS`, `HALF` (plain 16-bit reduction) or `NOTHING`.
    plan: to compress with; None otherwise.
    seconds: of a step as recommended.
    dense_seconds, half_seconds: of the fastest dense step, and of the fastest in plain 16 bits.
    max_loss: that was allowed: the final loss over dense training's, minus 1.
    proposals: faster plans than what is recommended, for a pilot: the one of less risk first.
    """

    decision: str
    plan: str | None
    seconds: float
    dense_seconds: float
    half_seconds: float
    max_loss: float
    text: str
    proposals: tuple[Proposal, ...]


def recommend(speed: SpeedForecast) -> Recommendation:
    """Choose for the forecast's one number of nodes and one link."""
    if len(speed.configurations) != 1:
        raise GradlabError(f"{len(speed.configurations)} pairs of nodes and links, expected one to recommend for")
    require_computing(speed.network.profile)
    (at,) = speed.configurations
    allowed = speed.allowed
    best = min((name for name in allowed if _saves(at, name)), key=at.seconds.__getitem__, default=None)
    half = at.half_saves > SPEED_NOISE and (best is None or at.no_faster_than_16_bits(best))
    seconds = at.half_seconds if half else at.seconds[best] if best is not None else at.dense_seconds
    decision = HALF if half else NOTHING if best is None else COMPRESS
    plan = best if decision == COMPRESS else None
    proposals = _proposals(at, seconds, speed)
    text = " ".join([_text(at, decision, plan, seconds, speed), speed.break_even_text(at), *_untried(plan, proposals)])
    text = " ".join([text, *caution_lines(speed.judged.values())])
    return Recommendation(decision, plan, seconds, at.dense_seconds, at.half_seconds, speed.max_loss, text, proposals)


def require_computing(profile: Profile) -> None:
    """Refuse, before the work, to answer without the time of computing."""
    if profile == NOT_MEASURED:
        raise GradlabError(
            "whether compression pays depends on how long a step computes, which is not known: give --compute-seconds "
            "(a step on one rank, without gradient exchange) or --run (the report of a training run)"
        )


def _saves(at: Configuration, name: str) -> bool:
    """Whether a plan's step is shorter than the dense one by more than forecasts err."""
    return at.seconds[name] < (1 - SPEED_NOISE) * at.dense_seconds


def _proposals(at: Configuration, seconds: float, speed: SpeedForecast) -> tuple[Proposal, ...]:
    """Choose at most two plans for a pilot, each faster than what comes before it by more than forecasts err."""
    found = []
    for risk, may in ((LIKELY, _likely), (BOLD, _may_hold)):
        names = [name for name in at.seconds if may(speed.judged[name], speed.max_loss) and _saves(at, name)]
        name = min(names, key=at.seconds.__getitem__, default=None)
        if name is not None and at.seconds[name] < (1 - SPEED_NOISE) * seconds:
            seconds = at.seconds[name]
            found.append(Proposal(name, risk, seconds, speed.judged[name].known_text))
    return tuple(found)


def _likely(judged: Judged, max_loss: float) -> bool:
    return judged.ended is not None and judged.ended.middle <= max_loss


def _may_hold(judged: Judged, max_loss: float) -> bool:
    return judged.ended is None or judged.ended.low <= max_loss


def _text(at: Configuration, decision: str, plan: str | None, seconds: float, speed: SpeedForecast) -> str:
    where, dense = at.where[:1].upper() + at.where[1:], format_seconds(at.dense_seconds)
    if plan is not None:
        saves = format_percent(1 - seconds / at.dense_seconds, 0)
        return (
            f"{where} compress with {plan}: a step takes {format_seconds(seconds)} instead of {dense} ({saves} less; "
            f"{format_seconds(at.half_seconds)} in plain 16 bits), the fastest with {speed.limit}; "
            f"{speed.judged[plan].text}."
        )
    if decision == HALF:
        return (
            f"{where} reduce gradients in plain 16 bits: a step takes {format_seconds(seconds)} instead of {dense}, "
            f"and no plan with {speed.limit} is faster by more than forecasts err."
        )
    least = format_percent(SPEED_NOISE, 0)
    return f"{where} do not compress: no plan with {speed.limit} saves more than {least} of {dense}."


def _untried(plan: str | None, proposals: Sequence[Proposal]) -> list[str]:
    """Say what was not tried, and name what a pilot would try."""
    if not proposals:
        return [] if plan is None else ["It was not tried on your task, which a pilot does."]
    named = "; ".join(f"{one.plan}, {format_seconds(one.seconds)} ({one.text})" for one in proposals)
    return [f"None of this was tried on your task. A pilot tries faster plans: {named}."]
