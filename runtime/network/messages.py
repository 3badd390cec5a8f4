"""Messages between pairs of ranks, several at once."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
import torch.distributed as dist

from gradlab.runtime.timeline import Timeline

# Bytes of a message from which several are worth more processor time than one collective.
LEAST_BYTES = 128 * 2**10


class Messages:
    """Messages of this rank to others and of others to this one, on their way. Like `dist.Work`, for all of them.

    Gloo sends what the receiver has told that it waits for, and tells so on the one connection of the two ranks, behind
    whatever is being sent there. So all receives begin first. If sends did, as in Gloo's own all-to-all, the two
    directions of a connection take turns, and large messages use 0.6 of a link.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        name: str,
        received: Mapping[int, torch.Tensor],
        sent: Mapping[int, torch.Tensor],
        timeline: Timeline,
    ) -> None:
        """Start them: vectors to fill and vectors to send, by rank of the group. Empty ones are left out."""
        self._name, self._timeline, self._began = name, timeline, time.perf_counter()
        self._memory = (received, sent)  # alive until everything is there: the backend holds no tensor
        operations = [
            dist.P2POp(start, message, group=group, group_peer=rank)
            for start, messages in ((dist.irecv, received), (dist.isend, sent))
            for rank, message in messages.items()
            if message.numel()
        ]
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> None:
        """Wait until all are there; raise if one of them failed."""
        for work in self._works:
            work.wait()
        # They have no future to tell when they were over, so that the span ends with the wait for them.
        nbytes = sum(message.nbytes for message in self._memory[1].values())
        self._timeline.add("network", self._name, self._began, time.perf_counter(), bytes=nbytes)

    def is_completed(self) -> bool:
        """Say whether all are there."""
        return all(work.is_completed() for work in self._works)
