"""A network link between ranks, and the time of a collective on it: bytes over speed, plus latencies.

The cost of a collective is alpha-beta (Hockney 1994; Thakur, Rabenseifner, Gropp 2005, "Optimization of collective
communication operations in MPICH", table 1): the bytes on its critical path over the link's speed, plus one latency
for each message that has to follow another. Bytes follow the rules in gradlab.collectives.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gradlab.collectives import (
    AllToAll,
    Broadcast,
    Gather,
    Mean,
    Request,
    Ring,
    Sum,
    all_gather_wire_bytes,
    all_reduce_wire_bytes,
    all_to_all_wire_bytes,
    broadcast_wire_bytes,
    by_fusion_key,
    payload_bytes,
)
from gradlab.collectives.relay import LEAST_RANKS, grid, relay_below
from gradlab.collectives.requests import LENGTH_BYTES
from gradlab.collectives.ring import RingCode, ring_wire_bytes
from gradlab.errors import GradlabError

_RATES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_TIMES = {"h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
MESSAGE_SECONDS = 50e-6  # a small message of an all-to-all, in Gloo at 16 to 64 ranks
_NUMBER = r"(\d+(?:\.\d+)?|\.\d+)"


@dataclass(frozen=True)
class Link:
    """A rank's connection, the same in both directions and for all ranks at once.

    latency_seconds: time between two ranks, of a small message with the receiver's wake-up.
    header_share: bytes of protocol per byte sent (TCP over Ethernet: 66 of 1448, and its acknowledgements).
    host_seconds_per_byte: time of the ranks' processors per byte sent, while other bytes are on the link.
    collective_seconds: fixed cost of starting a collective.
    gather_factor: time per byte of gathers and all-to-alls, beside that of an all-reduce.
    scatter_factor: the same of reduce-scatters: 2 in Gloo, where each is an all-reduce.
    """

    bits_per_second: float
    latency_seconds: float = 0.0
    header_share: float = 0.06
    host_seconds_per_byte: float = 0.0
    collective_seconds: float = 0.0
    gather_factor: float = 1.0
    scatter_factor: float = 1.0

    def __post_init__(self) -> None:
        if not self.bits_per_second > 0:
            raise GradlabError(f"bandwidth = {self.bits_per_second:g} bit/s, expected above 0")
        for name in ("latency_seconds", "header_share", "host_seconds_per_byte", "collective_seconds"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise GradlabError(f"link: {name} = {value:g}, expected a number from 0")
        for name in ("gather_factor", "scatter_factor"):
            if not 0 < getattr(self, name) < math.inf:
                raise GradlabError(f"link: {name} = {getattr(self, name):g}, expected a number above 0")

    @functools.cached_property
    def seconds_per_byte(self) -> float:
        """Seconds per byte of a stream: the link's or the processors', whichever is larger, as both work at once."""
        return max(8 * (1 + self.header_share) / self.bits_per_second, self.host_seconds_per_byte)

    @functools.cached_property
    def message_seconds(self) -> float:
        """Seconds of a sender for one message more to another rank: no more than a ring's step takes."""
        return min(self.latency_seconds, MESSAGE_SECONDS)

    def relay_below(self, ranks: int) -> int:
        """Compute the bytes of an all-to-all's largest part below which it goes in two hops. 0: never."""
        if ranks < LEAST_RANKS:
            return 0
        queued, each = sum(grid(ranks)) - 4, self.message_seconds
        relayed = queued * each + self.latency_seconds
        return relay_below(ranks, (ranks - 2) * each, relayed, self.gather_factor * self.seconds_per_byte)

    def busy_seconds(self, transfer: Transfer) -> float:
        """Compute the seconds in which a collective keeps the link from others."""
        factor = self.gather_factor if transfer.gathered else self.scatter_factor if transfer.scattered else 1.0
        sending = transfer.queued * self.message_seconds
        return self.collective_seconds + sending + factor * transfer.path_bytes * self.seconds_per_byte

    def delay_seconds(self, transfer: Transfer) -> float:
        """Compute the seconds that a collective takes beyond `busy_seconds`, as messages wait for each other."""
        return transfer.rounds * self.latency_seconds


@dataclass(frozen=True)
class Transfer:
    """One collective: bytes that this rank sends, bytes on the busiest link, and messages that follow one another.

    gathered: whether it is a gather or an all-to-all, which pass messages on whole.
    queued: messages that wait until their sender has sent others, of no later round.
    scattered: whether it is a reduce-scatter.
    """

    wire_bytes: int
    path_bytes: int
    rounds: int
    gathered: bool = False
    queued: int = 0
    scattered: bool = False


