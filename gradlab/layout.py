"""Layers and how their gradients lie in memory: names, shapes, flattening orders, slices.

GradiVeQ (Yu et al., NeurIPS 2018), section 1 and Fig. 3a: a convolution's gradient is flattened so that the
values of all F filters at one place are adjacent; places are then traversed along depth, width and height. PyTorch
keeps a convolution's weight as (F, D, H, W), so that order is the permutation (H, W, D, F) read row by row. A layer's
role (`gradlab.roles`) says which of its axes are filters and depth where that is not the first and the second one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import nn

from gradlab.errors import GradlabError
from gradlab.printable import can_be_written
from gradlab.roles import ROLES, STACKS, TRANSPOSED, module_role
from gradlab.workspace import Workspace

Order = Literal["native", "gradiveq"]
# Names that wrappers put into a parameter's own: DDP at the front; torch.compile, activation checkpointing and torch's
# first FSDP wherever a module is wrapped.
_DDP_NAME = "module"
_WRAPPERS_NAMES = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
# More elements than any layer has; beyond it sizes no longer fit the integers and floats they are counted in.
_MOST_DIMENSIONS = 32  # numpy and torch end at 64, and some work adds dimensions of its own
_LARGEST_LAYER = 2**48
# Elements from which on a transposition is worth two passes, and filters that pass at a time.
_IN_PASSES_FROM = 2**18
_FILTERS_AT_A_TIME = 128


@dataclass(frozen=True)
class Layer:
    """One parameter tensor: the unit that plans, traces and states name.

    name: the parameter's name in the bare model.
    shape: elements along each axis.
    role: one of `ROLES`.

    >>> layer = Layer("conv.weight", (64, 3, 3, 3), "convolution")
    >>> layer.numel, layer.dimensions
    (1728, 4)

    Raises:
        GradlabError: for a name that cannot be written as UTF-8.
    """

    name: str
    shape: tuple[int, ...]
    role: str = "other"

    def __post_init__(self) -> None:
        if not can_be_written(self.name):
            raise GradlabError(f"layer {self.name}: a name with half of a UTF-16 pair cannot be written: rename it")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def dimensions(self) -> int:
        """Number of dimensions; 1 at most of a bias, as those of an expert stack are a batch of vectors."""
        return min(len(self.shape), 1) if self.role == "bias" else len(self.shape)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "shape": list(self.shape), "role": self.role}

    @classmethod
    def from_json(cls, value: Any) -> Layer:
        """Read a layer back from plain JSON.

        Raises:
            GradlabError: for anything but a name, a list of non-negative sizes and a known role.
        """
        if not isinstance(value, dict):
            raise GradlabError(f"a layer must be an object with name, shape and role, not {str(value)[:200]}")
        name, shape, role = value.get("name"), value.get("shape"), value.get("role", "other")
        named = isinstance(name, str) and name and role in ROLES
        if not named or not isinstance(shape, list) or not _sound_sizes(shape):
            raise GradlabError(f"not a layer description: {str(value)[:200]}")
        return cls(str(name), tuple(shape), role)


@functools.lru_cache(2**16)
def layer_of(name: str, shape: torch.Size | tuple[int, ...], role: str = "other") -> Layer:
    """Return `Layer(name, shape, role)`, made once: codecs ask for their layers in every step."""
    return Layer(name, tuple(shape), role)


def _sound_sizes(shape: list[Any]) -> bool:
    sized = len(shape) <= _MOST_DIMENSIONS and all(type(n) is int and 0 <= n <= _LARGEST_LAYER for n in shape)
    return sized and math.prod(shape) <= _LARGEST_LAYER


def canonical_json(value: Any) -> str:
    """Return JSON text that is the same for equal values: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def fingerprint(layers: Iterable[Layer]) -> str:
    """Return the sha256 (hex) of names and shapes, in order. Two models with one fingerprint can share a plan."""
    rows = [[layer.name, list(layer.shape)] for layer in layers]
    return hashlib.sha256(canonical_json(rows).encode()).hexdigest()


