"""Forecast the speed of several plans on one's own network, beside the direction that their replays keep.

Speed alone decides nothing: a plan is proposed only if its replayed update keeps a cosine of at least 0.5 with the
true mean. The cosine orders methods much as training does (docs/comparison.md). Where to draw the line is a
convention. A plan that is faster but below the line is named with its cosine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gradlab.analysis.forecast.link import json_rate, spell_rate
from gradlab.analysis.forecast.network import Network
from gradlab.analysis.forecast.plans import SPEED_NOISE, Forecast, forecast
from gradlab.analysis.forecast.profile import NOT_MEASURED, CodecTime
from gradlab.analysis.forecast.step_time import Comparison
from gradlab.errors import GradlabError
from gradlab.formatting import format_percent, format_seconds
from gradlab.jsonable import Jsonable, plain
from gradlab.layout import Layer
from gradlab.plan import Plan, named_plan
from gradlab.progress import Progress

if TYPE_CHECKING:
    from gradlab.analysis.replay.result import Replay

# Of an update with the true mean. On nanoGPT (docs/text.md) plans with CLOSE_COSINE or more trained like dense; those
# between the two ended 3 to 6 % above it after 2,000 iterations.
LEAST_COSINE, CLOSE_COSINE = 0.5, 0.95
# By name, a codec or a published method of `gradlab.plan.recipes`, with settings: one of each kind, none of which needs
# a fit.
USUAL: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "16-bit floats": ("cast", {"dtype": "float16"}),
    "int8": ("block_scaled", {"dtype": "int8"}),
    "QSGD 4 bits, max norm": ("QSGD, max norm", {"bits": 4}),
    "1-bit SGD": ("1-bit SGD", {}),
    "PowerSGD rank 4": ("PowerSGD", {"rank": 4}),
    "top-k 1 %": ("topk", {"density": 0.01}),
    "signs, both ways": ("sign", {}),
}


def usual_plans(layers: Sequence[Layer]) -> dict[str, Plan]:
    """Make one plan of each kind for a model, as a first look. Kinds that find no layer to compress are left out.

    Args:
        layers: the model's.

    Returns:
        Plans by name.
    """
    plans = {}
    for name, (method, settings) in USUAL.items():
        try:
            plan = named_plan(tuple(layers), method, **settings)
        except GradlabError:  # no layer large enough
            continue
        if plan.compressed_groups:
            plans[name] = plan
    return plans


@dataclass(frozen=True)
class Configuration(Jsonable):
    """All plans at one number of nodes on one link.

    nodes: number of nodes.
    bits_per_second: the link's speed.
    dense_seconds: the fastest dense step.
    dense_way: its name; plain DDP's with one rank per node.
    half_seconds: the fastest one with gradients reduced in 16 bits.
    seconds: each plan's step, by name.
    best, best_seconds: the fastest of the plans that keep the direction, and its step. None: no plan keeps it.
    saved: the share of the dense step that the best plan saves; 0 without one.
    pays: whether that share is above `SPEED_NOISE`.
    closest, closest_saves: the fastest of the plans with a cosine of `CLOSE_COSINE` or more, and the share that it
        saves; None and 0 without one.
    fastest, fastest_saves: the fastest of all plans, and the share that it saves.
    """

    nodes: int
    bits_per_second: float
    dense_seconds: float
    dense_way: str
    half_seconds: float
    seconds: Mapping[str, float]
    best: str | None
    best_seconds: float | None
    saved: float
    pays: bool
    closest: str | None
    closest_saves: float
    fastest: str
    fastest_saves: float

    @property
    def no_faster_than_16_bits(self) -> bool:
        """Whether the best plan's step is no shorter, but for `SPEED_NOISE`, than with plain 16-bit reduction."""
        return self.best_seconds is None or self.best_seconds >= (1 - SPEED_NOISE) * self.half_seconds

    @property
    def where(self) -> str:
        """Link speed and nodes in prose: "at 1 Gbit/s between 8 nodes"."""
        return f"at {spell_rate(self.bits_per_second)} between {self.nodes} nodes"

    def to_json(self) -> dict[str, Any]:
        """Write every field. An infinite speed is the text "unlimited".

        Returns:
            Plain JSON.
        """
        return {**super().to_json(), "bits_per_second": json_rate(self.bits_per_second)}


