"""What an iteration costs in each of LGC's three phases, measured on a recorded trace.

Abrahamyan, Chen, Bekoulis, Deligiannis, "Learned gradient compression for distributed deep learning", IEEE TNNLS 2021:
Table V has the duration of an iteration in each phase, Table IV what is sent in it, and section VI-B the time of the
encoder and of the decoder.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gradlab.analysis.fit.lgc.learners import Learner, learner_of
from gradlab.analysis.fit.lgc.selections import collect_selections
from gradlab.analysis.replay import lockstep_of, replay_steps
from gradlab.codec import Tensors, concatenate, seeded_generator
from gradlab.codec.wrapper import innermost
from gradlab.jsonable import Jsonable
from gradlab.learning.autoencoder import gradient_of, optimized
from gradlab.learning.selection import SELECTING, LearnedSelection
from gradlab.plan import Plan, lgc_plan
from gradlab.plan.lgc_recipe import GROUP

if TYPE_CHECKING:
    from gradlab.trace import Trace


@dataclass(frozen=True)
class Update(Jsonable):
    """An iteration of one phase, without the model's own computing and without the network.

    Args:
        codec_seconds: in the codecs' code, mean over ranks.
        learning_seconds: in which one rank trains the autoencoder, and the others wait.
        payload_bytes: that a rank contributes, mean over ranks.
    """

    codec_seconds: float
    learning_seconds: float
    payload_bytes: float


@dataclass(frozen=True)
class PhaseTimes(Jsonable):
    """Times of LGC on one thread, medians over the recorded iterations.

    Args:
        pattern: "ring" or "server".
        world_size: number of ranks.
        iterations: that were measured.
        selected: values that the autoencoder codes.
        selection: seconds in which a rank finds its largest values.
        encode: seconds in which a rank codes its values.
        decode: seconds in which a rank decodes: once in a ring, every rank's values with a server.
        learn: seconds in which one rank takes one step of the autoencoder's training, on all ranks' values.
        full, topk, compressed: the iteration of the three phases.
    """

    pattern: str
    world_size: int
    iterations: int
    selected: int
    selection: float
    encode: float
    decode: float
    learn: float
    full: Update
    topk: Update
    compressed: Update


def measure_phases(trace: Trace, pattern: str = "ring", *, seed: int = 0, **settings: Any) -> PhaseTimes:
    """Time the parts of LGC on recorded gradients, and run all three phases on them in lockstep.

    The autoencoder has the weights that it starts from, as its time does not depend on them.

    Args:
        trace: gradients of each rank, a few iterations.
        pattern: "ring" or "server".
        seed: of the weights.
        settings: of the codec, or fields of `LgcRecipe`, by name.

    Raises:
        GradlabError: for a trace of one rank or without a finite iteration, a model with nothing between its first and
            its last layer, or a setting out of range.
    """
    plan = lgc_plan(trace.layers, pattern, **{**settings, "warmup_steps": 0})
    [group] = [group for group in plan.groups if group.name == GROUP]
    sizes = [layer.numel for layer in plan.members(group)]
    selections = collect_selections(trace, plan)
    learner = learner_of(pattern, dict(group.settings), sizes, trace.world_size)
    weights = learner.architecture.initial(seeded_generator("lgc", seed))
    codec = innermost(plan.build(group))
    assert isinstance(codec, LearnedSelection)
    inputs = learner.inputs(selections)
    code = learner.architecture.encode(weights, inputs.vectors[0, 0])
    each = range(len(selections))
    learn = _median(each, lambda at: _learn(learner, weights, inputs.at(torch.tensor([at])), codec))
    coded = lgc_plan(trace.layers, pattern, autoencoder=weights, **{**settings, "warmup_steps": 0})
    return PhaseTimes(
        pattern,
        trace.world_size,
        len(selections),
        selections.count,
        selection=_selection(trace, codec, plan.members(group), sizes),
        encode=_median(each, lambda at: learner.architecture.encode(weights, inputs.vectors[at, 0])),
        decode=_median(each, lambda at: _decode(learner, weights, code, at, inputs.innovations)),
        learn=learn,
        full=Update(0.0, 0.0, plan.payload_bytes(trace.world_size, compressing=False)),
        topk=_update(trace, plan, learn, {f"{group.layers[0]}/clock": torch.tensor([SELECTING, 0.0])}),
        compressed=_update(trace, coded, 0.0, {}),
    )


def _selection(trace: Trace, codec: LearnedSelection, members: Sequence[Any], sizes: Sequence[int]) -> float:
    names = [layer.name for layer in members]
    vectors = [
        concatenate({name: torch.from_numpy(step.gradients[0][name]) for name in names})
        for step in trace.iterate(0, len(trace.steps), names)
    ]
    return _median(range(len(vectors)), lambda at: codec.select(vectors[at], sizes))


def _decode(
    learner: Learner, weights: torch.Tensor, code: torch.Tensor, at: int, innovations: torch.Tensor | None
) -> None:
    for rank in range(learner.architecture.decoders):
        apart = None if innovations is None else innovations[at, rank]
        learner.architecture.decode(weights, code, rank, apart)


def _learn(learner: Learner, weights: torch.Tensor, inputs: Any, codec: LearnedSelection) -> None:
    generator, optimizer = seeded_generator("lgc", "time"), codec.settings.optimizer
    _, gradient = gradient_of(lambda w: learner.loss(w, inputs, generator), weights)
    optimized(optimizer, codec.settings.learning_rate, weights, gradient, {})


def _update(trace: Trace, plan: Plan, learning: float, state: Tensors) -> Update:
    """Run one phase over the trace. state: that the autoencoder's group starts from and stays in."""
    lockstep = lockstep_of(trace, plan)
    if state:
        lockstep.states = [{GROUP: dict(state)} for _ in range(trace.world_size)]
    results = [result for result, _ in replay_steps(trace, lockstep, 0, len(trace.steps)) if result.finite]
    return Update(
        statistics.median(result.codec_seconds for result in results),
        learning,
        statistics.fmean(statistics.fmean(result.payload) for result in results),
    )


def _median(of: Sequence[int], work: Callable[[int], object]) -> float:
    """Median seconds of `work` over its argument, after one call that is not timed."""
    work(of[0])
    seconds = []
    for one in of:
        began = time.perf_counter()
        work(one)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
