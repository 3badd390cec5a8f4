"""Time DDP's buckets in real steps: when each is ready, and when its average has come.

Moments are the host's clock for a model on a CPU; on a GPU they are events on the streams that compute and send.
"""

# No `from __future__ import annotations` here: DDP compares a hook's annotations with the types themselves.

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradlab.ddp.copies import Uncopied
from gradlab.ddp.step_clock import BufferTimes, Span, moment, seconds_between, total_of
from gradlab.ddp.switch import PlainAverage


class BucketTimes(Uncopied):
    """The state of `timed_hook`: moments of every bucket of every step since it was made."""

    def __init__(self, ddp: DistributedDataParallel, average: PlainAverage, device: torch.device) -> None:
        self._average, self._device = average, device
        self._steps: list[list[list[Any]]] = []  # by step and bucket: bytes, and the moments of its coming and going
        self._waits: list[list[Span]] = []  # for buffers, by step
        self._open: list[Span] = []
        self._buffers = BufferTimes(ddp, device, self._open.append)
        self._began = moment(self._device)

    def submit(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket as plain DDP does, and note when."""
        if bucket.index() == 0:
            self._steps.append([])
            self._waits.append(self._open.copy())
            self._open.clear()
        row = [bucket.buffer().nbytes, moment(self._device), None]
        self._steps[-1].append(row)

        def ended(average: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            row[2] = moment(self._device)
            return average.value()

        return self._average(bucket).then(ended)

    def rows(self) -> list[list[list[float]]]:
        """Return by step and bucket: bytes, the seconds from the start at which it was ready, and averaged, and those
        that forward passes before it waited for buffers.

        Steps that an error has ended are left out.
        """
        self._buffers.close()
        pairs = zip(self._steps, self._waits, strict=True)
        whole = [(step, waits) for step, waits in pairs if all(ended is not None for _, _, ended in step)]
        return [
            [
                [
                    nbytes,
                    *(seconds_between(self._began, at) for at in (ready, ended)),
                    0.0 if place else total_of(waits),
                ]
                for place, (nbytes, ready, ended) in enumerate(step)
            ]
            for step, waits in whole
        ]


def timed_hook(times: BucketTimes, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket while it is timed."""
    return times.submit(bucket)
