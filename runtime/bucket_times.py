"""Time DDP's buckets in real steps: when each is ready, and when its average has come.

Moments are the host's clock for a model on a CPU; on a GPU they are events on the streams that compute and send.
"""

# No `from __future__ import annotations` here: DDP compares a hook's annotations with the types themselves.

from typing import Any

import torch
import torch.distributed as dist

from gradlab.ddp.copies import Uncopied
from gradlab.ddp.step_clock import moment, seconds_between
from gradlab.ddp.switch import PlainAverage


class BucketTimes(Uncopied):
    """The state of `timed_hook`: moments of every bucket of every step since it was made."""

    def __init__(self, average: PlainAverage, device: torch.device) -> None:
        self._average, self._device = average, device
        self._steps: list[list[list[Any]]] = []  # by step and bucket: bytes, and the moments of its coming and going
        self._began = moment(self._device)

    def submit(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket as plain DDP does, and note when."""
        if bucket.index() == 0:
            self._steps.append([])
        row = [bucket.buffer().nbytes, moment(self._device), None]
        self._steps[-1].append(row)

        def ended(average: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            row[2] = moment(self._device)
            return average.value()

        return self._average(bucket).then(ended)

    def rows(self) -> list[list[list[float]]]:
        """Return by step and bucket: bytes, and the seconds from the start at which it was ready, and averaged.

        Steps that an error has ended are left out.
        """
        whole = [step for step in self._steps if all(ended is not None for _, _, ended in step)]
        return [
            [
                [nbytes, seconds_between(self._began, ready), seconds_between(self._began, ended)]
                for nbytes, ready, ended in step
            ]
            for step in whole
        ]


def timed_hook(times: BucketTimes, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket while it is timed."""
    return times.submit(bucket)
