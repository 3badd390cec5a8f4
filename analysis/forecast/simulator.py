"""Simulate one training step as the engine runs it: backward, the worker's ticks, and a link that collectives share.

Buckets become ready while backward runs, in order. The worker cuts them into ticks by `gradlab.executor.ticks`.
In a tick the segment's exchanges are encoded up to their first requests, while the last tick's collectives travel. Then
those collectives are awaited, and the exchanges that asked for them go on. Then all open requests are issued together.
After the last bucket, ticks go on until nothing is open. Buckets with nothing to compress travel in their own buffers,
beside all that. The link serves collectives in the order they were issued: bytes wait for bytes, latencies overlap.

Several ranks of a node average each bucket over their own link first, while the bucket before it travels
between nodes; one link between nodes carries what all of them send, and results are spread inside.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from gradlab.analysis.forecast.link import Link, Transfer, all_reduce, transfers
from gradlab.collectives import Mean, Request
from gradlab.errors import GradlabError
from gradlab.executor import Ticks
from gradlab.executor.ticks import SEGMENT_BYTES

# The gradients that plans run on if a node has several ranks: means of nodes that DDP's ranks have averaged
# (`gradlab.compress(within=)`), or FSDP2's shards (`gradlab.runtime.compress_fsdp`).
PLANS = BETWEEN, SHARDS = "between nodes", "shards"
# Ways to train without compression between nodes of several ranks; where parameters are sharded over all ranks.
WAYS = FLAT, HIERARCHICAL, HSDP = "plain DDP", "hierarchical", "HSDP"
FSDP = "FSDP2"
# Collectives of requests that travel together, by rank, ranks, a link's `relay_below` and the requests' identities: the
# same at every speed.
Known = dict[tuple[int, ...], list[Transfer]]


@dataclass(frozen=True)
class Turn:
    """A stretch of a codec's code, and the requests that it ends with; the last turn of an exchange has none.

    copy_seconds: the engine's time to pack the requests before it and to unpack their answers.
    """

    seconds: float
    requests: tuple[Request, ...] = ()
    copy_seconds: float = 0.0


@dataclass(frozen=True)
class Exchange:
    """One group's exchange in an iteration, in the turns of its codec's code.

    apply_seconds: the engine's time to measure the result's error and to copy it.
    codec: the codec's name; "" of dense layers.
    """

    name: str
    gradient_bytes: int
    turns: tuple[Turn, ...]
    apply_seconds: float = 0.0
    codec: str = ""

    @property
    def codec_seconds(self) -> float:
        """Seconds in the codec's own code."""
        return sum(turn.seconds for turn in self.turns)

    @property
    def engine_seconds(self) -> float:
        """Seconds in the engine's code."""
        return self.apply_seconds + sum(turn.copy_seconds for turn in self.turns)

    @functools.cached_property
    def played(self) -> tuple[tuple[float, tuple[Request, ...]], ...]:
        """The seconds of each turn with the engine's, of the last also to apply the result, and its requests; the last
        turn first."""
        seconds = [turn.copy_seconds + turn.seconds for turn in self.turns]
        seconds[-1] += self.apply_seconds
        return tuple(zip(seconds, (turn.requests for turn in self.turns), strict=True))[::-1]

    @functools.cached_property
    def work(self) -> tuple[object, ...]:
        """All that a simulation sees of it: exchanges of equal work take equal times on every link."""
        return self.gradient_bytes, tuple((seconds, *map(id, requests)) for seconds, requests in self.played)

    def scaled(self, codec: float, engine: float) -> Exchange:
        """Multiply the codec's times and the engine's."""
        turns = tuple(
            replace(turn, seconds=codec * turn.seconds, copy_seconds=engine * turn.copy_seconds) for turn in self.turns
        )
        return replace(self, turns=turns, apply_seconds=engine * self.apply_seconds)


_FLAG = Exchange("finite flag", 0, (Turn(0.0, (Mean(torch.empty(1, device="meta")),)), Turn(0.0)))


@dataclass(frozen=True)
class Bucket:
    """One of DDP's buckets: seconds of computing that are done when it is handed over, and exchanges that it starts.

    in_place_bytes: its size, if it is averaged in its own buffer; else 0.
    scan_seconds: time of looking for values that are not finite.
    """

    ready_seconds: float
    in_place_bytes: int = 0
    scan_seconds: float = 0.0
    exchanges: tuple[Exchange, ...] = ()

    @functools.cached_property
    def work(self) -> tuple[object, ...]:
        """All that a simulation sees of it but the moment when it is ready."""
        return self.in_place_bytes, self.scan_seconds, tuple(exchange.work for exchange in self.exchanges)

    @property
    def nbytes(self) -> int:
        """Size of the gradients that it brings to the link, in bytes."""
        return self.in_place_bytes or sum(exchange.gradient_bytes for exchange in self.exchanges)


