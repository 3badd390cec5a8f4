"""Forecast a plan over nodes and link speeds: step times beside plain DDP's, break-even, and a verdict."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradlab.analysis.forecast.calibration import Calibration
from gradlab.analysis.forecast.decide import SPEED_NOISE
from gradlab.analysis.forecast.dry_run import (
    MOST_VALUES,
    PART_VALUES,
    REPEATS,
    DryRuns,
    is_very_large,
    scan_seconds_per_byte,
)
from gradlab.analysis.forecast.link import Link, json_rate, spell_rate
from gradlab.analysis.forecast.network import Network, Profile
from gradlab.analysis.forecast.processors import moved
from gradlab.analysis.forecast.simulator import BETWEEN, SHARDS, WAYS, Bucket, Step
from gradlab.analysis.forecast.step_time import (
    Comparison,
    Gathers,
    Job,
    assign_units,
    break_even,
    compare,
    cut_for_shards,
    make_job,
    traffic_inside,
    traffic_of_all,
    uncompressed_steps,
)
from gradlab.analysis.parallel import one_thread
from gradlab.analysis.replay import methods_of, refresh_remark
from gradlab.errors import GradlabError
from gradlab.formatting import format_counted, format_ratio, format_seconds
from gradlab.jsonable import plain
from gradlab.plan import Plan
from gradlab.plan.gpu_groups import in_gpu_groups
from gradlab.plan.plan import between
from gradlab.plan.traffic import varying_codecs
from gradlab.progress import Progress

# From here on a ring's latencies are worth a word.
_FEW_NODES = 16
_HOW_PLANS_RUN = {
    BETWEEN: "between nodes (compress(within=))",
    SHARDS: "on FSDP2's shards (compress_fsdp)",
}
_CURVE_POINTS, _CURVE_SPAN = 61, 30.0


@dataclass(frozen=True)
class NodeForecast:
    """A plan at one number of nodes.

    job: the step, ready for any link.
    network: the network, of which this is one number of nodes.
    links: the plan beside plain DDP, on each link of the network.
    """

    job: Job
    network: Network
    links: tuple[Comparison, ...]

    @functools.cached_property
    def break_even(self) -> float | None:
        """Link speed, in bits per second, below which the plan is faster than plain DDP by more than forecasts err.
        None: at no speed. Infinity: at every speed."""
        return self._pays_below(lambda dense, half: dense)

    @functools.cached_property
    def half_break_even(self) -> float | None:
        """The same beside plain 16-bit reduction."""
        return self._pays_below(lambda dense, half: half)

    def _pays_below(self, beside: Callable[[float, float], float]) -> float | None:
        least = self.job.compute_seconds if self.network.node else self.job.least_seconds

        def saves(bits_per_second: float) -> float:
            allowed = (1 - SPEED_NOISE) * beside(*self.uncompressed_seconds(bits_per_second))
            # Where no plan could save anything, none is simulated.
            return allowed - (least if allowed <= least else self._at(bits_per_second).compressed.seconds)

        return break_even(saves)

    def uncompressed_seconds(self, bits_per_second: float) -> tuple[float, float]:
        """Return a step's seconds on a link of another speed without compression, in 32 and in 16 bits."""
        dense, half, _ = uncompressed_steps(self.job, self._link(bits_per_second), **self._place)
        return dense.seconds, half.seconds

    def _at(self, bits_per_second: float) -> Comparison:
        if bits_per_second not in self._found:  # all searches for a break-even begin at the same speeds
            self._found[bits_per_second] = compare(self.job, self._link(bits_per_second), **self._place)
        return self._found[bits_per_second]

    def _link(self, bits_per_second: float) -> Link:
        return replace(self.network.links[0], bits_per_second=bits_per_second)

    @property
    def _place(self) -> dict[str, Any]:
        return {"speed": self.network.speed, "node": self.network.node}

    @functools.cached_property
    def _found(self) -> dict[float, Comparison]:
        return {}

    @functools.cached_property
    def curve(self) -> tuple[Comparison, ...]:
        """The plan beside plain DDP over link speed, for a figure."""
        rates = _curve_rates([*(link.bits_per_second for link in self.network.links), self.break_even or 0.0])
        return tuple(map(self._at, rates))

    def to_json(self) -> dict[str, Any]:
        """Write seconds, bytes and bits per second. An infinite speed is the text "unlimited"."""
        return {
            "nodes": self.job.world_size,
            "codec_seconds": self.job.codec_seconds,
            "engine_seconds": self.job.engine_seconds,
            "break_even_bits_per_second": _json_or_none(self.break_even),
            "break_even_to_16_bits_bits_per_second": _json_or_none(self.half_break_even),
            "links": plain(self.links),
            "curve": {
                "bits_per_second": [pair.link.bits_per_second for pair in self.curve],
                "compressed": [pair.compressed.seconds for pair in self.curve],
                "dense": [pair.dense.seconds for pair in self.curve],
                "half": [pair.half.seconds for pair in self.curve],
            },
        }


