"""Record the local gradients of a DDP training run, from inside DDP's communication hook.

The hook copies this rank's gradients before anything is averaged, then averages exactly as plain DDP does (or lets
another hook do it). Buckets change after the first iteration, so parameters are found by identity every time.
"""

# No `from __future__ import annotations` here: DDP compares a hook's annotations with the types themselves.

import os
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradlab.capture.hook_average import average_as_ddp
from gradlab.capture.layers import LayerChoice
from gradlab.capture.settings import RecorderSettings, optimizer_metadata
from gradlab.capture.start import start_recording
from gradlab.capture.writing.async_writer import EXIT_SECONDS, AsyncWriter, RecorderReport
from gradlab.capture.writing.buffers import StepBuffer
from gradlab.ddp.model import bucket_gradients
from gradlab.ddp.wrapping import require_ddp


def capture_hook(state: "TraceRecorder", bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Record a bucket and average it: the communication hook that a `TraceRecorder` registers.

    Args:
        state: the recorder.
        bucket: DDP's.

    Returns:
        A future of the bucket's buffer, averaged.
    """
    state._observe(bucket)
    return state._reduce(bucket)


class TraceRecorder:
    """Records a DDP model's local gradients. It attaches itself. Making one is a collective: every rank makes one.

        with TraceRecorder(ddp_model, "trace", optimizer=optimizer) as recorder:
            for inputs, targets in batches:
                loss = criterion(ddp_model(inputs), targets)
                loss.backward()
                recorder.annotate(loss=loss)
                optimizer.step()
                optimizer.zero_grad()

    Training is bit-identical to plain DDP, with one exception, which no hook can see: where gradient_as_bucket_view
    is True, gradients are zeroed and not dropped (zero_grad(set_to_none=False)), and the number of ranks is not a
    power of two, averages differ in their last bits. What is recorded are the local gradients then as well.

    A step is one synchronised backward pass, with what `no_sync` accumulated. Gradients are recorded as the hook
    sees them: with the loss scale, and infinite or NaN where they are. Memory on the host: at most (queue_steps + 2)
    times the recorded layers, and a block of up to 16 steps or 64 MiB. A trace takes ranks x steps x recorded elements
    x 4 bytes, half of it in 16 bits. Failing to write never stops training. After `close` the model goes on averaging
    as plain DDP does: DDP cannot give a hook back.

    Args:
        model: a DistributedDataParallel model without a communication hook. torch.compile may have wrapped it.
        path: folder of the trace, new or empty.
        optimizer, scaler: where each step's learning rate (of the first group) and GradScaler scale are read. The
            optimizer's class and settings go into the manifest: a fit makes plans that train under it.
        layers: None for all, names or fnmatch patterns, or a function of a Layer.
        wrap: (state, hook): let this communication hook do the averaging.
        metadata: a JSON object to keep in the trace's manifest.
        overwrite: replace a gradlab trace that is in `path`. Nothing else is ever replaced.
        every, start, max_steps: record iterations start, start + every, ..., at most max_steps of them. All by default.
        dtype: stored type: float32 (the default), bfloat16, or float16 (in which small gradients vanish).
        queue_steps: steps that may wait for the disk. 8 by default.
        on_full: what to do with the next one then: "wait" (the default), or "drop" it.
        flush_seconds: longest time until a step is safe from a kill. 5 by default.
        segment_bytes: size of a file of the trace. 1 GiB by default.
        budget: bytes of the whole trace at most, all ranks, as "20GB": fewer steps are recorded, and of large layers
            the same sampled blocks in each of them (see `gradlab.capture.budget`). None: no limit.
        expected_steps: iterations that the run will have, so that a budget's steps are spread over all of it. Without
            it, and without max_steps, they are the run's first ones (every n-th, if `every` is given).
        sample_seed: of the sampled blocks.
    Raises:
        GradlabError: the same line on all ranks, before anything is written: a model not in DDP, a hook attached
            already, folder not empty, no such layer, settings out of range or different between ranks.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        path: str | os.PathLike[str],
        *,
        optimizer: torch.optim.Optimizer | None = None,
        scaler: Any = None,
        layers: LayerChoice = None,
        wrap: tuple[Any, Callable[..., Any]] | None = None,
        metadata: dict[str, Any] | None = None,
        overwrite: bool = False,
        **settings: Any,
    ) -> None:
        model = require_ddp(model, "TraceRecorder")
        self.path = Path(path)
        self._settings = RecorderSettings(**settings)
        metadata = {} if metadata is None else metadata
        if isinstance(metadata, dict) and (optimizer is None or hasattr(optimizer, "param_groups")):
            metadata = optimizer_metadata(optimizer) | metadata
        chosen, self.size, self._writer = start_recording(
            model, self.path, self._settings, layers, wrap, metadata, overwrite, (optimizer, scaler)
        )
        self._settings = replace(self._settings, every=self.size.settings.every, max_steps=self.size.settings.max_steps)
        # Parameters are kept alive with their ids: an id alone could pass to another object.
        self._positions = {id(parameter): (n, parameter) for n, (_, parameter) in enumerate(chosen)}
        self._shapes = [layer.shape for layer in self.size.layers]
        self._samples = [self.size.sample(layer.name) for layer, _ in chosen]
        self._optimizer, self._scaler, self._wrap, self._group = optimizer, scaler, wrap, model.process_group
        self._iteration, self._taken = -1, 0
        self._buffer: StepBuffer | None = None  # the step that the hook is filling
        self._forward_passes = _ForwardPasses()
        self._counting = model.register_forward_pre_hook(self._forward_passes)
        # The finalizer must not hold the recorder, or it would never be collected. At exit the writer closes itself.
        self._finalizer = weakref.finalize(self, _finish, self._writer, self._counting)
        self._finalizer.atexit = False
        model.register_comm_hook(self, capture_hook)
        if self._group.size() == 1:
            warnings.warn("recording one rank alone: its trace says nothing about other ranks", stacklevel=2)

    def __enter__(self) -> "TraceRecorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def steps_written(self) -> int:
        """Steps that a kill of this process can no longer lose."""
        return self._writer.steps_written

    @property
    def steps_lost(self) -> int:
        """Steps that were due and are not in the trace."""
        return self._writer.steps_lost

    def annotate(self, *, loss: float | torch.Tensor | None = None, learning_rate: float | None = None) -> None:
        """Add values to the step whose backward pass came last. They are dropped if that step is not recorded.

        Args:
            loss: of this rank, a number or a tensor of one element.
            learning_rate: instead of the optimizer's.
        """
        pending = self._writer.pending
        if pending is None:
            return
        if loss is not None:
            pending.record["loss"] = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        if learning_rate is not None:
            pending.record["learning_rate"] = learning_rate

    def close(self) -> RecorderReport:
        """Write what is left, close this rank's part of the trace, and report what was written and lost.

        Not a collective. Calling it again returns the same report.

        Returns:
            Numbers of steps written and lost.
        """
        self._discard_step()
        self._finalizer.detach()
        return _finish(self._writer, self._counting, None)

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self._wrap is None:
            return average_as_ddp(self._group, bucket)
        state, hook = self._wrap
        return hook(state, bucket)

    def _observe(self, bucket: dist.GradBucket) -> None:
        """Record what one bucket brings. Buckets come in order, in every iteration."""
        if self._writer.stopping:
            return
        try:
            if bucket.index() == 0:
                self._begin_step()
            if self._buffer is not None:
                self._copy(bucket, self._buffer)
            if bucket.is_last():
                self._end_step()
        except Exception as error:  # whatever it is, training goes on
            self._writer.fail(error)
            self._discard_step()

    def _begin_step(self) -> None:
        self._iteration += 1
        passes = self._forward_passes.take()
        self._writer.send_pending()
        self._discard_step()  # of a backward pass that failed half-way
        if self._settings.finished(self._taken):
            self._writer.stop()
        elif self._settings.wants(self._iteration, self._taken):
            self._taken += 1
            self._buffer = self._writer.acquire()
        if self._buffer is not None:
            record = self._buffer.record
            record["index"], record["accumulation"] = self._iteration, passes
            if self._optimizer is not None:
                record["learning_rate"] = float(self._optimizer.param_groups[0]["lr"])
            if self._scaler is not None:
                record["loss_scale"] = self._scaler.get_scale()

    def _discard_step(self) -> None:
        if self._buffer is not None:
            self._writer.discard(self._buffer)
            self._buffer = None

    @torch.no_grad()
    def _copy(self, bucket: dist.GradBucket, buffer: StepBuffer) -> None:
        whole = bucket.buffer()
        pairs = [(bucket.parameters()[0], whole.to_dense())] if whole.is_sparse else bucket_gradients(bucket)
        for parameter, gradient in pairs:
            if id(parameter) not in self._positions:
                continue
            position = self._positions[id(parameter)][0]
            target = buffer.gradients[position].view(self._shapes[position])
            sample = self._samples[position]
            if sample is None:
                target.copy_(gradient, non_blocking=True)
            else:
                sample.copy(target, gradient)
            # DDP fills the place of a parameter that the loss does not depend on with zeros.
            buffer.unused[position] = parameter.grad is None
            buffer.seen[position] = True
        if whole.is_cuda:
            event = torch.cuda.Event()
            event.record()
            buffer.copies.append(event)

    def _end_step(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return
        if buffer.seen.all():
            self._writer.hold(buffer)
        else:
            self._writer.discard(buffer)


class _ForwardPasses:
    """Counts forward passes that build a graph: how many of them a synchronised gradient accumulates."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        self._count += torch.is_grad_enabled()

    def take(self) -> int:
        count, self._count = self._count, 0
        return count


def _finish(writer: AsyncWriter, counting: Any, timeout: float | None = EXIT_SECONDS) -> RecorderReport:
    counting.remove()
    return writer.close(timeout)
