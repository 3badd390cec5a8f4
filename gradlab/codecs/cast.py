"""Cast: send gradients in 16 bits.

float16 under a loss scale: Micikevicius et al., "Mixed precision training", ICLR 2018, section 3.2. bfloat16:
Kalamkar et al., "A study of BFLOAT16 for deep learning training", 2019. Rounding at random: Gupta, Agrawal,
Gopalakrishnan, Narayanan, "Deep learning with limited numerical precision", ICML 2015, section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradlab.codec import About, Batch, Bytes, Codec, Context, Deferred, Exchanged, Guarantees, PlanDefaults, Tensors
from gradlab.codec.batch import cut_like
from gradlab.codec.settings import require, setting
from gradlab.coding.random_bits import RandomBits, bfloat16_at_random
from gradlab.collectives import Coroutine, Mean
from gradlab.kernels import usable
from gradlab.layout import Layer
from gradlab.workspace import Workspace

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class Cast(Codec):
    """Average in 16 bits: 2 bytes per element on the wire in each direction.

    Values are rounded to the nearest, so the codec is not linear and slightly biased. The all-reduce rounds the sum
    over ranks as often as there are ranks.

    float16: relative error 2^-11 between 6e-5 and 65504. Smaller values lose bits, below 3e-8 all of them. Larger
    values become infinite, and the step is skipped. Gradients are multiplied by the run's loss scale before they are
    sent, which moves them into that range, and the mean is divided by it.

    bfloat16: relative error 2^-8 in float32's range. With `stochastic`, a rank sends one of the two neighbouring values
    at random, without bias: twice the largest error, E||C(x) - x||^2 <= 2^-16 ||x||^2.

    >>> done = codecs.make("cast", dtype="bfloat16").apply(torch.tensor([1.0, 1.001, -2.0]))
    >>> done.decoded.tolist()
    [1.0, 1.0, -2.0]
    >>> done
    Applied(6 bytes instead of 12, or 6 in 16 bits, relative error 0.000408)
    """

    name = "cast"
    about = About(
        "quantization",
        "2 * n",
        "Micikevicius et al., ICLR 2018; Kalamkar et al., 2019",
        candidates=({"dtype": "float16"}, {"dtype": "bfloat16"}),
        defaults=PlanDefaults(error_feedback=False),
    )

    @dataclass(frozen=True)
    class Settings:
        dtype: str = setting("float16", choices=DTYPES, help="dtype of the values that travel")
        stochastic: bool = setting(False, help="round at random to one of the two neighbouring values, in bfloat16")

        def __post_init__(self) -> None:
            possible = self.dtype == "bfloat16" or not self.stochastic
            require(possible, "cast", "stochastic", self.stochastic, f"False with {self.dtype}")

    def guarantees(self, layers: Sequence[Layer]) -> Guarantees:
        return Guarantees(unbiased=True, omega=2.0**-16) if self.settings.stochastic else Guarantees()

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        dtype = DTYPES[self.settings.dtype]
        scale = context.training.loss_scale if dtype == torch.float16 else 1.0
        if self.settings.stochastic:
            bits = RandomBits(context.random.of_rank(), next(iter(grads.values())).device)
            sent = self._rounded_at_random(grads, bits, context.memory.workspace)
        else:
            sent = _narrowed(list(grads.values()), dtype, scale, context.memory.workspace)
        answers = yield tuple(Mean(tensor) for tensor in sent)
        mean = context.once(lambda: _widened(answers, grads, scale, context.memory.workspace))
        return Exchanged(mean, Deferred(grads, lambda: _widened(sent, grads, scale, context.memory.workspace)))

    def _rounded_at_random(self, grads: Batch, bits: RandomBits, workspace: Workspace) -> Sequence[torch.Tensor]:
        if not all(map(usable, grads.values())):
            sent = _sixteen(list(grads.values()), torch.bfloat16, workspace)
            return [bfloat16_at_random(grad, bits, out) for grad, out in zip(grads.values(), sent, strict=True)]
        from gradlab.kernels.layers import bfloat16, layers_of, rounded

        vector, numels = grads.vector, grads.table.numels
        layers = self.cached(("layers", numels, vector.device), lambda: layers_of(numels, vector.device, 1))
        out = workspace.empty(vector.shape, vector.new_empty(0, dtype=torch.bfloat16))
        rounded(vector, layers, bfloat16, out.view(torch.int16), bits.seed)
        return cut_like(out, list(grads.values()))

    def forecast(self, layers: Sequence[Layer], world_size: int, state: Tensors | None = None) -> Bytes:
        return Bytes.of_means(2 * sum(layer.numel for layer in layers), world_size)


def _sixteen(grads: Sequence[torch.Tensor], dtype: torch.dtype, workspace: Workspace) -> list[torch.Tensor]:
    return [workspace.empty(grad.shape, grad.new_empty(0, dtype=dtype)) for grad in grads]


def _narrowed(
    grads: Sequence[torch.Tensor], dtype: torch.dtype, scale: float, workspace: Workspace
) -> list[torch.Tensor]:
    """Cast gradients, multiplied by the loss scale, to 16 bits."""
    sent = _sixteen(grads, dtype, workspace)
    if scale != 1.0 and grads:
        wide = [workspace.empty_like(grad) for grad in grads]
        torch._foreach_copy_(wide, list(grads))
        torch._foreach_mul_(wide, scale)
        grads = wide
    if grads:
        torch._foreach_copy_(sent, list(grads))
    return sent


def _widened(narrow: Sequence[torch.Tensor], like: Tensors, scale: float, workspace: Workspace) -> Tensors:
    """Cast tensors to the dtypes of `like`, under its names, and divide them by the loss scale."""
    wide = [workspace.empty_like(grad) for grad in like.values()]
    if wide:
        torch._foreach_copy_(wide, list(narrow))
        if scale != 1.0:
            torch._foreach_div_(wide, scale)
    return dict(zip(like, wide, strict=True))