def with_parameters(made: Forecast, plan: Plan, form: str) -> Step:
    """Return the step of a plan's forecast, on its first link, if parameters were gathered in a format."""
    network, node = replace(made.network, parameters=form), made.nodes[0]
    ranks = node.job.world_size if network.node is None else network.node.local_ranks
    job = replace(node.job, parameters=_gathers(plan, network, ranks, REPEATS))
    return compare(job, network.links[0], speed=network.speed, node=network.node).compressed


def traffic_text(node: NodeForecast, network: Network) -> str:
    """Say how long a step's three kinds of traffic take under FSDP2, and with which a link is busiest; "" elsewhere."""
    form, pair = network.parameters or "32 bits", node.links[0]
    if node.job.reduced is not None:
        reduced, gathered = traffic_of_all(node.job, pair.link, node.job.reduced, node.job.parameters)
        kinds = {f"gathers of parameters ({form})": gathered, "gradients": reduced}
    elif network.node is None or network.node.plans != SHARDS:
        return ""
    else:
        reduced, gathered = traffic_inside(node.job, network.node)
        between_nodes = 8 * pair.compressed.wire_bytes / pair.link.bits_per_second
        kinds = {
            f"gathers of parameters inside nodes ({form})": gathered,
            "gradients inside nodes": reduced,
            f"gradients between nodes ({spell_rate(pair.link.bits_per_second)})": between_nodes,
        }
    times = ", ".join(f"{kind} {format_seconds(seconds)}" for kind, seconds in kinds.items())
    return (
        f"{format_counted(node.job.world_size, 'node')}: {times}; most time goes to {max(kinds, key=kinds.__getitem__)}"
    )


def _json_or_none(rate: float | None) -> float | str | None:
    return None if rate is None else json_rate(rate)


@dataclass(frozen=True)
class Forecast:
    """A plan's steps beside plain DDP's on a network, one forecast per number of nodes, with warnings."""

    method: str
    network: Network
    nodes: tuple[NodeForecast, ...]
    remarks: tuple[str, ...]
    calibration: Calibration | None = None

    @property
    def comparisons(self) -> list[tuple[int, Comparison]]:
        """Every number of nodes with the comparison on every link."""
        return [(node.job.world_size, pair) for node in self.nodes for pair in node.links]

    @property
    def verdict(self) -> str:
        """Whether compression saves time on the network, and against plain 16 bits; where it does not comes first."""
        pays = [pair for pair in self.comparisons if pair[1].speedup > 1 / (1 - SPEED_NOISE)]
        losing = [pair for pair in self.comparisons if pair not in pays]
        if not losing:
            worst = min(pays, key=lambda pair: pair[1].speedup)
            return f"Compression pays in time: at least {_sentence(*worst)}.{_no_faster_than_16_bits(pays)}"
        if not pays:
            best = max(losing, key=lambda pair: pair[1].speedup)
            return f"Compression does not pay: at best {_sentence(*best)}."
        best = max(pays, key=lambda pair: pair[1].speedup)
        return (
            f"Compression does not pay everywhere: not {_configurations(losing)}. It does elsewhere, at best "
            f"{_sentence(*best)}.{_no_faster_than_16_bits(pays)}"
        )

    def to_json(self) -> dict[str, Any]:
        """Write everything as plain JSON: times in seconds, sizes in bytes."""
        link = plain(self.network.links[0])
        del link["bits_per_second"]
        return {
            "verdict": self.verdict,
            "method": self.method,
            "profile": plain(self.network.profile),
            "nodes": plain(self.nodes),
            "link": link,
            "calibration": plain(self.calibration),
            "warnings": list(self.remarks),
        }


