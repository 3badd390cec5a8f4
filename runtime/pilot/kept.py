"""The batches of a pilot, kept so that every plan trains on the same ones with the same random numbers."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gradlab.formatting import format_bytes
from gradlab.runtime.pilot.snapshot import draw_from, draws

_MEMORY = Path("/proc/meminfo")


class KeptBatches:
    """Batches with the generators' states after each came; `nbytes` are of their tensors."""

    def __init__(self) -> None:
        self._held: list[tuple[Any, dict[str, Any]]] = []
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def problem(self, batch: Any, count: int) -> str | None:
        """Say why as many batches like this one cannot be kept; None if they can."""
        if isinstance(batch, Iterator):
            return f"a batch is a {type(batch).__name__}, which can be read once only; give a list or a tensor"
        for device, needed in _bytes_by_device(batch).items():
            there = _available(device)
            if needed * count > there:
                return (
                    f"{count} batches of {format_bytes(needed)} are kept in memory, and {device} has "
                    f"{format_bytes(there)} left for this rank; give the pilot fewer steps (steps=, longer=), or "
                    "batches of indices"
                )
        return None

    def add(self, batch: Any) -> None:
        """Keep a copy of a batch that has just come. Training gets the batch itself, as without a pilot."""
        self._held.append((copied(batch), draws()))
        self.nbytes += sum(_bytes_by_device(batch).values())

    def again(self) -> Iterator[Any]:
        """Give copies out once more, which training may change, each with its random numbers."""
        for batch, drawn in self._held:
            draw_from(drawn)
            yield copied(batch)

    def last(self) -> Iterator[Any]:
        """Yield the batches for the last time, each with the random state that it was first drawn with.

        A batch is let go before it is yielded.
        """
        while self._held:
            batch, drawn = self._held.pop(0)
            draw_from(drawn)
            yield batch


def copied(batch: Any, seen: dict[int, Any] | None = None) -> Any:
    """Copy a batch: tensors with as much memory as they show, anything else by `copy.deepcopy`.

    A tensor that stands twice does so in the copy. A value that cannot be copied is returned, with a warning.
    """
    seen = {} if seen is None else seen
    if id(batch) not in seen:
        seen[id(batch)] = _copied(batch, seen)
    return seen[id(batch)]


def _copied(batch: Any, seen: dict[int, Any]) -> Any:
    if type(batch) is torch.Tensor and batch.layout == torch.strided:
        return _copied_tensor(batch)
    if type(batch) is dict:
        return {key: copied(value, seen) for key, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(copied(value, seen) for value in batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(copied(value, seen) for value in batch))
    try:
        return copy.deepcopy(batch)
    except Exception:
        warnings.warn(
            f"gradlab: batches of {type(batch).__name__} cannot be copied; do not change them in training", stacklevel=4
        )
        return batch


def _copied_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Copy with the same strides, of which the last bits of a product may depend. `deepcopy` copies whole storages."""
    if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
        made = tensor.detach().clone()
    else:
        made = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device, pin_memory=tensor.is_pinned()
        ).copy_(tensor.detach())
    return made.requires_grad_(tensor.requires_grad)


def _bytes_by_device(batch: Any) -> dict[torch.device, int]:
    """Bytes of a batch's tensors."""
    found: dict[torch.device, int] = {}
    pending, seen = [batch], set[int]()
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if torch.is_tensor(one):
            found[one.device] = found.get(one.device, 0) + one.numel() * one.element_size()
        elif isinstance(one, dict):
            pending.extend(one.values())
        elif isinstance(one, (list, tuple)):
            pending.extend(one)
        elif hasattr(one, "__dict__"):
            pending.extend(vars(one).values())
    return found


def _available(device: torch.device) -> float:
    """Bytes that are free for one rank; infinite where nothing says."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + kept)
    if device.type != "cpu" or not _MEMORY.exists():
        return float("inf")
    lines = dict(line.split(":") for line in _MEMORY.read_text(encoding="utf-8").splitlines())
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return 1024.0 * int(lines["MemAvailable"].split()[0]) / (int(ranks) if ranks.isdecimal() else 1)
