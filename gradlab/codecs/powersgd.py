"""PowerSGD: a rank-r approximation of each gradient matrix by one step of power iteration from the last factors.

Vogels, Karimireddy, Jaggi, "PowerSGD: Practical low-rank gradient compression", NeurIPS 2019, Algorithm 1. Alternating,
with one multiplication and one all-reduce per step: the authors' later library (epfml/powersgd), after Vogels,
Karimireddy, Jaggi, "Practical low-rank communication compression in decentralized deep learning", NeurIPS 2020.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from gradlab.codec import About, Batch, Bytes, Codec, Context, Deferred, Exchanged, Memory, Table, Tensors, concatenate
from gradlab.codec.batch import stacked
from gradlab.codec.exchanged import means_of
from gradlab.codec.kept import GONE, Entry, Kept
from gradlab.codec.settings import require, setting
from gradlab.collectives import Coroutine
from gradlab.kernels import usable
from gradlab.layout import Layer, layer_of
from gradlab.layout import matrices as matrices_of
from gradlab.roles import STACKS

if TYPE_CHECKING:
    from gradlab.kernels.low_rank import LowRank

Shapes = dict[str, tuple[int, ...]]  # of matrices, or of an expert stack's, by layer name
Alike = tuple[list[str], tuple[int, ...]]  # layers of one shape, and that of each one's matrix
InMemory = Callable[[torch.Tensor, Sequence[str]], torch.Tensor]  # memory like a tensor's, for what layers
# By stack, left factors (..., n, r) and right ones (..., r, m) of the mean, and of the own contribution; the new state;
# what was sent dense.
Factors = tuple[tuple[Tensors, Tensors], tuple[Tensors, Tensors], Tensors, Tensors]


class PowerSGD(Codec):
    """P = orth(mean(M Q)); Q = mean(M^T P); mean = P Q^T (Algorithm 1, lines 3 to 7).

    A layer of shape (n, ...) is a matrix M (n, m), where m is the product of the other dimensions. An expert stack
    (B, n, m) is a batch of B matrices, each with factors of its own. A layer is sent dense, together with the first
    factors, if it has fewer than two dimensions or if n m <= minimum_ratio * r (n + m). The products of a group's
    layers of one shape are computed together: on a GPU of all of them, on a CPU of small ones. A GPU with Triton takes
    one launch for all layers of a group, if r is at most 32.

    Alternating: one iteration computes P = mean(M orth(Q)) and mean = P orth(Q)^T, the next one Q = mean(M^T orth(P))
    and mean = orth(P) Q^T. That takes half the bytes, half the arithmetic and one message, and is made for error
    feedback.

    Each contribution C(M) is a projection of M: ||C(M) - M||^2 <= ||M||^2. No delta is known beforehand.

    >>> done = codecs.make("powersgd", rank=1).apply(torch.outer(torch.arange(4.0), torch.arange(8.0)))  # of rank 1
    >>> round(done.relative_error, 4), done.payload_bytes
    (0.0, 48.0)
    """

    name = "powersgd"
    entries: ClassVar[Mapping[str, Entry]] = {"p": Entry(carried=True), "q": Entry(carried=True)}
    about = About(
        "low rank",
        "4 * sum of r * (n + m) over matrices, r = min(rank, n, m); alternating: of r * n and r * m in turn",
        "Vogels et al., NeurIPS 2019 and 2020",
        candidates=tuple({"rank": rank} for rank in (1, 2, 4, 8, 16, 32, 64)),
    )

    @dataclass(frozen=True)
    class Settings:
        rank: int = setting(4, least=1, unit="columns", symbol="r", help="of P and Q")
        minimum_ratio: float = setting(
            1.0, above=0, symbol="n m / (r (n + m))", help="a layer is compressed if it is above this; else dense"
        )
        warm_start: bool = setting(
            True, help="begin from the last factor (the paper's choice), or from a fresh random Q"
        )
        alternating: bool = setting(False, help="P and Q in turn, one per iteration, which needs the warm start")

        def __post_init__(self) -> None:
            cold = self.alternating and not self.warm_start
            require(not cold, "powersgd", "warm_start", self.warm_start, "true where factors alternate")

    def matrix_shape(self, shape: Sequence[int], role: str = "other") -> tuple[int, int, int] | None:
        """Return (n, m, r) of the matrices of a layer that is compressed, or None for one that is sent dense."""
        if len(shape) < 2 or 0 in shape:
            return None
        _, n, m = matrices_of(layer_of("", tuple(shape), role))
        rank = min(n, m, self.settings.rank)
        return (n, m, rank) if n * m > self.settings.minimum_ratio * rank * (n + m) else None

    def matrix_shapes(self, layers: Table) -> Shapes:
        """Return the shapes (n, m), or (B, n, m) of an expert stack, of layers that are compressed, by name."""

        def made() -> Shapes:
            shapes = {}
            for layer in layers:
                if (shape := self.matrix_shape(layer.shape, layer.role)) is not None:
                    batch = (layer.shape[0],) if layer.role in STACKS and len(layer.shape) > 2 else ()
                    shapes[layer.name] = (*batch, *shape[:2])
            return shapes

        return self.cached(layers, made)

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        shapes = self.matrix_shapes(grads.table)
        matrices = self._matrices(shapes, grads, state)
        dense = {name: grad for name, grad in grads.items() if name not in shapes}
        run = self._alternate if self.settings.alternating else self._iterate
        means, own, kept, sent_dense = yield from run(matrices, dense, state, context)

        def joined(parts: Tensors, others: Tensors) -> Tensors:
            parts = {**parts, **others}
            return {name: parts[name] for name in grads}

        own_contributions = Deferred(
            grads,
            lambda: joined(matrices.products(*own, lambda like, names: context.memory.like(like)), dense),
            lambda: joined(
                matrices.errors(*own, context.memory), {name: torch.zeros_like(grad) for name, grad in dense.items()}
            ),
        )
        mean = context.once(lambda: joined(matrices.products(*means, context.memory.for_mean), sent_dense))
        return Exchanged(mean, own_contributions, kept)

    def _matrices(self, shapes: Shapes, grads: Batch, state: Tensors) -> _Stacks | _OneVector:
        turned = {name for name in shapes if self.settings.alternating and _key(name, "p") in state}
        in_step = len(turned) in (0, len(shapes))
        if shapes and in_step and self.settings.rank <= KERNEL_RANKS and all(map(usable, grads.values())):
            return _OneVector(shapes, self.settings.rank, grads, self._kernels(shapes, grads))
        return _Stacks({names[0]: _Stack.of(names, shape, grads) for names, shape in self._alike(shapes, grads, state)})

    def _kernels(self, shapes: Shapes, grads: Batch) -> LowRank:
        device = grads[next(iter(shapes))].device

        def made() -> LowRank:
            from gradlab.kernels.low_rank import LowRank, Matrix

            found, begin = [], 0
            for layer in grads.table:
                count, n, m = matrices_of(layer) if layer.name in shapes else (0, 0, 0)
                rank = min(n, m, self.settings.rank)
                found += [Matrix(begin + expert * n * m, n, m, rank) for expert in range(count)]
                begin += layer.numel
            return LowRank(found, device)

        return self.cached(("kernels", device), made, shapes)

    def _alike(self, shapes: Shapes, grads: Tensors, state: Tensors) -> Sequence[Alike]:
        """List the layers of each stack, with the shape of each one's matrix, or matrices. On a CPU a large matrix is
        as fast alone, and need not be copied."""
        turned = frozenset(name for name in shapes if _key(name, "p") in state) if self.settings.alternating else None
        one_dtype = len({grad.dtype for grad in grads.values()}) == 1
        on_cpu = all(grads[name].is_cpu for name in shapes)

        def made() -> Sequence[Alike]:
            stacks: dict[Any, Alike] = {}
            for name, shape in shapes.items():
                alone = len(shape) > 2 or not one_dtype or (on_cpu and math.prod(shape) > _STACKED)
                key = name if alone else (grads[name].shape, turned and name in turned)
                stacks.setdefault(key, ([], shape))[0].append(name)
            return list(stacks.values())

        return self.cached(("stacks", turned, one_dtype, on_cpu), made, shapes)

    # Factors are kept as rows, P^T (r, n) and Q^T (r, m): products with a wide matrix are then 5 to 9 times faster.
    # Those of an expert stack are (B, r, n) and (B, r, m).

    def _iterate(
        self, matrices: _Stacks | _OneVector, dense: Tensors, state: Tensors, context: Context
    ) -> Coroutine[Factors]:
        """Compute both factors in one iteration (Algorithm 1)."""
        start = matrices.starts(lambda name, like: self._start(name, like, state, context))
        # Q is as large as the gradient: a product with the next one might over- or underflow.
        left = matrices.multiplied(start, (), unit=True)
        means = yield from means_of({**left, **dense})
        left = context.once(lambda: matrices.orthogonalized({first: means[first] for first in left}, ()))
        right = matrices.multiplied(left, left)
        mean = yield from means_of(right)
        # A gradient of zeros says nothing of the next one, but a Q of zeros could hide rows of it for ever.
        kept = context.once(lambda: matrices.with_spares(mean, start, mean))
        sent_dense = {name: means[name] for name in dense}
        return (left, mean), (left, right), matrices.by_layer(kept, kept), sent_dense

    def _alternate(
        self, matrices: _Stacks | _OneVector, dense: Tensors, state: Tensors, context: Context
    ) -> Coroutine[Factors]:
        """Compute one factor from the other one, which the last iteration left."""
        start = matrices.starts(lambda name, like: self._start(name, like, state, context, _key(name, "p") in state))
        flipped = {first for first in start if _key(first, "p") in state}  # those whose turn it is to compute Q
        basis = context.once(lambda: matrices.orthogonalized(start, start.keys() - flipped))
        factors = matrices.multiplied(basis, flipped)
        means = yield from means_of({**factors, **dense})
        mean = {first: means[first] for first in factors}
        spares = {first: self._spare(first, factor, context) for first, factor in mean.items()}
        kept = context.once(lambda: matrices.with_spares(mean, spares, flipped))

        def ordered(computed: Tensors) -> tuple[Tensors, Tensors]:
            """Return the left and right factors of each product."""
            left = {first: basis[first] if first in flipped else factor for first, factor in computed.items()}
            return left, {first: factor if first in flipped else basis[first] for first, factor in computed.items()}

        return ordered(mean), ordered(factors), matrices.by_layer(kept, flipped), {name: means[name] for name in dense}

    def _start(
        self, name: str, matrix: torch.Tensor, state: Tensors, context: Context, flipped: bool = False
    ) -> torch.Tensor:
        """Return the last P^T or Q^T (..., r, m), or Gaussian values that all ranks draw alike."""
        key = _key(name, "p" if flipped else "q")
        if not self.settings.warm_start or key not in state:
            return self._random(name, matrix.shape[-1], matrix, context)
        kept, rank = state[key], min(*matrix.shape[-2:], self.settings.rank)
        kept = kept if kept.dtype == matrix.dtype else kept.to(matrix.dtype)
        if (rows := kept.shape[-2]) < rank:  # another rank's, see `entries`
            kept = torch.cat([kept, self._random(name, kept.shape[-1], matrix, context)[..., rows:, :]], -2)
        return kept if kept.shape[-2] == rank else kept[..., :rank, :]

    def kept(self, layers: Sequence[Layer], rank: int, world_size: int, group: str) -> Mapping[str, Kept]:
        """Factors of any number of rows, as other settings may have left them; of two in turn, the larger one lasts."""
        found: dict[str, Kept] = {}
        shapes = self.matrix_shapes(Table.of(layers))
        for layer in layers:
            if len(layer.shape) > 1 and 0 not in layer.shape:
                count, n, m = matrices_of(layer)
                batch = (count,) if layer.role in STACKS and len(layer.shape) > 2 else ()
                sides = {"q": m, "p": n} if self.settings.alternating else {"q": m}
                r, larger = min(n, m, self.settings.rank), max(sides, key=sides.__getitem__)
                for what, side in sides.items():
                    lasting = (*batch, r, side) if what == larger and layer.name in shapes else GONE
                    found[_key(layer.name, what)] = Kept((*batch, (1, min(n, m)), side), lasting=lasting)
        return found

    def _random(self, name: str, columns: int, like: torch.Tensor, context: Context) -> torch.Tensor:
        generator = context.random.shared(name, every_iteration=not self.settings.warm_start)
        rank = min(*like.shape[-2:], self.settings.rank)
        return torch.randn(*like.shape[:-2], rank, columns, generator=generator, dtype=like.dtype).to(like.device)

    def _spare(self, name: str, like: torch.Tensor, context: Context) -> torch.Tensor:
        """Return substitutes for rows of zeros, the same in all iterations, as new ones would be copied to a GPU."""

        def made() -> torch.Tensor:
            generator = context.random.shared(name, "spare", every_iteration=False)
            return torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like.device)

        return self.cached((name, like.shape, like.dtype, like.device), made)

    @classmethod
    def squared_errors(
        cls, codecs: Sequence[Codec], layer: Layer, gradient: torch.Tensor, context: Context
    ) -> list[float]:
        """Compute what warm-started factors leave of the gradient, once for all r: see `low_rank_errors`."""
        shapes = [codec.matrix_shape(layer.shape, layer.role) for codec in codecs]  # type: ignore[attr-defined]
        ranks = sorted({shape[2] for shape in shapes if shape})
        if not ranks:
            return [0.0] * len(codecs)
        generator = context.random.shared(layer.name)
        by_matrix = [low_rank_errors(m, ranks, generator=generator) for m in gradient.reshape(matrices_of(layer))]
        errors = {rank: sum(row) for rank, row in zip(ranks, zip(*by_matrix, strict=True), strict=True)}
        return [errors[shape[2]] if shape else 0.0 for shape in shapes]

    def forecast(self, layers: Sequence[Layer], world_size: int, state: Tensors | None = None) -> Bytes:
        if state is None or not self.settings.alternating:
            payload = self._bytes(layers, lambda n, m: (n + m) / (2 if self.settings.alternating else 1))
        else:
            flipped = [layer for layer in layers if _key(layer.name, "p") in state]
            others = [layer for layer in layers if layer not in flipped]
            payload = self._bytes(flipped, lambda n, m: m) + self._bytes(others, lambda n, m: n)
        return Bytes.of_means(payload, world_size)

    def _bytes(self, layers: Sequence[Layer], sent: Callable[[int, int], float]) -> float:
        """Count payload bytes; `sent` gives the elements of one column of the factors from n and m."""
        total = 0.0
        for layer in layers:
            shape = self.matrix_shape(layer.shape, layer.role)
            total += layer.numel if shape is None else matrices_of(layer)[0] * shape[2] * sent(shape[0], shape[1])
        return 4 * total


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Find orthonormal columns (..., n, r) with the span of matrices (..., n, r), r <= n, by Householder QR. They are
    finite and orthonormal for zero and dependent columns too, unlike those of Gram-Schmidt."""
    return torch.linalg.qr(matrix).Q


