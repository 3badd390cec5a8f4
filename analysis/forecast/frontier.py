"""Try the plans that there are for a recording, and place all of them on one frontier: error over seconds on a link.

Families of settings are searched by short replays. Candidates are replayed over more steps and forecast: the
fastest limits, settings just beyond a limit that are faster than all of them, 16 bits, and the plans that were given.
If such a replay says that a limit is not within the allowed loss, the setting before it is tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from gradlab.analysis.forecast.candidates import HALF_PLAN, Candidate, Family
from gradlab.analysis.forecast.network import Network
from gradlab.analysis.forecast.plans import jobs
from gradlab.analysis.forecast.search import SEARCH_STEPS, Searched, bracket, measured, search
from gradlab.analysis.forecast.speed import SpeedForecast, forecast_speed, with_codec_time
from gradlab.analysis.forecast.step_time import compare
from gradlab.analysis.replay import replay_plans
from gradlab.analysis.replay.result import Replay
from gradlab.errors import GradlabError
from gradlab.jsonable import Jsonable
from gradlab.plan import Plan
from gradlab.progress import Progress

if TYPE_CHECKING:
    from gradlab.trace import Trace

GIVEN = "given"  # the family of plans that the caller gave
# Of each configuration: families within the limit, and settings beyond it, that are replayed over more steps.
_FASTEST, _RISKIER = 3, 2


@dataclass(frozen=True)
class Row(Jsonable):
    """A setting with a replay: its step in seconds, what a rank sends, and its judgement.

    setting: None for a plan that was given.
    seconds: time of a step between the first number of nodes on the first link; None: not forecast.
    within: whether similar trainings ended within the allowed loss.
    """

    name: str
    family: str
    setting: Mapping[str, Any] | None
    seconds: float | None
    bytes_ratio: float | None
    cosine: float | None
    summed_over: int | None
    judged_steps: int
    within: bool


@dataclass
class Tried:
    """Plans that were tried on a recording.

    plans, replays: over the longer replay, by name.
    speed: forecasts of those plans. None: nothing could be forecast.
    frontier: every replayed setting and given plan, by family in the order of the bytes that they send.
    """

    plans: dict[str, Plan] = field(default_factory=dict)
    replays: dict[str, Replay] = field(default_factory=dict)
    speed: SpeedForecast | None = None
    frontier: list[Row] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Trial:
    """Plans to try, and what for.

    families: families to search; given: plans to try beside them, by name.
    network: network that steps are forecast for.
    max_loss: final loss that is allowed above dense training, as a share of its loss.
    start: position that longer replays begin at; seconds: budget of the search.
    provenances: provenances of fitted plans, by name.
    """

    families: Mapping[str, Family]
    given: Mapping[str, Plan]
    network: Network
    max_loss: float
    start: int
    seconds: float
    provenances: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def try_plans(trace: Trace, trial: Trial, *, workers: int = 1, progress: Progress | None = None) -> Tried:
    """Search the families, replay and forecast what matters of them and of given plans, and place all on a frontier."""
    shared: dict[str, Any] = {"nodes": max(trial.network.nodes), "workers": workers, "progress": progress}
    replays_from = partial(replay_plans, trace, start=trial.start, **shared)
    steps = min(SEARCH_STEPS, len(trace.steps))
    longer = len(trace.steps) - trial.start > steps
    found = search(
        trace,
        trial.families,
        max_loss=trial.max_loss,
        seconds=trial.seconds,
        steps=steps if longer else len(trace.steps) - trial.start,
        **shared,
    )
    tried, times = Tried(remarks=found.remarks), _times(found, trial.network, progress)
    kept = _kept(found, times)
    tried.plans = {one.name: one.plan for one in kept} | dict(trial.given)
    short = {} if longer else {found.candidate(name, at).name: one for name, at, one in _replays_of(found)}
    _replay(tried, {name: plan for name, plan in tried.plans.items() if name not in short}, trial.given, replays_from)
    tried.replays |= {name: short[name] for name in tried.plans if name in short}
    if longer:
        _step_back(tried, found, replays_from)
    for name, provenance in trial.provenances.items():
        if name in tried.replays:
            tried.replays[name] = tried.replays[name].held_out(provenance)
    known = {name: plan for name, plan in tried.plans.items() if name in tried.replays}
    tried.replays = {name: tried.replays[name] for name in known}
    if known:
        try:
            tried.speed = forecast_speed(
                known, tried.replays, trial.network, max_loss=trial.max_loss, progress=progress
            )
        except GradlabError as reason:
            tried.remarks.append(f"No forecast: {reason}")
    tried.frontier = list(_rows(tried, found, times))
    return tried


def _replays_of(found: Searched) -> Iterable[tuple[str, int, Replay]]:
    for family, replays in found.replays.items():
        for place in sorted(replays):
            yield family, place, replays[place]


def _times(found: Searched, network: Network, progress: Progress | None) -> dict[str, list[float]]:
    """By name, the step of every replayed setting in each configuration of a network."""
    replays, times = list(_replays_of(found)), {}
    for done, (family, place, replay) in enumerate(replays):
        one = found.candidate(family, place)
        times[one.name] = step_seconds(one.plan, replay, network)
        if progress:
            progress("step times", done + 1, len(replays))
    return times


def _kept(found: Searched, times: Mapping[str, Sequence[float]]) -> list[Candidate]:
    """Choose what is replayed over more steps, and told of: 16 bits, the fastest within the limit, the next beyond."""
    within, beyond = [], []
    for family, one in found.families.items():
        known = found.known(family)
        low, outside = bracket(known, len(one.candidates))
        if low >= 0:
            within.append(one.candidates[low])
        if outside in known:
            beyond.append((known[outside].error, one.candidates[outside]))
    kept = [one for curve in found.families.values() for one in curve.candidates if one.name == HALF_PLAN]
    for at in range(len(next(iter(times.values()), ()))):
        kept += sorted(within, key=lambda one: times[one.name][at])[:_FASTEST]
        fastest = min((times[one.name][at] for one in within), default=float("inf"))
        faster = [pair for pair in beyond if times[pair[1].name][at] < fastest]
        kept += [one for _, one in sorted(faster, key=lambda pair: pair[0])[:_RISKIER]]
    return list({one.name: one for one in kept}.values())


def _replay(tried: Tried, plans: Mapping[str, Plan], given: Mapping[str, Plan], replays_from: Any) -> None:
    """Replay plans over the longer range. A given plan's error is raised."""
    for name, result in replays_from(plans).items() if plans else ():
        if isinstance(result, Replay):
            tried.replays[name] = result
        elif name in given:
            raise result
        else:
            tried.remarks.append(f"{name}: {result}")