def bare_names(names: Sequence[str]) -> list[str]:
    """Return parameters' names without the additions of DDP, torch.compile and activation checkpointing.

    DDP's `module` stands in front of all names. A model may have a `module` of its own beside other parameters.

    >>> bare_names(["module.up.weight", "module._orig_mod.module.weight"])
    ['up.weight', 'module.weight']
    """
    split = [name.split(".") for name in names]
    parts = [[*(part for part in modules if part not in _WRAPPERS_NAMES), own] for *modules, own in split]
    if len({tuple(one) for one in parts}) < len(set(names)):  # a model that calls modules so itself
        parts = split
    while parts and all(len(one) > 1 and one[0] == _DDP_NAME for one in parts):
        parts = [one[1:] for one in parts]
    return [".".join(one) for one in parts]


def names_as_in(expected: Iterable[str], names: Sequence[str]) -> list[str]:
    """Return layers' bare names as a plan has them, if it is of these layers, else as they are. Older plans and traces
    have names without any `module` in front, also where it is a part of the model."""
    wanted, before = set(expected), [_without_modules(name) for name in names]
    return before if wanted != set(names) and wanted == set(before) else list(names)


def _without_modules(name: str) -> str:
    while name.startswith(f"{_DDP_NAME}."):
        name = name.removeprefix(f"{_DDP_NAME}.")
    return name


def names_of_parameters(model: nn.Module) -> dict[int, str]:
    """Return the bare model's names of all parameters by id, in registration order. One that several modules share has
    its first name."""
    named = list(model.named_parameters())
    return {id(p): name for (_, p), name in zip(named, bare_names([name for name, _ in named]), strict=True)}


def named_layers(model: nn.Module) -> list[tuple[Layer, nn.Parameter]]:
    """List every trainable parameter of a model, also in DDP or compiled, with its layer, in registration order. One
    that several modules share appears once, under its first name."""
    pairs, seen, modules, names = [], set(), dict(model.named_modules()), names_of_parameters(model)
    for module_name, module in modules.items():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen or not parameter.requires_grad:
                continue
            seen.add(id(parameter))
            role = module_role(*_owner(modules, module_name, parameter_name), parameter)
            pairs.append((Layer(names[id(parameter)], tuple(parameter.shape), role), parameter))
    return pairs


def _owner(modules: Mapping[str, nn.Module], module_name: str, parameter_name: str) -> tuple[nn.Module, str]:
    """The module that a parameter serves and the parameter's name there, past `torch.nn.utils.parametrizations`."""
    outer, parametrized, original = module_name.rpartition("parametrizations.")
    if parametrized and original and outer.rstrip(".") in modules:
        return modules[outer.rstrip(".")], original
    return modules[module_name], parameter_name


def layers_of(model: nn.Module) -> tuple[Layer, ...]:
    """List the layers of a model, also in DDP or compiled, in registration order."""
    return tuple(layer for layer, _ in named_layers(model))


def describe_difference(expected: Sequence[Layer], actual: Sequence[Layer]) -> list[str]:
    """Return one line per difference of a model's layers from those of a plan or a trace."""
    there = {layer.name: layer for layer in actual}
    here = {layer.name: layer for layer in expected}
    lines = []
    for name, layer in here.items():
        if name not in there:
            lines.append(f"- {name} {list(layer.shape)}: expected, not in the model")
        elif there[name].shape != layer.shape:
            lines.append(f"~ {name}: expected shape {list(layer.shape)}, the model has {list(there[name].shape)}")
    lines += [
        f"+ {name} {list(layer.shape)}: in the model, not expected" for name, layer in there.items() if name not in here
    ]
    if not lines and [layer.name for layer in expected] != [layer.name for layer in actual]:
        lines.append("the same layers in another order")
    return lines