@dataclass(frozen=True)
class SpeedForecast:
    """Forecasts of several plans on one network.

    network: what the forecasts are made for.
    cosines: of each replayed plan's update with the true mean, by name. None: not known.
    forecasts: by the plan's name.
    configurations: every number of nodes with every link, the links of the first number of nodes first.
    """

    network: Network
    cosines: Mapping[str, float | None]
    forecasts: Mapping[str, Forecast]
    configurations: tuple[Configuration, ...]

    @property
    def compute_seconds(self) -> float | None:
        """Seconds of a step without gradient exchange. None: not measured, so that steps are the exchange alone."""
        profile = self.network.profile
        return None if profile == NOT_MEASURED else profile.compute_seconds

    def to_json(self) -> dict[str, Any]:
        """Write everything as plain JSON: times in seconds, sizes in bytes.

        Returns:
            Plain JSON.
        """
        return {
            "compute_seconds": self.compute_seconds,
            "compute_source": self.network.profile.compute_source,
            "nodes": list(self.network.nodes),
            "links": [json_rate(link.bits_per_second) for link in self.network.links],
            "cosines": plain(self.cosines),
            "least_cosine": LEAST_COSINE,
            "forecasts": plain(self.forecasts),
            "places": plain(self.configurations),
        }

    @property
    def verdict(self) -> str:
        """A report's first line: where which plan pays, and where not to compress."""
        if self.compute_seconds is None:
            return _exchange_verdict(self.configurations)
        losing = [item for item in self.configurations if not item.pays]
        parts = [
            f"{item.where}, {item.best} saves {format_percent(item.saved, 0)} of a step "
            f"({format_seconds(item.best_seconds)} instead of {format_seconds(item.dense_seconds)}, or "
            f"{format_seconds(item.half_seconds)} in plain 16-bit reduction"
            f"{', which is about as fast or faster' if item.no_faster_than_16_bits else ''}; its update's "
            f"cosine with the true mean is {self.cosines[str(item.best)]:.2f} as replayed){self._careful(item)}"
            for item in self.configurations
            if item.pays
        ]
        if losing:
            parts.append(
                f"{_where(losing)} do not compress: no plan whose update keeps a cosine of {LEAST_COSINE} with the "
                f"true mean saves more than 5 %{_refused(losing, self.cosines)}"
            )
        text = "; ".join(parts) + "."
        return text[:1].upper() + text[1:]

    def _careful(self, item: Configuration) -> str:
        """Name the plan that keeps close to the true mean, where the fastest does not and this one pays."""
        if item.closest in (None, item.best) or item.closest_saves <= SPEED_NOISE:
            return ""
        return f", and {item.closest} {format_percent(item.closest_saves, 0)} at {self.cosines[str(item.closest)]:.2f}"


def forecast_speed(
    plans: Mapping[str, Plan], replays: Mapping[str, Replay], network: Network, *, progress: Progress | None = None
) -> SpeedForecast:
    """Forecast each plan on a network, and find the best plan of each configuration.

    Args:
        plans: by name. Those that compress nothing are left out.
        replays: of some or all of the plans, by name. A plan without one is never the best. A plan's codec time is that
            of its replay, so that a report has one; without a replay the codecs are timed here.
        network: the links and numbers of nodes to forecast for, and the computing time.
        progress: called after each plan.

    Returns:
        The forecasts, and the best plan of each configuration.

    Raises:
        GradlabError: if no plan compresses anything.
    """
    compressing = {name: plan for name, plan in plans.items() if plan.compressed_groups}
    if not compressing:
        raise GradlabError("no plan compresses anything: all steps are those of plain DDP")
    forecasts = {}
    for done, (name, plan) in enumerate(compressing.items()):
        forecasts[name] = forecast(plan, _with_codec_time(network, replays.get(name)))
        if progress:
            progress("forecasts", done + 1, len(compressing))
    cosines = {name: replays[name].summary().cosine for name in compressing if name in replays}
    configurations = tuple(
        _configuration(count, {name: item.nodes[i].links[j] for name, item in forecasts.items()}, cosines)
        for i, count in enumerate(network.nodes)
        for j in range(len(network.links))
    )
    return SpeedForecast(network, cosines, forecasts, configurations)


