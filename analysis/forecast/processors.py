"""The processor that codecs will run on, where it is not the one that forecasts: what `gradlab doctor` timed on it.

A forecast times a codec's code here, at N ranks. The same codec's exchanges of a small and a large layer, timed here
and there, turn that time into the other processor's: the small one is mostly fixed costs, such as a GPU's launches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from gradlab import codecs
from gradlab.analysis.forecast.dry_run import CPU, DryRuns, clock_of, dry_run
from gradlab.analysis.forecast.simulator import Bucket, Exchange
from gradlab.analysis.forecast.step_time import Job
from gradlab.analysis.parallel import one_thread
from gradlab.errors import GradlabError
from gradlab.jsonable import Jsonable
from gradlab.layout import Layer
from gradlab.plan import Plan

#: Shapes of the two layers that codecs are timed with, each alone: on a CPU, and on an accelerator, where anything
#: smaller takes no longer than its launches.
SHAPES = ((128, 128), (256, 1024)), ((128, 128), (4096, 4096))
_RANKS = 2
_COPIED, _COPIES = 2**25, 5  # bytes, and how often
_REPEATS = 3  # of each exchange
_LONGEST = 1e4  # seconds that a file may say of an exchange


@dataclass(frozen=True)
class Processor(Jsonable):
    """A processor, and what codecs take on it.

    name: its name, such as "NVIDIA H200" or "cpu".
    accelerator: whether codecs and training share it and work on tensors that are not the CPU's.
    copy_bytes_per_second: speed of copies in its memory.
    exchanges: seconds of an exchange of each of the two `SHAPES` between two ranks, by codec.
    """

    name: str
    accelerator: bool
    copy_bytes_per_second: float
    exchanges: Mapping[str, tuple[float, float]]

    def seconds(self, codec: str, here: float) -> float:
        """Turn the seconds that an exchange's code takes here into those that it takes on this processor.

        A codec that was not timed takes the median of what the same time of the others' code would become.
        """
        known = [codec] if codec in self.exchanges else sorted(self.exchanges)
        return median(self._mapped(one, here) for one in known)

    def _mapped(self, codec: str, here: float) -> float:
        small, large = exchange_seconds(codec, CPU, self.accelerator)
        there_small, there_large = self.exchanges[codec]
        slope = max(0.0, there_large - there_small) / (large - small) if large > small else there_large / large
        return max(there_small + slope * (here - small), there_small * min(1.0, here / small))


def timed(device: torch.device) -> Processor:
    """Time on a device every codec that needs no fit, in some seconds."""
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else device.type
    accelerator = device.type != "cpu"
    exchanges = {codec: exchange_seconds(codec, device, accelerator) for codec in _unfitted()}
    return Processor(name, accelerator, copy_speed(device), exchanges)


@functools.cache
def copy_speed(device: torch.device) -> float:
    """Return the bytes per second of copies in a device's memory."""
    source, now = torch.zeros(_COPIED, dtype=torch.uint8, device=device), clock_of(device)
    target, times = torch.empty_like(source), list[float]()
    for _ in range(_COPIES + 1):
        began = now()
        target.copy_(source)
        times.append(now() - began)
    return _COPIED / median(times[1:])


@functools.cache
def exchange_seconds(codec: str, device: torch.device, accelerator: bool) -> tuple[float, float]:
    """Time a codec's exchanges of the two layers on a device, in seconds.

    accelerator: whether those of `SHAPES` for accelerators.
    """
    with one_thread():
        small, large = (_seconds_of(codec, shape, device) for shape in SHAPES[accelerator])
    return small, large


def _seconds_of(codec: str, shape: tuple[int, ...], device: torch.device) -> float:
    plan = Plan.uniform([Layer("w", shape, "linear")], codec, warmup_steps=0)
    [group] = plan.compressed_groups
    context = DryRuns(plan, _RANKS).context(group.name)
    return dry_run(
        plan.build(group, device), plan.members(group), context, repeats=_REPEATS, device=device
    ).codec_seconds


def _unfitted() -> Iterator[str]:
    """Name the codecs that compress and that a plan can have as they are."""
    for name in codecs.names():
        plan = Plan.uniform([Layer("w", SHAPES[0][0], "linear")], name, warmup_steps=0)
        if len(plan.compressed_groups) == 1:
            yield name


def moved(job: Job, processor: Processor) -> Job:
    """Give a job the codecs' and the engine's times of another processor, in place of this one's."""
    engine = copy_speed(CPU) / processor.copy_bytes_per_second

    def one(exchange: Exchange) -> Exchange:
        here = exchange.codec_seconds
        if not exchange.codec or not here:
            return exchange.scaled(engine, engine)
        return exchange.scaled(processor.seconds(exchange.codec, here) / here, engine)

    def all_of(buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
        return tuple(
            replace(bucket, scan_seconds=engine * bucket.scan_seconds, exchanges=tuple(map(one, bucket.exchanges)))
            for bucket in buckets
        )

    of_rank = None if job.rank_buckets is None else all_of(job.rank_buckets)
    return replace(job, buckets=all_of(job.buckets), rank_buckets=of_rank)


def processor_from(written: Any, path: object) -> Processor | None:
    """Read a processor from the entry "processor" of what `gradlab doctor --out` wrote; None if it has none."""
    found = written.get("processor") if isinstance(written, dict) else None
    if found is None:
        return None
    try:
        exchanges = {
            str(codec): (_bounded(small), _bounded(large))
            for codec, (small, large) in found["exchanges"].items()
            if codec in codecs.names()
        }
        speed = float(found["copy_bytes_per_second"])
        if not exchanges or not 0 < speed < math.inf:
            raise ValueError
        return Processor(str(found["name"])[:80], found["accelerator"] is True, speed, exchanges)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        raise GradlabError(
            f"{path}: its processor has no times of codecs: expected what gradlab doctor writes"
        ) from None


def _bounded(value: Any) -> float:
    seconds = float(value)
    if not 0 < seconds < _LONGEST:
        raise ValueError
    return seconds
