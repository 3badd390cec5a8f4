"""The average that plain DDP computes, done by a hook: same operations, same order, same bits.

Plain DDP multiplies every gradient by 1/N while it copies it into the bucket, then sums the bucket's whole buffer
over the ranks. A hook finds the bucket unscaled. (PyTorch's own allreduce_hook divides by N instead, which differs
in the last bit where N is not a power of two.) One case cannot be told apart from inside a hook: with
gradient_as_bucket_view=True and gradients that are zeroed rather than dropped, plain DDP divides too.
"""

# No `from __future__ import annotations` here: DDP compares a hook's annotations with the types themselves.

import torch
import torch.distributed as dist


def average_as_ddp(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the group, bit for bit as DDP without a hook does.

    Args:
        group: the process group.
        bucket: DDP's.

    Returns:
        A future of `bucket.buffer()`.
    """
    buffer = bucket.buffer()
    if buffer.is_sparse:
        buffer.div_(group.size())
    else:
        buffer.mul_(1.0 / group.size())
    work = dist.all_reduce(buffer, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])