def _with_codec_time(network: Network, replay: Replay | None) -> Network:
    """Take the codecs' time from a plan's replay, unless a run has measured it."""
    summary = None if replay is None else replay.summary()
    if replay is None or summary is None or not summary.codec_seconds or network.profile.codec is not None:
        return network
    source = f"median of the replay's {summary.compressed_steps} compressed steps on {replay.world_size} ranks"
    codec = CodecTime(summary.codec_seconds, replay.world_size, False, source)
    return replace(network, profile=replace(network.profile, codec=codec))


def _configuration(
    nodes: int, comparisons: Mapping[str, Comparison], cosines: Mapping[str, float | None]
) -> Configuration:
    """Compare all plans with dense training, and find the fastest of those that keep the direction."""
    seconds = {name: pair.compressed.seconds for name, pair in comparisons.items()}
    first = next(iter(comparisons.values()))
    dense = first.dense.seconds

    def fastest_of(cosine: float) -> str | None:
        keeping = [name for name in seconds if (cosines.get(name) or 0.0) >= cosine]
        return min(keeping, key=lambda name: seconds[name], default=None)

    def saved_by(name: str | None) -> float:
        return 1 - seconds[name] / dense if name is not None and dense > 0 else 0.0

    best, closest = fastest_of(LEAST_COSINE), fastest_of(CLOSE_COSINE)
    fastest = min(seconds, key=lambda name: seconds[name])
    return Configuration(
        nodes=nodes,
        bits_per_second=first.link.bits_per_second,
        dense_seconds=dense,
        dense_way=first.dense_way,
        half_seconds=first.half.seconds,
        seconds=seconds,
        best=best,
        best_seconds=seconds[best] if best is not None else None,
        saved=saved_by(best),
        pays=saved_by(best) > SPEED_NOISE,
        closest=closest,
        closest_saves=saved_by(closest),
        fastest=fastest,
        fastest_saves=saved_by(fastest),
    )


def _where(configurations: Sequence[Configuration]) -> str:
    """List speeds by number of nodes: "at 1 Gbit/s and 25 Gbit/s between 8 nodes"."""
    speeds: dict[int, list[str]] = {}
    for item in configurations:
        speeds.setdefault(item.nodes, []).append(spell_rate(item.bits_per_second))
    return ", ".join(
        f"at {' and '.join(rates)} between {count} node{'s' * (count != 1)}" for count, rates in speeds.items()
    )


def _refused(configurations: Sequence[Configuration], cosines: Mapping[str, float | None]) -> str:
    """Name the plan that would save most, if its update loses the direction."""
    most = max(configurations, key=lambda item: item.fastest_saves)
    if most.fastest_saves <= SPEED_NOISE:
        return ""
    cosine = cosines.get(most.fastest)
    known = "unknown" if cosine is None else f"{cosine:.2f}"
    return f" ({most.fastest} would save {format_percent(most.fastest_saves, 0)}, at a cosine of {known})"


def _exchange_verdict(configurations: Sequence[Configuration]) -> str:
    parts = []
    for item in configurations:
        dense, half = format_seconds(item.dense_seconds), format_seconds(item.half_seconds)
        line = f"{item.where} the exchange alone takes {dense} ({half} in 16 bits)"
        if item.best is None:
            parts.append(f"{line}, and no plan keeps the direction")
        else:
            parts.append(f"{line}, with {item.best} {format_seconds(item.best_seconds)}")
    text = "; ".join(parts)
    return (
        f"Whether compression pays cannot be told without the time of computing (--compute-seconds or --run): {text}. "
        "What of it computing hides is not known."
    )
