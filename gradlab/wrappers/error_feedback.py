"""Error feedback: add what earlier exchanges left unsent, and keep what this one leaves.

Seide et al., "1-bit SGD", Interspeech 2014; Karimireddy et al., "Error feedback fixes SignSGD", ICML 2019, Algorithm 1.
Low-pass form: Chen et al., "ScaleCom", NeurIPS 2020, eq. (5) and Algorithm 1. Step-size ratio: Zheng, Huang, Kwok,
"Communication-efficient distributed blockwise momentum SGD with error-feedback", NeurIPS 2019, Algorithm 2, line 5.
A residual that is the momentum: Peng, Quesnelle, Kingma, "DeMo: Decoupled momentum optimization", 2024, Algorithm 1.
Resets, and the residual in 8 bits: Xie, Lin, Toh, Zhou, "LoCo", IEEE TPAMI 2025, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from gradlab.codec import Codec, Context, Deferred, Exchanged, Tensors
from gradlab.codec_settings import require
from gradlab.collectives import Coroutine
from gradlab.errors import GradlabError
from gradlab.wrapper import Wrapper, entries, innermost, load_buffer, store_buffer

BUFFERS = ("float32", "int8")
KEEPS = ("difference", "unselected")


class ErrorFeedback(Wrapper):
    """asked = gradient + residual; new residual = asked - own. Law: own + new residual == gradient + old residual.

    With eta_t the step size, the parameters less eta_t * residual follow SGD's recurrence, its gradients taken where
    the parameters are; so under a changing step size the ratio eta_(t-1) / eta_t belongs before the residual (the
    paper's Lemma 1). That holds for plain SGD; an optimizer with momentum or a preconditioner of its own has no such
    law. With the ratio, a layer's residual is held in iterations whose step size is zero, in the unit of the last one
    that was not.
    In iterations that are dense the residual is sent along and is gone.
    """

    name = "error_feedback"
    keys = ("residual",)
    keeps_residual = True

    @dataclass(frozen=True)
    class Settings:
        """decay: weight of the old residual in the new one, ScaleCom's 1 - beta, in [0, 1); 0 is error feedback as
        known. The new residual is then decay * residual + (1 - decay) * (asked - own);
        step_size_ratio: multiply the residual by eta_(t-1) / eta_t; None does so if the optimizer is SGD without
        momentum;
        carried: share of the residual that is added to the next gradient, DeMo's beta; below 1 what is not sent is
        forgotten little by little, as in momentum, which it then is: m = beta m + g, less what is sent;
        keep: "difference", asked - own; or "unselected", asked where own is 0 and nothing elsewhere: of codecs that
        select elements and lose something of those too, LGC's accumulation, which forgets that;
        reset_steps: drop the residual after every so many compressed iterations, LoCo's T_c; 0 for never;
        buffer: "float32" (the gradient's working type) or "int8", a quarter of the memory, blocks of 256 with a scale;
        what is below 1/254 of its block's largest is then lost.
        """

        decay: float = 0.0
        step_size_ratio: bool | None = None
        buffer: str = "float32"
        carried: float = 1.0
        reset_steps: int = 0
        keep: str = "difference"

        def __post_init__(self) -> None:
            require(0 <= self.decay < 1, "error_feedback", "decay", self.decay, "a share in [0, 1)")
            require(self.buffer in BUFFERS, "error_feedback", "buffer", self.buffer, "'float32' or 'int8'")
            require(0 < self.carried <= 1, "error_feedback", "carried", self.carried, "a share in (0, 1]")
            require(self.reset_steps >= 0, "error_feedback", "reset_steps", self.reset_steps, "0 or more")
            require_keep(self.keep, "error_feedback")

    def __init__(self, codec: Codec, settings: ErrorFeedback.Settings | None = None) -> None:
        super().__init__(codec, settings)
        refuse_keep(self)

    def exchange(self, grads: Tensors, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        residual = self._residual(grads, state, context)
        asked = add(grads, residual, context)
        done = yield from self.codec.exchange(asked, self.inner_state(state), context)
        unsent = left_of(asked, done.own, context)
        left_over = unselected(asked, done.own) if self.settings.keep == "unselected" else unsent
        kept = self._held(grads, state, context)
        steps = self.settings.reset_steps
        dropped = steps > 0 and (context.iteration - context.start + 1) % steps == 0
        for name, left in left_over.items():
            if not dropped and not context.stands_still(name, self.settings.step_size_ratio):
                kept |= store_buffer(name, "residual", self._low_pass(left, residual.get(name)), self.settings.buffer)
        return Exchanged(done.mean, done.own, {**done.state, **kept}, asked, unsent)

    def dense_exchange(self, grads: Tensors, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        asked = add(grads, self._residual(grads, state, context), context)
        done = yield from self.codec.dense_exchange(asked, self.inner_state(state), context)
        return Exchanged(done.mean, done.own, {**done.state, **self._held(grads, state, context)}, asked)

    def _held(self, grads: Tensors, state: Tensors, context: Context) -> Tensors:
        """The residuals of layers whose parameters do not move in this iteration, as they are."""
        held: Tensors = {}
        for name in grads:
            if context.stands_still(name, self.settings.step_size_ratio):
                held |= entries(state, name, "residual")
        return held

    def _residual(self, grads: Tensors, state: Tensors, context: Context) -> Tensors:
        found = {}
        for name in grads:
            residual = load_buffer(state, name, "residual")
            if residual is not None and not context.stands_still(name, self.settings.step_size_ratio):
                ratio = self.settings.carried * context.residual_ratio(name, self.settings.step_size_ratio)
                found[name] = residual if ratio == 1.0 else residual * ratio
        return found

    def _low_pass(self, unsent: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        decay = self.settings.decay
        if decay == 0.0:
            return unsent
        return (1 - decay) * unsent + (0.0 if before is None else decay * before)


def add(grads: Tensors, residual: Tensors, context: Context) -> Tensors:
    """Gradients plus the residuals there are."""
    return {
        name: torch.add(grad, residual[name], out=context.workspace.empty_like(grad)) if name in residual else grad
        for name, grad in grads.items()
    }


def left_of(asked: Tensors, own: Mapping[str, torch.Tensor], context: Context) -> Tensors:
    """What an exchange left unsent, by layer."""
    if isinstance(own, Deferred) and own.unsent is not None:
        return own.unsent()
    return {name: torch.sub(value, own[name], out=context.workspace.empty_like(value)) for name, value in asked.items()}


def require_keep(keep: str, wrapper: str) -> None:
    """Raises GradlabError for what no residual can be."""
    require(keep in KEEPS, wrapper, "keep", keep, "'difference' or 'unselected'")


def refuse_keep(wrapper: Wrapper) -> None:
    """Raises GradlabError where all would be forgotten, because the codec sends every element."""
    method = innermost(wrapper.codec)
    if wrapper.settings.keep == "unselected" and not method.selects:
        raise GradlabError(
            f"{wrapper.name}: keep = unselected around {method.name}, which sends every element: no residual would be "
            "kept; it is for sparsifications"
        )


def unselected(asked: Tensors, own: Mapping[str, torch.Tensor]) -> Tensors:
    """What a codec that selects elements did not look at, by layer."""
    return {name: value.masked_fill(own[name] != 0, 0.0) for name, value in asked.items()}
