"""A second process group per number of ranks, made by every rank of the pool at its start."""

from __future__ import annotations

import torch.distributed as dist

# By world size; the whole world has none, there tasks make one of their own.
SPARE: dict[int, dist.ProcessGroup] = {}