def filter_axes(layer: Layer) -> tuple[int, int]:
    """Return (F, D) of a layer or of one expert: filters and depth of a convolution's group, outputs and inputs of any
    other matrix. One-dimensional layers have D = 1."""
    if len(layer.shape) < 2:
        return (*layer.shape, 1, 1)[0], 1
    *_, depth, filters = (layer.shape[axis] for axis in _filters_last(len(layer.shape), layer.role))
    return filters, depth


@functools.lru_cache(maxsize=4096)
def filter_strides(layer: Layer) -> tuple[int, int, int, int, int] | None:
    """Return F and D, and distances in memory of filters, depth and the places of both in GradiVeQ's order; None if
    places are not equally far apart."""
    axes = _filters_last(len(layer.shape), layer.role)
    far = [math.prod(layer.shape[axis + 1 :]) for axis in range(len(layer.shape))]
    if len(axes) < 2:
        return layer.numel, 1, 1, 0, 0
    *places, depth, filters = axes
    if any(far[one] != far[after] * layer.shape[after] for one, after in pairwise(places)):
        return None
    return layer.shape[filters], layer.shape[depth], far[filters], far[depth], far[places[-1]] if places else 0


def matrices(layer: Layer) -> tuple[int, int, int]:
    """Return (B, n, m) of a layer of at least two dimensions, seen as a batch of B matrices (n, m).

    (n, ...) has B = 1 and the product of the other dimensions as m. An expert stack (B, n, m) has a matrix per expert.
    An embedding (..., m), such as the position embeddings (1, n, m), has a row per entry.
    """
    if layer.role in STACKS and len(layer.shape) > 2:
        return layer.shape[0], layer.shape[1], math.prod(layer.shape[2:])
    if layer.role == "embedding":
        return 1, math.prod(layer.shape[:-1]), layer.shape[-1]
    return 1, layer.shape[0], math.prod(layer.shape[1:])


def flatten(
    tensor: torch.Tensor, order: Order = "native", workspace: Workspace | None = None, role: str = "other"
) -> torch.Tensor:
    """Flatten a gradient to a vector (numel,). It is a view where the tensor lies in that order.

    "native" reads row by row. "gradiveq" puts the F filters' collocated values next to each other, then depth, then
    width, then height (GradiVeQ, Fig. 3a): the shape (F, D, *spatial) is read as (*spatial, D, F). A transposed layer
    has the shape (D, F, *spatial). An expert stack (E, F, D) is read expert by expert, as (E, D, F).

    workspace: memory for copies. None: new memory.
    """
    _check_order(order)
    if order == "native" or tensor.ndim < 2:
        return tensor.reshape(-1)
    axes = _filters_last(tensor.ndim, role)
    source = tensor.permute(axes)
    if source.is_contiguous():
        return source.view(-1)
    target = (workspace or Workspace()).empty(source.shape, tensor)
    if _in_passes(tensor, axes):
        _reordered(tensor, target, back=False)
    else:
        target.copy_(source)
    return target.view(-1)


def unflatten(
    vector: torch.Tensor,
    shape: Sequence[int],
    order: Order = "native",
    workspace: Workspace | None = None,
    role: str = "other",
) -> torch.Tensor:
    """Turn a vector (numel,) back into a tensor of the layer's shape, the inverse of `flatten`."""
    _check_order(order)
    axes = _filters_last(len(shape), role)
    if order == "native" or axes == tuple(range(len(axes))):
        return vector.reshape(tuple(shape))
    result = (workspace or Workspace()).empty(shape, vector)
    ordered = vector.reshape([shape[axis] for axis in axes])
    if _in_passes(result, axes) and ordered.is_contiguous():
        _reordered(result, ordered, back=True)
    else:
        result.permute(axes).copy_(ordered)
    return result


