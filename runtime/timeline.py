"""Spans of time in the engine: ranges for torch.profiler, and for chosen steps a chrome trace of its own."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import profiler

from gradlab.chrome_trace import LANES

_NO_RANGE = nullcontext()


def profiled(name: str) -> AbstractContextManager[Any]:
    """Return a range of torch.profiler, "gradlab::encode" of "encode"; nothing where no profiler runs, as a range takes
    20 microseconds, more than some codecs take for a group."""
    return profiler.record_function(f"gradlab::{name}") if profiler._is_profiler_enabled else _NO_RANGE


def profiled_until(name: str, future: torch.futures.Future[Any]) -> None:
    """Begin a range of torch.profiler in this thread that ends with a future, in whatever thread that is."""
    if profiler._is_profiler_enabled:
        lasting = profiler.record_function(f"gradlab::{name}")
        lasting.__enter__()
        lasting._call_end_callbacks_on_future(future)


@dataclass(frozen=True)
class Span:
    """A stretch of time in which the engine did one thing."""

    name: str  # of what was done
    lane: str  # of `gradlab.chrome_trace.LANES`
    start: float  # seconds of time.perf_counter
    stop: float
    step: int  # iteration
    detail: dict[str, Any]  # more of it, as the bytes of a collective


class Timeline:
    """Spans of the steps in `steps`. For all other steps nothing is kept."""

    def __init__(self, steps: Collection[int] = ()) -> None:
        self.steps = frozenset(steps)
        self.spans: list[Span] = []
        self._step: int | None = None
        # perf_counter starts anywhere; traces of several ranks shall lie on one axis.
        self._epoch = time.time() - time.perf_counter()

    def begin(self, step: int) -> None:
        """Begin a step."""
        self._step = step if step in self.steps else None

    def add(self, lane: str, name: str, start: float, stop: float, **detail: Any) -> None:
        """Note a span that is over, by time.perf_counter, in a lane of `gradlab.chrome_trace.LANES`."""
        if self._step is not None:
            self.spans.append(Span(name, lane, start, stop, self._step, detail))

    def watch(self, work: dist.Work, name: str, nbytes: int) -> None:
        """Note the time from now to the end of a collective, which may come long before anybody waits for it."""
        if self._step is None:
            return
        began, step = time.perf_counter(), self._step

        def ended(_: torch.futures.Future[Any]) -> None:
            self.spans.append(Span(name, "network", began, time.perf_counter(), step, {"bytes": nbytes}))

        work.get_future().add_done_callback(ended)

    def events(self, rank: int) -> list[dict[str, Any]]:
        """Return the spans as trace events of one process, this rank. The lists of several ranks may be joined."""
        spans = sorted(self.spans, key=lambda span: span.start)
        rows = _rows(spans)
        names: list[dict[str, Any]] = [
            {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        ]
        for row in range(max(rows, default=0) + 1):
            title = LANES[min(row, len(LANES) - 1)]
            names.append({"ph": "M", "pid": rank, "tid": row, "name": "thread_name", "args": {"name": title}})
            names.append({"ph": "M", "pid": rank, "tid": row, "name": "thread_sort_index", "args": {"sort_index": row}})
        return names + [
            {
                "ph": "X",
                "pid": rank,
                "tid": row,
                "name": span.name,
                "ts": (self._epoch + span.start) * 1e6,
                "dur": (span.stop - span.start) * 1e6,
                "args": {"step": span.step, **span.detail},
            }
            for span, row in zip(spans, rows, strict=True)
        ]


def _rows(spans: Sequence[Span]) -> list[int]:
    """The row of each span: its lane's, and for collectives that travel at once, which rows cannot show, one more."""
    first = LANES.index("network")
    free: list[float] = []
    rows = []
    for span in spans:
        if span.lane != "network":
            rows.append(LANES.index(span.lane))
            continue
        row = next((i for i, until in enumerate(free) if until <= span.start), len(free))
        free[row : row + 1] = [span.stop]
        rows.append(first + row)
    return rows
