"""Time FSDP2's collectives in real steps: gathers of parameters, reduce-scatters, and averages between nodes.

Moments are the host's clock for a model on a CPU, where training waits for each of them; on a GPU they are events on
the streams of the collectives, which may run beside computing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gradlab.ddp.copies import Uncopied
from gradlab.ddp.sharded_passes import Passes
from gradlab.ddp.sharded_units import (
    all_gather_of,
    attached_hooks,
    custom_reductions,
    hooks_of,
    other_parts,
    replicas_of,
    require_native_gathers,
    set_all_gather,
    set_hooks,
    shard_group,
    units_of,
)
from gradlab.ddp.step_clock import Moment, moment, seconds_between
from gradlab.errors import GradlabError

KINDS = GATHERS, REDUCTIONS, AVERAGES = "gathers of parameters", "reduce-scatters", "averages between nodes"


class ShardTimes(Uncopied):
    """Moments of each collective of a model's units in every step between `start` and `stop`.

    units: the model's. between: whether nodes hold the same shards, which native HSDP averages. parts: whether tensor
        parallelism has cut layers, too.

    Raises:
        GradlabError: for a model that `units_of` refuses, or with hooks or collectives of others.
    """

    def __init__(self, model: Any, caller: str) -> None:
        self.units = units_of(model, caller)
        require_native_gathers(self.units, caller)
        if others := [*attached_hooks(self.units), *custom_reductions(self.units)]:
            raise GradlabError(f"{caller}: {others[0]} has a hook or a reduce-scatter of its own already")
        self._gathers = [(unit, all_gather_of(unit)) for unit in self.units]
        row, column = shard_group(self.units, caller), replicas_of(self.units, None, caller)
        self._first = {kind: dist.get_process_group_ranks(row)[0] for kind in (GATHERS, REDUCTIONS)}
        if column is not None:
            self._first[AVERAGES] = dist.get_process_group_ranks(column)[0]
        self.between, self.device = column is not None, self.units[0].device
        self.parts = other_parts(self.units) is not None
        self._before, self._passes = hooks_of(model), Passes(model, self.units)
        self._steps: list[tuple[Moment, list[tuple[str, int, Moment, Moment]]]] = []
        self._open: list[tuple[str, int, Moment, Moment]] = []

    def start(self) -> None:
        """Time what comes from now on."""
        self._began = moment(self.device)
        for unit, gather in self._gathers:
            set_all_gather(unit, _Timed(gather, self.device, partial(self._add, GATHERS)))
        for module, _, reduction, _ in self._before:
            timed = _Timed(reduction, self.device, partial(self._reduced, module))
            set_hooks(module, partial(self._averaged, module, timed), timed)

    def _add(self, kind: str, nbytes: int, began: Moment, ended: Moment) -> None:
        self._open.append((kind, nbytes, began, ended))

    def _reduced(self, module: Any, nbytes: int, began: Moment, ended: Moment) -> None:
        self._add(REDUCTIONS, nbytes, began, ended)
        self._passes.after(module, self._end)

    def _averaged(self, module: Any, reduction: _Timed, flat: torch.Tensor) -> None:
        """FSDP calls this after a unit's average between nodes, which follows its reduce-scatter at once."""
        if self.between:
            self._add(AVERAGES, flat.nbytes, reduction.seen, moment(self.device))
        self._passes.after(module, self._end)

    def _end(self) -> None:
        self._steps.append((moment(self.device), self._open))
        self._open = []

    def rows(self) -> list[list[Any]]:
        """Return by step its seconds, and of each of its collectives kind, first rank, bytes and seconds."""
        begun = [self._began, *(ended for ended, _ in self._steps)]
        return [
            [
                seconds_between(before, ended),
                [[kind, self._first[kind], nbytes, seconds_between(*span)] for kind, nbytes, *span in collectives],
            ]
            for before, (ended, collectives) in zip(begun, self._steps, strict=False)
        ]

    def stop(self) -> None:
        """Put back what was there before."""
        self._passes.close()
        for unit, gather in self._gathers:
            set_all_gather(unit, gather)
        for before in self._before:
            set_hooks(*before)


class _Timed:
    """A collective of FSDP2's, which tells its bytes and its moments. seen: when FSDP last had to do with it."""

    def __init__(self, native: Any, device: torch.device, told: Callable[[int, Moment, Moment], None]) -> None:
        self._native, self._device, self._told = native, device, told
        self.seen = moment(device)

    def allocate(self, *size: Any, **how: Any) -> Any:
        """Give FSDP memory for input and output."""
        self.seen = moment(self._device)
        return self._native.allocate(*size, **how)

    def __call__(self, *tensors: Any, **how: Any) -> Any:
        """Run the collective."""
        began = moment(self._device)
        result = self._native(*tensors, **how)
        both = (one.nbytes for one in (*tensors, *how.values()) if isinstance(one, torch.Tensor))
        self.seen = moment(self._device)
        self._told(max(both), began, self.seen)
        return result