@functools.lru_cache(maxsize=2**14)
def all_reduce(nbytes: int, world_size: int) -> Transfer:
    """Describe an all-reduce: a reduce-scatter and an all-gather around a ring, N - 1 messages each."""
    wire = all_reduce_wire_bytes(nbytes, world_size)
    return Transfer(wire, wire, 2 * (world_size - 1))


def all_gather(nbytes: int, world_size: int) -> Transfer:
    """Describe a ring all-gather."""
    wire = all_gather_wire_bytes(nbytes, world_size)
    return Transfer(wire, wire, world_size - 1, gathered=True)


def broadcast(nbytes: int, rank: int, root: int, world_size: int) -> Transfer:
    """Describe a broadcast over a binomial tree. The root's link carries all of its messages, one after another."""
    wire = broadcast_wire_bytes(nbytes, rank, root, world_size)
    depth = (world_size - 1).bit_length()
    return Transfer(wire, depth * nbytes, depth)


def all_to_all(sizes: Sequence[int], rank: int, lengths: Sequence[int] | None = None, below: int = 0) -> Transfer:
    """Describe an all-to-all: every rank sends sizes[j] bytes to rank j, and its own of `lengths` to all.

    The largest part slows its sender's or its receiver's link. below: bytes of that part below which it goes in two
    hops.
    """
    ranks, lengths = len(sizes), lengths or [0] * len(sizes)
    largest = max(sizes) + max(lengths)
    rows, columns = grid(ranks) if 0 < largest < below else (1, ranks)
    in_columns = [sum(sizes[column::columns]) for column in range(columns)]
    in_rows = [sum(lengths[first : first + columns]) for first in range(0, ranks, columns)]
    path = (columns - 1) * (max(in_columns) + max(lengths)) + (rows - 1) * (columns * max(sizes) + max(in_rows))
    queued = sum(max(0, side - 2) for side in (rows, columns)) if largest else 0
    hops = (rows > 1) + (columns > 1)
    return Transfer(all_to_all_wire_bytes(sizes, rank, lengths, rows), path, hops, gathered=True, queued=queued)


def ring(sizes: Sequence[int], rank: int) -> Transfer:
    """Describe 2 (N - 1) messages hop by hop around a ring. In each round the others wait for the largest."""
    rounds = 2 * (len(sizes) - 1)
    return Transfer(ring_wire_bytes(sizes, rank), rounds * max(sizes, default=0), rounds)


def transfers(requests: Sequence[Request], rank: int, world_size: int, below: int = 0) -> list[Transfer]:
    """List the collectives that serve simultaneous requests: those of a kind, a root and a dtype travel as one.
    below: a link's `relay_below`."""
    alike = ([requests[position] for position in positions] for positions in by_fusion_key(requests))
    fused = [_fused(together, rank, world_size, below) for together in alike]
    return [transfer for transfer in fused if transfer.path_bytes]


def _fused(together: Sequence[Any], rank: int, world_size: int, below: int) -> Transfer:
    first = together[0]
    if isinstance(first, AllToAll) and first.varying:
        return _after(_lengths_of(together, rank, below), _all_to_all_of(together, rank, world_size, 0))
    if isinstance(first, AllToAll) or (isinstance(first, Gather) and first.lengths is not None):
        return _all_to_all_of(together, rank, world_size, below)
    if isinstance(first, Ring):
        return ring([sum(sizes) for sizes in zip(*(r.sizes for r in together), strict=True)], rank)
    nbytes = sum(request.tensor.nbytes for request in together)
    if isinstance(first, Mean | Sum):
        return all_reduce(nbytes, world_size)
    if isinstance(first, Broadcast):
        return broadcast(nbytes, rank, first.root, world_size)
    if not first.varying:
        return all_gather(nbytes, world_size)
    return _after(all_gather(LENGTH_BYTES * len(together), world_size), all_gather(nbytes, world_size))


def _lengths_of(together: Sequence[AllToAll], rank: int, below: int) -> Transfer:
    """All-to-alls of lengths, which go where vectors do."""
    sizes = zip(*(request.sizes for request in together), strict=True)
    return all_to_all([LENGTH_BYTES * sum(map(bool, of_rank)) for of_rank in sizes], rank, below=below)


