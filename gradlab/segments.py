"""Cut gradients into segments: each is on the wire while the next is encoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")

# Bytes of gradients that are encoded before the next collective is issued, unless the user says otherwise.
SEGMENT_BYTES = 8 * 2**20
# Of them, those for which a round of collectives is not worth its while: what is encoded next would wait for it.
SMALL = 1 / 8


def segments(
    items: Sequence[Item], nbytes: Callable[[Item], int], segment_bytes: float, small: float = 0.0
) -> Iterator[list[Item]]:
    """Cut items into runs of consecutive ones. A larger item is a run of its own, or ends a small one.

    Args:
        items: in order.
        nbytes: gives the size of an item, in bytes.
        segment_bytes: most bytes of a run.
        small: as a share of `segment_bytes`: below it a run takes a further item, however large.

    Yields:
        The runs, in order.
    """
    segment: list[Item] = []
    size = 0
    for item in items:
        if segment and size + nbytes(item) > segment_bytes and size >= small * segment_bytes:
            yield segment
            segment, size = [], 0
        segment.append(item)
        size += nbytes(item)
    if segment:
        yield segment