@dataclass(frozen=True)
class Step:
    """A step's time in seconds, and its parts: seconds = compute + encode + communicate.

    encode, communicate: work of codecs, and of the network, that computing did not hide or that slowed it down.
    wire_bytes: bytes that this rank sends.
    """

    seconds: float
    compute: float
    encode: float
    communicate: float
    wire_bytes: int


@dataclass(frozen=True)
class Node:
    """Several ranks to a node, with a fast link among them and one link between nodes for all of them.

    local_ranks: ranks of a node, L; inside: the link of each of them within the node.
    plans: kind of gradients that plans run on, one of `PLANS`.
    """

    local_ranks: int
    inside: Link
    plans: str = BETWEEN

    def __post_init__(self) -> None:
        if self.local_ranks < 2:
            raise GradlabError(f"local ranks = {self.local_ranks}, expected at least 2 to a node")
        if self.plans not in PLANS:
            raise GradlabError(f"plans = {self.plans!r}, expected one of {', '.join(PLANS)}")

    def half(self, nbytes: int, gathered: bool = False) -> Transfer:
        """Describe a reduce-scatter, or an all-gather, of so many bytes within the node: (L - 1)/L of them."""
        path = nbytes * (self.local_ranks - 1) // self.local_ranks
        return Transfer(path, path, self.local_ranks - 1, gathered)


@dataclass
class Clock:
    """The worker's time, and how far computing is; all in seconds.

    speed: rate of computing and of codecs while both run: 1 with a core for each, 0.5 where they share one.
    computed: how much of `compute` is done; waited: time of waiting for the network after computing was over.
    """

    compute: float
    speed: float
    now: float = 0.0
    computed: float = 0.0
    waited: float = 0.0

    def work(self, seconds: float) -> None:
        """Run codec code."""
        together = min(seconds, self.compute - self.computed)
        self.computed += together
        self.now += together / self.speed + (seconds - together)

    def serve(self, seconds: float) -> None:
        """Let the processors work for the network. Computing is slowed as far as no core is left for it."""
        self.computed -= 2 * (1 - self.speed) * min(seconds, self.compute - self.computed)

    def wait_for_backward(self, computed: float) -> None:
        """Wait until so much of computing is done."""
        left = max(0.0, computed - self.computed)
        self.computed += left
        self.now += left

    def wait_for_network(self, moment: float) -> None:
        """Wait until a collective has ended."""
        left = max(0.0, moment - self.now)
        hidden = min(left, self.compute - self.computed)
        self.computed += hidden
        self.waited += left - hidden
        self.now += left


@dataclass
class Wire:
    """The link over a step; free: the moment at which it is free again; clock: the worker's, which serves it."""

    link: Link
    clock: Clock
    free: float = 0.0
    wire_bytes: int = 0

    def send(self, transfer: Transfer, issued: float) -> float:
        """Issue a collective at `issued`, and return when it ends, both in the worker's seconds."""
        self.free = max(self.free, issued) + self.link.busy_seconds(transfer)
        self.wire_bytes += transfer.wire_bytes
        self.clock.serve(transfer.path_bytes * self.link.host_seconds_per_byte)
        return self.free + self.link.delay_seconds(transfer)


@dataclass(frozen=True)
class Within:
    """Exchanges inside nodes in a step, beside the exchange between them.

    sharded: whether parameters are sharded inside (FSDP2, HSDP): they are gathered before each bucket's backward, and
        gradients are not spread. Else gradients are averaged inside first, and results are spread inside at the end.
    """

    node: Node
    sharded: bool = False


