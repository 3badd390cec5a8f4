"""Record the gradients of a training run under DDP or FSDP2, from inside the hook that averages them.

DDP's hook copies this rank's gradients before anything is averaged, then averages exactly as plain DDP does (or lets
another hook do it). FSDP2's hook copies what a node's ranks have reduced, then averages between nodes as native HSDP
does. Buckets change after the first iteration, so parameters are found by identity every time.
"""

# No `from __future__ import annotations` here: DDP compares a hook's annotations with the types themselves.

import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradlab.capture.layers import LayerChoice, admits
from gradlab.capture.optimizer_steps import StepCount
from gradlab.capture.settings import RecorderSettings
from gradlab.capture.sources import BucketSource, Gradient, ShardSource, Source, trace_ranks
from gradlab.capture.start import start_recording, train_in_trial
from gradlab.capture.writing.async_writer import EXIT_SECONDS, AsyncWriter, NoWriter, RecorderReport
from gradlab.capture.writing.buffers import StepBuffer
from gradlab.ddp.averaged import listed
from gradlab.ddp.copies import Hook, Uncopied, take_away
from gradlab.ddp.model import require_ddp, without_compile
from gradlab.ddp.sharded_passes import Passes, require_whole_backward
from gradlab.ddp.sharded_units import Unit, leave_averaging, refuse_thawed, set_hooks, sharded_modules
from gradlab.ddp.step_clock import BufferTimes, StepClock
from gradlab.ddp.switch import register
from gradlab.errors import GradlabError
from gradlab.trial import trial


