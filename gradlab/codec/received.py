"""Messages of other ranks: how long they may be, and who sent one that cannot be decoded.

Every rank decodes what a gather or a broadcast brings, so that all refuse it alike. What one rank is sent alone, as in
an all-to-all, it refuses alone: the executor tells the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from gradlab.errors import BadMessage, GradlabError

if TYPE_CHECKING:
    from gradlab.codec.compressor import Compressor

_BYTES_A_VALUE, _BESIDE = 16, 2**16  # no honest message of varying size comes near


def most_bytes(numel: int) -> int:
    """Bound the bytes of a message of varying size about a vector (numel,)."""
    return _BYTES_A_VALUE * numel + _BESIDE


@contextmanager
def sent_by(rank: int) -> Iterator[None]:
    """Name the rank in the error that decoding its message raises."""
    try:
        yield
    except BadMessage:
        raise
    except GradlabError as wrong:
        raise BadMessage(f"what rank {rank} sent cannot be decoded: {wrong}") from wrong


def average_of_ranks(
    codec: Compressor, out: torch.Tensor, payloads: Iterable[Sequence[torch.Tensor]], scale: float
) -> torch.Tensor:
    """Decode and average payloads in rank order as `Compressor.average_into`; a refused one raises BadMessage with its
    rank."""
    every = list(payloads)
    try:
        return codec.average_into(out, every, scale)
    except GradlabError:
        for rank, payload in enumerate(every):  # apart, to see whose it was
            with sent_by(rank):
                codec.decompress_into(out, payload)
        raise