class Inside:
    """A node's own link over a step. Without ranks taken together it takes no time."""

    def __init__(self, within: Within | None, clock: Clock) -> None:
        self._within, self._clock = within, clock
        self._wire = None if within is None else Wire(within.node.inside, clock)

    def reduced(self, buckets: Sequence[Bucket]) -> Iterator[tuple[Bucket, float]]:
        """Yield each bucket when it is ready, with the moment at which the node's ranks have averaged it."""
        for bucket in buckets:
            self._clock.wait_for_backward(bucket.ready_seconds)
            arrival = self._clock.now
            if self._within is not None and self._wire is not None:
                arrival = self._averaged(self._within, self._wire, bucket.nbytes)
            yield bucket, arrival

    def _averaged(self, within: Within, wire: Wire, nbytes: int) -> float:
        half = within.node.half(nbytes)
        arrivals = [wire.send(half, self._clock.now) for _ in range(1 + within.sharded)]
        return arrivals[-1]

    def spread(self, nbytes: int, moment: float) -> float:
        """Return when a result that is there at a moment, in the worker's seconds, has reached all the node's ranks."""
        if self._within is None or self._wire is None or self._within.sharded:
            return moment
        return self._wire.send(self._within.node.half(nbytes, gathered=True), moment)


class Simulated:
    """An exchange under way. Its code only takes time."""

    def __init__(self, exchange: Exchange, clock: Clock) -> None:
        self.requests: tuple[Request, ...] = ()
        self.done = False
        self._turns = list(exchange.played)
        self._clock = clock

    def advance(self, answers: Sequence[None] | None) -> None:
        """Work to the next requests, or to the end."""
        seconds, self.requests = self._turns.pop()
        self._clock.work(seconds)
        self.done = not self._turns


@dataclass(frozen=True)
class Arriving:
    """Collectives under way. The last of them ends at `arrives`, in the worker's seconds."""

    arrives: float
    count: int
    clock: Clock

    def answers(self) -> list[None]:
        """Wait for all requests, and return None for each."""
        self.clock.wait_for_network(self.arrives)
        return [None] * self.count


def simulate(
    buckets: Sequence[Bucket],
    compute_seconds: float,
    link: Link,
    world_size: int,
    *,
    rank: int = 0,
    speed: float = 1.0,
    segment_bytes: int = SEGMENT_BYTES,
    within: Within | None = None,
    known: Known | None = None,
) -> Step:
    """Simulate one step. Buckets without any exchange are plain DDP."""
    _check(compute_seconds, world_size, speed)
    clock = Clock(compute_seconds, speed)
    wire = Wire(link, clock)
    inside, below = Inside(within, clock), link.relay_below(world_size)
    known = {} if known is None else known
    compressing = any(bucket.exchanges for bucket in buckets)
    in_place: list[tuple[int, float]] = []  # bytes of a bucket, and the moment at which its average is there

    def issue(requests: Sequence[Request]) -> Arriving:
        key = (rank, world_size, below, *map(id, requests))
        if key not in known:
            known[key] = transfers(requests, rank, world_size, below)
        ends = [wire.send(transfer, clock.now) for transfer in known[key]]
        return Arriving(max(ends, default=0.0), len(requests), clock)

    ticks = Ticks[Simulated](issue, segment_bytes)
    for bucket, reduced in inside.reduced(buckets):
        clock.wait_for_network(reduced)
        clock.work(bucket.scan_seconds)
        if bucket.in_place_bytes:
            dense = all_reduce(bucket.in_place_bytes, world_size)
            in_place.append((bucket.in_place_bytes, wire.send(dense, clock.now)))
        for exchange in bucket.exchanges:
            ticks.start(Simulated(exchange, clock), exchange.gradient_bytes)
        ticks.end_part()
    if compressing:
        ticks.start(Simulated(_FLAG, clock), 0)
        ticks.tick()
        ticks.drain()
        # Results of earlier ticks were spread while the last one's travelled, which are left.
        in_place.append((int(ticks.last_bytes), clock.now))
    # Inside, buckets are averaged before the results of earlier ones are spread.
    for nbytes, moment in in_place:
        clock.wait_for_network(inside.spread(nbytes, moment))
    clock.wait_for_backward(compute_seconds)
    exposed = clock.now - compute_seconds
    return Step(clock.now, compute_seconds, exposed - clock.waited, clock.waited, wire.wire_bytes)


def _check(compute_seconds: float, world_size: int, speed: float) -> None:
    if not 0 <= compute_seconds < float("inf"):
        raise GradlabError(f"compute time = {compute_seconds:g} s, expected a number from 0")
    if world_size < 1:
        raise GradlabError(f"nodes = {world_size}, expected at least 1")
    if not 0.5 <= speed <= 1:
        raise GradlabError(f"speed of computing beside codecs = {speed:g}, expected 0.5 (one core) to 1 (two)")
