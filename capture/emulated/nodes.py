"""Record the gradients of N ranks from one process, to study their redundancy before owning N machines.

A node is an emulated rank. Parameters, and an optimizer that steps with the mean gradient, exist once. Micro-batch,
gradients, buffers and random draws are set for each node in turn.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from gradlab.capture.budget import plan_recording
from gradlab.capture.emulated.mean import NodeMean
from gradlab.capture.emulated.start import (
    check_model,
    check_numbers,
    emulated_metadata,
    require_room,
)
from gradlab.capture.emulated.state import ForwardPasses, NodeBuffers, NodeStreams
from gradlab.capture.emulated.trial import TrialOfNodes
from gradlab.capture.layers import LayerChoice, choose_layers
from gradlab.capture.optimizer_steps import StepCount
from gradlab.capture.settings import StepSettings, announce
from gradlab.capture.writing.async_writer import RecorderReport, describe
from gradlab.capture.writing.trace_writer import TraceWriter
from gradlab.ddp.copies import Hook
from gradlab.ddp.optimizers import HeldLayers
from gradlab.errors import GradlabError
from gradlab.layout import Layer, named_layers
from gradlab.trial import trial


class EmulatedNodes:
    """Runs N ranks (nodes) of DDP one after another with one model in one process, and records their gradients.

        with EmulatedNodes(model, "trace", world_size=64, optimizer=optimizer) as nodes:
            for micro_batches in batches:                    # (inputs, targets) of each node
                optimizer.zero_grad()
                for rank, (inputs, targets) in enumerate(micro_batches):
                    with nodes.node(rank):                   # forward and backward pass
                        loss = criterion(model(inputs), targets)
                        loss.backward()
                        nodes.annotate(loss=loss)
                nodes.average()                              # the mean is in every .grad
                optimizer.step()

    Training equals that of DDP(model, find_unused_parameters=True) with N ranks. All nodes see the same parameters.
    Each node sees the batch statistics of its own micro-batch. Buffers are node 0's before every node's pass and after
    the step, as DDP broadcasts them. Several forward passes in one node are one rank's passes under no_sync. The mean
    is that of `gradlab.collectives.sum_in_rank_order`: bit for bit DDP's with two ranks; with more, DDP's backend adds
    in its own order. Inside node r, torch's global generators (dropout) draw as on a rank that called
    torch.manual_seed(seed + r) before its first step. Other generators are left to the caller.

    Gradients are recorded as they are when the node ends: times the loss scale, with infinite and NaN values. A
    parameter without a gradient is recorded as zeros and marked unused. Memory: up to 16 recorded steps of every node,
    or 64 MiB of them and at least one; and one mean gradient. A step that cannot be written stops the run with a
    GradlabError, because the run exists for its trace.

    >>> from gradlab.capture import EmulatedNodes
    >>> model = torch.nn.Linear(4, 2)
    >>> with EmulatedNodes(model, "emulated", world_size=3) as nodes:
    ...     for rank in range(3):
    ...         with nodes.node(rank):
    ...             model(torch.full((1, 4), rank + 1.0)).sum().backward()
    ...     nodes.average()
    >>> Trace("emulated").world_size, model.weight.grad[0].tolist()
    (3, [2.0, 2.0, 2.0, 2.0])

    Args:
        model: a bare module, not in DDP.
        path: folder of the trace, new or empty.
        world_size: number of nodes N.
        optimizer: one or several, as in `TraceRecorder`.
        scaler: a GradScaler, whose scale is recorded with each step.
        layers: None for all; names or fnmatch patterns; or a function of a Layer.
        seed: node r draws from seed + r.
        metadata: a JSON object to keep in the trace's manifest.
        overwrite: replace a gradlab trace that is in `path`; never anything else.
        every, start, max_steps: record iterations start, start + every, ..., at most max_steps of them; by default all.
        dtype: stored type: float32 (the default), bfloat16, or float16 (in which small gradients vanish).
        budget, expected_steps, sample_seed: those of `TraceRecorder`.
        segment_bytes: bytes after which a new file of the trace begins; 1 GiB by default.
    Raises:
        GradlabError: for a model in DDP, a folder that is not empty, no such layer, settings out of range, or more
            nodes than this machine's memory or open files can carry. Nothing has been written then.
    """

    def __init__(
        self,
        model: nn.Module,
        path: str | os.PathLike[str],
        world_size: int,
        *,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
        scaler: Any = None,
        layers: LayerChoice = None,
        seed: int = 0,
        metadata: dict[str, Any] | None = None,
        overwrite: bool = False,
        **settings: Any,
    ) -> None:
        self.path, self.world_size = Path(path), world_size
        self._settings = StepSettings(**settings)
        self._settings.check()
        check_model(model)
        check_numbers(world_size, seed)
        pairs = named_layers(model)
        self._chosen = choose_layers(pairs, layers)
        self.size = plan_recording([layer for layer, _ in self._chosen], world_size, self._settings, metadata)
        self._settings = self.size.settings
        held = HeldLayers(optimizer, {parameter: layer.name for layer, parameter in self._chosen})
        metadata = emulated_metadata(model, self._settings, metadata, held)
        self._samples = [self.size.sample(layer.name) for layer, _ in self._chosen]
        self._row_bytes = self.size.row_bytes
        require_room(world_size, self._row_bytes, self.size.steps)
        self._held, self._scaler = held, scaler
        self._steps, self._optimizer_step = StepCount(held.holding), -1
        self._mean, self._buffers, self._passes = NodeMean(model, world_size), NodeBuffers(model), ForwardPasses()
        self._streams = NodeStreams(seed, sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda}))
        self._iteration = self._taken = 0
        self._next = 0  # the node whose turn it is
        self._closed = False
        self._annotations: dict[str, float] = {}
        self._trial = None
        if (running := trial()) is not None:
            self._trial = TrialOfNodes(running, named_layers(model), world_size, optimizer, scaler)
        else:
            self._writer = TraceWriter(
                path,
                self.size.layers,
                world_size,
                dtype=self._settings.dtype,
                metadata=metadata,
                overwrite=overwrite,
                segment_bytes=self._settings.segment_bytes,
                samples=self.size.samples,
                model_layers=[layer for layer, _ in pairs] if len(self._chosen) < len(pairs) else (),
                most_steps=self.size.steps,
            )
            announce(self.path, self.size, self._settings)
        self._passes.inside = False
        self._watching = model.register_forward_pre_hook(Hook(self._passes))
        if world_size == 1:
            warnings.warn("recording one node alone: its trace says nothing about other nodes", stacklevel=2)

    def __enter__(self) -> EmulatedNodes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # After a full disk, closing fails again: the first error says enough.
        with contextlib.suppress(*([GradlabError] if error is not None else [])):
            self.close()

    @contextlib.contextmanager
    def node(self, rank: int) -> Iterator[None]:
        """Run one node's forward and backward pass, in order from 0 to N - 1. Afterwards every .grad is None.

        If the body raises, the node does not count and can be repeated.

        Args:
            rank: the node, from 0.

        Raises:
            GradlabError: if it is not this node's turn. At node 0, if gradients other than zero are left over. At
                later nodes, if a parameter has changed since node 0.
        """
        self._require_turn(rank)
        if rank == 0:
            self._mean.begin_step()
            self._buffers.begin_step()
        self._mean.begin_node()
        self._buffers.begin_node()
        self._passes.inside, self._passes.count, self._annotations = True, 0, {}
        try:
            with self._streams.of(rank):
                yield
            if rank == 0:
                scale = None if self._scaler is None else self._scaler.get_scale()
                self._optimizer_step = self._steps.begin_pass(scale)
            if self._trial is not None:
                self._trial.add(rank)
            elif self._settings.wants(self._iteration, self._taken):
                self._record(rank)
        except BaseException:
            self._mean.discard_node()
            self._buffers.begin_node()
            raise
        finally:
            self._passes.inside = False
        self._mean.end_node()
        if rank == 0:
            self._buffers.keep_first()
        self._next += 1

    def annotate(self, *, loss: float | torch.Tensor | None = None, learning_rate: float | None = None) -> None:
        """Record values with the current node.

        Args:
            loss: loss of this node, a number or a tensor of one element.
            learning_rate: instead of the optimizer's.
        Raises:
            GradlabError: outside of a node.
        """
        if not self._passes.inside:
            raise GradlabError("annotate: called outside of a node; call it inside `with nodes.node(rank):`")
        if loss is not None:
            self._annotations["loss"] = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        if learning_rate is not None:
            self._annotations["learning_rate"] = float(learning_rate)

    def average(self) -> None:
        """End the step: put the nodes' mean gradient into .grad, and set buffers as node 0 left them.

        A parameter that no node used keeps the .grad (None or zeros) that it had before the step.

        Raises:
            GradlabError: if a node has not made its pass, or a parameter has changed since the first node's.
        """
        if self._passes.inside or self._next < self.world_size:
            made = f"{self._next} of {self.world_size} nodes have made their pass in step {self._iteration}"
            raise GradlabError(f"average: {made}; node {self._next} is next, and all must come before the mean")
        self._mean.end_step()
        self._buffers.end_step()
        self._taken += self._settings.wants(self._iteration, self._taken)
        self._iteration += 1
        self._next = 0
        if self._trial is not None:
            self._trial.end_step()

    def close(self) -> RecorderReport:
        """Write what is left, close the trace, and report whole steps and the bytes of all nodes.

        A step that was begun and not averaged is lost: the trace holds only some of its nodes, and reading skips it.
        A second call returns the same report.

        Raises:
            GradlabError: if the trace cannot be written.
        """
        if not self._closed:
            self._closed = True
            self._watching.remove()
            self._steps.close()
            self._passes.inside = None
            if self._trial is None:
                self._written(self._writer.close)
        if self._trial is not None:
            return RecorderReport(str(self.path), 0, 0, 0)
        lost = int(self._next > 0 and self._settings.wants(self._iteration, self._taken))
        return RecorderReport(str(self.path), self._taken, lost, self._taken * self.world_size * self._row_bytes)

    def _require_turn(self, rank: int) -> None:
        problem = None
        if self._closed:
            problem = "the recording is closed"
        elif self._passes.inside:
            problem = f"node {self._next} is still at work; a node ends with its `with` block"
        elif type(rank) is not int or not 0 <= rank < self.world_size:
            problem = f"expected a node from 0 to {self.world_size - 1}"
        elif self._next == self.world_size:
            problem = f"all {self.world_size} nodes have made their pass; call average() before the next step"
        elif rank < self._next:
            problem = f"it has made its pass in step {self._iteration}; node {self._next} is next"
        elif rank > self._next:
            problem = f"node {self._next} is next in step {self._iteration}; none may be skipped"
        if problem:
            raise GradlabError(f"node {rank!r}: {problem}")

    def _record(self, rank: int) -> None:
        gradients, unused = {}, []
        for (layer, parameter), sample in zip(self._chosen, self._samples, strict=True):
            whole = _dense(parameter, layer)
            gradients[layer.name] = whole if sample is None else sample.take(whole)
            if parameter.grad is None:
                unused.append(layer.name)
        values: dict[str, Any] = {"optimizer_step": self._optimizer_step}
        if self._held.optimizers:
            values["learning_rate"] = self._held.first_rate()
        if self._scaler is not None:
            values["loss_scale"] = self._scaler.get_scale()
        values |= self._annotations
        passes = max(1, self._passes.count)  # the count is 0 where the loss calls only parts of the model
        self._written(
            lambda: self._writer.append(rank, self._iteration, gradients, accumulation=passes, unused=unused, **values)
        )

    def _written(self, write: Callable[[], None]) -> None:
        try:
            write()
        except (OSError, RuntimeError) as error:
            message = f"{self.path}: recording failed ({describe(error)}); `gradlab trace repair` keeps whole blocks"
            raise GradlabError(message) from error


def _dense(parameter: nn.Parameter, layer: Layer) -> torch.Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros(()).expand(layer.shape)
    return gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
