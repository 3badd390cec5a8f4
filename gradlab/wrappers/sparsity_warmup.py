"""Sparsity warm-up: a density that starts high and falls in stages to the codec's own.

Lin, Han, Mao, Wang, Dally, "Deep gradient compression", ICLR 2018, section 3.3: 75 %, 93.75 %, 98.4375 %, 99.6 %
sparsity in the first four epochs, then 99.9 %.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from gradlab.codec import Batch, Codec, Context, Exchanged, Tensors
from gradlab.codec.exchanged import run_codec
from gradlab.codec.settings import require, setting
from gradlab.codec.wrapper import Wrapper, innermost
from gradlab.collectives import Coroutine
from gradlab.errors import GradlabError


class SparsityWarmup(Wrapper):
    """Density in stage s of S: initial (final / initial)^(s / S); after the last stage, the codec's own density.

    With the defaults and a density of 0.001 the stages have 25 %, 6.3 %, 1.58 % and 0.398 %, within 2 % of the paper's.
    The first stage begins where the schedule starts to compress.

    >>> wrappers.get("sparsity_warmup")(codecs.make("topk", density=0.001))
    SparsityWarmup(TopK(density=0.001))
    """

    name = "sparsity_warmup"

    @dataclass(frozen=True)
    class Settings:
        steps: int = setting(1000, least=1, unit="compressed iterations", help="of the warm-up")
        stages: int = setting(4, least=1, most=1000, symbol="S", help="number of stages of equal length")
        initial_density: float = setting(0.25, above=0, most=1, unit="share of elements", help="of the first stage")

        def __post_init__(self) -> None:
            require(self.steps >= self.stages, "sparsity_warmup", "steps", self.steps, "at least one per stage")

    def __init__(self, codec: Codec, settings: SparsityWarmup.Settings | None = None) -> None:
        super().__init__(codec, settings)
        method = innermost(codec)
        if "density" not in {f.name for f in fields(method.settings)}:
            raise GradlabError(f"sparsity_warmup around {method.name}, which has no density that could begin high")
        final, initial = method.settings.density, self.settings.initial_density
        if final > initial:
            raise GradlabError(
                f"sparsity_warmup: initial_density = {initial} is below the density {final} of {method.name}"
            )
        stages = self.settings.stages
        self.densities = [initial * (final / initial) ** (stage / stages) for stage in range(stages)]
        self._codecs = [_with_density(codec, density) for density in self.densities]

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        return run_codec(self.at(context.iteration - context.training.start), grads, state, context)

    def at(self, step: int) -> Codec:
        """Return the codec of the compressed iteration `step`, counted from 0."""
        stage = step * self.settings.stages // self.settings.steps
        return self._codecs[max(0, stage)] if stage < self.settings.stages else self.codec


def _with_density(codec: Codec, density: float) -> Codec:
    """Return the same stack of wrappers around a codec of another density, which shares the learned tensors."""
    if isinstance(codec, Wrapper):
        return type(codec)(_with_density(codec.codec, density), codec.settings)
    return type(codec)(replace(codec.settings, density=density), codec.learned)