def _after(lengths: Transfer, values: Transfer) -> Transfer:
    """Lengths, and then what has them, as one."""
    return Transfer(
        lengths.wire_bytes + values.wire_bytes,
        lengths.path_bytes + values.path_bytes,
        lengths.rounds + values.rounds,
        gathered=True,
        queued=lengths.queued + values.queued,
    )


def _all_to_all_of(together: Sequence[AllToAll | Gather], rank: int, world_size: int, below: int) -> Transfer:
    """All-to-alls, and gathers of known lengths, as one all-to-all."""
    parts = [request.sizes for request in together if isinstance(request, AllToAll)]
    gathers = [request for request in together if isinstance(request, Gather)]
    sizes = [sum(of_request[j] for of_request in parts) for j in range(world_size)]
    lengths = [sum((r.lengths or ())[j] * r.tensor.element_size() for r in gathers) for j in range(world_size)]
    return all_to_all(sizes, rank, lengths, below)


def weightless(request: Request) -> Request:
    """Copy a request without its values. Counting bytes needs shapes alone."""
    if isinstance(request, AllToAll):
        return AllToAll(tuple(_empty(tensor) for tensor in request.tensors), request.varying)
    if isinstance(request, Mean | Sum):
        return type(request)(_empty(request.tensor))
    if isinstance(request, Gather):
        return Gather(_empty(request.tensor), request.varying, request.lengths)
    if isinstance(request, Ring):
        return Ring(_Sizes(request.sizes))
    return Broadcast(_empty(request.tensor), request.root)


def request_bytes(request: Request) -> int:
    """Return the size of a request's tensors, on whatever rank."""
    return request.tensor.nbytes if isinstance(request, Mean | Sum | Gather | Broadcast) else payload_bytes(request, 0)


def longer(request: Request, times: float) -> Request:
    """Make a request of so many times the elements, without values."""

    def of(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(round(times * tensor.numel()), dtype=tensor.dtype, device="meta")

    if isinstance(request, AllToAll):
        return AllToAll(tuple(map(of, request.tensors)), request.varying)
    if isinstance(request, Ring):
        return Ring(_Sizes([round(times * size) for size in request.sizes]))
    if isinstance(request, Gather):
        lengths = None if request.lengths is None else tuple(round(times * length) for length in request.lengths)
        return Gather(of(request.tensor), request.varying, lengths)
    return replace(request, tensor=of(request.tensor))


class _Sizes(RingCode):
    """A ring's sizes without its values."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.segments, self._sizes = len(sizes), sizes

    def nbytes(self, segment: int) -> int:
        return self._sizes[segment]

    def prepare(self, segment: int) -> torch.Tensor:
        raise NotImplementedError

    add = finish = prepare  # type: ignore[assignment]


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def parse_bandwidth(text: str) -> float:
    """Read a link speed in bits per second from "200mbit", "1gbit", "25 Gbit/s" or "inf". Prefixes are decimal."""
    word = text.strip().lower()
    if word in ("inf", "unlimited"):
        return math.inf
    match = re.fullmatch(rf"{_NUMBER}\s*([kmgt]?)(?:bit(?:/s|ps)?|bps)", word)
    rate = float(match[1]) * _RATES[match[2]] if match else 0.0
    if not 0 < rate < math.inf:
        raise GradlabError(f"bandwidth {text!r}: expected bits per second above 0, such as 200mbit, 1gbit or 25gbit")
    return rate


def parse_seconds(text: str) -> float:
    """Read a duration in seconds from "50us", "1.5ms", "0.36s" or "5min". A bare number is seconds."""
    match = re.fullmatch(rf"{_NUMBER}(?:e([+-]?\d+))?\s*(h|min|s|ms|us|µs|ns)?", text.strip().lower())
    if not match:
        raise GradlabError(f"duration {text!r}: expected a time from 0 with its unit, such as 50us, 1ms or 0.36s")
    value = float(f"{match[1]}e{match[2] or 0}") * _TIMES[match[3] or "s"]
    if not math.isfinite(value):
        raise GradlabError(f"duration {text!r}: too long")
    return value


def json_rate(bits_per_second: float) -> float | str:
    """Write a link speed for JSON, which has no number for infinity."""
    return "unlimited" if math.isinf(bits_per_second) else bits_per_second


def spell_rate(bits_per_second: float) -> str:
    """Write a link speed for prose: 1e9 -> "1 Gbit/s"."""
    if math.isinf(bits_per_second):
        return "an unlimited speed"
    for unit, scale in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits_per_second >= 0.9995 * scale:
            return f"{bits_per_second / scale:.4g} {unit}"
    return f"{bits_per_second:.4g} bit/s"
