"""Loss of a linear codec on averaged gradients it was not fitted on, as a curve over the age of the fit.

The loss is GradiVeQ's (Fig. 5), ||ghat - g||^2 / ||g||^2 of the averaged gradient g. ghat comes from the codec's own
exchange, run in lockstep with one rank that holds the average. A codec that commutes with averaging (eq. 1) gives the
same ghat for N ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from gradlab.analysis.gradients import mean_unscaled
from gradlab.analysis.parallel import share_out
from gradlab.codec import Batch, Codec, Context, Tensors, exchange_group
from gradlab.codec.measures import squared_norm
from gradlab.codec.wrapper import innermost
from gradlab.collectives import run_lockstep
from gradlab.errors import GradlabError
from gradlab.jsonable import Jsonable
from gradlab.layout import Layer
from gradlab.learning.slice_pca import layer_slices
from gradlab.plan import Plan
from gradlab.progress import Progress

if TYPE_CHECKING:
    from gradlab.trace import Trace, TraceSource

# Averaged gradients held at a time: float32 values.
_BLOCK_VALUES = 2**22


@dataclass(frozen=True)
class AgeCurve(Jsonable):
    """Loss over everything held out, and by bin of age, (b,); None without a finite step."""

    loss: float | None
    loss_by_age: list[float | None]


@dataclass(frozen=True)
class HoldOut(AgeCurve):
    """The pooled curve, and those of single groups; ages: first and last age of each bin; steps: held out in each."""

    ages: list[tuple[int, int]]
    steps: list[int]
    groups: dict[str, AgeCurve]


def losses_by_slice(
    codec: Codec, layer: Layer, averaged: torch.Tensor, slice_size: int, view: Layer | None = None
) -> np.ndarray:
    """Sum squared error and squared norm of each slice, (M, 2), over averaged gradients (T, *shape)."""
    rows = np.zeros((layer.numel // slice_size, 2))
    for gradient in averaged:
        approximate = _exchange_alone(codec, {layer.name: gradient}, [layer])[layer.name]
        pair = (approximate - gradient, gradient)
        slices = [layer_slices(tensor, view or layer, slice_size)[0].double() for tensor in pair]
        rows += torch.stack([part.square().sum(1) for part in slices], dim=1).numpy()
    return rows


def losses_by_step(codec: Codec, averaged: Mapping[str, torch.Tensor], layers: Sequence[Layer]) -> np.ndarray:
    """(T, 2): squared error and squared norm of each of T averaged gradients; NaN where one is not finite."""
    count = len(next(iter(averaged.values())))
    rows = np.empty((count, 2))
    for t in range(count):
        gradients = {name: stacked[t] for name, stacked in averaged.items()}
        approximate = _exchange_alone(codec, gradients, layers)
        rows[t, 0] = sum(squared_norm(approximate[name] - gradient) for name, gradient in gradients.items())
        rows[t, 1] = sum(squared_norm(gradient) for gradient in gradients.values())
    rows[~np.isfinite(rows).all(1)] = np.nan
    return rows


def _exchange_alone(codec: Codec, gradients: Tensors, layers: Sequence[Layer]) -> Tensors:
    coroutine = exchange_group(codec, Batch.of(gradients, layers), {}, Context(rank=0, world_size=1, iteration=0))
    return run_lockstep([coroutine])[0].value.mean


def age_bins(ages: np.ndarray, most: int = 8) -> list[tuple[int, int]]:
    """At most `most` ranges [first, last] of ages, ever wider, because drift shows early; the first: a twentieth."""
    youngest, end = int(ages.min()), int(ages.max()) + 1
    later = np.geomspace(youngest + max(1.0, (end - youngest) / 20), end, most)
    edges = np.unique(np.concatenate([[youngest], later]).round().astype(int))
    return [(int(first), int(last) - 1) for first, last in pairwise(edges)]


def holdouts_by_age(
    trace: Trace,
    plans: Sequence[Plan],
    *,
    start: int,
    workers: int = 1,
    progress: Progress | None = None,
) -> list[HoldOut]:
    """Measure the loss of linear groups of plans from a position on, by age of the fit; start has age 1."""
    stop = len(trace.steps)
    if not 0 < start < stop:
        raise GradlabError(f"{trace.path}: nothing to hold out from position {start} of {stop} on")
    steps = np.asarray(trace.steps)
    ages = steps[start:] - steps[start - 1]
    groups = plans[0].compressed_groups
    calls = [
        (trace.source, [_linear(plan, at) for plan in plans], group.layers, start, stop)
        for at, group in enumerate(groups)
    ]
    sizes = [sum(layer.numel for layer in plans[0].members(group)) for group in groups]
    trace.close()  # HDF5 keeps what is read of a file until nobody has it open; reading on opens it again
    losses = share_out(_group_losses, calls, workers=workers, what="hold out", sizes=sizes, progress=progress)
    return [
        _by_age({group.name: rows[number] for group, rows in zip(groups, losses, strict=True)}, ages)
        for number in range(len(plans))
    ]


def _linear(plan: Plan, number: int) -> Codec:
    """The codec of a plan's compressed group, which must be linear or fitted."""
    group = plan.compressed_groups[number]
    codec = innermost(plan.build(group))
    if not (codec.learned or (codec.guarantees(plan.members(group)).linear and not codec.about.learns)):
        raise GradlabError(f"group {group.name}: codec {group.codec} is not linear; replay the plan instead")
    return codec


