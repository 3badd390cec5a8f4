"""Answer for several networks side by side: a table with a row for each, and three lines on all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gradlab.analysis.forecast.candidates import HALF_PLAN
from gradlab.analysis.forecast.decide import HALF, NOTHING, SPEED_NOISE
from gradlab.analysis.forecast.link import spell_rate
from gradlab.analysis.forecast.step_time import break_even
from gradlab.analysis.section import Table
from gradlab.formatting import format_counted, format_seconds

if TYPE_CHECKING:
    from gradlab.analysis.forecast.speed import SpeedForecast

# What a decision takes, in a few words.
TAKEN: Mapping[str, str] = {HALF: "plain 16 bits", NOTHING: "no compression"}


def networks_table(speed: SpeedForecast) -> Table:
    """Make the table: by network what to take, its step, those of 16 bits and of plain DDP, and what it costs in loss.

    The time of computing must be known.
    """
    rows = []
    for at, found in zip(speed.configurations, speed.decisions, strict=True):
        named = HALF_PLAN if found.take == HALF else found.plan
        judged = None if named is None else speed.judged.get(named)
        loss = "none" if named is None else "not judged" if judged is None else judged.known_text
        seconds = (found.seconds, at.half_seconds, at.dense_seconds)
        take = found.plan or TAKEN[found.take]
        rows.append([spell_rate(at.bits_per_second), str(at.nodes), take, *map(format_seconds, seconds), loss])
    columns = ["link", "nodes", "take", "step", "16-bit step", "dense step", "final loss"]
    title = "What to take on each link"
    if len(speed.network.nodes) == 1:
        title = f"What to take between {format_counted(speed.network.nodes[0], 'node')}"
        columns, *rows = ([row[0], *row[2:]] for row in (columns, *rows))
    note = f"Final loss: the range of 9 in 10 trainings with a similar error. Only plans with {speed.limit} are taken."
    return Table(title, columns, rows, note, text_columns=len(columns) - 4)


def networks_lines(speed: SpeedForecast) -> list[str]:
    """Say what to take where, what it costs, and at which link speeds that turns: a line each."""
    takes = "; ".join(_taken_between(count, speed) for count in speed.network.nodes)
    cost = speed.decisions[0].cost
    if taken := dict.fromkeys(one.plan for one in speed.decisions if one.plan is not None):
        ended = "; ".join(f"{name} {speed.judged[name].known_text}" for name in taken)
        cost = (
            f"Final loss in 9 of 10 trainings with a similar error: {ended}. Only plans with {speed.limit} are taken. "
            "Not tried on your task: gradlab pilot does."
        )
    return [f"{takes[:1].upper()}{takes[1:]}.", cost, *dict.fromkeys(one.break_even for one in speed.decisions)]


def _taken_between(count: int, speed: SpeedForecast) -> str:
    """Name what is taken between so many nodes, with the links that it is taken on."""
    links: dict[str, list[str]] = {}
    for at, found in zip(speed.configurations, speed.decisions, strict=True):
        if at.nodes == count:
            links.setdefault(found.plan or TAKEN[found.take], []).append(spell_rate(at.bits_per_second))
    where = "; ".join(f"{take} at {listed(rates)}" for take, rates in links.items())
    return f"between {format_counted(count, 'node')} take {where}"


def listed(words: Sequence[str]) -> str:
    """Write words as prose: "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def turns_text(compress: float, half: float) -> str:
    """Say below which link speeds to compress, and up to which to take 16 bits: see `turning_points`."""
    parts = []
    if compress:
        parts.append("compress at every speed tried" if math.isinf(compress) else f"compress below {_about(compress)}")
    if math.isinf(half) and half > compress:
        parts.append(f"take 16 bits {'above' if compress else 'at every speed tried'}")
    elif half > compress:
        parts.append(f"take 16 bits {'up to' if compress else 'below'} {_about(half)}")
    if 0 < max(compress, half) < math.inf:
        parts.append("do not compress above")
    text = ", ".join(parts) or "do not compress at any speed tried"
    return f"{text[:1].upper()}{text[1:]}."


def _about(rate: float) -> str:
    return f"about {spell_rate(float(f'{rate:.2g}'))}"


def turning_points(place: int, speed: SpeedForecast) -> tuple[float, float]:
    """Find the link speeds, in bits per second, below which plans are taken, and 16 bits: 0, at none; infinity, at all.

    place: position among the numbers of nodes.
    """
    nodes = {name: one.nodes[place] for name, one in speed.forecasts.items()}
    any_plan = next(iter(nodes.values()))

    def half_saves(rate: float) -> float:
        dense, half = any_plan.uncompressed_seconds(rate)
        return (1 - SPEED_NOISE) * dense - half

    half = break_even(half_saves) or 0.0
    # Where 16 bits save nothing, a plan has to be faster than the dense step alone.
    ends = [(nodes[name].half_break_even or 0.0, nodes[name].break_even or 0.0) for name in speed.allowed]
    return max((beside_half if beside_half < half else alone for beside_half, alone in ends), default=0.0), half
