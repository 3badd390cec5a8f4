"""Measure what connects ranks and how fast each computes, without a model: what `gradlab doctor` runs.

Inside nodes and between them: collectives over sizes, and messages between neighbours of a ring. Between nodes it is
the nodes' first ranks that measure, because a node's ranks share its link.
"""

from __future__ import annotations

import math
import os
import re
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradlab.ddp.groups import Ranks, destroy, group_or_world, part_of
from gradlab.errors import GradlabError
from gradlab.jsonable import Jsonable, plain

COLLECTIVES = ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"
_LEAST, _TIMES, _MOST = 2**12, 8, 2**26  # bytes of the first collective, of each next one over the last, at most
_SOME = 2**18  # bytes up to which a collective is measured in any case
_SEEN = 2  # times that the largest collective takes as long as the smallest, at least
_PINGS, _REPEATS = 30, 5
_MESSAGE_SECONDS = 0.2  # of a message that measures bandwidth, after which a burst counts no more
_SIDE, _WORK_SECONDS = 512, 0.5  # of matrices that are multiplied, and how long
# torch 2.13 renames reduce_scatter_tensor and warns of the old name.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Timed:
    """A collective and the seconds that the slowest rank took, median of several.

    nbytes: bytes of each rank's gradient in an all-reduce or reduce-scatter, bytes that it sends in an all-gather.
    """

    collective: str
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Message:
    """Messages between two neighbours, by rank: one-way latency in seconds, and bits per second of a large one."""

    ranks: tuple[int, int]
    latency_seconds: float
    bits_per_second: float


@dataclass(frozen=True)
class Measured:
    """Times between some ranks, measured at once.

    ranks: their number.
    timed: collectives.
    messages: those between each two neighbours.
    """

    ranks: int
    timed: tuple[Timed, ...]
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Checkup(Jsonable):
    """The result of `measure`.

    hosts: name of each rank's machine.
    nodes: number of the node that each rank is in.
    between: the nodes' first ranks; None of one node.
    inside: ranks of one node, the slowest; None of nodes of one rank.
    work_seconds: time of the same products of matrices on each rank, while all compute.
    interface, interface_bits_per_second: name and nominal speed of the first rank's network interface; "" and 0 where
        the system does not tell.
    """

    hosts: tuple[str, ...]
    nodes: tuple[int, ...]
    between: Measured | None
    inside: Measured | None
    work_seconds: tuple[float, ...]
    interface: str = ""
    interface_bits_per_second: float = 0.0


