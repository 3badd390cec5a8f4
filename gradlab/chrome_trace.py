"""Read chrome traces of the engine (`CompressionState.chrome_trace`), and count how much of the network was hidden."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradlab.errors import GradlabError
from gradlab.jsonable import Jsonable, read_json

# Rows of the picture, from the top.
LANES = ("backward", "encode and decode", "wait", "network")
_WORK = LANES[:2]
Intervals = np.ndarray  # (n, 2): starts and ends in seconds


@dataclass(frozen=True)
class Span:
    """One piece of work, such as "encode 0.weight".

    lane: one of `LANES`.
    row: the trace's thread; the network's lane has several rows where collectives travel at once.
    start, stop: seconds.
    """

    name: str
    lane: str
    row: int
    start: float
    stop: float


@dataclass(frozen=True)
class StepTimes(Jsonable):
    """The times of one rank's iteration.

    seconds: time from the first span's start to the last one's end.
    backward_seconds, codec_seconds, network_seconds: computing gradients, in codecs, and collectives travelling.
    hidden_seconds: those of the network in which this rank was computing or coding; `exposed_seconds`: the rest.
    """

    step: int
    rank: int
    seconds: float
    backward_seconds: float
    codec_seconds: float
    network_seconds: float
    hidden_seconds: float
    exposed_seconds: float


@dataclass(frozen=True)
class StepSpans:
    """One rank's spans of one iteration, in the order in which they began."""

    step: int
    rank: int
    spans: tuple[Span, ...]

    @property
    def begin(self) -> float:
        """When the first span began, in seconds. As a rule it is the first bucket's arrival."""
        return self.spans[0].start

    @property
    def times(self) -> StepTimes:
        """The spans as seconds."""
        network = self._busy("network")
        work = self._busy(*_WORK)
        exposed = length(union(np.concatenate([work, network]))) - length(work)
        return StepTimes(
            step=self.step,
            rank=self.rank,
            seconds=max(span.stop for span in self.spans) - self.begin,
            backward_seconds=length(self._busy("backward")),
            codec_seconds=length(self._busy("encode and decode")),
            network_seconds=length(network),
            hidden_seconds=length(network) - exposed,
            exposed_seconds=exposed,
        )

    def _busy(self, *lanes: str) -> Intervals:
        return union(np.array([(one.start, one.stop) for one in self.spans if one.lane in lanes]).reshape(-1, 2))


def union(spans: Intervals) -> Intervals:
    """Return the disjoint intervals (m, 2), in order, that intervals (n, 2) cover."""
    if not len(spans):
        return np.zeros((0, 2))
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reach = np.maximum.accumulate(spans[:, 1])
    first = np.flatnonzero(np.concatenate([[True], spans[1:, 0] > reach[:-1]]))
    return np.stack([spans[first, 0], np.concatenate([reach[first[1:] - 1], reach[-1:]])], axis=1)


def without(spans: Intervals, holes: Intervals) -> Intervals:
    """Return what of disjoint intervals lies in no hole; both are in order."""
    left, at = list[tuple[float, float]](), 0
    for start, stop in spans.tolist():
        while at < len(holes) and holes[at, 1] <= start:
            at += 1
        hole = at
        while hole < len(holes) and holes[hole, 0] < stop:
            if holes[hole, 0] > start:
                left.append((start, float(holes[hole, 0])))
            start, hole = max(start, float(holes[hole, 1])), hole + 1
        if start < stop:
            left.append((start, stop))
    return np.array(left).reshape(-1, 2)


def length(spans: Intervals) -> float:
    """Return the length of disjoint intervals together."""
    return float((spans[:, 1] - spans[:, 0]).sum())


def read_step(path: Path, rank: int = 0, step: int | None = None) -> StepSpans:
    """Read one iteration of one rank from a chrome trace, in the order in which spans began, without other programs'
    spans; None: the rank's first iteration in the file."""
    nbytes = path.stat().st_size  # of ours a value takes eight
    content = read_json(path, "a chrome trace", most_values=max(1000, nbytes // 4))
    try:
        events = content["traceEvents"] if isinstance(content, dict) else content
        spans = _by_rank_and_step(events)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise GradlabError(f"{path}: not a chrome trace: {type(error).__name__}: {str(error)[:100]}") from None
    if not spans:
        raise GradlabError(f"{path}: no spans of gradlab's engine in it; gradlab train ... --chrome-trace writes them")
    steps = sorted(number for other, number in spans if other == rank)
    if not steps:
        raise GradlabError(f"{path}: rank {rank} is not in it, there are {sorted({other for other, _ in spans})}")
    chosen = steps[0] if step is None else step
    if chosen not in steps:
        raise GradlabError(f"{path}: iteration {chosen} of rank {rank} is not in it, there are {steps}")
    return StepSpans(chosen, rank, tuple(sorted(spans[rank, chosen], key=lambda span: span.start)))


def _by_rank_and_step(events: Sequence[dict[str, Any]]) -> dict[tuple[int, int], list[Span]]:
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    spans: dict[tuple[int, int], list[Span]] = {}
    for event in events:
        lane = lanes.get((event.get("pid"), event.get("tid")))
        if event.get("ph") == "X" and lane in LANES:
            start, stop = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
            if not math.isfinite(start) or not start <= stop < math.inf:
                raise ValueError(f"a span from {start:g} to {stop:g} s")
            span = Span(str(event["name"]), lane, int(event["tid"]), start, stop)
            spans.setdefault((int(event["pid"]), int(event["args"]["step"])), []).append(span)
    return spans
