"""Dion: momentum whose orthonormalized low-rank part is the update, and of which only two thin factors travel.

K. Ahn, B. Xu, N. Abreu, Y. Fan, G. Magakyan, P. Sharma, Z. Zhan, J. Langford, "Dion: Distributed orthonormalized
updates", arXiv:2504.05295, 2025, Algorithm 1, with the decoupled momenta of its data-parallel form. Layers that are no
weight matrices have Lion's update, as there: X. Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS
2023.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from gradlab.codec import Batch, Bytes, Codec, Context, Deferred, Exchanged, Tensors, Traits, concatenate, separate
from gradlab.codec.kept import Entry, Kept
from gradlab.codec.settings import setting
from gradlab.codec.wrapper import DEALT, SHARED, Effects, Wrapper
from gradlab.codecs.identity import Identity
from gradlab.codecs.powersgd import KERNEL_RANKS, multiplied, orthogonalized
from gradlab.collectives import Coroutine, Mean
from gradlab.errors import GradlabError
from gradlab.kernels import usable
from gradlab.layout import Layer, matrices
from gradlab.roles import STACKS, TRANSPOSED

if TYPE_CHECKING:
    from gradlab.kernels.low_rank import LowRank

_ROUNDING = 64  # machine epsilons: rows of R^T below so many of the largest row's values are rounding errors
_NEGLIGIBLE = _ROUNDING * torch.finfo(torch.float32).eps
_LION_BETAS = 0.95, 0.98  # weights of Lion's m in what the sign is taken of, and of the last m in the next


class Dion(Wrapper):
    """sqrt(m / n) P Q^T of weight matrices with m outputs and n inputs, which SGD without momentum applies.

    Rank i keeps a momentum M_i of its own. With gradient G_i and B_i = M_i + G_i (Algorithm 1, between ranks):

        P = mean(B_i Q), its columns orthonormalized        (m, r), Q of the last iteration, at first Gaussian
        R = mean(B_i^T P)                                   (n, r)
        M_i = B_i - (1 - mu) P R^T                          error feedback and momentum in one
        Q = R, its columns scaled to length 1               (n, r)

    The mean of the M_i is the momentum of the algorithm on one rank, and P, R and Q are that one's, to rounding. A rank
    sends r (m + n) values in place of m n. If the factors are no smaller than the matrix, or the iteration is dense,
    B_i is averaged in full and all ranks keep the same M. The published code transposes wide matrices, and so
    orthonormalizes the factor of their inputs; here that is the rows' factor, as in Algorithm 1. A convolution is a
    matrix with a row per filter. Each expert of a stack is a matrix of its own. Columns of R that are rounding errors
    beside the others add nothing to the update, and their columns of Q stay.

    Other layers (biases, norms, embeddings) have Lion's update: the sign of beta1 m + (1 - beta1) g, with g the mean
    gradient, which travels uncompressed, and beta2 m + (1 - beta2) g as the next m. The paper trains a language model's
    output layer like that too, at the learning rate divided by sqrt(n). Nothing tells that layer from other matrices:
    here it is one.

    The paper claims the benefits of orthonormalized updates for language models of 160 million to 3 billion parameters,
    with shares of r that may be the smaller the larger the model is: 1/4 is close to full rank at 3 billion, by the
    published code's notes. It belongs under torch.optim.SGD without momentum, whose weight decay is then the paper's,
    and is refused under others. Learning rates are its own, such as 0.01, one for all shapes. Backward leaves
    updates: do not clip their norm.

    This is Dion of 2025, which its authors' repository, microsoft/dion, calls legacy. They recommend Dion2 (K. Ahn,
    N. Amsel, J. Langford, arXiv:2512.16928), which orthonormalizes those rows or columns of the momentum that are
    largest in the L1 norm; their Dion3 adds NorMuon's scaling of each neuron. Both step with fully averaged gradients.
    They save no bytes between data-parallel ranks, as Dion does, and train under any plan that replaces no optimizer.

    >>> codec = wrappers.get("dion")(codecs.make("identity"))
    >>> update = codec.apply({"w": torch.randn(64, 32)}).decoded["w"]
    >>> update.shape, torch.linalg.matrix_rank(update)
    (torch.Size([64, 32]), tensor(8))

    Raises:
        GradlabError: around any codec but identity, or around identity's ring.
    """

    name = "dion"
    entries: ClassVar[Mapping[str, Entry]] = {"velocity": DEALT, "q": SHARED, "moment": SHARED}
    effects = Effects(
        acts_when_dense=True,
        keeps_residual=True,
        applies_momentum=True,
        before_compression=True,
        replaces_optimizer=True,
        changes_mean=True,
    )

    @dataclass(frozen=True)
    class Settings:
        rank_fraction: float = setting(
            0.25, above=0, most=1, unit="share of min(m, n)", symbol="r / min(m, n)", help="of columns of P and Q"
        )
        momentum: float = setting(0.95, least=0, below=1, symbol="mu", help="share of P R^T that stays in M")

    def __init__(self, codec: Codec, settings: Any = None) -> None:
        super().__init__(codec, settings)
        if not isinstance(codec, Identity) or codec.settings.ring:
            raise GradlabError(
                f"wrapper dion around {codec.name}: it sends factors of its own, so that there is nothing left for a "
                "codec; put it around identity, without a ring"
            )

    @cached_property
    def traits(self) -> Traits:
        return Traits(whole_layers="its wrapper dion orthonormalizes whole matrices")

    # Factors are kept as rows, P^T (r, m) and Q^T (r, n), those of an expert stack as (B, r, m) and (B, r, n). Of a
    # layer whose inputs come before its outputs P is the inputs' factor.

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        seen = self.cached(("seen", grads.table), lambda: self._matrices(grads.table))
        kept = {name: state[key] for name in grads if (key := f"{name}/velocity") in state}
        thin_alone = all(one.compresses and one.rank <= KERNEL_RANKS for one in seen.values()) and not context.dense
        if seen and thin_alone and len(kept) in (0, len(seen)) and all(map(usable, grads.values())):
            return (yield from self._by_kernels(seen, grads, kept, state, context))
        inputs = {**grads, **_each(torch._foreach_add, {name: grads[name] for name in kept}, kept)}
        given = {name: value.view(seen[name].shape) if name in seen else value for name, value in inputs.items()}
        thin = {name: given[name] for name, one in seen.items() if one.compresses and not context.dense}
        whole = {name: value for name, value in given.items() if name not in thin}
        start = {name: self._start(name, one, given[name], state, context) for name, one in seen.items()}
        left, right, means = yield from _power_iteration(start, thin, whole, context)

        def updated() -> tuple[Tensors, Tensors]:
            """Compute what all ranks know: the updates, and the state that they share."""
            by_kernels = all(usable(right[name]) for name in seen)
            units, turned = self._units(seen, right, start, by_kernels)
            products = _products(left, units)
            if products and not by_kernels:
                torch._foreach_mul_(list(products.values()), [one.scale for one in seen.values()])
            others = {name: means[name] for name in grads if name not in seen}
            moves, moments = _lion(others, state)
            updates = {**products, **moves}
            shared = {f"{name}/q": rows for name, rows in turned.items()}
            shared |= {f"{name}/moment": moment for name, moment in moments.items()}
            return {name: updates[name].view(grad.shape) for name, grad in grads.items()}, shared

        def own() -> Tensors:
            projected = {name: left[name].mT @ (left[name] @ matrix) for name, matrix in thin.items()}
            return {name: projected.get(name, inputs[name]).view(grad.shape) for name, grad in grads.items()}

        updates, shared = context.once(updated)
        before = {name: thin[name] if name in thin else means[name] for name in seen}
        momenta = self._momenta(before, left, right, context)
        shared = shared | {f"{name}/velocity": one.view(grads[name].shape) for name, one in momenta.items()}
        return Exchanged(updates, Deferred(grads, own), shared, compressor_input=inputs)

    def _momenta(self, before: Tensors, left: Tensors, right: Tensors, context: Context) -> Tensors:
        """Compute M = B - (1 - mu) P R^T, by layer."""
        alpha, found = self.settings.momentum - 1, Tensors()
        if not all(one.is_cpu for one in before.values()):
            products = _products(left, _of(before, right))
            return _each(functools.partial(torch._foreach_add, alpha=alpha), before, products)
        for name, one in before.items():
            less_product = torch.addmm if one.ndim == 2 else torch.baddbmm
            found[name] = less_product(one, left[name].mT, right[name], alpha=alpha, out=context.memory.like(one))
        return found

    def _by_kernels(
        self, seen: Mapping[str, _Matrices], grads: Batch, kept: Tensors, state: Tensors, context: Context
    ) -> Coroutine[Exchanged]:
        """Do what `exchange` does, by a kernel each for all matrices, which are one vector."""
        matrices, others = _of(seen, grads), {name: one for name, one in grads.items() if name not in seen}
        given, work = concatenate(matrices), self._kernels(seen, next(iter(grads.values())).device)
        given = given + concatenate(_of(seen, kept)) if kept else given
        start = {name: self._start(name, one, grads[name], state, context) for name, one in seen.items()}
        joined = concatenate(start)
        left, *means = yield tuple(map(Mean, (work.multiplied(given, joined, False), *others.values())))
        left = context.once(lambda: work.orthonormal(left, False))
        own_right = work.multiplied(given, left, True)
        (right,) = yield (Mean(own_right),)

        def updated() -> tuple[Tensors, Tensors]:
            units, turned = work.unit_rows(right, joined, _NEGLIGIBLE)
            updates = separate(work.product(left, units, torch.empty_like(given)), matrices)
            moves, moments = _lion(dict(zip(others, means, strict=True)), state)
            shared = {f"{name}/q": rows for name, rows in separate(turned, start).items()}
            return _of(grads, updates | moves), shared | {f"{name}/moment": one for name, one in moments.items()}

        def own() -> Tensors:
            projected = work.product(left, own_right, torch.empty_like(given))
            return _of(grads, separate(projected, matrices) | others)

        updates, shared = context.once(updated)
        momenta = work.product(left, right, context.memory.like(given), given, 1 - self.settings.momentum)
        kept = {f"{name}/velocity": one for name, one in separate(momenta, matrices).items()}
        inputs = _of(grads, separate(given, matrices) | others)
        return Exchanged(updates, Deferred(grads, own), shared | kept, compressor_input=inputs)

    def _units(
        self, seen: Mapping[str, _Matrices], right: Tensors, start: Tensors, by_kernels: bool
    ) -> tuple[Tensors, Tensors]:
        """Return R^T with rows of length 1 or zeros, by kernels times the layer's scale, and the next Q^T, by layer."""
        right = {name: right[name] for name in seen}
        if right and by_kernels:
            work = self._kernels(seen, next(iter(right.values())).device)
            found = work.unit_rows(concatenate(right), concatenate(_of(right, start)), _NEGLIGIBLE)
            return separate(found[0], right), separate(found[1], right)
        units = {name: unit_rows(rows) for name, rows in right.items()}
        return units, {name: torch.where(rows.any(-1, keepdim=True), rows, start[name]) for name, rows in units.items()}

    def _kernels(self, seen: Mapping[str, _Matrices], device: torch.device) -> LowRank:
        return self.cached(("kernels", device), lambda: _kernels(seen, device), seen)

    def _start(self, name: str, one: _Matrices, like: torch.Tensor, state: Tensors, context: Context) -> torch.Tensor:
        """Return the last Q^T, or Gaussian values that all ranks draw alike."""
        if (key := f"{name}/q") in state:
            return state[key].to(like.dtype)
        generator = context.random.shared(name, every_iteration=False)
        return torch.randn(one.of_right, generator=generator, dtype=like.dtype).to(like.device)

    def _matrices(self, layers: Iterable[Layer]) -> dict[str, _Matrices]:
        """Describe, by name, the layers that are weight matrices."""
        found = {}
        for layer in layers:
            if len(layer.shape) > 1 and layer.numel and layer.role != "embedding":
                found[layer.name] = _Matrices.of(layer, self.settings.rank_fraction)
        return found

    def kept(self, layers: Sequence[Layer], rank: int, world_size: int, group: str) -> Mapping[str, Kept]:
        seen = self._matrices(layers)
        found = {f"{layer.name}/moment": Kept(layer.shape) for layer in layers if layer.name not in seen}
        found |= {f"{layer.name}/velocity": Kept(layer.shape, needs=("q",)) for layer in layers if layer.name in seen}
        return found | {f"{name}/q": Kept(one.of_right) for name, one in seen.items()}

    def forecast(self, layers: Sequence[Layer], world_size: int, state: Tensors | None = None) -> Bytes:
        seen = self._matrices(layers)
        values = sum(seen[layer.name].sent if layer.name in seen else layer.numel for layer in layers)
        return Bytes.of_means(4 * values, world_size)


