"""All that a training step changes, kept and put back in place."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from gradlab.ddp.optimizer_steps import at_any_step
from gradlab.ddp.optimizers import HeldLayers
from gradlab.errors import GradlabError


class Stateful(Protocol):
    """A snapshot's other objects: schedulers, loss scalers, and the like."""

    def state_dict(self) -> Any:
        """Give the state."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take a state."""


class Snapshot:
    """A training as it is now: parameters, gradients, buffers, bare optimizers, and others with `state_dict`.

    Values go back into the tensors that hold them, which others may hold too: DDP's buckets, captured graphs, averages
    of a model.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], others: Iterable[Stateful]
    ) -> None:
        self._parameters = [(one, one.detach().clone(), one.grad, _copied(one.grad)) for one in model.parameters()]
        self._buffers = [
            (module, name, buffer, _copied(buffer))
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]
        self._optimizers = [_OptimizerState(one) for one in _with_inner(optimizers)]
        self._others = [(one, copy.deepcopy(one.state_dict())) for one in others]
        self._draws = draws()

    @property
    def nbytes(self) -> int:
        """Bytes that the snapshot holds on this rank, without what was named beside model and optimizers."""
        kept = [tensor for _, value, _, gradient in self._parameters for tensor in (value, gradient)]
        kept += [tensor for *_, tensor in self._buffers]
        kept += [tensor for one in self._optimizers for tensor in one.tensors()]
        local = [one.to_local() if hasattr(one, "to_local") else one for one in kept if one is not None]  # of a DTensor
        return sum(one.numel() * one.element_size() for one in local)

    @torch.no_grad()
    def restore(self) -> None:
        """Put all back."""
        for parameter, value, gradient, of_gradient in self._parameters:
            parameter.copy_(value)
            parameter.grad = _put_back(gradient, of_gradient)
        for module, name, buffer, of_buffer in self._buffers:
            module._buffers[name] = _put_back(buffer, of_buffer)
        for optimizer in self._optimizers:
            optimizer.restore()
        for one, state in self._others:
            one.load_state_dict(copy.deepcopy(state))
        draw_from(self._draws)


class _OptimizerState:
    """An optimizer's state and settings, put back into the same tensors."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state = {
            parameter: {key: (value, _copied(value)) for key, value in held.items()}
            for parameter, held in optimizer.state.items()
        }
        self._groups = [
            {key: (value, _copied(value)) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]

    def tensors(self) -> list[torch.Tensor]:
        """The part of the state that is kept."""
        kept = [value for held in self._state.values() for _, value in held.values()]
        return [value for value in kept if torch.is_tensor(value)]

    def restore(self) -> None:
        state = self._optimizer.state
        for parameter in [one for one in state if one not in self._state]:
            del state[parameter]
        for parameter, held in self._state.items():
            state[parameter] = {key: _put_back(*pair) for key, pair in held.items()}
        if len(self._optimizer.param_groups) != len(self._groups):
            raise GradlabError("the optimizer got parameter groups during a pilot; add them before or after it")
        for group, kept in zip(self._optimizer.param_groups, self._groups, strict=True):
            for key in [one for one in group if one != "params" and one not in kept]:
                del group[key]
            group.update({key: _put_back(*pair) for key, pair in kept.items()})


def _with_inner(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Add the optimizer inside of a ZeroRedundancyOptimizer, which has the state of this rank's share."""
    found: list[torch.optim.Optimizer] = []
    for one in optimizers:
        inner = getattr(one, "optim", None)
        found += [one, inner] if isinstance(inner, torch.optim.Optimizer) else [one]
    return found


def draws() -> dict[str, Any]:
    """Return the states of all generators that training code draws from by itself."""
    numpy = np.random.get_state()  # noqa: NPY002  training code may draw from it
    found = {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def draw_from(states: dict[str, Any]) -> None:
    """Put back what `draws` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def _copied(value: Any) -> Any:
    return value.detach().clone() if torch.is_tensor(value) else copy.deepcopy(value)


def _put_back(original: Any, kept: Any) -> Any:
    if torch.is_tensor(original):
        original.detach().copy_(kept)
        return original
    return copy.deepcopy(kept)


class StepWatch:
    """Sees every step of every optimizer (bare) from now on."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], names: Mapping[torch.Tensor, str]) -> None:
        self._optimizers, self._held = optimizers, HeldLayers(optimizers, names)
        self._stepped = False
        self._others: dict[str, str] = {}
        self._handle = at_any_step(self._note)

    def _note(self, optimizer: torch.optim.Optimizer, *arguments: object) -> None:
        self._stepped = self._stepped or any(optimizer is one for one in self._optimizers)
        for layer in self._held.taken_by(optimizer)[:1]:
            self._others[type(optimizer).__name__] = layer

    def problem(self, batches: int) -> str | None:
        """Say what the training of so many batches did that a pilot cannot put back; None: nothing."""
        for kind, layer in self._others.items():
            return (
                f"{kind} steps {layer}, and was not given to the pilot, which would not put its state back; give all "
                "optimizers: Pilot(model, [first, second], plans)"
            )
        seen = all(isinstance(one, torch.optim.Optimizer) for one in self._optimizers)
        if seen and not self._stepped:
            kinds = ", ".join(dict.fromkeys(type(one).__name__ for one in self._optimizers)) or "no optimizer"
            return (
                f"{kinds} took no step on {batches} batches; give the pilot the optimizer that trains the model, and "
                "step it in the loop"
            )
        return None

    def close(self) -> None:
        """See no more steps."""
        self._handle.remove()
