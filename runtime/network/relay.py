"""All-to-alls of small parts in two hops on a grid of the ranks: messages to the row, and from there to the column.

A message costs its sender up to 50 us whatever its bytes, and N - 1 of them to every rank 51 ms at 1,024 ranks. Rank
(row, column) sends each rank of its row what is for that one's column, and then each rank of its column what its row
has for that one. Parts arrive as if they had gone directly. Only parts of numbers that all ranks know take this way;
those of varying lengths go directly, and their lengths in two hops.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from gradlab.collectives.relay import LEAST_RANKS, grid, relay_below

if TYPE_CHECKING:
    from gradlab.runtime.network.communicator import Communicator, Messages

Vectors = dict[int, torch.Tensor]  # by rank
_LARGE, _REPEATS = 2**20, 3  # bytes of a message that measures the speed; times that something is measured


def hops(
    rank: int, out: torch.Tensor, parts: torch.Tensor, for_one: Sequence[int], for_all: Sequence[int]
) -> Generator[tuple[Vectors, Vectors], None, None]:
    """Yield the vectors to fill and those to send, by rank, once per hop; at the end `out` is filled.

    Args:
        rank: this one.
        out: vector of what every rank has for this one, in rank order, each its `for_one` and its `for_all`.
        parts: vector of what this rank has for every rank, in the same form.
        for_one: elements for each rank that no other rank gets, from any rank.
        for_all: elements from each rank that all ranks get.
    """
    columns = grid(len(for_one))[1]
    row, column = divmod(rank, columns)
    of_row, of_column = list(range(row * columns, (row + 1) * columns)), range(column, len(for_one), columns)
    by_row = [list(for_all[first : first + columns]) for first in range(0, len(for_one), columns)]

    pieces = parts.split([n for size in for_one for n in (size, for_all[rank])])
    sent = {to: torch.cat([*pieces[2 * at :: 2 * columns], pieces[1]]) for at, to in enumerate(of_row)}
    sizes = [for_one[to] for to in of_column]
    received = {source: parts.new_empty(sum(sizes) + for_all[source]) for source in of_row} | {rank: sent[rank]}
    yield received, sent

    held = [received[source].split([*sizes, for_all[source]]) for source in of_row]
    gathered = [one[-1] for one in held]
    sent = {to: torch.cat([*(one[at] for one in held), *gathered]) for at, to in enumerate(of_column)}
    every = {source: [for_one[rank]] * columns + by_row[at] for at, source in enumerate(of_column)}
    received = {source: parts.new_empty(sum(each)) for source, each in every.items()} | {rank: sent[rank]}
    yield received, sent

    arrived = [received[source].split(each) for source, each in every.items()]
    torch.cat([one[at] for one in arrived for i in range(columns) for at in (i, columns + i)], out=out)


class Relay:
    """An all-to-all on its way, in two hops. Like `Messages`; the second hop begins in `wait`."""

    def __init__(
        self,
        communicator: Communicator,
        out: torch.Tensor,
        parts: torch.Tensor,
        for_one: Sequence[int],
        for_all: Sequence[int],
    ) -> None:
        """Start the first hop of what `hops` describes."""
        self._communicator, self._arrived = communicator, False
        self._hops = hops(communicator.rank, out, parts, for_one, for_all)
        self._messages = self._start(*next(self._hops))

    def _start(self, received: Mapping[int, torch.Tensor], sent: Mapping[int, torch.Tensor]) -> Messages:
        others = ({to: vector for to, vector in by.items() if to != self._communicator.rank} for by in (received, sent))
        return self._communicator.send("all-to-all", *others)

    def wait(self) -> None:
        """Wait for the first hop, send the second, and wait until everything is there; raise if a message failed."""
        self._messages.wait()
        for received, sent in self._hops:
            self._messages = self._start(received, sent)
            self._messages.wait()
        self._arrived = True

    def is_completed(self) -> bool:
        """Say whether everything is there, which is so after `wait`."""
        return self._arrived


def measured(communicator: Communicator) -> int:
    """Measure from how many bytes of the largest part on the ranks' all-to-alls are faster directly; all get the same.

    It takes some small all-to-alls of both kinds and some messages of 1 MB. 0: always, as between few ranks, where
    nothing is measured.
    """
    ranks = communicator.world_size
    small = torch.zeros(ranks, dtype=torch.uint8, device=communicator.device)
    if ranks < LEAST_RANKS or grid(ranks)[0] == 1 or not communicator.sends(small):
        return 0

    def all_to_all() -> torch.Tensor:
        out, work = communicator.all_to_all(small, [1] * ranks)
        communicator.wait(work)
        return out

    def pass_on() -> torch.Tensor:
        return communicator.arrived(communicator.pass_on(small.new_zeros(_LARGE), _LARGE))

    def seconds(run: Callable[[], torch.Tensor], below: int = 0) -> float:
        communicator.relay_below, times = below, list[float]()
        for _ in range(1 + _REPEATS):
            began = time.perf_counter()
            run()[-1].item()  # which waits for a GPU
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])

    own = seconds(all_to_all), seconds(all_to_all, 2), seconds(pass_on) / _LARGE
    direct, relayed, per_byte = map(max, zip(*communicator.ranks.gather(own), strict=True))
    communicator.take_counts()
    return relay_below(ranks, direct, relayed, per_byte)
