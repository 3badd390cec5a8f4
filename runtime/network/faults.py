"""Let all ranks know at once when one of them fails, and why.

A rank leaves its reason in the process group's store and then destroys the group that its codecs use. Its peers'
collectives then end with an error at once instead of at the timeout, and the peers find the reason in the store. A
rank that was killed leaves none. The error then names what the backend saw.
"""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from gradlab.errors import GradlabError

_PATIENCE = 1.0  # seconds in which a peer's reason may still be on its way
_runs: Counter[str] = Counter()  # runs so far on each process group, which all of its ranks begin together


class CommunicationError(GradlabError):
    """A collective failed: a peer is gone or stuck, or the network is."""


class Reasons:
    """Why ranks failed, by rank, in the store that all of them reach.

    All ranks of a process group make one together. One group may serve several runs, one after the other: the reasons
    of an earlier run are not read.

    store: the store; None where there is none.
    prefix: prefix of the run's keys in it.
    """

    def __init__(self, name: str, rank: int, names: Sequence[int]) -> None:
        self._rank, self._names = rank, names
        _runs[name] += 1
        self.prefix = f"gradlab/{name}/{_runs[name]}"
        self.store: Any = None
        # Private, and absent where the default group was made without one. A group without a name is torchft's, whose
        # ranks have no store in common.
        with suppress(Exception):
            self.store = dist.distributed_c10d._get_default_store() if name else None

    def leave(self, reason: str) -> None:
        """Tell the others why this rank fails."""
        if self.store is not None:
            _patiently(lambda: self.store.set(f"{self.prefix}/failure/{self._rank}", json.dumps(reason)))

    def of(self, error: BaseException, iteration: int) -> str:
        """Find in one line why a step failed. If the cause is on this rank, leave it for the others."""
        text = str(error) if isinstance(error, GradlabError) else f"{type(error).__name__}: {error}"
        reason = f"step {iteration}: {text}"
        if isinstance(error, CommunicationError):
            cause = self.find()
            return f"step {iteration}: another rank failed ({cause})" if cause else reason
        self.leave(reason)
        return reason

    def find(self) -> str | None:
        """Look for the reason that another rank left, as "rank 2: ..."."""
        return None if self.store is None else _patiently(self._look)

    def _look(self) -> str | None:
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            for rank, called in enumerate(self._names):
                key = f"{self.prefix}/failure/{rank}"
                if rank != self._rank and self.store.check([key]):
                    return f"rank {called}: {json.loads(self.store.get(key))}"
            time.sleep(0.05)
        return None


def let_go(error: BaseException) -> None:
    """Clear the variables of the functions that an error came through, and keep its lines.

    They hold collectives, and these the group: while somebody keeps the error, or nobody has collected it yet, peers
    would wait for this rank in a group that has been destroyed. The caller holds no collective itself.
    """
    chain: list[BaseException] = []
    while error not in chain:
        chain.append(error)
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__ or error


def _patiently(ask: Callable[[], str | None]) -> str | None:
    """Return what `ask` returns, or None if it fails or takes too long.

    The store is gone with the rank that held it. If that rank stands still, the store does not answer, and no timeout
    of its own ends that.
    """
    answers: list[str | None] = []

    def run() -> None:
        with suppress(Exception):
            answers.append(ask())

    thread = threading.Thread(target=run, name="gradlab-failure", daemon=True)
    thread.start()
    thread.join(2 * _PATIENCE)
    return answers[0] if answers else None