def pays_text(break_even: float | None) -> str:
    """Write at which link speeds a plan pays: "pays below about 3.2 Gbit/s between nodes"."""
    if break_even is None:
        return "does not pay at any speed tried"
    if math.isinf(break_even):
        return "pays at every speed tried"
    return f"pays below about {spell_rate(float(f'{break_even:.2g}'))} between nodes"


def _where(nodes: int, *rates: float) -> str:
    speeds = ", ".join(spell_rate(rate) for rate in rates)
    return f"at {format_counted(nodes, 'node')} over {speeds}"


def _configurations(pairs: Sequence[tuple[int, Comparison]]) -> str:
    rates: dict[int, list[float]] = {}
    for nodes, pair in pairs:
        rates.setdefault(nodes, []).append(pair.link.bits_per_second)
    return "; ".join(_where(nodes, *speeds) for nodes, speeds in rates.items())


def _sentence(nodes: int, pair: Comparison) -> str:
    way = f", {pair.dense_way}" if pair.ways else ""
    return (
        f"{format_seconds(pair.compressed.seconds)} per step instead of {format_seconds(pair.dense.seconds)}{way} "
        f"({format_ratio(pair.speedup)}), or {format_seconds(pair.half.seconds)} in plain 16-bit reduction "
        f"({format_ratio(pair.speedup_to_16_bits)}), {_where(nodes, pair.link.bits_per_second)}"
    )


def _no_faster_than_16_bits(pays: Sequence[tuple[int, Comparison]]) -> str:
    """Name where a plan pays beside plain DDP, but not beside what needs no codec."""
    beaten = [pair for pair in pays if pair[1].speedup_to_16_bits <= 1 / (1 - SPEED_NOISE)]
    return f" Plain 16-bit reduction is about as fast or faster {_configurations(beaten)}." if beaten else ""


def forecast(
    plan: Plan,
    network: Network,
    *,
    calibration: Calibration | None = None,
    progress: Progress | None = None,
    uncompressed: bool = False,
) -> Forecast:
    """Forecast step times of a plan and of plain DDP.

    >>> from gradlab.analysis import forecast
    >>> plan = Plan.uniform([Layer("w", (1024, 1024), "linear")], "powersgd", rank=4)
    >>> times = forecast.forecast(plan, forecast.Network(nodes=(16,)))
    >>> times.method, len(times.comparisons), times.nodes[0].job.world_size
    ('powersgd(rank=4) + feedback', 2, 16)

    Args:
        plan: at least one of its groups compresses, unless `uncompressed` or the network has quantized parameters.
        network: the links and numbers of nodes to forecast for, and the measured times of a step.
        calibration: measured costs that take the place of the links' own.
        progress: called after each number of nodes.
        uncompressed: whether a plan that compresses nothing is forecast too: as plain DDP, or in nodes of several
            ranks as averages that take the plan's way.

    Returns:
        One forecast per number of nodes, on every link.

    Raises:
        GradlabError: for any other plan that compresses nothing.
    """
    if not plan.compressed_groups and not uncompressed and not network.parameters:
        raise GradlabError("this plan compresses nothing: its steps are those of plain DDP")
    if calibration is not None:
        network = replace(network, links=[calibration.applied(link) for link in network.links])
    nodes = []
    for done, job in enumerate(jobs(plan, network)):
        links = (compare(job, link, speed=network.speed, node=network.node) for link in network.links)
        nodes.append(NodeForecast(job, network, tuple(links)))
        if progress:
            progress("nodes", done + 1, len(network.nodes))
    method = ", ".join(methods_of(plan.compressed_groups)) or "uncompressed"
    remarks = [*_remarks(plan, network), *_link_remarks(network, calibration)]
    return Forecast(method, network, tuple(nodes), tuple(remarks), calibration)


