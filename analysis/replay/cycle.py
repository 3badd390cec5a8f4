"""Phases of training iterations under a plan, and the recorded loss over time with it.

Yu, Lin, et al., "GradiVeQ", NeurIPS 2018: Fig. 6, the iterations of a layer's slices (sampled, fitted on, compressed),
and Fig. 7a, convergence over wall-clock time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gradlab.analysis.replay.run import check_replay, lockstep_of, replay_steps
from gradlab.codec import Codec
from gradlab.codec.wrapper import innermost
from gradlab.codecs.gradiveq import GradiVeQ
from gradlab.errors import GradlabError
from gradlab.executor.lockstep_plan import LockstepPlan
from gradlab.jsonable import Jsonable
from gradlab.layout import Layer
from gradlab.plan import Plan
from gradlab.progress import Progress

if TYPE_CHECKING:
    from gradlab.trace import Trace

DENSE, SAMPLED, COMPRESSED = PHASES = ("dense", "sampled", "compressed")


@dataclass(frozen=True)
class LayerCycle(Jsonable):
    """The iterations of one layer: "dense", "sampled" (uncompressed or as QSGD, to fit on) or "compressed".

    fitted_after: iterations whose sample was the last before bases were fitted.
    slices: number of slices, 1 if the layer is not cut; fitted_slices: those that each basis is fitted on.
    """

    phases: tuple[str, ...]
    fitted_after: tuple[int, ...]
    slices: int
    fitted_slices: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class TrainingCycle(Jsonable):
    """The iterations of all layers that a plan compresses, by name: Fig. 6."""

    iterations: tuple[int, ...]
    layers: dict[str, LayerCycle]

    def all_compressed(self) -> np.ndarray:
        """Say of each iteration whether no layer is sampled or dense in it: bool (T,)."""
        phases = np.array([layer.phases for layer in self.layers.values()])
        return (phases == COMPRESSED).all(0)


@dataclass(frozen=True)
class LossOverTime(Jsonable):
    """A curve of Fig. 7a: seconds since training began, at the end of each iteration; loss: mean over ranks."""

    seconds: tuple[float, ...]
    loss: tuple[float, ...]


def training_cycle(
    trace: Trace, plan: Plan, *, start: int = 0, stop: int | None = None, progress: Progress | None = None
) -> TrainingCycle:
    """Find out what each iteration of a recording is under a plan, by the code that trains."""
    stop = len(trace.steps) if stop is None else stop
    check_replay(trace, plan, start, stop)
    lockstep = lockstep_of(trace, plan)
    names = [name for group in lockstep.groups for name in group.layers]
    phases: dict[str, list[str]] = {name: [] for name in names}
    iterations: list[int] = []
    before = _phases(lockstep)
    for result, _ in replay_steps(trace, lockstep, start, stop):
        iterations.append(result.iteration)
        for name in names:
            phases[name].append(before[name] if result.compressing else DENSE)
        before = _phases(lockstep)
        if progress:
            progress("iterations", len(iterations), stop - start)
    layers = {}
    for group in lockstep.groups:
        codec = innermost(lockstep.codecs[group.name])
        for layer in plan.members(group):
            count, fitted = _slices(codec, layer)
            layers[layer.name] = LayerCycle(
                tuple(phases[layer.name]), _fits(phases[layer.name], iterations), count, fitted
            )
    return TrainingCycle(tuple(iterations), layers)


def _phases(lockstep: LockstepPlan) -> dict[str, str]:
    """The phase of each layer in the next iteration, if that is not dense by schedule."""
    phases = {}
    for group in lockstep.groups:
        codec, state = innermost(lockstep.codecs[group.name]), lockstep.states[0].get(group.name, {})
        for layer in lockstep.plan.members(group):
            phases[layer.name] = codec.phase(layer, state) if isinstance(codec, GradiVeQ) else COMPRESSED
    return phases


def _slices(codec: Codec, layer: Layer) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """The number of a layer's slices, and those that each basis is fitted on."""
    if not isinstance(codec, GradiVeQ) or layer.numel < codec.slice_size(layer):
        return 1, ()
    count = layer.numel // codec.slice_size(layer)
    return count, tuple(map(tuple, codec.fitted_slices(count)))


def _fits(phases: Sequence[str], iterations: Sequence[int]) -> tuple[int, ...]:
    """Iterations that were sampled, after which the next one is compressed."""
    pairs = zip(phases[:-1], phases[1:], iterations[:-1], strict=True)
    return tuple(iteration for now, then, iteration in pairs if (now, then) == (SAMPLED, COMPRESSED))


def recorded_losses(trace: Trace) -> np.ndarray:
    """Mean over ranks of each recorded iteration's loss, (T,)."""
    losses = np.mean([trace.scalars(rank)["loss"] for rank in range(trace.world_size)], axis=0)
    if not np.isfinite(losses).any():
        raise GradlabError(f"{trace.path}: no losses are recorded; annotate steps with them (TraceRecorder.annotate)")
    return losses


def loss_over_time(losses: np.ndarray, compressed: np.ndarray, dense_seconds: float, seconds: float) -> LossOverTime:
    """Lay recorded losses (T,) over seconds: Fig. 7a. `compressed` (T,) marks iterations of the plan's step time.
    The recorded losses stand for the plan's, as the paper's three systems take the same iterations.
    """
    steps = np.where(compressed, seconds, dense_seconds)
    return LossOverTime(tuple(np.cumsum(steps).tolist()), tuple(losses.tolist()))
