"""Tasks for real ranks: what one of them hands to the network is not what its codec sent."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from campaigns.fuzzed.messages import SHAPES, altered_request, plan_of
from gradlab.ddp.groups import group_like
from gradlab.errors import GradlabError
from gradlab.plan.plan import hash_tensor
from gradlab.runtime import Exchange
from gradlab.runtime.network.communicator import Communicator
from support.prescribed import Prescribed, gradients

PATIENCE = timedelta(seconds=8)  # of collectives that will never be complete


class Liar:
    """Alters what one rank hands to its communicator: a request, or the lengths that it announces.

    Attributes:
        kind: what was done, once it was.
    """

    def __init__(self, communicator: Communicator, request: int, draw: np.random.Generator) -> None:
        self.kind = ""
        self._left, self._draw, self._lengths = request, draw, draw.random() < 0.2
        self._issue, self._gather = communicator.issue, communicator.all_gather
        self._exchange, self._rank = communicator.all_to_all, communicator.rank
        for name in ("issue", "all_gather", "all_to_all"):
            setattr(communicator, name, getattr(self, name))

    def issue(self, requests: Sequence[Any]) -> Any:
        handed = list(requests)
        varies = any(getattr(request, "varying", False) for request in handed)
        if not self.kind and self._left < len(handed) and not (self._lengths and varies):
            self.kind, handed[self._left] = altered_request(handed[self._left], self._draw, lockstep=False)
            self.kind = f"{type(handed[self._left]).__name__} {self.kind}"
        self._left -= len(handed)
        return self._issue(handed)

    def all_gather(self, message: torch.Tensor) -> Any:
        return self._gather(self._announced(message, range(len(message))))

    def all_to_all(self, parts: torch.Tensor, *sizes: Any) -> Any:
        for_ranks = [rank for rank, size in enumerate(sizes[0]) for _ in range(size)]
        others = [at for at, rank in enumerate(for_ranks) if rank != self._rank]  # one's own do not travel
        return self._exchange(self._announced(parts, others), *sizes)

    def _announced(self, lengths: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
        if not self._lengths or self.kind or lengths.dtype != torch.int32 or not places:
            return lengths
        self.kind, lengths = "announced lengths", lengths.clone()
        lengths[places[int(self._draw.integers(len(places)))]] = int(
            self._draw.choice([-1, -(2**31), 2**30, 2**31 - 1, 0])
        )
        return lengths


def altered(group: dist.ProcessGroup, number: int, family: str, step: int, rank: int, request: int) -> dict[str, Any]:
    """Train under a plan; one rank's message is altered in one step. How it ended on this rank, after another step."""
    began, me, liar = time.monotonic(), dist.get_rank(group), None
    own = group_like(group, PATIENCE, torch.device("cpu"))
    ended: dict[str, Any] = {"error": "", "means": []}
    model = Prescribed(SHAPES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = Exchange(plan_of(family), model.named_parameters(), own, optimizer=optimizer)
        try:
            for now in range(step + 2):
                if now == step and me == rank:
                    liar = Liar(run._driver.communicator, request, np.random.default_rng([number]))
                found = gradients(SHAPES, me, now)
                run.step(found)
                ended["means"].append([hash_tensor(mean) for mean in found.values()])
        except GradlabError as error:
            ended["error"] = str(error)
            dist.destroy_process_group(own)
        run.close()
        if not ended["error"]:
            dist.destroy_process_group(own)
    kind = "" if liar is None else liar.kind
    return {**ended, "kind": kind, "seconds": time.monotonic() - began}
