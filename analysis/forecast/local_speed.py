"""Forecast local steps of several plans on one's own network: how many to take, and which plan to send them by.

The plans are those of `gradlab.analysis.forecast.speed`, and so is the rule that chooses among them: any whose similar
methods ended within the allowed loss of dense (--max-loss) will do, and uncompressed training always does. The fewest
local steps are taken at which one of these waits for at most a tenth of a step, none if synchronous training does. The
plan with the least error is taken among those that then do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradlab.analysis.forecast.link import json_rate, spell_rate
from gradlab.analysis.forecast.local_endings import CODED, UNCOMPRESSED, ended_above
from gradlab.analysis.forecast.local_steps import LocalSteps, forecast_local_steps
from gradlab.analysis.forecast.network import Network
from gradlab.analysis.forecast.plans import forecast
from gradlab.analysis.forecast.speed import Configuration, Judged, SpeedForecast, caution_lines
from gradlab.formatting import format_counted, format_percent, format_seconds
from gradlab.layout import Layer
from gradlab.plan import Plan
from gradlab.progress import Progress

NUMBERS = (1, 8, 30, 100)
MOST_WAITING = 0.1  # of a step


@dataclass(frozen=True)
class LocalConfiguration:
    """All plans at one number of nodes on one link, and the plan to take.

    plans: times by the plan's name, those of `UNCOMPRESSED` first.
    local_steps: how many to take between two exchanges, H; 0: none, as synchronous training waits little.
    judged: the plan's judgement by its replay; None: `UNCOMPRESSED`.
    """

    nodes: int
    bits_per_second: float
    plans: Mapping[str, LocalSteps]
    plan: str
    local_steps: int
    judged: Judged | None

    @property
    def where(self) -> str:
        """Link speed and nodes in prose: "at 1 Gbit/s between 8 nodes"."""
        return f"at {spell_rate(self.bits_per_second)} between {format_counted(self.nodes, 'node')}"

    @property
    def advice(self) -> str:
        """In prose, whether to take local steps here, how many, and with which plan."""
        times, plan = self.plans[self.plan], self.plan if self.plan == UNCOMPRESSED else f"with {self.plan}"
        every_step, keeps = format_percent(times.waits(0), 0), "" if self.judged is None else f"; {self.judged.text}"
        if not self.local_steps:
            return (
                f"{self.where} take no local steps: synchronous training, {plan}, waits {every_step} of a step{keeps}"
            )
        return (
            f"{self.where} take H = {self.local_steps} local steps, {plan}: an exchange takes "
            f"{format_seconds(times.exchange)}, and waiting is {format_percent(times.waits(self.local_steps), 0)} of a "
            f"step, in place of {every_step} with an exchange in every step{keeps}"
        )

    def to_json(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Write the times of every plan, in seconds, and what to take, as plain JSON. numbers: of local steps, H."""
        return {
            "nodes": self.nodes,
            "bits_per_second": json_rate(self.bits_per_second),
            "plan": self.plan,
            "local_steps": self.local_steps,
            "plans": {
                name: {**times.to_json(numbers), "least": times.least(MOST_WAITING)}
                for name, times in self.plans.items()
            },
        }


