"""Options that several commands have, and how their texts are read."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradlab.errors import GradlabError

if TYPE_CHECKING:
    from gradlab.analysis.forecast.link import Link
    from gradlab.analysis.forecast.network import Profile
    from gradlab.analysis.forecast.processors import Processor
    from gradlab.analysis.forecast.simulator import Node
    from gradlab.trace import Trace
    from gradlab.trace.times import RecordedTimes

_LONG = 10.0  # seconds of computing from which a number without a unit is questioned
MAX_LOSS_TEXT = "1%"  # `gradlab.analysis.forecast.endings.MAX_LOSS`, which a test compares

TraceFolder = Annotated[Path, typer.Argument(metavar="DIR", help="The trace's folder.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="NAME=VALUE", help="One of the settings that this help lists; repeatable."),
]
SharedBy = Annotated[
    str | None,
    typer.Option(
        "--workers",
        metavar="N",
        help="Number of processes that share the work; default: as many as cores, at most 4.",
    ),
]
AverageRanks = Annotated[
    int,
    typer.Option(
        metavar="L",
        help="Number of recorded ranks that make a node. Each L successive ranks are averaged, and the trace is taken "
        "as a recording of the nodes.",
    ),
]
Plans = Annotated[
    list[Path] | None, typer.Option("--plan", metavar="ARTIFACT", help="Another plan to judge; repeatable.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Report = Annotated[Path, typer.Option("--out", metavar="REPORT", help="Folder for report.html, report.json, figures.")]
Latency = Annotated[str, typer.Option(help="One-way latency between two nodes: 50us, 1ms.")]
ComputeSeconds = Annotated[
    str | None,
    typer.Option(
        metavar="SECONDS|RUN|TRACE",
        help="A training step without gradient exchange: 0.36s, a compressed run's report, RUN.json, or a recording. "
        "[default: as recorded]",
    ),
]
InsideLink = Annotated[str, typer.Option(help="Speed of each rank's link inside its node, where it has several.")]
MaxLoss = Annotated[
    str,
    typer.Option(metavar="PERCENT", help="The most by which the final loss may be above dense training's: 1%."),
]


def workers_of(text: str | None) -> int:
    """Read the number of processes that share the work: by default as many as cores, at most 4."""
    from gradlab.analysis.parallel import default_workers

    if text is None:
        return default_workers()
    if not text.isdecimal() or int(text) < 1:
        raise GradlabError(f"--workers {text[:80]}: expected a number from 1")
    return int(text)


def links_of(rates: str, latency: str) -> list[Link]:
    """Read link speeds with commas between them, or a name that ends with .json, a file of `gradlab doctor`.

    Raises:
        GradlabError: if an item is empty or of no speed, two are of the same speed, or one of several is a file.
    """
    from gradlab.analysis.forecast.diagnosis import read_link
    from gradlab.analysis.forecast.link import Link, parse_bandwidth, parse_seconds, spell_rate

    delay, words = parse_seconds(latency), [word.strip() for word in rates.split(",")]
    if not all(words):
        raise GradlabError(f"--bandwidth {rates[:80]!r}: an item is empty, expected link speeds such as 100mbit,1gbit")
    if len(words) > 1 and any(word.endswith(".json") for word in words):
        raise GradlabError(f"--bandwidth {rates[:80]!r}: a measured link has costs of its own: ask about it alone")
    links = [read_link(word) if word.endswith(".json") else Link(parse_bandwidth(word), delay) for word in words]
    spelled = [spell_rate(link.bits_per_second) for link in links]
    for rate in spelled:
        if spelled.count(rate) > 1:
            raise GradlabError(f"--bandwidth {rates[:80]!r}: {rate} is named twice, expected each link speed once")
    return links


def processor_of(rates: str) -> Processor | None:
    """Read the processor that codecs will run on from the file of `gradlab doctor` among link speeds, if one is."""
    from gradlab.analysis.forecast.diagnosis import read_processor

    found = [read_processor(word) for word in map(str.strip, rates.split(",")) if word.endswith(".json")]
    return found[0] if found else None


def nodes_of(text: str, inside: str, *, fsdp: bool = False, over_nodes: bool = False) -> tuple[list[int], Node | None]:
    """Read "8", "4,64" or "4x8,64x8": numbers of nodes, and what a node of several ranks is. over_nodes: whether
    FSDP2 may shard over nodes of one rank."""
    from gradlab.analysis.forecast.link import Link, parse_bandwidth
    from gradlab.analysis.forecast.simulator import BETWEEN, SHARDS, Node

    counts, ranks = _counts_and_ranks(text)
    link = Link(parse_bandwidth(inside))
    if fsdp and ranks == 1 and not (over_nodes and min(counts) > 1):
        raise GradlabError("FSDP2: parameters are sharded among a node's ranks; name them, such as --nodes 8x8")
    return counts, None if ranks == 1 else Node(ranks, link, SHARDS if fsdp else BETWEEN)


def _counts_and_ranks(text: str) -> tuple[list[int], int]:
    words = [word.strip().lower() for word in text.split(",")]
    if not all(re.fullmatch(r"\d{1,10}(x\d{1,10})?", word) for word in words):
        raise GradlabError(
            f"--nodes {text[:80]!r}: expected numbers of nodes, such as 8 or 4,64, or 8x8 with their ranks"
        )
    pairs = [word.partition("x") for word in words]
    [ranks, *others] = dict.fromkeys(int(ranks or 1) for _, _, ranks in pairs)
    if others or ranks < 1:
        raise GradlabError(f"--nodes {text[:80]!r}: expected nodes of one number of ranks from 1, such as 2x8,4x8")
    return [int(nodes) for nodes, _, _ in pairs], ranks


def counts_of(text: str, option: str) -> list[int]:
    """Read numbers from 1 with commas between them: "8", "4,64"."""
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"0*[1-9]\d{0,5}", word) for word in words):
        raise GradlabError(f"{option} {text[:80]!r}: expected numbers from 1 with commas between them, such as 2,8,64")
    return [int(word) for word in words]


def profile_of_step(text: str | None, trace: Trace) -> Profile:
    """Take the time of computing from a text such as 0.36s, a run's report or a recording, else from the trace at hand;
    `NOT_MEASURED` if that has none."""
    from gradlab.analysis.forecast.network import NOT_MEASURED, Profile, compute_seconds_of

    if text is None:
        return NOT_MEASURED if trace.times is None else Profile.as_recorded(trace.times)
    if run := run_of(text):
        return Profile(compute_seconds_of(run), f"the run {run}")
    if recorded := recorded_times_of(text):
        return Profile.as_recorded(recorded)
    return Profile(computing_seconds(text), "as given")


def recorded_times_of(text: str | None) -> RecordedTimes | None:
    """The times of the recording that --compute-seconds names; None: it names none."""
    from gradlab.trace import Trace

    if text is None or not Path(text).is_dir():
        return None
    with Trace(text) as trace:
        if trace.times is None:
            raise GradlabError(f"{text}: its steps were not timed, as emulated ranks' are not; give a time: 0.36s")
        return trace.times


def run_of(text: str | None) -> Path | None:
    """The run's report that --compute-seconds names; None: it is a time."""
    return Path(text) if text is not None and text.endswith(".json") else None


def computing_seconds(text: str) -> float:
    """Read the time of computing of a step, and warn of a large number without a unit: milliseconds may be meant."""
    from gradlab.analysis.forecast.link import parse_seconds

    seconds = parse_seconds(text)
    if seconds >= _LONG and text.strip().isdecimal():
        warnings.warn(f"--compute-seconds {text.strip()} is {seconds:g} seconds a step", stacklevel=2)
    return seconds


def share_of_loss(text: str) -> float:
    """Read --max-loss: "1%" or "0.01"."""
    number, percent, rest = text.strip().partition("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = float("nan")
    if rest or not 0 <= share < 10:
        raise GradlabError(f"--max-loss {text[:80]}: expected a share of the loss such as 1% or 0.01")
    return share
