"""Backward passes of an FSDP2 model: which of them ends a step, and what follows its end.

torch tells neither, so that private attributes are read here as in `gradlab.ddp.sharded_units`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from gradlab.ddp.copies import Hook, Uncopied, take_away
from gradlab.ddp.sharded_units import Unit
from gradlab.errors import GradlabError

_NONE = -1  # torch's number of the pass under way where there is none


class Passes(Uncopied):
    """Ends a step with the backward pass through the model's own output, or with the one after which no unit is left.

    A loss may be taken from that output in pieces, by a unit that has backward passes of its own before that one:
    torchtitan's chunked loss. Where the model was not called as a whole, each pass ends a step.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self._units, self._all = units, {id(unit.module) for unit in units}
        self._running: int | None = None  # the pass whose end is waited for
        self._met: set[int] = set()
        self._awaited = self._through = False
        self._hooks = [model.register_forward_hook(Hook(self._called))]

    def _called(self, *_: Any) -> None:
        self._awaited = self._awaited or (not torch.compiler.is_compiling() and torch.is_grad_enabled())

    def after(self, module: Any, action: Callable[[], None]) -> None:
        """Call an action at the end of the step in which a unit is reduced now. Its other units may ask for it, too."""
        self._met.add(id(module))
        running = torch._C._current_graph_task_id()
        if running == self._running:
            return
        self._running = running  # another one may have failed before its end
        self._through = running == _NONE or _root_of(self._units)._training_state.name == "PRE_BACKWARD"
        _after_reduction(self._units, partial(self._ended, action))

    def _ended(self, action: Callable[[], None]) -> None:
        self._running = None
        if self._through or not self._awaited or self._met >= self._all:
            self._awaited = False
            self._met.clear()
            action()

    def close(self) -> None:
        """Take the model's hook away."""
        take_away(self._hooks)


def require_whole_backward(units: Iterable[Unit]) -> None:
    """Refuse the end of a backward pass within another one: FSDP must have ended its own."""
    if any(unit.module._get_fsdp_state()._state_ctx.post_backward_final_callback_queued for unit in units):
        raise GradlabError(
            "a part of the backward pass ended within it, as under torch.utils.checkpoint with use_reentrant=True; "
            "checkpoint with use_reentrant=False"
        )


def _root_of(units: Iterable[Unit]) -> Any:
    """Return FSDP's state of the model itself."""
    states = (state for unit in units for state in unit.module._get_fsdp_state()._state_ctx.all_states)
    return next(state for state in states if state._is_root)


def _after_reduction(units: Iterable[Unit], action: Callable[[], None]) -> None:
    """Call an action once FSDP has ended its backward pass. A stage of a pipeline reduces its gradients after the last
    micro-batch and outside of backward, and then calls what ends FSDP's."""
    if torch._C._current_graph_task_id() != _NONE:
        Variable._execution_engine.queue_callback(action)  # FSDP's own was queued by the first unit's backward
        return
    root = _root_of(units)
    end = root._root_post_backward_final_callback

    def ended() -> None:
        del root._root_post_backward_final_callback
        end()
        action()

    root._root_post_backward_final_callback = ended
