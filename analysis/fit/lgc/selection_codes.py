"""Ways to send selected values without an autoencoder, at their bytes: what LGC must beat.

Each code decodes every rank's values. Codes are compared by the error of the average over ranks. Scalar
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

_BLOCK = 4  # values per float of a code that has a quarter of the floats


@dataclass(frozen=True)
class Code:
    """A way to send selected values.

    decoded: gives the values (T, K, n) after decoding.
    payload_bytes: per rank, mean over ranks, without the positions.
    wire_bytes: the part that rank 0 sends.
    """

    name: str
    decoded: Callable[[Selections], torch.Tensor]
    payload_bytes: float
    wire_bytes: float


def codes_without_learning(
    learned: Selections, selections: Selections, world_size: int, code_numel: int, in_order: bool = False
) -> list[Code]:
    """List the codes that an autoencoder is compared with: zeros, a quarter, block means, PCA, int8 and int4.
    At shared positions the leader sends the order once, and values are reduced; else each rank sends its own.
    """
    count, shared = selections.count, selections.shared
    quarter = -(-count // _BLOCK)

    def reduced(size: int) -> float:
        return float((all_reduce_wire_bytes if shared else all_gather_wire_bytes)(size, world_size))

    def code(name: str, decoded: Callable[[Selections], torch.Tensor], values: int, order: int = 0) -> Code:
        """values: floats that a rank sends; order: bytes of their order."""
        if not shared:
            return Code(name, decoded, 4 * values + order, reduced(4 * values + order))
        wire = reduced(4 * values) + broadcast_wire_bytes(order, 0, 0, world_size)
        return Code(name, decoded, 4 * values + order / world_size, wire)

    axes = max(0, min(code_numel, count, len(learned) * learned.values.shape[1] - 1))
    # An order that positions have already is not sent.
    sorting = 0 if in_order else packed_bytes(count, max(1, (count - 1).bit_length()))
    codes = [
        code("zeros (compressed layers stand still)", lambda selected: torch.zeros_like(selected.values), 0),
        code("largest quarter", _largest_quarter, quarter, packed_bytes(count, 1)),
        code("block means of 4", lambda selected: _means_of_blocks(selected.values), quarter),
        code("sorted block means of 4", _sorted_block_means, quarter, sorting),
        code(f"PCA, {axes} axes", _projected(learned, axes), axes),
    ]
    for dtype in ("int8", "int4"):
        codec = BlockScaled(BlockScaled.Settings(dtype, aggregation="gather"))
        size = codec.forecast([Layer("values", (count,))], world_size).payload
        wire = all_gather_wire_bytes(int(size), world_size)
        codes.append(Code(f"{dtype}, scale per 256", _quantized(codec), size, wire))
    return codes


def _largest_quarter(selections: Selections) -> torch.Tensor:
    kept = selections.known.abs().topk(-(-selections.count // _BLOCK), dim=-1).indices
    return torch.zeros_like(selections.values).scatter_(-1, kept, selections.values.gather(-1, kept))


def _sorted_block_means(selections: Selections) -> torch.Tensor:
    order = selections.known.argsort(dim=-1)
    means = _means_of_blocks(selections.values.gather(-1, order))
    return torch.zeros_like(means).scatter_(-1, order, means)


def _means_of_blocks(values: torch.Tensor) -> torch.Tensor:
    count = values.shape[-1]
    blocks = functional.pad(values, (0, -count % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    present = functional.pad(torch.ones(count), (0, -count % _BLOCK)).view(-1, _BLOCK).sum(1)
    return (blocks.sum(-1) / present).repeat_interleave(_BLOCK, dim=-1)[..., :count]


def _projected(learned: Selections, axes: int) -> Callable[[Selections], torch.Tensor]:
    """Project on principal axes of all ranks' vectors."""
    basis = principal_axes(learned.values.flatten(0, 1))[1][:, :axes].float()
    return lambda selections: selections.values @ basis @ basis.T


def _quantized(codec: BlockScaled) -> Callable[[Selections], torch.Tensor]:
    def decoded(selections: Selections) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        totals = torch.zeros_like(selections.values)
        for total, values in zip(totals.flatten(0, 1), selections.values.flatten(0, 1), strict=True):
            codec.average_into(total, [codec.compress(values, generator)], 1.0)
        return totals

    return decoded
