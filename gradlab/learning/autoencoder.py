"""LGC's autoencoders: one-dimensional convolutions that code a vector in a quarter of its length, and back.

Abrahamyan, Chen, Bekoulis, Deligiannis, "Learned gradient compression for distributed deep learning", IEEE TNNLS
2021: section IV-C, Tables I and II. All weights are one vector, which an artifact holds and a broadcast sends; the
mathematics are functions of that vector.

The tables contradict each other: the encoder's strides divide the length by 16, the decoder's multiply it by 32. Two
readings are offered (`RESOLUTIONS`). "deconv1": the first deconvolution has stride 1. "conv5": the encoder's last
convolution has stride 2, so that a code is half as long. The paper names leaky ReLU without its slope, which is 0.01
here. It follows every layer but the last of the encoder and of the decoder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from gradlab.codec import Tensors

RESOLUTIONS = ("deconv1", "conv5")
_SLOPE = 0.01
# Channels out, kernel size.
_ENCODER = ((64, 3), (128, 3), (256, 3), (64, 3), (4, 1))
_DECODER = ((4, 3), (32, 3), (64, 3), (128, 3), (32, 3))


@dataclass(frozen=True)
class Architecture:
    """The shape of an autoencoder.

    resolution: the reading of the tables, one of `RESOLUTIONS`.
    decoders: 1 for the ring; one per rank for the server.
    innovation: whether the innovation is a further input of the decoders' last convolution, as the server needs it.
    """

    resolution: str = "deconv1"
    decoders: int = 1
    innovation: bool = False

    @property
    def multiple(self) -> int:
        """The length, in elements, to a multiple of which vectors are padded with zeros."""
        return 32 if self.resolution == "conv5" else 16

    def padded(self, numel: int) -> int:
        """Return the length of a padded vector of `numel` elements."""
        return -(-numel // self.multiple) * self.multiple

    def code_numel(self, numel: int) -> int:
        """Return the number of values in the code of a vector of `numel` elements."""
        return _ENCODER[-1][0] * self.padded(numel) // self.multiple

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every weight by name, in the order of the weight vector."""
        shapes: dict[str, tuple[int, ...]] = {}
        inputs = 1
        for number, (outputs, size) in enumerate(_ENCODER, 1):
            shapes |= _layer(f"encoder.conv{number}", (outputs, inputs, size), outputs)
            inputs = outputs
        for decoder in range(self.decoders):
            inputs = _ENCODER[-1][0]
            for number, (outputs, size) in enumerate(_DECODER, 1):
                # Transposed convolutions have their inputs first.
                shapes |= _layer(f"decoder{decoder}.deconv{number}", (inputs, outputs, size), outputs)
                inputs = outputs
            shapes |= _layer(f"decoder{decoder}.conv", (1, inputs + self.innovation, 1), 1)
        return shapes

    @property
    def numel(self) -> int:
        """Number of weights in all."""
        return sum(math.prod(shape) for shape in self.shapes().values())

    def initial(self, generator: torch.Generator) -> torch.Tensor:
        """Draw a weight vector as PyTorch's convolutions do, uniform within 1 / sqrt(inputs times kernel size)."""
        weights: Tensors = {}
        bound = 1.0
        for name, shape in self.shapes().items():
            if name.endswith(".weight"):
                # PyTorch takes the second dimension as inputs, in a transposed convolution too.
                bound = 1 / math.sqrt(shape[1] * shape[2])
            weights[name] = torch.empty(shape).uniform_(-bound, bound, generator=generator)
        return self.joined(weights)

    def joined(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Join all weights into one vector (numel,)."""
        return torch.cat([weights[name].reshape(-1) for name in self.shapes()])

    def separated(self, vector: torch.Tensor) -> Tensors:
        """Split a weight vector (numel,) into weights by name; the inverse of `joined`."""
        shapes = self.shapes()
        parts = vector.split([math.prod(shape) for shape in shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}

    # --- eqs. (3), (4), (8), (10) ---

    def encode(self, weights: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """E_c: encode vectors (..., length), a multiple of `multiple`, as codes (..., 4, length / multiple) by weights
        (numel,)."""
        named, x = self.separated(weights), vectors.reshape(-1, 1, vectors.shape[-1])
        last = len(_ENCODER)
        for number, (_, size) in enumerate(_ENCODER, 1):
            stride = 2 if number < last or self.resolution == "conv5" else 1
            weight, bias = _of(named, f"encoder.conv{number}")
            x = functional.conv1d(x, weight, bias, stride=stride, padding=size // 2)
            x = functional.leaky_relu(x, _SLOPE) if number < last else x
        return x.reshape(*vectors.shape[:-1], *x.shape[1:])

    def decode(
        self,
        weights: torch.Tensor,
        codes: torch.Tensor,
        decoder: int = 0,
        innovation: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """D_c: decode codes (..., 4, length / multiple) to vectors (..., length) by weights (numel,); the server's
        decoders also take an innovation (..., length)."""
        apart = None if innovation is None else innovation.reshape(-1, 1, innovation.shape[-1])
        x = self._decoded(self._decoders(weights, [decoder]), codes.reshape(-1, *codes.shape[-2:]), apart)
        return x.reshape(*codes.shape[:-2], x.shape[-1])

    def decode_each(self, weights: torch.Tensor, codes: torch.Tensor, innovations: torch.Tensor) -> torch.Tensor:
        """Decode codes (..., 4, length / multiple) by each of K decoders, with its innovation, (..., K, length)."""
        if codes.device.type == "cpu":  # grouped convolutions take up to 4 times as long there
            each = [self.decode(weights, codes, k, one) for k, one in enumerate(innovations.unbind(-2))]
            return torch.stack(each, -2)
        return self.decode_grouped(weights, codes, innovations)

    def decode_grouped(self, weights: torch.Tensor, codes: torch.Tensor, innovations: torch.Tensor) -> torch.Tensor:
        """Do what `decode_each` does in as many operations as one decoder takes: each is a group of the channels."""
        count = innovations.shape[-2]
        x = codes.reshape(-1, *codes.shape[-2:]).repeat(1, count, 1)
        apart = innovations.reshape(-1, *innovations.shape[-2:])
        return self._decoded(self._decoders(weights, range(count)), x, apart, count).reshape(innovations.shape)

    def _decoders(self, weights: torch.Tensor, decoders: Sequence[int]) -> Tensors:
        """Join each weight of some decoders by its first dimension, in one operation: by name, less the decoder's."""
        named = self.separated(weights)
        of_one = [name.partition(".")[2] for name in named if name.startswith("decoder0.")]
        parts = {name: [named[f"decoder{k}.{name}"] for k in decoders] for name in of_one}
        if len(decoders) == 1:
            return {name: part for name, (part,) in parts.items()}
        joined = torch.cat([part.reshape(-1) for same in parts.values() for part in same])
        sizes = [len(same) * same[0].numel() for same in parts.values()]
        pairs = zip(parts.items(), joined.split(sizes), strict=True)
        return {name: one.view(-1, *same[0].shape[1:]) for (name, same), one in pairs}

    def _decoded(
        self, named: Tensors, x: torch.Tensor, innovation: torch.Tensor | None, groups: int = 1
    ) -> torch.Tensor:
        """Decode codes (B, groups * 4, length / multiple) by so many decoders' weights to (B, groups, length)."""
        for number in range(1, len(_DECODER) + 1):
            stride = 1 if number == 1 and self.resolution == "deconv1" else 2
            weight, bias = _of(named, f"deconv{number}")
            x = functional.conv_transpose1d(
                x, weight, bias, stride, padding=1, output_padding=stride - 1, groups=groups
            )
            x = functional.leaky_relu(x, _SLOPE)
        weight, bias = _of(named, "conv")
        if innovation is None:
            return functional.conv1d(x, weight, bias, groups=groups)
        return functional.conv1d(x, weight[:, :-1], bias, groups=groups) + weight[:, -1] * innovation


def _layer(name: str, shape: tuple[int, ...], outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": (outputs,)}


def _of(weights: Mapping[str, torch.Tensor], layer: str) -> tuple[torch.Tensor, torch.Tensor]:
    return weights[f"{layer}.weight"], weights[f"{layer}.bias"]


# --- losses -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    """Settings of the autoencoder's loss.

    reduction: "sum" of squares, as in the equations, or their "mean" over the decoded elements.
    similarity: lambda_2 of eq. (7), for the server.
    """

    reduction: str = "sum"
    similarity: float = 0.5


def ring_loss(architecture: Architecture, weights: torch.Tensor, vectors: torch.Tensor, loss: Loss) -> torch.Tensor:
    """Eq. (11): compute the squared distance of the decoded average code from the average of vectors (K, length) of K
    ranks, or the mean over (B, K, length) of B iterations."""
    decoded = architecture.decode(weights, architecture.encode(weights, vectors).mean(-3))
    squares = (decoded - vectors.mean(-2)).square()
    return squares.sum() / (squares.numel() if loss.reduction == "mean" else vectors[..., 0, 0].numel())


def server_loss(
    architecture: Architecture,
    weights: torch.Tensor,
    vectors: torch.Tensor,
    innovations: torch.Tensor,
    common: int | torch.Tensor,
    loss: Loss,
) -> torch.Tensor:
    """Eqs. (5) to (7): compute the squared distance of decoded vectors from the vectors, and the similarity of codes.

    vectors, innovations: (K, length) of K ranks, or (B, K, length) of B iterations, whose losses are averaged.
    common: the rank whose code all decoders receive, or (B,) such ranks for B iterations.
    """
    batch, chosen = vectors.reshape(-1, *vectors.shape[-2:]), torch.as_tensor(common).reshape(-1)
    apart = innovations.reshape(batch.shape)
    codes = architecture.encode(weights, batch)
    code = codes[torch.arange(len(batch)), chosen]
    total = (batch - architecture.decode_each(weights, code, apart)).square().sum()
    if loss.similarity and batch.shape[1] > 1:
        # Over all ordered pairs k != m, as eq. (5) is written.
        total = total + loss.similarity * (codes[:, :, None] - codes[:, None]).square().sum()
    return total / (batch.numel() if loss.reduction == "mean" else len(batch))


# --- training ---------------------------------------------------------------------------------------------------------

OPTIMIZERS = {"sgd": (), "adam": ("count", "first", "second")}  # optimizer -> names of its state tensors
_BETAS, _EPSILON = (0.9, 0.999), 1e-8


def optimized(
    name: str, learning_rate: float, weights: torch.Tensor, gradient: torch.Tensor, state: Tensors
) -> tuple[torch.Tensor, Tensors]:
    """Take one step of "sgd", plain as in the paper, or "adam"; return the new weights (numel,) and the new state,
    which is empty at first."""
    if name == "sgd":
        return weights - learning_rate * gradient, {}
    count = state.get("count", weights.new_zeros(())) + 1
    first = state.get("first", torch.zeros_like(weights)).lerp(gradient, 1 - _BETAS[0])
    second = state.get("second", torch.zeros_like(weights)).lerp(gradient * gradient, 1 - _BETAS[1])
    scale = (second / (1 - _BETAS[1] ** count)).sqrt_() + _EPSILON
    moved = weights - learning_rate / (1 - _BETAS[0] ** count) * first / scale
    return moved, {"count": count, "first": first, "second": second}


def gradient_of(loss: Callable[[torch.Tensor], torch.Tensor], weights: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Compute the value and the gradient (numel,) of a loss at weights (numel,), in the calling thread, on a GPU too:
    autograd's thread of that GPU may be held by DDP's backward, which waits for this very gradient."""
    with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
        leaf = weights.detach().requires_grad_()
        value = loss(leaf)
        (gradient,) = torch.autograd.grad(value, leaf)
    return float(value.detach()), gradient
