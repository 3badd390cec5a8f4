"""LGC for a parameter server: one rank's code for what ranks have in common, and an innovation of each rank's own.

Abrahamyan, Chen, Bekoulis, Deligiannis, "Learned gradient compression for distributed deep learning", IEEE TNNLS 2021,
sections IV-A and V-B.1, eqs. (2) to (7), (12) and (13), Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from gradlab.codec import About, Batch, Context, Deferred, Exchanged, Tensors
from gradlab.codec.kept import Entry
from gradlab.codec.routes import most_bytes, sent_by
from gradlab.codec.settings import setting
from gradlab.codec.sparsifier import count_of
from gradlab.coding.positions import decode, decode_all, encode, index_bytes, varies
from gradlab.collectives import Broadcast, Coroutine, Gather
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.learning.autoencoder import Architecture, Loss, server_loss
from gradlab.learning.selection import (
    COMPRESSING,
    DEFAULTS,
    GROUP_STATE,
    TRAINER,
    TRAINING,
    LearnedSelection,
    LearnedSettings,
    Selection,
    Task,
    largest_of_parts,
    layer_of,
    padded,
    prefixed,
    root_mean_squares,
)


class LgcServer(LearnedSelection):
    """Select each rank's largest magnitudes of each layer. Rank 0 sends a code of its values, all send an innovation.

    The innovation is the largest of a rank's selected values, uncompressed. Each rank has a decoder of its own. It
    reconstructs the rank's selected values from the common code and the rank's innovation. The reconstructions are
    averaged.

    There is no server. Every rank receives all messages and does what the paper's master does, so nothing travels back.
    The paper does not count that way back. It does not count the ranks' positions either. Here they are sent and
    counted.

    With positions = "shared" all ranks take the leader's positions, as in `LgcRing`. Otherwise two ranks have about 2 %
    of their positions in common, so that one rank's code says little about another rank's values.

    This rank's decoded contribution (`own`) is its reconstruction. `LgcRing` describes error feedback.

    >>> codecs.make("lgc_server", density=0.25).apply([torch.arange(8.0), torch.arange(8.0)]).decoded.tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 6.0, 7.0]
    """

    name = "lgc_server"
    about = About(
        "learned",
        "positions of k selected, values and places of the innovation, 4 values for 16 / N",
        "Abrahamyan et al., IEEE TNNLS 2021",
        candidates=({"density": 0.001}, {"density": 0.01}),
        defaults=DEFAULTS,
        learns=True,
    )

    # Decoders are of ranks: for another number of them they are learned anew.
    entries: ClassVar[Mapping[str, Entry]] = dict.fromkeys(GROUP_STATE, Entry("anew", of_group=True))

    @dataclass(frozen=True)
    class Settings(LearnedSettings):
        similarity: float = setting(0.5, least=0, symbol="lambda_2", help="weight of the similarity loss, eq. (7)")
        positions: str = setting(
            "own", choices=("own", "shared"), help="each rank's own (the paper's), or one rank's for all"
        )
        innovation: float = setting(
            0.1,
            above=0,
            most=1,
            unit="share of values",
            help="that travel uncompressed, at least one per layer. Algorithm 1: 10 % of the selected; section III: "
            "0.001 % of the gradient; section V: 0.001 % of the selected, below one value on ResNet-50",
        )
        innovation_of: str = setting(
            "selected", choices=("selected", "gradient"), help="values of each layer that innovation is a share of"
        )

    def architecture(self, world_size: int) -> Architecture:
        return Architecture(self.settings.resolution, decoders=world_size, innovation=True)

    def trained_ranks(self, weights: torch.Tensor) -> int | None:
        one, two = (self.architecture(count).numel for count in (1, 2))
        trained, rest = divmod(len(weights) - (2 * one - two), two - one)
        if rest or trained < 1:
            raise GradlabError(
                f"codec lgc_server: autoencoder of {len(weights)} weights, expected {2 * one - two} and {two - one} "
                "for each rank"
            )
        return trained

    # --- the exchange ---

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        prefix, vector = next(iter(grads)), grads.vector
        if not vector.numel():
            return Exchanged(dict(grads), dict(grads), state)
        sizes, entries = [grad.numel() for grad in grads.values()], self._first_entries(state, prefix, context)
        self.check_ranks(entries.get("autoencoder"), context.world_size)
        own, places, scales = yield from self._selections(vector, sizes, context)
        mode, counts, at = int(entries["clock"][0]), self.counts(sizes), places[context.rank]
        kept = entries
        if mode == COMPRESSING:
            values = yield from self._decoded(own, scales, entries["autoencoder"], sizes, context)
        else:
            values = torch.stack((yield Gather(own)))
            if mode == TRAINING:
                task = self.task(values, scales, counts, self.innovation_counts(counts, sizes), context)
                kept = yield from self._trained(entries, task, vector, context)

        def mean() -> Tensors:
            total = context.memory.workspace.zeros_like(vector)
            for positions, part in zip(places, values.to(vector.dtype) / context.world_size, strict=True):
                total.index_add_(0, positions, part)  # rank after rank, so that sums have an order on a GPU, too
            return grads.cut(total)

        def decoded() -> Tensors:
            whole = context.memory.workspace.zeros_like(vector)
            return grads.cut(whole.index_copy_(0, at, values[context.rank].to(vector.dtype)))

        def error() -> Tensors:
            out = context.memory.copy(vector)
            return grads.cut(out.index_copy_(0, at, out[at] - values[context.rank].to(vector.dtype)))

        return Exchanged(context.once(mean), Deferred(grads, decoded, error), prefixed(prefix, kept))

    @property
    def compares_codes(self) -> bool:
        return self.settings.similarity > 0

    @property
    def shared(self) -> bool:
        return bool(self.settings.positions == "shared")

    def selected(self, vectors: torch.Tensor, sizes: Sequence[int], context: Context) -> Selection:
        if self.shared:
            return self._selected_alike(vectors, sizes, self.leader(context))
        every = [self._choice(vector, sizes, "position") for vector in vectors]
        positions = torch.stack([chosen for chosen, _ in every])
        scales = torch.stack([scale[layer_of(chosen, sizes)] for chosen, scale in every])
        return Selection(positions, vectors.gather(1, positions), scales)

    def _selections(
        self, vector: torch.Tensor, sizes: Sequence[int], context: Context
    ) -> Coroutine[tuple[torch.Tensor, Sequence[torch.Tensor], Sequence[torch.Tensor | float]]]:
        """Exchange positions and scales: this rank's values (count,), every rank's positions, and what each rank
        divides its values by, (count,) or 1.0."""
        settings, coding, ranks = self.settings, self.settings.index_coding, context.world_size
        if self.shared:
            one = yield from self._leaders_selection(vector, sizes, self.leader(context), "position", coding, context)
            return one.values, [one.positions] * ranks, [one.scale] * ranks
        counts, numel = self.counts(sizes), vector.numel()
        chosen = self.select(vector, sizes)
        values = vector[chosen]
        encoded = yield Gather(encode(chosen, numel, coding), varying=varies(coding), most=most_bytes(numel))
        places = _positions(encoded, sum(counts), numel, coding)
        if settings.normalise == "none":
            return values, places, [1.0] * ranks
        scales = yield Gather(root_mean_squares(values, counts))
        pairs = zip(places, scales, strict=True)
        return values, places, [scale[layer_of(positions, sizes)] for positions, scale in pairs]

    def _decoded(
        self,
        own: torch.Tensor,
        scales: Sequence[torch.Tensor | float],
        weights: torch.Tensor,
        sizes: Sequence[int],
        context: Context,
    ) -> Coroutine[torch.Tensor]:
        """Decode every rank's values with its decoder, eqs. (3) and (12): (K, count)."""
        architecture, coding, counts = (
            self.architecture(context.world_size),
            self.settings.index_coding,
            self.counts(sizes),
        )
        total, innovations = sum(counts), self.innovation_counts(counts, sizes)
        code = architecture.encode(weights, padded(own / scales[context.rank], architecture))
        kept = self.largest_of_each(own, tuple(counts), tuple(innovations))
        sent = (own[kept], encode(kept, total, coding))
        code, values, positions = yield (
            Broadcast(code, TRAINER),
            Gather(sent[0]),
            Gather(sent[1], varying=varies(coding), most=most_bytes(total)),
        )

        def decoded() -> torch.Tensor:
            places, scale = _positions(positions, len(kept), total, coding), _stacked(scales)
            apart = own.new_zeros(len(places), total).scatter_(1, torch.stack(places), torch.stack(values)) / scale
            whole = architecture.decode_each(weights, code, padded(apart, architecture))[:, :total]
            return whole.to(own.dtype) * scale

        return context.once(decoded)

    # --- learning ---

    def task(
        self,
        values: torch.Tensor,
        scales: Sequence[torch.Tensor | float],
        counts: Sequence[int],
        innovations: Sequence[int],
        context: Context,
    ) -> Task:
        """Learn from all ranks' selected values (K, count), by eqs. (5) to (7), with each rank's divisors, (count,) or
        one number.

        counts, innovations: selected and uncompressed values of each layer.
        """
        architecture, count = self.architecture(len(values)), values.shape[-1]
        scale = _stacked(scales)
        apart = innovations_of(values, counts, innovations)
        vectors, apart = padded(values / scale, architecture), padded(apart / scale, architecture)
        common = int(torch.randint(len(values), (), generator=context.random.shared("common")))
        loss = Loss(self.settings.loss, self.settings.similarity)

        def missed(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            # Ranks' positions differ, so that selections have no average: every rank's own values, eq. (6).
            code = architecture.encode(weights, vectors[TRAINER])
            decoded = architecture.decode_each(weights, code, apart)
            wide = values.double()
            return ((decoded[:, :count] * scale).double() - wide).square().sum(), wide.square().sum()

        return Task(
            lambda weights: server_loss(architecture, weights, vectors, apart, common, loss),
            missed,
            vectors[TRAINER],
        )

    def innovation_counts(self, counts: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Return how many of each layer's selected values travel uncompressed."""
        of = counts if self.settings.innovation_of == "selected" else sizes
        return [
            min(count, count_of(self.settings.innovation, numel)) if count else 0
            for count, numel in zip(counts, of, strict=True)
        ]

    # --- forecasts ---

    def _innovation_bytes(self, layers: Sequence[Layer]) -> int:
        return 4 * self._innovations(layers)

    def _position_bytes(self, layers: Sequence[Layer], world_size: int, mode: int) -> float:
        """Those of the selected values, and in the third phase the innovation's among them."""
        coding, (count, numel) = self.settings.index_coding, self._selected(layers)
        named = index_bytes(coding, count, numel)
        innovation = index_bytes(coding, self._innovations(layers), count) if mode == COMPRESSING else 0
        return ((named + 8 * self.traits.varying) / world_size if self.shared else named) + innovation

    def _innovations(self, layers: Sequence[Layer]) -> int:
        sizes = [layer.numel for layer in layers]
        return sum(self.innovation_counts(self.counts(sizes), sizes))


def _stacked(scales: Sequence[torch.Tensor | float]) -> torch.Tensor | float:
    """Return every rank's divisors, (K, count), or one number."""
    tensors = [one for one in scales if isinstance(one, torch.Tensor)]
    return torch.stack(tensors) if tensors else scales[0]


def _positions(messages: Sequence[torch.Tensor], count: int, numel: int, coding: str) -> list[torch.Tensor]:
    """Decode every rank's positions, (count,) below numel; what cannot be decoded raises BadMessage with its rank."""
    try:
        return decode_all(messages, count, numel, coding)
    except GradlabError:
        for rank, message in enumerate(messages):  # apart, to see whose it was
            with sent_by(rank):
                decode(message, count, numel, coding)
        raise


def innovations_of(values: torch.Tensor, counts: Sequence[int], innovations: Sequence[int]) -> torch.Tensor:
    """Return selected values (..., count) with zeros in place of those that are not part of the innovation."""
    apart = torch.zeros_like(values)
    for one, vector in zip(apart.view(-1, values.shape[-1]), values.reshape(-1, values.shape[-1]), strict=True):
        kept = largest_of_parts(vector, counts, innovations)
        one[kept] = vector[kept]
    return apart
