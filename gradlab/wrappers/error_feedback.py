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
from typing import Any

import torch

from gradlab.codec import Codec, Context, Deferred, Exchanged, Tensors
from gradlab.codec.settings import setting
from gradlab.codec.wrapper import (
    Wrapper,
    buffer_setting,
    entries,
    innermost,
    load_buffer,
    step_size_setting,
    store_buffer,
)
from gradlab.collectives import Coroutine
from gradlab.errors import GradlabError


def keep_setting() -> Any:
    """The field of what a residual is."""
    return setting(
        "difference",
        choices=("difference", "unselected"),
        help='asked - own; or "unselected": asked where own is 0 and nothing elsewhere, for codecs that select '
        "elements and lose something of those too (LGC's accumulation, which forgets that)",
    )


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
        decay: float = setting(
            0.0,
            least=0,
            below=1,
            unit="share",
            symbol="1 - beta",
            help="of the old residual in the new one (ScaleCom), decay * residual + (1 - decay) * (asked - "
            "own); 0: error feedback as known",
        )
        step_size_ratio: bool | None = step_size_setting(None, "the residual")
        buffer: str = buffer_setting("the residual is")
        carried: float = setting(
            1.0,
            above=0,
            most=1,
            unit="share",
            symbol="beta",
            help="of the residual that is added to the next gradient (DeMo); below 1 what is not sent is forgotten "
            "little by little, as in momentum, which it then is: m = beta m + g, less what is sent",
        )
        reset_steps: int = setting(
            0,
            least=0,
            unit="iterations",
            symbol="T_c",
            help="compressed, after which the residual is dropped, again and again (LoCo); 0: never",
        )
        keep: str = keep_setting()

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
