"""Momentum correction: momentum before compression, with error feedback on the accumulated momentum.

Lin, Han, Mao, Wang, Dally, "Deep gradient compression" (DGC), ICLR 2018: momentum correction and local gradient
clipping section 3.2, momentum factor masking section 3.3; Nesterov's form from their published code. Nesterov's form
without masking, with the step-size ratio and around `two_way`, is Zheng, Huang, Kwok, "Communication-efficient
distributed blockwise momentum SGD with error-feedback", NeurIPS 2019, Algorithm 4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from gradlab.codec import Batch, Codec, Context, Exchanged, Tensors
from gradlab.codec.contraction import contraction_setting, exchange_contracting
from gradlab.codec.exchanged import run_codec
from gradlab.codec.kept import Entry
from gradlab.codec.settings import setting
from gradlab.codec.wrapper import (
    DEALT,
    MEASURED,
    Effects,
    Wrapper,
    buffer_setting,
    innermost,
    load_buffer,
    step_size_setting,
    store_buffers,
)
from gradlab.collectives import Coroutine
from gradlab.errors import GradlabError
from gradlab.wrappers.error_feedback import (
    held_residuals,
    keep_setting,
    refuse_keep,
    unselected,
    without,
)


class MomentumCorrection(Wrapper):
    """Add momentum before compression: u = m u + g, v = v + u. Send C(v) and keep v - C(v) as the next v.

    With masking, u is set to 0 where something was sent. Nesterov's form is u = m (u + g), v = v + u + g. The state
    keeps u as "velocity" and v - C(v) as "residual".

    The optimizer's own momentum must be 0. While the schedule is dense, all of v is sent, which is momentum SGD up to
    rounding.

    >>> codec = wrappers.get("momentum_correction")(codecs.make("topk", density=0.25))
    >>> codec.apply(torch.tensor([0.1, -3.0, 0.2, 0.0])).decoded.tolist()
    [0.0, -3.0, 0.0, 0.0]
    """

    name = "momentum_correction"
    entries: ClassVar[Mapping[str, Entry]] = {"residual": DEALT, "velocity": DEALT, "zeta": MEASURED}
    effects = Effects(acts_when_dense=True, keeps_residual=True, applies_momentum=True)

    @dataclass(frozen=True)
    class Settings:
        momentum: float = setting(0.9, least=0, below=1, symbol="m", help="weight of the last u in the next")
        nesterov: bool = setting(False, help="look ahead along u")
        masking: bool | None = setting(
            None,
            help="zero u where values were sent; None: if the codec selects elements (others send every element, and "
            "would lose all momentum)",
        )
        clip_norm: float = setting(
            0.0,
            least=0,
            help="largest L2 norm of a step's gradient, 0: none; each rank clips its own to clip_norm / sqrt(N), group "
            "by group (the paper clips the whole gradient, which is known only when backward has ended)",
        )
        step_size_ratio: bool | None = step_size_setting(False, "the residual (DGC does not)")
        buffer: str = buffer_setting("u and v are")
        keep: str = keep_setting()
        contraction: str = contraction_setting()

    def __init__(self, codec: Codec, settings: MomentumCorrection.Settings | None = None) -> None:
        super().__init__(codec, settings)
        refuse_keep(self)
        method = innermost(codec)
        self._masks = method.traits.selects if self.settings.masking is None else self.settings.masking
        if self._masks and not method.traits.selects:
            raise GradlabError(
                f"momentum_correction: masking = true around {method.name}, which sends every element: all momentum "
                "would be lost; masking is for sparsifications"
            )

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        if context.dense:
            return (yield from self._dense(grads, state, context))
        velocity, inputs = self._accumulate(grads, state, context)
        done, errors, measured = yield from exchange_contracting(self, inputs, state, context)
        if self._masks:
            velocity = {name: u.masked_fill(done.own[name] != 0, 0.0) for name, u in velocity.items()}
        kept_back = unselected(inputs, done.own) if self.settings.keep == "unselected" else errors
        still = context.training.frozen(grads, self.settings.step_size_ratio)
        residual = self._kept(velocity, without(kept_back, still), context)
        kept = {**held_residuals(grads, state, still), **residual, **measured}
        return replace(done, state={**done.state, **kept}, compressor_input=inputs, compression_error=errors)

    def _dense(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        velocity, inputs = self._accumulate(grads, state, context)
        done = yield from run_codec(self.codec, inputs, self.inner_state(state), context)
        still = context.training.frozen(grads, self.settings.step_size_ratio)
        kept = {**held_residuals(grads, state, still), **self._kept(velocity, {}, context)}
        return replace(done, state={**done.state, **kept}, compressor_input=inputs)

    def _accumulate(self, grads: Batch, state: Tensors, context: Context) -> tuple[Tensors, Batch]:
        """Return the new u, and the compressor's input: v with u added."""
        m, velocity, inputs = self.settings.momentum, {}, {}
        still = context.training.frozen(grads, self.settings.step_size_ratio)
        for name, grad in clipped(grads, self.settings.clip_norm, context.world_size).items():
            before, residual = load_buffer(state, name, "velocity"), load_buffer(state, name, "residual")
            if self.settings.nesterov:
                velocity[name] = grad * m if before is None else (before + grad).mul_(m)
                inputs[name] = velocity[name] + grad
            else:
                velocity[name] = grad.clone() if before is None else (before * m).add_(grad)
                inputs[name] = velocity[name].clone()
            if residual is not None and name not in still:
                ratio = context.training.residual_ratio(name, self.settings.step_size_ratio)
                inputs[name] += residual if ratio == 1.0 else residual * ratio
        return velocity, grads.like(inputs)

    def _kept(self, velocity: Tensors, residual: Tensors, context: Context) -> Tensors:
        kept = {"velocity": velocity, "residual": residual}
        every = (store_buffers(one, what, self.settings.buffer, context) for what, one in kept.items())
        return {key: value for one in every for key, value in one.items()}


def clipped(grads: Tensors, clip_norm: float, world_size: int) -> Tensors:
    """Scale the gradients of one group down to an L2 norm of at most clip_norm / sqrt(N); 0 leaves them as they are."""
    if clip_norm == 0:
        return grads
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads.values()]))
    factor = (clip_norm / math.sqrt(world_size) / norm).clamp(max=1.0)
    return {name: grad * factor for name, grad in grads.items()}
