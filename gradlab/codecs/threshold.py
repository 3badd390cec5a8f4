"""Hard threshold: send every value whose magnitude reaches lambda, which stays the same for the whole training.

Sahu, Dutta, Abdelmoniem, Banerjee, Canini, Kalnis, "Rethinking gradient sparsification as total error minimization"
(Rethink-GS), NeurIPS 2021, section 3: among sparsifiers with error feedback and a budget for the whole training, the
hard threshold minimises the sum of the errors of all iterations. The paper takes one lambda for the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import torch

from gradlab.codec import About, Batch, Bytes, Context, Exchanged, Sparsifier, Table, Tensors, Traits
from gradlab.codec.kept import GONE, Entry, Kept, for_any
from gradlab.codec.settings import setting
from gradlab.codec.sparsifier import DENSITIES, at_least, coding_setting, count_of, density_setting, largest
from gradlab.collectives import Coroutine, Mean
from gradlab.layout import Layer

if TYPE_CHECKING:
    from gradlab.kernels.selection import Counted


class Threshold(Sparsifier):
    """C(x)_i = x_i where |x_i| >= lambda, else 0. How many are sent depends on the gradient: message sizes vary.

    C is an absolute compressor: ||C(x) - x||^2 < numel lambda^2, whatever ||x|| is. It is no contraction: it sends
    nothing while all magnitudes are below lambda. NaN is always sent, zero never.

    If no lambda is given, the first exchange measures it: the mean over ranks of the k-th largest magnitude,
    k = ceil(density * numel). Later iterations send as many values as reach that lambda. Servers of `two_way` answer
    by top-k of chunks, as a mean's values reach other magnitudes.

    >>> done = codecs.make("threshold", threshold=1.0).apply(torch.tensor([0.1, -3.0, 0.2, 5.0]))
    >>> done.decoded.tolist()
    [0.0, -3.0, 0.0, 5.0]
    >>> done
    Applied(9 bytes instead of 16, or 8 in 16 bits, relative error 0.0383)
    """

    name = "threshold"
    entries: ClassVar[Mapping[str, Entry]] = {"threshold": Entry(of_group=True)}
    about = About(
        "sparsification",
        "4 * k + index_bytes(k, n), k = density * n in the first iteration, then as many as reach lambda",
        "Sahu et al., NeurIPS 2021",
        candidates=DENSITIES,
    )

    @dataclass(frozen=True)
    class Settings:
        threshold: float | None = setting(
            None,
            above=0,
            symbol="lambda",
            help="threshold in the gradient's unit; None: the first exchange measures it",
        )
        density: float = density_setting(help="sent in the first exchange, if it measures lambda, and in the forecast")
        index_coding: str = coding_setting()

    @cached_property
    def traits(self) -> Traits:
        # Inside a reduce-scatter nobody would measure lambda.
        return replace(super().traits, varying=True, own_exchange=self.settings.threshold is None)

    def select(self, vector: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return at_least(vector, self._least(vector))

    def _least(self, vector: torch.Tensor) -> float:
        # A measured lambda may be as small as it likes, but not zero: zeros are never sent.
        return self.settings.threshold or torch.finfo(vector.dtype).tiny

    def _counted(self, vector: torch.Tensor, generator: torch.Generator) -> tuple[int, Counted]:
        from gradlab.kernels.selection import counts_above

        above = counts_above(vector, self._places(vector, 1)[0], self._least(vector))
        return int(above.counts.cpu()[::2].sum()), above

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        fixed, known = yield from self.settled(grads, state, context)
        done = yield from super(Threshold, fixed).exchange(grads, state, context)
        return replace(done, state=known)

    def settled(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[tuple[Threshold, Tensors]]:
        """Return this codec with lambda, and the state to keep: measured once where the settings have none."""
        if self.settings.threshold is not None:
            return self, {}
        key, wanted = f"{next(iter(grads))}/threshold", self.settings.density
        known = state[key].cpu() if key in state else None
        if known is None or float(known[1]) != torch.tensor(wanted, dtype=known.dtype):  # a warm-up lowers the density
            vector = grads.vector
            measured = yield Mean(self._measured(vector))
            # In the host's memory, so that no later step waits for a GPU to tell it.
            known = torch.cat([measured.cpu(), torch.tensor([wanted], dtype=vector.dtype)])
        level = float(known[0])
        if not 0 < level < torch.inf:
            return self, {}
        return self.cached(level, lambda: Threshold(replace(self.settings, threshold=level))), {key: known}

    def kept(self, layers: Sequence[Layer], rank: int, world_size: int, group: str) -> Mapping[str, Kept]:
        lasting = None if self.settings.threshold is None and Table.of(layers).numel else GONE
        return for_any(layers, "threshold", Kept((2,), least=0.0, lasting=lasting))

    def _measured(self, vector: torch.Tensor) -> torch.Tensor:
        """Measure the k-th largest magnitude, (1,)."""
        if not vector.numel():
            return vector.new_zeros(1)
        positions = largest(vector, count_of(self.settings.density, vector.numel()))
        return vector[positions].abs().min().view(1)

    def forecast(self, layers: Sequence[Layer], world_size: int, state: Tensors | None = None) -> Bytes:
        found = super().forecast(layers, world_size)
        measures = self.settings.threshold is None and state is not None and not state
        return replace(found, payload=found.payload + 4) if measures else found
