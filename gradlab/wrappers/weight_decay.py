"""Weight decay as part of the gradient, or apart from it with a momentum of its own, uncompressed.

Krogh & Hertz, "A simple weight decay can improve generalization", NeurIPS 1991. torch.optim.SGD adds it to the gradient
before its own momentum. If a plan applies momentum, the optimizer's weight decay comes after the momentum and is 1 - mu
times as strong.

Apart: the published code of DGC (`DGCSGD`: Lin, Han, Mao, Wang, Dally, "Deep gradient compression", ICLR 2018) and of
dist-EF-blockSGDM (BytePS, `WeightDecayMomentum`: Zheng, Huang, Kwok, "Communication-efficient distributed blockwise
momentum SGD with error-feedback", NeurIPS 2019). Their papers say nothing of weight decay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from gradlab.codec import Batch, Codec, Context, Exchanged, Tensors
from gradlab.codec.exchanged import run_codec
from gradlab.codec.kept import Entry, Kept
from gradlab.codec.settings import require, setting
from gradlab.codec.wrapper import SHARED, Effects, Wrapper
from gradlab.collectives import Coroutine
from gradlab.layout import Layer

FORMS = ("gradient", "apart")


class WeightDecay(Wrapper):
    """g + rate * x in place of the gradient g, with x the parameters. The optimizer's own weight decay must be 0.

    Apart, the codec gets g alone, and m_t = momentum * m_(t-1) + rate * x is added to the mean: m_t itself, or in
    Nesterov's form rate * x + momentum * m_t. All ranks have the same x, so that it needs no exchange, and its part of
    the update has no compression error. Without compression both forms are the same update, as momentum is linear. m
    is kept in every iteration, dense ones included.

    A trace holds no parameters, so a replay leaves weight decay out.

    >>> wrappers.get("weight_decay")(codecs.make("topk"))
    WeightDecay(TopK(density=0.01))
    """

    name = "weight_decay"
    entries: ClassVar[Mapping[str, Entry]] = {"decay_momentum": SHARED}
    effects = Effects(acts_when_dense=True, applies_weight_decay=True)

    @dataclass(frozen=True)
    class Settings:
        rate: float = setting(1e-4, least=0, below=1, symbol="lambda", help="weight of the parameters in the gradient")
        form: str = setting(
            "gradient",
            choices=FORMS,
            help='"gradient": added to each rank\'s gradient, before momentum and compression; "apart": added to the '
            "mean, uncompressed, as the published code of DGC and of dist-EF-blockSGDM does",
        )
        momentum: float = setting(0.0, least=0, below=1, symbol="mu", help="apart: weight of the last m in the next")
        nesterov: bool = setting(False, help="apart: look ahead along m")

        def __post_init__(self) -> None:
            for name, off in (("momentum", "0"), ("nesterov", "false")):
                value = getattr(self, name)
                require(self.form == "apart" or not value, "weight_decay", name, value, f'{off} unless form = "apart"')

    def __init__(self, codec: Codec, settings: WeightDecay.Settings | None = None) -> None:
        super().__init__(codec, settings)
        self.effects = replace(type(self).effects, changes_mean=self.settings.form == "apart")

    def kept(self, layers: Sequence[Layer], rank: int, world_size: int, group: str) -> Mapping[str, Kept]:
        of_layers = layers, rank, world_size, group
        return super().kept(*of_layers) if self.settings.momentum else self.codec.kept(*of_layers)

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        inputs = self._inputs(grads, context)
        done = yield from run_codec(self.codec, inputs, self.inner_state(state), context)
        return self._applied(done, state, context)

    def _inputs(self, grads: Batch, context: Context) -> Batch:
        if self.effects.changes_mean or not context.training.parameters:
            return grads
        rate, parameters = self.settings.rate, context.training.parameters
        return grads.like({name: grad.add(parameters[name].to(grad.dtype), alpha=rate) for name, grad in grads.items()})

    def _applied(self, done: Exchanged, state: Tensors, context: Context) -> Exchanged:
        if not self.effects.changes_mean or not context.training.parameters:
            return done
        applied, kept = {}, {}
        for name, mean in done.mean.items():
            decay = context.training.parameters[name].detach().to(mean.dtype) * self.settings.rate
            before = state.get(f"{name}/decay_momentum")
            m = decay.clone() if before is None else (before * self.settings.momentum).add_(decay)
            if self.settings.momentum:
                kept[f"{name}/decay_momentum"] = m
            applied[name] = mean + (decay.add(m, alpha=self.settings.momentum) if self.settings.nesterov else m)
        return replace(done, mean=applied, state={**done.state, **kept})
