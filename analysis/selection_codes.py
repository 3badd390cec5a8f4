"""Ways to send selected values without an autoencoder, at their bytes: what LGC must beat.

Every one gives the average over ranks of what each sends; the error of that average is what is compared. Scalar
quantizers send more values' worth than a code of a quarter of the floats: int8 has just its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gradlab.analysis.selections import Selections
from gradlab.bits import packed_bytes
from gradlab.codecs.block_scaled import BlockScaled
from gradlab.collectives import all_gather_wire_bytes, all_reduce_wire_bytes, broadcast_wire_bytes
from gradlab.layout import Layer
from gradlab.slice_pca import principal_axes

_BLOCK = 4  # values that a code of a quarter of the floats has one for


@dataclass(frozen=True)
class Code:
    """averaged: what becomes of the average of selections, (T, count); payload_bytes: of a rank, mean over ranks and
    beside the positions; wire_bytes: what rank 0 sends of it."""

    name: str
    averaged: Callable[[Selections], torch.Tensor]
    payload_bytes: float
    wire_bytes: float


def codes_without_learning(learned: Selections, selections: Selections, world_size: int, code_numel: int) -> list[Code]:
    """Zeros; the largest quarter; block means of 4, in order and sorted by the leader's values; PCA of code_numel
    axes, fitted where the autoencoder is; int8 and int4, rank by rank.

    learned: what may be learned from; selections: for the number of values.
    """
    count = int(selections.values.shape[-1])
    quarter = -(-count // _BLOCK)
    order_bytes = packed_bytes(count, max(1, (count - 1).bit_length())) / world_size
    chosen_bytes = packed_bytes(count, 1) / world_size
    reduced = all_reduce_wire_bytes(4 * quarter, world_size)
    told = broadcast_wire_bytes(int(order_bytes * world_size), 0, 0, world_size)
    found = [
        Code("zeros (compressed layers stand still)", lambda some: torch.zeros_like(some.values[:, 0]), 0.0, 0.0),
        Code("largest quarter", _largest_quarter, 4 * quarter + chosen_bytes, reduced + told / 8),
        Code("block means of 4", _block_means, 4.0 * quarter, reduced),
        Code("sorted block means of 4", _sorted_block_means, 4 * quarter + order_bytes, reduced + told),
        _pca(learned, min(code_numel, len(learned) - 1), world_size),
    ]
    for dtype in ("int8", "int4"):
        codec = BlockScaled(BlockScaled.Settings(dtype))
        size = codec.payload_bytes([Layer("values", (count,))], world_size)
        found.append(
            Code(f"{dtype}, scale per 256", _quantized(codec), size, all_gather_wire_bytes(int(size), world_size))
        )
    return found


def _largest_quarter(some: Selections) -> torch.Tensor:
    """The leader's largest; every rank's values there."""
    true, count = some.values.mean(1), some.values.shape[-1]
    kept = some.led.abs().topk(-(-count // _BLOCK), dim=1).indices
    return torch.zeros_like(true).scatter_(1, kept, true.gather(1, kept))


def _block_means(some: Selections) -> torch.Tensor:
    return _means_of_blocks(some.values.mean(1))


def _sorted_block_means(some: Selections) -> torch.Tensor:
    order = some.led.argsort(dim=1)
    found = _means_of_blocks(some.values.mean(1).gather(1, order))
    return torch.zeros_like(found).scatter_(1, order, found)


def _means_of_blocks(values: torch.Tensor) -> torch.Tensor:
    count = values.shape[1]
    blocks = torch.nn.functional.pad(values, (0, -count % _BLOCK)).view(len(values), -1, _BLOCK)
    present = torch.nn.functional.pad(torch.ones(count), (0, -count % _BLOCK)).view(-1, _BLOCK).sum(1)
    means = blocks.sum(2) / present
    return means.repeat_interleave(_BLOCK, dim=1)[:, :count]


def _pca(learned: Selections, axes: int, world_size: int) -> Code:
    basis = principal_axes(learned.values.mean(1))[1][:, : max(0, axes)].float()

    def averaged(some: Selections) -> torch.Tensor:
        true = some.values.mean(1)
        return true @ basis @ basis.T

    size = 4 * basis.shape[1]
    return Code(f"PCA, {basis.shape[1]} axes", averaged, size, all_reduce_wire_bytes(size, world_size))


def _quantized(codec: BlockScaled) -> Callable[[Selections], torch.Tensor]:
    def averaged(some: Selections) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        found = torch.zeros_like(some.values[:, 0])
        for total, ranks in zip(found, some.values, strict=True):
            payloads = [codec.compress(vector, generator) for vector in ranks]
            codec.add_all(total, payloads, 1.0 / len(payloads))
        return found

    return averaged
