"""Cast: send gradients in 16 bits.

float16 under a loss scale: Micikevicius et al., "Mixed precision training", ICLR 2018, section 3.2. bfloat16:
Kalamkar et al., "A study of BFLOAT16 for deep learning training", 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradlab.codec import About, Batch, Bytes, Codec, Context, Deferred, Exchanged, PlanDefaults, Tensors
from gradlab.codec.settings import setting
from gradlab.collectives import AllToAll, Coroutine, Gather, Mean, ring_sends
from gradlab.collectives.ring import segment_bounds
from gradlab.layout import Layer
from gradlab.workspace import Workspace

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
ACCUMULATORS = ("dtype", "float32")


class Cast(Codec):
    """Average in 16 bits: 2 bytes per element on the wire in each direction.

    Values are rounded to the nearest, so the codec is not linear and slightly biased. In one all-reduce, the default,
    the sum over ranks is rounded as often as there are ranks. With `accumulate="float32"` ranks send each other their
    values of a shard each, sum them in float32, and gather the means. Each contribution and the mean are then rounded
    once, whatever the number of ranks, and the wire carries the same bytes as in a ring all-reduce.

    float16: relative error 2^-11 between 6e-5 and 65504. Smaller values lose bits, below 3e-8 all of them. Larger
    values become infinite, and the step is skipped. Gradients are multiplied by the run's loss scale before they are
    sent, which moves them into that range, and the mean is divided by it.

    bfloat16: relative error 2^-8 in float32's range.

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
        accumulate: str = setting(
            "dtype",
            choices=ACCUMULATORS,
            help='format of the sum over ranks: the one that travels ("dtype", one all-reduce), or "float32" (an '
            "all-to-all and a gather, of as many bytes on the wire)",
        )

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        dtype = DTYPES[self.settings.dtype]
        scale = context.training.loss_scale if dtype == torch.float16 else 1.0
        sent = [_narrowed(grad, dtype, scale, context.memory.workspace) for grad in grads.values()]
        if self.settings.accumulate == "float32":
            answers = yield from _mean_of_shards(sent, context)
        else:
            answers = yield tuple(Mean(tensor) for tensor in sent)
        mean = context.once(lambda: _widened(answers, grads, scale, context.memory.workspace))
        return Exchanged(mean, Deferred(grads, lambda: _widened(sent, grads, scale, context.memory.workspace)))

    def forecast(self, layers: Sequence[Layer], world_size: int, state: Tensors | None = None) -> Bytes:
        nbytes = 2 * sum(layer.numel for layer in layers)
        shard = 1 / world_size if self.settings.accumulate == "float32" else 0.0  # of the mean, which is sent too
        return Bytes((1 + shard) * nbytes, ring_sends(world_size) * nbytes)  # however it is summed


def _mean_of_shards(sent: Sequence[torch.Tensor], context: Context) -> Coroutine[list[torch.Tensor]]:
    """Average tensors of 16 bits in float32: rank r sums shard r of all ranks, then all gather the rounded means."""
    vector = torch.cat([tensor.reshape(-1) for tensor in sent])
    bounds = segment_bounds(len(vector), context.world_size)
    received = yield AllToAll(tuple(vector[first:last] for first, last in bounds))
    total = received[0].to(torch.float32, copy=True)
    for shard in received[1:]:
        total += shard
    mean = total.mul_(1.0 / context.world_size).to(vector.dtype)
    shards = yield Gather(mean, lengths=tuple(last - first for first, last in bounds))
    pieces = torch.cat(shards).split([tensor.numel() for tensor in sent])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, sent, strict=True)]


def _narrowed(grad: torch.Tensor, dtype: torch.dtype, scale: float, workspace: Workspace) -> torch.Tensor:
    """Cast a gradient, multiplied by the loss scale, to 16 bits."""
    scaled = grad if scale == 1.0 else torch.mul(grad, scale, out=workspace.empty_like(grad))
    return workspace.empty(grad.shape, grad.new_empty(0, dtype=dtype)).copy_(scaled)


def _widened(narrow: Sequence[torch.Tensor], like: Tensors, scale: float, workspace: Workspace) -> Tensors:
    """Cast tensors to the dtypes of `like`, under its names, and divide them by the loss scale."""
    wide = {
        name: workspace.empty_like(grad).copy_(tensor)
        for (name, grad), tensor in zip(like.items(), narrow, strict=True)
    }
    return wide if scale == 1.0 else {name: tensor.div_(scale) for name, tensor in wide.items()}
