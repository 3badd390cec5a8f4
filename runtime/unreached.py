"""Notice backward passes and layers that never reach DDP's hook: what is not compressed shall not pass for it.

Until the hook gets its first bucket, every parameter counts how often its gradient was accumulated, and the DDP model
how often it was called. The first bucket ends the counting: from then on a step costs nothing more.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gradlab.ddp.averaged import not_averaged
from gradlab.ddp.copies import Hook
from gradlab.ddp.model import attached_hook
from gradlab.executor.rules import Finding, finding


def drifting(missing: Sequence[str], step: int) -> Finding:
    """Return the finding of layers that are trained and that DDP does not average, as seen at a step."""
    return finding("layer_not_averaged", not_averaged(missing), len(missing), 0, step=step)


class UnreachedHook:
    """Counts backward and forward passes until the hook is reached for the first time.

    It keeps neither the model nor a state alive, so that both can be dropped without closing.
    """

    def __init__(self, model: DistributedDataParallel, parameters: Sequence[torch.Tensor]) -> None:
        self._model = weakref.ref(model)
        self._accumulated: Counter[int] = Counter()
        self._calls = self._synchronised_calls = 0
        self._handles: list[Any] = [model.register_forward_pre_hook(Hook(self._forward))]
        for number, parameter in enumerate(parameters):
            self._handles.append(parameter.register_post_accumulate_grad_hook(partial(self._backward, number)))

    def _forward(self, model: DistributedDataParallel, inputs: Any) -> None:
        if torch.is_grad_enabled():
            self._calls += 1
            self._synchronised_calls += bool(model.require_backward_grad_sync)

    def _backward(self, number: int, parameter: torch.Tensor) -> None:
        self._accumulated[number] += 1

    def end(self) -> None:
        """Stop counting: the hook was reached, or the run is over."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def reached(self) -> None:
        """Note that the hook got a bucket. The first time ends the counting."""
        if self._handles:
            self.end()
            self._accumulated.clear()

    def finding(self) -> Finding | None:
        """Say which passes never reached the hook, and what to call; None if there were none."""
        passes = max(self._accumulated.values(), default=0)
        if not passes:
            return None
        count = f"{passes} backward passes" if passes > 1 else "a backward pass"
        seen = f"{count} of this model, none of which reached the CompressionState"
        return Finding("hook_not_reached", None, None, passes, 0, seen, "; ".join(self._reasons()))

    def _reasons(self) -> list[str]:
        model = self._model()
        hook = None if model is None else attached_hook(model)
        reasons = []
        if model is not None and hook is None:
            reasons.append(
                "it was not registered, so nothing was compressed; call ddp_model.register_comm_hook(state, "
                "compression_hook), or make the state with gradlab.compress(ddp_model, plan), which does it"
            )
        if not self._calls:
            reasons.append(
                "the DDP model itself was never called, so gradients were not even averaged; call ddp_model(...), "
                "not the module inside it"
            )
        elif not self._synchronised_calls:
            reasons.append(
                "all were under no_sync, which exchanges nothing; leave the last forward and backward pass before "
                "optimizer.step() outside of it"
            )
        return reasons or [
            "DDP was not prepared for them; in Lightning's manual optimization call self.manual_backward(loss), not "
            f"loss.backward() (the model's communication hook is {hook or 'unknown, as the model is gone'})"
        ]
