"""Identity: the uncompressed mean, the reference every method is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradlab.codec import (
    About,
    Batch,
    Bytes,
    Codec,
    Context,
    Exchanged,
    Guarantees,
    PlanDefaults,
    Tensors,
    Traits,
    mean_only,
)
from gradlab.codec.settings import setting
from gradlab.collectives import Coroutine, Ring
from gradlab.collectives.ring import SummedRing, segment_bounds
from gradlab.layout import Layer


class Identity(Codec):
    """Send everything. Linear, lossless; 4 bytes per element.

    >>> codecs.make("identity").apply([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 2.0])]).decoded.tolist()
    [2.0, 2.0]
    """

    name = "identity"
    about = About(
        "dense",
        "4 * n",
        defaults=PlanDefaults(error_feedback=False, group_bytes=0),
    )
    traits = Traits(keeps_dtype=True)

    @dataclass(frozen=True)
    class Settings:
        ring: bool = setting(
            False,
            help="segments pass along a ring, hop by hop (GradiVeQ's Algorithm 1 without compression), in place of the "
            "backend's all-reduce; to compare with",
        )

    def guarantees(self, layers: Sequence[Layer]) -> Guarantees:
        return Guarantees(linear=True, unbiased=True, delta=1.0, omega=0.0)

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        if not self.settings.ring:
            return (yield from mean_only(grads))
        vector = grads.vector
        bounds = segment_bounds(vector.numel(), context.world_size)
        code = SummedRing(bounds, lambda a, b: vector[a:b], lambda a, b, summed: summed, 1, vector.dtype)
        segments = yield Ring(code)
        return Exchanged(grads.cut(torch.cat(segments)), dict(grads))

    def forecast(self, layers: Sequence[Layer], world_size: int, state: Tensors | None = None) -> Bytes:
        return Bytes.of_means(4 * sum(layer.numel for layer in layers), world_size)
