"""Weight decay as part of the gradient: before momentum and before compression.

Krogh & Hertz, "A simple weight decay can improve generalization", NeurIPS 1991. torch.optim.SGD adds it to the gradient
before its own momentum. If a plan applies momentum, the optimizer's weight decay comes after the momentum and is 1 - mu
times as strong.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradlab.codec import Context, Exchanged, Tensors
from gradlab.codec.settings import setting
from gradlab.codec.wrapper import Wrapper
from gradlab.collectives import Coroutine


class WeightDecay(Wrapper):
    """g + rate * x in place of the gradient g, with x the parameters. The optimizer's own weight decay must be 0.

    A trace holds no parameters, so a replay leaves weight decay out.
    """

    name = "weight_decay"
    applies_weight_decay = True

    @dataclass(frozen=True)
    class Settings:
        rate: float = setting(1e-4, least=0, below=1, symbol="lambda", help="weight of the parameters in the gradient")

    def exchange(self, grads: Tensors, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        return (yield from self.codec.exchange(self._decayed(grads, context), state, context))

    def dense_exchange(self, grads: Tensors, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        return (yield from self.codec.dense_exchange(self._decayed(grads, context), state, context))

    def acts_when_dense(self, state: Tensors) -> bool:
        return True

    def _decayed(self, grads: Tensors, context: Context) -> Tensors:
        if not context.parameters:
            return grads
        rate = self.settings.rate
        return {name: grad.add(context.parameters[name].to(grad.dtype), alpha=rate) for name, grad in grads.items()}
