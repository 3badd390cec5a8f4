"""CLT-k: one rank chooses the positions for all ranks, and every rank sends its values there.

Chen et al., "ScaleCom: Scalable sparsified gradient compression for communication-efficient distributed training",
NeurIPS 2020, eq. (3) and Algorithm 1 (cyclic local top-k); selection in chunks: its section 4. Inside `error_feedback`
with `decay` = 1 - beta (the low-pass filter, eq. 5) it is ScaleCom.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradlab.codec import About, Batch, Bytes, Codec, Context, Exchanged, Tensors, Traits
from gradlab.codec.abilities import average_into, decompress
from gradlab.codec.each_layer import EachLayer
from gradlab.codec.routes import exchanged_at, exchanged_by_kernels, sent_by
from gradlab.codec.settings import setting
from gradlab.codec.sparsifier import (
    DENSITIES,
    across_layers_setting,
    coding_setting,
    count_of,
    density_setting,
    largest,
    with_non_finite,
)
from gradlab.codecs.block_scaled import BlockScaled
from gradlab.collectives import Broadcast, Coroutine, Gather, Mean, ring_sends
from gradlab.kernels import usable
from gradlab.layout import Layer

_INT8 = BlockScaled(BlockScaled.Settings("int8", aggregation="gather"))


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
        "sparsification",
        "4 * k + index_bytes(k, n) / N, k = ceil(density * n)",
        "Chen et al., NeurIPS 2020",
        candidates=DENSITIES,
    )  # with chunks ceil(n / ceil(1 / density))
    traits = Traits(selects=True, frees_gradients=True)

    @dataclass(frozen=True)
    class Settings:
        density: float = density_setting()
        leader: str = setting(
            "rotating",
            choices=("rotating", "random"),
            help="who chooses the positions: each rank in turn, or a drawn one",
        )
        values: str = setting(
            "float32",
            choices=("float32", "int8"),
            help="values in an all-reduce, or gathered with a scale for 256",
        )
        selection: str = setting(
            "topk",
            choices=("topk", "chunks"),
            help='"chunks": the largest of each 1 / density elements, without sorting',
        )
        index_coding: str = coding_setting(choices=("fixed", "raw", "packed", "bitmap"))
        across_layers: bool = across_layers_setting()

    def leader(self, context: Context) -> int:
        """Return the rank whose positions are taken in this iteration."""
        if self.settings.leader == "rotating":
            return context.iteration % context.world_size
        return int(torch.randint(context.world_size, (), generator=context.random.shared("leader")))

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        vector, leader = grads.vector, self.leader(context)
        known = self._places([grad.numel() for grad in grads.values()])
        by_kernels = usable(vector) and vector.numel() > 0
        values = None
        if context.rank == leader:
            values, encoded = self._selected(vector, known, by_kernels)
        else:
            encoded = torch.zeros(known.nbytes, dtype=torch.uint8, device=vector.device)
        encoded = yield Broadcast(encoded, leader)
        if by_kernels:
            from gradlab.kernels.selection import values_at

            places = known.places(vector.device)
            if values is None:
                values = values_at(vector, encoded, places, known.count)
            mean, own = yield from self._values(values, context)
            return exchanged_by_kernels(encoded, places, mean, own, vector, grads, context)
        with sent_by(leader):
            positions = context.once(lambda: known.decode([encoded])[0])
        mean, own = yield from self._values(with_non_finite(vector[positions], vector), context)
        return exchanged_at(positions, mean, own, vector, grads, context)

    def _selected(
        self, vector: torch.Tensor, known: EachLayer, by_kernels: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the values that are sent of a vector, where a kernel finds them, and their encoded positions."""
        if not by_kernels or self.settings.selection == "chunks":
            return None, known.encode(known.select(vector, self._select))
        from gradlab.kernels.selection import largest_of_each

        return largest_of_each(vector, known.places(vector.device), known.count, known.nbytes, sound=True)

    def _places(self, sizes: Sequence[int]) -> EachLayer:
        """Return where the elements lie that are sent of layers of these sizes."""
        together = self.settings.across_layers or self.settings.selection == "chunks"
        parts = (sum(sizes),) if together else tuple(sizes)
        return self.cached(parts, lambda: EachLayer(parts, list(map(self._count, parts)), self.settings.index_coding))

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
        payload = _INT8.compress(values, context.random.of_rank())
        answers = yield tuple(Gather(part) for part in payload)
        mean = average_into(_INT8, torch.empty_like(values), zip(*answers, strict=True), 1.0 / context.world_size)
        return mean, decompress(_INT8, payload, values)

    def forecast(self, layers: Sequence[Layer], world_size: int, state: Tensors | None = None) -> Bytes:
        places, int8 = self._places([layer.numel for layer in layers]), self.settings.values == "int8"
        positions, size = places.nbytes / world_size, [Layer("values", (places.count,))]
        values = _INT8.forecast(size, world_size).payload if int8 else 4 * places.count
        sent = (world_size - 1) * positions + (world_size - 1 if int8 else ring_sends(world_size)) * values
        return Bytes(values + positions, sent, positions)
