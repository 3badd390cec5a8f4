"""Forecast the speed of several plans on one's own network, beside what their replays say of training.

A plan is judged by the cosine of its replay, and by what trainings ended at whose replays had a similar cosine
(`gradlab.analysis.forecast.endings`). `gradlab.analysis.forecast.decide` chooses by both.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gradlab.analysis.forecast.candidates import HALF_PLAN
from gradlab.analysis.forecast.decide import SPEED_NOISE, Decision, decide
from gradlab.analysis.forecast.endings import MAX_LOSS, EndingRange, ended_at, judgement_text, loss_limit_text, standing
from gradlab.analysis.forecast.link import json_rate, spell_rate
from gradlab.analysis.forecast.network import NOT_MEASURED, CodecTime, Network
from gradlab.analysis.forecast.networks import networks_lines, turning_points, turns_text
from gradlab.analysis.forecast.plans import Forecast, forecast
from gradlab.analysis.forecast.step_time import Comparison
from gradlab.analysis.replay.many_ranks import CosineAt
from gradlab.errors import GradlabError
from gradlab.formatting import format_counted, format_seconds
from gradlab.jsonable import Jsonable, plain
from gradlab.plan import Plan
from gradlab.progress import Progress

if TYPE_CHECKING:
    from gradlab.analysis.replay.result import Replay


@dataclass(frozen=True)
class Configuration(Jsonable):
    """All plans at one number of nodes on one link.

    dense_seconds, dense_way: the fastest dense step and its name; half_seconds: the fastest one in 16 bits.
    seconds: each plan's step, by name.
    fastest, fastest_saves: the fastest of the plans that save more than `SPEED_NOISE`, and the share of the dense step
        that it saves; None and 0: no plan saves as much.
    closest, closest_saves: the same, among plans whose similar methods ended within the allowed loss.
    """

    nodes: int
    bits_per_second: float
    dense_seconds: float
    dense_way: str
    half_seconds: float
    seconds: Mapping[str, float]
    fastest: str | None
    fastest_saves: float
    closest: str | None
    closest_saves: float

    @property
    def half_saves(self) -> float:
        """The share of the dense step that plain 16-bit reduction saves."""
        return 1 - self.half_seconds / self.dense_seconds if self.dense_seconds > 0 else 0.0

    @property
    def taken(self) -> str | None:
        """The fastest plan whose similar methods ended within the allowed loss, unless 16 bits are as fast."""
        half = self.half_saves > SPEED_NOISE
        return None if self.closest is None or (half and self.no_faster_than_16_bits(self.closest)) else self.closest

    def no_faster_than_16_bits(self, plan: str) -> bool:
        """Whether a plan's step is no shorter, but for `SPEED_NOISE`, than with plain 16-bit reduction."""
        return self.seconds[plan] >= (1 - SPEED_NOISE) * self.half_seconds

    @property
    def where(self) -> str:
        """Link speed and nodes in prose: "at 1 Gbit/s between 8 nodes"."""
        return f"at {spell_rate(self.bits_per_second)} between {format_counted(self.nodes, 'node')}"

    def to_json(self) -> dict[str, Any]:
        """Write every field. An infinite speed is the text "unlimited"."""
        return {**super().to_json(), "bits_per_second": json_rate(self.bits_per_second)}