def measure(device: torch.device, seconds: float = 20.0, group: dist.ProcessGroup | None = None) -> Checkup:
    """Measure ranks. A collective: all get the same result.

    Args:
        device: this rank's, of what is sent and computed.
        seconds: time for all of it, about.
        group: the ranks. None: the default process group's.

    Raises:
        GradlabError: for one rank alone, or nodes of different sizes.
    """
    group = group_or_world(group, "gradlab doctor")
    ranks = Ranks(group, device)
    if ranks.size < 2:
        raise GradlabError("gradlab doctor measures between ranks, and there is one: start one on each node or more")
    local = _local_size()
    everyone = ranks.gather([socket.gethostname(), local])
    sizes = sorted({size for _, size in everyone})
    if len(sizes) > 1 or ranks.size % local:
        raise GradlabError(f"{ranks.size} ranks on nodes of {sizes} ranks, expected as many on each node")
    first = ranks.rank // local * local
    node, firsts = list(range(first, first + local)), list(range(0, ranks.size, local))
    share = seconds * (0.5 if 1 < local < ranks.size else 1.0)
    inside = _slowest(ranks, _measured(group, node, device, share)) if local > 1 else None
    between = None
    if len(firsts) > 1:
        between = _slowest(ranks, _measured(group, firsts if ranks.rank in firsts else [ranks.rank], device, share))
    return Checkup(
        tuple(host for host, _ in everyone),
        tuple(rank // local for rank in range(ranks.size)),
        between,
        inside,
        tuple(ranks.gather(_work(group, device))),
        *ranks.gather(_interface())[0],
    )


def _local_size() -> int:
    """Return how many ranks this node has, as torchrun, Slurm or Open MPI tell."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        text = os.environ.get(name, "")
        if text.isdecimal() and int(text) > 0:
            return int(text)
    return 1


def _interface(system: Path = Path("/")) -> tuple[str, float]:
    """Return the name of the interface that carries the ranks' messages, and its nominal bits per second."""
    named = os.environ.get("NCCL_SOCKET_IFNAME") or os.environ.get("GLOO_SOCKET_IFNAME") or ""
    try:
        routes = [line.split() for line in (system / "proc/net/route").read_text().splitlines()[1:]]
        name = named or next((route[0] for route in routes if route[1] == "00000000"), "")
        megabits = int((system / "sys/class/net" / name / "speed").read_text()) if re.fullmatch(r"[\w.-]+", name) else 0
    except (OSError, ValueError):
        return "", 0.0
    return (name, 1e6 * megabits) if megabits > 0 else ("", 0.0)


def _slowest(ranks: Ranks, own: Measured | None) -> Measured:
    """Return what was measured by the group whose large all-reduce took longest, of all ranks' groups."""
    everyone = [one for one in ranks.gather(None if own is None else plain(own)) if one is not None]
    slowest = max(everyone, key=lambda one: max(timed["seconds"] for timed in one["timed"]))
    messages = {tuple(one["ranks"]): one for of_group in everyone for one in of_group["messages"]}
    return Measured(
        int(slowest["ranks"]),
        tuple(Timed(str(one["collective"]), int(one["nbytes"]), float(one["seconds"])) for one in slowest["timed"]),
        tuple(
            Message((int(a), int(b)), float(one["latency_seconds"]), float(one["bits_per_second"]))
            for (a, b), one in sorted(messages.items())
        ),
    )


def _measured(
    group: dist.ProcessGroup, members: Sequence[int], device: torch.device, seconds: float
) -> Measured | None:
    """Measure some ranks, this one among them, while all others measure theirs, or wait; None of one rank alone."""
    world = dist.get_process_group_ranks(group)
    part = part_of((group,), [world[member] for member in members], None, device)
    found = None
    if len(members) > 1:
        timed = tuple(one for name in COLLECTIVES for one in _collectives(part, name, device, seconds / 4))
        large = max((one for one in timed if one.collective == ALL_REDUCE), key=lambda one: one.nbytes)
        rate = large.nbytes / large.seconds
        found = Measured(len(members), timed, tuple(_messages(part, members, device, rate)))
    destroy(part)
    return found


def _collectives(group: Any, name: str, device: torch.device, seconds: float) -> Iterator[Timed]:
    """Time a collective over sizes: until a larger one would not fit into the time that is left, though in any case
    some, and as many as it takes to see bytes beside the noise of the smallest.
    """
    size, nbytes = dist.get_world_size(group), _LEAST
    left, took, least = seconds, 0.0, math.inf
    while nbytes <= _MOST and (nbytes <= _SOME or took < _SEEN * least or _TIMES * took * (_REPEATS + 1) <= left):
        run = _collective(group, name, nbytes, size, device)
        run()  # connections are made when they are first used
        times = [_together(run, group, device) for _ in range(_PINGS if nbytes < _SOME else _REPEATS)]
        took, left = statistics.median(times), left - sum(times)
        least = min(least, took)
        yield Timed(name, nbytes, took)
        nbytes *= _TIMES


def _collective(group: Any, name: str, nbytes: int, ranks: int, device: torch.device) -> Callable[[], object]:
    """Return a function that runs a collective of so many bytes of float32, rounded up to what ranks share alike."""
    numel = -(-nbytes // (4 * ranks)) * ranks
    whole = torch.zeros(numel, device=device)
    if name == ALL_REDUCE:
        return lambda: dist.all_reduce(whole, group=group)
    if name == ALL_GATHER:
        rows = list(torch.zeros(ranks, nbytes // 4, device=device))
        return lambda: dist.all_gather(rows, rows[dist.get_rank(group)].clone(), group=group)
    part = torch.zeros(numel // ranks, device=device)
    return lambda: _reduce_scatter(part, whole, group=group)


def _together(run: Callable[[], object], group: Any, device: torch.device) -> float:
    """Return the seconds that the slowest rank takes, from a moment when all begin."""
    dist.barrier(group=group)
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    slowest = torch.tensor([time.perf_counter() - began], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return float(slowest)


def _messages(group: Any, members: Sequence[int], device: torch.device, rate: float) -> Iterator[Message]:
    """Send between each two neighbours of a ring, those of even places first, so that no rank is in two pairs."""
    count, me = len(members), dist.get_rank(group)
    edges = [(at, (at + 1) % count) for at in range(count if count > 2 else 1)]
    own: list[list[Any]] = []
    for turn in (0, 1, 2):
        for a, b in edges:
            last_of_odd = count % 2 == 1 and a == count - 1
            if (2 if last_of_odd else a % 2) == turn and me in (a, b):
                pinged = _pinged(group, b if me == a else a, me == a, device, rate)
                own += [[members[a], members[b], *pinged]] if me == a else []
        dist.barrier(group=group)
    for of_rank in Ranks(group, device).gather(own):
        yield from (Message((int(a), int(b)), float(late), float(fast)) for a, b, late, fast in of_rank)


def _pinged(group: Any, other: int, first: bool, device: torch.device, rate: float) -> tuple[float, float]:
    """Return the latency and the bits per second of messages between this rank and another."""
    small = torch.zeros(1, dtype=torch.uint8, device=device)
    nbytes = int(min(_MOST, max(_LEAST, rate * _MESSAGE_SECONDS)))
    large = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def ping(message: torch.Tensor) -> float:
        began = time.perf_counter()
        for turn in (first, not first):
            sent = message if turn == first else small
            if turn:
                dist.send(sent, group=group, group_dst=other)
            else:
                dist.recv(sent, group=group, group_src=other)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    latency = statistics.median(ping(small) for _ in range(_PINGS)) / 2
    seconds = min(ping(large) for _ in range(_REPEATS)) - 2 * latency  # a busy processor is no slow link
    return latency, 8 * nbytes / max(seconds, 1e-9)


def _work(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the seconds of one product of matrices, while all ranks compute."""
    matrix = torch.ones(_SIDE, _SIDE, device=device)
    times, until = list[float](), time.perf_counter() + _WORK_SECONDS
    dist.barrier(group=group)
    while time.perf_counter() < until or len(times) < _REPEATS:
        began = time.perf_counter()
        float((matrix @ matrix)[0, 0])
        times.append(time.perf_counter() - began)
    return statistics.fmean(times)
