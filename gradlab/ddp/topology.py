"""The ranks of a process group on one node, and those for the same part of it on the others."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gradlab.ddp.groups import Ranks
from gradlab.errors import GradlabError

NODE = "node"  # the value of `within` that takes what torchrun says


@dataclass(frozen=True)
class Topology:
    """The ranks of a process group by node.

    nodes: global ranks of each node, in the order of local ranks; all nodes have as many.
    node: this rank's.
    local_rank: this rank's position on its node.
    """

    nodes: tuple[tuple[int, ...], ...]
    node: int
    local_rank: int

    @property
    def local_ranks(self) -> int:
        """Ranks of a node, L."""
        return len(self.nodes[0])

    @property
    def inside(self) -> list[int]:
        """Global ranks of this rank's node."""
        return list(self.nodes[self.node])

    @property
    def between(self) -> list[int]:
        """Global ranks of this local rank on all nodes."""
        return [ranks[self.local_rank] for ranks in self.nodes]


def find_topology(within: object, group: dist.ProcessGroup, device: torch.device) -> Topology | None:
    """Find the nodes of a group's ranks, a collective on it; None: ranks are not taken together, as for None or uneven
    nodes.

    within: one dimension of a DeviceMesh, a process group, "node" for the machine as torchrun has it, or None.
    """
    ranks = Ranks(group, device)
    everyone = dist.get_process_group_ranks(group)
    mine, problem = None, None
    try:
        mine = _ranks_within(within, everyone)
    except GradlabError as error:
        problem = str(error)
    gathered = ranks.gather({"mine": mine, "problem": problem, "automatic": within == NODE})
    ranks.raise_together(problem)
    lists = [one["mine"] for one in gathered]
    if all(one is None for one in lists):
        return None
    automatic = all(one["automatic"] for one in gathered)
    if automatic and (None in lists or len(lists[0]) in (1, len(everyone))):
        return None
    if automatic and len({len(one) for one in lists}) > 1:
        _warn_of_sizes(lists, ranks.rank)
        return None
    return _topology(everyone, lists, dist.get_rank())


def _ranks_within(within: object, everyone: Sequence[int]) -> list[int] | None:
    """The global ranks of this rank's node, as it knows them."""
    if within is None:
        return None
    if within == NODE:
        return _ranks_of_machine(everyone)
    group = group_along(within, "within")
    if group is None or dist.get_rank() not in (ranks := dist.get_process_group_ranks(group)):
        raise GradlabError("within: a process group that this rank is not in; give every rank the group of its node")
    if outside := sorted(set(ranks) - set(everyone)):
        raise GradlabError(f"within has the ranks {outside}, which are not in the model's process group {everyone}")
    return list(ranks)


def _ranks_of_machine(everyone: Sequence[int]) -> list[int] | None:
    """Those of the group's ranks that torchrun started on this machine; None if it does not say."""
    told = [os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    if not all(value.isdecimal() for value in told) or int(told[0]) != dist.get_rank():
        return None
    rank, local_rank, local_ranks = map(int, told)
    first = rank - local_rank
    return [one for one in everyone if first <= one < first + local_ranks]


def group_along(value: Any, name: str) -> dist.ProcessGroup | None:
    """Return the process group along one dimension of a mesh, or the group given; None for one that this rank is not
    in."""
    if isinstance(value, dist.ProcessGroup):
        return value
    if isinstance(value, dist.DeviceMesh):
        if value.ndim != 1:
            names = value.mesh_dim_names or ("local",)
            raise GradlabError(
                f"{name}: a mesh of {value.ndim} dimensions, expected one of them, such as mesh[{names[-1]!r}]"
            )
        return value.get_group()
    if value is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    others = f", {NODE!r} or None" if name == "within" else ""
    raise GradlabError(
        f"{name} = {str(value)[:60]!r} ({type(value).__name__}), expected a dimension of a DeviceMesh or a process "
        f"group{others}"
    )


def find_grid(row: dist.ProcessGroup, column: dist.ProcessGroup, device: torch.device) -> Topology:
    """Find the nodes of a mesh from each rank's row (its node) and column (the ranks that hold the same part), a
    collective on both."""
    rows, columns = Ranks(row, device), Ranks(column, device)
    mine = dist.get_process_group_ranks(row)
    nodes, problem = _nodes_of(mine, rows.gather(dist.get_process_group_ranks(column)))
    others = columns.gather([list(node) for node in nodes])
    if problem is None and any(other != others[columns.rank] for other in others):
        problem = "nodes shard over ranks in different orders"
    for ranks in (columns, rows):
        problem = ranks.first_of(problem)
    if problem is not None:
        raise GradlabError(
            f"the shards' mesh and the one between nodes are not rows and columns of one mesh: {problem}"
        )
    return Topology(nodes, nodes.index(tuple(mine)), mine.index(dist.get_rank()))


def _nodes_of(mine: Sequence[int], columns: Sequence[Sequence[int]]) -> tuple[tuple[tuple[int, ...], ...], str | None]:
    """The nodes, from the columns of all ranks of one of them; and why there are none."""
    if len({len(column) for column in columns}) > 1:
        return (), f"columns of {sorted({len(column) for column in columns})} nodes, expected as many in each"
    nodes = tuple(zip(*columns, strict=True))
    if tuple(mine) not in nodes:
        together = [list(node) for node in nodes]
        return (), f"a node shards over the ranks {list(mine)}, and between nodes come together {together}"
    return nodes, None


def _topology(everyone: Sequence[int], lists: Sequence[Sequence[int] | None], rank: int) -> Topology:
    """Put together what all ranks said, in their order."""
    by_rank = dict(zip(everyone, lists, strict=True))
    for one, said in by_rank.items():
        for other in by_rank if said is None else said:
            if by_rank[other] != said:
                texts = [f"rank {of} has {f'the node {by_rank[of]}' if by_rank[of] else 'none'}" for of in (one, other)]
                raise GradlabError(
                    f"within: {', '.join(texts)}; every rank needs the group of its own node, and all of a node one "
                    "and the same"
                )
    nodes = sorted({tuple(said) for said in lists if said is not None}, key=min)
    if len({len(node) for node in nodes}) > 1:
        raise GradlabError(f"within: nodes of {[len(node) for node in nodes]} ranks, expected as many on each")
    node = next(position for position, ranks in enumerate(nodes) if rank in ranks)
    return Topology(tuple(nodes), node, nodes[node].index(rank))


def _warn_of_sizes(lists: Sequence[Sequence[int]], rank: int) -> None:
    if rank == 0:
        sizes = sorted({len(one) for one in lists})
        warnings.warn(
            f"gradlab: machines have different numbers of ranks ({', '.join(map(str, sizes))}), so that every rank "
            "compresses for itself; with equal numbers a node would send once (within=None: no warning)",
            stacklevel=2,
        )
