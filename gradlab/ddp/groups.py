"""A process group for the codecs' collectives, of the ranks that DDP's has."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradlab.errors import BadMessage, GradlabError
from gradlab.layout import canonical_json

_last_number = 0  # of the groups made here of a part of the world


def group_or_world(group: dist.ProcessGroup | None, caller: str) -> dist.ProcessGroup:
    """Return a process group, for None the default one; an error that names the caller where there is none."""
    if group is not None:
        return group
    if not dist.is_initialized() or dist.group.WORLD is None:
        raise GradlabError(f"{caller}: there is no process group; call torch.distributed.init_process_group first")
    return dist.group.WORLD


def backends_of(group: dist.ProcessGroup) -> list[str]:
    """Return a group's backends as "cpu:gloo", also of one that torch.distributed did not make (torchft's)."""
    with suppress(Exception):  # torch's own, which also know a backend that is not made yet
        return dist.get_backend_config(group).split(",")
    return [f"{device.type}:{group._get_backend(device).name()}" for device in group._device_types]


def names_of(group: dist.ProcessGroup) -> list[int]:
    """Return what messages call a group's ranks, in its order: their numbers among all ranks of the job."""
    with suppress(Exception):  # torchft's, which torch does not know
        return dist.get_process_group_ranks(group)
    return list(range(group.size()))


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
    # new_group returns before Gloo's peers have accepted: a rank that destroyed the group then broke theirs.
    if "gloo" in dist.get_backend(made):
        dist.barrier(group=made)
    return made


def destroy(group: dist.ProcessGroup | None) -> None:
    """Destroy a group, unless it went before, with `destroy_process_group()`."""
    if group is not None and dist.is_initialized():
        with suppress(ValueError):
            dist.destroy_process_group(group)


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


_MOST_BYTES = 2**28


class Ranks:
    """The ranks of a process group, for plain JSON. Every method is a collective."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.rank, self.size, self.names = group.rank(), group.size(), names_of(group)
        self._device = device if "cuda:nccl" in backends_of(group) else torch.device("cpu")

    def gather(self, value: Any) -> list[Any]:
        """Gather a value from every rank, in rank order."""
        own = torch.tensor(list(canonical_json(value).encode()), dtype=torch.uint8, device=self._device)
        size = torch.tensor([own.numel()], device=self._device)
        sizes = [torch.zeros_like(size) for _ in range(self.size)]
        dist.all_gather(sizes, size, group=self.group)
        lengths = [int(length) for length in sizes]
        for rank, length in zip(self.names, lengths, strict=True):
            if not 0 < length <= _MOST_BYTES:
                raise BadMessage(f"rank {rank} announces {length} bytes of JSON, expected 1 to {_MOST_BYTES}")
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=self._device)
        padded[: own.numel()] = own
        texts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(texts, padded, group=self.group)
        parts = (bytes(text[:n].tolist()) for text, n in zip(texts, lengths, strict=True))
        return [_parsed(part, rank) for rank, part in zip(self.names, parts, strict=True)]

    def raise_together(self, problem: str | None) -> None:
        """Raise the problem of the lowest rank that has one, the same line on all ranks; go on if none has."""
        first = self.first_of(problem)
        if first is not None:
            raise GradlabError(first)

    def first_of(self, problem: str | None) -> str | None:
        """Return the problem of the lowest rank that has one, with its number unless all have the same."""
        problems = self.gather(problem)
        for rank, text in zip(self.names, problems, strict=True):
            if text is not None:
                return text if all(other == text for other in problems) else f"rank {rank}: {text}"
        return None

    def require_same(self, settings: dict[str, Any]) -> None:
        """Raise the first difference between ranks' settings, the same line on all ranks."""
        everyone = self.gather(settings)
        for rank, other in zip(self.names, everyone, strict=True):
            for name, value in everyone[0].items():
                if other[name] != value:
                    theirs, ours = _where_they_differ(other[name], value)
                    came = f"rank {rank} has {_short(theirs)}, rank {self.names[0]} has {_short(ours)}"
                    raise GradlabError(f"ranks disagree about {name}: {came}; give all ranks the same")


def _parsed(text: bytes, rank: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as wrong:
        raise BadMessage(f"rank {rank} sent what is no JSON: {str(wrong)[:100]}") from None


def _where_they_differ(one: Any, other: Any) -> tuple[Any, Any]:
    """Leave of two dicts the entries that differ; other values as they are."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return one, other
    names = {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}
    left, right = ({name: part[name] for name in part if name in names} for part in (one, other))
    return left, right


def _short(value: Any) -> str:
    text = canonical_json(value)
    return text if len(text) <= 60 else text[:57] + "..."