def _by_age(rows: Mapping[str, np.ndarray], ages: np.ndarray) -> HoldOut:
    """The curves of groups' rows (T, 2)."""
    bins = age_bins(ages)
    pooled = np.sum(list(rows.values()), axis=0) if rows else np.full((len(ages), 2), np.nan)
    return HoldOut(
        **vars(_curve(pooled, ages, bins)),
        ages=bins,
        steps=[int(((ages >= first) & (ages <= last)).sum()) for first, last in bins],
        groups={name: _curve(values, ages, bins) for name, values in rows.items()},
    )


def _group_losses(
    source: TraceSource, codecs: Sequence[Codec], names: tuple[str, ...], start: int, stop: int
) -> list[np.ndarray]:
    """`losses_by_step` of a group under each of several codecs: (T, 2) each."""
    parts: list[list[np.ndarray]] = [[] for _ in codecs]
    with source.open(names) as trace:
        layers = [trace.layer(name) for name in names]
        length = max(1, _BLOCK_VALUES // max(1, sum(layer.numel for layer in layers)))
        for first in range(start, stop, length):
            last = min(first + length, stop)
            averaged = {
                layer.name: torch.from_numpy(mean_unscaled(trace, layer.name, first, last)).reshape(-1, *layer.shape)
                for layer in layers
            }
            for codec, rows in zip(codecs, parts, strict=True):
                rows.append(losses_by_step(codec, averaged, layers))
    return [np.concatenate(rows) for rows in parts]


def _curve(rows: np.ndarray, ages: np.ndarray, bins: list[tuple[int, int]]) -> AgeCurve:
    return AgeCurve(_ratio(rows), [_ratio(rows[(ages >= first) & (ages <= last)]) for first, last in bins])


def _ratio(rows: np.ndarray) -> float | None:
    if not np.isfinite(rows).any():
        return None
    error, norm = np.nansum(rows, axis=0)
    return float(error / norm) if norm > 0 else 0.0


def random_basis_plan(plan: Plan, seed: int) -> Plan:
    """The plan with random orthonormal bases of the same shapes and zero means: a fit that saw no data."""
    generator = torch.Generator().manual_seed(seed)
    learned = {
        group: {
            key: _random_like(t, generator) if key.endswith("/basis") else _without_mean(key, t)
            for key, t in kept.items()
        }
        for group, kept in plan.learned.items()
    }
    return replace(plan, learned=learned)


def _without_mean(key: str, tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor) if key.endswith("/mean") else tensor


def _random_like(basis: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    gaussian = torch.randn(basis.shape, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(gaussian).Q.to(basis.dtype).contiguous()
