"""EF21: compress how far the gradient is from an estimate of it that every rank's messages add up to.

P. Richtarik, I. Sokolov, I. Fatkhullin, "EF21: A new, simpler, theoretically better, and practically faster error
feedback", NeurIPS 2021, Algorithm 2. Its momentum form, EF21-SGDM (I. Fatkhullin, A. Tyurin, P. Richtarik, "Momentum
provably improves error feedback!", NeurIPS 2023, Algorithm 1), is `local_momentum` with dampening around it.

That algorithm begins with estimates that are the whole first momentum, which travels uncompressed: `warmup_steps` of
at least 1 does so. Without a warm-up the first estimate is C(g_i), as in EF21.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from gradlab.codec import Batch, Context, Exchanged, Tensors
from gradlab.codec.contraction import contraction_setting, exchange_contracting
from gradlab.codec.exchanged import run_codec
from gradlab.codec.kept import Entry
from gradlab.codec.wrapper import DEALT, MEASURED, SHARED, Effects, Wrapper
from gradlab.collectives import Coroutine


class EF21(Wrapper):
    """Rank i sends c_i = C(g_i - e_i), and e_i + c_i is its next estimate e_i; applied is the mean of all e_i.

    g_i is the gradient. The mean of the estimates is kept too, so that ranks need the mean of the c_i alone. A
    rank contributes e_i (`own`). If gradients settle, e_i becomes the gradient, without any residual that is
    applied later. So the method needs gradients that change slowly: full batches, large ones, or the momentum form.
    The paper proves it for gradient descent and contractive C, with the optimizer's own step; a codec that does not
    contract is scaled until it does (`contraction`).

    A dense iteration applies the mean gradient, and every e_i becomes the gradient g_i. Compression after a warm-up
    thus begins from estimates of the last dense iteration.

    Law: own + compression error == gradient, and the mean is the mean of all ranks' `own`, to rounding.

    >>> codec = wrappers.get("ef21")(codecs.make("topk", density=0.25))
    >>> codec, codec.apply(torch.tensor([0.1, -3.0, 0.2, 0.0])).decoded.tolist()
    (EF21(TopK(density=0.25)), [0.0, -3.0, 0.0, 0.0])
    """

    name = "ef21"
    entries: ClassVar[Mapping[str, Entry]] = {
        "estimate": DEALT,
        "aggregate": replace(SHARED, residual=True),
        "zeta": MEASURED,
    }
    effects = Effects(acts_when_dense=True, keeps_residual=True)

    @dataclass(frozen=True)
    class Settings:
        contraction: str = contraction_setting()

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        if context.dense:
            return (yield from self._dense(grads, state, context))
        estimates = {name: state[key] for name in grads if (key := f"{name}/estimate") in state}
        inputs = grads.like(
            {name: grad - estimates[name] if name in estimates else grad for name, grad in grads.items()}
        )
        context = replace(context, memory=context.memory.keeping(spare=False))  # gradients are still read
        done, errors, measured = yield from exchange_contracting(self, inputs, state, context)
        mean = {
            name: value + state[key] if (key := f"{name}/aggregate") in state else value
            for name, value in done.mean.items()
        }
        own = {name: grad - errors[name] for name, grad in grads.items()}
        kept = {**done.state, **_kept(own, mean), **measured}
        return replace(done, mean=mean, own=own, state=kept, compressor_input=grads, compression_error=errors)

    def _dense(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        # What a server kept back is missing from the estimates' mean, which is known whole now: it is not sent again.
        inner = {
            key: value for key, value in self.inner_state(state).items() if "server_" not in key.rpartition("/")[2]
        }
        done = yield from run_codec(self.codec, grads, inner, context)
        own = {name: grad.clone() for name, grad in grads.items()}
        return replace(done, state={**done.state, **_kept(own, done.mean)}, compressor_input=grads)


def _kept(estimates: Tensors, means: Mapping[str, torch.Tensor]) -> Tensors:
    kept = {f"{name}/estimate": value for name, value in estimates.items()}
    return kept | {f"{name}/aggregate": value.clone() for name, value in means.items()}
