"""A compressed step on real ranks, for comparing what the engine counted with what was predicted."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradlab.runtime import CompressionState, compression_hook
from support.contract import plan_for
from support.pool_groups import SPARE
from support.prescribed import SHAPES, Prescribed, gradients


def counted_wire_bytes(group: dist.ProcessGroup, codec: str, grouping: str, bucket_cap_mb: float | None) -> list[int]:
    """Wire bytes of each of four steps, as this rank's engine counted them."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    buckets = {} if bucket_cap_mb is None else {"bucket_cap_mb": bucket_cap_mb}
    model = DistributedDataParallel(Prescribed(SHAPES), process_group=group, **buckets)
    plan = plan_for(codec, grouping, feedback=True, steady=True)
    with CompressionState(plan, model, process_group=SPARE.get(world_size)) as state:
        model.register_comm_hook(state, compression_hook)
        for step in range(4):
            model.zero_grad()
            model(gradients(SHAPES, rank, step)).backward()
        return [record.wire_bytes for record in state.statistics.steps]
