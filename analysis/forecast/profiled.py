"""Read a trace of torch.profiler: what a step computes and exchanges, how much of that it waits for, and what would be
left with fewer bytes.

On a GPU kernels are read: NCCL's communicate, all others compute. On a CPU operators compute, in whatever thread, and
the ranges of c10d, of backends ("gloo:all_reduce") and of gradlab's buckets communicate. Communication is exposed while
nothing computes.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gradlab.analysis.forecast.diagnosis import HALF, PLAIN, waiting
from gradlab.analysis.forecast.link import Link, all_reduce, spell_rate
from gradlab.chrome_trace import Intervals, length, union, without
from gradlab.errors import GradlabError
from gradlab.formatting import format_bytes, format_counted, format_seconds
from gradlab.jsonable import Jsonable, read_json
from gradlab.layout import Layer

_FORM = "a trace of torch.profiler (export_chrome_trace)"
_MOST_BYTES, _MOST_VALUES = 2**28, 2**25
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_ALL_REDUCE = re.compile("all_?reduce", re.IGNORECASE)
_NCCL = re.compile(r"(nccl|rccl|msccl)", re.IGNORECASE)
_BACKENDS = ("gloo:", "mpi:", "ucc:", "nccl:", "gradlab::exchange")
_SIZES = {"float": 4, "double": 8, "half": 2, "bfloat16": 2}  # bytes of an element, by the end of a type's name
_MOST_ELEMENTS, _MOST_BUCKETS = 2**40, 10_000  # of what is forecast
_COLUMN = 64  # elements of a row of a layer that stands for a bucket
_FORECAST = "int4"


@dataclass(frozen=True)
class ProfiledSteps(Jsonable):
    """Steps of one rank: means, in seconds and bytes.

    rank, ranks: the rank and their number; None where the trace does not tell.
    steps: number of steps that the means are over.
    seconds: a step.
    exchanging_seconds: the part of it in which something communicates.
    exposed_seconds: the part of that in which nothing computes.
    reducing_seconds: the part in which all-reduces travel; `others_seconds`: in which other collectives do.
    bucket_bytes: bytes of each all-reduce of the last step; empty where the trace has no shapes.
    element_bytes: bytes of an element of these.
    forecast_seconds: forecast of the wait by plan; empty where there is none.
    no_forecast: why there is none.
    """

    rank: int | None
    ranks: int | None
    steps: int
    seconds: float
    exchanging_seconds: float
    exposed_seconds: float
    reducing_seconds: float
    others_seconds: float
    bucket_bytes: tuple[int, ...]
    element_bytes: int
    forecast_seconds: Mapping[str, float] = field(default_factory=dict)
    no_forecast: str = ""

    @property
    def computing_seconds(self) -> float:
        """The step less its wait, in seconds."""
        return max(1e-9, self.seconds - self.exposed_seconds)

    @property
    def sentences(self) -> list[str]:
        """Sentences on the step, its bytes, and what fewer of them would leave of its wait."""
        whose = "" if self.rank is None else f" of rank {self.rank}" + (f" of {self.ranks}" if self.ranks else "")
        parts = (self.seconds, self.computing_seconds, self.exchanging_seconds, self.exposed_seconds)
        step, computing, exchanging, exposed = (format_seconds(seconds, 2) for seconds in parts)
        said = [
            f"{format_counted(self.steps, 'step')}{whose}.",
            f"A step takes {step}: computing {computing}, exchanging {exchanging}, of which {exposed} waited for.",
        ]
        if self.bucket_bytes:
            total = format_bytes(sum(self.bucket_bytes), 2)
            speed = f", at {spell_rate(float(f'{self.link.bits_per_second:.2g}'))}" if self._has_link else ""
            said.append(f"{format_counted(len(self.bucket_bytes), 'all-reduce')} of {total} in all{speed}.")
        if self.forecast_seconds:
            left = ", ".join(f"{name} {format_seconds(one, 2)}" for name, one in self.forecast_seconds.items())
            said.append(f"Forecast of the wait on this link, measured {exposed}: {left}.")
        return [*said, f"No forecast: {self.no_forecast}."] if self.no_forecast else said

    @property
    def _has_link(self) -> bool:
        return bool(self.bucket_bytes and self.ranks and self.ranks > 1 and self.reducing_seconds > 0)

    @property
    def link(self) -> Link:
        """The link on which the step's all-reduces take as long as they took, waiting for slower ranks included."""
        assert self.ranks is not None
        path_bytes = sum(all_reduce(nbytes, self.ranks).path_bytes for nbytes in self.bucket_bytes)
        return Link(8 * (1 + Link(1.0).header_share) * path_bytes / self.reducing_seconds)

    def why_no_forecast(self) -> str:
        """Say why a forecast would be of something else; nothing if it would not."""
        if not self.ranks or self.ranks < 2:
            return "the trace is of no run of several ranks"
        if not self.exchanging_seconds:
            return "nothing was exchanged in these steps"
        if self.reducing_seconds < self.others_seconds:
            return "exchanges that are no all-reduces take longer"
        if len(self.bucket_bytes) > _MOST_BUCKETS:
            return f"{len(self.bucket_bytes)} all-reduces a step"
        return "" if self._has_link else "the trace has no sizes; profile with record_shapes=True"


