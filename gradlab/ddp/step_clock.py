"""Time training steps from inside the hook that averages their gradients."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from gradlab.ddp.copies import Hook, Uncopied, take_away

Moment = float | torch.cuda.Event
Span = tuple[Moment | None, Moment | None]


class StepSeconds(NamedTuple):
    """Seconds of one step on one rank, NaN where they are not known, and the bytes that were averaged.

    seconds: time from the last average of the step before to its own last average.
    waited: time since its last gradient was there, which nothing hides; before, for a processor that averaging took,
        and for DDP's buffers.
    exchanged: time since the averaging of its first bucket began.
    own: time of the clock's holder, inside `StepClock.own`.
    """

    seconds: float
    waited: float
    exchanged: float
    own: float
    nbytes: int


class StepClock:
    """Notes when gradients are there and when they are averaged. On a GPU these are events in its streams.

    >>> clock = StepClock(torch.device("cpu"))
    >>> clock.arrive(4096, first=True)
    >>> clock.end()().nbytes
    4096
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ended: Moment | None = None  # the step before
        self._own: list[Span] = []
        self._waits: list[Span] = []
        self._buffers: list[Span] = []
        self._first: Moment | None = None
        self._last: Moment | None = None
        self._nbytes = 0
        self._busy = (0, 0.0)  # the thread of the last gradient, and its processor time then
        self._taken = self._idle = 0.0  # seconds without a processor: while buckets are averaged; here, since the last

    def arrive(self, nbytes: int, first: bool) -> None:
        """Note that the averaging of so many bytes begins. first: of a step; earlier ones came to nothing."""
        now = moment(self._device)
        thread, busy = threading.get_ident(), time.thread_time()
        if first:
            self._first, self._nbytes, self._waits, self._taken = now, 0, [], 0.0
        elif isinstance(now, float) and thread == self._busy[0]:
            without = seconds_between(self._last, now) - (busy - self._busy[1])
            self._taken += max(0.0, without - self._idle)
        self._last, self._busy, self._idle = now, (thread, busy), 0.0
        self._nbytes += nbytes

    @contextmanager
    def own(self) -> Iterator[None]:
        """Time what is not training's."""
        began, busy, clock = moment(self._device), time.thread_time(), time.perf_counter()
        yield
        self._own.append((began, moment(self._device)))
        self._idle += time.perf_counter() - clock - (time.thread_time() - busy)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time an average that the host waits for here. On a GPU a stream does, and training perhaps not: not known."""
        began, busy = time.perf_counter(), time.thread_time()
        yield
        ended = time.perf_counter()
        self._waits.append((None, None) if self._device.type == "cuda" else (began, ended))
        self._idle += ended - began - (time.thread_time() - busy)

    def came(self, buffers: Span) -> None:
        """Note from when to when a forward pass waited for the first rank's buffers."""
        self._buffers.append(buffers)

    def end(self) -> Callable[[], StepSeconds]:
        """Note that all averages are there. Returns what tells the times; it may wait for the device."""
        now, before = moment(self._device), self._ended
        first, last, waits, own = self._first, self._last, self._waits, self._own
        taken, nbytes, buffers = self._taken, self._nbytes, self._buffers
        self._ended, self._own, self._waits, self._buffers, self._first = now, [], [], [], None

        def told() -> StepSeconds:
            waited = taken + total_of(buffers) + (total_of(waits) if waits else seconds_between(last, now))
            return StepSeconds(seconds_between(before, now), waited, seconds_between(first, now), total_of(own), nbytes)

        return told

    def end_after_averages(self, act: Callable[[Callable[[], StepSeconds]], None]) -> None:
        """Note the end once DDP has all averages of the backward pass in progress, and hand over what tells the times.

        DDP waits in a callback of its own at the pass's end, which is queued after its hooks are called.
        """
        if torch._C._current_graph_task_id() == -1:
            self._own.clear()
            return  # a rank without input, under join
        queue = Variable._execution_engine.queue_callback
        queue(lambda: queue(lambda: act(self.end())))


class BufferTimes(Uncopied):
    """Times DDP's broadcast of buffers before each forward pass: what starts between a hook of the DDP model and one of
    the module in it. On a slow link it stands behind the last averages.

    came: receives each span.
    handles: of its hooks.
    """

    def __init__(self, ddp: DistributedDataParallel, device: torch.device, came: Callable[[Span], None]) -> None:
        self._device, self._came = device, came
        self._began: Moment | None = None
        self.handles = []
        if next(ddp.module.buffers(), None) is not None:
            self.handles.append(ddp.register_forward_pre_hook(Hook(self._begin)))
            self.handles.append(ddp.module.register_forward_pre_hook(Hook(self._end), prepend=True))

    def _begin(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._began = moment(self._device)

    def _end(self, *_: Any) -> None:
        if not torch.compiler.is_compiling() and self._began is not None:
            self._came((self._began, moment(self._device)))
            self._began = None

    def close(self) -> None:
        take_away(self.handles)


def moment(device: torch.device) -> Moment:
    """Now, for a model on a device: the host's clock, or an event on the GPU's current stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(first: Moment | None, last: Moment | None) -> float:
    """Seconds from one moment to another, once a GPU has passed it; NaN if there is none."""
    if isinstance(first, torch.cuda.Event) and isinstance(last, torch.cuda.Event):
        last.synchronize()
        return first.elapsed_time(last) / 1e3
    return last - first if isinstance(first, float) and isinstance(last, float) else math.nan


def total_of(spans: Sequence[Span]) -> float:
    """Seconds of all spans; NaN if those of one are not known."""
    return sum((seconds_between(*span) for span in spans), 0.0)