@dataclass(frozen=True)
class _Matrices:
    """A layer, seen as matrices that each have factors of r columns.

    shape: (rows, columns), or of an expert stack (B, rows, columns).
    rank: r.
    scale: square root of outputs over inputs.
    """

    shape: tuple[int, ...]
    rank: int
    scale: float

    @classmethod
    def of(cls, layer: Layer, rank_fraction: float) -> _Matrices:
        count, rows, columns = matrices(layer)
        batch = (count,) if layer.role in STACKS and len(layer.shape) > 2 else ()
        rank = math.ceil(rank_fraction * min(rows, columns) - 1e-9)  # 0.1 * 30 is a little more than 3
        ratio = columns / rows if layer.role in TRANSPOSED else rows / columns
        return cls((*batch, rows, columns), max(1, rank), math.sqrt(ratio))

    @property
    def of_right(self) -> tuple[int, ...]:
        """The shape of R^T and Q^T."""
        return (*self.shape[:-2], self.rank, self.shape[-1])

    @property
    def compresses(self) -> bool:
        """Whether the factors have fewer values than the matrix."""
        return self.rank * sum(self.shape[-2:]) < math.prod(self.shape[-2:])

    @property
    def sent(self) -> int:
        """How many values a rank sends of the layer."""
        of_factors = math.prod(self.shape[:-2]) * self.rank * sum(self.shape[-2:])
        return of_factors if self.compresses else math.prod(self.shape)


