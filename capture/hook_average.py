"""The average that plain DDP computes, done by a hook: same operations, same order, same bits.

Plain DDP multiplies every gradient by 1/N while it copies it into the bucket, then sums the bucket's whole buffer
over the ranks. N is the number of ranks, or under join(divide_by_initial_world_size=False) of those that have input
left. A hook finds the bucket unscaled. (PyTorch's own allreduce_hook divides by N instead, which differs
in the last bit where N is not a power of two.) One case cannot be told apart from inside a hook: with
gradient_as_bucket_view=True and gradients that are zeroed rather than dropped, plain DDP divides too.
"""

# No `from __future__ import annotations` here: DDP compares a hook's annotations with the types themselves.

import torch
import torch.distributed as dist


def average_as_ddp(
    group: dist.ProcessGroup, bucket: dist.GradBucket, divisor: int
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the group, divided by N, bit for bit as DDP without a hook does; a future of its buffer."""
    buffer = bucket.buffer()
    if buffer.is_sparse:
        buffer.div_(divisor)
    else:
        buffer.mul_(1.0 / divisor)
    work = dist.all_reduce(buffer, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def ranks_with_input(group: dist.ProcessGroup, device: torch.device) -> int:
    """Count ranks with input left under `join`: others run the hook outside of a backward pass. A collective."""
    flag = torch.tensor([float(torch._C._current_graph_task_id() != -1)], device=device)
    dist.all_reduce(flag, group=group)
    return int(flag.item())
