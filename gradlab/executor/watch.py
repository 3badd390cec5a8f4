"""Watch a plan's groups by the rules of `gradlab.executor.rules`: what is measured of an exchange, and who judges it.

DDP's engine has a `RankWatch` for its rank, and asks it on measured steps. A replay, and every other use of
`LockstepPlan`, has a `LockstepWatch`, which asks one per rank and joins what they found.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from gradlab.codec import Codec, Compressor, Exchanged, Tensors
from gradlab.codec.measures import squared_norms
from gradlab.codec.wrapper import innermost, load_buffer, wrappers_of
from gradlab.codecs.cast import Cast
from gradlab.codecs.identity import Identity
from gradlab.executor import rules
from gradlab.executor.rules import Feedback, Finding, LateWatch, ResidualWatch
from gradlab.plan import Plan


@dataclass(frozen=True)
class GroupMeasures:
    """The norms of one group's exchange on one rank that the rules need; 0 where nobody keeps a residual.

    residual: norm of the compression error, which feedback keeps.
    gradient: norm with weight decay, without the loss scale.
    server_residual: norm of the server's residual in two-way compression.
    server_input: norm of the mean of contributions that this rank's server was sent.
    """

    residual: float = 0.0
    gradient: float = 0.0
    server_residual: float = 0.0
    server_input: float = 0.0


def measure(
    codec: Codec, done: Exchanged, residuals: Mapping[str, float], gradients: Mapping[str, float]
) -> GroupMeasures:
    """Measure an exchange for the rules, from `residual_norms` and `gradient_norms` by layer."""
    keeps = any(wrapper.effects.keeps_residual for wrapper in wrappers_of(codec))
    kept = [load_buffer(done.state, layer, "server_residual") for layer in done.server_input]
    served = [piece for piece in kept if piece is not None]
    return GroupMeasures(
        residual=math.hypot(*residuals.values()) if keeps else 0.0,
        gradient=math.hypot(*gradients.values()) if keeps else 0.0,
        server_residual=_norm(served),
        server_input=_norm(done.server_input.values()) if served else 0.0,
    )


def noise_squares(
    codec: Codec, gradients: Tensors, done: Exchanged, scale: float = 1.0
) -> tuple[float, float, float] | None:
    """Compute ||g||^2 of this rank's gradients, ||c||^2 of its decoded contribution, ||m||^2 of the mean.

    scale: the loss scale of gradients and mean.

    Returns:
        None for a codec whose ranks do not each code a gradient for themselves, or a wrapper that keeps earlier ones in
        a momentum: their contributions are alike for other reasons than gradients' being so.
    """
    alone = isinstance(innermost(codec), Compressor | Cast | Identity)
    if not alone or any(wrapper.effects.acts_when_dense for wrapper in wrappers_of(codec)):
        return None
    errors = done.compression_error
    own = [value - errors[name] if name in errors else done.own[name] for name, value in done.compressor_input.items()]
    kinds = list(gradients.values()), own, list(done.mean.values())
    norms = [_squared_norm(one) for one in kinds]
    gradient, contribution, mean = torch.stack(norms).tolist()
    return gradient / scale**2, contribution, mean / scale**2


def _squared_norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Compute the squared norm of all tensors together, (), float64, from norms of at least float32."""
    wide = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    return torch.stack(torch._foreach_norm(tensors, dtype=wide)).double().square().sum()


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


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    return math.hypot(*(square**0.5 for square in squared_norms(tensors)))


class RankWatch:
    """The measured steps of one rank's run of a plan; `feedback` is how groups keep their residuals, by name."""

    def __init__(self, plan: Plan, codecs: Mapping[str, Codec], plain_sgd: bool) -> None:
        self.feedback: dict[str, Feedback] = {}
        self._residuals: dict[str, ResidualWatch] = {}
        self._servers: dict[str, ResidualWatch] = {}
        self._late: dict[str, LateWatch] = {}
        self._layers = {group.name: group.layers for group in plan.groups}
        for group in plan.groups:
            if (codec := codecs.get(group.name)) is None:
                continue
            name, layers = group.name, plan.members(group)
            if (feedback := rules.feedback_of(codec, layers, plain_sgd)) is not None:
                self.feedback[name], self._residuals[name] = feedback, ResidualWatch(name, feedback)
                self._late[name] = LateWatch(name, feedback.gain)
            if (server := rules.server_feedback_of(codec, layers, plain_sgd)) is not None:
                self._servers[name] = ResidualWatch(name, server, "server's residual")

    def see(
        self, step: int, steps: int, measured: Mapping[str, GroupMeasures], rates: Mapping[str, float]
    ) -> list[Finding]:
        """Judge a measured step, the last of `steps` compressed ones."""
        found: list[Finding | None] = []
        for name, one in measured.items():
            rate = max((rates[layer] for layer in self._layers[name] if layer in rates), default=None)
            if name in self._residuals:
                found.append(self._residuals[name].add(step, steps, one.residual, one.gradient, rate))
            if name in self._servers:
                found.append(self._servers[name].add(step, steps, one.server_residual, one.server_input, rate))
            if name in self._late:
                held = sum(watches[name].held for watches in (self._residuals, self._servers) if name in watches)
                found.append(self._late[name].add(step, steps, held, one.gradient))
        return [one for one in found if one is not None]