def _kernels(seen: Mapping[str, _Matrices], device: torch.device) -> LowRank:
    """Return kernels for all matrices, one after another in a vector."""
    from gradlab.kernels.low_rank import LowRank, Matrix

    each = [one for one in seen.values() for _ in range(math.prod(one.shape[:-2]))]
    begins = accumulate((math.prod(one.shape[-2:]) for one in each), initial=0)
    shaped = zip(begins, each, strict=False)
    return LowRank([Matrix(at, one.shape[-2], one.shape[-1], one.rank, one.scale) for at, one in shaped], device)


def _lion(means: Tensors, state: Tensors) -> tuple[Tensors, Tensors]:
    """Compute Lion's updates, and the next m, by layer."""
    if not means:
        return {}, {}
    given = {name: state.get(f"{name}/moment") for name in means}
    moments = {name: torch.zeros_like(means[name]) if one is None else one for name, one in given.items()}
    leaning = _each(torch._foreach_lerp, moments, means, 1 - _LION_BETAS[0])
    # The product is zero, but NaN where there is no finite number, whose sign would hide that.
    updates = _each(torch._foreach_add, _each(torch._foreach_sign, leaning), _each(torch._foreach_mul, leaning, 0))
    return updates, _each(torch._foreach_lerp, moments, means, 1 - _LION_BETAS[1])


