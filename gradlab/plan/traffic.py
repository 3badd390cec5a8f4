"""The bytes that a plan sends at N ranks, beside a ring all-reduce of the same gradients in 32 and in 16 bits.

A gathered payload is sent N - 1 times. A ring all-reduce sends each byte 2 (N - 1) / N times, which hardly grows with
N. So a plan whose payloads are gathered pays up to some number of ranks only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from gradlab.codec.wrapper import innermost
from gradlab.collectives import ring_sends
from gradlab.errors import GradlabError
from gradlab.formatting import format_ratio
from gradlab.layout import Layer
from gradlab.plan.plan import FINITE_FLAG_BYTES, Group, Plan, forecast_group
from gradlab.saving import Saving

MOST_RANKS = 4096  # up to which a plan is looked at
# Vectors that travel in 32 bits beside matrices in 16 are no excess, nor are positions beside all values.
_SLACK = {16: 1.01, 32: 1.1}
# Loss of answers over a gather's from 8 ranks on, where the mean is above .3 % (benchmarks/results/many-ranks.jsonl).
_LOST = {"topk": "0.0 to 1.8 %", "chunk_topk": "0.4 to 3.2 %", "sign": "2.5 to 6.7 %"}
_FEWEST = 1024  # elements of groups below which a message costs its latency, not its bytes
_MATTERS = 0.01  # share of the gradients' bytes from which on groups are worth a warning


def sent_bytes(plan: Plan, world_size: int, groups: Sequence[Group] | None = None) -> float:
    """Forecast the bytes that a rank sends in a compressed step, mean over ranks, for float32 gradients.

    >>> from gradlab.plan import sent_bytes
    >>> plan = Plan.uniform([Layer("w", (1000, 100))], "block_scaled", dtype="int4", wrappers=[])
    >>> [round(sent_bytes(plan, world_size)) for world_size in (2, 32)]
    [51568, 1598492]

    Args:
        plan: any plan.
        world_size: number of ranks N.
        groups: those that count. None: all, with uncompressed layers and the ranks' agreement on finite gradients.

    Returns:
        Bytes.
    """
    chosen = plan.compressed_groups if groups is None else groups
    total = sum(forecast_group(plan, group, world_size).sent for group in chosen)
    if groups is None:
        dense = 4.0 * sum(layer.numel for layer in plan.dense_layers)
        total += ring_sends(world_size) * (dense + FINITE_FLAG_BYTES * bool(chosen))
    return total


def saving_of_sent(plan: Plan, world_size: int) -> Saving:
    """Compare what a plan sends with a ring all-reduce of its float32 gradients, and of the same in 16 bits.

    >>> from gradlab.plan import saving_of_sent
    >>> plan = Plan.uniform([Layer("w", (1000, 100))], "block_scaled", dtype="int4", wrappers=[])
    >>> print(saving_of_sent(plan, 2), "and", saving_of_sent(plan, 32))
    7.76x (3.88x vs 16 bits) and 0.485x (0.242x vs 16 bits)

    Args:
        plan: any plan.
        world_size: number of ranks N.
    """
    return Saving.of_sent(sent_bytes(plan, world_size), 4 * sum(layer.numel for layer in plan.layers), world_size)


def varying_codecs(plan: Plan) -> tuple[str, ...]:
    """Return ids of codecs whose messages vary in size with the gradients, so that forecasts of bytes are estimates."""
    named = {group.codec for group in plan.compressed_groups if innermost(plan._built[group.name]).traits.varying}
    return tuple(sorted(named))


def refused(plan: Plan, world_size: int) -> bool:
    """Return whether a codec of the plan cannot work between so many ranks."""
    try:
        sent_bytes(plan, world_size)
    except GradlabError:
        return True
    return False


def most_ranks(plan: Plan, bits: int = 16) -> int | None:
    """Find up to how many ranks a plan sends no more than a ring all-reduce does.

    >>> from gradlab.plan import most_ranks
    >>> most_ranks(Plan.uniform([Layer("w", (1000, 100))], "block_scaled", dtype="int4", wrappers=[]))
    7

    Args:
        plan: any plan.
        bits: bits of a value in that all-reduce, 16 or 32.

    Returns:
        The number of ranks, 1 if it sends more between any two; None: more than `MOST_RANKS`.
    """
    dense = _SLACK[bits] * bits / 8 * sum(layer.numel for layer in plan.layers)

    def pays(world_size: int) -> bool:
        return not refused(plan, world_size) and sent_bytes(plan, world_size) <= ring_sends(world_size) * dense

    low, high = 1, 2
    while pays(high):
        if high >= MOST_RANKS:
            return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low


def pays_up_to(plan: Plan) -> str:
    """Say up to how many ranks a plan sends less than 16-bit reduction does; empty if that is always so.

    >>> from gradlab.plan import pays_up_to
    >>> pays_up_to(Plan.uniform([Layer("w", (1000, 100))], "block_scaled", dtype="int4", wrappers=[]))
    'sends less than 16-bit reduction does between up to 7 ranks; two_way around it does so between any'
    """
    most = most_ranks(plan)
    if most is None:
        return ""
    if refused(plan, most + 1):
        return f"works between up to {most} ranks"
    if most == 1:
        return "sends more than 16-bit reduction does, between any number of ranks"
    return f"sends less than 16-bit reduction does between up to {most} ranks; two_way around it does so between any"


def remarks_on_ranks(plan: Plan) -> list[str]:
    """Say up to how many ranks a plan pays, if not always, and what rounding means once more costs, if it is much.

    >>> from gradlab.plan.traffic import remarks_on_ranks
    >>> remarks_on_ranks(Plan.uniform([Layer("w", (1000, 100))], "topk"))
    ['means come back compressed from 5 ranks on; topk lost 0.0 to 1.8 % more of the loss by it at 8 to 32 ranks']
    """
    limit = pays_up_to(plan)
    found = [f"this plan {limit}"] if limit else []
    wraps = [(group.codec, wrap) for group in plan.compressed_groups for wrap in group.wrappers]
    servers = {codec: wrap.settings.get("from_ranks", 1) for codec, wrap in wraps if wrap.name == "two_way"}
    for codec in sorted(servers.keys() & _LOST.keys()):
        start = f" from {servers[codec]} ranks on" if servers[codec] > 1 else ""
        lost = f"{codec} lost {_LOST[codec]} more of the loss by it at 8 to 32 ranks"
        found.append(f"means come back compressed{start}; {lost}")
    return found


@dataclass(frozen=True)
class Excess:
    """Groups that send more than a ring all-reduce does.

    to_16_bits, to_32_bits: their bytes over that all-reduce's of the same layers in 16 and in 32 bits.
    """

    groups: tuple[str, ...]
    to_16_bits: float
    to_32_bits: float

    def sentence(self, world_size: int) -> str:
        """Say what they send between so many ranks."""
        which = self.groups[0] if len(self.groups) == 1 else f"{self.groups[0]} and {len(self.groups) - 1} more groups"
        return (
            f"between {world_size} ranks {which} would send {format_ratio(self.to_16_bits)} the bytes of 16-bit "
            f"reduction, {format_ratio(self.to_32_bits)} those of plain DDP"
        )


def excess_of(plan: Plan, world_size: int, bits: int = 16) -> Excess | None:
    """Return the groups that send more than a ring all-reduce of values in `bits` bits (16 or 32); None if there are
    none, or they hardly matter."""

    def theirs(groups: Sequence[Group]) -> list[Layer]:
        return [layer for group in groups for layer in plan.members(group)]

    def ring(groups: Sequence[Group], of: int) -> float:
        return ring_sends(world_size) * sum(layer.numel for layer in theirs(groups)) * of / 8

    over = [
        group
        for group in plan.compressed_groups
        if forecast_group(plan, group, world_size).sent > _SLACK[bits] * ring([group], bits)
    ]
    numel, everything = (sum(layer.numel for layer in layers) for layers in (theirs(over), plan.layers))
    if not ring_sends(world_size) or numel < max(_FEWEST, _MATTERS * everything):
        return None
    half = ring(over, 16)
    share = sent_bytes(plan, world_size, over) / half
    return Excess(tuple(group.name for group in over), share, share / 2)


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
        found = forecast_group(plan, group, world_size)
        code, positions = code + found.codes, positions + found.positions
        if group.codec == "identity":
            dense += found.payload
        else:
            values += found.payload - found.codes - found.positions
    return PayloadParts(code, positions, values, dense)
