"""DDP's buckets through a plan's steps: one ordered worker thread that overlaps with backward.

DDP hands over buckets in one order on every rank. The worker drives the step with each as a part (`StepDriver`), so
that the order of collectives follows from buckets and phases alone, never from timing. The hook itself starts
collectives that need no codec, so that they do not wait for the worker: a bucket's all-reduce in an iteration without
codecs, and between nodes its average inside the node.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from gradlab.codec import Tensors
from gradlab.runtime.engine.device import HostDevice
from gradlab.runtime.engine.driver import Part, StepDriver
from gradlab.runtime.timeline import profiled_until


@dataclass(eq=False)
class Bucket(Part):
    """One bucket as DDP handed it over.

    future: DDP waits for it. It resolves to the buffer.
    failure: why the hook could not issue the first collective.
    """

    is_last: bool = False
    future: torch.futures.Future[torch.Tensor] = field(default_factory=torch.futures.Future)
    failure: Exception | None = None

    def start(self, first: Callable[[Part], Any]) -> None:
        """Issue the first collective. If that fails, keep the error for the worker to raise."""
        try:
            self.started = first(self)
        except Exception as error:
            self.failure = error

    def settle(self) -> None:
        if not self.future.done():
            assert self.buffer is not None
            self.future.set_result(self.buffer)

    def reject(self, reason: str) -> None:
        """Give the training loop an error instead of the gradients, and let go of what holds a collective."""
        self.started = self.failure = None
        if not self.future.done():
            # torch annotates the argument with the future's own type, though it takes an exception.
            self.future.set_exception(RuntimeError(f"gradlab: {reason}"))  # type: ignore[arg-type]


class Engine:
    """One worker thread that drives the steps of DDP's buckets. The hook hands them over by `submit`."""

    def __init__(self, driver: StepDriver, device: HostDevice) -> None:
        self._closed = False
        self._driver = driver
        self._device = device
        self._starting_here = False  # whether the hook issues the first collectives of the step that hands over buckets
        self._queue: queue.SimpleQueue[Bucket | Callable[[], None] | None] = queue.SimpleQueue()
        self._ends = 0  # of steps that the worker has not seen, and of what follows them
        self._ended = threading.Condition()
        self._thread: threading.Thread | None = None

    # --- called from the training thread ---

    def submit(
        self, index: int, is_last: bool, buffer: torch.Tensor, gradients: Tensors
    ) -> torch.futures.Future[torch.Tensor]:
        """Take a bucket with views of its buffer by layer name; return a future of the buffer, averaged."""
        if self._driver.broken is not None:
            raise RuntimeError(f"gradlab: the engine stopped earlier: {self._driver.broken}")
        if self._closed:
            raise RuntimeError("gradlab: this CompressionState is closed; DDP keeps its hook, so make a new DDP model")
        bucket = Bucket(
            index, gradients, buffer, is_last=is_last, future=self._device.future(), ready=self._device.ready()
        )
        profiled_until("exchange", bucket.future)
        if self._starts_here(index):
            bucket.start(self._driver.start)
        if self._thread is None:
            # A daemon, so that an interpreter that exits without close() is not held up.
            self._thread = threading.Thread(target=self._work, name="gradlab-engine", daemon=True)
            self._thread.start()
        if is_last:
            self._put(bucket)
        else:
            self._queue.put(bucket)
        # Chained, because DDP would take an exception set from Python for the bucket's tensor.
        return bucket.future.then(lambda future: future.value())

    def wait(self) -> None:
        """Wait until the worker has ended the step whose results came. One that is stuck is not waited for."""
        if self._ends and not self._driver.in_progress and threading.current_thread() is not self._thread:
            with self._ended:
                self._ended.wait_for(lambda: not self._ends)

    def after_step(self, act: Callable[[], None]) -> None:
        """Call a function once the worker has ended the step whose results came: now, or on a GPU in the worker."""
        if self._ends and not self._device.shares_stream:
            self._put(act)
        else:
            act()

    def _put(self, item: Bucket | Callable[[], None]) -> None:
        with self._ended:
            self._ends += 1
        self._queue.put(item)

    def _starts_here(self, index: int) -> bool:
        """Whether the hook issues a bucket's first collective. The worker is idle when a step's first bucket comes."""
        if index == 0:
            driver = self._driver
            driver.communicator.timeline.begin(driver.run.iteration)
            self._starting_here = self._device.shares_stream and driver.may_start
        return self._starting_here

    def close(self) -> None:
        """Stop the worker, if it runs, wait for its end, and let go of the process group. Later buckets are refused."""
        self._closed = True
        if self._thread is not None:
            self._queue.put(None)
            if self._thread is not threading.current_thread():  # which a finalizer may run in
                self._thread.join()
                self._thread = None
        self._driver.close()

    # --- the worker ---

    @torch.no_grad()
    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            self._take(item)
            if not isinstance(item, Bucket) or item.is_last:
                with self._ended:
                    self._ends -= 1
                    self._ended.notify_all()

    def _take(self, item: Bucket | Callable[[], None]) -> None:
        if self._driver.broken is not None:
            if isinstance(item, Bucket):
                item.reject(self._driver.broken)
            return
        try:
            with self._device.working():
                if isinstance(item, Bucket):
                    self._accept(item)
                else:
                    item()
            return
        except BaseException as error:  # whatever failed belongs to the training loop, by way of the futures
            reason = self._driver.fail(error)
        # Out here the traceback is gone. It holds collectives, and these the group that peers must see closed.
        self._fail(item if isinstance(item, Bucket) else None, reason)

    def _accept(self, bucket: Bucket) -> None:
        assert bucket.buffer is not None
        self._device.receive(bucket.ready, bucket.buffer)  # first: the loss scale may be on the device too
        if bucket.index == 0:
            self._driver.begin()
        if bucket.failure is not None:
            raise bucket.failure
        self._driver.add(bucket)
        if bucket.is_last:
            self._driver.finish()

    def _fail(self, bucket: Bucket | None, reason: str) -> None:
        """Give the reason to the training loop, and let go of the group."""
        for waiter in (*self._driver.abandon(), *filter(None, [bucket])):
            assert isinstance(waiter, Bucket)
            waiter.reject(reason)
        self._driver.close()
