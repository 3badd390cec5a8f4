"""PowerSGD: a rank-r approximation of each gradient matrix by one step of power iteration from the last one.

Vogels, Karimireddy, Jaggi, "PowerSGD: Practical low-rank gradient compression", NeurIPS 2019, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradlab.codec import Codec, Context, Exchanged, Tensors
from gradlab.codec_settings import require
from gradlab.collectives import Coroutine, Mean
from gradlab.layout import Layer


class PowerSGD(Codec):
    """P = orth(mean(M Q)); Q = mean(M^T P); mean = P Q^T (Algorithm 1, lines 3 to 7).

    A layer of shape (n, ...) is the matrix M of shape (n, m), m = the rest. Layers of fewer than two dimensions, and
    those whose factors would be no smaller than the matrix by `minimum_ratio`, are sent dense with the first factor.
    """

    name = "powersgd"
    family = "low rank"

    @dataclass(frozen=True)
    class Settings:
        """rank: r, columns of P and Q; minimum_ratio: least n m / (r (n + m)) at which a layer is compressed;
        warm_start: begin from the last Q (the paper's choice) or from a fresh random one."""

        rank: int = 4
        minimum_ratio: float = 1.0
        warm_start: bool = True

        def __post_init__(self) -> None:
            require(self.rank >= 1, "powersgd", "rank", self.rank, "at least 1")
            require(self.minimum_ratio > 0, "powersgd", "minimum_ratio", self.minimum_ratio, "above 0")

    def matrix_shape(self, shape: Sequence[int]) -> tuple[int, int, int] | None:
        """(n, m, r) of a layer that is compressed, or None for one that is sent dense."""
        if len(shape) < 2 or 0 in shape:
            return None
        n, m = shape[0], Layer("", tuple(shape[1:])).numel
        rank = min(n, m, self.settings.rank)
        return (n, m, rank) if n * m > self.settings.minimum_ratio * rank * (n + m) else None

    def exchange(self, grads: Tensors, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        shapes = {name: self.matrix_shape(grad.shape) for name, grad in grads.items()}
        matrices = {name: grads[name].reshape(s[0], s[1]) for name, s in shapes.items() if s is not None}
        dense = {name: grad for name, grad in grads.items() if name not in matrices}
        # Factors are kept as rows, P^T (r, n) and Q^T (r, m): products with a wide matrix are then 5 to 9 times faster.
        start = {name: self._start(name, shapes[name], state, context, m) for name, m in matrices.items()}
        left = {name: start[name] @ m.T for name, m in matrices.items()}
        answers = yield tuple(Mean(tensor) for tensor in (*left.values(), *dense.values()))
        left = {name: orthogonalize(p.T).T for name, p in zip(left, answers[: len(left)], strict=True)}
        mean, own = dict(zip(dense, answers[len(left) :], strict=True)), dict(dense)
        right = {name: left[name] @ matrix for name, matrix in matrices.items()}
        answers = (yield tuple(Mean(q) for q in right.values())) if right else ()
        last = dict(zip(right, answers, strict=True))
        for name, q in last.items():
            for product, factor in ((mean, q), (own, right[name])):
                out = context.workspace.empty_like(matrices[name])
                product[name] = torch.mm(left[name].T, factor, out=out).view(grads[name].shape)
        # A gradient of zeros says nothing of the next one, but a Q of zeros could hide rows of it for ever.
        kept = {name: torch.where(q.any(1, keepdim=True), q, start[name]) for name, q in last.items()}
        return Exchanged(mean, own, {_state_key(name): q for name, q in kept.items()})

    def _start(
        self, name: str, shape: tuple[int, int, int] | None, state: Tensors, context: Context, like: torch.Tensor
    ) -> torch.Tensor:
        """Q^T (r, m): the last one, or Gaussian values that every rank draws alike."""
        assert shape is not None
        if self.settings.warm_start and _state_key(name) in state:
            return state[_state_key(name)].to(like.dtype)
        generator = context.shared_generator(name, every_iteration=not self.settings.warm_start)
        return torch.randn(shape[2], shape[1], generator=generator, dtype=like.dtype).to(like.device)

    def payload_bytes(self, layers: Sequence[Layer], world_size: int) -> float:
        total = 0
        for layer in layers:
            shape = self.matrix_shape(layer.shape)
            total += layer.numel if shape is None else shape[2] * (shape[0] + shape[1])
        return 4 * total


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns (n, r) with the span of a matrix (n, r), r <= n, by Householder QR.

    A zero matrix or dependent columns still give finite orthonormal columns, unlike Gram-Schmidt without care.
    """
    return torch.linalg.qr(matrix).Q


def _state_key(name: str) -> str:
    return f"{name}/q"
