"""Integers that an all-reduce sums: one scale for all ranks, sums of codes, and no decoding in between.

K. Mishchenko, B. Wang, D. Kovalev, P. Richtarik, "IntSGD: Adaptive floatless compression of stochastic gradients", ICLR
2022, Algorithm 1, here layer by layer: the scale follows from how far the parameters moved before, which all ranks
know. M. Li et al., "THC: Accelerating distributed deep learning using tensor homomorphic
compression", NSDI 2024, uniform THC: the scale follows from the largest magnitude of all ranks, after a rotation
(`hadamard` around this codec). THC's table of levels is not there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from gradlab.codec import (
    About,
    Batch,
    Bytes,
    Codec,
    Context,
    Deferred,
    Exchanged,
    Guarantees,
    PlanDefaults,
    Tensors,
    Traits,
)
from gradlab.codec.batch import concatenate
from gradlab.codec.exchanged import mean_only
from gradlab.codec.kept import Entry, Kept
from gradlab.codec.settings import setting
from gradlab.coding.random_bits import RandomBits
from gradlab.collectives import Coroutine, Gather, Sum
from gradlab.errors import GradlabError
from gradlab.kernels import Form, Source, usable
from gradlab.layout import Layer

if TYPE_CHECKING:
    from gradlab.kernels.layers import LayerTable

_DTYPES = {8: torch.int8, 32: torch.int32}
_MOST_ENERGY = 1e300  # an alpha above zero follows from it
_HALF = 31  # bits: squares of 32 bits fit twice as many
_BETA = 0.9  # weight of the last r in the next
_EPS = 1e-8  # keeps alpha finite where gradients vanish


class IntSGD(Codec):
    """mean = sum_i Int(alpha g_i) / (N alpha), with Int(x) = floor(x + u), u uniform in (0, 1); an alpha by layer.

    Sums of N integers fit the width that travels, as each rank's are cut at (2^(bits-1) - 1) / N. With
    `scale="running"` (the paper's), alpha = sqrt(d) / sqrt(2 N r + eps^2) for a layer of d elements: r is a running
    average of the squared norm of the mean gradient. That is r_k / eta_k^2 of the paper for SGD without momentum, whose
    parameters move by eta times the mean; nothing is sent for it, and the first iteration is exact. With
    `scale="largest"`, alpha is the most that cuts nothing, by the largest magnitude of all ranks, which travels first
    in 4 bytes a layer: uniform THC. (With the running scale these travel beside the integers, which cannot say NaN.)

    The paper claims the convergence of SGD without compression, under SGD, for 8 and for 32 bits, and has no error
    feedback. Rounding is unbiased unless values are cut, as with 8 bits and the running scale they may be: by default 8
    bits take the largest. At 8 bits there are no more than 127 ranks.

    >>> done = codecs.make("intsgd").apply([torch.tensor([127.0, -3.0]), torch.tensor([1.0, 5.0])])
    >>> done.payload_bytes, done.decoded.shape
    (6.0, torch.Size([2]))
    """

    name = "intsgd"
    about = About(
        "quantization",
        "n * bits / 8, and 4 a layer",
        "Mishchenko et al., ICLR 2022; Li et al., NSDI 2024",
        candidates=({"bits": 8}, {"bits": 32, "scale": "running"}),
        defaults=PlanDefaults(error_feedback=False),
    )
    traits = Traits(frees_gradients=True, rotatable=True)
    entries: ClassVar[Mapping[str, Entry]] = {"energy": Entry(carried=True)}

    @dataclass(frozen=True)
    class Settings:
        bits: int = setting(8, choices=(8, 32), unit="bits per value", help="of the sums that travel")
        scale: str = setting(
            "largest",
            choices=("largest", "running"),
            help='"largest": by the largest magnitude of all ranks; "running": by the norms of earlier means',
        )
        random: bool = setting(True, help="round to one of the two nearest integers by chance; False: to the nearest")

    def guarantees(self, layers: Sequence[Layer]) -> Guarantees:
        """Bound the error of a rank whose largest magnitude is that of all, on as many ranks as 8 bits hold."""
        exact = not self._runs
        if not (exact and self.settings.random):
            return Guarantees(homogeneous=exact)
        return Guarantees(unbiased=True, omega=max([1, *(layer.numel for layer in layers)]) / 4, homogeneous=True)

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        keys = {name: f"{name}/energy" for name in grads}
        most, largest = self._most(context.world_size), None
        by_kernels = self._kernels(grads)
        if not self._runs:
            largest = yield Gather(by_kernels.largest() if by_kernels else _largest(grads))
            alphas = most / torch.stack(largest).amax(0).double()  # (L,); infinite where all is zero
        elif all(key in state for key in keys.values()):
            alphas = self._by_energy(grads, [float(state[key]) for key in keys.values()], context.world_size)
        else:
            done = yield from mean_only(grads)
            energies = [float(mean.double().square().sum()) for mean in done.mean.values()]
            return Exchanged(done.mean, done.own, _kept(keys.values(), energies))
        bits = RandomBits(context.random.of_rank(), next(iter(grads.values())).device) if grads else None
        dtype = _DTYPES[self.settings.bits]
        if by_kernels is not None and bits is not None:
            codes = by_kernels.codes(alphas, most, bits.seed if self.settings.random else None, dtype)
        else:
            codes = {
                name: self._codes(grad, alpha, most, bits, dtype)
                for (name, grad), alpha in zip(grads.items(), alphas.unbind(), strict=True)
            }
        requests = tuple(Sum(code) for code in codes.values())
        if largest is None:
            *sums, largest = yield (*requests, Gather(by_kernels.largest() if by_kernels else _largest(grads)))
        else:
            sums = yield requests
        sound = torch.stack(largest).isfinite().all(0)

        def decoded(integers: Sequence[torch.Tensor], ranks: int) -> Tensors:
            factors = (alphas * ranks).reciprocal().masked_fill_(alphas.isinf(), 0.0).masked_fill_(~sound, torch.nan)
            if by_kernels is not None and dtype == torch.int8:
                return by_kernels.decoded(integers, factors)
            return {
                name: integer.to(grad.dtype).mul_(factor.to(grad.dtype))
                for (name, grad), integer, factor in zip(grads.items(), integers, factors.unbind(), strict=True)
            }

        def averaged() -> tuple[Tensors, Tensors]:
            kept = self._energies_after(keys, state, sums, alphas, context.world_size)
            return decoded(sums, context.world_size), kept

        mean, kept = context.once(averaged)
        return Exchanged(mean, Deferred(grads, lambda: decoded(list(codes.values()), 1)), kept)

    def _kernels(self, grads: Batch) -> _OnDevice | None:
        if not grads or not all(map(usable, grads.values())):
            return None
        from gradlab.kernels.layers import layers_of

        vector, numels = grads.vector, grads.table.numels
        layers = self.cached(("layers", numels, vector.device), lambda: layers_of(numels, vector.device))
        return _OnDevice(grads, vector, layers)

    @property
    def _runs(self) -> bool:
        return self.settings.scale == "running"

    def _most(self, world_size: int) -> int:
        """Return the largest integer of a rank: sums of so many fit."""
        most = (2 ** (self.settings.bits - 1) - 1) // world_size
        if not most:
            raise GradlabError(
                f"intsgd: sums of {world_size} ranks do not fit 8 bits, expected at most 127 ranks: bits = 32"
            )
        return min(most, 2**24)  # what float32 tells apart

    def _by_energy(self, grads: Tensors, energies: Sequence[float], ranks: int) -> torch.Tensor:
        numels = (grad.numel() for grad in grads.values())
        alphas = [
            (max(1, numel) / (2 * ranks * energy + _EPS**2)) ** 0.5
            for numel, energy in zip(numels, energies, strict=True)
        ]
        return torch.tensor(alphas, dtype=torch.float64, device=next(iter(grads.values())).device)

    def _codes(
        self, grad: torch.Tensor, alpha: torch.Tensor, most: int, bits: RandomBits | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Round alpha g to integers of at most `most`, in the gradient's shape; 0 where nothing is known of alpha."""
        scaled = grad * alpha.to(grad.dtype)
        if self.settings.random and bits is not None and grad.numel():
            scaled.add_(bits.sixteen(scaled).to(scaled.dtype), alpha=2.0**-16).add_(0.5 + 2.0**-17).floor_()
        else:
            scaled.round_()
        return scaled.nan_to_num_(0.0).clamp_(-most, most).to(dtype)

    def _energies_after(
        self, keys: Mapping[str, str], state: Tensors, sums: Sequence[torch.Tensor], alphas: torch.Tensor, ranks: int
    ) -> Tensors:
        """Return the running squared norms of the mean, from whole numbers: the same bits on every rank."""
        if not self._runs:
            return {}
        energies = []
        for key, total, alpha in zip(keys.values(), sums, alphas.tolist(), strict=True):
            squares = _sum_of_squares(total)
            energies.append(_BETA * float(state[key]) + (1 - _BETA) * (squares / (ranks * alpha) ** 2))
        return _kept(keys.values(), energies)

    def kept(self, layers: Sequence[Layer], rank: int, world_size: int, group: str) -> Mapping[str, Kept]:
        if not self._runs:
            return {}
        return {f"{layer.name}/energy": Kept((), (torch.float64,), least=0.0, running=1.0) for layer in layers}

    def forecast(self, layers: Sequence[Layer], world_size: int, state: Tensors | None = None) -> Bytes:
        self._most(world_size)  # refuses more ranks than integers of these bits can be summed of
        unknown = state is not None and any(f"{layer.name}/energy" not in state for layer in layers)
        if unknown and self._runs:
            return Bytes.of_means(4 * sum(layer.numel for layer in layers), world_size)
        return Bytes.of_means(sum(layer.numel * self.settings.bits // 8 + 4 for layer in layers), world_size)


class _OnDevice(NamedTuple):
    """A group's gradients, as one vector, and kernels for all of its layers at once."""

    grads: Batch
    vector: torch.Tensor
    layers: LayerTable

    def largest(self) -> torch.Tensor:
        """Do what `_largest` does."""
        from gradlab.kernels.blocks import reduced

        found = reduced(Source(self.vector), self.layers.blocks, "largest")
        assert found is not None
        return found

    def codes(self, alphas: torch.Tensor, most: int, seed: int | None, dtype: torch.dtype) -> Tensors:
        """Do what `IntSGD._codes` does."""
        from gradlab.kernels.layers import rounded, whole

        out = torch.empty_like(self.vector, dtype=dtype)
        return self.grads.cut(rounded(self.vector, self.layers, whole, out, seed, alphas.float(), float(most)))

    def decoded(self, integers: Sequence[torch.Tensor], factors: torch.Tensor) -> Tensors:
        """Multiply integers of 8 bits by their layer's factor."""
        from gradlab.kernels.codes import average

        packed = concatenate(dict(zip(self.grads, integers, strict=True))).view(torch.uint8)
        form, out = Form("integer", 8, -127.0, 127.0), torch.empty_like(self.vector)
        return self.grads.cut(average(out, ([factors.float()], [packed]), self.layers.blocks, form, 1.0))


def _largest(grads: Tensors) -> torch.Tensor:
    """Return the largest magnitude of each layer, (L,), float32, at least that of float64 values."""
    found = [grad.abs().amax() if grad.numel() else grad.new_zeros(()) for grad in grads.values()]
    wide = torch.stack(found)
    narrow = wide.float()
    return torch.where(narrow.double() < wide.double(), torch.nextafter(narrow, narrow + torch.inf), narrow)


def _sum_of_squares(total: torch.Tensor) -> int:
    """Add up the squares of integers of at most 32 bits, exactly, whatever they are."""
    squares = total.to(torch.int64).square()
    halves = torch.stack([(squares >> _HALF).sum(), (squares & 2**_HALF - 1).sum()]).tolist()
    return (halves[0] << _HALF) + halves[1]


def _kept(keys: Any, energies: Sequence[float]) -> Tensors:
    kept = [torch.tensor(energy, dtype=torch.float64).clamp_(max=_MOST_ENERGY) for energy in energies]
    return dict(zip(keys, kept, strict=True))
