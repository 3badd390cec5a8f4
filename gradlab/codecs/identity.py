"""Identity: the uncompressed mean, the reference every method is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradlab.codec import Codec, Context, Exchanged, Tensors, mean_only
from gradlab.collectives import Coroutine
from gradlab.layout import Layer


class Identity(Codec):
    """Send everything. Linear, lossless; 4 bytes per element."""

    name = "identity"
    family = "dense"
    linear = True
    wants_error_feedback = False
    keeps_dtype = True

    @dataclass(frozen=True)
    class Settings:
        """Nothing to set."""

    def exchange(self, grads: Tensors, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        return (yield from mean_only(grads))

    def payload_bytes(self, layers: Sequence[Layer], world_size: int) -> float:
        return 4 * sum(layer.numel for layer in layers)
