"""Watch a plan's groups by the rules of `gradlab.executor.rules`: what is measured of an exchange, and who judges it.

DDP's engine has a `RankWatch` for its rank, and asks it on measured steps. A replay, and every other use of
`LockstepPlan`, has a `LockstepWatch`, which asks one per rank and joins what they found.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from gradlab.codec import Codec, Exchanged, Tensors
from gradlab.codec.measures import numbers, squared_norms
from gradlab.codec.wrapper import load_buffer, wrappers_of
from gradlab.executor import rules
from gradlab.executor.lateness import LateWatch
from gradlab.executor.lockstep_plan import LockstepPlan, StepResult
from gradlab.executor.rules import Feedback, Finding, ResidualWatch
from gradlab.executor.sent import Sent, SentWatch
from gradlab.layout import Layer
from gradlab.plan import Group, Plan

SERVER = "server's residual"


@dataclass(frozen=True)
class GroupMeasures:
    """The norms of one group's exchange on one rank that the rules need.

    residual: of the compression error, which feedback keeps; 0 without feedback.
    gradient: with weight decay, without the loss scale.
    server_residual: of the server's residual in two-way compression.
    server_input: of the mean of contributions that this rank's server was sent.
    sent: of a group without feedback; None under feedback.
    """

    residual: float = 0.0
    gradient: float = 0.0
    server_residual: float = 0.0
    server_input: float = 0.0
    sent: Sent | None = None


def measure(
    codec: Codec,
    done: Exchanged,
    residuals: Mapping[str, float],
    gradients: Mapping[str, float],
    ranks: int,
    scale: float = 1.0,
) -> GroupMeasures:
    """Measure an exchange for the rules, from `residual_norms` and `gradient_norms` by layer and the mean's loss
    scale."""
    keeps = any(wrapper.effects.keeps_residual for wrapper in wrappers_of(codec))
    kept = [load_buffer(done.state, layer, "server_residual") for layer in done.server_input]
    return GroupMeasures(
        residual=math.hypot(*residuals.values()) if keeps else 0.0,
        gradient=math.hypot(*gradients.values()) if keeps else 0.0,
        server_residual=_norm(piece for piece in kept if piece is not None),
        server_input=_norm(done.server_input.values()) if any(piece is not None for piece in kept) else 0.0,
        sent=None if keeps else _sent(codec, done, 1.0 if codec.traits.keeps_dtype else scale, ranks),
    )


def residual_norms(done: Exchanged) -> dict[str, float]:
    """Compute the norms of compression errors, by layer; empty where no wrapper has computed these errors."""
    errors = done.compression_error
    return {layer: norm**0.5 for layer, norm in zip(errors, squared_norms(errors.values()), strict=True)}


def gradient_norms(
    codec: Codec, gradients: Tensors, done: Exchanged, parameters: Mapping[str, torch.Tensor], scale: float = 1.0
) -> dict[str, float]:
    """Compute the norms of gradients of layers that have a residual, with weight decay of the given parameters, by
    layer."""
    decays = [one for one in wrappers_of(codec) if one.effects.applies_weight_decay and not one.effects.changes_mean]
    rate = sum(wrapper.settings.rate for wrapper in decays)
    layers = list(done.compression_error)
    squares = squared_norms(gradients[layer] for layer in layers)
    norms = {layer: square**0.5 / scale for layer, square in zip(layers, squares, strict=True)}
    if rate:
        decayed = [layer for layer in layers if layer in parameters]
        for layer, square in zip(decayed, squared_norms(parameters[layer] for layer in decayed), strict=True):
            norms[layer] += rate * square**0.5
    return norms


def _sent(codec: Codec, done: Exchanged, scale: float, ranks: int) -> Sent:
    inputs = done.compressor_input
    energy, contributed = sum(squared_norms(inputs.values())), _products(inputs, done.own)
    around = list(wrappers_of(codec))
    if any(
        one.effects.changes_mean or (one.effects.applies_momentum and not one.effects.before_compression)
        for one in around
    ):
        return Sent(energy, contributed)
    mean_product = _products(inputs, done.mean) / scale
    if any(wrapper.effects.server_residual and wrapper.settings.error_feedback for wrapper in around):
        # The mean holds the server's residual. The ranks' own errors are taken as independent.
        error = energy - 2 * contributed + sum(squared_norms(done.own[layer] for layer in inputs))
        return Sent(energy, contributed, mean_product + error / ranks, mean_product)
    mean_energy = sum(squared_norms(done.mean.values())) / scale**2
    return Sent(energy, contributed, mean_energy, mean_product)


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    return math.hypot(*(square**0.5 for square in squared_norms(tensors)))


def _products(some: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> float:
    """Sum <a, b> over layers."""
    return sum(numbers([_product(value, others[layer]) for layer, value in some.items()]))


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return torch.dot(a.reshape(-1).to(wide), b.reshape(-1).to(wide))


class RankWatch:
    """The measured steps of one rank's run of a plan; `feedback` is how groups keep their residuals, by name."""

    def __init__(
        self, plan: Plan, codecs: Mapping[str, Codec], plain_sgd: bool, watched: Collection[str] = tuple(rules.RULES)
    ) -> None:
        self.feedback: dict[str, Feedback] = {}
        self._residuals: dict[str, ResidualWatch] = {}
        self._servers: dict[str, ResidualWatch] = {}
        self._late: dict[str, LateWatch] = {}
        self._sent: dict[str, SentWatch] = {}
        self._layers = {group.name: group.layers for group in plan.groups}
        self._watched = frozenset(watched)
        for group in plan.groups:
            if group.name in codecs:
                self._add(group, codecs[group.name], plan.members(group), plain_sgd)

    def _add(self, group: Group, codec: Codec, layers: Sequence[Layer], plain_sgd: bool) -> None:
        name, places = group.name, {}
        feedback = rules.feedback_of(codec, layers, plain_sgd)
        if feedback is None:
            self._sent[name] = SentWatch(name)
        else:
            self.feedback[name] = places["residual"] = feedback
            self._residuals[name] = ResidualWatch(name, feedback)
        server = rules.server_feedback_of(codec, layers, plain_sgd)
        if server is not None:
            places[SERVER] = server
            self._servers[name] = ResidualWatch(name, server, SERVER)
        if places:
            self._late[name] = LateWatch(name, places)

    @property
    def means(self) -> dict[str, list[tuple[float, float]]]:
        """Return this rank's figures of the error of the mean, by group; see `error_over_ranks`."""
        return {name: watch.means for name, watch in self._sent.items()}

    def see(
        self, step: int, steps: int, measured: Mapping[str, GroupMeasures], rates: Mapping[str, float]
    ) -> list[Finding]:
        """Judge a measured step, the last of `steps` compressed ones, by the rules of this watch."""
        found: list[Finding | None] = []
        for name, one in measured.items():
            known = [rates[layer] for layer in self._layers[name] if layer in rates]
            rate = max(known) if known else None
            norms = []
            if name in self._residuals:
                norms.append((one.residual, one.gradient))
                found.append(self._residuals[name].add(step, steps, *norms[-1], rate))
            if name in self._servers:
                norms.append((one.server_residual, one.server_input))
                found.append(self._servers[name].add(step, steps, *norms[-1], rate))
            if name in self._late:
                found.append(self._late[name].add(step, steps, norms, rate))
            if name in self._sent and one.sent is not None:
                found += self._sent[name].add(step, one.sent)
        return [one for one in found if one is not None and one.rule in self._watched]


