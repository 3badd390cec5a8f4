"""The hook itself, in a file that evaluates annotations: DDP compares them with the classes, not with their names."""

import torch
import torch.distributed as dist

from gradlab.ddp.copies import Detached
from gradlab.errors import GradlabError
from gradlab.runtime.state import CompressionState


def compression_hook(state: CompressionState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket by a plan: the hook for `DistributedDataParallel.register_comm_hook`.

    Args:
        state: state that the hook was registered with.
        bucket: DDP's.

    Returns:
        A future of the bucket's buffer, averaged.

    Raises:
        GradlabError: if it was registered with anything but a CompressionState, a copy of one among it.
    """
    if not isinstance(state, (CompressionState, Detached)):
        raise GradlabError(f"compression_hook needs a CompressionState, it was registered with {type(state).__name__}")
    return state.submit(bucket)