def low_rank_errors(
    matrix: torch.Tensor,
    ranks: Sequence[int],
    *,
    method: str = "cheaper",
    power_steps: int = 5,
    generator: torch.Generator | None = None,
) -> list[float]:
    """Compute ||M - M_r||^2 of the best rank-r approximations M_r of a matrix, for several r (L-GreCo, appendix B).

    matrix: M, (n, m).
    method: "svd": the sum of sigma_i^2 over i > r (B.1), from the eigenvalues of M M^T or M^T M, the smaller one, once
        for all ranks. "power": subspace iteration (B.2), once with the largest rank; an error is at most that of the
        paper, which iterates for each rank. "cheaper": the one with fewer operations (B.3).
    power_steps: number of steps of subspace iteration.
    generator: draws the first subspace; None: torch's default.
    """
    require(not ranks or min(ranks) >= 1, "powersgd", "rank", min(ranks, default=1), "at least 1")
    require(method in LOW_RANK_METHODS, "powersgd", "method", method, f"one of {', '.join(LOW_RANK_METHODS)}")
    if not ranks or not matrix.numel():
        return [0.0] * len(ranks)
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    largest = min(max(ranks), tall.shape[1])
    if method == "cheaper":
        by_svd, by_power = _operations(tall.shape[0], tall.shape[1], largest, power_steps)
        method = "svd" if by_svd <= by_power else "power"
    if method == "svd":
        energies = torch.linalg.eigvalsh(_gram(tall)).flip(0).clamp_(min=0.0)
    else:
        energies = _leading_energies(tall, min(largest + _SPARE_COLUMNS, tall.shape[1]), power_steps, generator)
    # What is left is the sum of the energies that are not taken; of those not known, the matrix's less the known ones.
    tail = torch.cat([energies.flip(0).cumsum(0).flip(0), energies.new_zeros(1)])
    unknown = max(0.0, _energy(tall) - float(tail[0])) if method == "power" else 0.0
    return [float(tail[min(rank, len(energies))]) + unknown for rank in ranks]


