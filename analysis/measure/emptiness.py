"""Find recorded gradients by which no plan can be judged: zeros, not finite, equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from gradlab.errors import GradlabError

if TYPE_CHECKING:
    from gradlab.trace import Trace

_ZERO, _NOT_FINITE = "zero", "not finite"
_MOST_NAMES = 4  # that a remark lists


def require_gradients(trace: Trace, start: int = 0) -> list[str]:
    """Refuse a recording without gradients, and name layers and ranks that have none.

    It reads the last, the middle and the first iteration from a position on, a layer of a rank until it is finite and
    other than zero.

    Args:
        trace: the recording.
        start: position in `Trace.steps`.
    Returns:
        Remarks: ranks and layers without gradients, and equal gradients on all ranks.
    Raises:
        GradlabError: if no layer is finite on all ranks and other than zero.
    """
    positions = sorted({len(trace.steps) - 1, (start + len(trace.steps) - 1) // 2, start}, reverse=True)
    kinds = np.array([[_kind(trace, layer.name, rank, positions) for layer in trace.layers] for rank in _ranks(trace)])
    where = f"in iterations {', '.join(str(trace.steps[at]) for at in reversed(positions))}"
    if (kinds == _ZERO).all():
        raise GradlabError(
            f"{trace.path}: every gradient {where} is zero, so there is nothing to compress: record steps in which "
            "the model learns"
        )
    broken, zero = (kinds == _NOT_FINITE).any(0), (kinds == _ZERO).all(0)
    if (broken | zero).all():
        raise GradlabError(
            f"{trace.path}: no layer {where} is finite on all ranks and other than zero, so no plan can be judged: "
            "find out why training diverges, and record again"
        )
    return list(_remarks(trace, kinds, broken, where)) + _of_layers(trace, zero, f"zero {where}")


def _ranks(trace: Trace) -> range:
    return range(trace.world_size)


def _kind(trace: Trace, layer: str, rank: int, positions: list[int]) -> str:
    """Say why a rank's layer is without gradients; empty: it has some."""
    found = _ZERO
    for at in positions:
        values = trace.read(layer, rank, at, at + 1)
        if not np.isfinite(values).all():
            found = _NOT_FINITE
        elif values.any():
            return ""
    return found


def _remarks(trace: Trace, kinds: np.ndarray, broken: np.ndarray, where: str) -> Iterator[str]:
    empty = [str(rank) for rank in _ranks(trace) if (kinds[rank] == _ZERO).all()]
    if empty:
        yield f"Every gradient of rank {', '.join(empty)} is zero {where}: check that it sees data of its own."
    elif trace.world_size > 1 and _equal(trace, [layer.name for layer in np.array(trace.layers)[~broken]]):
        yield (
            f"All ranks have the same gradient in iteration {trace.steps[-1]}: check that each of them sees data of "
            "its own."
        )
    yield from _of_layers(trace, broken, f"not finite {where}")


def _of_layers(trace: Trace, chosen: np.ndarray, kind: str) -> list[str]:
    names = [layer.name for layer, one in zip(trace.layers, chosen, strict=True) if one]
    more = f" and {len(names) - _MOST_NAMES} more layers" if len(names) > _MOST_NAMES else ""
    return [f"No plan is judged on {', '.join(names[:_MOST_NAMES])}{more}: {kind}."] if names else []


def _equal(trace: Trace, layers: list[str]) -> bool:
    """Whether all ranks hold the same values of layers in the last iteration, and some are other than zero."""
    last, some = len(trace.steps) - 1, False
    for layer in layers:
        first, *others = (trace.read(layer, rank, last, last + 1) for rank in _ranks(trace))
        if not all(np.array_equal(first, other) for other in others):
            return False
        some = some or bool(first.any())
    return some