def jobs(plan: Plan, network: Network, repeats: int = REPEATS) -> Iterator[Job]:
    """Run a plan's exchanges dry at each of a network's numbers of nodes."""
    if network.on_accelerator:
        plan = in_gpu_groups(plan)
    # Timed once, for factors and steps alike.
    runs = functools.cache(lambda world_size: DryRuns(plan, world_size, repeats=repeats))
    with one_thread():
        scan = scan_seconds_per_byte()
        codec, engine = (factor * network.crowding for factor in _scales(runs, network.profile, scan))
        gathers = None if network.node is None else _gathers(plan, network, network.node.local_ranks, repeats)
        for count in network.nodes:
            if network.sharded:
                yield _sharded_job(plan, network, count, repeats)
                continue
            job = replace(_job(runs(count), network, scan), rank_buckets=_rank_buckets(runs, network, count, scan))
            job = _on_its_processor(job.scaled(codec, engine), network)
            yield replace(job, parameters=gathers, overlaps=network.overlaps)


def _sharded_job(plan: Plan, network: Network, ranks: int, repeats: int) -> Job:
    """FSDP2 over all ranks: each compresses its gradients of all shards, and decodes its own shards' from all ranks."""
    cut, units = cut_for_shards(plan, ranks, network.bucket_cap_mb)
    job = make_job(cut, DryRuns(cut, 1, repeats=repeats), 0.0, assigned=units).scaled(network.crowding, 1.0)
    share = cut.payload_bytes(1) / cut.payload_bytes(1, compressing=False)
    reduced = Gathers(share, ranks * _on_its_processor(job, network).codec_seconds)
    seconds, whole = network.profile.compute_seconds, assign_units(plan.layers, network.bucket_cap_mb)
    dense = tuple(Bucket(seconds, 4 * sum(layer.numel for layer in bucket)) for bucket in whole)
    gathered = _gathers(plan, network, ranks, repeats)
    return Job(ranks, seconds, dense, dense, None, gathered, reduced, overlaps=network.overlaps)


def _on_its_processor(job: Job, network: Network) -> Job:
    """Take the times of the processor that codecs will run on, unless a run there has measured its own."""
    codec = network.profile.codec
    return job if network.processor is None or (codec and codec.engine) else moved(job, network.processor)


def _job(runs: DryRuns, network: Network, scan: float) -> Job:
    seconds, cap = network.profile.compute_seconds, network.bucket_cap_mb
    whole = network.node is None or network.node.plans == BETWEEN
    plan = runs.plan if whole else Plan(runs.plan.layers)  # a rank's shards are in `_rank_buckets`
    return make_job(plan, runs, seconds, scan_seconds=scan, bucket_cap_mb=cap)


def _rank_buckets(
    runs: Callable[[int], DryRuns], network: Network, nodes: int, scan: float
) -> tuple[Bucket, ...] | None:
    """A rank's buckets if the plan does not run between nodes: its units under FSDP2."""
    if network.node is None or network.node.plans == BETWEEN:
        return None
    cut, units = cut_for_shards(runs(nodes).plan, network.node.local_ranks, network.bucket_cap_mb)
    return make_job(
        cut, runs(nodes).of(cut), network.profile.compute_seconds, scan_seconds=scan, assigned=units
    ).buckets


def _gathers(plan: Plan, network: Network, ranks: int, repeats: int) -> Gathers | None:
    """FSDP2's gathers of parameters in a format: a rank encodes its shards and decodes those of all."""
    if not network.parameters:
        return None
    how: Any = {"dtype": network.parameters, "aggregation": "gather"}
    sent = Plan.uniform(plan.layers, "block_scaled", exchanges="parameters", **how)
    cut, units = cut_for_shards(sent, ranks, network.bucket_cap_mb)
    job = make_job(cut, DryRuns(cut, ranks, repeats=repeats), 0.0, assigned=units)
    seconds = _on_its_processor(job.scaled(network.crowding, 1.0), network).codec_seconds
    return Gathers(cut.payload_bytes(ranks) / cut.payload_bytes(ranks, compressing=False), seconds)


