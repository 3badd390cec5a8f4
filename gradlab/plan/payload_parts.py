"""The parts of a plan's bytes: codes, positions, values, or gradients that stay dense.

Published ratios of sparsifiers and of LGC count some of these parts only, so that they can be compared part by part.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from gradlab.plan.plan import FINITE_FLAG_BYTES, Plan


@dataclass(frozen=True)
class PayloadParts:
    """Bytes that a rank contributes in a compressed step, mean over ranks, for float32 gradients.

    code: an autoencoder's codes.
    positions: bytes that name the elements whose values are sent.
    values: all else that codecs send, such as selected values, innovations and scales.
    dense: uncompressed layers, and the flag that says whether all gradients are finite.
    """

    code: float = 0.0
    positions: float = 0.0
    values: float = 0.0
    dense: float = 0.0

    @property
    def total(self) -> float:
        """All parts, as `Plan.payload_bytes` forecasts them."""
        return sum(getattr(self, item.name) for item in fields(self))


def payload_parts(plan: Plan, world_size: int) -> PayloadParts:
    """Split a plan's forecast of payload bytes into parts.

    >>> from gradlab.plan import payload_parts
    >>> payload_parts(Plan.uniform([Layer("w", (1000, 100))], "topk", density=0.01), world_size=4)
    PayloadParts(code=0.0, positions=2125.0, values=4000.0, dense=4.0)

    Args:
        plan: any plan.
        world_size: number of ranks.

    Returns:
        The parts of a step that the schedule compresses, the mean over a run.
    """
    code = positions = values = 0.0
    dense = 4.0 * sum(layer.numel for layer in plan.dense_layers) + FINITE_FLAG_BYTES * bool(plan.compressed_groups)
    for group in plan.compressed_groups:
        found = plan.forecast(group, world_size)
        code, positions = code + found.codes, positions + found.positions
        if group.codec == "identity":
            dense += found.payload
        else:
            values += found.payload - found.codes - found.positions
    return PayloadParts(code, positions, values, dense)
