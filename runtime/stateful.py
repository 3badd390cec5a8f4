"""A rank's state in a checkpoint of torch.distributed.checkpoint.

    dcp.save({"model": model_state, "gradlab": state.stateful}, checkpoint_id=folder)
    dcp.load({"model": model_state, "gradlab": state.stateful}, checkpoint_id=folder)

That library takes tensors of one name on several ranks for copies, and keeps one. A residual is another one on every
rank, and a run that has yet to begin has none to load into. So a rank's state is one entry, under the rank's number.
"""

from __future__ import annotations

import io
from typing import Any, Protocol

import torch

from gradlab.errors import GradlabError
from gradlab.runtime.saved import load_saved


class Saves(Protocol):
    """An object with a state per rank: an `Exchange`."""

    def state_dict(self) -> dict[str, Any]:
        """Collect the rank's state."""

    def load_state_dict(self, state: Any) -> None:
        """Continue from it."""


class RankState:
    """Stateful, as torch.distributed.checkpoint calls it, with this rank's entry under `key`."""

    def __init__(self, exchange: Saves, key: str) -> None:
        self._exchange, self._key = exchange, key

    def state_dict(self) -> dict[str, Any]:
        """Write the rank's state as bytes, in one entry."""
        file = io.BytesIO()
        torch.save(self._exchange.state_dict(), file)
        return {self._key: file.getvalue()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from the rank's entry; refuse one that is missing, damaged, or of another plan or world size."""
        content = saved.get(self._key)
        if not isinstance(content, bytes):
            raise GradlabError(f"checkpoint: no state of {self._key}")
        try:
            state = load_saved(io.BytesIO(content), len(content))
        except GradlabError as error:
            raise GradlabError(f"{self._key}: {error}") from None
        self._exchange.load_state_dict(state)