LOW_RANK_METHODS = ("cheaper", "svd", "power")
KERNEL_RANKS = 32  # up to which a kernel keeps values of all columns at once
_STACKED = 2**14  # elements of a matrix up to which, on a CPU, a call takes longer than the arithmetic
_SPARE_COLUMNS = 4  # of the subspace, so that the largest rank comes out as well as the others
_PIECE = 2**22  # elements converted to float64 at a time


def _operations(rows: int, columns: int, rank: int, power_steps: int) -> tuple[float, float]:
    """Count the operations of both methods: Gram matrix and eigenvalues; two products and one QR per step."""
    return rows * columns**2 + 3 * columns**3, power_steps * (4 * rows * columns + 4 * (rows + columns) * rank) * rank


def _gram(tall: torch.Tensor) -> torch.Tensor:
    """Compute M^T M (m, m) of a matrix (n, m), in float64."""
    total = torch.zeros(tall.shape[1], tall.shape[1], dtype=torch.float64, device=tall.device)
    for rows in tall.split(max(1, _PIECE // tall.shape[1])):
        wide = rows.double()
        total.addmm_(wide.T, wide)
    return total


def _energy(matrix: torch.Tensor) -> float:
    return sum(float(rows.double().square_().sum()) for rows in matrix.split(max(1, _PIECE // matrix.shape[1])))


def _leading_energies(tall: torch.Tensor, rank: int, steps: int, generator: torch.Generator | None) -> torch.Tensor:
    """Compute squared singular values (rank,) of M (n, m), largest first, in a subspace of power iteration."""
    right = torch.randn(tall.shape[1], rank, generator=generator, dtype=tall.dtype).to(tall.device)
    largest = tall.abs().amax()
    scaled = tall / largest if largest > 0 else tall  # neither overflows nor underflows
    for _ in range(steps):
        left = orthogonalize(scaled @ right)
        right = scaled.T @ left
    return torch.linalg.svdvals(right.double()).square_() * largest.double().square()


def normalized(rows: torch.Tensor) -> torch.Tensor:
    """Scale rows (..., r, n) to a largest magnitude of 1; rows of zeros stay."""
    largest = rows.abs().amax(-1, keepdim=True)
    return rows / torch.where(largest > 0, largest, torch.ones_like(largest))


def _with_spares(rows: torch.Tensor, spares: torch.Tensor) -> torch.Tensor:
    """Replace rows (..., r, n) of zeros by others."""
    return torch.where(rows.any(-1, keepdim=True), rows, spares)


def orthogonalized(factors: Tensors) -> Tensors:
    """Orthonormalize factors, each given as rows (..., r, n); those of one shape in one call."""
    return _together(lambda rows: orthogonalize(rows.mT).mT.contiguous(), factors)


def _together(function: Callable[..., torch.Tensor], *factors: Tensors) -> Tensors:
    """Apply a function to all factors of one shape at once: to the same names of each argument."""
    found: Tensors = {}
    for names in _of_one_shape(factors[0]):
        if len(names) == 1:
            found[names[0]] = function(*(given[names[0]] for given in factors))
        else:
            stacks = [stacked([given[name] for name in names]) for given in factors]
            found |= dict(zip(names, function(*stacks).unbind(), strict=True))
    return {name: found[name] for name in factors[0]}


@dataclass(frozen=True)
class _Stack:
    """Layers of one shape, whose matrices are computed with together.

    shape: a layer's own.
    matrices: several layers' (layers, n, m), one layer's (n, m), or an expert stack's (B, n, m).
    """

    names: Sequence[str]
    shape: tuple[int, ...]
    matrices: torch.Tensor

    @classmethod
    def of(cls, names: Sequence[str], shape: tuple[int, ...], grads: Tensors) -> _Stack:
        """Stack layers. shape: of each one's matrix, or of an expert stack's matrices."""
        first = grads[names[0]]
        if len(names) == 1:
            return cls(names, first.shape, _shaped(first, shape))
        return cls(names, first.shape, _shaped(stacked([grads[name] for name in names]), (len(names), *shape)))

    def joined(self, factors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Stack factors (..., r, n), one per layer."""
        return factors[0] if len(self.names) == 1 else stacked(factors)

    def separated(self, whole: torch.Tensor) -> Tensors:
        """Cut a tensor with the shape of all matrices into those of the layers, by name."""
        if len(self.names) == 1:
            return {self.names[0]: _shaped(whole, self.shape)}
        return dict(zip(self.names, _shaped(whole, (len(self.names), *self.shape)).unbind(), strict=True))

    def factors(self, whole: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the factors of each layer, from those of all."""
        return [whole] if len(self.names) == 1 else whole.unbind()


class _Stacks:
    """The matrices of a group's layers as stacks, and work on them by PyTorch's calls. Factors are by a stack's first
    layer. `right`: those stacks whose Q^T is given, or to be computed; of others it is P^T.
    """

    def __init__(self, stacks: Mapping[str, _Stack]) -> None:
        self._stacks = stacks
        self._matrices = {first: stack.matrices for first, stack in stacks.items()}

    def starts(self, start: Callable[[str, torch.Tensor], torch.Tensor]) -> Tensors:
        """Join factors of layers. start: that of one, from its name and matrix."""
        found: Tensors = {}
        for first, stack in self._stacks.items():
            like = stack.matrices if len(stack.names) == 1 else stack.matrices[0]
            found[first] = stack.joined([start(name, like) for name in stack.names])
        return found

    def multiplied(self, factors: Tensors, right: Collection[str], *, unit: bool = False) -> Tensors:
        """Compute factors from the other ones. unit: whether the others are normalized before."""
        factors = _together(normalized, factors) if unit else factors
        return multiplied(factors, {first: m if first in right else m.mT for first, m in self._matrices.items()})

    def orthogonalized(self, factors: Tensors, right: Collection[str]) -> Tensors:
        return orthogonalized(factors)

    def with_spares(self, factors: Tensors, spares: Tensors, right: Collection[str]) -> Tensors:
        """Replace rows of zeros by others."""
        return _together(_with_spares, factors, spares)

    def by_layer(self, factors: Tensors, right: Collection[str]) -> Tensors:
        """Return the state's entries for factors."""
        return {
            _key(name, "q" if first in right else "p"): factor
            for first, stack in self._stacks.items()
            for name, factor in zip(stack.names, stack.factors(factors[first]), strict=True)
        }

    def products(self, left: Tensors, right: Tensors, memory: InMemory) -> Tensors:
        """Compute P Q^T of each layer."""
        found: Tensors = {}
        for first, stack in self._stacks.items():
            out = memory(stack.matrices, stack.names)
            found |= stack.separated(torch.matmul(left[first].mT, right[first], out=out))
        return found

    def errors(self, left: Tensors, right: Tensors, memory: Memory) -> Tensors:
        """Compute M - P Q^T of each layer."""
        found: Tensors = {}
        for first, stack in self._stacks.items():
            # What is written between other layers is rounded in another way, and a replay has it elsewhere.
            in_place = memory.overwrites and stack.matrices.is_contiguous()
            out = stack.matrices if in_place else memory.like(stack.matrices)
            less_product = torch.addmm if out.ndim == 2 else torch.baddbmm
            found |= stack.separated(less_product(stack.matrices, left[first].mT, right[first], alpha=-1, out=out))
        return found


class _OneVector:
    """The matrices of a group's layers where they lie, and work on all of them by one kernel each, see `_Stacks`. The
    factors of a side are one vector, by the first layer's name.
    """

    def __init__(self, shapes: Shapes, rank: int, grads: Batch, kernels: LowRank) -> None:
        self._shapes, self._rank, self._grads, self._kernels = shapes, rank, grads, kernels
        self._vector, self._first = grads.vector, next(iter(shapes))

    def starts(self, start: Callable[[str, torch.Tensor], torch.Tensor]) -> Tensors:
        given = {name: start(name, _shaped(self._grads[name], shape)) for name, shape in self._shapes.items()}
        return {self._first: concatenate(given)}

    def multiplied(self, factors: Tensors, right: Collection[str], *, unit: bool = False) -> Tensors:
        [given] = factors.values()
        return {self._first: self._kernels.multiplied(self._vector, given, self._first in right, unit=unit)}

    def orthogonalized(self, factors: Tensors, right: Collection[str]) -> Tensors:
        return {first: self._kernels.orthonormal(given, first in right) for first, given in factors.items()}

    def with_spares(self, factors: Tensors, spares: Tensors, right: Collection[str]) -> Tensors:
        return {
            first: self._kernels.with_spares(given, spares[first], first in right) for first, given in factors.items()
        }

    def by_layer(self, factors: Tensors, right: Collection[str]) -> Tensors:
        of_right, [whole] = self._first in right, factors.values()
        shapes = [
            (*shape[:-2], min(*shape[-2:], self._rank), shape[-1 if of_right else -2])
            for shape in self._shapes.values()
        ]
        parts = whole.split(list(map(math.prod, shapes)))
        names = [_key(name, "q" if of_right else "p") for name in self._shapes]
        return {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}

    def products(self, left: Tensors, right: Tensors, memory: InMemory) -> Tensors:
        out = memory(self._vector, list(self._grads))
        return self._cut(self._kernels.product(left[self._first], right[self._first], out))

    def errors(self, left: Tensors, right: Tensors, memory: Memory) -> Tensors:
        out = self._vector if memory.overwrites else memory.like(self._vector)
        return self._cut(self._kernels.product(left[self._first], right[self._first], out, self._vector))

    def _cut(self, vector: torch.Tensor) -> Tensors:
        parts = self._grads.cut(vector)
        return {name: parts[name] for name in self._shapes}


def multiplied(factors: Tensors, matrices: Tensors) -> Tensors:
    """Compute factors[name] @ matrices[name]; on a GPU in one call per shape, which is worth its copy."""
    if all(matrix.is_cpu for matrix in matrices.values()):
        return {
            name: _aligned(factor) @ (_aligned(matrices[name]) if factor.shape[-2] == 1 else matrices[name])
            for name, factor in factors.items()
        }
    products: Tensors = {}
    for names in _of_one_shape(matrices, factors):
        left, right = (stacked([tensors[name] for name in names]) for tensors in (factors, matrices))
        products |= dict(zip(names, torch.matmul(left, right), strict=True))
    return {name: products[name] for name in factors}


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Copy rows that begin amid 16 bytes, or have others between them: BLAS of some CPUs sums products of few rows in
    another order there."""
    turned = tensor.stride(-1) > tensor.stride(-2)
    rows = tensor.mT if turned else tensor
    if rows.is_contiguous() and rows.data_ptr() % 16 == 0:
        return tensor
    rows = rows.clone(memory_format=torch.contiguous_format)
    return rows.mT if turned else rows


def _shaped(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return tensor if tensor.shape == shape else tensor.reshape(tuple(shape))


def _of_one_shape(*tensors: Tensors) -> list[list[str]]:
    """List the names of tensors of one shape and dtype, in each argument."""
    groups: dict[Any, list[str]] = {}
    for name in tensors[0]:
        groups.setdefault(tuple((one[name].shape, one[name].dtype) for one in tensors), []).append(name)
    return list(groups.values())


def _key(name: str, factor: str) -> str:
    return f"{name}/{factor}"
