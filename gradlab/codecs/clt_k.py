"""CLT-k: one rank chooses the positions for all ranks, and every rank sends its values there.

Chen et al., "ScaleCom: Scalable sparsified gradient compression for communication-efficient distributed training",
NeurIPS 2020, eq. (3) and Algorithm 1 (cyclic local top-k); selection in chunks: its section 4. Inside `error_feedback`
with `decay` = 1 - beta (the low-pass filter, eq. 5) it is ScaleCom.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from gradlab.codec import About, Codec, Context, Deferred, Exchanged, Tensors, concatenate, separate
from gradlab.codec.settings import setting
from gradlab.codec.sparsifier import coding_setting, count_of, density_setting, largest, with_non_finite
from gradlab.codecs.block_scaled import BlockScaled
from gradlab.coding.positions import decode, encode, in_order, index_bytes
from gradlab.collectives import Broadcast, Coroutine, Gather, Mean
from gradlab.layout import Layer

_INT8 = BlockScaled(BlockScaled.Settings("int8"))


class CLTK(Codec):
    """Send every rank's values at the leader's k = ceil(density * numel) largest magnitudes.

    The leader is rank (iteration mod N), or drawn from the shared seed, and broadcasts its positions. With the
    positions given the compressor commutes with the sum over ranks: values travel in one all-reduce, which does not
    grow with N.

    For the leader delta = k / numel, as for top-k. For another rank delta depends on how many of its largest elements
    lie at the leader's positions. The paper relies on that overlap; error feedback makes up for the difference.

    >>> ranks = [torch.tensor([4.0, 0.0, 1.0, 0.0]), torch.tensor([2.0, 9.0, 3.0, 0.0])]
    >>> codecs.make("clt_k", density=0.5).apply(ranks).decoded.tolist()  # rank 0 leads
    [3.0, 0.0, 2.0, 0.0]
    """

    name = "clt_k"
    about = About(
        "sparsification", "4 * k + index_bytes(k, n) / N, k = ceil(density * n)", "Chen et al., NeurIPS 2020"
    )  # with chunks ceil(n / ceil(1 / density))
    selects = True
    candidates: ClassVar[tuple[Mapping[str, Any], ...]] = tuple(
        {"density": density} for density in (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
    )

    @dataclass(frozen=True)
    class Settings:
        density: float = density_setting()
        leader: str = setting(
            "rotating",
            choices=("rotating", "random"),
            help="who chooses the positions: each rank in turn, or a drawn one",
        )
        values: str = setting(
            "float32", choices=("float32", "int8"), help="in an all-reduce, or gathered with a scale per 256 values"
        )
        selection: str = setting(
            "topk",
            choices=("topk", "chunks"),
            help='"chunks": the largest of each 1 / density elements, without sorting',
        )
        index_coding: str = coding_setting(choices=("fixed", "raw", "packed", "bitmap"))

    def leader(self, context: Context) -> int:
        """Return the rank whose positions are taken in this iteration."""
        if self.settings.leader == "rotating":
            return context.iteration % context.world_size
        return int(torch.randint(context.world_size, (), generator=context.shared_generator("leader")))

    def exchange(self, grads: Tensors, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        vector, leader = concatenate(grads), self.leader(context)
        numel, coding = vector.numel(), self.settings.index_coding
        count = self._count(numel)
        if context.rank == leader:
            chosen = self._select(vector, count)
            chosen = chosen.sort().values if in_order(coding, count, numel) else chosen
            encoded = encode(chosen, numel, coding)
        else:
            encoded = torch.zeros(index_bytes(coding, count, numel), dtype=torch.uint8, device=vector.device)
        encoded = yield Broadcast(encoded, leader)
        positions = decode(encoded, count, numel, coding)
        mean, own = yield from self._values(with_non_finite(vector[positions], vector), context)

        def spread(values: torch.Tensor) -> Tensors:
            return separate(context.workspace.zeros_like(vector).index_copy_(0, positions, values), grads)

        return Exchanged(spread(mean), Deferred(grads, lambda: spread(own)))

    def _count(self, numel: int) -> int:
        if self.settings.selection == "chunks":
            return -(-numel // self._chunk(numel))
        return count_of(self.settings.density, numel)

    def _chunk(self, numel: int) -> int:
        """Return the elements of a chunk: 1 / density, at most all there are."""
        return math.ceil(min(max(1, numel), round(1 / self.settings.density, 9)))

    def _select(self, vector: torch.Tensor, count: int) -> torch.Tensor:
        if self.settings.selection == "topk" or count == 0:
            return largest(vector, count)
        size = self._chunk(vector.numel())
        padded = torch.nn.functional.pad(vector.abs(), (0, count * size - vector.numel()), value=-1.0)
        return padded.view(count, size).argmax(1) + size * torch.arange(count, device=vector.device)

    def _values(self, values: torch.Tensor, context: Context) -> Coroutine[tuple[torch.Tensor, torch.Tensor]]:
        """Return the mean of all ranks' values, and this rank's decoded values."""
        if self.settings.values == "float32":
            mean = yield Mean(values)
            return mean, values
        payload = _INT8.compress(values, context.rank_generator())
        answers = yield tuple(Gather(part) for part in payload)
        mean = torch.zeros_like(values)
        _INT8.add_all(mean, zip(*answers, strict=True), 1.0 / context.world_size)
        return mean, _INT8.decompress(payload, values)

    def payload_bytes(self, layers: Sequence[Layer], world_size: int) -> float:
        numel = sum(layer.numel for layer in layers)
        count = self._count(numel)
        int8 = self.settings.values == "int8"
        values = _INT8.payload_bytes([Layer("values", (count,))], world_size) if int8 else 4 * count
        return values + self.position_bytes(layers, world_size)

    def position_bytes(self, layers: Sequence[Layer], world_size: int) -> float:
        numel = sum(layer.numel for layer in layers)
        return index_bytes(self.settings.index_coding, self._count(numel), numel) / world_size
