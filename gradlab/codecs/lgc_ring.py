"""LGC for ring all-reduce: ranks select at one rank's positions, code the selected values, and average the codes.

Abrahamyan, Chen, Bekoulis, Deligiannis, "Learned gradient compression for distributed deep learning", IEEE TNNLS 2021,
sections IV-B and V-B.2, eqs. (8) to (11) and (17) to (19), Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from gradlab.codec import About, Batch, Context, Deferred, Exchanged, Tensors, Traits, concatenate
from gradlab.codec.routes import exchanged_at
from gradlab.codec.settings import setting
from gradlab.coding.positions import index_bytes
from gradlab.collectives import Coroutine, Gather, Mean, sum_in_rank_order
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.learning.autoencoder import Architecture, Loss, ring_loss
from gradlab.learning.selection import (
    COMPRESSING,
    DEFAULTS,
    ORDERS,
    SELECTING,
    LearnedSelection,
    LearnedSettings,
    Selection,
    Task,
    padded,
    prefixed,
)


class LgcRing(LearnedSelection):
    """Average the codes of all ranks' values at the leader's positions, its largest magnitudes of each layer.

    The decoded contribution (`own`) of every rank is the decoded average. With keep = "difference", error feedback
    keeps the compressor input less that average. With keep = "unselected" it keeps the elements that were not selected
    and forgets the autoencoder's error, as the published algorithms do.

    The printed algorithms also add the accumulated gradient twice and never clear what was sent, so that the residual
    doubles in every step. The paper's text describes momentum correction without these errors. The wrappers follow the
    text.

    >>> codecs.make("lgc_ring", density=0.25).apply([torch.arange(8.0), torch.arange(8.0)]).decoded.tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 6.0, 7.0]
    """

    name = "lgc_ring"
    about = About(
        "learned",
        "4 values for 16 of k selected, and their positions / N",
        "Abrahamyan et al., IEEE TNNLS 2021",
        candidates=({"density": 0.001}, {"density": 0.01}),
        defaults=DEFAULTS,
        learns=True,
    )

    @dataclass(frozen=True)
    class Settings(LearnedSettings):
        order: str = setting(
            "position",
            choices=ORDERS,
            help='order of what is coded: "position" (the paper\'s), or by the leader\'s signed "value", largest '
            "first, which takes packed positions",
        )

    def architecture(self, world_size: int = 1) -> Architecture:
        return Architecture(self.settings.resolution)

    def trained_ranks(self, weights: torch.Tensor) -> int | None:
        if len(weights) != self.architecture().numel:
            raise GradlabError(
                f"codec lgc_ring: autoencoder of {len(weights)} weights, expected {self.architecture().numel}"
            )
        return None

    def task(self, values: torch.Tensor, scale: torch.Tensor | float = 1.0) -> Task:
        """Learn from all ranks' selected values (K, count), by eq. (11)."""
        architecture, count = self.architecture(), values.shape[-1]
        vectors, true = padded(values / scale, architecture), values.mean(0)

        def missed(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            decoded = architecture.decode(weights, architecture.encode(weights, vectors).mean(0))[:count] * scale
            return (decoded.double() - true.double()).square().sum(), true.double().square().sum()

        return Task(
            lambda weights: ring_loss(architecture, weights, vectors, Loss(self.settings.loss)),
            missed,
            vectors[0],
        )

    @property
    def coding(self) -> str:
        """The coding of positions: the setting's, or "packed" if values are ordered by size.

        Only packed positions can be in any order.
        """
        return self.settings.index_coding if self.settings.order == "position" else "packed"

    def selected(self, vectors: torch.Tensor, sizes: Sequence[int], context: Context) -> Selection:
        return self._selected_alike(vectors, sizes, self.leader(context), self.settings.order)

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        prefix, vector = next(iter(grads)), grads.vector
        if not vector.numel():
            return Exchanged(dict(grads), dict(grads), state)
        entries = self._first_entries(state, prefix, context)
        sizes, leader = [grad.numel() for grad in grads.values()], self.leader(context)
        selected = yield from self._leaders_selection(vector, sizes, leader, self.settings.order, self.coding, context)
        mode = int(entries["clock"][0])
        own, kept = selected.values, entries
        if mode == COMPRESSING:
            mean = own = yield from self._averaged_codes(selected, entries["autoencoder"], context)
        elif mode == SELECTING:
            mean = yield Mean(selected.values)
        else:
            every = yield Gather(selected.values)
            mean = sum_in_rank_order(every)
            kept = yield from self._trained(entries, self.task(torch.stack(every), selected.scale), vector, context)

        parts = (selected.positions, mean.to(vector.dtype), own.to(vector.dtype))
        done = replace(exchanged_at(*parts, vector, grads, context), state=prefixed(prefix, kept))
        if own is not mean:
            return done

        def error() -> Tensors:
            return grads.cut(torch.sub(vector, concatenate(done.mean), out=context.memory.like(vector)))

        return replace(done, own=Deferred(grads, lambda: done.mean, error))

    def _averaged_codes(self, selected: Selection, weights: torch.Tensor, context: Context) -> Coroutine[torch.Tensor]:
        """Average the codes and decode the average, (count,): eqs. (17) to (19)."""
        architecture, count = self.architecture(), len(selected.values)
        code = yield Mean(architecture.encode(weights, padded(selected.values / selected.scale, architecture)))
        dtype, scale = selected.values.dtype, selected.scale
        return context.once(lambda: architecture.decode(weights, code)[:count].to(dtype) * scale)

    @property
    def averages_codes(self) -> bool:
        return True

    def _position_bytes(self, layers: Sequence[Layer], world_size: int, mode: int) -> float:
        return (index_bytes(self.coding, *self._selected(layers)) + 8 * self.traits.varying) / world_size

    @cached_property
    def traits(self) -> Traits:
        selection = super().traits
        return replace(selection, varying=self.settings.order == "position" and selection.varying)