@dataclass(frozen=True)
class LocalSpeed:
    """Local steps of several plans on one network.

    recorded: local steps that a recorded pseudo-gradient adds up, H; None: gradients of single steps were recorded.
    configurations: numbers of nodes with links. For recorded gradients those alone on which every plan waits too long.
    """

    recorded: int | None
    configurations: tuple[LocalConfiguration, ...]
    cautions: tuple[str, ...] = ()

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of local steps to show, ascending: `NUMBERS` and the recorded one."""
        return tuple(sorted({*NUMBERS, *([self.recorded] if self.recorded else [])}))

    @property
    def verdict(self) -> str:
        """How many local steps to take on each link, and with which plan."""
        if self.recorded is None:
            return self._next_thing
        text = "; ".join(item.advice for item in self.configurations)
        above = ended_above()
        costs = (
            f"Errors of plans are known at the recorded H = {self.recorded} alone, and every local step costs accuracy "
            f"of its own: our trainings ended {ended_text(above)}"
        )
        most = max(above)
        beyond = f"; more than {most} were not tried" if self._most > most else ""
        return " ".join([f"{text[:1].upper()}{text[1:]}. {costs}{beyond}.", *self.cautions])

    @property
    def _most(self) -> int:
        return max(item.local_steps for item in self.configurations)

    @property
    def _next_thing(self) -> str:
        each = ", ".join(f"{item.where} from H = {item.local_steps} on ({item.plan})" for item in self.configurations)
        return (
            f"Where no plan brings waiting to {format_percent(MOST_WAITING, 0)} of a step, local steps are the next "
            f"thing to try: by forecast they bring it there {each}. `EmulatedNodes` records their "
            "pseudo-gradients (docs/local-steps.md), on which plans lose another share than on these gradients, and "
            "`OuterStep` trains so."
        )

    def to_json(self) -> dict[str, Any]:
        """Write everything as plain JSON: times in seconds."""
        return {
            "recorded": self.recorded,
            "numbers": list(self.numbers),
            "most_waiting": MOST_WAITING,
            "places": [item.to_json(self.numbers) for item in self.configurations],
        }


def forecast_local_speed(
    plans: Mapping[str, Plan], speed: SpeedForecast, recorded: int | None, *, progress: Progress | None = None
) -> LocalSpeed | None:
    """Forecast local steps, for recorded gradients only if plans wait; None: no computing time, or no need."""
    shown = [item for item in speed.configurations if recorded is not None or _all_wait(item, speed.compute_seconds)]
    if speed.compute_seconds is None or not shown:
        return None
    chosen = speed.allowed
    names = list(speed.forecasts) if recorded is not None else chosen or list(speed.forecasts)[:1]
    by_plan = {}
    for done, name in enumerate(names):
        synchronous = speed.forecasts[name]
        by_plan[name] = forecast_local_steps(plans[name], synchronous.network, synchronous)
        if progress:
            progress("local steps", done + 1, len(names))
    return LocalSpeed(
        recorded,
        tuple(
            _configuration({name: times[index] for name, times in by_plan.items()}, chosen, speed.judged)
            for index, item in enumerate(speed.configurations)
            if item in shown
        ),
        tuple(caution_lines(speed.judged.values())),
    )


def advise_local_steps(
    layers: Sequence[Layer], network: Network, every: int | None = None
) -> tuple[LocalConfiguration, Plan]:
    """Advise local steps on a network of one link: H, and the plan.

    Args:
        layers: the model's.
        network: one number of nodes, one link, and the time of computing.
        every: H; None: the fewest at which a worker waits for at most a tenth of a step, with plain DDP 0.

    Returns:
        What to take, and its plan: uncompressed unless that waits longer.
    """
    coded = Plan.uniform(layers, "ecsq", bits=0.5, exchanges="pseudo-gradients")
    [one] = forecast_local_steps(coded, network, forecast(coded, network))
    # Without local steps gradients are sent as they are.
    times = {UNCOMPRESSED: one.uncompressed, CODED: replace(one, compressed=one.dense)}
    fewest = {name: _fewest(one) if every is None else every for name, one in times.items()}
    waits = {name: max(MOST_WAITING, one.waits(fewest[name])) for name, one in times.items()}
    plan = min(times, key=lambda name: (fewest[name], waits[name]))  # the first of several that are alike
    best = LocalConfiguration(one.nodes, one.bits_per_second, times, plan, fewest[plan], None)
    return best, Plan(tuple(layers)) if plan == UNCOMPRESSED else coded


def ended_text(above: Mapping[int, float]) -> str:
    """Say how trainings ended: "0.02 with H = 8 nats above synchronous ones". above: nats by H."""
    ended = ", ".join(f"{nats:.2f} with H = {every}" for every, nats in above.items())
    return f"{ended} nats above synchronous ones (docs/local-steps.md)"


def _all_wait(item: Configuration, compute: float | None) -> bool:
    """Whether on this link every synchronous step, in 32 or 16 bits or through a plan, waits too long."""
    fastest = min(item.dense_seconds, item.half_seconds, *item.seconds.values())
    return compute is not None and compute < (1 - MOST_WAITING) * fastest


def _configuration(
    times: Mapping[str, LocalSteps], names: Iterable[str], judged: Mapping[str, Judged]
) -> LocalConfiguration:
    """Choose among `names` and uncompressed training: the fewest local steps, then the plan that stands best."""
    first = next(iter(times.values()))
    plans = {UNCOMPRESSED: first.uncompressed, **times}
    fewest = {name: _fewest(plans[name]) for name in (UNCOMPRESSED, *names)}
    least = min(fewest.values())
    standing = {name: judged[name].standing if name in judged else (-math.inf, 0.0) for name in fewest}
    plan = min((name for name in fewest if fewest[name] == least), key=lambda name: standing[name])
    return LocalConfiguration(first.nodes, first.bits_per_second, plans, plan, least, judged.get(plan))


def _fewest(times: LocalSteps) -> int:
    """The fewest local steps at which waiting is short; 0: it is so in synchronous training."""
    return 0 if times.waits(0) <= MOST_WAITING else times.least(MOST_WAITING)
