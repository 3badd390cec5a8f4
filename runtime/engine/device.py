"""Where a model's gradients live, and what the worker thread has to do to compute on them there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class HostDevice:
    """The CPU: what a hook is handed is there, and what the worker returns is too.

    shares_stream: whether the hook's thread and the worker see each other's work without more ado.
    """

    shares_stream = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def ready(self) -> Any:
        """In the hook: a mark behind everything that produces the bucket."""
        return None

    def future(self) -> torch.futures.Future[torch.Tensor]:
        """A future whose consumers see the values whole."""
        return torch.futures.Future()

    @contextmanager
    def working(self) -> Iterator[None]:
        """In the worker: compute on this device."""
        yield

    def receive(self, ready: Any, buffer: torch.Tensor) -> None:
        """In the worker: take over a bucket that is marked `ready`."""

    def wait(self, ready: Any) -> None:
        """Under `working`: go on after what is marked `ready`."""

    def synchronize(self) -> None:
        """Wait until what was computed under `working` is there."""


class CudaDevice(HostDevice):
    """A GPU: the worker has a stream of its own, ordered by events against the training stream.

    The future is given its device and its value under the worker's stream, so that DDP's stream waits for that one;
    the caching allocator is told that a bucket is used on a second stream.
    """

    shares_stream = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream: torch.cuda.Stream | None = None

    def ready(self) -> Any:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def future(self) -> torch.futures.Future[torch.Tensor]:
        return torch.futures.Future(devices=[self.device])

    @contextmanager
    def working(self) -> Iterator[None]:
        with torch.cuda.device(self.device):  # of this thread; a new thread starts on device 0
            if self._stream is None:
                self._stream = torch.cuda.Stream(self.device)
            with torch.cuda.stream(self._stream):
                yield

    def receive(self, ready: Any, buffer: torch.Tensor) -> None:
        assert self._stream is not None
        self.wait(ready)
        buffer.record_stream(self._stream)

    def wait(self, ready: Any) -> None:
        assert self._stream is not None
        self._stream.wait_event(ready)

    def synchronize(self) -> None:
        assert self._stream is not None
        self._stream.synchronize()


def device_of(device: torch.device) -> HostDevice:
    """The device's own form of it."""
    return CudaDevice(device) if device.type == "cuda" else HostDevice(device)