def read_profile(path: str | os.PathLike[str]) -> ProfiledSteps:
    """Read a trace of torch.profiler, .json or .json.gz, and forecast the wait in 16 bits and in int4.

    Raises:
        GradlabError: for what is no such trace, larger than 256 MiB, cut off, or without two steps.
    """
    content = read_json(path, _FORM, _MOST_BYTES, _MOST_VALUES)
    try:
        steps = _steps_of(content)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise GradlabError(f"{path}: not {_FORM}: {type(error).__name__}: {str(error)[:100]}") from None
    if steps is None:
        raise GradlabError(f"{path}: holds no two steps: call step() of the profiler, or profile two optimizer steps")
    why = steps.why_no_forecast()
    try:
        return replace(steps, no_forecast=why) if why else replace(steps, forecast_seconds=_forecast(steps))
    except GradlabError as error:
        return replace(steps, no_forecast=str(error))


def _forecast(steps: ProfiledSteps) -> dict[str, float]:
    """Forecast the wait by plan, with a layer for each bucket. Gradients in 16 bits stay so in any plan."""
    assert steps.ranks is not None
    counts = [max(1, nbytes // steps.element_bytes // _COLUMN) for nbytes in steps.bucket_bytes]
    layers = [Layer(f"bucket {n}", (count, _COLUMN), "linear") for n, count in enumerate(counts)]
    found = waiting(layers, steps.computing_seconds, steps.link, steps.ranks, None, [_FORECAST])
    names = [PLAIN, HALF, _FORECAST] if steps.element_bytes == 4 else [HALF, _FORECAST]
    return {name: max(0.0, found.seconds[name] - found.computing) for name in names}


def _steps_of(content: Any) -> ProfiledSteps | None:
    events = content["traceEvents"] if isinstance(content, dict) else content
    events = [event for event in events if event.get("ph") == "X"]
    times = np.array([(event["ts"], event["ts"] + event["dur"]) for event in events], dtype=float).reshape(-1, 2) / 1e6
    if not np.isfinite(times).all() or (times[:, 1] < times[:, 0]).any():
        raise ValueError("an event without a time, or of a negative one")
    window = _window([str(event["name"]) for event in events], times)
    if window is None:
        return None
    first, last, count = window
    inside = [n for n, (start, stop) in enumerate(times) if start < last and stop > first]
    events, times = [events[n] for n in inside], np.clip(times[inside], first, last)
    sent, computing = _communication(events), _computing(events, times)
    travelling = [n for n in sent if not str(events[n]["name"]).startswith("c10d::")]  # which are the host's calls
    reduced = [n for n in travelling if _ALL_REDUCE.search(str(events[n]["name"]))]
    others = [n for n in travelling if not _ALL_REDUCE.search(str(events[n]["name"]))]
    exchanging = union(times[sent])
    told = [_size_of(events[n]) for n in sorted(reduced, key=lambda n: float(times[n, 0]))]
    sizes = [one for one in told if one is not None][-max(1, round(len(told) / count)) :] if None not in told else []
    info = content.get("distributedInfo", {}) if isinstance(content, dict) else {}
    rank, ranks = (int(info[name]) if name in info else None for name in ("rank", "world_size"))
    return ProfiledSteps(
        rank,
        ranks,
        steps=count,
        seconds=(last - first) / count,
        exchanging_seconds=length(exchanging) / count,
        exposed_seconds=(length(union(np.concatenate([computing, exchanging]))) - length(computing)) / count,
        reducing_seconds=length(union(times[reduced])) / count,
        others_seconds=length(union(times[others])) / count,
        bucket_bytes=tuple(numel * size for numel, size in sizes),
        element_bytes=sizes[-1][1] if sizes else 4,
    )


def _window(names: Sequence[str], times: Intervals) -> tuple[float, float, int] | None:
    """Return start, end and number of the steps: those that the profiler marks, else from optimizer step to step."""
    marked = [n for n, name in enumerate(names) if name.startswith("ProfilerStep#")]
    if len({names[n] for n in marked}) > 1:
        return float(times[marked, 0].min()), float(times[marked, 1].max()), len({names[n] for n in marked})
    optimizers = [name for name in names if name.startswith("Optimizer.step#")]
    ends = np.sort(times[[n for n, name in enumerate(names) if optimizers and name == optimizers[-1]], 1])
    return (float(ends[0]), float(ends[-1]), len(ends) - 1) if len(ends) > 1 else None


def _communication(events: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the places of events that communicate: NCCL's kernels, or else ranges of the host."""
    kernels = [n for n, event in enumerate(events) if event.get("cat") == "kernel" and _NCCL.match(str(event["name"]))]
    return kernels or [
        n for n, event in enumerate(events) if str(event["name"]).startswith((*_BACKENDS, "c10d::")) and not _gpu(event)
    ]


def _computing(events: Sequence[Mapping[str, Any]], times: Intervals) -> Intervals:
    """Return when anything computes: kernels of a GPU; without one operators, less c10d's own in the same thread."""
    kernels = [n for n, event in enumerate(events) if _gpu(event) and not _NCCL.match(str(event["name"]))]
    if kernels:
        return union(times[kernels])
    by_thread: dict[Any, tuple[list[int], list[int]]] = {}
    for n, event in enumerate(events):
        if event.get("cat") == "cpu_op":
            sends = str(event["name"]).startswith(("c10d::", *_BACKENDS))
            by_thread.setdefault(str(event.get("tid")), ([], []))[sends].append(n)
    parts = [without(union(times[work]), union(times[sends])) for work, sends in by_thread.values()]
    return union(np.concatenate([np.zeros((0, 2)), *parts]))


def _gpu(event: Mapping[str, Any]) -> bool:
    return event.get("cat") in _ON_GPU


def _size_of(event: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return elements of an all-reduce and bytes of each, as NCCL's kernels or ranges with shapes tell; else None."""
    told = event.get("args", {})
    if "In msg nelems" in told:
        count, kind = int(told["In msg nelems"]), str(told.get("dtype"))
    elif told.get("Input Dims") and told.get("Input type"):
        count, kind = math.prod(map(int, told["Input Dims"][0])), str(told["Input type"][0])
    else:
        return None
    size = _SIZES.get(kind.lower().rpartition("::")[2])
    return (count, size) if size and 0 < count < _MOST_ELEMENTS else None