@dataclass(frozen=True)
class Judged(Jsonable):
    """A plan judged by its replay.

    cosine: cosine of sums over `length` steps (1: of single steps). None: not known.
    memory: whether the plan applies gradients of earlier steps.
    ended: range that trainings with similar cosines ended in; None without a cosine.
    caution: limit of the replay.
    at_nodes: cosine between as many nodes as were asked for; None if that is the recorded ranks'.
    """

    cosine: float | None = None
    length: int | None = None
    memory: bool = False
    ended: EndingRange | None = None
    caution: str | None = None
    at_nodes: CosineAt | None = None

    @classmethod
    def of(cls, replay: Replay) -> Judged:
        """Judge a replay."""
        summary = replay.summary()
        cosine, length, memory = summary.judged_cosine, summary.judged_length, summary.memory
        ended = None if cosine is None or length is None else ended_at(cosine, length, memory)
        return cls(cosine, length, memory, ended, summary.caution, summary.at_nodes)

    def within(self, max_loss: float) -> bool:
        """Whether all trainings with similar cosines ended at most so far above dense: a share of its loss."""
        return self.ended is not None and self.ended.within(max_loss)

    @property
    def standing(self) -> tuple[float, float]:
        """Sort key of plans, best first."""
        return standing(self.cosine, self.length, self.memory)

    @property
    def text(self) -> str:
        """In prose, after the plan's name."""
        at = self.at_nodes
        elsewhere = "" if at is None else f"; between {at.nodes} nodes {at}"
        return judgement_text(self.cosine, self.length, self.memory, elsewhere)

    @property
    def known_text(self) -> str:
        """Final losses of trainings with an error like its own, in a few words."""
        if self.cosine is None:
            return "not judged"
        return "too few trainings to tell" if self.ended is None else self.ended.text


def caution_lines(judged: Iterable[Judged]) -> list[str]:
    """Say once each what limits the replays: one sentence per limit."""
    cautions = dict.fromkeys(one.caution for one in judged if one.caution)
    return [f"Preliminary: {line}." for line in cautions]


@dataclass(frozen=True)
class SpeedForecast:
    """Forecasts of several plans on one network.

    judged: judgements by the replays, by name.
    configurations: every number of nodes with every link, the links of the first number of nodes first.
    max_loss: loss above dense training's that similar methods may have ended at, as a share of it.
    """

    network: Network
    judged: Mapping[str, Judged]
    forecasts: Mapping[str, Forecast]
    configurations: tuple[Configuration, ...]
    max_loss: float = MAX_LOSS

    @property
    def allowed(self) -> list[str]:
        """The plans whose similar methods ended within `max_loss` of dense training."""
        return [name for name, judged in self.judged.items() if judged.within(self.max_loss)]

    @property
    def limit(self) -> str:
        """The allowed loss in prose: "at most 1 % worse loss (--max-loss)"."""
        return loss_limit_text(self.max_loss)

    @property
    def compute_seconds(self) -> float | None:
        """Seconds of a step without gradient exchange. None: not measured, so that steps are the exchange alone."""
        profile = self.network.profile
        return None if profile == NOT_MEASURED else profile.compute_seconds

    def to_json(self) -> dict[str, Any]:
        """Write everything as plain JSON: times in seconds, sizes in bytes."""
        return {
            "compute_seconds": self.compute_seconds,
            "compute_source": self.network.profile.compute_source,
            "nodes": list(self.network.nodes),
            "links": [json_rate(link.bits_per_second) for link in self.network.links],
            "judged": plain(self.judged),
            "forecasts": plain(self.forecasts),
            "max_loss": self.max_loss,
            "places": plain(self.configurations),
            "decisions": None if self.compute_seconds is None else plain(self.decisions),
        }

    @functools.cached_property
    def decisions(self) -> list[Decision]:
        """Decisions in each configuration. The time of computing must be known."""
        turns = {count: self._turns(place) for place, count in enumerate(self.network.nodes)}
        return [decide(item, self.judged, self.limit, turns[item.nodes]) for item in self.configurations]

    def _turns(self, place: int) -> str:
        """Say at which link speeds the decision turns, at one of the numbers of nodes."""
        if not self.forecasts:
            return ""
        text, counts = turns_text(*turning_points(place, self)), self.network.nodes
        return f"Between {format_counted(counts[place], 'node')}: {text}" if len(counts) > 1 else text

    @property
    def verdict(self) -> str:
        """Decisions in each configuration, where they turn, and limits of the replays, in prose."""
        if self.compute_seconds is None:
            return _exchange_verdict(self.configurations)
        turns = dict.fromkeys(one.break_even for one in self.decisions if one.break_even)
        return " ".join([*(one.text for one in self.decisions), *turns, *caution_lines(self.judged.values())])

    @property
    def brief(self) -> str:
        """The verdict in short, as a report's first line: two decisions, the second in a few words, or all in short."""
        if self.compute_seconds is None:
            return (
                "Whether compression pays depends on how long a step computes, which is not known: give "
                "--compute-seconds, or move the slider in report.html."
            )
        first, *others = self.decisions
        if len(others) > 1:
            return " ".join(networks_lines(self))
        return " ".join(line for line in (first.text, *(one.short for one in others), first.break_even) if line)


