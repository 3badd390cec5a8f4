"""Predict a training step's time on a link, for a plan and for plain DDP, and the speed at which the two cross.

A rank's requests at N ranks come from its codecs' own code (`gradlab.analysis.forecast.dry_run`), the bytes from the
rules in gradlab.collectives, and the order of events from the engine's loop (`gradlab.analysis.forecast.simulator`).
The times of computing and of the codecs are measured.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gradlab.analysis.forecast.dry_run import DryRuns
from gradlab.analysis.forecast.link import Link, Transfer, json_rate
from gradlab.analysis.forecast.simulator import (
    FLAT,
    FSDP,
    HIERARCHICAL,
    HSDP,
    Bucket,
    Exchange,
    Known,
    Node,
    Step,
    Within,
    simulate,
)
from gradlab.errors import GradlabError
from gradlab.jsonable import plain
from gradlab.layout import Layer
from gradlab.plan import Plan
from gradlab.plan.shards import shard_plan

# DDP's own: a small first bucket, so that communication begins early, and the others.
FIRST_BUCKET_BYTES, BUCKET_CAP_MB = 2**20, 25.0
# Gradients of weights and of activations cost as much each as the forward pass.
BACKWARD_SHARE = 2 / 3
# A break-even is looked for between these link speeds, in bits per second.
_SLOWEST, _FASTEST, _PER_DECADE = 1e4, 1e13, 8
_BLOCK = re.compile(r"(?:[^.]+\.)*?\d+\.")  # a layer's name up to its first number
# Seconds: less is rounding.
_NOTHING = 1e-9


def assign_buckets(layers: Sequence[Layer], bucket_cap_mb: float | None = None) -> list[list[Layer]]:
    """Put layers into buckets as DDP does: the last first, a bucket closed by the layer that reaches its limit."""
    if bucket_cap_mb is not None and not 0 < bucket_cap_mb < math.inf:
        raise GradlabError(f"bucket size = {bucket_cap_mb:g} MiB, expected above 0")
    limit = 2**20 * (BUCKET_CAP_MB if bucket_cap_mb is None else bucket_cap_mb)
    limits = [FIRST_BUCKET_BYTES if bucket_cap_mb is None else limit]
    buckets: list[list[Layer]] = [[]]
    for layer in reversed(layers):
        if _nbytes(buckets[-1]) >= limits[-1]:
            buckets.append([])
            limits.append(limit)
        buckets[-1].append(layer)
    return [bucket for bucket in buckets if bucket]


def assign_units(layers: Sequence[Layer], bucket_cap_mb: float | None = None) -> list[list[Layer]]:
    """Guess the units of FSDP2, the last first: blocks that hold a matrix, by the first number in their layers' names,
    and the rest, whose gradients come last. DDP's buckets stand for them where no name has a number, or with a limit.

    >>> from gradlab.analysis.forecast.step_time import assign_units
    >>> names = ["embed.weight", "h.0.q.weight", "h.0.v.weight", "h.1.q.weight"]
    >>> units = assign_units([Layer(name, (8, 8), "linear") for name in names])
    >>> [[layer.name for layer in unit] for unit in units]
    [['h.1.q.weight'], ['h.0.v.weight', 'h.0.q.weight'], ['embed.weight']]
    """
    blocks: dict[str, list[Layer]] = {}
    for layer in reversed(layers):
        numbered = _BLOCK.match(layer.name)
        blocks.setdefault(numbered[0] if numbered else "", []).append(layer)
    held = {name for name, block in blocks.items() if name and any(len(layer.shape) > 1 for layer in block)}
    if not held or bucket_cap_mb is not None:
        return assign_buckets(layers, bucket_cap_mb)
    rest = [layer for name, block in blocks.items() if name not in held for layer in block]
    return [unit for unit in (*(block for name, block in blocks.items() if name in held), rest) if unit]


def _nbytes(layers: Sequence[Layer]) -> int:
    return 4 * sum(layer.numel for layer in layers)


def ready_seconds(buckets: Sequence[Sequence[Layer]], compute_seconds: float) -> list[float]:
    """Estimate the seconds of computing that are done when each bucket is ready, by bucket.
    Backward is taken to last as long for every weight matrix: most parameters are in a network's last, cheapest layers.
    """
    weights = [sum(len(layer.shape) > 1 for layer in bucket) for bucket in buckets]
    total, done, ready = sum(weights), 0, []
    for weight in weights:
        done += weight
        share = done / total if total else 1.0
        ready.append(compute_seconds * (1 - BACKWARD_SHARE * (1 - share)))
    return [*ready[:-1], compute_seconds] if ready else []


@dataclass(frozen=True)
class Gathers:
    """Gathers of a model's parameters, or reduce-scatters of its gradients, that are quantized. They do not travel
    beside computing.

    share: bytes of a rank's messages over those of its shards in 32 bits.
    seconds: time of the codecs in one collective of the whole model, on each rank.
    """

    share: float
    seconds: float


@dataclass(frozen=True)
class Job:
    """A plan's step at N ranks, ready for any link: DDP's buckets under the plan, and under plain DDP.

    rank_buckets: buckets of a rank's shards (`cut_for_shards`) under FSDP2. None: the plan runs between nodes.
    parameters: FSDP2's gathers of parameters; None: in 32 bits.
    reduced: its reduce-scatters, where all ranks share the parameters; None: the plan does not run in them.
    overlaps: whether FSDP2's collectives travel beside computing if they are not compressed: on a CPU they do not.
    known: collectives of the exchanges' requests, which simulations of this job share.
    """

    world_size: int
    compute_seconds: float
    buckets: tuple[Bucket, ...]
    dense_buckets: tuple[Bucket, ...]
    rank_buckets: tuple[Bucket, ...] | None = None
    parameters: Gathers | None = None
    reduced: Gathers | None = None
    overlaps: bool = True
    known: Known = field(default_factory=dict, compare=False, repr=False)

    @functools.cached_property
    def half_buckets(self) -> tuple[Bucket, ...]:
        """The buckets under plain 16-bit reduction: half the bytes of float32. Casting is not counted."""
        return tuple(replace(bucket, in_place_bytes=bucket.in_place_bytes // 2) for bucket in self.dense_buckets)

    @property
    def codec_seconds(self) -> float:
        """Seconds per step in the codecs' own code."""
        return sum(exchange.codec_seconds for bucket in self._of_rank for exchange in bucket.exchanges)

    @property
    def engine_seconds(self) -> float:
        """Seconds per step in the engine's own code: finiteness scans, packing, measuring errors and copying."""
        exchanges = sum(exchange.engine_seconds for bucket in self._of_rank for exchange in bucket.exchanges)
        return exchanges + sum(bucket.scan_seconds for bucket in self._of_rank)

    @property
    def _of_rank(self) -> tuple[Bucket, ...]:
        return self.buckets if self.rank_buckets is None else self.rank_buckets

    @property
    def least_seconds(self) -> float:
        """A step takes no less between nodes of one rank, whose only thread runs codecs, on the fastest link."""
        return max(self.compute_seconds, self.codec_seconds + self.engine_seconds)

    def scaled(self, codec: float = 1.0, engine: float = 1.0) -> Job:
        """Multiply the codecs' times and the engine's."""

        def times(buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
            return tuple(
                replace(
                    bucket,
                    scan_seconds=engine * bucket.scan_seconds,
                    exchanges=tuple(exchange.scaled(codec, engine) for exchange in bucket.exchanges),
                )
                for bucket in buckets
            )

        of_rank = None if self.rank_buckets is None else times(self.rank_buckets)
        return replace(self, buckets=times(self.buckets), rank_buckets=of_rank)

    def shared_out(self, local_ranks: int) -> Job:
        """Share codecs' work out among the ranks of a node, group by group (`gradlab.executor.ownership`)."""
        sizes = [exchange.gradient_bytes for bucket in self.buckets for exchange in bucket.exchanges]
        share = _largest_share(sizes, local_ranks)
        return self.scaled(share, share)


def _largest_share(sizes: Sequence[int], parts: int) -> float:
    """The largest part's share where the largest size goes to the part that holds least, and so on down."""
    held = [0] * parts
    for size in sorted(sizes, reverse=True):
        held[held.index(min(held))] += size
    return max(held) / (sum(held) or 1)


def make_job(
    plan: Plan,
    runs: DryRuns,
    compute_seconds: float,
    *,
    scan_seconds: float = 0.0,
    bucket_cap_mb: float | None = None,
    assigned: Sequence[Sequence[Layer]] | None = None,
) -> Job:
    """Make DDP's buckets, with the exchanges that each starts."""
    assigned = assign_buckets(plan.layers, bucket_cap_mb) if assigned is None else assigned
    ready = ready_seconds(assigned, compute_seconds)
    plain = tuple(Bucket(moment, _nbytes(bucket)) for moment, bucket in zip(ready, assigned, strict=True))
    if not plan.compressed_groups:
        return Job(runs.world_size, compute_seconds, plain, plain)
    compressed = {name for group in plan.compressed_groups for name in group.layers}
    buckets = []
    for bucket, layers, started in zip(plain, assigned, _exchanges(plan, runs, assigned), strict=True):
        buckets.append(
            Bucket(
                bucket.ready_seconds,
                # A group may span buckets: one that starts nothing is not for that reason dense.
                0 if any(layer.name in compressed for layer in layers) else bucket.in_place_bytes,
                # Looked at twice: when it comes, and when all are through.
                2 * scan_seconds * bucket.in_place_bytes,
                tuple(started),
            )
        )
    return Job(runs.world_size, compute_seconds, tuple(buckets), plain)


def cut_for_shards(plan: Plan, local_ranks: int, bucket_cap_mb: float | None = None) -> tuple[Plan, list[list[Layer]]]:
    """Cut a plan for the shards of a node's first rank under FSDP2, and return it with its layers by unit."""
    units = assign_units(plan.layers, bucket_cap_mb)
    if scalars := [layer.name for layer in plan.layers if not layer.shape]:
        raise GradlabError(f"{scalars[0]} has no dimension along which FSDP2 could shard it")
    shapes = {layer.name: (math.ceil(layer.shape[0] / local_ranks), *layer.shape[1:]) for layer in plan.layers}
    names = {layer.name: f"unit {index}" for index, unit in enumerate(units) for layer in unit}
    cut = shard_plan(plan, shapes, names)
    held = {layer.name: layer for layer in cut.layers}
    return cut, [[held[layer.name] for layer in unit if layer.name in held] for unit in units]


def _exchanges(plan: Plan, runs: DryRuns, assigned: Sequence[Sequence[Layer]]) -> Iterator[list[Exchange]]:
    """Yield the exchanges that each bucket starts: its dense layers together, then every group that it completes."""
    groups = plan.compressed_groups
    group_of = {name: place for place, group in enumerate(groups) for name in group.layers}
    missing = [set(group.layers) for group in groups]
    for index, bucket in enumerate(assigned):
        names = {layer.name for layer in bucket}
        started = []
        dense = [layer for layer in bucket if layer.name not in group_of]
        if dense and len(dense) < len(bucket):
            started.append(runs.dense(f"dense layers of bucket {index}", dense))
        for place in sorted({group_of[name] for name in names & group_of.keys()}):
            missing[place] -= names
            if not missing[place]:
                started.append(runs.group(groups[place]))
        yield started


@dataclass(frozen=True)
class Comparison:
    """A plan beside dense training on one link, as it is and with gradients reduced in 16 bits (half).

    link: a rank's, or a node's if nodes have several ranks.
    dense, half: the fastest uncompressed one, in 32 and in 16 bits.
    ways: all uncompressed ones by name, see `FLAT`, `HIERARCHICAL` and `HSDP`. Empty with a rank per node: plain DDP.
    """

    link: Link
    compressed: Step
    dense: Step
    half: Step
    ways: Mapping[str, Step] = field(default_factory=dict)

    @property
    def dense_way(self) -> str:
        """Name of the fastest uncompressed way."""
        return min(self.ways, key=lambda name: self.ways[name].seconds, default=FLAT)

    @property
    def speedup(self) -> float:
        """The dense step's time divided by the plan's."""
        return self.dense.seconds / self.compressed.seconds if self.compressed.seconds else 1.0

    @property
    def speedup_to_16_bits(self) -> float:
        """The time with plain 16-bit reduction divided by the plan's; below 1 where the plan is slower."""
        return self.half.seconds / self.compressed.seconds if self.compressed.seconds else 1.0

    def to_json(self) -> dict[str, Any]:
        """Write seconds, bytes and bits per second. An infinite speed is the text "unlimited"."""
        steps = {"compressed": plain(self.compressed), "dense": plain(self.dense), "half": plain(self.half)}
        factors = {"speedup": self.speedup, "speedup_to_16_bits": self.speedup_to_16_bits}
        if self.ways:
            steps |= {"dense_way": self.dense_way, "ways": plain(self.ways)}
        return {"bits_per_second": json_rate(self.link.bits_per_second), **factors, **steps}


def compare(job: Job, link: Link, *, speed: float = 1.0, node: Node | None = None) -> Comparison:
    """Simulate a plan's step on one link, and the fastest one without compression, in 32 and in 16 bits.
    Codecs' work is shared out among a node's ranks. Plain DDP's ring passes every node's link once each way;
    hierarchical averaging and native HSDP send what one rank per node would.
    """
    return Comparison(link, _compressed(job, link, speed, node), *uncompressed_steps(job, link, speed=speed, node=node))


def _compressed(job: Job, link: Link, speed: float, node: Node | None) -> Step:
    if job.reduced is not None:
        return _sharded_over_all(job, link, job.reduced, job.parameters)
    if job.rank_buckets is not None and node is not None:
        return _unit_by_unit(job.rank_buckets, job, link, node)
    buckets = job.buckets if node is None else job.shared_out(node.local_ranks).buckets
    within = None if node is None else Within(node)
    seconds, ranks = job.compute_seconds, job.world_size
    return simulate(buckets, seconds, link, ranks, speed=speed, within=within, known=job.known)


def uncompressed_steps(
    job: Job, link: Link, *, speed: float = 1.0, node: Node | None = None
) -> tuple[Step, Step, Mapping[str, Step]]:
    """Simulate the fastest steps without compression, in 32 and in 16 bits, and every way in 32 bits."""
    if job.reduced is not None:
        dense, half = (_sharded_over_all(job, link, None, None, share) for share in (1.0, 0.5))
        return dense, half, {FSDP: dense}
    return _uncompressed(replace(job, buckets=(), rank_buckets=None, known={}), link, speed, node)


@functools.lru_cache(maxsize=1024)  # one for each speed of a forecast's curve: they are the same for all plans
def _uncompressed(job: Job, link: Link, speed: float, node: Node | None) -> tuple[Step, Step, dict[str, Step]]:
    def step(buckets: Sequence[Bucket], world_size: int = job.world_size, within: Within | None = None) -> Step:
        return simulate(buckets, job.compute_seconds, link, world_size, speed=speed, within=within)

    if node is None:
        return step(job.dense_buckets), step(job.half_buckets), {}

    def ways(buckets: Sequence[Bucket]) -> dict[str, Step]:
        return {
            FLAT: step(buckets, job.world_size * node.local_ranks),
            HIERARCHICAL: step(buckets, within=Within(node)),
            HSDP: hsdp(buckets),
        }

    def hsdp(buckets: Sequence[Bucket]) -> Step:
        if not job.overlaps:
            shards = [replace(one, in_place_bytes=one.in_place_bytes // node.local_ranks) for one in buckets]
            return _unit_by_unit(shards, replace(job, dense_buckets=tuple(buckets), parameters=None), link, node)
        sharded = step(buckets, within=Within(node, sharded=True))
        return _with_gathers(sharded, node, sum(bucket.nbytes for bucket in buckets))

    in_32_bits = ways(job.dense_buckets)
    dense, half = (min(of.values(), key=lambda one: one.seconds) for of in (in_32_bits, ways(job.half_buckets)))
    return dense, half, in_32_bits


def _unit_by_unit(units: Sequence[Bucket], job: Job, link: Link, node: Node) -> Step:
    """Simulate a step under FSDP2 in which backward stands still while a unit's shards are exchanged.
    Only gathers of parameters as they are, one before forward and one before backward, may travel beside computing.
    """
    mine = replace(link, bits_per_second=link.bits_per_second / node.local_ranks)
    reduced, gathered = traffic_inside(job, node)
    kinds: dict[object, list[Bucket]] = {}
    for unit in units:
        kinds.setdefault(unit.work, []).append(unit)
    exchanges = [
        (len(alike), simulate([replace(alike[0], ready_seconds=0.0)], 0.0, mine, job.world_size, known=job.known))
        for alike in kinds.values()
    ]
    encode = sum(count * one.encode for count, one in exchanges)
    communicate = sum(count * one.communicate for count, one in exchanges) + reduced
    if job.parameters is None:
        communicate += max(0.0, gathered - job.compute_seconds) if job.overlaps else gathered
    else:
        encode, communicate = encode + 2 * job.parameters.seconds, communicate + gathered
    wire = node.local_ranks * sum(count * one.wire_bytes for count, one in exchanges)
    return Step(job.compute_seconds + encode + communicate, job.compute_seconds, encode, communicate, wire)


def _sharded_over_all(
    job: Job, link: Link, reduced: Gathers | None, gathered: Gathers | None, share: float = 1.0
) -> Step:
    """Simulate a step under FSDP2 whose shards lie on all ranks: gathers before forward and before backward, and
    reduce-scatters. Those of 32 bits, or a share of them, may travel beside computing, others do not."""
    scattering, gathering = traffic_of_all(job, link, reduced, gathered, share)
    quantized = [(one, seconds) for one, seconds in ((reduced, scattering), (gathered, gathering)) if one is not None]
    exposed = sum(seconds for _, seconds in quantized)
    left = scattering + gathering - exposed
    exposed += max(0.0, left - job.compute_seconds) if job.overlaps else left
    encode = (reduced.seconds if reduced else 0.0) + 2 * (gathered.seconds if gathered else 0.0)
    nbytes = sum(bucket.nbytes for bucket in job.dense_buckets) * (job.world_size - 1) // job.world_size
    wire = nbytes * ((reduced.share if reduced else share) + 2 * (gathered.share if gathered else share))
    return Step(job.compute_seconds + encode + exposed, job.compute_seconds, encode, exposed, round(wire))


def traffic_of_all(
    job: Job, link: Link, reduced: Gathers | None, gathered: Gathers | None, share: float = 1.0
) -> tuple[float, float]:
    """Return the seconds of a step's reduce-scatters, and of both its gathers, of shards on all ranks."""
    rounds = job.world_size - 1

    def seconds(quantized: Gathers | None, gathers: bool) -> float:
        total = 0.0
        for bucket in job.dense_buckets:
            path = int((quantized.share if quantized else share) * bucket.nbytes * rounds / job.world_size)
            passed_on = gathers or quantized is not None  # quantized gradients go all to all
            one = Transfer(path, path, rounds if gathers or not quantized else 1, passed_on, scattered=not passed_on)
            total += link.busy_seconds(one) + link.delay_seconds(one)
        return total

    return seconds(reduced, False), 2 * seconds(gathered, True)


def traffic_inside(job: Job, node: Node) -> tuple[float, float]:
    """Return the seconds that the link inside a node takes for a step's gradients, and for both gathers of its
    parameters, under FSDP2."""

    def seconds(share: float, gathered: bool) -> float:
        sizes = Counter(int(share * bucket.nbytes) for bucket in job.dense_buckets)
        halves = [(count, node.half(nbytes, gathered)) for nbytes, count in sizes.items()]
        return sum(n * (node.inside.busy_seconds(half) + node.inside.delay_seconds(half)) for n, half in halves)

    return seconds(1.0, False), 2 * seconds(1.0 if job.parameters is None else job.parameters.share, True)


def _with_gathers(step: Step, node: Node, nbytes: int) -> Step:
    """Add what gathering the parameters for the forward pass takes beyond the forward pass itself."""
    exposed = max(0.0, node.inside.busy_seconds(node.half(nbytes, gathered=True)) - (1 - BACKWARD_SHARE) * step.compute)
    return replace(step, seconds=step.seconds + exposed, communicate=step.communicate + exposed)


def break_even(saves: Callable[[float], float]) -> float | None:
    """Find the highest link speed, in bits per second, at which compression saves time; None: none; infinity: all."""
    from scipy.optimize import brentq  # which takes long to import, and few need

    slowest, fastest = (round(_PER_DECADE * math.log10(speed)) for speed in (_SLOWEST, _FASTEST))
    grid = [10 ** (position / _PER_DECADE) for position in range(slowest, fastest + 1)]
    last = next((position for position in reversed(range(len(grid))) if saves(grid[position]) > _NOTHING), None)
    if last is None:
        return None
    if last == len(grid) - 1:
        return math.inf
    low, high = math.log(grid[last]), math.log(grid[last + 1])
    return math.exp(brentq(lambda speed: saves(math.exp(speed)) - _NOTHING, low, high, xtol=2e-7))
