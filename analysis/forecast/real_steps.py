"""Turn moments of DDP's buckets in real steps into what a step is made of: computing, exchanging, waiting.

A rank waits from its last bucket's readiness until the last average has come, and for DDP's buffers; the rest of the
step it computes. The bytes of a bucket travel from the moment at which the last rank is ready and the bucket before has
come, which is the shortest time that any rank sees, and needs no common clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gradlab.analysis.forecast.link import Link, all_reduce, spell_rate
from gradlab.formatting import format_bytes, format_seconds
from gradlab.jsonable import Jsonable

# By rank, step and bucket: bytes, seconds of coming and going, and of waits for buffers in the forward passes before.
Rows = Sequence[Sequence[Sequence[Sequence[float]]]]


@dataclass(frozen=True)
class StepTimes(Jsonable):
    """Steps of a training: medians, in seconds.

    steps: their number, without the first.
    seconds: a step, of the slowest rank.
    exposed_seconds: the part of it in which every rank waits.
    computing, waiting: the two parts of a step, by rank.
    nbytes, exchanging, bus_bits_per_second: bytes, time and bus bandwidth of each bucket's all-reduce. Those on
        their way at once share their time by bytes.
    ready, averaged, exposed: moments at which a bucket is ready and averaged, from the end of the step before without
        waits for buffers, and the time that a rank waits for it, by rank and bucket.
    """

    steps: int
    seconds: float
    exposed_seconds: float
    computing: tuple[float, ...]
    waiting: tuple[float, ...]
    nbytes: tuple[int, ...]
    exchanging: tuple[float, ...]
    bus_bits_per_second: tuple[float, ...]
    ready: tuple[tuple[float, ...], ...]
    averaged: tuple[tuple[float, ...], ...]
    exposed: tuple[tuple[float, ...], ...]

    @property
    def computing_seconds(self) -> float:
        """The part of a step in which a rank computes, in seconds: another one each time, if they vary."""
        return max(1e-9, self.seconds - self.exposed_seconds)

    @property
    def sentences(self) -> list[str]:
        """Sentences on what a step is made of, and on the bus bandwidth of its buckets."""
        sent = max(1e-9, sum(self.exchanging))
        parts = (self.seconds, self.computing_seconds, sent, min(sent, self.exposed_seconds))
        step, computing, exchanging, exposed = (format_seconds(seconds, 2) for seconds in parts)
        by_rate = sorted(zip(self.bus_bits_per_second, self.nbytes, self.exchanging, strict=True))
        whole = sum(rate * seconds for rate, _, seconds in by_rate) / sent
        (low, few, _), (high, many, _) = by_rate[0], by_rate[-1]
        spread = (
            f", from {_spelled(low)} ({format_bytes(few, 2)}) to {_spelled(high)} ({format_bytes(many, 2)}) a bucket"
        )
        return [
            f"A step takes {step}: computing {computing}, exchanging {exchanging}, of which {exposed} waited for.",
            f"Bus bandwidth: {_spelled(whole)}{spread if _spelled(low) != _spelled(high) else ''}.",
        ]


@dataclass(frozen=True)
class ShardedTimes(Jsonable):
    """Steps of a training under FSDP2: medians, in seconds.

    steps: their number, without the first.
    seconds: a step, of the slowest rank.
    collectives, nbytes: time and bytes of each kind of collective, without waits for slower ranks.
    computing: the rest of a step, by rank; empty on GPUs, where collectives may travel beside computing.
    """

    steps: int
    seconds: float
    collectives: Mapping[str, float]
    nbytes: Mapping[str, int]
    computing: tuple[float, ...]

    @property
    def computing_seconds(self) -> float | None:
        """The part of a step in which a rank computes, in seconds; None: not known."""
        return max(1e-9, self.seconds - sum(self.collectives.values())) if self.computing else None

    @property
    def sentences(self) -> list[str]:
        """A sentence on what a step is made of."""
        kinds = [f"{kind} {format_seconds(seconds, 2)}" for kind, seconds in self.collectives.items()]
        computing = self.computing_seconds
        if computing is None:
            return [
                f"A step takes {format_seconds(self.seconds, 2)}; beside computing or after it: {', '.join(kinds)}."
            ]
        parts = ", ".join([f"computing {format_seconds(computing, 2)}", *kinds])
        return [f"A step takes {format_seconds(self.seconds, 2)}: {parts}."]


def times_of_sharded_steps(rows: Sequence[Sequence[Any]], on_gpu: bool) -> ShardedTimes | None:
    """Take the times of steps from those of their collectives; None: fewer than 2 steps.

    rows: `gradlab.runtime.shard_times.ShardTimes.rows` of every rank.
    """
    count = min(len(steps) for steps in rows)
    if count < 2:
        return None
    seconds = np.array([[step[0] for step in of_rank[1:count]] for of_rank in rows])  # (ranks, steps)
    collectives: dict[str, list[float]] = {}
    nbytes: dict[str, list[int]] = {}
    for same in zip(*(of_rank[1:count] for of_rank in rows), strict=True):
        for kind in dict.fromkeys(kind for kind, *_ in same[0][1]):
            collectives.setdefault(kind, []).append(_seconds_of(kind, [made for _, made in same]))
            nbytes.setdefault(kind, []).append(sum(one[2] for one in same[0][1] if one[0] == kind))
    waited = np.array([[sum(one[-1] for one in made) for _, made in of_rank[1:count]] for of_rank in rows])
    return ShardedTimes(
        count - 1,
        float(np.median(seconds.max(0))),
        {kind: float(np.median(took)) for kind, took in collectives.items()},
        {kind: int(np.median(sizes)) for kind, sizes in nbytes.items()},
        () if on_gpu else _of_ranks(seconds - waited),
    )


def _seconds_of(kind: str, made: Sequence[Sequence[Sequence[Any]]]) -> float:
    """Return the seconds of a step's collectives of a kind: of each what the rank took that came last, in the slowest
    of the groups of ranks that have one at the same time. made: collectives by rank."""
    groups: dict[int, list[list[float]]] = {}
    for of_rank in made:
        mine = [one for one in of_rank if one[0] == kind]
        if mine:
            groups.setdefault(mine[0][1], []).append([seconds for *_, seconds in mine])
    each = [map(min, zip(*took, strict=False)) for took in groups.values()]
    return sum(map(max, zip(*each, strict=False)))


def _spelled(rate: float) -> str:
    return spell_rate(float(f"{rate:.2g}"))


def times_of_steps(rows: Rows) -> StepTimes | None:
    """Take the times of steps from moments of their buckets; None: fewer than 2 steps. DDP puts parameters into other
    buckets after its first step, so that steps count that have the last one's.

    rows: `gradlab.runtime.bucket_times.BucketTimes.rows` of every rank.
    """
    count = min(len(steps) for steps in rows)
    sizes = [[int(bucket[0]) for bucket in step] for step in rows[0][:count]]
    kept = [n for n in range(1, count) if sizes[n] == sizes[-1]]
    if not kept:
        return None
    begun = np.array([[max(bucket[2] for bucket in of_rank[n - 1]) for n in kept] for of_rank in rows])
    found = np.array([[of_rank[n] for n in kept] for of_rank in rows])
    buffers = found[..., 3].sum(-1)  # (ranks, steps)
    moments = found[..., 1:3] - (begun + buffers)[..., None, None]
    ready, averaged = moments[..., 0], moments[..., 1]  # (ranks, steps, buckets)
    done = np.maximum.accumulate(averaged, -1)
    before = np.concatenate([np.zeros_like(done[..., :1]), done[..., :-1]], -1)
    took = _shared(np.maximum(averaged - np.maximum(ready, before), 0.0).min(0), (ready < before).all(0), sizes[-1])
    exposed = np.maximum(done - np.maximum(before, ready.max(-1, keepdims=True)), 0.0)
    exchanging, ranks = np.median(took, 0).tolist(), len(rows)
    bus = [
        8 * all_reduce(nbytes, ranks).path_bytes / max(seconds, 1e-9)
        for nbytes, seconds in zip(sizes[-1], exchanging, strict=True)
    ]
    return StepTimes(
        len(kept),
        float(np.median((done[..., -1] + buffers).max(0))),
        float(np.median((exposed.sum(-1) + buffers).min(0))),
        _of_ranks(done[..., -1] - exposed.sum(-1)),
        _of_ranks(exposed.sum(-1) + buffers),
        tuple(sizes[-1]),
        tuple(exchanging),
        tuple(bus),
        *(tuple(map(tuple, np.median(values, 1).tolist())) for values in (ready, averaged, exposed)),
    )


def _shared(took: np.ndarray, overlap: np.ndarray, nbytes: Sequence[int]) -> np.ndarray:
    """Share the time of buckets that were on their way at once out among them, by bytes; arrays (steps, buckets).
    overlap: whether a bucket was ready on all ranks before the one before it was averaged."""
    for of_step, overlaps in zip(took, overlap, strict=True):
        together = np.cumsum(~overlaps)
        seconds, sizes = np.bincount(together, of_step), np.bincount(together, nbytes)
        of_step[:] = np.array(nbytes) * (seconds / np.maximum(sizes, 1))[together]
    return took


def _of_ranks(values: np.ndarray) -> tuple[float, ...]:
    return tuple(np.median(values, -1).tolist())


def link_in_training(link: Link, times: StepTimes) -> Link:
    """Return a measured link with the speed at which a training's own buckets pass; as it is if they are so small that
    it is latencies that they wait for."""
    transfers = [all_reduce(nbytes, len(times.computing)) for nbytes in times.nbytes]
    took = sum(times.exchanging)
    sending = took - sum(link.collective_seconds + link.delay_seconds(transfer) for transfer in transfers)
    if sending < took / 2:
        return link
    path_bytes = sum(transfer.path_bytes for transfer in transfers)
    return replace(link, bits_per_second=8 * (1 + link.header_share) * path_bytes / sending)
