"""Fit LGC's autoencoder to a recorded trace, and say whether it beats what needs no learning.

Abrahamyan, Chen, Bekoulis, Deligiannis, "Learned gradient compression for distributed deep learning", IEEE TNNLS 2021.
The paper learns while training, from one iteration after the other; on a trace there can be many epochs, a part that
is held out, and other ways to send the same values beside it, at their bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gradlab.analysis.fit.lgc.learners import Learner, code_spread, in_units, learner_of
from gradlab.analysis.fit.lgc.selections import Code, Selections, codes_without_learning, collect_selections
from gradlab.analysis.measure.holdout import age_bins
from gradlab.analysis.parallel import one_thread
from gradlab.analysis.replay.sampled import require_all_layers, require_whole
from gradlab.artifact import Artifact
from gradlab.codec import Tensors, seeded_generator
from gradlab.codec.settings import build_settings
from gradlab.codecs.lgc_ring import LgcRing
from gradlab.codecs.lgc_server import LgcServer
from gradlab.errors import GradlabError
from gradlab.jsonable import Jsonable
from gradlab.learning.autoencoder import gradient_of, optimized
from gradlab.learning.selection import LearnedSettings
from gradlab.plan import LgcRecipe, lgc_plan
from gradlab.plan.lgc_recipe import GROUP
from gradlab.progress import Progress

if TYPE_CHECKING:
    from gradlab.plan import Plan
    from gradlab.trace import Trace

# Shares of the recorded iterations: the first are learned from, the next say when to stop, the rest are held out.
_LEARNED, _STOPPED_BY = 0.6, 0.15
_LEAST_ITERATIONS = 20
_BATCH = 8
_EQUAL = 1.05  # times as many bytes are still called as many


@dataclass(frozen=True)
class Fitting:
    """How an autoencoder is learned; patience: epochs without a smaller error; batch: iterations of a step of Adam."""

    epochs: int = 100
    patience: int = 10
    learning_rate: float = 1e-3
    batch: int = _BATCH

    def __post_init__(self) -> None:
        for name in ("epochs", "patience", "batch"):
            if getattr(self, name) < 1:
                raise GradlabError(f"autoencoder: {name} = {getattr(self, name)}, expected at least 1")
        if not 0 < self.learning_rate < 1:
            raise GradlabError(f"autoencoder: learning rate = {self.learning_rate:g}, expected a number in (0, 1)")


@dataclass(frozen=True)
class LgcOptions(LgcRecipe):
    """The plan that `fit_lgc` makes, a `gradlab.plan.LgcRecipe` without a warm-up, and how its autoencoder is learned.

    Args:
        settings: settings of codec `lgc_ring` or `lgc_server`. Its loss, optimizer and learning_rate are for training.
        fitting: epochs, patience, rate and batch of learning on the trace; None is `Fitting()`.
    """

    settings: Mapping[str, Any] | None = None
    fitting: Fitting | None = None
    warmup_steps: int = field(default=0, kw_only=True)


@dataclass(frozen=True)
class EpochErrors(Jsonable):
    """Squared errors after an epoch, as shares of sending zeros, on iterations learned from and those that stop."""

    learned: float
    stop: float


@dataclass(frozen=True)
class CodeScore(Jsonable):
    """A way to send the selected values: error on held-out iterations over that of zeros, and bytes of an iteration.

    payload_bytes: mean over ranks; wire_bytes: those that rank 0 sends.
    """

    name: str
    error: float
    payload_bytes: float
    wire_bytes: float


@dataclass(frozen=True)
class Parts(Jsonable):
    """Numbers of iterations: to learn from, to stop by, and later ones."""

    learned: int
    stopped_by: int
    held_out: int


@dataclass(frozen=True)
class AgeErrors(Jsonable):
    """The autoencoder's error over that of zeros, (b,), by age in iterations: first and last age of each bin."""

    ages: list[tuple[int, int]]
    error_by_age: list[float]


