"""Ring all-reduce with compression, segment by segment: what a codec contributes to Algorithm 1 of GradiVeQ.

Yu, Lin, et al., "GradiVeQ: Vector quantization for bandwidth-efficient gradient aggregation in distributed CNN
training", NeurIPS 2018, Algorithm 1 and Fig. 2. A vector is cut into N segments. Segment s starts at rank s and
travels N - 1 hops, at each of which a rank adds its own part; then the sums travel N - 1 hops more. The executors
(`gradlab.collectives.run_lockstep`, `gradlab.runtime`) move the messages; what is in them is a `RingCode`'s business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch


class RingCode(ABC):
    """One rank's side of a ring. Messages are vectors of bytes; their sizes are the same on every rank.

    segments: their number, the world size.
    """

    segments: int

    @abstractmethod
    def nbytes(self, segment: int) -> int:
        """Size of a segment's messages."""

    @abstractmethod
    def prepare(self, segment: int) -> torch.Tensor:
        """This rank's own part as `add` takes it. Nothing has to have arrived, so that it overlaps with the network."""

    @abstractmethod
    def add(self, segment: int, received: torch.Tensor | None, own: torch.Tensor) -> torch.Tensor:
        """The message that travels on. received: the predecessor's; None on the rank where the segment starts."""

    @abstractmethod
    def finish(self, segment: int, message: torch.Tensor) -> torch.Tensor:
        """The segment's mean over ranks, as a vector, from the message that holds the sum."""


class SummedRing(RingCode):
    """Parts that are summed as they are: gradients, or the codes of a compressor that commutes with the sum, eq. (1).

    bounds: where the segments begin and end; encode: own codes of what lies between two bounds; decode: the
    decompressed vector from the mean of such codes; width: codes per unit of the bounds.
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


def segment_bounds(count: int, segments: int) -> list[tuple[int, int]]:
    """`count` units in so many runs of almost one length, some empty where there are too few: [first, last) each."""
    edges = [count * i // segments for i in range(segments + 1)]
    return list(pairwise(edges))


def ring_wire_bytes(sizes: Sequence[int], rank: int) -> int:
    """Bytes a rank sends, sizes: of the segments' messages: rank, rank - 1, ... to be added to; then rank + 1, ..."""
    world_size = len(sizes)
    adding = sum(sizes[(rank - i) % world_size] for i in range(world_size - 1))
    return adding + sum(sizes[(rank + 1 - i) % world_size] for i in range(world_size - 1))


def pass_around(codes: Sequence[RingCode]) -> list[list[torch.Tensor]]:
    """The whole ring in one process: for each rank, every segment's mean, in the order of summation that a ring has."""
    world_size = len(codes)
    messages = []
    for segment in range(world_size):
        message = None
        for rank in (*range(segment, world_size), *range(segment)):
            message = codes[rank].add(segment, message, codes[rank].prepare(segment))
        messages.append(message)
    return [[code.finish(s, m.clone()) for s, m in enumerate(messages) if m is not None] for code in codes]
