"""PCA of gradient slices: how slices are cut, axes, and their number. Pure functions.

Yu, Lin, et al., "GradiVeQ: Vector quantization for bandwidth-efficient gradient aggregation in distributed CNN
training", NeurIPS 2018. A layer's gradient is flattened so that its F filters' values at one place are adjacent (Fig.
3a), and cut into M slices of K elements. Every `reuse` (the paper's s) consecutive slices share one basis, which is
fitted on the first of them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from gradlab.errors import GradlabError
from gradlab.layout import Layer, filter_axes, flatten, matrices, split_slices
from gradlab.workspace import Workspace

# Most elements of a slice, where the layer leaves a choice: a basis has K x d floats.
_PREFERRED_SLICE = 2048
_LARGEST_SLICE = 4096
_NOT_ORTHONORMAL = 1e-3  # by which products of two axes are off; those of a fit are off by 1e-6
SLICE_AXES = ("auto", "outputs", "inputs")
# Roles that the paper does not treat.
_MATRICES = frozenset({"embedding", "linear", "transposed_linear", "experts", "transposed_experts"})
# The role of a layer of the same shape whose outputs are this layer's inputs.
_TURNED = {
    "linear": "transposed_linear",
    "transposed_linear": "linear",
    "experts": "transposed_experts",
    "transposed_experts": "experts",
    "transposed_convolution": "convolution",
}


@functools.lru_cache(maxsize=4096)
def slice_view(layer: Layer, axis: str = "auto") -> Layer:
    """Describe a layer as slices see it: its values in GradiVeQ's order are cut into slices.

    The paper's slices lie along the filters of a convolution. A basis of d axes of K = n L elements, for slices along
    an axis of length L, holds gradients of rank up to d L / K whole, so the longer axis of a matrix holds more at the
    same bytes. Vectors of an embedding have one covariance; its rows come and go with the batch.

    axis: "outputs": along outputs, filters or an embedding's entries, as the paper's. "inputs": along the other axis.
        "auto": along an embedding's vectors, and along the longer axis of a linear layer or an expert, of those that
        fit into a slice; elsewhere "outputs".
    """
    if len(layer.shape) < 2:
        return layer
    if axis == "auto":
        axis = possible_axes(layer)[0]
    if axis == "outputs":
        return layer
    if layer.role == "embedding":
        return replace(layer, shape=matrices(layer)[1:], role="transposed_linear")
    return replace(layer, role=_TURNED.get(layer.role, "transposed_convolution"))


@functools.lru_cache(maxsize=4096)
def possible_axes(layer: Layer) -> tuple[str, ...]:
    """List the axes that slices of a layer may lie along, that of "auto" first: "outputs" alone for a vector and for a
    convolution, as the paper has it; else axes of more than one element that fit into a slice."""
    if len(layer.shape) < 2 or layer.role not in _MATRICES:
        return ("outputs",)
    lengths = {axis: filter_axes(slice_view(layer, axis))[0] for axis in ("outputs", "inputs")}
    fitting = [axis for axis, length in lengths.items() if 1 < length <= _LARGEST_SLICE]
    longest = max(fitting, key=lengths.__getitem__, default="outputs")
    first = "inputs" if layer.role == "embedding" else longest
    return (first, *(axis for axis in fitting if axis != first))


def layer_slices(
    tensor: torch.Tensor, view: Layer, slice_size: int, workspace: Workspace | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut a gradient, in the layer's shape, into slices (M, K) and the elements that fill none; `view` is of
    `slice_view`."""
    return split_slices(flatten(tensor.reshape(view.shape), "gradiveq", workspace, view.role), slice_size)


def slice_order(layer: Layer) -> torch.Tensor:
    """Return places in the row-major gradient, int64 (numel,), in the order that slices are cut from."""
    view = slice_view(layer)
    return flatten(torch.arange(layer.numel).reshape(view.shape), "gradiveq", role=view.role)


