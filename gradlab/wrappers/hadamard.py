"""Rotation before quantization: random signs and a Walsh-Hadamard transform spread a large value over its block.

Suresh, Yu, Kumar, McMahan, "Distributed mean estimation with limited communication", ICML 2017, section 3 (a random
rotation H D before quantization); Jia et al., "SDP4Bit: Toward 4-bit communication quantization in sharded data
parallelism for LLM training", NeurIPS 2024 (within blocks, before 4 bits).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from gradlab.codec import Batch, Codec, Compressor, Context, Deferred, Exchanged, Tensors
from gradlab.codec.exchanged import run_codec
from gradlab.codec.settings import setting
from gradlab.codec.wrapper import Wrapper
from gradlab.collectives import Coroutine
from gradlab.errors import GradlabError


class Hadamard(Wrapper):
    """The codec gets y = H D x in place of x; its result y' counts as D H y'.

    D is a diagonal of random signs, the same on all ranks and in all iterations. H is the Walsh-Hadamard transform of
    each block of `block` elements, divided by sqrt(block). The rest of a layer is cut into smaller powers of two.
    Both are orthonormal: the codec's error is as long before the rotation back as after it, and no element is added.
    A quantizer with one scale per block or layer no longer spends its levels on few large values.

    It stands next to the codec, inside every other wrapper, so that residuals are those of the gradient. It takes
    codecs that quantize every value of a rank's own gradient, such as block_scaled, qsgd, sign and terngrad.

    >>> gradient = torch.zeros(256).index_fill(0, torch.tensor([3]), 100.0) + torch.randn(256)
    >>> plain = codecs.make("qsgd", bits=4)
    >>> plain.apply(gradient).relative_error > wrappers.get("hadamard")(plain).apply(gradient).relative_error
    True

    Raises:
        GradlabError: for a block that is no power of two, a wrapper inside, and any other codec.
    """

    name = "hadamard"

    @dataclass(frozen=True)
    class Settings:
        block: int = setting(256, least=2, most=2**16, unit="elements", help="of a transform, a power of two")

    def __init__(self, codec: Codec, settings: Any = None) -> None:
        super().__init__(codec, settings)
        block = self.settings.block
        if block & (block - 1):
            raise GradlabError(f"hadamard: block = {block}, expected a power of two")
        if isinstance(codec, Wrapper):
            raise GradlabError(
                f"wrapper {codec.name} inside hadamard: a rotation stands next to the codec, name it last"
            )
        alone = isinstance(codec, Compressor) and codec.about.family == "quantization"
        if not alone and not codec.traits.rotatable:
            raise GradlabError(
                f"wrapper hadamard around {codec.name}: a rotation is for codecs that quantize every value of a rank's "
                "own gradient, such as block_scaled, qsgd and sign"
            )

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        if context.dense:
            return (yield from run_codec(self.codec, grads, state, context))
        signs = draw_signs(self.settings.block, context.random.shared("hadamard", every_iteration=False))
        rotated = grads.like({name: rotate(grad, signs.to(grad)) for name, grad in grads.items()})
        done = yield from self.codec.exchange(rotated, state, context)

        def back(tensors: Mapping[str, torch.Tensor]) -> Tensors:
            return {name: rotate_back(tensors[name], signs.to(grad)) for name, grad in grads.items()}

        return replace(done, mean=back(done.mean), own=Deferred(grads, lambda: back(done.own)))


def draw_signs(block: int, generator: torch.Generator) -> torch.Tensor:
    """Draw a block's signs: (block,), 1 or -1."""
    return torch.randint(2, (block,), generator=generator) * 2 - 1


def rotate(tensor: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Return H D x for x of any shape, with a block's signs (block,), as a new tensor."""
    flat = tensor.reshape(-1)
    return _joined([transform(piece * signs[: piece.shape[1]]) for piece in _blocks(flat, len(signs))], tensor)


def rotate_back(tensor: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Return D H y, the inverse of `rotate`, for y of any shape."""
    flat = tensor.reshape(-1)
    return _joined([transform(piece) * signs[: piece.shape[1]] for piece in _blocks(flat, len(signs))], tensor)


def transform(blocks: torch.Tensor) -> torch.Tensor:
    """Return the orthonormal Walsh-Hadamard transform of rows (count, size), size a power of two, in log2(size) passes.
    Sums of two at a time, in one order, give the same bits on every rank, whatever its number of threads."""
    size = blocks.shape[1]
    values, other = blocks.clone(memory_format=torch.contiguous_format), torch.empty_like(blocks).contiguous()
    step = 1
    while step < size:
        before, after = values.view(-1, 2, step), other.view(-1, 2, step)
        torch.add(before[:, 0], before[:, 1], out=after[:, 0])
        torch.sub(before[:, 0], before[:, 1], out=after[:, 1])
        values, other = other, values
        step *= 2
    return values.mul_(size**-0.5)


def _blocks(flat: torch.Tensor, block: int) -> Iterator[torch.Tensor]:
    """Cut a vector into whole blocks (count, block), and the rest into ever smaller powers of two (1, size)."""
    whole = flat.numel() // block * block
    if whole:
        yield flat[:whole].view(-1, block)
    start = whole
    while start < flat.numel():
        size = 1 << ((flat.numel() - start).bit_length() - 1)
        yield flat[start : start + size].view(1, size)
        start += size


def _joined(pieces: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.cat([piece.reshape(-1) for piece in pieces]).view(like.shape) if pieces else like.clone()