def capture_hook(state: "TraceRecorder", bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Record a bucket and average it: the communication hook that a `TraceRecorder` registers.

    Args:
        state: the recorder.
        bucket: DDP's.

    Returns:
        A future of the bucket's buffer, averaged.
    """
    if state._writer.stopping:  # nothing is timed any more, for the rest of training
        state._observe(bucket)
        return state._reduce(bucket)
    with state._clock.own():
        state._observe(bucket)
    state._clock.arrive(bucket.buffer().nbytes, first=bucket.index() == 0)
    if bucket.is_last():
        state._clock.end_after_averages(state._writer.time_pending)
    return state._reduce(bucket)


class TraceRecorder(Uncopied):
    """Records the gradients of a model in DDP or under FSDP2. It attaches itself. Every rank makes one, together.

        with TraceRecorder(ddp_model, "trace", optimizer=optimizer) as recorder:
            for inputs, targets in batches:
                loss = criterion(ddp_model(inputs), targets)
                loss.backward()
                recorder.annotate(loss=loss)
                optimizer.step()
                optimizer.zero_grad()

    Training is bit-identical to plain DDP, with one exception, which no hook can see: where gradient_as_bucket_view
    is True, gradients are zeroed and not dropped (zero_grad(set_to_none=False)), and the number of ranks is not a
    power of two, averages differ in their last bits. The recording holds the local gradients then as well.

    A step is one synchronised backward pass, with what `no_sync` accumulated. Gradients are recorded as the hook
    sees them: with the loss scale, and infinite or NaN where they are. Memory on the host: at most (queue_steps + 2)
    times the recorded layers, and two blocks of up to 16 steps or 64 MiB. A trace takes ranks x steps x recorded
    elements x 4 bytes, half of it in 16 bits. Failing to write never stops training. After `close` the model goes on
    averaging as plain DDP does: DDP cannot give a hook back.

    With several ranks per node the mean of each node can be recorded. Its first rank writes it, so that ranks of
    the trace are nodes. Under DDP that is `within`. Under FSDP2, where no rank sees a whole
    gradient, it is `between`, on a model that is sharded along the other dimension of the mesh (see `compress_fsdp`):

        with TraceRecorder(fsdp_model, "trace", between=mesh["replicate"]) as recorder: ...

    The recorder averages between nodes then as native HSDP does. The first rank of a node takes a copy of all local
    ranks' gradients of one bucket or unit at a time. A loss is the first rank's. All ranks of a node close their
    recorders after the same step, as they send it what they have.

    >>> from gradlab.capture import TraceRecorder
    >>> ddp_model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    >>> with TraceRecorder(ddp_model, "recorded") as recorder:
    ...     for step in range(3):
    ...         ddp_model(torch.ones(1, 4)).sum().backward()
    >>> len(Trace("recorded").steps)
    3

    Args:
        model: a DistributedDataParallel model without a communication hook, or one that `fully_shard` was called on.
            torch.compile may have wrapped it.
        path: folder of the trace, new or empty.
        within: a mesh's dimension or the process group of a node's DDP ranks, or "node" for those that
            torchrun started on one machine. None: every rank's own gradients are recorded.
        between: under FSDP2 the mesh's dimension along which ranks hold the same shards, or that group.
        optimizer: one or several (a list), all that train the model. Each step's learning rate is that of the first
            recorded layer. Classes, settings and which of several trains which layers go into the manifest: a fit makes
            plans that train under them.
        scaler: GradScaler whose scale is read in each step.
        layers: None for all, names or fnmatch patterns, or a function of a Layer.
        wrap: (state, hook): let this communication hook do the averaging.
        metadata: a JSON object to keep in the trace's manifest.
        overwrite: replace a gradlab trace that is in `path`. Nothing else is ever replaced.
        every, start, max_steps: record iterations start, start + every, ..., at most max_steps of them. All by default.
        dtype: stored type: float32 (the default), bfloat16, or float16 (in which small gradients vanish).
        queue_steps: steps that may wait for the disk. 8 by default.
        on_full: action for the next one then: "wait" (the default), or "drop" it.
        flush_seconds: longest time until a step is safe from a kill. 5 by default.
        segment_bytes: size of a file of the trace. 1 GiB by default.
        budget: bytes of the whole trace at most, all ranks, as "20GB": fewer steps are recorded, and of large layers
            the same sampled blocks in each of them (see `gradlab.capture.budget`). None: no limit.
        expected_steps: iterations that the run will have, so that a budget's steps are spread over all of it. Without
            it, and without max_steps, they are the run's first ones (every n-th, if `every` is given).
        sample_seed: seed of the sampled blocks.
    Raises:
        GradlabError: the same line on all ranks, before anything is written: a model in neither, a hook attached
            already, folder not empty, no such layer, settings out of range or different between ranks, nodes of
            different sizes.
    """

    _finalizer: Any = None  # a trial of gradlab pilot has none

    def __init__(
        self,
        model: torch.nn.Module,
        path: str | os.PathLike[str],
        *,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
        scaler: Any = None,
        layers: LayerChoice = None,
        wrap: tuple[Any, Callable[..., Any]] | None = None,
        within: Any = None,
        between: Any = None,
        metadata: dict[str, Any] | None = None,
        overwrite: bool = False,
        **settings: Any,
    ) -> None:
        self.path = Path(path)
        if trial() is not None:
            self._writer: AsyncWriter | NoWriter = train_in_trial(model, path, within, between, optimizer, scaler)
            return
        source = _source_of(model, wrap, within, between)
        self._settings = RecorderSettings(**settings)
        metadata = {} if metadata is None else metadata
        chosen, self.size, self._writer, self._held = start_recording(
            source, self.path, self._settings, layers, wrap, metadata, overwrite, (optimizer, scaler)
        )
        self._settings = replace(self._settings, every=self.size.settings.every, max_steps=self.size.settings.max_steps)
        # Parameters are kept alive with their ids: an id alone could pass to another object.
        self._positions = {id(parameter): (n, parameter) for n, (_, parameter) in enumerate(chosen)}
        self._names = [layer.name for layer, _ in chosen]
        self._choice = layers
        self._warned: set[str] = set()  # of what
        self._samples = [self.size.sample(layer.name) for layer, _ in chosen]
        self._scaler, self._wrap = scaler, wrap
        self._iteration, self._taken = -1, 0
        self._due = False  # whether the iteration in progress is recorded: the same on all ranks
        self._buffer: StepBuffer | None = None  # the step that the hook is filling, on a rank that writes
        self._units_met: set[tuple[str, int]] = set()  # units of FSDP2 in the step in progress, with their elements
        self._forward_passes, self._clock = _ForwardPasses(), StepClock(chosen[0][1].device)
        self._handles = [source.model.register_forward_pre_hook(Hook(self._forward_passes))]
        if isinstance(source, BucketSource):
            self._beside: BufferTimes | Passes = BufferTimes(source.model, chosen[0][1].device, self._clock.came)
            self._steps = StepCount(self._held.holding, [parameter for _, parameter in chosen])
        else:
            self._beside, self._steps = Passes(source.model, source.units), StepCount(self._held.holding, ())
        self._handles += self._beside.handles
        # The finalizer must not hold the recorder, or it would never be collected. At exit the writer closes itself.
        self._finalizer = weakref.finalize(self, _finish, self._writer, self._handles, self._steps)
        self._finalizer.atexit = False
        self._source = source
        if isinstance(source, ShardSource):
            leave_averaging(source.units)
            for unit in source.units:
                set_hooks(unit.module, partial(self._take, unit))
            refuse_thawed(source.model, source.units)
        else:
            register(source.model, self, capture_hook)
        if trace_ranks(source) == 1:
            what = "rank" if source.topology is None else "node"
            warnings.warn(f"recording one {what} alone: its trace says nothing about other {what}s", stacklevel=2)

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
            loss: loss of this rank, a number or a tensor of one element.
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
        if self._finalizer is None:
            return self._writer.close()
        self._discard_step()
        self._finalizer.detach()
        self._warn(closing=True)
        return _finish(self._writer, self._handles, self._steps, None)

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self._wrap is None:
            assert isinstance(self._source, BucketSource)
            return self._source.average(bucket)
        state, hook = self._wrap
        return hook(state, bucket)

    def _observe(self, bucket: dist.GradBucket) -> None:
        """Record what one bucket brings. Buckets come in order, in every iteration."""
        if bucket.is_last():
            self._steps.end_pass()
        if self._writer.stopping:
            return
        if bucket.index() == 0:
            self._guarded(self._begin_step)
        if self._due:
            source = self._source
            assert isinstance(source, BucketSource)
            if source.topology is None:
                self._guarded(lambda: self._copy(source.gradients(bucket)))
            else:  # a collective: what fails in it fails training
                self._copy_guarded(source.gradients(bucket))
        if bucket.is_last():
            self._guarded(self._end_step)

    def _take(self, unit: Unit, flat: torch.Tensor) -> None:
        """Record what one unit under FSDP2 brings, and average it between nodes. FSDP2's hook calls this."""
        assert isinstance(self._source, ShardSource)
        unit.require_unchanged()
        if unit.puts_off:
            raise GradlabError(
                f"{unit.title}: set_requires_all_reduce(False), and a recording takes what every micro-batch reduces; "
                "accumulate with model.set_requires_gradient_sync(False) while it lasts"
            )
        came = unit.name, flat.numel()  # some of a unit's parameters may be reduced apart
        first = not self._units_met or came in self._units_met  # twice: a backward pass failed half-way
        if not self._writer.stopping:
            with self._clock.own():
                if first:
                    self._units_met.clear()
                    self._guarded(self._begin_step)
                assert isinstance(self._beside, Passes)
                self._beside.after(unit.module, self._end_backward)
                self._units_met.add(came)
                if self._due:
                    self._copy_guarded(self._source.gradients(unit, flat))
        self._clock.arrive(flat.nbytes, first)
        with self._clock.waiting():
            self._source.average(unit, flat)

    def _end_backward(self) -> None:
        assert isinstance(self._source, ShardSource)
        units = self._source.units
        self._units_met.clear()
        self._guarded(lambda: require_whole_backward(units))
        self._guarded(lambda: self._end_step(absent_unused=True))
        self._writer.time_pending(self._clock.end())

    def _copy_guarded(self, gradients: Sequence[Gradient]) -> None:
        self._guarded(lambda: self._copy(gradients))

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do a part of the recording. Whatever goes wrong, training goes on."""
        try:
            work()
        except Exception as error:
            self._writer.fail(error)
            self._discard_step()

    def _begin_step(self) -> None:
        self._iteration += 1
        self._due = False
        passes = self._forward_passes.take()
        self._writer.send_pending()
        self._discard_step()  # of a backward pass that failed half-way
        if self._settings.finished(self._taken):
            self._writer.stop()
        elif self._settings.wants(self._iteration, self._taken):
            self._taken += 1
            self._due = True
            self._buffer = self._writer.acquire()
        is_read = self._scaler is not None and (self._buffer is not None or self._steps.is_open)
        scale = self._scaler.get_scale() if is_read else None
        optimizer_step = self._steps.begin_pass(scale)
        self._warn()
        if self._buffer is not None:
            record = self._buffer.record
            record["index"], record["accumulation"] = self._iteration, passes
            record["optimizer_step"] = optimizer_step
            if self._held.optimizers:
                record["learning_rate"] = self._held.first_rate()
            if scale is not None:
                record["loss_scale"] = scale

    def _warn(self, closing: bool = False) -> None:
        """Warn of what is wrong with layers and backward passes: of each kind once, on the first rank."""
        remarks = {"unaveraged": self._source.unaveraged(closing), **self._steps.remarks(closing)}
        if thawed := [layer.name for layer in self._source.thawed(closing) if admits(self._choice, layer)]:
            remark = "frozen when the recording began and trained now, so not in the trace"
            remarks["thawed"] = f"{listed(thawed)}: {remark}; unfreeze layers first, then start a recording"
        for kind, remark in remarks.items():
            if remark and kind not in self._warned:
                self._warned.add(kind)
                if self._source.ranks.rank == 0:
                    warnings.warn(f"gradlab: recording {self.path}: {remark}", stacklevel=3)

    def _discard_step(self) -> None:
        if self._buffer is not None:
            assert isinstance(self._writer, AsyncWriter)
            self._writer.discard()
            self._buffer = None

    @torch.no_grad()
    def _copy(self, gradients: Sequence[Gradient]) -> None:
        buffer = self._buffer
        if buffer is None:
            return
        for parameter, gradient, unused in gradients:
            if id(parameter) not in self._positions:
                continue
            position = self._positions[id(parameter)][0]
            buffer.put(position, gradient, self._samples[position])
            buffer.unused[position] = unused
            buffer.seen[position] = True
        if any(gradient.is_cuda for _, gradient, _ in gradients):
            event = torch.cuda.Event()
            event.record()
            buffer.copies.append(event)

    def _end_step(self, absent_unused: bool = False) -> None:
        """Hand the step to the writer. absent_unused: whether a layer that did not come has no gradient."""
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return
        assert isinstance(self._writer, AsyncWriter)
        if absent_unused:
            for position in np.flatnonzero(~buffer.seen).tolist():
                buffer.put_zeros(position)
                buffer.unused[position] = buffer.seen[position] = True
        if buffer.seen.all():
            self._writer.hold(buffer)
        else:
            self._writer.discard([self._names[position] for position in np.flatnonzero(~buffer.seen)[:3]])


def _source_of(model: object, wrap: Any, within: Any, between: Any) -> Source:
    """The source of the gradients, by the model's wrapper."""
    inner = without_compile(model)
    if not isinstance(inner, DistributedDataParallel) and sharded_modules(inner):
        assert isinstance(inner, torch.nn.Module)
        for name, value in (("within", within), ("wrap", wrap)):
            if value is not None:
                raise GradlabError(f"TraceRecorder: {name} is of a model in DDP, and this one is under FSDP2")
        return ShardSource(inner, between)
    if between is not None:
        raise GradlabError("TraceRecorder: between is of a model under FSDP2; in DDP give within, the ranks of a node")
    return BucketSource(require_ddp(model, "TraceRecorder"), within)


class _ForwardPasses:
    """Counts forward passes that build a graph: how many of them a synchronised gradient accumulates."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        self._count += torch.is_grad_enabled()

    def take(self) -> int:
        count, self._count = self._count, 0
        return count


def _finish(
    writer: AsyncWriter | NoWriter,
    handles: list[Any],
    steps: StepCount,
    timeout: float | None = EXIT_SECONDS,
) -> RecorderReport:
    take_away(handles)
    steps.close()
    return writer.close(timeout)
