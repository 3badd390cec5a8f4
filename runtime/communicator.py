"""Serve codecs' requests on a process group: requests that stand at the same step become one collective per kind.

Which collectives are issued, and in which order, follows from the requests' kinds and shapes alone.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradlab.collectives import Request, check_request, payload_bytes, signature
from gradlab.errors import GradlabError
from gradlab.runtime.fused import Fused, InPlaceMean, fuse, fusion_key

# torch 2.13 renames all_gather_into_tensor and warns of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Communicator:
    """Issues fused collectives on one process group and counts what passes.

    deterministic: means are taken by all-to-all, a sum in rank order and all-gather, so that they equal
    `run_lockstep`'s bit for bit; otherwise by the backend's all-reduce.
    check_requests: before each round compare all ranks' requests (a debugging aid; one small collective more).
    """

    def __init__(self, group: dist.ProcessGroup, deterministic: bool = False, check_requests: bool = False) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.deterministic = deterministic
        self.check_requests = check_requests
        self.payload_bytes = 0
        self.wire_bytes = 0
        self.wait_seconds = 0.0

    def issue(self, requests: Sequence[Request]) -> Round:
        """Start the collectives that serve `requests`, without waiting for them."""
        for request in requests:
            check_request(request, self.world_size)
            self.payload_bytes += payload_bytes(request, self.rank)
        if self.check_requests:
            self._compare([signature(request) for request in requests])
        return Round(self, requests)

    def mean_in_place(self, buffer: torch.Tensor) -> Fused:
        """Start replacing a buffer by its mean over ranks; exactly plain DDP's arithmetic unless deterministic."""
        self.payload_bytes += buffer.nbytes
        return InPlaceMean(self, buffer)

    def wait(self, work: dist.Work | None) -> None:
        """Wait for a collective, and note how long that took."""
        if work is not None:
            start = time.perf_counter()
            work.wait()
            self.wait_seconds += time.perf_counter() - start

    def gather_bytes(self, message: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's message, a uint8 vector of one length on all ranks; not counted."""
        out, work = self.start_all_gather(message)
        self.wait(work)
        return list(out)

    def start_all_gather(self, message: torch.Tensor) -> tuple[torch.Tensor, dist.Work | None]:
        """Start gathering vectors of one length: the tensor (N, length) that will hold them, and what to wait for."""
        out = message.new_empty(self.world_size, message.numel())
        # An empty collective is an error on some backends.
        empty = message.numel() == 0
        return out, None if empty else _all_gather(out.view(-1), message, group=self.group, async_op=True)

    def _compare(self, signatures: Sequence[Any]) -> None:
        digest = hashlib.sha256(repr(signatures).encode()).digest()
        theirs = self.gather_bytes(torch.tensor(list(digest), dtype=torch.uint8))
        if different := [rank for rank, other in enumerate(theirs) if bytes(other.tolist()) != digest]:
            raise GradlabError(f"ranks {different} ask for other collectives than rank {self.rank}: {signatures}")


class Round:
    """The collectives in flight for one set of requests."""

    def __init__(self, communicator: Communicator, requests: Sequence[Request]) -> None:
        by_kind: dict[tuple[Any, ...], list[int]] = {}
        for position, request in enumerate(requests):
            by_kind.setdefault(fusion_key(request), []).append(position)
        self._count = len(requests)
        self._fused = [
            (positions, fuse(communicator, [requests[p] for p in positions])) for positions in by_kind.values()
        ]

    def answers(self) -> list[Any]:
        """Wait, and return one answer per request, in order; every tensor has storage of its own."""
        answers: list[Any] = [None] * self._count
        for positions, fused in self._fused:
            for position, answer in zip(positions, fused.answers(), strict=True):
                answers[position] = answer
        return answers
