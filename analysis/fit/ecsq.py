"""A plan of entropy-coded scalar quantization, beside every other codec at as many bytes and beside the least bits.

By default `ecsq` learns nothing beforehand: its tables travel in its messages, and its step follows from earlier ones.
So a recording says what it will do, and every iteration is held out. Tables can be fitted, too: on the earlier half of
the recording. The comparison is of contributions of single ranks without feedback on the later half, as each
iteration is then judged for itself.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gradlab import codecs
from gradlab.analysis.gradients import step_gradients
from gradlab.analysis.measure.rate_distortion import distortion_at, mean_squares
from gradlab.analysis.parallel import Workers
from gradlab.analysis.replay import replay_plans
from gradlab.analysis.replay.result import Replay
from gradlab.codec import Tensors
from gradlab.codec.settings import build_settings
from gradlab.codecs.ecsq import ECSQ
from gradlab.errors import GradlabError
from gradlab.jsonable import Jsonable
from gradlab.layout import Layer
from gradlab.plan import Plan
from gradlab.progress import Progress

if TYPE_CHECKING:
    from gradlab.trace import Trace

_SAME = 1.02  # times the bytes of ecsq count as no more
# Those that need a fit or learn as they go, and what is none.
_LEFT_OUT = ("ecsq", "gradiveq", "identity", "lgc_ring", "lgc_server")


@dataclass(frozen=True)
class Alone(Jsonable):
    """A codec without feedback: bits per compressed value; error: ||C(x) - x|| / ||x|| of one rank; means."""

    codec: str
    settings: Mapping[str, Any]
    bits: float
    error: float


@dataclass(frozen=True)
class AtEqualBytes(Jsonable):
    """Parts of a rank's gradient that codecs miss in as many bits as `ecsq` takes.

    others: each other codec at the setting that takes the most bits but no more than that, by error.
    floor: the rate-distortion function at the bits of ecsq, of independent Gaussian values with each value's own mean
        square over these iterations and all ranks, known to both sides.
    iterations: the first and the last that this was measured on.
    """

    ecsq: Alone
    others: tuple[Alone, ...]
    floor: float
    iterations: tuple[int, int]


def with_fitted_tables(trace: Trace, plan: Plan) -> Plan:
    """Fit the tables of a plan's groups of ecsq on the earlier half of a trace, one rank's contribution at a time."""
    groups, learned = list(plan.groups), dict(plan.learned)
    for at, group in enumerate(plan.groups):
        if group.codec != "ecsq":
            continue
        groups[at] = replace(group, settings={**group.settings, "tables": "fitted"})
        codec = ECSQ(build_settings(ECSQ, groups[at].settings))
        learned[group.name] = codec.fitted(plan.members(group), _contributions(trace, group.layers)).learned
    return replace(plan, groups=tuple(groups), learned=learned)


def _contributions(trace: Trace, names: Sequence[str]) -> Iterator[Tensors]:
    """Yield one rank's gradients of every iteration of a trace's earlier half."""
    for number, step in enumerate(trace.iterate(0, _half(trace), names)):
        yield {name: torch.from_numpy(one) for name, one in step_gradients(step)[number % trace.world_size].items()}


def _half(trace: Trace) -> int:
    """Return where the later half of a trace begins."""
    if len(trace.steps) < 2:
        raise GradlabError("a trace of 1 iteration, expected 2 or more: the step settles on the earlier half")
    return len(trace.steps) // 2


def compare_at_equal_bytes(
    trace: Trace, plan: Plan, *, workers: Workers = 1, progress: Progress | None = None
) -> AtEqualBytes:
    """Measure a plan of ecsq and every other codec, without feedback, on the later half of a trace."""
    from_here, steps = _half(trace), len(trace.steps)
    names = [name for group in plan.compressed_groups for name in group.layers]
    groups = tuple(replace(group, wrappers=()) for group in plan.groups)
    bare = replace(plan, schedule=replace(plan.schedule, warmup_steps=0), groups=groups)
    replays = replay_plans(trace, {"": bare}, workers=workers, progress=progress)
    own = _alone(plan, _sound(replays[""]), names, steps - from_here)
    rivals = {rival.groups[0].codec: rival for rival in _rivals(plan.layers, names, own.bits, trace.world_size)}
    done = replay_plans(trace, rivals, workers=workers, progress=progress)
    others = [
        _alone(rival, one, names, steps - from_here)
        for name, rival in rivals.items()
        if isinstance(one := done[name], Replay)
    ]
    variances = np.concatenate([mean_squares(trace, name, from_here) for name in names])
    least = distortion_at(variances, own.bits * len(variances))
    floor = math.sqrt(least / variances.sum()) if variances.any() else 0.0
    first, last = int(trace.steps[from_here]), int(trace.steps[-1])
    return AtEqualBytes(own, tuple(sorted(others, key=lambda one: one.error)), floor, (first, last))


def _sound(replayed: Replay | GradlabError) -> Replay:
    if isinstance(replayed, GradlabError):
        raise replayed
    return replayed


def _rivals(layers: Sequence[Layer], names: Sequence[str], bits: float, world_size: int) -> Iterator[Plan]:
    """Yield each codec's setting of the most bits, at most `bits` per value; selections are across layers, as in
    ecsq.
    """
    compressed = [layer for layer in layers if layer.name in set(names)]
    for name in codecs.names():
        method, fitting = codecs.get(name), []
        grouped: dict[str, Any] = {"group_bytes": 2**62} if method().traits.selects else {}
        for settings in method.about.candidates if name not in _LEFT_OUT else ():
            try:
                plan = Plan.uniform(
                    compressed, name, wrappers=(), minimum_dimensions=0, minimum_numel=0, **grouped, **settings
                )
            except GradlabError:  # this setting is not for these layers
                continue
            fitting.append((_bits(plan.payload_bytes(world_size), plan, names), plan))
        if allowed := [(taken, plan) for taken, plan in fitting if taken <= _SAME * bits]:
            yield replace(max(allowed, key=lambda one: one[0])[1], layers=tuple(layers))


def _bits(payload: float, plan: Plan, names: Sequence[str]) -> float:
    """Bits per value of the layers that count, of bytes that a plan sends of all its layers."""
    counted = set(names)
    numel = sum(layer.numel for layer in plan.layers if layer.name in counted)
    return 8 * (payload - 4 * (sum(layer.numel for layer in plan.layers) - numel)) / numel


def _alone(plan: Plan, replayed: Replay, names: Sequence[str], count: int) -> Alone:
    """Read a uniform plan's replay over its last `count` iterations."""
    steps = replayed.compressed[-count:]
    group = plan.groups[0]
    return Alone(
        group.codec,
        dict(group.settings),
        _bits(statistics.fmean(step.payload_bytes_mean for step in steps), plan, names),
        statistics.fmean(step.contribution_error or 0.0 for step in steps),
    )
