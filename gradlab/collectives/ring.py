"""Ring all-reduce with compression, segment by segment: what a codec contributes to Algorithm 1 of GradiVeQ.

Yu, Lin, et al., "GradiVeQ: Vector quantization for bandwidth-efficient gradient aggregation in distributed CNN
training", NeurIPS 2018, Algorithm 1 and Fig. 2. A vector is cut into N segments. Segment s starts at rank s and
travels N - 1 hops, at each of which a rank adds its own part; then the sums travel N - 1 hops more. The executors
(`gradlab.collectives.run_lockstep`, `gradlab.runtime`) move the messages; a `RingCode` makes and reads them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch


class RingCode(ABC):
    """One rank's side of a ring. Messages are vectors of bytes; their sizes are the same on every rank.

    segments: their number, the world size.
    """

    segments: int

    @abstractmethod
    def nbytes(self, segment: int) -> int:
        """Size of a segment's messages, in bytes."""

    @abstractmethod
    def prepare(self, segment: int) -> torch.Tensor:
        """This rank's own part of a segment, as `add` takes it; computed while messages are on the wire."""

    @abstractmethod
    def add(self, segment: int, received: torch.Tensor | None, own: torch.Tensor) -> torch.Tensor:
        """Return the message that travels on, (bytes,) uint8, from the predecessor's, None where the segment starts,
        and the result of `prepare`."""

    @abstractmethod
    def finish(self, segment: int, message: torch.Tensor) -> torch.Tensor:
        """The segment's mean over ranks, as a vector, from the message that holds the sum."""


class SummedRing(RingCode):
    """Parts that are summed as they are: gradients, or the codes of a compressor that commutes with the sum, eq. (1).

    bounds: bounds of the segments.
    encode: gives this rank's codes between two bounds; `decode` gives the vector from the mean of such codes.
    width: codes per unit of the bounds.
    """

    def __init__(
        self,
        bounds: Sequence[tuple[int, int]],
        encode: Callable[[int, int], torch.Tensor],
        decode: Callable[[int, int, torch.Tensor], torch.Tensor],
        width: int,
        dtype: torch.dtype,
    ) -> None:
        self.segments = len(bounds)
        self._bounds, self._encode, self._decode = bounds, encode, decode
        self._width, self._dtype = width, dtype

    def nbytes(self, segment: int) -> int:
        first, last = self._bounds[segment]
        return (last - first) * self._width * self._dtype.itemsize

    def prepare(self, segment: int) -> torch.Tensor:
        return self._encode(*self._bounds[segment]).reshape(-1) * (1.0 / self.segments)

    def add(self, segment: int, received: torch.Tensor | None, own: torch.Tensor) -> torch.Tensor:
        total = own if received is None else received.view(self._dtype) + own
        return total.view(torch.uint8)

    def finish(self, segment: int, message: torch.Tensor) -> torch.Tensor:
        return self._decode(*self._bounds[segment], message.view(self._dtype)).reshape(-1)


def segment_bounds(count: int, segments: int, turn: int = 0) -> list[tuple[int, int]]:
    """Cut `count` units into runs of almost equal length, [first, last) each; some may be empty. Vectors of one length
    whose turns differ have their longer runs in different segments of a ring that carries them all."""
    lengths = [count * (i + 1) // segments - count * i // segments for i in range(segments)]
    turn %= segments
    return list(pairwise(accumulate(lengths[turn:] + lengths[:turn], initial=0)))


def ring_wire_bytes(sizes: Sequence[int], rank: int) -> int:
    """Return the bytes that a rank sends: segments rank, rank - 1, ... to be added to, then of rank + 1, rank, ..."""
    world_size = len(sizes)
    adding = sum(sizes[(rank - i) % world_size] for i in range(world_size - 1))
    return adding + sum(sizes[(rank + 1 - i) % world_size] for i in range(world_size - 1))


def pass_around(codes: Sequence[RingCode]) -> list[list[torch.Tensor]]:
    """Run the whole ring in one process, in a ring's order of summation; returns every segment's mean for each rank."""
    world_size = len(codes)
    messages = []
    for segment in range(world_size):
        message = None
        for rank in (*range(segment, world_size), *range(segment)):
            message = codes[rank].add(segment, message, codes[rank].prepare(segment))
        messages.append(message)
    return [[code.finish(s, m.clone()) for s, m in enumerate(messages) if m is not None] for code in codes]