class LockstepWatch:
    """The steps of all ranks of a `LockstepPlan`, with the first finding of each rule and group and the ranks that saw
    it."""

    def __init__(self, lockstep: LockstepPlan, scaled: bool = False) -> None:
        self.findings: tuple[Finding, ...] = ()
        self._lockstep, self._scaled = lockstep, scaled
        plain_sgd = lockstep.runs[0].settings.plain_sgd
        self._ranks = [RankWatch(lockstep.plan, lockstep.codecs, plain_sgd) for _ in lockstep.runs]
        self._steps = self._in_a_row = 0

    def see(
        self,
        done: StepResult,
        gradients: Sequence[Tensors],
        parameters: Mapping[str, torch.Tensor] | None = None,
        measured: bool = True,
    ) -> None:
        """Judge a step from each rank's gradients without the loss scale. To measure groups takes some passes over
        gradients."""
        self._steps += done.compressing
        self._in_a_row = 0 if done.finite else self._in_a_row + 1
        if not done.finite:
            self._keep([self._non_finite(done.iteration, own) for own in gradients])
            overflows = self._lockstep.runs[0].overflows
            if overflows >= rules.OVERFLOWS:
                found = [
                    rules.state_overflows(done.iteration, overflows, run.largest_state()) for run in self._lockstep.runs
                ]
                self._keep([[] if one is None else [one] for one in found])
        elif done.compressing and measured:
            by_rank = [self._measure(rank, done, own, parameters or {}) for rank, own in enumerate(gradients)]
            by_rank = _with_known_means(by_rank)
            pairs = zip(self._ranks, by_rank, strict=True)
            self._keep([rank.see(done.iteration, self._steps, one, done.learning_rate) for rank, one in pairs])

    def _measure(
        self, rank: int, done: StepResult, gradients: Tensors, parameters: Mapping[str, torch.Tensor]
    ) -> dict[str, GroupMeasures]:
        measured = {}
        for name, ranks in done.exchanged.items():
            codec, own = self._lockstep.codecs[name], ranks[rank]
            norms = gradient_norms(codec, gradients, own, parameters)
            measured[name] = measure(codec, own, residual_norms(own), norms, len(ranks))
        return measured

    def _non_finite(self, iteration: int, gradients: Tensors) -> list[Finding]:
        layers = [name for name, value in gradients.items() if not bool(value.isfinite().all())]
        one = rules.non_finite(iteration, self._in_a_row, self._scaled, layers)
        return [] if one is None else [one]

    def _keep(self, by_rank: Sequence[Sequence[Finding]]) -> None:
        known = {one.key for one in self.findings}
        self.findings += tuple(one for one in rules.merged(by_rank) if one.key not in known)


def _with_known_means(by_rank: Sequence[Mapping[str, GroupMeasures]]) -> list[dict[str, GroupMeasures]]:
    """Put means over ranks of ||D||^2 and <D, x_i> in the place of each rank's own: here they are known."""
    known = [dict(measured) for measured in by_rank]
    for name in known[0]:
        sent = [one for measured in known if (one := measured[name].sent) is not None]
        energies = [one.mean_energy for one in sent if one.mean_energy is not None]
        products = [one.mean_product for one in sent if one.mean_product is not None]
        if len(products) == len(known):
            for measured, one in zip(known, sent, strict=True):
                joined = replace(one, mean_energy=fmean(energies), mean_product=fmean(products))
                measured[name] = replace(measured[name], sent=joined)
    return known
