"""What a plan is worth over nodes and link speeds: step times beside plain DDP's, break-even, and a verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gradlab.analysis.forecast.calibration import Calibration
from gradlab.analysis.forecast.dry_run import DryRuns, one_thread, scan_seconds_per_byte
from gradlab.analysis.forecast.link import Link, format_rate
from gradlab.analysis.forecast.profile import Profile
from gradlab.analysis.forecast.step_time import Comparison, Job, break_even, compare, make_job
from gradlab.analysis.replay import methods_of, refresh_remark
from gradlab.errors import GradlabError
from gradlab.formatting import format_ratio, format_seconds
from gradlab.jsonable import plain
from gradlab.plan import Plan
from gradlab.progress import Progress

# A step must be shorter by this share before it is called faster.
SPEED_NOISE = 0.05
# More than one coroutine's fabricated answers should hold.
MOST_NODES = 16384
# From here on a ring's latencies are worth a word.
_FEW_NODES = 16
_ALL_REDUCES = {
    "tree": "over two binary trees, as NCCL's may (bytes: the busiest rank's)",
    "server": "by way of a server on every rank",
}
_CURVE_POINTS, _CURVE_SPAN = 61, 30.0


@dataclass(frozen=True)
class NodeForecast:
    """A plan at one number of nodes: one comparison per link speed asked for.

    break_even: bits per second from which on plain DDP is as fast; None: at every speed; infinity: at none. curve: the
    two steps over link speed, for a figure.
    """

    job: Job
    links: tuple[Comparison, ...]
    break_even: float | None
    curve: tuple[Comparison, ...]

    def to_json(self) -> dict[str, Any]:
        """Seconds, bytes and bits per second; a break-even of infinity is the text "unlimited"."""
        endless = self.break_even is not None and math.isinf(self.break_even)
        return {
            "nodes": self.job.world_size,
            "codec_seconds": self.job.codec_seconds,
            "engine_seconds": self.job.engine_seconds,
            "break_even_bits_per_second": "unlimited" if endless else self.break_even,
            "links": [_comparison_json(found) for found in self.links],
            "curve": {
                "bits_per_second": [found.link.bits_per_second for found in self.curve],
                "compressed": [found.compressed.seconds for found in self.curve],
                "dense": [found.dense.seconds for found in self.curve],
            },
        }


def _comparison_json(found: Comparison) -> dict[str, Any]:
    speed = found.link.bits_per_second
    return {
        "bits_per_second": "unlimited" if math.isinf(speed) else speed,
        "speedup": found.speedup,
        "compressed": asdict(found.compressed),
        "dense": asdict(found.dense),
    }


@dataclass(frozen=True)
class Forecast:
    """All of it, and what to beware of. calibration: what the links' costs were fitted to, if they were."""

    method: str
    profile: Profile
    nodes: tuple[NodeForecast, ...]
    remarks: tuple[str, ...]
    calibration: Calibration | None = None

    @property
    def comparisons(self) -> list[tuple[int, Comparison]]:
        """Every number of nodes with every link speed asked for."""
        return [(node.job.world_size, found) for node in self.nodes for found in node.links]

    @property
    def verdict(self) -> str:
        """Whether compression pays, where it was asked for; what does not pay is said first."""
        pays = [pair for pair in self.comparisons if pair[1].speedup > 1 / (1 - SPEED_NOISE)]
        losing = [pair for pair in self.comparisons if pair not in pays]
        if not losing:
            worst = min(pays, key=lambda pair: pair[1].speedup)
            return f"Compression pays in time: at least {_sentence(*worst)}."
        if not pays:
            best = max(losing, key=lambda pair: pair[1].speedup)
            return f"Compression does not pay: at best {_sentence(*best)}."
        best = max(pays, key=lambda pair: pair[1].speedup)
        return (
            f"Compression does not pay everywhere: not {_places(losing)}. It does elsewhere, at best "
            f"{_sentence(*best)}."
        )

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain JSON: times in seconds, sizes in bytes."""
        found = {
            "verdict": self.verdict,
            "method": self.method,
            "profile": asdict(self.profile),
            "nodes": [node.to_json() for node in self.nodes],
            "link": {key: value for key, value in asdict(self._link).items() if key != "bits_per_second"},
            "calibration": self.calibration.to_json() if self.calibration else None,
            "warnings": list(self.remarks),
        }
        return dict(plain(found))

    @property
    def _link(self) -> Link:
        return self.nodes[0].links[0].link


def _where(nodes: int, *rates: float) -> str:
    speeds = ", ".join(format_rate(rate) for rate in rates)
    return f"at {nodes} node{'s' * (nodes != 1)} over {speeds}"


def _places(pairs: Sequence[tuple[int, Comparison]]) -> str:
    rates: dict[int, list[float]] = {}
    for nodes, found in pairs:
        rates.setdefault(nodes, []).append(found.link.bits_per_second)
    return "; ".join(_where(nodes, *speeds) for nodes, speeds in rates.items())


def _sentence(nodes: int, found: Comparison) -> str:
    return (
        f"{format_seconds(found.compressed.seconds)} per step instead of {format_seconds(found.dense.seconds)} "
        f"({format_ratio(found.speedup)}) {_where(nodes, found.link.bits_per_second)}"
    )


def forecast(
    plan: Plan,
    profile: Profile,
    nodes: Sequence[int],
    links: Sequence[Link],
    *,
    bucket_cap_mb: float | None = None,
    cores: float = 2.0,
    calibration: Calibration | None = None,
    progress: Progress | None = None,
) -> Forecast:
    """Step times of a plan and of plain DDP. nodes: numbers of ranks; links: what each of them is tried on.

    cores: for a rank's two threads, computing and codecs; with one core or less they take turns, and below one codecs
    take as many times longer as ranks share a core. calibration: measured
    costs that take the place of the links' own.

    Raises:
        GradlabError: for numbers of nodes or cores that cannot be, or nothing to predict.
    """
    _check(plan, nodes, links, cores)
    if calibration is not None:
        links = [calibration.applied(link) for link in links]
    speed = min(1.0, max(1.0, cores) / 2)
    found = []
    with one_thread():
        scan = scan_seconds_per_byte()
        codec, engine = (factor * crowding(profile, cores) for factor in _scales(plan, profile, scan))
        for done, count in enumerate(nodes):
            job = make_job(
                plan, DryRuns(plan, count), profile.compute_seconds, scan_seconds=scan, bucket_cap_mb=bucket_cap_mb
            )
            found.append(_at(job.scaled(codec, engine), links, speed))
            if progress:
                progress("nodes", done + 1, len(nodes))
    method = ", ".join(methods_of(plan.compressed_groups))
    remarks = [*_remarks(plan, profile, nodes), *_link_remarks(links[0], nodes, calibration)]
    return Forecast(method, profile, tuple(found), tuple(remarks), calibration)


def crowding(profile: Profile, cores: float) -> float:
    """How many times longer codecs take where several ranks share a core; those timed in a run shared it then."""
    return 1.0 if profile.codec is not None and profile.codec.engine else max(1.0, 1 / cores)


def _check(plan: Plan, nodes: Sequence[int], links: Sequence[Link], cores: float) -> None:
    if not plan.compressed_groups:
        raise GradlabError("this plan compresses nothing: its steps are those of plain DDP")
    if not nodes or not links:
        raise GradlabError("nothing to predict: name at least one number of nodes and one bandwidth")
    for count in nodes:
        if not 1 <= count <= MOST_NODES:
            raise GradlabError(f"nodes = {count}, expected 1 to {MOST_NODES}")
    if not 0 < cores < math.inf:
        raise GradlabError(f"cores = {cores:g} per rank, expected above 0")


def _scales(plan: Plan, profile: Profile, scan: float) -> tuple[float, float]:
    """Factors from the times that codecs and engine take here to those that were measured."""
    if profile.codec is None:
        return 1.0, 1.0
    here = make_job(plan, DryRuns(plan, profile.codec.world_size), profile.compute_seconds, scan_seconds=scan)
    if profile.codec.engine:
        factor = profile.codec.seconds / (here.codec_seconds + here.engine_seconds)
        return factor, factor
    # A replay runs the groups' codecs, not the exchange of dense layers.
    groups = {group.name for group in plan.compressed_groups}
    mine = [exchange for bucket in here.buckets for exchange in bucket.exchanges if exchange.name in groups]
    return profile.codec.seconds / sum(exchange.codec_seconds for exchange in mine), 1.0


def _at(job: Job, links: Sequence[Link], speed: float) -> NodeForecast:
    def on(bits_per_second: float) -> Comparison:
        return compare(job, replace(links[0], bits_per_second=bits_per_second), speed=speed)

    def saves(bits_per_second: float) -> float:
        found = on(bits_per_second)
        return found.dense.seconds - found.compressed.seconds

    even = break_even(saves)
    curve = tuple(on(rate) for rate in _curve_rates([*(link.bits_per_second for link in links), even or 0.0]))
    return NodeForecast(job, tuple(compare(job, link, speed=speed) for link in links), even, curve)


def _curve_rates(marks: Sequence[float]) -> list[float]:
    """Link speeds around those that matter, evenly on a logarithmic axis."""
    finite = [mark for mark in marks if 0 < mark < math.inf] or [1e9]
    low, high = math.log(min(finite) / _CURVE_SPAN), math.log(max(finite) * _CURVE_SPAN)
    return [math.exp(low + (high - low) * i / (_CURVE_POINTS - 1)) for i in range(_CURVE_POINTS)]


def _remarks(plan: Plan, profile: Profile, nodes: Sequence[int]) -> list[str]:
    source = "timed here: one rank, one thread, random gradients" if profile.codec is None else profile.codec.source
    lines = [
        f"Codec times ({source}) are of this kind of machine, computing time ({profile.compute_source}) of the one it "
        "was measured on: on another kind both change."
    ]
    if profile.codec is not None and any(count != profile.codec.world_size for count in nodes):
        lines.append(
            f"Codec times at other numbers of nodes than {profile.codec.world_size} follow the codecs' code, run here "
            "with made-up answers."
        )
    if plan.refresh is not None:
        lines.append(refresh_remark(plan.refresh))
    if plan.varying:
        lines.append(
            f"Messages of {', '.join(plan.varying)} vary in size with the gradients: bytes and times are those of a "
            "first iteration on random numbers; `gradlab evaluate` counts them on recorded ones."
        )
    if plan.schedule.warmup_steps:
        lines.append(f"The first {plan.schedule.warmup_steps} steps are dense: they take the dense step's time.")
    return lines


def _link_remarks(link: Link, nodes: Sequence[int], calibration: Calibration | None) -> list[str]:
    lines = [] if calibration is None else [calibration.remark]
    if link.all_reduce in _ALL_REDUCES:
        lines.append(
            f"All-reduces are taken to run {_ALL_REDUCES[link.all_reduce]}: times and bytes are of a backend that does "
            "so. Gloo's run in rings, and its bytes are what the engine counts."
        )
    if max(nodes) > _FEW_NODES:
        what = "Other collectives" if link.all_reduce in _ALL_REDUCES else "Collectives"
        lines.append(
            f"{what} are those of Gloo, rings for the most part: their latencies add up with the number of nodes."
        )
    return lines
