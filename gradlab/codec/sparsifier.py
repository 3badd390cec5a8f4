"""Select the largest elements of a vector, and the settings that say how many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gradlab.codec.settings import setting
from gradlab.coding.positions import CODINGS

#: Settings worth comparing.
DENSITIES = tuple({"density": density} for density in (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2))
_SAMPLE = 16384  # values looked at before the threshold is chosen
_PIECE = 2**16  # values looked at together


def density_setting(default: float = 0.01, help: str = "sent") -> Any:
    """Make the settings field of a density: a share of elements, in (0, 1]."""
    return setting(default, above=0, most=1, unit="share of elements", symbol="k / d", help=help)


def coding_setting(default: str = "fixed", choices: Sequence[str] = CODINGS) -> Any:
    """Make the settings field of the coding of positions, one of `choices`, see `gradlab.coding.positions`."""
    return setting(
        default,
        choices=choices,
        help='how positions travel: the smallest coding whose size is known ("fixed"), the smallest, or that one',
    )


def across_layers_setting() -> Any:
    """Make the settings field of whether a selection in a group of layers is one of all of them."""
    return setting(
        True,
        help="select from all layers of a group together, as in global top-k; else each layer has its own share of k, "
        "and its positions are coded within it",
    )


def count_of(density: float, numel: int) -> int:
    """Return k = ceil(density * numel), at least 1 and at most numel.

    >>> from gradlab.codec import count_of
    >>> count_of(0.01, 250), count_of(0.01, 10)
    (3, 1)
    """
    return min(numel, max(1, math.ceil(round(density * numel, 9))))


def with_non_finite(values: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """Return the values (count,) that are sent of a vector (numel,), all NaN if it holds NaN or infinity anywhere: a
    step to be skipped must not look sound. There is no branch, so that a GPU need not be waited for."""
    if not vector.numel():
        return values
    least, greatest = torch.aminmax(vector)
    return values + (least * 0 + greatest * 0)


def largest(vector: torch.Tensor, count: int) -> torch.Tensor:
    """Find the positions (count,), int64, ascending, of the `count` largest magnitudes of a vector (numel,).

    Among equal magnitudes any are taken. On a CPU a low threshold from a sample leaves only a few candidates to select
    from, 7 times faster on a million values. A GPU would have to be waited for, to say how many.

    >>> from gradlab.codec import largest
    >>> largest(torch.tensor([0.1, -3.0, 2.0]), 1)
    tensor([1])
    """
    if vector.device.type != "cpu":
        return _sorted_out(vector, count)
    stride = vector.numel() // _SAMPLE
    expected = count // max(1, stride)
    place = expected + 4 * math.isqrt(expected) + 8  # in the sample: low enough by four standard deviations
    if stride < 4 or 4 * place > _SAMPLE:
        return _sorted_out(vector, count)
    threshold = vector[::stride].abs().topk(place, sorted=False).values.min()
    candidates = at_least(vector, threshold)
    if len(candidates) < count:  # the sample did not stand for the rest
        return _sorted_out(vector, count)
    return candidates[_sorted_out(vector[candidates], count)]


def _sorted_out(vector: torch.Tensor, count: int) -> torch.Tensor:
    return vector.abs().topk(count, sorted=False).indices.sort().values


def at_least(vector: torch.Tensor, threshold: torch.Tensor | float) -> torch.Tensor:
    """Find the positions (count,), int64, ascending, of values whose magnitude reaches a threshold, and of NaN."""
    if vector.device.type != "cpu":
        return (vector.abs() < threshold).logical_not_().nonzero().view(-1)
    # By numpy, which compares and looks for what is true in a third of the time, and piece by piece in the cache.
    values, level = vector.detach().numpy(), torch.as_tensor(threshold, dtype=vector.dtype).numpy()
    found = [np.zeros(0, np.int64)]
    magnitudes = np.empty(min(_PIECE, len(values)), values.dtype)
    for start in range(0, len(values), _PIECE):
        part = values[start : start + _PIECE]
        below = np.abs(part, out=magnitudes[: len(part)]) < level
        found.append(np.flatnonzero(np.logical_not(below, out=below)) + start)
    return torch.from_numpy(np.concatenate(found))