def _step_back(tried: Tried, found: Searched, replays_from: Any) -> None:
    """Try the setting before a limit that more steps put outside the allowed loss."""
    before: dict[str, Plan] = {}
    for family in found.families:
        place = found.limit(family)
        if not place or not found.known(family)[place].within:
            continue  # there is none before it, or none is within
        replay = tried.replays.get(found.candidate(family, place).name)
        if replay is not None and not measured(replay, found.max_loss).within:
            one = found.candidate(family, place - 1)
            before[one.name] = one.plan
    tried.plans |= before
    _replay(tried, before, {}, replays_from)


def _rows(tried: Tried, found: Searched, times: Mapping[str, Sequence[float]]) -> Iterable[Row]:
    """Every setting with a replay, the longer one where there are two, and the given plans."""
    short = {found.candidate(name, at).name: one for name, at, one in _replays_of(found)}
    seconds = {name: of[0] for name, of in times.items()}
    seconds |= tried.speed.configurations[0].seconds if tried.speed is not None else {}
    of_families = [(family, one) for family, curve in found.families.items() for one in curve.candidates]
    others = tried.replays.keys() - {one.name for _, one in of_families}
    for family, one in of_families:
        replay = tried.replays.get(one.name, short.get(one.name))
        if replay is not None:
            yield _row(one.name, family, dict(one.setting), seconds.get(one.name), replay, found.max_loss)
    for name, replay in tried.replays.items():
        if name in others:
            yield _row(name, GIVEN, None, seconds.get(name), replay, found.max_loss)


def _row(
    name: str, family: str, setting: Mapping[str, Any] | None, seconds: float | None, replay: Replay, max_loss: float
) -> Row:
    summary = replay.summary()
    return Row(
        name=name,
        family=family,
        setting=setting,
        seconds=seconds,
        bytes_ratio=summary.compression_ratio,
        cosine=summary.judged_cosine,
        summed_over=summary.judged_length,
        judged_steps=summary.judged_steps,
        within=measured(replay, max_loss).within,
    )


def step_seconds(plan: Plan, replay: Replay, network: Network) -> list[float]:
    """Forecast a step in each configuration, in seconds, the links of the first number of nodes first."""
    one = with_codec_time(network, replay)
    return [
        compare(job, link, speed=one.speed, node=one.node).compressed.seconds
        for job in jobs(plan, one, repeats=1)
        for link in one.links
    ]