def _each(function: Any, tensors: Tensors, *others: Any) -> Tensors:
    """Apply one of PyTorch's functions of lists to tensors by name, and to the same names of others."""
    if not tensors:
        return {}
    lists = [[other[name] for name in tensors] if isinstance(other, dict) else other for other in others]
    return dict(zip(tensors, function(list(tensors.values()), *lists), strict=True))


def _products(left: Tensors, right: Tensors) -> Tensors:
    """Compute P R^T by layer, on a GPU by one call per shape."""
    turned = _turned(_of(right, left))
    if all(rows.is_cpu for rows in right.values()):
        return {name: turned[name] @ rows for name, rows in right.items()}
    return multiplied(turned, right)


def unit_rows(rows: torch.Tensor) -> torch.Tensor:
    """Scale rows (..., r, n) to length 1. Those that are rounding errors beside the largest one become zero."""
    largest = rows.abs().amax(-1, keepdim=True)
    most = largest.amax(-2, keepdim=True)
    negligible = largest <= _ROUNDING * torch.finfo(rows.dtype).eps * most  # False of NaN, which stays
    scaled = (rows / largest.masked_fill(negligible, 1.0)).masked_fill_(negligible, 0.0)  # squares do not overflow
    return scaled / scaled.norm(dim=-1, keepdim=True).masked_fill_(negligible, 1.0)


def _power_iteration(
    start: Tensors, thin: Tensors, whole: Tensors, context: Context
) -> Coroutine[tuple[Tensors, Tensors, Tensors]]:
    """Take one step of power iteration on the mean over ranks of matrices, from Q^T by layer; return P^T and R^T by
    layer, and the means of `whole`: the matrices that travel without factors, and what else is to be averaged."""
    left = multiplied(_of(thin, start), _turned(thin))
    answers = yield tuple(Mean(tensor) for tensor in (*left.values(), *whole.values()))
    of_left, means = dict(zip(left, answers, strict=False)), dict(zip(whole, answers[len(left) :], strict=True))
    known = {name: mean for name, mean in means.items() if name in start}
    basis = context.once(lambda: orthogonalized({**of_left, **multiplied(_of(known, start), _turned(known))}))
    right = multiplied(_of(thin, basis), thin)
    answers = (yield tuple(Mean(tensor) for tensor in right.values())) if right else ()
    of_right = dict(zip(right, answers, strict=True))
    return basis, context.once(lambda: {**of_right, **multiplied(_of(known, basis), known)}), means


def _of(names: Iterable[str], tensors: Tensors) -> Tensors:
    return {name: tensors[name] for name in names}


def _turned(tensors: Tensors) -> Tensors:
    return {name: matrix.mT for name, matrix in tensors.items()}
