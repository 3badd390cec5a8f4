"""The device of a model's gradients, and the worker thread's work on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class HostDevice:
    """The CPU: a bucket's gradients are there when the hook gets it, and so are the worker's results.

    shares_stream: whether the hook's thread and the worker see each other's work without synchronisation.
    """

    shares_stream = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def ready(self) -> Any:
        """Mark, in the hook, everything that produces the bucket."""
        return None

    def future(self) -> torch.futures.Future[torch.Tensor]:
        """Make a future whose consumers see all of the values."""
        return torch.futures.Future()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Compute on this device, in the worker, while the context lasts."""
        yield

    def receive(self, ready: Any, buffer: torch.Tensor) -> None:
        """Take over a bucket in the worker, after what its mark names."""

    def wait(self, ready: Any) -> None:
        """Under `working`: go on after what is marked `ready`."""

    def synchronize(self) -> None:
        """Wait until everything computed under `working` has ended."""


class CudaDevice(HostDevice):
    """A GPU: the worker has a stream of its own, ordered by events against the training stream.

    The future is given its device and its value under the worker's stream, so that DDP's stream waits for that one.
    The caching allocator learns that a bucket is used on a second stream.
    """

    shares_stream = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream: torch.cuda.Stream | None = None

    def ready(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
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
    """Return a `HostDevice`, for a GPU a `CudaDevice`."""
    return CudaDevice(device) if device.type == "cuda" else HostDevice(device)