@functools.lru_cache(maxsize=4096)
def default_slice_size(view: Layer) -> int:
    """Choose K: the largest multiple of F D (GradiVeQ, section 3) that divides the layer and is at most 2048, or F D.

    F is the length of the axis that slices lie along, D their depth. If F D is more than 4096, a basis would outgrow
    the layer. K is then the largest multiple of F that divides F D and is at most 2048, or F; where F too is more than
    4096, its largest divisor of at most 2048. The same holds for a layer of more than 2048 elements without spatial
    extent: one slice of it would have one sample per iteration. A smaller one is one slice of F D.
    """
    if not view.numel:
        return 1
    filters, depth = filter_axes(view)
    most = _LARGEST_SLICE if view.numel > filters * depth else _PREFERRED_SLICE
    if filters * depth <= most:
        return filters * depth * _largest_divisor(view.numel // (filters * depth), filters * depth)
    if filters <= _LARGEST_SLICE:
        return filters * _largest_divisor(depth, filters)
    return _largest_divisor(filters, 1)


def _largest_divisor(number: int, unit: int) -> int:
    """Return the largest divisor n of a number with n * unit at most 2048; 1 if there is none."""
    return max((n for n in range(1, _PREFERRED_SLICE // unit + 1) if number % n == 0), default=1)


def fitted_slices(slices: int, reuse: int | None, pooled: int = 1) -> list[list[int]]:
    """List for each of B bases the slices that it is fitted on.

    slices: M, the number of slices of a layer.
    reuse: consecutive slices that a basis serves, the paper's s. None: all.
    pooled: how many of these, evenly spread, the basis is fitted on. 1, as in the paper, is the first of them.
    """
    step = reuse or max(1, slices)
    served = [range(first, min(first + step, slices)) for first in range(0, slices, step)]
    return [[run[i * len(run) // count] for i in range(count)] for run in served for count in [min(pooled, len(run))]]


def principal_axes(samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute eigenvalues (R,), largest first, and axes (K, R) of the covariance of centred samples (T, K), in float64.
    R is min(T, K) less the directions without variance. An axis's largest component is positive."""
    samples = samples.double()
    count, features = samples.shape
    small = samples @ samples.T if count < features else samples.T @ samples
    values, vectors = torch.linalg.eigh(small / count)
    values, vectors = values.flip(0).clamp_min(0), vectors.flip(1)
    keep = int((values > 1e-12 * values[:1].clamp_min(torch.finfo(torch.float64).tiny)).sum())
    values, vectors = values[:keep], vectors[:, :keep]
    axes = samples.T @ vectors / (values * count).sqrt() if count < features else vectors
    largest = axes.abs().argmax(0, keepdim=True)
    return values, axes * axes.gather(0, largest).sign()


def dimension(eigenvalues: torch.Tensor, loss_threshold: float) -> int:
    """Choose d by eq. (6): the fewest leading eigenvalues (R,) whose sum exceeds 1 - lambda of the total; at least 1.
    Lambda, `loss_threshold`, is the share of the energy that may be lost."""
    total = eigenvalues.sum()
    if total <= 0:
        return 1
    enough = eigenvalues.cumsum(0) / total > 1 - loss_threshold
    return int(enough.int().argmax()) + 1 if bool(enough.any()) else len(eigenvalues)


def fitted_samples(
    samples: torch.Tensor, mean: torch.Tensor | None, chosen: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Return the samples that each of B bases is fitted on, float64 (T, r, K), from (T, S, K) of the S slices in
    `chosen`, one after another, centred if there is a mean (M, K)."""
    centred = samples.double()
    if mean is not None:
        centred = centred - mean[[m for run in chosen for m in run]].double()
    return list(centred.split([len(run) for run in chosen], dim=1))


def stacked_axes(axes: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """Stack the leading axes (K, R) of B fits to bases, float32 (B, K, width), completed to orthonormal sets. Slices
    that never change have no axes and get the first unit vectors."""
    return torch.stack([_first_columns(of_basis, width) for of_basis in axes]).float().contiguous()


def _first_columns(axes: torch.Tensor, width: int) -> torch.Tensor:
    """Return the first `width` axes (K, width), completed to an orthonormal set."""
    if axes.shape[1] >= width:
        return axes[:, :width]
    complete = torch.linalg.qr(torch.cat([axes, torch.eye(axes.shape[0], dtype=axes.dtype)], dim=1)).Q
    return torch.cat([axes, complete[:, axes.shape[1] : width]], dim=1)


def served_rows(rows: torch.Tensor, reuse: int | None, first: int = 0) -> list[tuple[torch.Tensor, int]]:
    """Return runs of rows that share a basis, each with the basis's index; `first` is the first row's slice in its
    layer."""
    if reuse is None or not len(rows):
        return [(rows, 0)]
    last = first + len(rows)
    edges = [first, *range((first // reuse + 1) * reuse, last, reuse), last]
    return [(rows[a - first : b - first], a // reuse) for a, b in pairwise(edges)]


def sample_slices(
    samples: Mapping[str, torch.Tensor], layer: Layer, slice_size: int, axis: str = "auto"
) -> torch.Tensor:
    """Cut a layer's samples (T, *layer.shape), two or more and finite, into slices (T, M, K), K = `slice_size`."""
    if layer.name not in samples:
        raise GradlabError(f"{layer.name}: no samples to fit PCA on; there are some of: {', '.join(samples)}")
    given = samples[layer.name]
    if given.ndim < 1 or tuple(given.shape[1:]) != layer.shape:
        raise GradlabError(f"{layer.name}: samples of shape {list(given.shape)}, expected (T, {list(layer.shape)})")
    if len(given) < 2:
        raise GradlabError(f"{layer.name}: {len(given)} samples, PCA needs at least 2")
    if not bool(given.isfinite().all()):
        raise GradlabError(f"{layer.name}: samples with NaN or infinity; leave out the steps they come from")
    view = slice_view(layer, axis)
    return torch.stack([layer_slices(sample, view, slice_size)[0] for sample in given])


def check_bases(
    layer: Layer, basis: torch.Tensor | None, mean: torch.Tensor | None, reuse: int | None, whitening: bool
) -> None:
    """Refuse a basis and a mean that do not fit a layer. Both may be missing; without whitening there is no mean."""
    if basis is None and mean is None:
        return
    whose = f"codec gradiveq: layer {layer.name}"
    if basis is None or (mean is None) == whitening:
        expected = "a basis and a mean" if whitening else "a basis and no mean (whitening is off)"
        raise GradlabError(f"{whose}: expected {expected}, or neither")
    sound = basis.ndim == 3 and 1 <= basis.shape[2] <= basis.shape[1] <= layer.numel
    size = basis.shape[1] if sound else 0
    slices = layer.numel // size if sound else 0
    mean = basis.new_zeros(slices, size) if mean is None else mean
    if not {basis.dtype, mean.dtype} <= {torch.float32, torch.float64}:
        raise GradlabError(f"{whose} has a basis of {basis.dtype} and a mean of {mean.dtype}, expected float32")
    if not sound or len(basis) != len(fitted_slices(slices, reuse)) or tuple(mean.shape) != (slices, size):
        raise GradlabError(
            f"{whose} {list(layer.shape)} got a basis {list(basis.shape)} and a mean {list(mean.shape)}, expected "
            "(B, K, d) with d <= K and (M, K): M = numel // K, B = M / reuse or 1"
        )
    if not bool(basis.isfinite().all() and mean.isfinite().all()):
        raise GradlabError(f"{whose} has non-finite values in its basis or mean")
    worst = float((basis.mT @ basis - torch.eye(basis.shape[2]).to(basis)).abs().max())
    if not worst < _NOT_ORTHONORMAL:
        raise GradlabError(f"{whose}: axes of its basis are not orthonormal: a product is off by {worst:.2g}")
