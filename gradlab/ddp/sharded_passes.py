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
from gradlab.ddp.model import without_compile
from gradlab.ddp.sharded_units import Unit
from gradlab.errors import GradlabError

_NONE = -1  # torch's number of the pass under way where there is none


class Passes(Uncopied):
    """Ends a step with the backward pass that reduces a unit which the model itself has called.

    A loss may be taken in pieces from what the model returned, by a unit that is called on its own and has backward
    passes of its own: torchtitan's chunked loss. These belong to the step of the pass through the rest of the model. If
    none follows, `finish` ends the step, as does the model's next call.

    handles: of the hooks that see calls.
    """

    def __init__(self, model: object, units: Sequence[Unit]) -> None:
        inner = without_compile(model)
        assert isinstance(inner, nn.Module)
        self._units = units
        self._running: int | None = None  # the pass whose end is waited for
        self._inside = self._called = False  # whether the model is running, and ran since the last step's end
        self._alone: set[int] = set()  # units that were called on their own, the last time
        self._reduced: set[int] = set()  # units, in the pass under way
        self._open: Callable[[], None] | None = None
        self.handles = [
            inner.register_forward_pre_hook(Hook(self._enter)),
            inner.register_forward_hook(Hook(self._leave), always_call=True),
        ]
        for unit in units:
            called = Hook(self._call, id(unit.module))
            others = [module for module in unit.module._get_fsdp_state()._modules if module is not inner]
            self.handles += [module.register_forward_pre_hook(called) for module in others]

    def _enter(self, *_: Any) -> None:
        if _is_forward_pass():
            self.finish()
            self._inside = self._called = True

    def _leave(self, *_: Any) -> None:
        self._inside = False

    def _call(self, unit: int, *_: Any) -> None:
        if _is_forward_pass():
            (self._alone.discard if self._inside else self._alone.add)(unit)

    def after(self, module: Any, action: Callable[[], None]) -> None:
        """Call an action at the end of the step in which a unit is reduced now. Its other units may ask for it, too."""
        running = torch._C._current_graph_task_id()
        if running == self._running:
            self._reduced.add(id(module))
            return
        self._running, self._reduced = running, {id(module)}  # another pass may have failed before its end
        _after_reduction(self._units, partial(self._ended, action))

    def _ended(self, action: Callable[[], None]) -> None:
        self._running, self._open = None, action
        if not (self._called and self._reduced <= self._alone):
            self.finish()

    def finish(self, *_: Any) -> None:
        """End the step that is open after a pass of units that were called on their own, if there is one."""
        action, self._open = self._open, None
        if action is not None:
            self._called = False
            action()

    def close(self) -> None:
        """Take the hooks away. A step that is open is not ended."""
        self._open = None
        take_away(self.handles)


def _is_forward_pass() -> bool:
    """Whether a module's call is to be trained by, and no call of a backward pass that computes activations anew."""
    backward = torch.compiler.is_compiling() or torch._C._current_graph_task_id() != _NONE
    return not backward and torch.is_grad_enabled()


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
