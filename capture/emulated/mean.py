"""The mean gradient of emulated ranks (nodes), one node in memory at a time."""

from __future__ import annotations

import torch
from torch import nn

from gradlab.errors import GradlabError


class NodeMean:
    """The mean of N nodes' gradients: each times 1/N, added in rank order, as `sum_in_rank_order` does.

    It takes every parameter's .grad when a node ends, and puts the mean into .grad when the step ends. Memory: one
    gradient.
    """

    def __init__(self, model: nn.Module, world_size: int) -> None:
        self._model = model
        self._names, self._parameters = zip(*model.named_parameters(), strict=True)
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        self._scale = 1.0 / world_size
        self._before: list[torch.Tensor | None] = []  # each .grad as the step found it: None or zeros
        self._totals: list[torch.Tensor | None] = []
        self._versions: list[int] = []

    def begin_step(self) -> None:
        """Start a step. Refuse a gradient other than zero that is left over: DDP would add it to every rank's.

        A parameter that was replaced, added or unfrozen since the recording began is refused too, because it would be
        missed.
        """
        self._require_same()
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if parameter.grad is not None and _any(parameter.grad):
                raise GradlabError(
                    f"{name}: a gradient is left over from before node 0; call optimizer.zero_grad() before each step"
                )
        self._before = [parameter.grad for parameter in self._parameters]
        self._totals = [None] * len(self._before)
        self._versions = [parameter._version for parameter in self._parameters]

    def begin_node(self) -> None:
        """Start a node's pass without gradients; refuse a parameter that has changed within the step."""
        self._require_unchanged()
        self._clear()

    def discard_node(self) -> None:
        """Drop the gradients of a node that failed."""
        for parameter, before in zip(self._parameters, self._before, strict=True):
            parameter.grad = before

    @torch.no_grad()
    def end_node(self) -> None:
        for position, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                continue
            share, total = parameter.grad.detach().mul_(self._scale), self._totals[position]
            self._totals[position] = share if total is None else total.add_(share)
        self._clear()

    def end_step(self) -> None:
        """Put the mean into .grad. An unused parameter gets its earlier .grad back."""
        self._require_unchanged()
        for parameter, total, before in zip(self._parameters, self._totals, self._before, strict=True):
            parameter.grad = before if total is None else total
        self._totals, self._before = [], []

    def _require_unchanged(self) -> None:
        for name, parameter, version in zip(self._names, self._parameters, self._versions, strict=True):
            if parameter._version != version:
                raise GradlabError(
                    f"{name} has changed since the step began; all nodes of a step take their gradients at the same "
                    "parameters, and optimizer.step() comes after average()"
                )

    def _require_same(self) -> None:
        known = {id(parameter): trained for parameter, trained in zip(self._parameters, self._trained, strict=True)}
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and not known.get(id(parameter)):
                raise GradlabError(
                    f"{name} was replaced, added or unfrozen after the recording began, which does not have it; change "
                    "the model first, then make new EmulatedNodes"
                )

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def _any(gradient: torch.Tensor) -> bool:
    """Tell whether any element is other than zero; NaN counts as such."""
    return bool((gradient.coalesce().values() if gradient.is_sparse else gradient).any())
