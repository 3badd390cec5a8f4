"""1-bit Adam and the variance of 0/1 Adam: Adam whose momentum travels compressed under a variance that stands still.

H. Tang, S. Gan, A. A. Awan, S. Rajbhandari, C. Li, X. Lian, J. Liu, C. Zhang, Y. He, "1-bit Adam: Communication
efficient large-scale training with Adam's convergence speed", ICML 2021, Algorithm 1. C. Lu et al., "Maximizing
communication efficiency for large-scale training via 0/1 Adam", ICLR 2023, Algorithm 1, of which the policy for the
variance is here, and not the local steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from gradlab.codec import Batch, Context, Exchanged, Tensors
from gradlab.codec.exchanged import mean_only, run_codec
from gradlab.codec.kept import Entry, Kept
from gradlab.codec.settings import setting
from gradlab.codec.wrapper import SHARED, Effects, Wrapper
from gradlab.collectives import Coroutine
from gradlab.layout import Layer

VARIANCES = ("frozen", "zero_one")

_KEPT = ("moment", "variance", "adam_steps")


class OneBitAdam(Wrapper):
    """u_t = m_t / (1 - beta1^t) / (sqrt(v / (1 - beta2^s)) + eps), which SGD without momentum applies: x - eta u_t.

    While the schedule is dense, m and v are Adam's, of the mean gradient. Then v stands still, and each rank's codec
    gets beta1 m_(t-1) + (1 - beta1) g, with g its gradient and m_(t-1) the same on all ranks; the decoded mean is m_t.
    The papers have it around error feedback both ways: this wrapper, `error_feedback`, `two_way`, and `sign`. They
    claim Adam's convergence after a warm-up of 15 to 25 % of all steps: give `warmup_steps`. Without, v is that of the
    first gradient, which travels uncompressed.

    Coordinates that have not moved have v = 0, and signs of a momentum that is 0 there would move them by 1 / eps: it
    ends in NaN. They stay where they are. The published code (DeepSpeed's) divides by sqrt(v) + eps without
    either bias correction, and applies only masks that its user passes in. With `variance="zero_one"` v moves on in
    iterations ever farther apart, in which gradients travel uncompressed: 0, 1, ..., kappa, then kappa times 2 apart,
    kappa times 4, and so on. 0/1 Adam's skipped exchanges are `gradlab.runtime.OuterStep`'s matter, as parameters
    differ between ranks meanwhile.

    It belongs under torch.optim.SGD without momentum, whose weight decay is then AdamW's, and is refused under others.
    Backward leaves updates, of Adam's size: do not clip their norm.

    >>> wrappers.get("onebit_adam")(codecs.make("one_bit"))
    OneBitAdam(OneBit())
    """

    name = "onebit_adam"
    entries: ClassVar[Mapping[str, Entry]] = dict.fromkeys(_KEPT, SHARED)
    effects = Effects(
        acts_when_dense=True, applies_momentum=True, before_compression=True, replaces_optimizer=True, changes_mean=True
    )

    @dataclass(frozen=True)
    class Settings:
        beta1: float = setting(0.9, least=0, below=1, help="weight of the last m in the next")
        beta2: float = setting(0.999, least=0, below=1, help="weight of the last v in the next")
        eps: float = setting(1e-8, above=0, help="added to the square root of v")
        variance: str = setting(
            "frozen",
            choices=VARIANCES,
            help='"frozen": v stands still after the dense iterations (1-bit Adam); "zero_one": it moves on in '
            "iterations ever farther apart, uncompressed (0/1 Adam)",
        )
        kappa: int = setting(16, least=1, help="zero_one: updates of v before the distance between them doubles")

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        if context.dense:
            done = yield from run_codec(self.codec, grads, self.inner_state(state), context)
            return self._learned(done, state)
        known = all(f"{name}/variance" in state for name in grads)
        if not known or self._moves_variance(context.iteration - context.training.start):
            return self._learned((yield from mean_only(grads, self.inner_state(state))), state)
        beta1, moments = self.settings.beta1, {name: state[f"{name}/moment"] for name in grads}
        inputs = grads.like({name: (moments[name] * beta1).add_(grad, alpha=1 - beta1) for name, grad in grads.items()})
        done = yield from self.codec.exchange(
            inputs, self.inner_state(state), replace(context, memory=context.memory.keeping(spare=False))
        )
        new: Tensors = {}
        for name, mean in done.mean.items():
            variance, steps = state[f"{name}/variance"], state[f"{name}/adam_steps"]
            moment = torch.where(variance > 0, mean, 0)
            new |= _entries(name, moment, variance, steps + steps.new_tensor([1, 0]))
        return self._applied(done, new, done.compressor_input or inputs)

    def _learned(self, done: Exchanged, state: Tensors) -> Exchanged:
        """Take Adam's step on the mean gradient."""
        beta1, beta2 = self.settings.beta1, self.settings.beta2
        new: Tensors = {}
        for name, mean in done.mean.items():
            moment, variance = (state.get(f"{name}/{what}") for what in ("moment", "variance"))
            steps = state.get(f"{name}/adam_steps", torch.zeros(2, dtype=torch.float64))
            moment = mean * (1 - beta1) if moment is None else moment.lerp(mean, 1 - beta1)
            variance = torch.zeros_like(mean) if variance is None else variance * beta2
            new |= _entries(name, moment, variance.addcmul_(mean, mean, value=1 - beta2), steps + 1)
        return self._applied(done, new, done.compressor_input)

    def _applied(self, done: Exchanged, new: Tensors, inputs: Tensors) -> Exchanged:
        directions = {name: self._direction(new, name) for name in done.mean}
        return replace(done, mean=directions, state={**done.state, **new}, compressor_input=inputs)

    def _direction(self, state: Tensors, name: str) -> torch.Tensor:
        """Compute u of a layer from its state, as torch.optim.Adam orders it."""
        of_moment, of_variance = state[f"{name}/adam_steps"].tolist()
        root = (1 - self.settings.beta2**of_variance) ** 0.5
        below = state[f"{name}/variance"].sqrt().div_(root).add_(self.settings.eps)
        return state[f"{name}/moment"].div(below).div_(1 - self.settings.beta1**of_moment)

    def _moves_variance(self, iteration: int) -> bool:
        """Say whether v moves in an iteration, counted from the schedule's start."""
        return self.settings.variance == "zero_one" and moves_variance(iteration, self.settings.kappa)

    def kept(self, layers: Sequence[Layer], rank: int, world_size: int, group: str) -> Mapping[str, Kept]:
        found = dict(self.codec.kept(layers, rank, world_size, group))
        for layer in layers:
            found[f"{layer.name}/moment"] = Kept(layer.shape, needs=_KEPT)
            found[f"{layer.name}/variance"] = Kept(layer.shape, least=0.0, needs=_KEPT)
            found[f"{layer.name}/adam_steps"] = Kept((2,), (torch.float64,), least=1.0, needs=_KEPT)
        return found


def moves_variance(iteration: int, kappa: int) -> bool:
    """Return whether 0/1 Adam's variance moves in an iteration, from 0. After j updates the next one is 2^floor(j /
    kappa) iterations on: 0/1 Adam's set T_v, with its kappa of 16."""
    distance, at = 1, 0
    while at + kappa * distance <= iteration:
        at, distance = at + kappa * distance, 2 * distance
    return (iteration - at) % distance == 0


def _entries(name: str, moment: torch.Tensor, variance: torch.Tensor, steps: torch.Tensor) -> Tensors:
    return {f"{name}/moment": moment, f"{name}/variance": variance, f"{name}/adam_steps": steps}
