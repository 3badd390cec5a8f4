"""Local momentum: each rank accumulates its own gradients before compression.

Zheng, Huang, Kwok, "Communication-efficient distributed blockwise momentum SGD with error-feedback", NeurIPS 2019,
Algorithm 4, lines 5 and 6: around `error_feedback` with the step-size ratio, which is around `two_way`. Without error
feedback, with dampening and from zero it is signum: Bernstein, Zhao, Azizzadenesheli, Anandkumar, "signSGD with
majority vote is communication efficient and fault tolerant", ICLR 2019, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from gradlab.codec import Batch, Context, Exchanged, Tensors
from gradlab.codec.exchanged import run_codec
from gradlab.codec.kept import Entry
from gradlab.codec.settings import setting
from gradlab.codec.wrapper import DEALT, Effects, Wrapper, buffer_setting, load_buffer, store_buffers
from gradlab.collectives import Coroutine


class LocalMomentum(Wrapper):
    """m_t = mu m_(t-1) + g; the codec gets m_t, or in Nesterov's form mu m_t + g.

    The optimizer's own momentum must be 0. Unlike `momentum_correction`, this wrapper keeps no residual and masks
    nothing. While the schedule is dense, the ranks' momenta are averaged, which is momentum SGD up to rounding. The
    first m is g, with dampening too, as in torch.optim.SGD and in EF21-SGDM; `start` has signum's.

    >>> wrappers.get("local_momentum")(codecs.make("sign"))
    LocalMomentum(Sign(block_size=None))
    """

    name = "local_momentum"
    entries: ClassVar[Mapping[str, Entry]] = {"velocity": DEALT}
    effects = Effects(acts_when_dense=True, applies_momentum=True, before_compression=True)

    @dataclass(frozen=True)
    class Settings:
        momentum: float = setting(0.9, least=0, below=1, symbol="mu", help="weight of the last m in the next")
        nesterov: bool = setting(True, help="look ahead along m")
        dampening: bool = setting(False, help="the weight of g in m is 1 - mu (signum), not 1")
        start: str = setting(
            "gradient",
            choices=("gradient", "zero"),
            help='first m, with dampening: "gradient": g; "zero": (1 - mu) g, as m before is 0 (signum)',
        )
        buffer: str = buffer_setting("m is")

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        velocity, sent = self._accumulate(grads, state, context)
        done = yield from run_codec(self.codec, sent, self.inner_state(state), context)
        kept = store_buffers(velocity, "velocity", self.settings.buffer, context)
        return replace(done, state={**done.state, **kept}, compressor_input=done.compressor_input or sent)

    def _accumulate(self, grads: Batch, state: Tensors, context: Context) -> tuple[Tensors, Batch]:
        """Return the new m, and the compressor's input."""
        mu, memory, velocity, sent = self.settings.momentum, context.memory.workspace, {}, {}
        for name, grad in grads.items():
            before = load_buffer(state, name, "velocity")
            added = grad * (1 - mu) if self.settings.dampening else grad
            m = memory.empty_like(grad)
            first = grad if self.settings.start == "gradient" else added
            velocity[name] = m.copy_(first) if before is None else torch.add(added, before, alpha=mu, out=m)
            # A copy where it is sent as it is: what a codec does with it must not reach the state.
            out = memory.empty_like(grad)
            sent[name] = torch.add(added, m, alpha=mu, out=out) if self.settings.nesterov else out.copy_(m)
        return velocity, grads.like(sent)
