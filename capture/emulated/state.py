"""The state that a DDP rank has beside its gradients: buffers, random generators, and forward passes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from gradlab.errors import GradlabError


class NodeBuffers:
    """Buffers (running statistics and the like) of emulated ranks (nodes), as DDP with broadcast_buffers treats them.

    Before a step's forward pass every rank has the buffers of rank 0. Each rank then changes its own buffers, and only
    those of rank 0 reach the next step. Memory: two copies of the buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._common: dict[str, torch.Tensor] = {}  # before the step, on every node
        self._first: dict[str, torch.Tensor] = {}  # as node 0 leaves them

    def begin_step(self) -> None:
        self._common = self._copy()

    def begin_node(self) -> None:
        """Give the next node the buffers that node 0 began with."""
        self._restore(self._common)

    def keep_first(self) -> None:
        """Keep the buffers that node 0's pass left."""
        self._first = self._copy()

    def end_step(self) -> None:
        self._restore(self._first)

    def _copy(self) -> dict[str, torch.Tensor]:
        return {name: buffer.detach().clone() for name, buffer in self._model.named_buffers()}

    @torch.no_grad()
    def _restore(self, values: dict[str, torch.Tensor]) -> None:
        for name, buffer in self._model.named_buffers():
            if name in values:
                buffer.copy_(values[name])


class NodeStreams:
    """Torch's global generators (those of `devices` too), with one state for each node. Dropout draws from no others.

    Node r begins as a process after `torch.manual_seed(seed + r)`. Outside of nodes the generators are as if no node
    had drawn from them.
    """

    def __init__(self, seed: int, devices: list[int]) -> None:
        self._seed, self._devices = seed, devices
        self._states: dict[int, list[torch.Tensor]] = {}

    @contextlib.contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """Draw from the generators of one node while the context lasts. If the body fails, its draws are undone."""
        generators = [torch.default_generator, *(torch.cuda.default_generators[index] for index in self._devices)]
        with torch.random.fork_rng(devices=self._devices):
            states = self._states.get(rank)
            for position, generator in enumerate(generators):
                if states is None:
                    generator.manual_seed(self._seed + rank)
                else:
                    generator.set_state(states[position])
            yield
            self._states[rank] = [generator.get_state() for generator in generators]


class ForwardPasses:
    """A forward pre-hook that counts a node's passes, and refuses training passes that belong to no node."""

    def __init__(self) -> None:
        self.inside: bool | None = None  # whether a node is at work; None: not recording
        self.count = 0

    def __call__(self, module: nn.Module, inputs: object) -> None:
        if self.inside is None or not torch.is_grad_enabled():
            return
        if not self.inside and module.training:
            # The pass would change the buffers that every node begins with, and its graph would belong to no node.
            raise GradlabError("a training forward pass outside of a node: put it into `with nodes.node(rank):`")
        self.count += 1
