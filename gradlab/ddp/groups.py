"""A process group for the codecs' collectives, of the ranks that DDP's has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradlab.ddp.agreement import Ranks

_last_number = 0  # of the groups made here of a part of the world


def group_like(group: dist.ProcessGroup, timeout: timedelta | None, device: torch.device) -> dist.ProcessGroup:
    """Make a new process group of the same ranks, a collective on `group`; a timeout of None is the group's."""
    return part_of((group,), dist.get_process_group_ranks(group), timeout, device)


def part_of(
    groups: Sequence[dist.ProcessGroup], ranks: Sequence[int], timeout: timedelta | None, device: torch.device
) -> dist.ProcessGroup:
    """Make a new process group of some ranks, a collective of all ranks of a mesh, each with the part that it is in.
    `groups` are one of all the mesh's ranks, or its row and its column; a timeout of None is that of the first."""
    if timeout is None:
        backend = groups[0]._get_backend(device)
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    if len(ranks) == dist.get_world_size():
        made = dist.new_group(list(ranks), timeout=timeout)
    else:
        with _name_of_its_own(groups, device):
            made = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


@contextmanager
def _name_of_its_own(groups: Sequence[dist.ProcessGroup], device: torch.device) -> Iterator[None]:
    """Give a new group of a part of the world a name that its ranks agree on and that no group had before: torch counts
    a process's groups, so that ranks would wait under different names, or find a destroyed group's old addresses."""
    global _last_number
    world = getattr(dist.distributed_c10d, "_world", None)
    names: dict[Any, Any] = getattr(world, "pg_names", {})
    number = max(len(names), _last_number + 1)
    for group in groups:
        number = max(Ranks(group, device).gather(number))
    _last_number = number
    fillers = [object() for _ in range(_last_number - len(names))]
    names.update((filler, "") for filler in fillers)
    try:
        yield
    finally:
        for filler in fillers:
            del names[filler]
