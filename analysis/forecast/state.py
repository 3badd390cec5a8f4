"""The memory that a plan takes on each rank of a network, in one line."""

from __future__ import annotations

from gradlab.analysis.forecast.network import Network
from gradlab.analysis.forecast.simulator import BETWEEN
from gradlab.analysis.forecast.step_time import cut_for_shards
from gradlab.executor.ownership import share_out
from gradlab.formatting import format_bytes, format_counted
from gradlab.plan import Plan, state_bytes
from gradlab.plan.plan import between
from gradlab.plan.state_bytes import with_buffers

HALF = "bfloat16"
_MATTERS = 0.001  # share of the state from which on an entry is named


def state_of_rank(plan: Plan, nodes: int, network: Network) -> dict[str, int]:
    """Count the bytes of state, by entry, of the rank that keeps most: by itself, as a node's owner of groups, of the
    first shards that FSDP2 cuts, or of all nodes' shards, where a plan runs in FSDP2's reduce-scatter."""
    if network.sharded:
        of_shard = state_bytes(cut_for_shards(plan, nodes, network.bucket_cap_mb)[0], 1)
        return {what: nodes * nbytes for what, nbytes in of_shard.items()}
    if network.node is None:
        return state_bytes(plan, nodes)
    ranks = network.node.local_ranks
    if network.node.plans != BETWEEN:
        return state_bytes(cut_for_shards(plan, ranks, network.bucket_cap_mb)[0], nodes)
    shares = share_out(between(plan, nodes), ranks)
    every = [state_bytes(plan, nodes, groups=shares.owned(rank)) for rank in range(ranks)]
    return max(every, key=lambda found: sum(found.values()))


def state_text(plan: Plan, network: Network) -> str:
    """Say what a rank keeps between iterations, at the number of nodes at which it is most, and what it would keep with
    residuals in bfloat16; "" if it keeps nothing."""
    kept = {nodes: state_of_rank(plan, nodes, network) for nodes in network.nodes}
    nodes = max(kept, key=lambda count: sum(kept[count].values()))
    total = sum(kept[nodes].values())
    if not total:
        return ""
    large = {what: nbytes for what, nbytes in kept[nodes].items() if nbytes > _MATTERS * total}
    parts = ", ".join(f"{what.replace('_', ' ')} {format_bytes(nbytes)}" for what, nbytes in large.items())
    half = sum(state_of_rank(with_buffers(plan, HALF), nodes, network).values())
    less = f', or {format_bytes(half)} with buffer = "{HALF}"' if half < total else ""
    return f"{format_counted(nodes, 'node')}: each rank keeps {format_bytes(total)} of state ({parts}){less}"