def forecast_speed(
    plans: Mapping[str, Plan],
    replays: Mapping[str, Replay],
    network: Network,
    *,
    max_loss: float = MAX_LOSS,
    progress: Progress | None = None,
) -> SpeedForecast:
    """Forecast each plan on a network, and find the fastest plans of each configuration."""
    compressing = {name: plan for name, plan in plans.items() if plan.compressed_groups}
    if not compressing:
        raise GradlabError("no plan compresses anything: all steps are those of plain DDP")
    forecasts = {}
    for done, (name, plan) in enumerate(compressing.items()):
        forecasts[name] = forecast(plan, with_codec_time(network, replays.get(name)))
        if progress:
            progress("forecasts", done + 1, len(compressing))
    judged = {name: Judged.of(replays[name]) if name in replays else Judged() for name in compressing}
    configurations = tuple(
        _configuration(count, {name: item.nodes[i].links[j] for name, item in forecasts.items()}, judged, max_loss)
        for i, count in enumerate(network.nodes)
        for j in range(len(network.links))
    )
    return SpeedForecast(network, judged, forecasts, configurations, max_loss)


def with_codec_time(network: Network, replay: Replay | None) -> Network:
    """Take the codecs' time from a plan's replay, unless a run has measured it."""
    summary = None if replay is None else replay.summary()
    if replay is None or summary is None or not summary.codec_seconds or network.profile.codec is not None:
        return network
    source = f"median of the replay's {summary.compressed_steps} compressed steps on {replay.world_size} ranks"
    codec = CodecTime(summary.codec_seconds, replay.world_size, False, source, replay.nodes)
    return replace(network, profile=replace(network.profile, codec=codec))


def _configuration(
    nodes: int, comparisons: Mapping[str, Comparison], judged: Mapping[str, Judged], max_loss: float = MAX_LOSS
) -> Configuration:
    """Compare all plans with dense training, and find the fastest of all and of those allowed by `max_loss`."""
    seconds = {name: pair.compressed.seconds for name, pair in comparisons.items()}
    first = next(iter(comparisons.values()))
    dense = first.dense.seconds

    def fastest_of(names: Sequence[str]) -> tuple[str | None, float]:
        name = min(names, key=lambda name: seconds[name], default=None)
        saves = 1 - seconds[name] / dense if name is not None and dense > 0 else 0.0
        return (name, saves) if saves > SPEED_NOISE else (None, 0.0)

    fastest, fastest_saves = fastest_of(list(seconds))
    closest, closest_saves = fastest_of([name for name in seconds if judged[name].within(max_loss)])
    return Configuration(
        nodes=nodes,
        bits_per_second=first.link.bits_per_second,
        dense_seconds=dense,
        dense_way=first.dense_way,
        # Between nodes of several ranks, codec `cast` takes the place of PyTorch's 16 bits, and its time counts.
        half_seconds=seconds.get(HALF_PLAN, first.half.seconds) if first.ways else first.half.seconds,
        seconds=seconds,
        fastest=fastest,
        fastest_saves=fastest_saves,
        closest=closest,
        closest_saves=closest_saves,
    )


def _exchange_verdict(configurations: Sequence[Configuration]) -> str:
    parts = []
    for item in configurations:
        dense, half = format_seconds(item.dense_seconds), format_seconds(item.half_seconds)
        name = min(item.seconds, key=lambda name: item.seconds[name])
        parts.append(
            f"{item.where} the exchange alone takes {dense} ({half} in 16 bits), with {name} "
            f"{format_seconds(item.seconds[name])}"
        )
    text = "; ".join(parts)
    return (
        f"Whether compression pays cannot be told without the time of computing (--compute-seconds): {text}. "
        "Computing hides an unknown part of that."
    )