def flatten_alike(tensors: Sequence[torch.Tensor], workspace: Workspace, role: str) -> torch.Tensor:
    """Flatten small gradients of one shape and dtype in GradiVeQ's order in few calls: (tensors, numel). One tensor
    alone may be of any size, and its vector a view."""
    first, axes = tensors[0], _filters_last(tensors[0].ndim, role)
    if len(tensors) == 1:
        return flatten(first, "gradiveq", workspace, role).unsqueeze(0)
    joined = workspace.empty((len(tensors), *(first.shape[axis] for axis in axes)), first)
    native = joined.permute(0, *(1 + axes.index(axis) for axis in range(len(axes))))
    torch._foreach_copy_(list(native.unbind()), list(tensors))
    return joined.view(len(tensors), first.numel())


def unflatten_alike(vectors: torch.Tensor, shape: Sequence[int], workspace: Workspace, role: str) -> list[torch.Tensor]:
    """Turn vectors (tensors, numel) back into gradients of one shape, the inverse of `flatten_alike`."""
    count, axes = vectors.shape[0], _filters_last(len(shape), role)
    if count == 1:
        return [unflatten(vectors[0], shape, "gradiveq", workspace, role)]
    ordered = vectors.reshape(count, *(shape[axis] for axis in axes))
    if axes == tuple(range(len(axes))):
        return list(ordered.unbind())
    result = workspace.empty((count, *shape), vectors)
    result.permute(0, *(1 + axis for axis in axes)).copy_(ordered)
    return list(result.unbind())


@functools.cache
def _filters_last(dimensions: int, role: str) -> tuple[int, ...]:
    """The axes of a layer in GradiVeQ's order: (F, D, *spatial), or (D, F, *spatial), to (*spatial, D, F)."""
    if dimensions < 2:
        return tuple(range(dimensions))
    first = 1 if role in STACKS and dimensions > 2 else 0
    filters, depth = (first + 1, first) if role in TRANSPOSED else (first, first + 1)
    return (*(axis for axis in range(dimensions) if axis not in (filters, depth)), depth, filters)


def _reordered(native: torch.Tensor, other: torch.Tensor, back: bool) -> None:
    """Copy a convolution (F, D, *spatial), contiguous, to the order (*spatial, D, F), or back, which writes `native`.

    A large transposition touches a new page of memory with every element. torch has a fast one of whole matrices alone,
    and rows of filters are copied fast: by way of (D, *spatial, F), some filters at a time so that they stay in the
    cache, a layer of 512 x 512 x 3 x 3 takes 3.4 ms each way in place of 13 and 22.
    """
    filters, depth = native.shape[:2]
    rows, planes = native.view(filters, -1), other.view(-1, depth, filters)
    between = native.new_empty(native.numel() // filters, min(_FILTERS_AT_A_TIME, filters))
    for first in range(0, filters, _FILTERS_AT_A_TIME):
        here, there = rows[first : first + _FILTERS_AT_A_TIME], planes[:, :, first : first + _FILTERS_AT_A_TIME]
        turned = between.view(-1)[: here.numel()].view(-1, len(here))
        places = turned.view(depth, -1, len(here)).transpose(0, 1)
        if back:
            places.copy_(there)
            here.copy_(turned.t())
        else:
            turned.copy_(here.t())
            there.copy_(places)


def _in_passes(native: torch.Tensor, axes: Sequence[int]) -> bool:
    """Return whether `_reordered` serves a tensor whose axes are to be read in this order, and is faster."""
    large = native.numel() >= _IN_PASSES_FROM and native.is_cpu
    return large and tuple(axes[-2:]) == (1, 0) and native.is_contiguous()


def _check_order(order: str) -> None:
    if order not in ("native", "gradiveq"):
        raise GradlabError(f"flattening order {order!r}: expected 'native' or 'gradiveq'")


def split_slices(vector: torch.Tensor, slice_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut a vector into whole slices (M, K), K elements each, and the tail (numel - M K,) that fills no slice."""
    if slice_size < 1:
        raise GradlabError(f"slice size {slice_size}: expected at least 1")
    whole = vector.numel() // slice_size
    return vector[: whole * slice_size].reshape(whole, slice_size), vector[whole * slice_size :]
