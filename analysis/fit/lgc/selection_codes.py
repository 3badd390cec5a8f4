"""Ways to send selected values without an autoencoder, at their bytes: what LGC must beat.

Every one says what becomes of each rank's values; the error of their average over ranks is what is compared. Scalar
quantizers send more values' worth than a code of a quarter of the floats: int8 has just its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from gradlab.analysis.fit.lgc.selections import Selections
from gradlab.codecs.block_scaled import BlockScaled
from gradlab.coding.bits import packed_bytes
from gradlab.collectives import all_gather_wire_bytes, all_reduce_wire_bytes, broadcast_wire_bytes
from gradlab.layout import Layer
from gradlab.learning.slice_pca import principal_axes

_BLOCK = 4  # values that a code of a quarter of the floats has one for


@dataclass(frozen=True)
class Code:
    """decoded: what becomes of selected values, (T, K, n); payload_bytes: of a rank, mean over ranks and beside the
    positions; wire_bytes: what rank 0 sends of it."""

    name: str
    decoded: Callable[[Selections], torch.Tensor]
    payload_bytes: float
    wire_bytes: float


def codes_without_learning(
    learned: Selections, selections: Selections, world_size: int, code_numel: int, in_order: bool = False
) -> list[Code]:
    """Zeros; the largest quarter; block means of 4, in order and sorted; PCA of code_numel axes, fitted where the
    autoencoder is; int8 and int4, rank by rank.

    Largest and sorted are so by the leader's values, which are told once; or, at own positions, by each rank's own,
    which every rank tells. Values at shared positions can be reduced, those at own ones are gathered.
    learned: what may be learned from; selections: for the number of values; in_order: whether they are sorted by the
    leader's values.
    """
    count, shared = selections.count, selections.shared
    quarter = -(-count // _BLOCK)

    def reduced(size: int) -> float:
        return float((all_reduce_wire_bytes if shared else all_gather_wire_bytes)(size, world_size))

    def code(name: str, decoded: Callable[[Selections], torch.Tensor], values: int, told: int = 0) -> Code:
        """values: floats that a rank sends; told: bytes of their order."""
        if not shared:
            return Code(name, decoded, 4 * values + told, reduced(4 * values + told))
        wire = reduced(4 * values) + broadcast_wire_bytes(told, 0, 0, world_size)
        return Code(name, decoded, 4 * values + told / world_size, wire)

    axes = max(0, min(code_numel, count, len(learned) * learned.values.shape[1] - 1))
    # Where positions come in the order of the leader's values already, it need not be told.
    order = 0 if in_order else packed_bytes(count, max(1, (count - 1).bit_length()))
    found = [
        code("zeros (compressed layers stand still)", lambda some: torch.zeros_like(some.values), 0),
        code("largest quarter", _largest_quarter, quarter, packed_bytes(count, 1)),
        code("block means of 4", lambda some: _means_of_blocks(some.values), quarter),
        code("sorted block means of 4", _sorted_block_means, quarter, order),
        code(f"PCA, {axes} axes", _projected(learned, axes), axes),
    ]
    for dtype in ("int8", "int4"):
        codec = BlockScaled(BlockScaled.Settings(dtype))
        size = codec.payload_bytes([Layer("values", (count,))], world_size)
        wire = all_gather_wire_bytes(int(size), world_size)
        found.append(Code(f"{dtype}, scale per 256", _quantized(codec), size, wire))
    return found


def _largest_quarter(some: Selections) -> torch.Tensor:
    kept = some.known.abs().topk(-(-some.count // _BLOCK), dim=-1).indices
    return torch.zeros_like(some.values).scatter_(-1, kept, some.values.gather(-1, kept))


def _sorted_block_means(some: Selections) -> torch.Tensor:
    order = some.known.argsort(dim=-1)
    found = _means_of_blocks(some.values.gather(-1, order))
    return torch.zeros_like(found).scatter_(-1, order, found)


def _means_of_blocks(values: torch.Tensor) -> torch.Tensor:
    count = values.shape[-1]
    blocks = functional.pad(values, (0, -count % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    present = functional.pad(torch.ones(count), (0, -count % _BLOCK)).view(-1, _BLOCK).sum(1)
    return (blocks.sum(-1) / present).repeat_interleave(_BLOCK, dim=-1)[..., :count]


def _projected(learned: Selections, axes: int) -> Callable[[Selections], torch.Tensor]:
    """On principal axes of all ranks' vectors."""
    basis = principal_axes(learned.values.flatten(0, 1))[1][:, :axes].float()
    return lambda some: some.values @ basis @ basis.T


def _quantized(codec: BlockScaled) -> Callable[[Selections], torch.Tensor]:
    def decoded(some: Selections) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        found = torch.zeros_like(some.values)
        for total, values in zip(found.flatten(0, 1), some.values.flatten(0, 1), strict=True):
            codec.add_all(total, [codec.compress(values, generator)], 1.0)
        return found

    return decoded
