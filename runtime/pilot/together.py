"""Share problems and the time taken among the ranks of a pilot."""

from __future__ import annotations

import sys
import time
from typing import Any

from gradlab.ddp.groups import Ranks
from gradlab.errors import GradlabError


class Together:
    """All ranks of a pilot.

    seconds: since the pilot began (by `time.monotonic`), of the slowest rank, when ranks last spoke.
    """

    def __init__(self, ranks: Ranks, began: float) -> None:
        self._ranks, self._began = ranks, began
        self.seconds = 0.0

    def gather(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Gather plain JSON from all ranks; raise on all of them, if one has a "problem"."""
        every = self._ranks.gather({"seconds": time.monotonic() - self._began, **own})
        self.seconds = max(one["seconds"] for one in every)
        problems = [one.get("problem") for one in every]
        for rank, problem in enumerate(problems):
            if problem is not None:
                raise GradlabError(problem if len(set(problems)) == 1 else f"rank {rank}: {problem}")
        return every

    def say(self, line: str) -> None:
        """Print a line with the time, on the first rank."""
        if self._ranks.rank == 0:
            seconds = time.monotonic() - self._began
            print(f"gradlab pilot, {seconds:.0f} s: {line}", file=sys.stderr, flush=True)