def _scales(runs: Callable[[int], DryRuns], profile: Profile, scan: float) -> tuple[float, float]:
    """Compute the factors from the times that codecs and engine take here to those that were measured."""
    if profile.codec is None or not runs(profile.codec.world_size).plan.compressed_groups:
        return 1.0, 1.0
    timed = runs(profile.codec.world_size)
    form, alone = (between(timed.plan, ranks) for ranks in (profile.codec.nodes or timed.world_size, timed.world_size))
    timed = timed if form.groups == alone.groups else timed.of(form)
    here = make_job(timed.plan, timed, profile.compute_seconds, scan_seconds=scan)
    if profile.codec.engine:
        factor = profile.codec.seconds / (here.codec_seconds + here.engine_seconds)
        return factor, factor
    # A replay runs the groups' codecs, not the exchange of dense layers.
    groups = {group.name for group in timed.plan.compressed_groups}
    compressed = [exchange for bucket in here.buckets for exchange in bucket.exchanges if exchange.name in groups]
    return profile.codec.seconds / sum(exchange.codec_seconds for exchange in compressed), 1.0


def _curve_rates(marks: Sequence[float]) -> list[float]:
    """List link speeds around the marks, in bits per second, evenly on a logarithmic axis."""
    finite = [mark for mark in marks if 0 < mark < math.inf] or [1e9]
    low, high = math.log(min(finite) / _CURVE_SPAN), math.log(max(finite) * _CURVE_SPAN)
    return [math.exp(low + (high - low) * i / (_CURVE_POINTS - 1)) for i in range(_CURVE_POINTS)]


def _remarks(plan: Plan, network: Network) -> list[str]:
    profile = network.profile
    source = "timed here: one rank, one thread, random gradients" if profile.codec is None else profile.codec.source
    if network.processor is not None:
        source = f"of {network.processor.name}, by gradlab doctor"
    lines = [
        f"Times hold for machines like those that they were measured on: codecs ({source}), computing "
        f"({profile.compute_source})."
    ]
    if profile.codec is not None and any(count != profile.codec.world_size for count in network.nodes):
        lines.append(f"Codec times at other numbers of nodes than {profile.codec.world_size} come from a dry run here.")
    most = PART_VALUES if is_very_large(plan.layers) else MOST_VALUES
    if any(sum(layer.numel for layer in plan.members(group)) > most for group in plan.compressed_groups):
        lines.append(f"Larger groups of layers are timed on a part of {PART_VALUES / 1e6:.0f} million values.")
    if plan.refresh is not None:
        lines.append(refresh_remark(plan.refresh))
    if varying := varying_codecs(plan):
        lines.append(
            f"Messages of {', '.join(varying)} vary in size with the gradients: bytes and times are those of a "
            "first iteration on random numbers; `gradlab evaluate` counts them on recorded ones."
        )
    if plan.schedule.warmup_steps:
        lines.append(f"The first {plan.schedule.warmup_steps} steps are dense: they take the dense step's time.")
    return lines


def _link_remarks(network: Network, calibration: Calibration | None) -> list[str]:
    lines = [] if calibration is None else [calibration.remark]
    if network.node is not None:
        lines.append(
            f"Nodes of {network.node.local_ranks} ranks with {spell_rate(network.node.inside.bits_per_second)} each "
            f"inside; link speeds are a node's. Dense steps are those of the fastest of {', '.join(WAYS)}; plans run "
            f"{_HOW_PLANS_RUN[network.node.plans]}."
        )
    if not network.overlaps:
        lines.append(
            "FSDP2's collectives do not travel beside computing on a CPU, and on GPUs they do: for these give the file "
            "of `gradlab doctor` as --bandwidth."
        )
    if max(network.nodes) > _FEW_NODES:
        lines.append(
            "Collectives are those of Gloo, rings for the most part: their latencies add up with the number of nodes."
        )
    return lines
