"""The recorder's writer thread. Training hands steps to it and goes on; a failure in it never stops training."""

from __future__ import annotations

import atexit
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradlab.capture.settings import RecorderSettings
from gradlab.capture.writing.buffers import BufferPool, StepBuffer
from gradlab.capture.writing.rank_writer import RankWriter
from gradlab.ddp.step_clock import StepSeconds

logger = logging.getLogger("gradlab.capture")

EXIT_SECONDS = 60.0  # longest time that an unclosed recorder keeps a finished program from exiting

_running: set[AsyncWriter] = set()


@atexit.register  # registered after h5py's handlers, so runs before them; HDF5 cannot write after them
def _close_running() -> None:
    for writer in list(_running):
        writer.close(EXIT_SECONDS)


@dataclass(frozen=True)
class RecorderReport:
    """A recorder's account of its rank: steps committed and lost, bytes of gradients committed, reason of a failure."""

    path: str
    steps_written: int
    steps_lost: int
    bytes_written: int
    reason: str | None = None

    def __str__(self) -> str:
        text = f"{self.path}: {self.steps_written} steps recorded, {self.bytes_written / 1e6:.1f} MB"
        if self.steps_lost:
            text += f"; {self.steps_lost} steps lost"
        return text + (f" ({self.reason})" if self.reason else "")


class AsyncWriter:
    """Writes steps in order, in its own daemon thread, which alone uses the rank writer from now on.

    The last step is held back as `pending` until the next step begins, so that the user can still annotate it after the
    backward pass.
    """

    def __init__(self, rank_writer: RankWriter, pool: BufferPool, settings: RecorderSettings, where: str) -> None:
        self.pending: StepBuffer | None = None
        self._dropped = 0  # steps that never reached the thread
        self._taken = 0  # steps that did
        self.reason: str | None = None
        self._writer, self._pool = rank_writer, pool
        self._on_full, self._flush_seconds, self._where = settings.on_full, settings.flush_seconds, where
        self._oldest = 0.0  # when the first step that is not yet committed was taken, seconds
        self._queue: queue.SimpleQueue[StepBuffer | None] = queue.SimpleQueue()
        self._failing = threading.Lock()
        self.stopping = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="gradlab-trace-writer", daemon=True)
        _running.add(self)
        self._thread.start()

    @property
    def failed(self) -> bool:
        return self.reason is not None

    @property
    def steps_lost(self) -> int:
        """Steps that were due and are not recorded. After a failure, also those that never will be."""
        return self._dropped + (self._taken - self._writer.steps_committed if self.failed else 0)

    @property
    def steps_written(self) -> int:
        """Steps that are committed, which survive a kill of this process."""
        return self._writer.steps_committed

    def acquire(self) -> StepBuffer | None:
        """Return a buffer for the next step. If recording failed or cannot keep up, return None: the step is lost."""
        buffer = None
        if not self.failed:
            buffer = self._pool.acquire(lambda: self._on_full == "wait" and not self.failed)
        if buffer is None:
            self._dropped += 1
            if not self.failed and self._dropped == 1:
                logger.warning("recording %s: the disk is too slow, steps are being dropped", self._where)
        return buffer

    def hold(self, buffer: StepBuffer) -> None:
        """Keep a complete step as pending, for annotations."""
        self._pool.keep(buffer)
        self.pending = buffer

    def time_pending(self, times: Callable[[], StepSeconds]) -> None:
        """Give the pending step its times. The thread asks for them: they may wait for a GPU."""
        if self.pending is not None:
            self.pending.times = times

    def send_pending(self) -> None:
        """Send the pending step to the thread. It takes no more annotations."""
        if self.pending is not None:
            self._queue.put(self.pending)
            self.pending = None

    def discard(self, missing: Sequence[str] = ()) -> None:
        """Count a step as lost, in which `missing` layers did not reach the hook. The next step gets its buffer."""
        self._dropped += 1
        if self._dropped == 1 and not self.failed:
            layers = ", ".join(missing) or "some layers"
            logger.warning("recording %s: a step in which %s did not reach the hook is lost", self._where, layers)

    def stop(self) -> None:
        """Ask the thread to write what it has, close the trace, and end. Do not wait for it."""
        if not self.stopping and os.getpid() == self._pid:
            self.stopping = True
            self.send_pending()
            self._queue.put(None)

    def close(self, timeout: float | None = None) -> RecorderReport:
        """Stop, wait for the thread at most `timeout` seconds, and report what was recorded."""
        self.stop()
        # A forked child has no such thread; garbage collection can call this in the thread itself.
        if os.getpid() == self._pid and threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        written = self._writer.steps_committed
        return RecorderReport(self._where, written, self.steps_lost, self._writer.bytes_committed, self.reason)

    def fail(self, error: BaseException) -> None:
        """Give up recording, and log the reason once."""
        with self._failing:
            if self.failed:
                return
            self.reason = describe(error)
        logger.warning(
            "recording %s failed and stops after %d steps; training goes on (%s). `gradlab trace repair` closes it",
            self._where,
            self._writer.steps_committed,
            self.reason,
        )

    def _run(self) -> None:
        while True:
            buffer = self._next()
            if buffer is None:
                break
            self._write(buffer)
        self._finish()
        _running.discard(self)

    def _next(self) -> StepBuffer | None:
        """Return the next step, None at the end; commit an incomplete block that has waited for `flush_seconds`."""
        while True:
            waiting = self._writer.steps_waiting > 0 and not self.failed
            try:
                left = max(0.0, self._oldest + self._flush_seconds - time.monotonic()) if waiting else None
                return self._queue.get(timeout=left)
            except queue.Empty:
                self._attempt_flush()

    def _attempt_flush(self) -> None:
        try:
            self._writer.flush()
        except Exception as error:
            self._give_up(error)

    def _write(self, buffer: StepBuffer) -> None:
        self._taken += 1
        if not self.failed:
            try:
                if not self._writer.steps_waiting:
                    self._oldest = time.monotonic()
                self._writer.append(buffer)
            except Exception as error:
                self._give_up(error)
        if buffer.last:
            self._pool.release(buffer.block)

    def _give_up(self, error: BaseException) -> None:
        self.fail(error)
        self._writer.abandon()

    def _finish(self) -> None:
        if self.failed:
            self._writer.abandon()
            return
        try:
            self._writer.close(self.steps_lost)
        except Exception as error:
            self._give_up(error)


class NoWriter:
    """Stands for the writer on a rank whose gradients another rank of its node writes."""

    pending = None
    steps_written = steps_lost = 0

    def __init__(self, where: str) -> None:
        self._where = where
        self.stopping = False

    def acquire(self) -> None:
        """There is no step to fill here."""

    def time_pending(self, times: Callable[[], StepSeconds]) -> None:
        """There is none."""

    def send_pending(self) -> None:
        """There is none."""

    def stop(self) -> None:
        """Record no more steps."""
        self.stopping = True

    def close(self, timeout: float | None = None) -> RecorderReport:
        """Stop, and report that nothing was written here."""
        self.stop()
        return RecorderReport(self._where, 0, 0, 0)

    def fail(self, error: BaseException) -> None:
        """Log why recording stops here."""
        logger.warning("recording %s: %s", self._where, describe(error))


def describe(error: BaseException) -> str:
    """Describe an error in one line. HDF5 hides the system's reason in a message of several lines."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    if match := re.search(r"error message = '([^']+)'", str(error)):
        return match[1]
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
