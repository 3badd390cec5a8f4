"""Spans of time in the engine, for chosen steps: a chrome trace (chrome://tracing, Perfetto)."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# Rows of the picture, from the top.
LANES = ("backward", "encode and decode", "wait", "network")


@dataclass(frozen=True)
class Span:
    """name, lane: what and where; start, stop: seconds of time.perf_counter; step: iteration; detail: anything more."""

    name: str
    lane: str
    start: float
    stop: float
    step: int
    detail: dict[str, Any]


class Timeline:
    """Spans of the steps in `steps`; of all others nothing is kept and next to nothing is done."""

    def __init__(self, steps: Collection[int] = ()) -> None:
        self.steps = frozenset(steps)
        self.spans: list[Span] = []
        self._step: int | None = None
        # perf_counter starts anywhere; traces of several ranks shall lie on one axis.
        self._epoch = time.time() - time.perf_counter()

    def begin(self, step: int) -> None:
        """A step begins."""
        self._step = step if step in self.steps else None

    def span(self, lane: str, name: str, **detail: Any) -> AbstractContextManager[None]:
        """Note the time that a block takes, if this step is a chosen one."""
        return nullcontext() if self._step is None else _Timed(self, lane, name, self._step, detail)

    def add(self, lane: str, name: str, start: float, stop: float, **detail: Any) -> None:
        """Note a span that is over."""
        if self._step is not None:
            self.spans.append(Span(name, lane, start, stop, self._step, detail))

    def watch(self, work: dist.Work, name: str, nbytes: int) -> None:
        """Note the time from here to the end of a collective, which may be long before anybody waits for it."""
        if self._step is None:
            return
        began, step = time.perf_counter(), self._step

        def ended(_: torch.futures.Future[Any]) -> None:
            self.spans.append(Span(name, "network", began, time.perf_counter(), step, {"bytes": nbytes}))

        work.get_future().add_done_callback(ended)

    def events(self, rank: int) -> list[dict[str, Any]]:
        """The spans as trace events of one process; those of several ranks may be joined in one list."""
        names: list[dict[str, Any]] = [
            {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        ]
        for lane, title in enumerate(LANES):
            names.append({"ph": "M", "pid": rank, "tid": lane, "name": "thread_name", "args": {"name": title}})
            names.append(
                {"ph": "M", "pid": rank, "tid": lane, "name": "thread_sort_index", "args": {"sort_index": lane}}
            )
        return names + [
            {
                "ph": "X",
                "pid": rank,
                "tid": LANES.index(span.lane),
                "name": span.name,
                "ts": (self._epoch + span.start) * 1e6,
                "dur": (span.stop - span.start) * 1e6,
                "args": {"step": span.step, **span.detail},
            }
            for span in sorted(self.spans, key=lambda span: span.start)
        ]


class _Timed(AbstractContextManager[None]):
    def __init__(self, timeline: Timeline, lane: str, name: str, step: int, detail: dict[str, Any]) -> None:
        self._timeline, self._lane, self._name, self._step, self._detail = timeline, lane, name, step, detail

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        span = Span(self._name, self._lane, self._began, time.perf_counter(), self._step, self._detail)
        self._timeline.spans.append(span)