@dataclass(frozen=True)
class LgcMeasurement(Jsonable):
    """How an autoencoder was learned, and its error on later iterations beside that of codes without learning.

    selected: values that a rank selects in an iteration.
    most_error: setting of the codec; with a larger error training does without the autoencoder. It is not written.
    code_spread: difference of codes of consecutive iterations, relative to their norm.
    codes: the autoencoder, then those without learning.
    payload_bytes, dense_payload_bytes: bytes of a compressed and of a dense iteration and rank.
    """

    pattern: str
    trace: str
    world_size: int
    selected: int
    settings: Mapping[str, Any]
    most_error: float = field(metadata={"json": False})
    fitting: Fitting
    iterations: Parts
    curve: list[EpochErrors]
    code_spread: float
    codes: list[CodeScore]
    holdout: AgeErrors
    payload_bytes: float
    dense_payload_bytes: float

    @property
    def autoencoder(self) -> CodeScore:
        """The autoencoder's own score."""
        return self.codes[0]

    @property
    def better(self) -> CodeScore | None:
        """Return the best code with at most 5 % more bytes than the autoencoder's, or None if that is better."""
        payload, wire = _EQUAL * self.autoencoder.payload_bytes, _EQUAL * self.autoencoder.wire_bytes
        rivals = [code for code in self.codes[1:] if code.payload_bytes <= payload and code.wire_bytes <= wire]
        best = min(rivals, key=lambda code: code.error)
        return best if best.error <= self.autoencoder.error else None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, as an artifact's metadata holds it: the method, every field, the name of the better code."""
        return {"method": "lgc", **super().to_json(), "better": self.better.name if self.better else None}


@dataclass(frozen=True)
class LgcFit:
    """A plan with its learned autoencoder, and how it was measured."""

    plan: Plan
    measured: LgcMeasurement

    @property
    def provenance(self) -> dict[str, Any]:
        """The measurement as plain JSON: the artifact's metadata."""
        return self.measured.to_json()

    def artifact(self) -> Artifact:
        """Join the plan and its metadata, to be saved."""
        return Artifact(self.plan, self.provenance)


def fit_lgc(
    trace: Trace,
    pattern: str = "ring",
    options: LgcOptions | None = None,
    *,
    progress: Progress | None = None,
    **changes: Any,
) -> LgcFit:
    """Learn an autoencoder from what the plan would select.

    The first 60 % of the recorded iterations are learned from, the next 15 % say when to stop, the rest are held out.
    The same seed gives the same weights: one thread computes.

    Args:
        trace: gradients of each rank.
        pattern: "ring" or "server".
        options: the plan, and how to learn.
        progress: called as the work goes on.
        changes: fields of `LgcOptions` by name, which differ from `options`.

    Raises:
        GradlabError: for fewer than 20 iterations, one rank, no layer between the first and the last, or a bad setting.
    """
    options = replace(options or LgcOptions(), **changes)
    with one_thread():
        return _fit(trace, pattern, options, progress)


def _fit(trace: Trace, pattern: str, options: LgcOptions, progress: Progress | None) -> LgcFit:
    fitting, settings = options.fitting or Fitting(), dict(options.settings or {})
    # Refuses what is no setting of the codec, before it is taken for a field of the recipe.
    of_codec: LearnedSettings = build_settings(LgcServer if pattern == "server" else LgcRing, settings)
    require_whole(trace, trace.samples, "LGC learns from the largest values of all layers together")
    require_all_layers(trace, "LGC learns from the largest values of all layers together")
    plan = lgc_plan(trace.layers, pattern, options, **settings)
    selections = collect_selections(trace, plan, progress=progress)
    if len(selections) < _LEAST_ITERATIONS:
        raise GradlabError(
            f"{trace.path}: {len(selections)} finite iterations, expected at least {_LEAST_ITERATIONS} to learn from, "
            "to stop by and to hold out"
        )
    ends = [round(len(selections) * share) for share in (_LEARNED, _LEARNED + _STOPPED_BY)]
    learned, stopper = selections.part(0, ends[0]), selections.part(*ends)
    held_out = selections.part(ends[1], len(selections))
    numels = [layer.numel for group in plan.groups if group.name == GROUP for layer in plan.members(group)]
    learner = learner_of(pattern, settings, numels, trace.world_size)
    weights, curve = learn(learner, learned, stopper, fitting, options.seed, progress)
    code_numel = learner.architecture.code_numel(selections.count)
    in_order = settings.get("order") == "value" and settings.get("normalise", "none") == "none"
    codes = [Code("autoencoder", partial(learner.averages, weights), *learner.sizes(selections))]
    codes += codes_without_learning(learned, selections, trace.world_size, code_numel, in_order)
    scores = [_score(code, held_out) for code in codes]
    plan = lgc_plan(trace.layers, pattern, options, autoencoder=weights, error=scores[0].error, **settings)
    measured = LgcMeasurement(
        pattern=pattern,
        trace=trace.digest,
        world_size=trace.world_size,
        selected=selections.count,
        settings=settings,
        most_error=of_codec.most_error,
        fitting=fitting,
        iterations=Parts(ends[0], ends[1] - ends[0], len(held_out)),
        curve=curve,
        code_spread=code_spread(learner, weights, held_out),
        codes=scores,
        holdout=_by_age(codes[0], held_out, learned.iterations[-1]),
        payload_bytes=plan.payload_bytes(trace.world_size),
        dense_payload_bytes=plan.payload_bytes(trace.world_size, compressing=False),
    )
    return LgcFit(plan, measured)


