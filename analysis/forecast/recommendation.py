"""One answer for one network: which plan to train with, plain 16-bit reduction, or none.

Of the plans whose similar methods ended within an allowed loss of dense training (`gradlab.analysis.forecast.endings`)
the fastest is taken, if it saves a part of a step that a forecast can tell. Where plain reduction in 16 bits is about
as fast, that is taken instead: it loses next to nothing, and PyTorch has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradlab.analysis.forecast.plans import SPEED_NOISE
from gradlab.analysis.forecast.profile import NOT_MEASURED, Profile
from gradlab.analysis.forecast.speed import Configuration, Judged, SpeedForecast, caution_lines
from gradlab.errors import GradlabError
from gradlab.formatting import format_counted, format_percent, format_seconds
from gradlab.jsonable import Jsonable

COMPRESS, HALF, NOTHING = "compress", "16 bits", "do not compress"


@dataclass(frozen=True)
class Recommendation(Jsonable):
    """What to do, and why.

    Attributes:
        decision: `COMPRESS`, `HALF` (plain 16-bit reduction) or `NOTHING`.
        plan: to compress with; None otherwise.
        seconds: of a step as recommended.
        dense_seconds, half_seconds: of the fastest dense step, and of the fastest in plain 16 bits.
        max_loss: that was allowed: the final loss over dense training's, minus 1.
        text: all of it in prose.
        refused: faster plans than the one recommended, and why they were not taken.
    """

    decision: str
    plan: str | None
    seconds: float
    dense_seconds: float
    half_seconds: float
    max_loss: float
    text: str
    refused: Mapping[str, str]


def recommend(speed: SpeedForecast) -> Recommendation:
    """Choose for the forecast's one number of nodes and one link.

    Args:
        speed: forecasts and judgements of the plans to choose from, and the loss that is allowed.

    Raises:
        GradlabError: for several numbers of nodes or links, or without the time of computing.
    """
    if len(speed.configurations) != 1:
        raise GradlabError(f"{len(speed.configurations)} pairs of nodes and links, expected one to recommend for")
    require_computing(speed.network.profile)
    (at,) = speed.configurations
    allowed = speed.allowed
    best = min((name for name in allowed if _saves(at, name)), key=at.seconds.__getitem__, default=None)
    half = at.half_saves > SPEED_NOISE and (best is None or at.no_faster_than_16_bits(best))
    seconds = at.half_seconds if half else at.seconds[best] if best is not None else at.dense_seconds
    refused = {
        name: _why_not(speed.judged[name], speed.limit)
        for name in sorted(at.seconds, key=at.seconds.__getitem__)
        if name not in allowed and at.seconds[name] < seconds and _saves(at, name)
    }
    decision = HALF if half else NOTHING if best is None else COMPRESS
    plan = best if decision == COMPRESS else None
    text = " ".join([_text(at, decision, plan, seconds, speed), speed.break_even_text(at), *_refusals(refused)])
    text = " ".join([text, *caution_lines(speed.judged.values())])
    return Recommendation(
        decision, plan, seconds, at.dense_seconds, at.half_seconds, speed.max_loss, text, dict(refused)
    )


def require_computing(profile: Profile) -> None:
    """Refuse, before the work, to answer without the time of computing.

    Raises:
        GradlabError: saying how it is given.
    """
    if profile == NOT_MEASURED:
        raise GradlabError(
            "whether compression pays depends on how long a step computes, which is not known: give --compute-seconds "
            "(a step on one rank, without gradient exchange) or --run (the report of a training run)"
        )


def _saves(at: Configuration, name: str) -> bool:
    """Whether a plan's step is shorter than the dense one by more than forecasts err."""
    return at.seconds[name] < (1 - SPEED_NOISE) * at.dense_seconds


def _why_not(judged: Judged, limit: str) -> str:
    if judged.ended is None:
        return "what its update keeps is not known"
    return f"similar methods ended {judged.ended.text} in loss, where {limit} is allowed"


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


def _refusals(refused: Mapping[str, str]) -> list[str]:
    """Name the fastest plan that was not taken."""
    name = next(iter(refused), None)
    if name is None:
        return []
    others = len(refused) - 1
    same = f"; the same goes for {format_counted(others, 'other plan')}" if others else ""
    return [f"{name} would be faster, but {refused[name]}{same}."]
