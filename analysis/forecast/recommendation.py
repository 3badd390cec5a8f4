"""Recommend for each network what to train with, and the plans that a pilot should try.

The decision follows from trainings of other tasks (`gradlab.analysis.forecast.endings`). A pilot tries plans on the
task at hand. Faster plans than the decision's are proposed for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradlab.analysis.forecast.decide import SPEED_NOISE, Decision
from gradlab.analysis.forecast.endings import may_end_within
from gradlab.analysis.forecast.link import spell_rate
from gradlab.analysis.forecast.network import NOT_MEASURED, Profile
from gradlab.analysis.forecast.networks import networks_lines
from gradlab.analysis.forecast.speed import Configuration, Judged, SpeedForecast, caution_lines
from gradlab.errors import GradlabError
from gradlab.formatting import format_seconds
from gradlab.jsonable import Jsonable

LIKELY, BOLD = "likely", "bold"


@dataclass(frozen=True)
class Proposal(Jsonable):
    """A plan for a pilot, faster than what is recommended without one.

    risk: `LIKELY`: half of the trainings with an error like its own ended within the allowed loss. `BOLD`: a
        quarter did, or none is known.
    """

    plan: str
    risk: str
    seconds: float
    text: str


@dataclass(frozen=True)
class Recommendation(Jsonable):
    """A recommendation, and why.

    decision: `COMPRESS`, `HALF` (plain 16-bit reduction) or `NOTHING`; plan: None unless it is the first.
    max_loss: the final loss that was allowed, over dense training's, minus 1.
    text: limits of the recording, what to take, its cost, the link speeds at which that turns, and what a pilot would
        try: a line each.
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


def recommend(speed: SpeedForecast, stands_in: str = "") -> tuple[Recommendation, ...]:
    """Choose on each link, as if it were the only one. stands_in: ranks that were judged in place of nodes, in prose.

    Raises:
        GradlabError: if the time of computing is not known.
    """
    require_computing(speed.network.profile)
    shared = [*caution_lines(speed.judged.values())], [_inside(speed, stands_in), _computing(speed)]
    return tuple(
        _recommend(at, found, speed, *shared) for at, found in zip(speed.configurations, speed.decisions, strict=True)
    )


def _recommend(
    at: Configuration, found: Decision, speed: SpeedForecast, first: Sequence[str], assumed: Sequence[str]
) -> Recommendation:
    proposals = _proposals(at, found.seconds, speed)
    tried = "" if found.plan is None else "Not tried on your task: gradlab pilot does."
    lines = [*first, found.why, f"{found.cost} {tried}".rstrip(), found.break_even, *assumed, _faster(proposals)]
    text = "\n".join(line for line in lines if line)
    seconds = found.seconds, at.dense_seconds, at.half_seconds
    return Recommendation(found.take, found.plan, *seconds, speed.max_loss, text, proposals)


def lines_for_several(speed: SpeedForecast, found: Sequence[Recommendation], stands_in: str = "") -> list[str]:
    """Write what stands below the table of several links: what to take, its cost, where that turns, and the rest."""
    proposals = list({one.plan: one for each in found for one in each.proposals}.values())
    named = "; ".join(f"{one.plan} ({one.text})" for one in proposals)
    lines = [*networks_lines(speed), _inside(speed, stands_in), _computing(speed)]
    return [line for line in (*lines, _tries(named)) if line]


def require_computing(profile: Profile) -> None:
    """Refuse, before the work, to answer without the time of computing."""
    if profile == NOT_MEASURED:
        raise GradlabError(
            "whether compression pays depends on how long a step computes, which is not known: give --compute-seconds "
            "(a step on one rank, without gradient exchange, or the report of a training run)"
        )


def _computing(speed: SpeedForecast) -> str:
    """Say how long a step computes, where the user did not."""
    profile = speed.network.profile
    if not profile.recorded:
        return ""
    told = f"{format_seconds(profile.compute_seconds)} a step, {profile.compute_source}"
    return f"Computing: {told}; give --compute-seconds if the batch of a rank will differ."


def _inside(speed: SpeedForecast, stands_in: str) -> str:
    """Name the link that is assumed inside nodes of several ranks."""
    node = speed.network.node
    if node is None:
        return ""
    inside = f"{spell_rate(node.inside.bits_per_second)} for each of a node's {node.local_ranks} ranks"
    return f"Inside nodes: {inside} is assumed (--inside){stands_in and f'; {stands_in}'}."


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
    if judged.cosine is None or judged.length is None:
        return True  # nothing is known
    return may_end_within(max_loss, judged.cosine, judged.length, judged.memory)


def _faster(proposals: Sequence[Proposal]) -> str:
    """Name what a pilot would try."""
    return _tries("; ".join(f"{one.plan}, {format_seconds(one.seconds)} ({one.text})" for one in proposals))


def _tries(named: str) -> str:
    return named and f"A pilot tries faster plans: {named}."