# --- learning ---------------------------------------------------------------------------------------------------------


def learn(
    learner: Learner,
    selections: Selections,
    stopper: Selections,
    fitting: Fitting,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[torch.Tensor, list[EpochErrors]]:
    """Learn weights, and keep those with the smallest error on `stopper`; return them with the errors of each epoch.
    Values are divided by one root mean square of all, so that a learning rate suits any gradients.
    """
    architecture, generator = learner.architecture, seeded_generator("lgc", seed)
    inputs, judge = learner.inputs(selections), learner.inputs(stopper)
    unit = float(inputs.vectors.double().square().mean().sqrt())
    if not unit:
        raise GradlabError("autoencoder: all selected values of the iterations to learn from are zero")
    inputs, judge = inputs.divided(unit), judge.divided(unit)
    weights, state = architecture.initial(generator), Tensors()
    best, best_error, waited, curve = weights, math.inf, 0, []
    for epoch in range(fitting.epochs):
        order = torch.randperm(len(inputs), generator=generator)
        for batch in order.split(fitting.batch):
            chosen = inputs.at(batch)
            _, gradient = gradient_of(lambda w, c=chosen: learner.loss(w, c, generator), weights)  # type: ignore[misc]
            weights, state = optimized("adam", fitting.learning_rate, weights, gradient, state)
        errors = EpochErrors(learner.error(weights, inputs), learner.error(weights, judge))
        if not (math.isfinite(errors.learned) and math.isfinite(errors.stop)):
            break
        curve.append(errors)
        if progress:
            progress("epochs", epoch + 1, fitting.epochs)
        waited += 1
        if errors.stop < best_error:
            best, best_error, waited = weights, errors.stop, 0
        if waited >= fitting.patience:
            break
    if not curve:
        raise GradlabError(
            f"autoencoder: diverged in its first epoch at learning rate {fitting.learning_rate:g}: try a smaller one"
        )
    return in_units(architecture, best, unit), curve


# --- what it is worth -------------------------------------------------------------------------------------------------


def _score(code: Code, held_out: Selections) -> CodeScore:
    error, energy = held_out.errors(code.decoded(held_out))
    share = float(error.sum() / energy.sum()) if float(energy.sum()) else 0.0
    return CodeScore(code.name, share, code.payload_bytes, code.wire_bytes)


def _by_age(code: Code, held_out: Selections, last: int) -> AgeErrors:
    """Error by iterations since the last one that was learned from."""
    error, energy = held_out.errors(code.decoded(held_out))
    ages = torch.tensor(held_out.iterations) - last
    bins = age_bins(ages.numpy())
    errors = []
    for low, high in bins:
        here = (ages >= low) & (ages <= high)
        errors.append(float(error[here].sum() / energy[here].sum().clamp_min(1e-300)))
    return AgeErrors(bins, errors)
