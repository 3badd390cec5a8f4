"""Cut items into runs of a size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def segments(items: Sequence[Item], nbytes: Callable[[Item], int], segment_bytes: float) -> Iterator[list[Item]]:
    """Cut items, of `nbytes` bytes each, into runs of at most `segment_bytes`, in order. A larger item is a run of its
    own."""
    segment: list[Item] = []
    size = 0
    for item in items:
        if segment and size + nbytes(item) > segment_bytes:
            yield segment
            segment, size = [], 0
        segment.append(item)
        size += nbytes(item)
    if segment:
        yield segment
