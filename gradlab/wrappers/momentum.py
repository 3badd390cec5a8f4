"""Momentum after the average: for layers that are sent dense beside others with momentum correction.

Lin, Han, Mao, Wang, Dally, "Deep gradient compression", ICLR 2018, section 3.2 and their published code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from gradlab.codec import Batch, Context, Exchanged, Tensors
from gradlab.codec.exchanged import run_codec
from gradlab.codec.kept import Entry
from gradlab.codec.settings import setting
from gradlab.codec.wrapper import SHARED, Effects, Wrapper
from gradlab.collectives import Coroutine


class Momentum(Wrapper):
    """u = m u + mean, as torch.optim.SGD does it; every rank applies u, or in Nesterov's form mean + m u.

    The first u is the mean itself, with dampening too.

    The optimizer's own momentum must be 0. u is the same on every rank.

    >>> wrappers.get("momentum")(codecs.make("identity")).apply(torch.tensor([1.0, 2.0])).decoded
    tensor([1., 2.])
    """

    name = "momentum"
    entries: ClassVar[Mapping[str, Entry]] = {"momentum": SHARED}
    effects = Effects(acts_when_dense=True, applies_momentum=True)

    @dataclass(frozen=True)
    class Settings:
        momentum: float = setting(0.9, least=0, below=1, symbol="m", help="weight of the last u in the next")
        nesterov: bool = setting(False, help="look ahead along u")
        dampening: bool = setting(False, help="the weight of the mean in u is 1 - m, not 1")

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        done = yield from run_codec(self.codec, grads, self.inner_state(state), context)
        m, applied, kept = self.settings.momentum, {}, {}
        for name, mean in done.mean.items():
            before = state.get(f"{name}/momentum")
            weight = 1 - m if self.settings.dampening else 1
            u = mean.clone() if before is None else (before * m).add_(mean, alpha=weight)
            kept[f"{name}/momentum"] = u
            # A copy: the mean may be changed in place later (clipping does), which must not reach the state.
            applied[name] = (mean * weight).add_(u, alpha=m) if self.settings.nesterov else u.clone()
        return replace(done, mean=applied, state={**done.state, **kept})
