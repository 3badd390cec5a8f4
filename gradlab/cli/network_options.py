"""Options of commands that forecast: numbers of nodes, and what a node is."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradlab.errors import GradlabError

if TYPE_CHECKING:
    from gradlab.analysis.forecast.profile import Profile
    from gradlab.analysis.forecast.simulator import Node

_LONG = 10.0  # seconds of computing from which a number without a unit is asked about
LocalRanks = Annotated[int, typer.Option(help="Ranks per node, which share its one link to the others.")]
Latency = Annotated[str, typer.Option(help="One-way latency between two nodes: 50us, 1ms.")]
ComputeSeconds = Annotated[str | None, typer.Option(help="A training step without gradient exchange: 0.36s, 120ms.")]
TimedRun = Annotated[
    Path | None, typer.Option(metavar="RUN.json", help="A compressed run's report, which has that time.")
]
InsideLink = Annotated[str, typer.Option(help="Speed of each rank's link inside its node, where it has several.")]

MaxLoss = Annotated[
    str,
    typer.Option(
        "--max-loss", metavar="PERCENT", help="By how much the final loss may be above dense training's, at most: 1%."
    ),
]
MAX_LOSS_TEXT = "1%"  # `gradlab.analysis.forecast.endings.MAX_LOSS`, which a test compares


def node_of(local_ranks: int, inside: str, *, fsdp: bool = False) -> Node | None:
    """Read what a node is from its number of ranks and the speed of their links. None: one rank per node.

    Raises:
        GradlabError: for fewer than one rank, shards of one rank, or what is no speed.
    """
    from gradlab.analysis.forecast.link import Link, parse_bandwidth
    from gradlab.analysis.forecast.simulator import BETWEEN, SHARDS, Node

    link = Link(parse_bandwidth(inside))
    if fsdp and local_ranks == 1:
        raise GradlabError("--fsdp: parameters are sharded among a node's ranks; name them, such as --local-ranks 8")
    return None if local_ranks == 1 else Node(local_ranks, link, SHARDS if fsdp else BETWEEN)


def profile_of_step(run: Path | None, compute_seconds: str | None) -> Profile:
    """Take the time of computing from an option, or from a run's report; `NOT_MEASURED` from neither.

    Args:
        run: the report's file.
        compute_seconds: of a step without gradient exchange, such as 0.36s.

    Raises:
        GradlabError: for a report that has no such time, and for what is no time.
    """
    from gradlab.analysis.forecast.profile import NOT_MEASURED, Profile, compute_seconds_of

    if compute_seconds is not None:
        return Profile(computing_seconds(compute_seconds), "as given")
    return Profile(compute_seconds_of(run), f"the run {run}") if run is not None else NOT_MEASURED


def computing_seconds(text: str) -> float:
    """Read the time of computing of a step, and warn of a large number without a unit: milliseconds may be meant.

    Raises:
        GradlabError: for what is no time.
    """
    from gradlab.analysis.forecast.link import parse_seconds

    seconds = parse_seconds(text)
    if seconds >= _LONG and text.strip().isdecimal():
        warnings.warn(f"--compute-seconds {text.strip()} is {seconds:g} seconds a step", stacklevel=2)
    return seconds


def share_of_loss(text: str) -> float:
    """Read --max-loss: "1%" or "0.01".

    Raises:
        GradlabError: for what is no share.
    """
    number, percent, rest = text.strip().partition("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = float("nan")
    if rest or not 0 <= share < 10:
        raise GradlabError(f"--max-loss {text[:80]}: expected a share of the loss such as 1% or 0.01")
    return share


def node_counts(text: str) -> list[int]:
    """Read numbers of nodes from a text such as "4,64,1024".

    Raises:
        GradlabError: for anything but whole numbers with commas between them.
    """
    if "x" in text:
        raise GradlabError(f"nodes {text[:80]!r}: expected numbers of nodes alone; ranks of a node are --local-ranks")
    return whole_numbers(text, "nodes", "4,64,1024", least=0)  # 0 is refused with all else of a network


def whole_numbers(text: str, what: str, example: str, least: int = 1) -> list[int]:
    """Read whole numbers up to 10^9 from a text.

    Args:
        text: numbers with commas between them.
        what: they are, for errors.
        example: of such a text.
        least: of the numbers.

    Returns:
        The numbers.

    Raises:
        GradlabError: for anything else.
    """
    words = text.split(",")
    for word in words:
        if not word.strip().isdecimal() or not least <= int(word[:20]) <= 10**9:
            raise GradlabError(f"{what} {word[:80]!r}: expected whole numbers from 1, such as {example}")
    return [int(word) for word in words]
