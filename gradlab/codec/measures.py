"""Measure an exchange, in a replay as in training: norms, errors of a rank's contribution, finiteness."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

import torch
from torch._utils import _flatten_dense_tensors

from gradlab.codec.exchanged import Exchanged

_SMALL = 2**16  # elements of a tensor whose copy costs less than calls of its own
_CACHED = 2**17  # elements that are copied together
_LEAST_NORM = 1e-12  # of which squares are numbers in single precision
LayerErrors = dict[str, tuple[float, float]]


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds no infinity and no NaN. Its minimum and maximum show both, 25 times faster than a
    look at every element."""
    if not tensor.numel():
        return True
    least, largest = torch.aminmax(tensor)
    if tensor.device.type == "cpu":
        return math.isfinite(float(least)) and math.isfinite(float(largest))
    return bool(torch.isfinite(least) & torch.isfinite(largest))


def largest_magnitudes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Compute max |x| of each of L tensors on one device, without waiting for it: (L,), float64. NaN and infinity show;
    a tensor without elements has 0."""
    numbers = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
    norms = torch._foreach_norm(numbers, math.inf)
    alike = all(norm.dtype == norms[0].dtype for norm in norms)
    return torch.stack(norms if alike else [norm.double() for norm in norms]).double()


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether all of several tensors are finite. A GPU is waited for once."""
    small: dict[torch.dtype, list[torch.Tensor]] = {}
    on_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.is_cpu:
            small.setdefault(tensor.dtype, []).append(tensor)
        else:
            on_device.setdefault(tensor.device, []).append(tensor)
    together = all(is_finite(joined) for alike in small.values() for joined in _joined(alike))
    return together and all(bool(largest_magnitudes(some).isfinite().all()) for some in on_device.values())


def _joined(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield vectors of all elements: of several small tensors what fits the cache, and large tensors as they are."""
    first = 0
    for last in _ends_of_batches([tensor.numel() for tensor in tensors]):
        batch = tensors[first:last]
        yield batch[0] if len(batch) == 1 else _flatten_dense_tensors(batch)
        first = last


def _ends_of_batches(sizes: Sequence[int]) -> Iterator[int]:
    """Cut tensors of these sizes, in elements, into runs that are looked at together; yield the places they end at."""
    ends, last = list(accumulate(sizes)), 0
    large = [*(place for place, size in enumerate(sizes) if size >= _SMALL), len(sizes)]
    for place in large:
        while last < place:
            before = ends[last - 1] if last else 0
            last = min(place, bisect_left(ends, before + _CACHED, last) + 1)
            yield last
        if place < len(sizes):
            last = place + 1
            yield last


def squared_norm(tensor: torch.Tensor) -> float:
    """Compute ||tensor||^2, see `squared_norms`."""
    return squared_norms([tensor])[0]


def squared_norms(tensors: Iterable[torch.Tensor]) -> list[float]:
    """Compute ||tensor||^2 of each, from the L2 norm in at least float32 (float64 takes 30 times longer), with the
    largest magnitude as the unit where squares leave float32. NaN and infinity show."""
    every = list(tensors)
    norms = [
        torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32)) for tensor in every
    ]
    found = [
        _norm_in_its_unit(tensor) if norm < _LEAST_NORM or norm == math.inf else norm
        for tensor, norm in zip(every, numbers(norms), strict=True)
    ]
    return [norm * norm for norm in found]


def _norm_in_its_unit(tensor: torch.Tensor) -> float:
    largest = float(largest_magnitudes([tensor]))
    if largest == 0 or largest == math.inf:
        return largest
    unit = 2.0 ** math.frexp(largest)[1]
    return float(torch.linalg.vector_norm(tensor.double() / unit)) * unit


def numbers(scalars: Sequence[torch.Tensor]) -> list[float]:
    """Return the values of tensors (), all on one device, which is waited for once."""
    return torch.stack([scalar.double() for scalar in scalars]).tolist() if scalars else []


def contribution_error(done: Exchanged) -> LayerErrors:
    """Compute GradiVeQ's loss, eq. (7): by layer, the squared L2 norms of one rank's compression error and compressor
    input."""
    inputs, known = done.compressor_input, done.compression_error
    errors = (known[name] if name in known else value - done.own[name] for name, value in inputs.items())
    return dict(zip(inputs, zip(squared_norms(errors), squared_norms(inputs.values()), strict=True), strict=True))


def add_errors(total: LayerErrors, more: Mapping[str, Sequence[float]]) -> LayerErrors:
    """Add squared errors and norms to `total`, layer by layer, in place, and return it."""
    for name, (error, norm) in more.items():
        before = total.get(name, (0.0, 0.0))
        total[name] = (before[0] + error, before[1] + norm)
    return total


def relative(error: float, norm: float) -> float:
    """Compute sqrt(error / norm) of a squared error and norm: 0 if both are 0, infinity if only the norm is 0."""
    if norm > 0.0:
        return math.sqrt(error / norm)
    return 0.0 if error == 0.0 else math.inf
