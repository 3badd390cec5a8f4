"""The parts of a plan by rank of a node, where nodes exchange what their ranks have averaged.

Every group of layers has one owner among a node's ranks: the same local rank on all nodes. It holds the group's state,
and runs its codec with the owners of the other nodes. Large layers of no group are cut into one piece per local rank.
So every local rank computes, and sends, a share of what its node sends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gradlab.plan import FINITE_FLAG_BYTES, Plan
from gradlab.plan.plan import forecast_group

_CUT_FROM = 1024  # elements per piece; a smaller layer is not worth several messages


@dataclass(frozen=True)
class Ownership:
    """The parts of a plan by local rank.

    local_ranks: ranks of a node, L.
    groups: local rank that owns a group, by its name. Groups that are plainly dense have no owner.
    pieces: L + 1 offsets in a layer's flat elements, by its name: local rank i carries pieces[i] to pieces[i + 1].
    """

    local_ranks: int
    groups: Mapping[str, int]
    pieces: Mapping[str, tuple[int, ...]]

    def share(self, layer: str, local_rank: int) -> slice:
        """Return which of a layer's flat elements a local rank carries: all, some, or none."""
        cuts = self.pieces[layer]
        return slice(cuts[local_rank], cuts[local_rank + 1])

    def numel(self, layer: str, local_rank: int) -> int:
        """Return how many elements of a layer a local rank carries."""
        cuts = self.pieces[layer]
        return cuts[local_rank + 1] - cuts[local_rank]

    def owned(self, local_rank: int) -> frozenset[str]:
        """Return the names of the groups that a local rank owns."""
        return frozenset(name for name, owner in self.groups.items() if owner == local_rank)


def share_out(plan: Plan, local_ranks: int) -> Ownership:
    """Share a plan out among the ranks of a node, the largest part first, each to the rank that carries least (the rule
    of the longest processing time). Groups in turn would give one rank all layers of one shape."""
    numel = {layer.name: layer.numel for layer in plan.layers}
    compressed = {group.name: group for group in plan.compressed_groups}
    grouped = {layer for group in compressed.values() for layer in group.layers}
    cut = {name for name in numel if name not in grouped and numel[name] >= _CUT_FROM * local_ranks}
    whole = {name: (name,) for name in numel if name not in grouped and name not in cut}
    # A group and a layer may bear one name.
    parts = [("group", name, group.layers) for name, group in compressed.items()]
    parts += [("layer", name, layers) for name, layers in whole.items()]
    sizes = [sum(numel[layer] for layer in layers) for _, _, layers in parts]
    owners = _balanced(sizes, local_ranks)
    pieces = {name: tuple(numel[name] * i // local_ranks for i in range(local_ranks + 1)) for name in cut}
    for (_, _, layers), owner in zip(parts, owners, strict=True):
        pieces |= {name: tuple(numel[name] * (i > owner) for i in range(local_ranks + 1)) for name in layers}
    named = {name: owner for (kind, name, _), owner in zip(parts, owners, strict=True) if kind == "group"}
    return Ownership(local_ranks, named, {name: pieces[name] for name in numel})


def _balanced(sizes: Iterable[int], bins: int) -> list[int]:
    """A bin for each size: the largest first, each into the bin that holds least; ties in order."""
    sizes = list(sizes)
    held, chosen = [0] * bins, [0] * len(sizes)
    for position in sorted(range(len(sizes)), key=lambda at: (-sizes[at], at)):
        chosen[position] = min(range(bins), key=lambda one: (held[one], one))
        held[chosen[position]] += sizes[position]
    return chosen


def forecast_payload(plan: Plan, ownership: Ownership, local_rank: int, nodes: int) -> float:
    """Forecast the bytes, mean over nodes, that one local rank contributes in a compressed step, for float32 gradients.
    A node adds up to the plan's forecast for M ranks, and a flag for each further rank that owns a group."""
    owned = ownership.owned(local_rank)
    dense = {layer.name for layer in plan.dense_layers} if plan.compressed_groups else set(ownership.pieces)
    total = 4.0 * sum(ownership.numel(name, local_rank) for name in dense) + (FINITE_FLAG_BYTES if owned else 0)
    return total + sum(forecast_group(plan, one, nodes).payload for one in plan.compressed_groups if one.name in owned)
